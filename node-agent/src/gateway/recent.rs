//! The median of the last times: how fast the ring is now, whatever it was an hour ago. Knows no units and no labels.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The last times, at most [`KEPT`] of them.
#[derive(Debug, Default)]
pub struct Recent(Mutex<VecDeque<Duration>>);

const KEPT: usize = 32;

impl Recent {
    pub fn add(&self, time: Duration) {
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() == KEPT {
            times.pop_front();
        }
        times.push_back(time);
    }

    /// `None` before the first.
    pub fn median(&self) -> Option<Duration> {
        let mut times: Vec<Duration> = {
            let times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            times.iter().copied().collect()
        };
        times.sort_unstable();
        times.get(times.len() / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_the_last_ones_counts() {
        let recent = Recent::default();
        assert_eq!(recent.median(), None);
        for second in [9, 1, 2] {
            recent.add(Duration::from_secs(second));
        }
        assert_eq!(recent.median(), Some(Duration::from_secs(2)));
        for _ in 0..KEPT {
            recent.add(Duration::from_secs(5));
        }
        assert_eq!(recent.median(), Some(Duration::from_secs(5)));
    }
}
