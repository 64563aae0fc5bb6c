//! How many of a sequence's next tokens to send along as a draft, before they are known. One pass then verifies them all, and what was
//! guessed right came for the price of some rows. Pure.
//!
//! The number is no setting: a row is drafted while the tokens that it brings, on average, are worth more than what it costs. Both are
//! measured: how often drafts were right after a match of such a length, and how a pass takes longer with more rows. So drafts grow long
//! where a pass mostly waits for a disk or a link, short where rows compete for processors, and end where guesses fail.

use super::ngrams::NgramIndex;
use super::pass_cost::PassCost;

/// The guesses about one sequence.
#[derive(Default)]
pub struct Speculation {
    index: NgramIndex,
    acceptance: [Acceptance; CLASSES],
    /// Guesses in a row that were not worth a draft.
    passed_over: u32,
    /// Tokens that are on the ring before they are known.
    draft: Vec<u32>,
    /// How long the match was that they follow.
    matched: usize,
}

/// How often a token was right, the latest counting most.
#[derive(Clone, Copy)]
struct Acceptance {
    right: f64,
    tried: f64,
}

/// The most tokens of a draft. The logits of all rows are computed, whatever becomes of them.
pub const LONGEST_DRAFT: usize = 32;
/// Matches of similar length count together.
const CLASSES: usize = 5;
/// Every so many guesses that seemed not worth it one token is drafted, to see whether that still holds.
const PROBE_EVERY: u32 = 32;
/// What a trial still counts after the next one.
const FADING: f64 = 0.9;

impl Speculation {
    /// What to send along after `text`, at most `limit` tokens. `sequences` share a pass, each of whose rows delays them all.
    pub fn draft(&mut self, text: &[u32], limit: usize, cost: &PassCost, sequences: f64) -> &[u32] {
        self.draft.clear();
        let limit = limit.min(LONGEST_DRAFT);
        let Some(guess) = self.index.guess(text).filter(|_| limit > 0) else {
            return &self.draft;
        };
        let mut count = self.worth(guess.matched, limit, cost.of_a_row(), sequences);
        if count == 0 {
            self.passed_over += 1;
            count = usize::from(self.passed_over.is_multiple_of(PROBE_EVERY));
        } else {
            self.passed_over = 0;
        }
        self.matched = guess.matched;
        self.draft = guess.tokens(text, count);
        &self.draft
    }

    /// What is on the ring before it is known.
    pub fn drafted(&self) -> &[u32] {
        &self.draft
    }

    /// How many rows pay. `row`: what one costs, in passes without rows.
    fn worth(&self, matched: usize, limit: usize, row: f64, sequences: f64) -> usize {
        // The pass brings one token anyway.
        let (mut tokens, mut cost, mut survives) = (1.0, 1.0 + row, 1.0);
        for count in 0..limit {
            survives *= self.acceptance[class(matched + count)].share();
            if survives * cost <= row * tokens * sequences {
                return count;
            }
            tokens += survives;
            cost += row;
        }
        limit
    }

    /// The first `right` tokens of the draft were right.
    pub fn verified(&mut self, right: usize) {
        let draft = std::mem::take(&mut self.draft);
        for (nth, _) in draft.iter().enumerate().take(right + 1) {
            self.acceptance[class(self.matched + nth)].add(nth < right);
        }
    }

    /// Nobody will know whether the draft was right.
    pub fn withdraw(&mut self) {
        self.draft.clear();
    }
}

/// Longer matches are right more often: 3, 4 to 5, 6 to 9, 10 to 17, and more tokens.
fn class(matched: usize) -> usize {
    (matched.saturating_sub(2).max(1).ilog2() as usize).min(CLASSES - 1)
}

impl Acceptance {
    fn share(self) -> f64 {
        self.right / self.tried
    }

    fn add(&mut self, right: bool) {
        self.right = self.right * FADING + f64::from(u8::from(right));
        self.tried = self.tried * FADING + 1.0;
    }
}

impl Default for Acceptance {
    /// As if half of two trials had been right.
    fn default() -> Self {
        Self {
            right: 1.0,
            tried: 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Passes in which a row costs `row` of what a pass costs without.
    fn cost(row: f64) -> PassCost {
        let mut cost = PassCost::default();
        for rows in [1, 9, 1, 5] {
            cost.add(rows, Duration::from_secs_f64(1.0 + row * rows as f64));
        }
        cost
    }

    fn repeats() -> Vec<u32> {
        (0..40).chain(0..20).collect()
    }

    #[test]
    fn guesses_that_come_true_make_drafts_longer() {
        let (text, cost) = (repeats(), cost(0.1));
        let mut speculation = Speculation::default();
        let mut lengths = Vec::new();
        for _ in 0..20 {
            let length = speculation.draft(&text, 100, &cost, 1.0).len();
            speculation.verified(length);
            lengths.push(length);
        }
        assert!(lengths[0] > 0 && lengths[0] < 8, "{lengths:?}");
        assert_eq!(lengths[19], LONGEST_DRAFT, "{lengths:?}");
        assert!(lengths.is_sorted(), "{lengths:?}");
    }

    #[test]
    fn guesses_that_fail_end_drafts_but_for_a_probe() {
        let (text, cost) = (repeats(), cost(0.1));
        let mut speculation = Speculation::default();
        let mut drafted = Vec::new();
        for _ in 0..200 {
            drafted.push(speculation.draft(&text, 100, &cost, 1.0).len());
            speculation.verified(0);
        }
        let late: usize = drafted[100..].iter().sum();
        assert!((2..=4).contains(&late), "{drafted:?}");
    }

    #[test]
    fn a_cheap_row_is_drafted_sooner_and_a_shared_pass_later() {
        let text = repeats();
        let length = |row, sequences| {
            let mut speculation = Speculation::default();
            speculation.draft(&text, 100, &cost(row), sequences).len()
        };
        assert!(length(0.01, 1.0) > length(0.1, 1.0));
        assert!(length(0.1, 1.0) > length(0.8, 1.0));
        assert!(length(0.1, 1.0) > length(0.1, 8.0));
        assert_eq!(length(0.8, 8.0), 0);
    }

    #[test]
    fn a_draft_keeps_to_its_limit() {
        let (text, cost, mut speculation) = (repeats(), cost(0.001), Speculation::default());
        assert_eq!(speculation.draft(&text, 2, &cost, 1.0), [20, 21]);
        assert!(speculation.draft(&text, 0, &cost, 1.0).is_empty());
    }
}
