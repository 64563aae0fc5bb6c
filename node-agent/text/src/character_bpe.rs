//! Byte-pair encoding of whole lines, merged from their characters (`tokenizer.ggml.model` = `gemma4`): spaces are written as in
//! SentencePiece, and a character without a token is spelled in byte tokens.
//!
//! Decides: the tokens of a text that holds no special tokens. Refuses: merges whose parts or result are not in the vocabulary; a text that
//! would need a byte token that the vocabulary lacks.

use std::collections::HashMap;

use prima_gguf::Metadata;

use crate::bpe::read_merges;
use crate::merge::{Merge, Merger, Piece};
use crate::sentencepiece::{SPACE, characters, spell};
use crate::tokenizer_error::TokenizerError;
use crate::tokens::Tokens;
use crate::vocabulary::{TokenKind, Vocabulary};

/// Byte-pair encoding with a model's merges.
#[derive(Debug)]
pub(crate) struct CharacterBpe {
    characters: HashMap<char, u32>,
    /// Tokens of several line feeds: nothing is merged into them.
    line_feeds: HashMap<String, u32>,
    bytes: [Option<u32>; 256],
    merges: HashMap<(u32, u32), Merge>,
}

impl CharacterBpe {
    pub(crate) fn from_gguf(
        metadata: &Metadata,
        vocabulary: &Vocabulary,
    ) -> Result<Self, TokenizerError> {
        let mut characters = HashMap::new();
        let mut line_feeds = HashMap::new();
        let mut bytes = [None; 256];
        for (token, text, kind) in vocabulary.iter() {
            match kind {
                TokenKind::Normal | TokenKind::UserDefined => {
                    let mut all = text.chars();
                    if let (Some(character), None) = (all.next(), all.next()) {
                        characters.insert(character, token);
                    } else if text.bytes().all(|byte| byte == b'\n') {
                        line_feeds.insert(text.to_owned(), token);
                    }
                }
                TokenKind::Byte(byte) => bytes[usize::from(byte)] = Some(token),
                TokenKind::Unknown | TokenKind::Control | TokenKind::Unused => {}
            }
        }
        Ok(Self {
            characters,
            line_feeds,
            bytes,
            merges: read_merges(metadata, vocabulary)?,
        })
    }

    /// Appends the tokens of `text`.
    pub(crate) fn encode(&self, text: &str, tokens: &mut Tokens) -> Result<(), TokenizerError> {
        let text = text.replace(' ', SPACE);
        let mut merger = Merger::default();
        let mut rest = text.as_str();
        while let Some(first) = rest.chars().next() {
            // Line feeds, or what is between them.
            let end = rest.find(|next: char| (next == '\n') != (first == '\n'));
            let (part, behind) = rest.split_at(end.unwrap_or(rest.len()));
            rest = behind;
            if let Some(&token) = self.line_feeds.get(part) {
                tokens.push(token)?;
                continue;
            }
            merger.merge(
                part.len(),
                |start| {
                    characters(part, start).map(|(range, character)| Piece {
                        range,
                        token: self.characters.get(&character).copied(),
                    })
                },
                |left, right| self.merges.get(&(left.token?, right.token?)).copied(),
                |piece, tokens| match piece.token {
                    Some(token) => tokens.push(token),
                    None => spell(&part[piece.range.clone()], &self.bytes, tokens),
                },
                tokens,
            )?;
        }
        Ok(())
    }
}
