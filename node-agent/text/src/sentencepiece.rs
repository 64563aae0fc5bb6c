//! SentencePiece as llama.cpp has it (`tokenizer.ggml.model` = `llama`): the neighbours whose union has the highest score are merged
//! first, and a character without a token is spelled in byte tokens.
//!
//! Decides: the tokens of a text that holds no special tokens, and the bytes of a token. Refuses: a text that would need a byte token
//! that the vocabulary lacks; to produce control tokens, whatever the text spells.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use prima_gguf::Metadata;

use crate::merge::{Merge, Merger, Piece};
use crate::tokenizer_error::TokenizerError;
use crate::tokens::Tokens;
use crate::vocabulary::{TokenKind, Vocabulary};

/// The character that stands for a space in the vocabulary: U+2581, lower one eighth block.
pub(crate) const SPACE: &str = "\u{2581}";

/// SentencePiece with a model's scores.
#[derive(Debug)]
pub(crate) struct SentencePiece {
    /// Tokens that text can become, by their text; a higher score gives a better rank.
    pieces: HashMap<String, Merge>,
    bytes: [Option<u32>; 256],
    /// Whether a text gets a space before it, as if it were a word in a sentence.
    pub(crate) add_space_prefix: bool,
}

impl SentencePiece {
    pub(crate) fn from_gguf(
        metadata: &Metadata,
        vocabulary: &Vocabulary,
    ) -> Result<Self, TokenizerError> {
        let scores = metadata
            .f32s(SCORES)?
            .ok_or(TokenizerError::MissingScores { key: SCORES })?;
        if scores.len() != vocabulary.len() {
            return Err(TokenizerError::Length {
                key: SCORES,
                expected: format!("{}, one for each token", vocabulary.len()),
                found: scores.len(),
            });
        }
        let mut pieces = HashMap::new();
        let mut bytes = [None; 256];
        for ((token, text, kind), &score) in vocabulary.iter().zip(scores) {
            if score.is_nan() {
                return Err(TokenizerError::Score { token });
            }
            match kind {
                TokenKind::Normal | TokenKind::UserDefined => {
                    let rank = rank(score);
                    pieces.insert(text.to_owned(), Merge { rank, token });
                }
                TokenKind::Byte(byte) => bytes[usize::from(byte)] = Some(token),
                TokenKind::Unknown | TokenKind::Control | TokenKind::Unused => {}
            }
        }
        Ok(Self {
            pieces,
            bytes,
            add_space_prefix: metadata.bool(ADD_SPACE_PREFIX)?.unwrap_or(true),
        })
    }

    /// Appends the tokens of `text`; `first`: nothing, or a special token, comes before it.
    pub(crate) fn encode(
        &self,
        text: &str,
        first: bool,
        tokens: &mut Tokens,
    ) -> Result<(), TokenizerError> {
        let mut escaped = String::with_capacity(text.len() + SPACE.len());
        if self.add_space_prefix && first {
            escaped.push_str(SPACE);
        }
        escaped.push_str(&text.replace(' ', SPACE));

        let piece_of = |text: &str| self.pieces.get(text).copied();
        Merger::default().merge(
            escaped.len(),
            |start| {
                characters(&escaped, start).map(|(range, _)| Piece {
                    token: piece_of(&escaped[range.clone()]).map(|piece| piece.token),
                    range,
                })
            },
            |left, right| piece_of(&escaped[left.range.start..right.range.end]),
            |piece, tokens| match piece.token {
                Some(token) => tokens.push(token),
                None => spell(&escaped[piece.range.clone()], &self.bytes, tokens),
            },
            tokens,
        )
    }
}

/// The characters of `text` from byte `start` on, and where they are.
pub(crate) fn characters(
    text: &str,
    start: usize,
) -> impl Iterator<Item = (Range<usize>, char)> + '_ {
    text[start..].char_indices().map(move |(at, character)| {
        let at = start + at;
        (at..at + character.len_utf8(), character)
    })
}

/// Appends the byte tokens of a text that has no token; `bytes`: the token of each byte.
pub(crate) fn spell(
    text: &str,
    bytes: &[Option<u32>; 256],
    tokens: &mut Tokens,
) -> Result<(), TokenizerError> {
    for byte in text.bytes() {
        let token = bytes[usize::from(byte)];
        tokens.push(token.ok_or(TokenizerError::NoByteToken { byte })?)?;
    }
    Ok(())
}

/// The bytes that a normal token stands for.
pub(crate) fn token_bytes(text: &str) -> Cow<'_, [u8]> {
    if text.contains(SPACE) {
        Cow::Owned(text.replace(SPACE, " ").into_bytes())
    } else {
        Cow::Borrowed(text.as_bytes())
    }
}

const SCORES: &str = "tokenizer.ggml.scores";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// A number that falls as the score rises, and is equal for equal scores. The score is not NaN.
fn rank(score: f32) -> u32 {
    // Adding zero makes -0.0 equal to 0.0. The bits of floats of one sign are ordered as the floats are.
    let bits = (score + 0.0).to_bits();
    if score < 0.0 { bits } else { !(bits | 1 << 31) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_falls_as_the_score_rises() {
        let scores = [
            f32::NEG_INFINITY,
            f32::MIN,
            -31999.0,
            -1.0,
            -f32::MIN_POSITIVE,
            0.0,
            f32::MIN_POSITIVE,
            1.0,
            f32::INFINITY,
        ];
        assert!(scores.is_sorted_by_key(|&score| std::cmp::Reverse(rank(score))));
        let mut ranks: Vec<u32> = scores.map(rank).into();
        ranks.dedup();
        assert_eq!(ranks.len(), scores.len());
        assert_eq!(rank(-0.0), rank(0.0));
    }
}
