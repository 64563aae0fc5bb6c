//! Guesses how a text goes on from how it went on before (prompt lookup decoding): the longest earlier occurrence of its last tokens, and of
//! several as long the newest. A guess costs microseconds and needs no model. Pure.

/// Where each run of [`RUN`] tokens of a text occurred.
#[derive(Default)]
pub struct NgramIndex {
    /// By hash: the end of a run's last occurrence.
    newest: Vec<u32>,
    /// By end: the end of the occurrence before, of a run with the same hash.
    earlier: Vec<u32>,
}

/// How a text may go on.
#[derive(Debug, PartialEq, Eq)]
pub struct Guess {
    /// Where in the text the earlier occurrence ends, behind which it says what comes next.
    from: usize,
    /// Where the text ended.
    until: usize,
    /// Tokens before `from` that are also the text's last.
    pub matched: usize,
}

/// Tokens that must occur again.
const RUN: usize = 3;
/// Occurrences that are compared.
const COMPARED: usize = 32;
/// A match is not followed further back.
const LONGEST: usize = 64;
/// No occurrence.
const NONE: u32 = u32::MAX;

impl NgramIndex {
    /// The best guess for what follows `text`, which is the text of the call before or begins with it.
    pub fn guess(&mut self, text: &[u32]) -> Option<Guess> {
        self.take_in(text);
        let mut end = *self.newest.get(self.slot(text)?)?;
        let mut best = None;
        for _ in 0..COMPARED {
            if end == NONE {
                break;
            }
            let from = end as usize;
            let matched = common_suffix(&text[..from], text);
            if matched >= RUN
                && best
                    .as_ref()
                    .is_none_or(|best: &Guess| matched > best.matched)
            {
                let until = text.len();
                best = Some(Guess {
                    from,
                    until,
                    matched,
                });
            }
            end = self.earlier[from];
        }
        best
    }

    /// Takes in all ends before the text's own.
    fn take_in(&mut self, text: &[u32]) {
        if self.newest.len() < text.len() {
            self.newest = vec![NONE; 2 * text.len().next_power_of_two()];
            self.earlier.clear();
        }
        for end in self.earlier.len()..text.len() {
            let slot = self.slot(&text[..end]);
            let newest = slot.map(|slot| std::mem::replace(&mut self.newest[slot], end as u32));
            self.earlier.push(newest.unwrap_or(NONE));
        }
    }

    fn slot(&self, text: &[u32]) -> Option<usize> {
        let run: &[u32; RUN] = text.last_chunk()?;
        let hash = run.iter().fold(0u64, |hash, &token| {
            (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        Some((hash >> 32) as usize & (self.newest.len() - 1))
    }
}

impl Guess {
    /// The `nth` token that follows, from 0 on, if `text` goes on as it did there; where that reaches the text's end, it goes round. The text may
    /// have grown since.
    pub fn token(&self, text: &[u32], nth: usize) -> u32 {
        text[self.from + nth % (self.until - self.from)]
    }
}

fn common_suffix(a: &[u32], b: &[u32]) -> usize {
    let pairs = a.iter().rev().zip(b.iter().rev());
    pairs.take(LONGEST).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(text: &[u32], count: usize) -> Option<(Vec<u32>, usize)> {
        let guess = NgramIndex::default().guess(text)?;
        let tokens = (0..count).map(|nth| guess.token(text, nth));
        Some((tokens.collect(), guess.matched))
    }

    #[test]
    fn a_text_goes_on_as_it_did_before() {
        let text = [9, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3];
        assert_eq!(guess(&text, 4), Some((vec![4, 5, 6, 7], 3)));
        assert_eq!(guess(&text[..10], 4), None);
        assert_eq!(guess(&[], 4), None);
    }

    #[test]
    fn the_longest_match_wins_and_then_the_newest() {
        let longer = [5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3];
        assert_eq!(guess(&longer, 1), Some((vec![7], 4)));
        let newer = [4, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3];
        assert_eq!(guess(&newer, 1), Some((vec![8], 3)));
    }

    #[test]
    fn what_repeats_goes_round() {
        assert_eq!(guess(&[1, 2, 1, 2, 1, 2], 5).unwrap().0, [1, 2, 1, 2, 1]);
        assert_eq!(guess(&[7; 5], 6).unwrap().0, [7; 6]);
    }

    #[test]
    fn an_index_that_grows_guesses_as_one_made_anew() {
        let mut index = NgramIndex::default();
        let text: Vec<u32> = (0..400u32).map(|n| n * n % 7 + n % 3).collect();
        for end in 0..text.len() {
            let anew = NgramIndex::default().guess(&text[..end]);
            assert_eq!(index.guess(&text[..end]), anew, "{end}");
        }
    }
}
