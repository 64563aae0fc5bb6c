//! Random faults against a whole Model: an API server, two operators, and three machines, each a network of its own with an agent, a disk
//! with its own copy of the model's file, and a clock. Meanwhile a client asks as a user of the Model's Service does.
//!
//! A sequence of faults follows from a seed ([`sequence`]); only the time that each step takes is left to chance. [`Stage`] is made once for
//! many sequences, and a Model for each. What must hold of each: [`Report::problems`].
//!
//! Takes root, networks, loop devices and Debian's iptables. No packets are delayed, since that takes a module that many kernels lack (netem); a
//! slow link queues them up instead. No clock is wrong for a whole machine: agents and operators see the wrong time (`clock.c`), members
//! and the API server do not.
//!
//! A false word that the Model answers should be taken back within 5 s. How long it may take at worst, also on a busy machine, and why, is in
//! `Kind::unseen`.

mod client;
mod faults;
mod machine;
mod observed;
mod sequence;
mod stage;

pub use sequence::{Fault, Kind, MACHINES, Sequence};
pub use stage::{Report, Stage, shrunk, with_networks};
