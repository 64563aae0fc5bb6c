//! How long to wait: pauses that double while something fails, each with a little randomness, so that the agents of a cluster that started
//! together do not ask at the same time for ever.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// The backoff after failures in a row.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            failures: 0,
        }
    }

    /// The pause after one more failure.
    pub fn next(&mut self) -> Duration {
        let factor = 2_u32.saturating_pow(self.failures);
        self.failures = self.failures.saturating_add(1);
        jittered(self.first.saturating_mul(factor).min(self.longest))
    }

    /// It went well: the next failure counts as the first.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

/// `about`, give or take a tenth.
pub fn jittered(about: Duration) -> Duration {
    // The standard library's only source of randomness: keys of hash maps.
    let chance = RandomState::new().hash_one(()) % 201;
    about * (900 + chance as u32) / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew() {
        let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(20));
        let about = |pause: Duration, seconds: u64| {
            let tenth = Duration::from_millis(100 * seconds + 10);
            pause.abs_diff(Duration::from_secs(seconds)) <= tenth
        };
        for expected in [2, 4, 8, 16, 20, 20] {
            let pause = backoff.next();
            assert!(about(pause, expected), "{pause:?}, expected {expected} s");
        }
        backoff.reset();
        assert!(about(backoff.next(), 2));
    }
}
