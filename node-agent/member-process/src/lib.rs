//! A member of a ring as a process of its own, `prima-node-agent serve`, as seen by those who start it: an agent in a cluster, and
//! `prima run`. A member on a machine that is lent looks the same: its process here is `prima-node-agent borrow run`.
//!
//! Decides how it is started, followed, asked and ended. Refuses to start it again, and to judge what it says: its owner does that.

mod address;
mod borrowed;
mod health;
mod lines;
mod process;

pub use address::{LENDER_PORT, lender_address, on_all_addresses, reachable_address};
pub use borrowed::{Borrowed, LentPlace, OwnPlace, Place};
pub use health::{HEALTH_DEADLINE, Health, health, health_within, requests};
pub use process::{HANGS_AFTER, Launch, Lent, MemberProcess, Serve, StartError, end};

use std::time::Duration;

/// The beginning of the stdout line that says that a member has its layers open and waits for its neighbours.
pub const JOINED: &str = "joined the ring";
/// The stdout line by which a member that is asked to says that it is alive, and how often.
pub const ALIVE: &str = "alive";
pub const ALIVE_INTERVAL: Duration = Duration::from_secs(4);

/// The beginning of the stdout line by which rank 0 says how many answers it cut off, because they had not ended when it had to.
const CUT_OFF: &str = "answers cut off: ";

/// That line.
pub fn cut_off_line(answers: usize) -> String {
    format!("{CUT_OFF}{answers}")
}

/// How many answers this line of a member's says were cut off; `None` if it is another line.
pub fn cut_off(line: &str) -> Option<u64> {
    line.strip_prefix(CUT_OFF)?.parse().ok()
}

/// The beginning of the stdout line by which a member says that it ends because of its machine's GPU, and what became of that.
const WITHOUT_GPU: &str = "without its GPU: ";

/// That line.
pub fn without_gpu_line(why: &str) -> String {
    format!("{WITHOUT_GPU}{why}")
}

/// What became of the GPU, as this line of a member's says; `None` if it is another line.
pub fn without_gpu(line: &str) -> Option<&str> {
    line.strip_prefix(WITHOUT_GPU)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_are_cut_off_are_told_in_a_line() {
        assert_eq!(cut_off(&cut_off_line(3)), Some(3));
        assert_eq!(cut_off("INFO answers cut off: 3"), None);
    }

    #[test]
    fn what_became_of_the_gpu_is_told_in_a_line() {
        assert_eq!(without_gpu(&without_gpu_line("it hangs")), Some("it hangs"));
        assert_eq!(without_gpu("error: without its GPU: it hangs"), None);
    }
}
