//! Tokens into text as they come, one by one.
//!
//! Decides: when the bytes so far are whole characters. Refuses: to emit half a character (it is held until the rest has come), or to
//! hold bytes that can no longer become one (they become U+FFFD at once).

use crate::tokenizer::Tokenizer;

/// The text of one answer, while it grows.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    /// The beginning of a character; at most three bytes between calls.
    held: Vec<u8>,
    /// Control tokens that add their names.
    shown: Vec<u32>,
}

impl Detokenizer {
    /// Begins the text of an answer, token by token. An answer continues its prompt: a space at its beginning is kept.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            tokenizer: tokenizer.clone(),
            held: Vec::new(),
            shown: Vec::new(),
        }
    }

    /// Has these control tokens add their names, for whoever takes the answer apart by them.
    pub fn showing(self, control_tokens: Vec<u32>) -> Self {
        Self {
            shown: control_tokens,
            ..self
        }
    }

    /// Takes the next token and returns the characters that it completes; often a word, sometimes nothing. Control tokens and
    /// tokens that are not in the vocabulary add nothing.
    pub fn push(&mut self, token: u32) -> String {
        let Self {
            tokenizer,
            held,
            shown,
        } = self;
        match shown.contains(&token) {
            true => held.extend_from_slice(tokenizer.token_text(token).as_bytes()),
            false => held.extend_from_slice(&tokenizer.token_bytes(token)),
        }
        take_characters(held)
    }

    /// Whether the tokens so far end within a character.
    pub(crate) fn holds_back(&self) -> bool {
        !self.held.is_empty()
    }

    /// Ends the text: bytes still held are incomplete and become U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}

/// Moves all but the beginning of an unfinished character out of `held`; invalid bytes become U+FFFD, one for each maximal part of a
/// character as the Unicode standard recommends (section 3.9), which is also what [`String::from_utf8_lossy`] does.
fn take_characters(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = held.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                // Valid by what `valid_up_to` says: nothing is replaced here.
                text.push_str(&String::from_utf8_lossy(valid));
                rest = after;
                let Some(invalid) = error.error_len() else {
                    break;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &rest[invalid..];
            }
        }
    }
    let taken = held.len() - rest.len();
    held.drain(..taken);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Feeds `bytes` in chunks of the given sizes, over and over; returns what came out and what was held at the end.
    fn streamed(bytes: &[u8], sizes: &[usize]) -> (String, Vec<u8>) {
        let mut held = Vec::new();
        let mut text = String::new();
        let mut rest = bytes;
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (chunk, after) = rest.split_at((*size).min(rest.len()));
            held.extend_from_slice(chunk);
            text += &take_characters(&mut held);
            assert!(held.len() < 4, "{held:?}");
            rest = after;
        }
        (text, held)
    }

    #[test]
    fn a_character_comes_out_when_its_last_byte_has() {
        let mut held = Vec::new();
        let mut emitted = Vec::new();
        for byte in "aé€🦀".bytes() {
            held.push(byte);
            emitted.push(take_characters(&mut held));
        }
        assert_eq!(emitted, ["a", "", "é", "", "", "€", "", "", "", "🦀"]);
    }

    #[test]
    fn what_cannot_become_a_character_is_replaced_at_once() {
        let mut held = b"a\xff".to_vec();
        assert_eq!(take_characters(&mut held), "a\u{FFFD}");
        held.extend(b"\xe2\x82");
        assert_eq!(take_characters(&mut held), "");
        held.extend(b"A");
        assert_eq!(take_characters(&mut held), "\u{FFFD}A");
        assert!(held.is_empty());
    }

    proptest! {
        #[test]
        fn chunks_do_not_change_the_text(bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x80..0xf5u8], 0..200),
                                         sizes in prop::collection::vec(1..7usize, 1..5)) {
            let (mut text, held) = streamed(&bytes, &sizes);
            text += &String::from_utf8_lossy(&held);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
