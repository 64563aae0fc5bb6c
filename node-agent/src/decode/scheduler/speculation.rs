//! How many of a sequence's next tokens to send along as a draft, before they are known. One pass then verifies them all, and what was
//! guessed right came for the price of some rows. Pure.
//!
//! Guesses come from the text so far, or from a small model. The number is no setting: a row is drafted while the tokens that it brings, on
//! average, are worth more than what it costs. Both are measured: how often such drafts were right, and how a pass takes longer with more
//! rows. So drafts grow long where a pass mostly waits for a disk or a link, short where rows compete for processors, and end where guesses
//! fail.

use super::ngrams::NgramIndex;

/// The guesses about one sequence.
#[derive(Default)]
pub struct Speculation {
    index: NgramIndex,
    /// By the length of the match that a token follows.
    looked_up: Trust,
    /// By a token's place in the draft.
    modelled: Trust,
    /// Tokens that are on the ring before they are known.
    draft: Vec<u32>,
    /// Who guessed them; of a text, how long the match was.
    matched: Option<usize>,
    /// What the draft model has taken in of the text.
    pub taken_in: usize,
}

/// What passes cost, in passes without any rows.
#[derive(Clone, Copy, Debug)]
pub struct Prices {
    /// One more row of a pass.
    pub row: f64,
    /// One token that the draft model takes in or guesses.
    pub guess: f64,
    /// Sequences that share a pass, each of whose rows delays them all.
    pub sequences: f64,
}

/// How far guesses of one kind are worth it.
#[derive(Default)]
struct Trust {
    classes: [Acceptance; CLASSES],
    /// Guesses in a row that were not worth a draft.
    passed_over: u32,
}

/// How often a token was right, the latest counting most.
#[derive(Clone, Copy)]
struct Acceptance {
    right: f64,
    tried: f64,
}

/// The most tokens of a draft. The logits of all rows are computed, whatever becomes of them.
const LONGEST_DRAFT: usize = 32;
/// Matches of similar length count together.
const CLASSES: usize = 5;
/// Every so many guesses that seemed not worth it one token is drafted, to see whether that still holds.
const PROBE_EVERY: u32 = 32;
/// What a trial still counts after the next one.
const FADING: f64 = 0.9;
/// A model's guesses count as after matches of such a length and more.
const MODELLED: usize = 3;

impl Speculation {
    /// What follows `text` by an earlier place in it, as far as that is worth it, and at most `limit` tokens.
    pub fn look_up(&mut self, text: &[u32], limit: usize, prices: Prices) -> &[u32] {
        self.withdraw();
        let guess = self.index.guess(text).filter(|_| limit > 0);
        if let Some(guess) = guess {
            let count =
                self.looked_up
                    .worth(guess.matched, limit, 0.0, prices.row, prices.sequences);
            self.draft = guess.tokens(text, count);
            self.matched = Some(guess.matched);
        }
        &self.draft
    }

    /// How many tokens of a draft model are worth it after a text of `length`; it may have to take in some of that first.
    pub fn worth_of_model(&mut self, length: usize, limit: usize, prices: Prices) -> usize {
        let before = (length - self.taken_in) as f64 * prices.guess;
        let row = prices.row + prices.guess;
        self.modelled
            .worth(MODELLED, limit, before, row, prices.sequences)
    }

    /// The draft model's guess goes along.
    pub fn take_guess(&mut self, tokens: Vec<u32>) -> &[u32] {
        self.draft = tokens;
        self.matched = None;
        &self.draft
    }

    /// What is on the ring before it is known.
    pub fn drafted(&self) -> &[u32] {
        &self.draft
    }

    /// The first `right` tokens of the draft were right.
    pub fn verified(&mut self, right: usize) {
        let draft = std::mem::take(&mut self.draft);
        let (trust, first) = match self.matched {
            Some(matched) => (&mut self.looked_up, matched),
            None => (&mut self.modelled, MODELLED),
        };
        for (nth, _) in draft.iter().enumerate().take(right + 1) {
            trust.classes[class(first + nth)].add(nth < right);
        }
    }

    /// Nobody will know whether the draft was right.
    pub fn withdraw(&mut self) {
        self.draft.clear();
    }
}

impl Trust {
    /// How many tokens to draft after a match of such a length, at most `limit`. `before`: what the guess costs, however many it is;
    /// `row`: what each token costs.
    fn worth(
        &mut self,
        matched: usize,
        limit: usize,
        before: f64,
        row: f64,
        sequences: f64,
    ) -> usize {
        let limit = limit.min(LONGEST_DRAFT);
        // The pass brings one token anyway.
        let (mut tokens, mut cost, mut survives) = (1.0, 1.0 + row + before, 1.0);
        let mut count = 0;
        while count < limit {
            survives *= self.classes[class(matched + count)].share();
            if survives * cost <= row * tokens * sequences {
                break;
            }
            tokens += survives;
            cost += row;
            count += 1;
        }
        if (tokens - 1.0) * (1.0 + row) <= (cost - 1.0 - row) * sequences {
            self.passed_over += 1;
            return usize::from(limit > 0 && self.passed_over.is_multiple_of(PROBE_EVERY));
        }
        self.passed_over = 0;
        count
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
    use super::*;

    fn prices(row: f64, sequences: f64) -> Prices {
        Prices {
            row,
            guess: 0.1,
            sequences,
        }
    }

    fn repeats() -> Vec<u32> {
        (0..40).chain(0..20).collect()
    }

    #[test]
    fn guesses_that_come_true_make_drafts_longer() {
        let (text, mut speculation) = (repeats(), Speculation::default());
        let mut lengths = Vec::new();
        for _ in 0..20 {
            let length = speculation.look_up(&text, 100, prices(0.1, 1.0)).len();
            speculation.verified(length);
            lengths.push(length);
        }
        assert!(lengths[0] > 0 && lengths[0] < 8, "{lengths:?}");
        assert_eq!(lengths[19], LONGEST_DRAFT, "{lengths:?}");
        assert!(lengths.is_sorted(), "{lengths:?}");
    }

    #[test]
    fn guesses_that_fail_end_drafts_but_for_a_probe() {
        let (text, mut speculation) = (repeats(), Speculation::default());
        let mut drafted = Vec::new();
        for _ in 0..200 {
            drafted.push(speculation.look_up(&text, 100, prices(0.1, 1.0)).len());
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
            speculation
                .look_up(&text, 100, prices(row, sequences))
                .len()
        };
        assert!(length(0.01, 1.0) > length(0.1, 1.0));
        assert!(length(0.1, 1.0) > length(0.8, 1.0));
        assert!(length(0.1, 1.0) > length(0.1, 8.0));
        assert_eq!(length(0.8, 8.0), 0);
    }

    #[test]
    fn a_draft_keeps_to_its_limit() {
        let (text, mut speculation) = (repeats(), Speculation::default());
        let cheap = prices(0.001, 1.0);
        assert_eq!(speculation.look_up(&text, 2, cheap), [20, 21]);
        assert!(speculation.look_up(&text, 0, cheap).is_empty());
    }

    #[test]
    fn a_model_is_asked_while_it_pays_for_its_time() {
        let mut speculation = Speculation::default();
        let asked = |speculation: &mut Speculation, guess, length| {
            let prices = Prices {
                row: 0.05,
                guess,
                sequences: 1.0,
            };
            speculation.worth_of_model(length, 100, prices)
        };
        let cheap = asked(&mut speculation, 0.02, 1);
        let dear = asked(&mut speculation, 0.3, 1);
        assert!(cheap > dear, "{cheap} {dear}");
        // A text that it would have to take in first.
        assert_eq!(asked(&mut speculation, 0.02, 500), 0);
        for _ in 0..30 {
            let count = asked(&mut speculation, 0.02, 1);
            speculation.take_guess(vec![7; count]);
            speculation.verified(0);
        }
        let failing: usize = (0..20).map(|_| asked(&mut speculation, 0.02, 1)).sum();
        assert!(failing <= 1, "{failing}");
    }
}
