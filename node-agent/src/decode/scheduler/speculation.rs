//! How many of a sequence's next tokens to send along as a draft, before they are known. One pass then verifies them all, and what was
//! guessed right came for the price of some rows. Pure.
//!
//! Guesses come from the text so far, or from a small model. The number is no setting: a row is drafted while the tokens that it brings, on
//! average, are worth more than what it costs. Both are measured: how often such drafts were right, and how a pass takes longer with more
//! rows. So drafts grow long where a pass mostly waits for a disk or a link, short where rows compete for processors, and end where guesses
//! fail. What the text says next costs nothing to look at, so it is judged whether it was drafted or not. What a grammar leaves no choice of is
//! no guess: all of it goes along.

use std::collections::VecDeque;

use super::ngrams::{Guess, NgramIndex};

/// The guesses about one sequence.
#[derive(Default)]
pub struct Speculation {
    index: NgramIndex,
    /// By the length of the match that a token follows.
    looked_up: Trust,
    /// By a token's place among those of the model.
    modelled: Trust,
    /// Tokens that are on the ring before they are known.
    draft: VecDeque<Drafted>,
    /// The earlier place that the text repeats, and how many tokens from there were drafted.
    repeats: Option<(Guess, usize)>,
    /// The next token by such a place, where it was not worth a draft.
    left_out: Option<Drafted>,
    /// Tokens of the model since the last one that no draft had.
    in_a_row: usize,
    /// Guesses of the model in a row that were not worth a draft.
    passed_over: u32,
    /// The model cannot tell what follows the draft.
    silent: bool,
    /// What the draft model has taken in of text and draft.
    pub taken_in: usize,
}

struct Drafted {
    token: u32,
    source: Source,
    /// As which its source is trusted.
    class: usize,
}

#[derive(Clone, Copy)]
enum Source {
    Text,
    Model,
    Grammar,
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

/// How often guesses of one kind were right.
#[derive(Default)]
struct Trust {
    classes: [Acceptance; CLASSES],
}

/// How often what followed short matches was right, in all texts. In prose such matches are chance: without this, every answer would draft after
/// some of them before it knows. What follows long ones each text has to show itself, so edits and quotations are drafted from their beginning on.
#[derive(Default)]
pub struct ShortMatches([Acceptance; SHORT]);

/// How often a token was right, the latest counting most.
#[derive(Clone, Copy)]
struct Acceptance {
    right: f64,
    tried: f64,
}

/// The most tokens of a draft that go along with a known one. The logits of all rows are computed, whatever becomes of them.
pub const LONGEST_DRAFT: usize = 32;
/// Matches of similar length count together.
const CLASSES: usize = 5;
/// The first of these: matches of up to 5 tokens.
const SHORT: usize = 2;
/// Every so many guesses of the model that seemed not worth it one token is drafted, to see whether that still holds.
const PROBE_EVERY: u32 = 32;
/// What a trial still counts after the next one, for its own text and for all.
const FADING: f64 = 0.9;
const FADING_FOR_ALL: f64 = 0.98;
/// A model's guesses count as after matches of such a length and more.
const MODELLED: usize = 3;

impl Speculation {
    /// Of a text of which nothing is known but how short matches fared in others. That counts as two trials, and makes no guess seem likelier than
    /// without: one that does not repeat is none the worse for others that do.
    pub fn new(others: &ShortMatches) -> Self {
        let mut speculation = Self::default();
        for (own, others) in speculation.looked_up.classes.iter_mut().zip(&others.0) {
            own.right = own.right.min(others.share() * own.tried);
        }
        speculation
    }

    /// What follows `text` by an earlier place in it, as far as that is worth it, and at most `limit` tokens. It replaces the draft.
    pub fn look_up(&mut self, text: &[u32], limit: usize, prices: Prices) -> Vec<u32> {
        self.withdraw(text.len());
        let Some(guess) = self.index.guess(text).filter(|_| limit > 0) else {
            return Vec::new();
        };
        let count = self
            .looked_up
            .worth(guess.matched, limit, 0.0, prices.row, prices.sequences);
        if count == 0 {
            self.left_out = Some(Drafted {
                token: guess.token(text, 0),
                source: Source::Text,
                class: class(guess.matched),
            });
            return Vec::new();
        }
        self.repeats = Some((guess, 0));
        (0..count).filter_map(|_| self.repeat(text)).collect()
    }

    /// The only tokens that a grammar lets follow a text of `length`, at most `limit` of them. They replace the draft.
    pub fn force(&mut self, length: usize, mut tokens: Vec<u32>, limit: usize) -> Vec<u32> {
        self.withdraw(length);
        tokens.truncate(limit.min(LONGEST_DRAFT));
        let forced = tokens.iter().map(|&token| Drafted {
            token,
            source: Source::Grammar,
            class: 0,
        });
        self.draft.extend(forced);
        tokens
    }

    /// What follows the draft by the place that it came from, for as long as the odds that all of it is right are above `least`, and at most
    /// `limit` tokens.
    pub fn look_on(&mut self, text: &[u32], limit: usize, least: f64) -> Vec<u32> {
        let mut odds = self.odds();
        let mut more = Vec::new();
        while more.len() < limit
            && let Some((guess, drafted)) = &self.repeats
        {
            odds *= self.looked_up.classes[class(guess.matched + drafted)].share();
            if odds <= least {
                break;
            }
            more.extend(self.repeat(text));
        }
        more
    }

    /// How often the next token of the place that the text repeats is right, if the draft is.
    pub fn text_is_right(&self) -> f64 {
        let repeats = self.repeats.as_ref();
        let matched = repeats.map_or(0, |(guess, drafted)| guess.matched + drafted);
        self.looked_up.classes[class(matched)].share()
    }

    /// Drafts the next token of the place that the text repeats.
    fn repeat(&mut self, text: &[u32]) -> Option<u32> {
        let (guess, drafted) = self.repeats.as_mut()?;
        let token = guess.token(text, *drafted);
        self.draft.push_back(Drafted {
            token,
            source: Source::Text,
            class: class(guess.matched + *drafted),
        });
        *drafted += 1;
        Some(token)
    }

    /// How many tokens of a draft model are worth it after a text of `length`; it may have to take in some of that first.
    pub fn worth_of_model(&mut self, length: usize, limit: usize, prices: Prices) -> usize {
        let before = length.saturating_sub(self.taken_in) as f64 * prices.guess;
        let row = prices.row + prices.guess;
        let count = self
            .modelled
            .worth(MODELLED, limit, before, row, prices.sequences);
        if count > 0 {
            self.passed_over = 0;
            return count;
        }
        self.passed_over += 1;
        usize::from(limit > 0 && self.passed_over.is_multiple_of(PROBE_EVERY))
    }

    /// How many tokens of the model can follow the draft so that the odds that all of it is right stay above `least`; at most `limit`.
    pub fn model_goes_on(&self, limit: usize, least: f64) -> usize {
        let mut odds = self.odds();
        let likely = |nth: &usize| {
            odds *= self.modelled.classes[class(MODELLED + self.in_a_row + nth)].share();
            odds > least
        };
        match self.silent {
            true => 0,
            false => (0..limit).take_while(likely).count(),
        }
    }

    /// How often the model's next token is right, if the draft is.
    pub fn model_is_right(&self) -> f64 {
        self.modelled.classes[class(MODELLED + self.in_a_row)].share()
    }

    /// The draft model's guess goes along, behind what is drafted already.
    pub fn take_guess(&mut self, tokens: &[u32]) {
        self.repeats = None;
        self.silent = tokens.is_empty();
        for &token in tokens {
            self.draft.push_back(Drafted {
                token,
                source: Source::Model,
                class: class(MODELLED + self.in_a_row),
            });
            self.in_a_row += 1;
        }
    }

    /// What is on the ring before it is known.
    pub fn drafted(&self) -> impl ExactSizeIterator<Item = u32> {
        self.draft.iter().map(|one| one.token)
    }

    /// The text goes on with `tokens`. Returns how many of them the draft had right, which leave it.
    pub fn verified(&mut self, tokens: &[u32], of_all: &mut ShortMatches) -> usize {
        if let (Some(one), Some(token)) = (self.left_out.take(), tokens.first()) {
            self.judge(&one, one.token == *token, of_all);
        }
        let right = self.drafted().zip(tokens);
        let right = right.take_while(|(drafted, token)| drafted == *token);
        let count = right.count();
        (0..count).for_each(|_| self.judge_next(true, of_all));
        count
    }

    /// The token at `position` is not the draft's, if there was one.
    pub fn refuted(&mut self, position: usize, of_all: &mut ShortMatches) {
        self.judge_next(false, of_all);
        self.withdraw(position);
    }

    fn judge_next(&mut self, right: bool, of_all: &mut ShortMatches) {
        if let Some(one) = self.draft.pop_front() {
            self.judge(&one, right, of_all);
        }
    }

    fn judge(&mut self, one: &Drafted, right: bool, of_all: &mut ShortMatches) {
        match one.source {
            Source::Text => {
                self.looked_up.classes[one.class].add(right, FADING);
                of_all.add(one.class, right);
            }
            Source::Model => self.modelled.classes[one.class].add(right, FADING),
            Source::Grammar => {}
        }
    }

    /// Nobody will know whether the draft was right that followed the first `length` tokens.
    pub fn withdraw(&mut self, length: usize) {
        self.taken_in = self.taken_in.min(length);
        self.draft.clear();
        self.repeats = None;
        self.left_out = None;
        self.in_a_row = 0;
        self.silent = false;
    }

    /// That the whole draft is right.
    fn odds(&self) -> f64 {
        let share = |one: &Drafted| {
            let trust = match one.source {
                Source::Text => &self.looked_up,
                Source::Model => &self.modelled,
                Source::Grammar => return 1.0,
            };
            trust.classes[one.class].share()
        };
        self.draft.iter().map(share).product()
    }
}

impl Trust {
    /// How many tokens to draft after a match of such a length, at most `limit`. `before`: what the guess costs, however many it is;
    /// `row`: what each token costs.
    fn worth(&self, matched: usize, limit: usize, before: f64, row: f64, sequences: f64) -> usize {
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
        match (tokens - 1.0) * (1.0 + row) <= (cost - 1.0 - row) * sequences {
            true => 0,
            false => count,
        }
    }
}

impl ShortMatches {
    /// What followed a match of this class was right, or not. Longer ones count for their own text only.
    pub fn add(&mut self, class: usize, right: bool) {
        if let Some(acceptance) = self.0.get_mut(class) {
            acceptance.add(right, FADING_FOR_ALL);
        }
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

    fn add(&mut self, right: bool, fading: f64) {
        self.right = self.right * fading + f64::from(u8::from(right));
        self.tried = self.tried * fading + 1.0;
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
        ends_as_it_began(20)
    }

    /// So many tokens; what follows is the next number.
    fn ends_as_it_began(matched: u32) -> Vec<u32> {
        (0..40).chain(0..matched).collect()
    }

    #[test]
    fn guesses_that_come_true_make_drafts_longer() {
        let (text, mut speculation) = (repeats(), Speculation::default());
        let mut of_all = ShortMatches::default();
        let mut lengths = Vec::new();
        for _ in 0..20 {
            let draft = speculation.look_up(&text, 100, prices(0.1, 1.0));
            assert_eq!(speculation.verified(&draft, &mut of_all), draft.len());
            lengths.push(draft.len());
        }
        assert!(lengths[0] > 0 && lengths[0] < 8, "{lengths:?}");
        assert_eq!(lengths[19], LONGEST_DRAFT, "{lengths:?}");
        assert!(lengths.is_sorted(), "{lengths:?}");
    }

    #[test]
    fn guesses_that_fail_end_drafts_until_they_would_be_right() {
        let (text, mut speculation) = (repeats(), Speculation::default());
        let mut of_all = ShortMatches::default();
        let mut goes_on_with = |token| {
            let draft = speculation.look_up(&text, 100, prices(0.1, 1.0));
            speculation.verified(&[token], &mut of_all);
            speculation.refuted(text.len(), &mut of_all);
            draft.len()
        };
        let drafted: Vec<usize> = (0..100).map(|_| goes_on_with(99)).collect();
        assert!(drafted[0] > 0, "{drafted:?}");
        assert!(drafted[10..].iter().all(|count| *count == 0), "{drafted:?}");
        let right: Vec<usize> = (0..5).map(|_| goes_on_with(20)).collect();
        assert!(right[0] == 0 && right[4] > 0, "{right:?}");
    }

    #[test]
    fn a_text_begins_with_what_short_matches_brought_in_others() {
        let mut of_all = ShortMatches::default();
        let first_drafts = |others: &ShortMatches| {
            [3, 5, 6].map(|matched| {
                let text = ends_as_it_began(matched);
                let mut speculation = Speculation::new(others);
                speculation.look_up(&text, 100, prices(0.3, 1.0)).len()
            })
        };
        let mut others_go_on_with = |right: bool| {
            for matched in [3, 5, 6].repeat(100) {
                let text = ends_as_it_began(matched);
                let mut speculation = Speculation::new(&of_all);
                speculation.look_up(&text, 1, prices(0.3, 1.0));
                let next = if right { matched } else { 99 };
                speculation.verified(&[next], &mut of_all);
                speculation.refuted(text.len(), &mut of_all);
            }
            first_drafts(&of_all)
        };
        assert_eq!(first_drafts(&ShortMatches::default()), [1, 1, 1]);
        assert_eq!(others_go_on_with(false), [0, 0, 1]);
        assert_eq!(others_go_on_with(true), [1, 1, 1]);
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

    /// Found by trying all lengths.
    #[test]
    fn a_draft_is_as_long_as_brings_most_tokens_in_a_time() {
        for share in [0.2_f64, 0.5, 0.8, 0.95] {
            let all_alike = Acceptance {
                right: share,
                tried: 1.0,
            };
            let trust = Trust {
                classes: [all_alike; CLASSES],
            };
            for row in [0.013, 0.11, 0.47] {
                for before in [0.0, 0.37, 1.9] {
                    let tokens_in_a_time = |count: usize| {
                        let tokens: f64 = (0..=count).map(|nth| share.powi(nth as i32)).sum();
                        let guessing = if count > 0 { before } else { 0.0 };
                        tokens / (1.0 + guessing + row * (count + 1) as f64)
                    };
                    let best = (0..=LONGEST_DRAFT).max_by(|one, other| {
                        tokens_in_a_time(*one).total_cmp(&tokens_in_a_time(*other))
                    });
                    let found = trust.worth(MODELLED, 100, before, row, 1.0);
                    assert_eq!(Some(found), best, "{share} {row} {before}");
                }
            }
        }
    }

    #[test]
    fn a_draft_keeps_to_its_limit() {
        let (text, mut speculation) = (repeats(), Speculation::default());
        let cheap = prices(0.001, 1.0);
        assert_eq!(speculation.look_up(&text, 2, cheap), [20, 21]);
        assert!(speculation.look_up(&text, 0, cheap).is_empty());
    }

    #[test]
    fn a_draft_goes_on_while_its_odds_are_good() {
        let (text, mut speculation) = (repeats(), Speculation::default());
        let first = speculation.look_up(&text, 100, prices(0.1, 1.0)).len();
        assert!(speculation.look_on(&text, 100, 0.9).is_empty());
        let more = speculation.look_on(&text, 100, 0.01);
        assert!((1..10).contains(&more.len()), "{more:?}");
        let drafted: Vec<u32> = speculation.drafted().collect();
        let all = 20..20 + (first + more.len()) as u32;
        assert_eq!(drafted, all.collect::<Vec<_>>());
        // Behind a model's guess nobody looks on.
        speculation.take_guess(&[7]);
        assert!(speculation.look_on(&text, 100, 0.0).is_empty());
        assert_eq!(speculation.drafted().last(), Some(7));
    }

    #[test]
    fn what_is_known_leaves_the_draft() {
        let (mut text, mut speculation) = (repeats(), Speculation::default());
        let mut of_all = ShortMatches::default();
        let draft = speculation.look_up(&text, 100, prices(0.01, 1.0));
        let known = [draft[0], draft[1], 7];
        assert_eq!(speculation.verified(&known, &mut of_all), 2);
        text.extend(&draft[..2]);
        assert_eq!(speculation.drafted().collect::<Vec<_>>(), draft[2..]);
        let more = speculation.look_on(&text, 1, 0.0);
        assert_eq!(more, [draft.last().unwrap() + 1]);
        speculation.refuted(text.len(), &mut of_all);
        assert_eq!(speculation.drafted().len(), 0);
        assert!(speculation.look_on(&text, 1, 0.0).is_empty());
    }

    #[test]
    fn forced_tokens_go_along_and_tell_nothing_of_guesses() {
        let (text, mut speculation) = (repeats(), Speculation::default());
        let mut of_all = ShortMatches::default();
        let guessed = speculation.look_up(&text, 100, prices(0.1, 1.0)).len();
        let forced = speculation.force(text.len(), (1..=40).collect(), 100);
        assert_eq!(forced, (1..=LONGEST_DRAFT as u32).collect::<Vec<_>>());
        assert_eq!(speculation.drafted().collect::<Vec<_>>(), forced);
        assert_eq!(speculation.verified(&[1, 2, 9], &mut of_all), 2);
        speculation.refuted(text.len(), &mut of_all);
        assert_eq!(speculation.drafted().len(), 0);
        assert_eq!(speculation.force(text.len(), vec![1, 2, 3], 2), [1, 2]);
        let again = speculation.look_up(&text, 100, prices(0.1, 1.0)).len();
        assert_eq!(again, guessed);
    }

    #[test]
    fn a_model_is_asked_while_it_pays_for_its_time() {
        let (mut speculation, mut of_all) = (Speculation::default(), ShortMatches::default());
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
            speculation.take_guess(&vec![7; count]);
            speculation.refuted(1, &mut of_all);
        }
        let failing: usize = (0..20).map(|_| asked(&mut speculation, 0.02, 1)).sum();
        assert!(failing <= 1, "{failing}");
        // It is tried again now and then.
        let tries = 0..2 * PROBE_EVERY;
        let probes: usize = tries.map(|_| asked(&mut speculation, 0.02, 1)).sum();
        assert_eq!(probes, 2);
    }
}
