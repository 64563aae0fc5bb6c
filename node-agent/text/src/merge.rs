//! The merge loop that byte-pair encoding and SentencePiece share: the best pair of neighbours becomes one piece, until no pair can.
//!
//! Decides: the order of merges (best rank first, leftmost first among equals), which is llama.cpp's. Refuses: to know what makes a
//! pair good; that is the caller's one function.
//!
//! The `tokenizers` crate is not used for this: SentencePiece needs the loop anyway (there is no score-greedy model in that crate),
//! and its BPE merges across characters that it has no token for, where llama.cpp keeps them apart.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// A part of the text that is, or is not yet, one token.
#[derive(Debug, Clone)]
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

/// The pieces of one text, and room to merge them that is kept from text to text.
#[derive(Debug, Default)]
pub(crate) struct Merger {
    pieces: Vec<Piece>,
    neighbours: Vec<Neighbours>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Merges `pieces`, which follow one another without gaps, by the pairs that `merge_of` knows, and returns what is left.
    pub(crate) fn merge(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        merge_of: impl Fn(&Piece, &Piece) -> Option<Merge>,
    ) -> impl Iterator<Item = &Piece> {
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
            self.consider(right - 1, right, &merge_of);
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
                self.consider(left, next, &merge_of);
            }
            if let Some(previous) = self.neighbours[left].left {
                self.consider(previous, left, &merge_of);
            }
        }
        self.pieces.iter().filter(|piece| !piece.range.is_empty())
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

    /// Merges the characters of `text` by a list of words, earlier ones first.
    fn merged(text: &str, words: &[&str]) -> Vec<String> {
        let chars = text.char_indices().map(|(start, character)| Piece {
            range: start..start + character.len_utf8(),
            token: None,
        });
        Merger::default()
            .merge(chars, |left, right| {
                let rank = words
                    .iter()
                    .position(|word| *word == &text[left.range.start..right.range.end])?;
                Some(Merge {
                    rank: rank as u32,
                    token: rank as u32,
                })
            })
            .map(|piece| text[piece.range.clone()].to_owned())
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
}
