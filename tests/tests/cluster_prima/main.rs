//! prima on a real cluster of three nodes: `helm install`, `kubectl apply`, and the model answers; and what becomes of it when a node,
//! a link, a pod, the hub or the disk fails. Each test has a cluster of its own. The seconds that things took are printed.

mod answers;
mod downloads;
mod faults;
mod harness;
mod strangers;
mod upgrades;
