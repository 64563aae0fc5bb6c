//! A member of a ring as a process of its own, `prima-node-agent serve`, as seen by those who start it: an agent in a cluster, and
//! `prima run`. A member on a machine that is lent looks the same: its process here is `prima-node-agent borrow run`.
//!
//! Decides how it is started, followed, asked and ended. Refuses to start it again, and to judge what it says: its owner does that.

mod address;
mod borrowed;
mod health;
mod lines;
mod process;

pub use address::{LENDER_PORT, lender_address, reachable_address};
pub use borrowed::{Borrowed, LentPlace, OwnPlace, Place};
pub use health::{HEALTH_DEADLINE, Health, health, health_within, requests};
pub use process::{HANGS_AFTER, Launch, Lent, MemberProcess, Serve, StartError, end};

use std::time::Duration;

/// The beginning of the stdout line that says that a member has its layers open and waits for its neighbours.
pub const JOINED: &str = "joined the ring";
/// The stdout line by which a member that is asked to says that it is alive, and how often.
pub const ALIVE: &str = "alive";
pub const ALIVE_INTERVAL: Duration = Duration::from_secs(4);
