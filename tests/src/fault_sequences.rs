//! Random faults against a whole Model: an API server, two operators, and three machines, each a network of its own with an agent, a disk
//! with its own copy of the model's file, and a clock. Meanwhile a client asks as a user of the Model's Service does.
//!
//! A sequence of faults follows from a seed ([`sequence`]); only the time that each step takes is left to chance. [`Stage`] is made once for
//! many sequences, and a Model for each. What must hold of each: [`Report::problems`].
//!
//! Takes root, networks, and Debian's iptables and libfaketime. What this does not do: delaying packets (netem), which takes a module that many
//! kernels lack; a slow link queues them up instead. And a clock that steps for a whole machine: agents and operators see the wrong
//! time, members do not.

mod client;
mod faults;
mod machine;
mod observed;
mod sequence;
mod stage;

pub use sequence::{Fault, Kind, MACHINES, Sequence};
pub use stage::{Report, Stage, shrunk, with_networks};
