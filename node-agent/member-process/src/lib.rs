//! A member of a ring as a process of its own, `prima-node-agent serve`, as those see it who start it: an agent in a cluster, and
//! `prima run` on one machine.
//!
//! Decides how it is started, followed, asked and ended. Refuses to start it again, and to judge what it says: that is its owner's part.

mod health;
mod lines;
mod process;

pub use health::{Health, health};
pub use process::{MemberProcess, Serve, StartError, end};

/// How the line on stdout begins that tells that a member has its layers open and waits for its neighbours.
pub const JOINED: &str = "joined the ring";
