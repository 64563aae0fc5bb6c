//! What a client saw of a Model while things went wrong, and what that says of the Model's word.

use std::time::Duration;

/// What one client saw; all times are since the sequence's begin.
#[derive(Debug, Default)]
pub struct Observed {
    /// When the Model began or ceased to say that it answers.
    pub said: Vec<(Duration, bool)>,
    /// Requests, one after the other.
    pub asked: Vec<Asked>,
    pub until: Duration,
}

#[derive(Debug)]
pub struct Asked {
    /// When it began. Without an answer: after which nothing came.
    pub at: Duration,
    /// Why there was no answer.
    pub problem: Option<String>,
}

impl Observed {
    /// The longest time in which the Model said that it answers and did not.
    pub fn longest_false_ready(&self) -> Duration {
        let mut longest = Duration::ZERO;
        let mut rest = &self.asked[..];
        while let Some(first) = rest.iter().position(|asked| asked.problem.is_some()) {
            rest = &rest[first..];
            let failed = rest.iter().position(|asked| asked.problem.is_none());
            let end = failed.map_or(self.until, |next| rest[next].at);
            longest = longest.max(self.longest_said(rest[0].at, end));
            rest = &rest[failed.unwrap_or(rest.len())..];
        }
        longest
    }

    /// For how long at a time it was said between these two.
    fn longest_said(&self, from: Duration, to: Duration) -> Duration {
        let ends = self.said.iter().skip(1).map(|(at, _)| *at);
        let ends = ends.chain([self.until]);
        let said = self.said.iter().zip(ends).filter(|((_, ready), _)| *ready);
        let within = said.map(|((begin, _), end)| end.min(to).saturating_sub((*begin).max(from)));
        within.max().unwrap_or_default()
    }

    pub fn failed(&self) -> usize {
        self.asked
            .iter()
            .filter(|asked| asked.problem.is_some())
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(said: &[(u64, bool)], asked: &[(u64, bool)], until: u64) -> Observed {
        Observed {
            said: said
                .iter()
                .map(|(at, ready)| (Duration::from_secs(*at), *ready))
                .collect(),
            asked: asked
                .iter()
                .map(|(at, answered)| Asked {
                    at: Duration::from_secs(*at),
                    problem: (!answered).then(|| "no answer".to_owned()),
                })
                .collect(),
            until: Duration::from_secs(until),
        }
    }

    #[test]
    fn only_what_is_said_and_not_kept_is_false() {
        let cases = [
            (observed(&[(0, true)], &[(0, true), (1, true)], 9), 0),
            (
                observed(
                    &[(0, true)],
                    &[(0, true), (1, false), (4, false), (6, true)],
                    9,
                ),
                5,
            ),
            (observed(&[(0, true)], &[(0, true), (2, false)], 9), 7),
            // Taken back in time, and said again too early.
            (
                observed(
                    &[(0, true), (3, false), (5, true)],
                    &[(2, false), (5, false), (8, true)],
                    9,
                ),
                3,
            ),
            (observed(&[(0, true), (3, false)], &[(2, false)], 9), 1),
            (observed(&[(0, false)], &[(2, false)], 9), 0),
            (observed(&[], &[], 9), 0),
        ];
        for (observed, expected) in cases {
            assert_eq!(
                observed.longest_false_ready(),
                Duration::from_secs(expected),
                "{observed:?}"
            );
        }
    }
}
