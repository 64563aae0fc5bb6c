//! A member of a ring as a process of its own, `prima-node-agent serve`, as seen by those who start it: an agent in a cluster, and
//! `prima run` on one machine.
//!
//! Decides how it is started, followed, asked and ended. Refuses to start it again, and to judge what it says: its owner does that.

mod health;
mod lines;
mod process;

pub use health::{Health, health};
pub use process::{MemberProcess, Serve, StartError, end};

/// The beginning of the stdout line that says that a member has its layers open and waits for its neighbours.
pub const JOINED: &str = "joined the ring";
