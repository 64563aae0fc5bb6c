//! What clients saw of a Model while things went wrong, and what that says of the Model's word.

use std::iter;
use std::time::Duration;

use crate::stopwatch::without_waits;

/// Whoever looks every second may not see that a word was taken back for less, so it does not count.
const FLAP: Duration = Duration::from_secs(1);

/// What clients saw; all times are since the sequence's begin.
#[derive(Debug, Default)]
pub struct Observed {
    /// When the Model began or ceased to say that it answers.
    pub said: Vec<(Duration, bool)>,
    /// Requests of all clients.
    pub asked: Vec<Asked>,
    pub until: Duration,
    /// By when programs had waited for a processor for how long, as it was noted now and then. Where nothing was noted, none waited.
    pub waited: Vec<(Duration, Duration)>,
}

#[derive(Debug)]
pub struct Asked {
    /// When it began.
    pub at: Duration,
    /// When something came: each part of its answer, and the end of it.
    pub came: Vec<Duration>,
    /// When the client gave it up, and why.
    pub given_up: Option<(Duration, String)>,
}

impl Asked {
    /// After this, nothing came.
    pub fn last_heard(&self) -> Duration {
        self.came.last().copied().unwrap_or(self.at)
    }

    /// From when and until when its client waited for something: for each part of its answer, or for what did not come. (What came of an answer that
    /// broke off was no answer, but nobody waited in vain for it.)
    fn waits(&self) -> Vec<(Duration, Duration)> {
        match &self.given_up {
            None => {
                let begins = iter::once(&self.at).chain(&self.came);
                begins.copied().zip(self.came.iter().copied()).collect()
            }
            Some((end, _)) => vec![(self.last_heard(), *end)],
        }
    }
}

impl Observed {
    /// The longest time in which the Model said that it answers, a client waited, and nobody heard anything of an answer that came to its end: since when,
    /// and for how long, [without](without_waits) what programs waited for a processor meanwhile.
    ///
    /// It counts whether or not the client heard something in the end. Who waits cannot tell a ring that is silent for some seconds and goes on from
    /// one that is broken, and a first token takes a small part of a second here. That one waits while others are answered does not count: it is the
    /// network's doing, or chance. So what this can tell apart is as short as the time after which another client asks.
    pub fn longest_false_ready(&self) -> (Duration, Duration) {
        let answered = self.asked.iter().filter(|asked| asked.given_up.is_none());
        let mut heard: Vec<Duration> = answered.flat_map(|asked| asked.came.clone()).collect();
        heard.sort();
        let said = self.said();
        let silence = |from: Duration| {
            let next = heard.partition_point(|at| *at <= from);
            let end = heard.get(next).copied().unwrap_or(self.until);
            (from, self.longest_said(&said, from, end))
        };
        let waits = self.asked.iter().flat_map(Asked::waits);
        let silences = waits.flat_map(|(from, until)| {
            // What others hear meanwhile ends one silence, and begins another.
            let first = heard.partition_point(|at| *at <= from);
            let others = heard[first..].iter().take_while(move |at| **at < until);
            iter::once(from).chain(others.copied())
        });
        let silences = silences.map(silence);
        silences
            .max_by_key(|(_, lasted)| *lasted)
            .unwrap_or_default()
    }

    /// From when until when it said at a time that it answers.
    fn said(&self) -> Vec<(Duration, Duration)> {
        let ends = self.said.iter().skip(1).map(|(at, _)| *at);
        let said = self.said.iter().zip(ends.chain([self.until]));
        let mut times: Vec<(Duration, Duration)> = Vec::new();
        for ((begin, _), end) in said.filter(|((_, ready), _)| *ready) {
            match times.last_mut() {
                Some(last) if begin.saturating_sub(last.1) < FLAP => last.1 = end,
                _ => times.push((*begin, end)),
            }
        }
        times
    }

    /// For how long at a time it was said between these two.
    fn longest_said(
        &self,
        said: &[(Duration, Duration)],
        from: Duration,
        to: Duration,
    ) -> Duration {
        let within = |(begin, end): &(Duration, Duration)| {
            let (begin, end) = (*begin.max(&from), *end.min(&to));
            let waited = self.waited_by(end).saturating_sub(self.waited_by(begin));
            without_waits(end.saturating_sub(begin), waited)
        };
        said.iter().map(within).max().unwrap_or_default()
    }

    /// For how long programs had waited at this time. Between two notes, evenly.
    fn waited_by(&self, at: Duration) -> Duration {
        let next = self.waited.partition_point(|(noted, _)| *noted <= at);
        let before = next.checked_sub(1).map(|last| self.waited[last]);
        let (noted, waited) = before.unwrap_or_default();
        let Some((next_noted, next_waited)) = self.waited.get(next) else {
            return waited;
        };
        let part = (at - noted).div_duration_f64(*next_noted - noted);
        // Those that have ended meanwhile do not count any more.
        waited + next_waited.saturating_sub(waited).mul_f64(part)
    }

    pub fn failed(&self) -> usize {
        let failed = self.asked.iter().filter(|asked| asked.given_up.is_some());
        failed.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In tenths of a second.
    fn tenths(time: u64) -> Duration {
        Duration::from_millis(100 * time)
    }

    /// A request that was answered: when it began, and when something came.
    fn answered(at: u64, came: &[u64]) -> Asked {
        Asked {
            at: tenths(at),
            came: came.iter().copied().map(tenths).collect(),
            given_up: None,
        }
    }

    /// One that was given up at `end`.
    fn failed(at: u64, came: &[u64], end: u64) -> Asked {
        Asked {
            given_up: Some((tenths(end), "no answer".to_owned())),
            ..answered(at, came)
        }
    }

    /// Within 20 s.
    fn false_ready(said: &[(u64, bool)], asked: Vec<Asked>) -> Duration {
        let said = said.iter().map(|(at, ready)| (tenths(*at), *ready));
        let observed = Observed {
            said: said.collect(),
            asked,
            until: tenths(200),
            waited: Vec::new(),
        };
        observed.longest_false_ready().1
    }

    #[test]
    fn silence_lasts_until_anybody_hears_something() {
        let cases = [
            (vec![answered(0, &[2, 3, 4]), answered(5, &[7, 8])], 2),
            // For 9.9 s, whoever asked.
            (
                vec![
                    answered(0, &[1, 2]),
                    failed(3, &[], 53),
                    failed(54, &[], 104),
                    answered(13, &[102, 103]),
                    answered(105, &[106]),
                ],
                99,
            ),
            // For 4.9 s.
            (vec![failed(1, &[], 51), answered(12, &[50, 51])], 49),
            // One waits in vain, another hears something after a second; and then nobody does.
            (vec![failed(1, &[], 51), answered(11, &[11, 12])], 188),
            (
                vec![
                    failed(1, &[], 51),
                    answered(10, &[11, 12]),
                    answered(20, &[21, 22]),
                    answered(30, &[31, 40, 49, 52]),
                ],
                10,
            ),
            // Nothing failed, but nobody heard anything for 3 s.
            (vec![answered(0, &[1, 31, 32])], 30),
            // What came of an answer that broke off.
            (vec![failed(0, &[30, 31], 35), answered(36, &[40])], 9),
            (vec![failed(0, &[], 1), answered(40, &[41])], 41),
            (vec![answered(0, &[1]), failed(50, &[], 100)], 150),
            // Nobody waits.
            (vec![answered(0, &[1]), answered(90, &[91])], 1),
            (vec![], 0),
        ];
        for (asked, expected) in cases {
            let story = format!("{asked:?}");
            let found = false_ready(&[(0, true)], asked);
            assert_eq!(found, tenths(expected), "{story}");
        }
    }

    #[test]
    fn what_programs_waited_meanwhile_does_not_count() {
        // In tenths of a second: when, and for how long by then. All is silent from 5 s to 15 s.
        let cases = [
            (&[(0, 0), (50, 20), (150, 50), (200, 90)][..], 70),
            (&[], 100),
            // Before and after it.
            (&[(0, 0), (50, 40), (150, 40), (200, 80)], 100),
            // As much as fell into it of what was noted later.
            (&[(0, 0), (200, 80)], 60),
            (&[(30, 0), (70, 20), (130, 20), (170, 40)], 80),
            // Whoever had waited for 4 s has ended.
            (&[(0, 0), (50, 40), (100, 0), (150, 10)], 100),
        ];
        let false_ready = |waited: &[(u64, u64)]| {
            let waited = waited.iter().map(|(at, by)| (tenths(*at), tenths(*by)));
            let observed = Observed {
                said: vec![(tenths(0), true)],
                asked: vec![answered(50, &[150])],
                until: tenths(200),
                waited: waited.collect(),
            };
            observed.longest_false_ready()
        };
        for (waited, expected) in cases {
            let expected = (tenths(50), tenths(expected));
            assert_eq!(false_ready(waited), expected, "{waited:?}");
        }
        // A sixth counts, however long they waited.
        let (_, least) = false_ready(&[(0, 0), (150, 5000)]);
        assert_eq!(least, tenths(100) / 6);
    }

    #[test]
    fn only_what_is_said_is_false() {
        let silent = || vec![failed(20, &[], 70), failed(71, &[], 121)];
        let cases = [
            (&[(0, true)][..], 180),
            (&[(0, true), (30, false)], 10),
            (&[(0, false)], 0),
            (&[], 0),
            // Taken back in time, and said again too early.
            (&[(0, true), (30, false), (60, true), (75, false)], 15),
            // Taken back so shortly that nobody may have seen it.
            (&[(0, true), (50, false), (55, true), (80, false)], 60),
            (&[(0, true), (50, false), (60, true), (80, false)], 30),
        ];
        for (said, expected) in cases {
            assert_eq!(false_ready(said, silent()), tenths(expected), "{said:?}");
        }
    }
}
