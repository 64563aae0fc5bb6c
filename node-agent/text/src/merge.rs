//! The merge loop that byte-pair encoding and SentencePiece share: the best pair of neighbours becomes one piece, until no pair can.
//!
//! Decides: the order of merges (best rank first, leftmost first among equals), which is llama.cpp's. Refuses: to know what makes a
//! pair good, which is the caller's one function, and to take memory in proportion to a text.
//!
//! The `tokenizers` crate is not used for this: SentencePiece needs the loop anyway (there is no score-greedy model in that crate),
//! and its BPE merges across characters that it has no token for, where llama.cpp keeps them apart.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::tokenizer_error::TokenizerError;
use crate::tokens::Tokens;

/// A part of the text that is, or is not yet, one token.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    /// Byte range in the text.
    pub(crate) range: Range<usize>,
    /// The token that stands for exactly these bytes, where there is one.
    pub(crate) token: Option<u32>,
}

/// What two neighbours would become.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merge {
    /// Lower is merged earlier.
    pub(crate) rank: u32,
    /// The token of both together.
    pub(crate) token: u32,
}

/// Merges pieces, with room for them that is kept from text to text.
///
/// A piece takes a hundred bytes of that room, so a long text is merged in windows. The result is the same, because whether two pieces
/// that met stay apart depends on these two alone: pieces of which all neighbours stay apart are the pieces of the whole text. A window
/// begins where two pieces of the one before stayed apart, a quarter before its end. If it begins with the same piece as there, then these
/// two are neighbours in both, and the windows fit together. If what followed has changed that piece, windows become larger.
#[derive(Debug)]
pub(crate) struct Merger {
    /// Pieces that are merged at once.
    window: usize,
    pieces: Vec<Piece>,
    neighbours: Vec<Neighbours>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Default for Merger {
    fn default() -> Self {
        Self::with_window(1 << 16)
    }
}

impl Merger {
    /// `window`: pieces that are merged at once.
    fn with_window(window: usize) -> Self {
        Self {
            window,
            pieces: Vec::new(),
            neighbours: Vec::new(),
            queue: BinaryHeap::new(),
        }
    }

    /// Merges the pieces of a text of `len` bytes by the pairs that `merge_of` knows, and has `append` add what is left to `tokens`.
    /// `pieces_from`: the pieces from a byte on, which follow one another without gaps.
    pub(crate) fn merge<P: Iterator<Item = Piece>>(
        &mut self,
        len: usize,
        pieces_from: impl Fn(usize) -> P,
        merge_of: impl Fn(&Piece, &Piece) -> Option<Merge>,
        append: impl Fn(&Piece, &mut Tokens) -> Result<(), TokenizerError>,
        tokens: &mut Tokens,
    ) -> Result<(), TokenizerError> {
        let before = tokens.len();
        let mut window = self.window;
        loop {
            let mut merged_from =
                |start| self.merge_at_once(pieces_from(start).take(window), &merge_of);
            let mut merged = merged_from(0);
            let all = loop {
                let reached = merged.last().map_or(len, |last| last.range.end);
                if reached == len {
                    break true;
                }
                let begun = merged[0].range.start;
                let used = begun + (reached - begun) / 4 * 3;
                let cut = merged.partition_point(|piece| piece.range.end <= used);
                let next = merged_from(merged[cut].range.start);
                if cut == 0 || next[0] != merged[cut] {
                    break false;
                }
                for piece in &merged[..cut] {
                    append(piece, tokens)?;
                }
                merged = next;
            };
            if all {
                return merged.iter().try_for_each(|piece| append(piece, tokens));
            }
            tokens.truncate(before);
            window *= 2;
        }
    }

    /// What is left of these pieces.
    fn merge_at_once(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        merge_of: &impl Fn(&Piece, &Piece) -> Option<Merge>,
    ) -> Vec<Piece> {
        self.pieces.clear();
        self.pieces.extend(pieces);
        self.neighbours.clear();
        self.queue.clear();
        let count = self.pieces.len();
        self.neighbours.extend((0..count).map(|at| Neighbours {
            left: at.checked_sub(1),
            right: Some(at + 1).filter(|&right| right < count),
        }));
        for right in 1..count {
            self.consider(right - 1, right, merge_of);
        }
        while let Some(Reverse(candidate)) = self.queue.pop() {
            if self.is_outdated(&candidate) {
                continue;
            }
            let Candidate { left, right, .. } = candidate;
            self.pieces[left].range.end = self.pieces[right].range.end;
            self.pieces[left].token = Some(candidate.token);
            self.pieces[right].range.start = self.pieces[right].range.end;
            let next = self.neighbours[right].right;
            self.neighbours[left].right = next;
            if let Some(next) = next {
                self.neighbours[next].left = Some(left);
                self.consider(left, next, merge_of);
            }
            if let Some(previous) = self.neighbours[left].left {
                self.consider(previous, left, merge_of);
            }
        }
        let left = self.pieces.iter().filter(|piece| !piece.range.is_empty());
        left.cloned().collect()
    }

    fn consider(
        &mut self,
        left: usize,
        right: usize,
        merge_of: &impl Fn(&Piece, &Piece) -> Option<Merge>,
    ) {
        let (left_piece, right_piece) = (&self.pieces[left], &self.pieces[right]);
        if let Some(Merge { rank, token }) = merge_of(left_piece, right_piece) {
            self.queue.push(Reverse(Candidate {
                rank,
                left,
                right,
                len: left_piece.range.len() + right_piece.range.len(),
                token,
            }));
        }
    }

    /// A piece only ever grows or becomes empty, so a pair whose lengths add up as before is the pair that was queued.
    fn is_outdated(&self, candidate: &Candidate) -> bool {
        let left = &self.pieces[candidate.left].range;
        let right = &self.pieces[candidate.right].range;
        left.is_empty() || right.is_empty() || left.len() + right.len() != candidate.len
    }
}

#[derive(Debug)]
struct Neighbours {
    left: Option<usize>,
    right: Option<usize>,
}

/// A pair in the queue; the order of the fields is the order of merging.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: usize,
    right: usize,
    len: usize,
    token: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sentencepiece::characters;
    use proptest::prelude::*;

    /// Merges the characters of `text` by a list of words, earlier ones first.
    fn merged(text: &str, words: &[&str]) -> Vec<String> {
        merged_in_windows(1 << 16, text, words)
    }

    fn merged_in_windows(window: usize, text: &str, words: &[impl AsRef<str>]) -> Vec<String> {
        let mut ends = Tokens::at_most(usize::MAX);
        Merger::with_window(window)
            .merge(
                text.len(),
                |start| characters(text, start).map(|(range, _)| Piece { range, token: None }),
                |left, right| {
                    let union = &text[left.range.start..right.range.end];
                    let rank = words.iter().position(|word| word.as_ref() == union)? as u32;
                    Some(Merge { rank, token: rank })
                },
                |piece, ends| ends.push(piece.range.end as u32),
                &mut ends,
            )
            .unwrap();
        let mut start = 0;
        let ends = ends.into_ids().into_iter().map(|end| end as usize);
        ends.map(|end| text[std::mem::replace(&mut start, end)..end].to_owned())
            .collect()
    }

    #[test]
    fn the_best_rank_goes_first_wherever_it_stands() {
        assert_eq!(merged("abc", &["bc", "ab"]), ["a", "bc"]);
        assert_eq!(merged("abc", &["ab", "bc"]), ["ab", "c"]);
        assert_eq!(merged("abcd", &["bc", "abc", "abcd"]), ["abcd"]);
    }

    #[test]
    fn equal_ranks_merge_from_the_left() {
        assert_eq!(merged("aaaaa", &["aa"]), ["aa", "aa", "a"]);
        assert_eq!(merged("aaaaa", &["aa", "aaa"]), ["aa", "aaa"]);
    }

    #[test]
    fn nothing_to_merge_is_left_alone() {
        assert_eq!(merged("", &["ab"]), [""; 0]);
        assert_eq!(merged("xé", &["ab"]), ["x", "é"]);
    }

    /// Words of one letter and of two: runs that are merged from the left, and chains in which what comes last decides.
    #[test]
    fn windows_change_nothing() {
        let word = "[abc]{2,5}";
        let text = prop_oneof!["[abc]{0,60}", "a{0,60}", "(abc){0,20}[abc]{0,3}"];
        proptest!(|(words in prop::collection::vec(word, 0..30), text in text, window in 4usize..20)| {
            let whole = merged_in_windows(1000, &text, &words);
            prop_assert_eq!(merged_in_windows(window, &text, &words), whole);
        });
    }
}
