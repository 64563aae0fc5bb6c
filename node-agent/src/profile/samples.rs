//! Repeated timing of one piece of work. Decides how often: at least three times, then until a budget of time is spent; and
//! that the median counts.

use std::convert::Infallible;
use std::time::{Duration, Instant};

/// Seconds of each run, in ascending order; never empty.
pub struct RunTimes(Vec<f64>);

const RUNS: usize = 3;
/// A noisy machine needs more than three runs, and a fast one has done many by then.
const BUDGET: Duration = Duration::from_millis(80);

impl RunTimes {
    /// Times `work` again and again, after one run that does not count.
    pub fn take(work: impl FnMut()) -> RunTimes {
        RunTimes::prepared(|| {}, work)
    }

    /// As [`take`](Self::take), with `prepare` untimed before each run.
    pub fn prepared(prepare: impl FnMut(), mut work: impl FnMut()) -> RunTimes {
        let Ok(samples) = RunTimes::time(prepare, || {
            work();
            Ok::<_, Infallible>(())
        });
        samples
    }

    /// As [`take`](Self::take), for work that may fail; a failure ends it.
    pub fn attempted<E>(work: impl FnMut() -> Result<(), E>) -> Result<RunTimes, E> {
        RunTimes::time(|| {}, work)
    }

    fn time<E>(
        mut prepare: impl FnMut(),
        mut work: impl FnMut() -> Result<(), E>,
    ) -> Result<RunTimes, E> {
        prepare();
        work()?;
        let begun = Instant::now();
        let mut seconds = Vec::new();
        while seconds.len() < RUNS || begun.elapsed() < BUDGET {
            prepare();
            let start = Instant::now();
            work()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(RunTimes::from(seconds))
    }

    pub fn median(&self) -> f64 {
        // A clock too coarse to see the work must not make a rate infinite.
        self.0[self.0.len() / 2].max(1e-9)
    }

    /// Longest minus shortest run, in percent of the median.
    pub fn spread_percent(&self) -> f64 {
        (self.0[self.0.len() - 1] - self.0[0]) / self.median() * 100.0
    }
}

impl From<Vec<f64>> for RunTimes {
    /// Of at least one run.
    fn from(mut seconds: Vec<f64>) -> Self {
        if seconds.is_empty() {
            seconds.push(0.0);
        }
        seconds.sort_by(f64::total_cmp);
        RunTimes(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_ignores_an_outlier_and_the_spread_shows_it() {
        let samples = RunTimes::from(vec![9.0, 2.0, 1.0]);
        assert_eq!((samples.median(), samples.spread_percent()), (2.0, 400.0));
    }

    #[test]
    fn slow_work_runs_three_times_after_one_that_does_not_count() {
        let (mut prepared, mut runs) = (0, 0);
        RunTimes::prepared(
            || prepared += 1,
            || {
                runs += 1;
                std::thread::sleep(BUDGET);
            },
        );
        assert_eq!((prepared, runs), (RUNS + 1, RUNS + 1));
    }
}
