//! How often a request that failed is tried again, and how long before that.
//!
//! Decides: pauses that double, or what the server asks for; an end where nothing new comes. Refuses: to repeat what cannot get better.

use std::time::Duration;

use crate::remote_error::RemoteError;

/// When to try again, and when to stop.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// Tries in a row that bring next to nothing ([`SLOWEST_BYTES`]), before giving up.
    pub attempts: u32,
    pub first_pause: Duration,
    pub longest_pause: Duration,
    /// The longest that a server can make its clients wait.
    pub longest_asked_pause: Duration,
    /// An answer of which next to nothing comes in this long ([`SLOWEST_BYTES`]) is broken off.
    pub patience: Duration,
}

/// A modem brings a hundred times as much in a minute, the time that clients have patience by default.
pub(crate) const SLOWEST_BYTES: u64 = 4 << 10;

impl Default for Retry {
    /// About two minutes of a dead line.
    fn default() -> Self {
        Retry {
            attempts: 9,
            first_pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(30),
            longest_asked_pause: Duration::from_secs(15 * 60),
            patience: Duration::from_secs(60),
        }
    }
}

/// The tries of one request.
pub(crate) struct Attempts {
    retry: Retry,
    failed: u32,
}

impl Attempts {
    pub(crate) fn new(retry: Retry) -> Self {
        Attempts { retry, failed: 0 }
    }

    /// The last try brought so much. If that is more than next to nothing, the next failure counts as the first.
    pub(crate) fn brought(&mut self, bytes: u64) {
        if bytes >= SLOWEST_BYTES {
            self.failed = 0;
        }
    }

    /// Waits until the request may be tried again; returns `error` if it must not be.
    pub(crate) async fn failed(&mut self, error: RemoteError) -> Result<(), RemoteError> {
        // A clock is not set while these tries last; whoever waits should hear of it at once.
        if !error.is_transient() || matches!(error, RemoteError::OutOfDate { .. }) {
            return Err(error);
        }
        self.failed += 1;
        if self.failed >= self.retry.attempts {
            return Err(RemoteError::GaveUp {
                attempts: self.failed,
                source: Box::new(error),
            });
        }
        let pause = match error.asked_pause() {
            Some(asked) => asked.min(self.retry.longest_asked_pause),
            None => pause(self.retry, self.failed),
        };
        tracing::warn!(%error, ?pause, "trying again");
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// The pause after `failed` failures in a row.
fn pause(retry: Retry, failed: u32) -> Duration {
    let factor = 2u32.saturating_pow(failed.saturating_sub(1));
    retry
        .first_pause
        .saturating_mul(factor)
        .min(retry.longest_pause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let retry = Retry::default();
        let seconds: Vec<f32> = (1..9)
            .map(|failed| pause(retry, failed).as_secs_f32())
            .collect();
        assert_eq!(seconds, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]);
        assert_eq!(pause(retry, u32::MAX), retry.longest_pause);
    }
}
