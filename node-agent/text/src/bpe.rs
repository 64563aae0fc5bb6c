//! Byte-level byte-pair encoding (`tokenizer.ggml.model` = `gpt2`): words, cut by the pre-tokenizer, are merged from their bytes.
//!
//! Decides: the tokens of a text that holds no special tokens, and the bytes of a token. Refuses: merges whose parts or result are
//! not in the vocabulary.
//!
//! The file writes bytes as printable characters (GPT-2's table: byte 32 is `Ġ`); here everything after reading is bytes and ids.

use std::borrow::Cow;
use std::collections::HashMap;

use prima_gguf::Metadata;

use crate::merge::{Merge, Merger, Piece};
use crate::pre_tokenizer::{PreTokenizer, known_names};
use crate::tokenizer_error::TokenizerError;
use crate::tokens::Tokens;
use crate::vocabulary::{TokenKind, Vocabulary};

/// Byte-pair encoding with a model's merges.
#[derive(Debug)]
pub(crate) struct Bpe {
    pre_tokenizer: PreTokenizer,
    /// The token of each byte; none where the vocabulary lacks it.
    bytes: [Option<u32>; 256],
    merges: HashMap<(u32, u32), Merge>,
    /// Tokens by their bytes, where whole words are looked up.
    words: HashMap<Vec<u8>, u32>,
}

impl Bpe {
    pub(crate) fn from_gguf(
        metadata: &Metadata,
        vocabulary: &Vocabulary,
    ) -> Result<Self, TokenizerError> {
        let Some(pre) = metadata.str(PRE)? else {
            return Err(TokenizerError::MissingPreTokenizer {
                known: known_names(),
            });
        };
        let pre_tokenizer = PreTokenizer::from_name(pre)?;

        let mut bytes = [None; 256];
        let mut words = HashMap::new();
        for (id, text, kind) in vocabulary.iter() {
            if kind != TokenKind::Normal {
                continue;
            }
            let spelled = token_bytes(text);
            if let [byte] = *spelled {
                bytes[usize::from(byte)] = Some(id);
            }
            if pre_tokenizer.ignore_merges {
                words.insert(spelled.into_owned(), id);
            }
        }

        Ok(Self {
            pre_tokenizer,
            bytes,
            merges: read_merges(metadata, vocabulary)?,
            words,
        })
    }

    /// Whether prompts begin with BOS unless the metadata says otherwise.
    pub(crate) fn add_bos(&self) -> bool {
        self.pre_tokenizer.add_bos
    }

    /// Appends the tokens of `text`. A byte that the vocabulary lacks is left out, as in llama.cpp: SmolLM2 has no tokens for some
    /// control characters and for Unicode planes without assigned characters.
    pub(crate) fn encode(&self, text: &str, tokens: &mut Tokens) -> Result<(), TokenizerError> {
        let mut merger = Merger::default();
        self.pre_tokenizer.each_word(text, &mut |word| {
            if self.pre_tokenizer.ignore_merges
                && let Some(&token) = self.words.get(word.as_bytes())
            {
                return tokens.push(token);
            }
            merger.merge(
                word.len(),
                |start| {
                    (start..word.len()).map(|at| Piece {
                        range: at..at + 1,
                        token: self.bytes[usize::from(word.as_bytes()[at])],
                    })
                },
                |left, right| self.merges.get(&(left.token?, right.token?)).copied(),
                |piece, tokens| piece.token.map_or(Ok(()), |token| tokens.push(token)),
                tokens,
            )
        })
    }

    /// How many bytes of `text` are not left out.
    pub(crate) fn known_bytes(&self, text: &str) -> usize {
        let known = |byte: &u8| self.bytes[usize::from(*byte)].is_some();
        text.bytes().filter(known).count()
    }
}

/// The bytes that a token's text spells in GPT-2's table; the text itself if it is not written in that table.
pub(crate) fn token_bytes(text: &str) -> Cow<'_, [u8]> {
    match text.chars().map(byte_of).collect::<Option<Vec<u8>>>() {
        Some(bytes) => Cow::Owned(bytes),
        None => Cow::Borrowed(text.as_bytes()),
    }
}

const PRE: &str = "tokenizer.ggml.pre";
const MERGES: &str = "tokenizer.ggml.merges";

/// What two neighbouring tokens become.
pub(crate) fn read_merges(
    metadata: &Metadata,
    vocabulary: &Vocabulary,
) -> Result<HashMap<(u32, u32), Merge>, TokenizerError> {
    let lines = metadata.require_strings(MERGES)?;
    let mut merges = HashMap::with_capacity(lines.len());
    for (rank, line) in (0..).zip(lines.iter()) {
        let merge = read_merge(vocabulary, line).ok_or_else(|| TokenizerError::Merge {
            rank,
            line: line.to_owned(),
        })?;
        let (pair, token) = merge;
        // The first of two equal lines counts.
        merges.entry(pair).or_insert(Merge { rank, token });
    }
    Ok(merges)
}

/// Reads a line `left right`: the tokens of both, and the token of their union.
fn read_merge(vocabulary: &Vocabulary, line: &str) -> Option<((u32, u32), u32)> {
    // In the table a space is `Ġ`, so a plain space is the separator. But in files that are not written in the table, the left part
    // may itself be a single space.
    let first = line.chars().next()?.len_utf8();
    let separator = first + line.get(first..)?.find(' ')?;
    let (left, right) = (&line[..separator], &line[separator + 1..]);
    let pair = (vocabulary.id(left)?, vocabulary.id(right)?);
    Some((pair, vocabulary.id(&[left, right].concat())?))
}

/// GPT-2's table, backwards: printable characters of Latin-1 stand for themselves, the others are numbered from U+0100 on.
pub(crate) fn byte_of(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_every_byte_once() {
        let mut named: Vec<u8> = ('\0'..='\u{200}').filter_map(byte_of).collect();
        named.sort_unstable();
        assert_eq!(named, (0..=255).collect::<Vec<u8>>());
        assert_eq!(
            token_bytes("ĠaĊ\u{142}\u{121}\u{120}").as_ref(),
            b" a\n\xA0\x7F\x20".as_slice()
        );
    }

    #[test]
    fn a_text_that_is_not_in_the_table_stands_for_itself() {
        assert_eq!(token_bytes("日本").as_ref(), "日本".as_bytes());
        assert_eq!(token_bytes("a b").as_ref(), b"a b");
    }
}
