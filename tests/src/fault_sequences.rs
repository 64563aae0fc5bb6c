//! Random faults against a whole Model. Meanwhile clients ask as users of the Model's Service do.
//!
//! A sequence of faults follows from a seed ([`sequence`]); only the time that each step takes is left to chance. It is tried on a [`Stage`], which
//! is made once for many sequences, and a Model for each. What must hold of each: [`Report::problems`]. There are two kinds of stages:
//!
//! - [`Machines`]: an API server, two operators, and three machines, each a network of its own with an agent, a disk with its own copy of the
//!   model's file, and a clock. Takes root, networks, loop devices and Debian's iptables. No clock is wrong for a whole machine: agents and
//!   operators see the wrong time (`clock.c`), members and the API server do not.
//! - [`Nodes`]: a [cluster](crate::cluster) of three nodes with prima as the chart installs it, all of which can be switched off. Of their disks only
//!   the model's file fails, and their clocks do not.
//!
//! No packets are delayed, since that takes a module that many kernels lack (netem); a slow link queues them up instead.
//!
//! Each fault of a sequence is lifted. Beside that, two machines can be kept apart for as long as the Model may take to answer all the same
//! ([`Stage::keep_apart`]).
//!
//! A false word that the Model answers should be taken back within 5 s. How long it may take at worst, also on a busy machine, and why, is in
//! `Kind::unseen`; how it is measured, in `Observed::longest_false_ready`.

mod apart;
mod client;
mod faults;
mod machine;
mod machines;
mod nodes;
mod observed;
mod sequence;
mod stage;

pub use apart::KeptApart;
pub use client::complete;
pub use machines::{Machines, with_networks};
pub use nodes::Nodes;
pub use sequence::{Fault, Kind, MACHINES, ON_NETWORKS, ON_NODES, Sequence, Setting};
pub use stage::{FALSE_READY_GOAL, HEALING_GOAL, Place, Report, Roles, Stage, shrunk};
