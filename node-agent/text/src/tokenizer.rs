//! The tokenizer of a model, from its GGUF metadata.
//!
//! Decides: what begins and ends a prompt, as llama.cpp does. Special tokens are for [`crate::special_tokens`], and the text between them
//! is for [`crate::bpe`], [`crate::character_bpe`] or [`crate::sentencepiece`]. Refuses: tokenizers that it does not know, and vocabularies
//! that do not add up.

use std::borrow::Cow;
use std::sync::Arc;

use prima_gguf::Metadata;

use crate::bpe::{self, Bpe};
use crate::character_bpe::CharacterBpe;
use crate::sentencepiece::{self, SentencePiece};
use crate::special_tokens::{Fragment, SpecialTokens};
use crate::tokenizer_error::TokenizerError;
use crate::tokens::Tokens;
use crate::vocabulary::{FillIn, TokenKind, Vocabulary};

/// Text to tokens and back. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Tokenizer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    vocabulary: Vocabulary,
    model: Model,
    special: SpecialTokens,
    /// No token stands for more bytes of a text.
    longest_token: usize,
    /// The token that `add_special` puts at the beginning.
    begin: Option<u32>,
    /// The token that `add_special` puts at the end.
    end: Option<u32>,
}

#[derive(Debug)]
enum Model {
    Bpe(Box<Bpe>),
    CharacterBpe(Box<CharacterBpe>),
    SentencePiece(Box<SentencePiece>),
}

impl Tokenizer {
    /// Reads `tokenizer.ggml.*`. Errors name the key, what it holds and what is allowed.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let name = metadata.require_str(MODEL)?;
        // Defaults for special tokens and for adding them are llama.cpp's, with one exception: for byte-pair encoding its BOS and EOS
        // are 11, which is Falcon's and wrong for every other model, so here there is no default.
        let (vocabulary, model, add_bos) = match name {
            "gpt2" => {
                let vocabulary = Vocabulary::from_gguf(metadata, None, None)?;
                let bpe = Bpe::from_gguf(metadata, &vocabulary)?;
                let add_bos = bpe.add_bos();
                (vocabulary, Model::Bpe(Box::new(bpe)), add_bos)
            }
            "llama" => {
                let vocabulary = Vocabulary::from_gguf(metadata, Some(1), Some(2))?;
                let sentencepiece = SentencePiece::from_gguf(metadata, &vocabulary)?;
                (
                    vocabulary,
                    Model::SentencePiece(Box::new(sentencepiece)),
                    true,
                )
            }
            "gemma4" => {
                let vocabulary = Vocabulary::from_gguf(metadata, None, None)?;
                let bpe = CharacterBpe::from_gguf(metadata, &vocabulary)?;
                (vocabulary, Model::CharacterBpe(Box::new(bpe)), true)
            }
            found => {
                return Err(TokenizerError::UnknownModel {
                    found: found.to_owned(),
                });
            }
        };
        let begin = added(metadata, ADD_BOS, add_bos, vocabulary.bos, "BOS")?;
        let end = added(metadata, ADD_EOS, false, vocabulary.eos, "EOS")?;
        let special = SpecialTokens::of(metadata, &vocabulary)?;
        let longest_token = match special.strip_white_space() {
            true => usize::MAX,
            false => vocabulary.longest_text(),
        };
        Ok(Self(Arc::new(Inner {
            vocabulary,
            model,
            special,
            longest_token,
            begin,
            end,
        })))
    }

    /// The tokens of `text`. `add_special` adds BOS and EOS where the model wants them. `parse_special` finds control tokens in the
    /// text (for prompts from a chat template); without it they are text like any other (for what users write). The error is a text
    /// that the vocabulary cannot spell.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        self.encode_at_most(usize::MAX, text, add_special, parse_special)
    }

    /// As [`encode`](Self::encode), but a text of more than `limit` tokens is [`TokenizerError::TooLong`], which is found out early:
    /// whatever the text, memory is that of `limit` tokens, of the text's length three times, and some 15 MB.
    pub fn encode_at_most(
        &self,
        limit: usize,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        if self.fewest_tokens(text) > limit {
            return Err(TokenizerError::TooLong { limit });
        }
        let mut tokens = Tokens::at_most(limit);
        if let (true, Some(begin)) = (add_special, self.0.begin) {
            tokens.push(begin)?;
        }
        let mut after_special = true;
        for fragment in self.0.special.cut_out_of(text, parse_special, limit)? {
            match (fragment, &self.0.model) {
                (Fragment::Token(token), _) => tokens.push(token)?,
                (Fragment::Text(text), Model::Bpe(bpe)) => bpe.encode(text, &mut tokens)?,
                (Fragment::Text(text), Model::CharacterBpe(bpe)) => {
                    bpe.encode(text, &mut tokens)?
                }
                (Fragment::Text(text), Model::SentencePiece(sentencepiece)) => {
                    sentencepiece.encode(text, after_special, &mut tokens)?;
                }
            }
            after_special = matches!(fragment, Fragment::Token(_));
        }
        if let (true, Some(end)) = (add_special, self.0.end) {
            tokens.push(end)?;
        }
        Ok(tokens.into_ids())
    }

    /// What `text` has at least, found by its length alone.
    fn fewest_tokens(&self, text: &str) -> usize {
        let bytes = match &self.0.model {
            Model::Bpe(bpe) => bpe.known_bytes(text),
            Model::CharacterBpe(_) | Model::SentencePiece(_) => text.len(),
        };
        bytes / self.0.longest_token
    }

    /// The text of `tokens` from the beginning of a text: control tokens add nothing, and the space that SentencePiece puts before a
    /// text is taken off again. Bytes that are no UTF-8 are U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &token in tokens {
            bytes.extend_from_slice(&self.token_bytes(token));
        }
        let prefixed = match &self.0.model {
            Model::SentencePiece(sentencepiece) => sentencepiece.add_space_prefix,
            Model::Bpe(_) | Model::CharacterBpe(_) => false,
        };
        let bytes = match bytes.strip_prefix(b" ") {
            Some(rest) if prefixed => rest,
            _ => &bytes,
        };
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// What `token` adds to a text that it continues: nothing for control tokens, and for ids outside the vocabulary (a model may have
    /// more rows than tokens). Often not whole characters; see [`Tokenizer::detokenizer`].
    pub fn token_bytes(&self, token: u32) -> Cow<'_, [u8]> {
        let Some((text, kind)) = self.0.vocabulary.get(token) else {
            return Cow::Borrowed(&[]);
        };
        match (kind, &self.0.model) {
            (TokenKind::Normal, Model::Bpe(_)) => bpe::token_bytes(text),
            (TokenKind::Normal, Model::SentencePiece(_) | Model::CharacterBpe(_)) => {
                sentencepiece::token_bytes(text)
            }
            (TokenKind::UserDefined, _) => Cow::Borrowed(text.as_bytes()),
            (TokenKind::Byte(byte), _) => Cow::Owned(vec![byte]),
            (TokenKind::Control | TokenKind::Unknown | TokenKind::Unused, _) => Cow::Borrowed(&[]),
        }
    }

    /// The token as the file writes it, control tokens too; empty for ids outside the vocabulary.
    pub fn token_text(&self, token: u32) -> &str {
        self.0.vocabulary.get(token).map_or("", |(text, _)| text)
    }

    /// The tokens of a model that was trained to fill in the middle.
    pub fn fill_in(&self) -> Option<FillIn> {
        self.0.vocabulary.fill_in
    }

    /// The name of a token that is structure, not text.
    pub fn control_text(&self, token: u32) -> Option<&str> {
        let (text, kind) = self.0.vocabulary.get(token)?;
        (kind == TokenKind::Control).then_some(text)
    }

    /// The token of structure with this name.
    pub fn control_token(&self, name: &str) -> Option<u32> {
        let token = self.0.vocabulary.id(name)?;
        self.control_text(token).map(|_| token)
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.0.vocabulary.len()
    }

    /// The token that begins texts, where the model has one; whether [`Tokenizer::encode`] adds it is another question.
    pub fn bos(&self) -> Option<u32> {
        self.0.vocabulary.bos
    }

    /// The token that ends texts, where the model has one. More than this one may end an answer.
    pub fn eos(&self) -> Option<u32> {
        self.0.vocabulary.eos
    }

    /// Whether a model that produces `token` has finished its answer: EOS, end of turn, end of message and their like.
    pub fn is_end_of_generation(&self, token: u32) -> bool {
        self.0.vocabulary.is_end_of_generation(token)
    }
}

const MODEL: &str = "tokenizer.ggml.model";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";

/// The token that is put at one end of every prompt, where key or default say so.
fn added(
    metadata: &Metadata,
    key: &'static str,
    default: bool,
    token: Option<u32>,
    name: &'static str,
) -> Result<Option<u32>, TokenizerError> {
    if !metadata.bool(key)?.unwrap_or(default) {
        return Ok(None);
    }
    match token {
        Some(token) => Ok(Some(token)),
        None => Err(TokenizerError::NoSuchSpecialToken { key, name }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prima_gguf::Value;

    /// A vocabulary of byte-level BPE with `<s>`, `</s>`, `<tool>` and a few words.
    fn bpe() -> Vec<(&'static str, Value)> {
        let tokens = [
            "<s>",
            "</s>",
            "<tool>",
            "a",
            "b",
            "c",
            "Ġ",
            "ab",
            "Ġab",
            "Ċ",
            "<|im_end|>",
            "<|end|>",
        ];
        vec![
            ("tokenizer.ggml.model", "gpt2".into()),
            ("tokenizer.ggml.pre", "gpt-2".into()),
            ("tokenizer.ggml.tokens", texts(&tokens)),
            (
                "tokenizer.ggml.token_type",
                vec![3, 3, 4, 1, 1, 1, 1, 1, 1, 1, 4, 1].into(),
            ),
            ("tokenizer.ggml.merges", texts(&["a b", "Ġ ab"])),
            ("tokenizer.ggml.bos_token_id", 0_u32.into()),
            ("tokenizer.ggml.eos_token_id", 1_u32.into()),
        ]
    }

    /// A vocabulary of SentencePiece with byte tokens for "é" and the scores as given.
    fn sentencepiece() -> Vec<(&'static str, Value)> {
        let tokens = [
            "<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "▁a", "ab", "▁ab", "<s", ">",
        ];
        let scores = vec![
            0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -2.0, -1.0, -3.0, -4.0, -5.0_f32,
        ];
        vec![
            ("tokenizer.ggml.model", "llama".into()),
            ("tokenizer.ggml.tokens", texts(&tokens)),
            ("tokenizer.ggml.scores", scores.into()),
            (
                "tokenizer.ggml.token_type",
                vec![2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1].into(),
            ),
        ]
    }

    fn texts(texts: &[&str]) -> Value {
        texts
            .iter()
            .map(|text| (*text).to_owned())
            .collect::<Vec<String>>()
            .into()
    }

    fn with(
        mut entries: Vec<(&'static str, Value)>,
        key: &'static str,
        value: Value,
    ) -> Vec<(&'static str, Value)> {
        entries.retain(|(other, _)| *other != key);
        entries.push((key, value));
        entries
    }

    fn read(entries: Vec<(&'static str, Value)>) -> Result<Tokenizer, TokenizerError> {
        let entries = entries
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value));
        Tokenizer::from_gguf(&Metadata::new("model.gguf", entries.collect()).unwrap())
    }

    fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, false, false).unwrap()
    }

    #[test]
    fn words_are_merged_and_special_tokens_found() {
        let tokenizer = read(bpe()).unwrap();
        assert_eq!(encode(&tokenizer, "ab ab ba"), [7, 8, 6, 4, 3]);
        assert_eq!(encode(&tokenizer, "a<tool>b"), [3, 2, 4]);
        // Bytes without a token are left out, as in llama.cpp: here those of "<s>", which nobody asked to find.
        assert_eq!(encode(&tokenizer, "a<s>b"), [3, 4]);
        assert_eq!(tokenizer.encode("a<s>b", false, true).unwrap(), [3, 0, 4]);
        assert_eq!(tokenizer.decode(&[0, 8, 9, 2, 1, 999]), " ab\n<tool>");
        assert_eq!(
            (tokenizer.bos(), tokenizer.eos(), tokenizer.token_text(8)),
            (Some(0), Some(1), "Ġab")
        );
    }

    #[test]
    fn ends_are_added_where_the_file_says_so() {
        let add = |key| with(bpe(), key, true.into());
        let encode = |entries| read(entries).unwrap().encode("c", true, false).unwrap();
        assert_eq!(encode(bpe()), [5]);
        assert_eq!(encode(add("tokenizer.ggml.add_bos_token")), [0, 5]);
        assert_eq!(encode(add("tokenizer.ggml.add_eos_token")), [5, 1]);
        let llama3 = with(bpe(), "tokenizer.ggml.pre", "llama-bpe".into());
        assert_eq!(encode(llama3), [0, 5]);
    }

    #[test]
    fn generations_end_at_control_tokens_only() {
        let tokenizer = read(bpe()).unwrap();
        let ends: Vec<u32> = (0..12)
            .filter(|token| tokenizer.is_end_of_generation(*token))
            .collect();
        // 10 is user-defined, but still structure; 11 is a normal token.
        assert_eq!(ends, [1, 10]);
        assert_eq!(tokenizer.decode(&[10, 11]), "<|end|>");
        let with_eot = read(with(bpe(), "tokenizer.ggml.eot_token_id", 9_u32.into())).unwrap();
        assert!(with_eot.is_end_of_generation(9));
    }

    /// Google's first quantized files of Gemma 3 have them as normal tokens.
    #[test]
    fn the_marks_of_turns_are_structure_in_whatever_kind() {
        let tokens = ["a", "<start_of_turn>", "<end_of_turn>", "</s>", "<eos>"];
        let entries = vec![
            ("tokenizer.ggml.model", "gpt2".into()),
            ("tokenizer.ggml.pre", "gpt-2".into()),
            ("tokenizer.ggml.tokens", texts(&tokens)),
            ("tokenizer.ggml.token_type", vec![1, 1, 1, 4, 3].into()),
            ("tokenizer.ggml.merges", texts(&[])),
            ("tokenizer.ggml.eos_token_id", 4_u32.into()),
        ];
        let tokenizer = read(entries).unwrap();
        let encoded = tokenizer.encode("<start_of_turn>a<end_of_turn>", false, true);
        assert_eq!(encoded.unwrap(), [1, 0, 2]);
        assert_eq!(tokenizer.decode(&[1, 0, 2]), "a");
        // There, `</s>` ends what is struck out.
        let ends = [0, 1, 2, 3, 4].map(|token| tokenizer.is_end_of_generation(token));
        assert_eq!(ends, [false, false, true, false, true]);
        assert_eq!(tokenizer.decode(&[0, 3]), "a</s>");
    }

    #[test]
    fn the_marks_of_a_gap_are_found_by_older_keys_and_by_texts() {
        let fill_in = |tokens: [&str; 3], keys: [Option<&'static str>; 3]| {
            let mut entries = vec![
                ("tokenizer.ggml.model", "gpt2".into()),
                ("tokenizer.ggml.pre", "gpt-2".into()),
                ("tokenizer.ggml.tokens", texts(&tokens)),
                ("tokenizer.ggml.token_type", vec![3, 3, 3].into()),
                ("tokenizer.ggml.merges", texts(&[])),
            ];
            for (id, key) in (0_u32..).zip(keys) {
                entries.extend(key.map(|key| (key, id.into())));
            }
            let fill_in = read(entries).unwrap().fill_in();
            fill_in.map(|gap| [gap.before, gap.after, gap.between])
        };
        let words = ["x", "y", "z"];
        let older = [
            "tokenizer.ggml.prefix_token_id",
            "tokenizer.ggml.suffix_token_id",
            "tokenizer.ggml.middle_token_id",
        ];
        assert_eq!(fill_in(words, [None; 3]), None);
        assert_eq!(fill_in(words, older.map(Some)), Some([0, 1, 2]));
        let code_llama = ["\u{2581}<PRE>", "\u{2581}<SUF>", "\u{2581}<MID>"];
        assert_eq!(fill_in(code_llama, [None; 3]), Some([0, 1, 2]));
        let glm = ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"];
        assert_eq!(fill_in(glm, [None; 3]), Some([0, 1, 2]));
    }

    /// What ends a message ends an answer, unless the model writes several messages in one.
    #[test]
    fn an_answer_of_several_messages_goes_on_behind_one() {
        let ends = |extra: &str| {
            let tokens = ["a", "<|end|>", "<|return|>", extra];
            let entries = vec![
                ("tokenizer.ggml.model", "gpt2".into()),
                ("tokenizer.ggml.pre", "gpt-2".into()),
                ("tokenizer.ggml.tokens", texts(&tokens)),
                ("tokenizer.ggml.token_type", vec![1, 3, 3, 3].into()),
                ("tokenizer.ggml.merges", texts(&[])),
            ];
            let tokenizer = read(entries).unwrap();
            (0..4)
                .filter(|token| tokenizer.is_end_of_generation(*token))
                .collect::<Vec<u32>>()
        };
        assert_eq!(ends("<|start|>"), [1, 2]);
        assert_eq!(ends("<|call|>"), [2, 3]);
        assert_eq!(ends("<|observation|>"), [1, 2, 3]);
    }

    #[test]
    fn the_best_score_is_merged_first_and_bytes_spell_the_rest() {
        let tokenizer = read(sentencepiece()).unwrap();
        // "ab" (-1) before "▁a" (-2), then "▁ab".
        assert_eq!(encode(&tokenizer, "ab"), [10]);
        assert_eq!(encode(&tokenizer, "é"), [5, 3, 4]);
        assert_eq!(encode(&tokenizer, ""), [0; 0]);
        let message = tokenizer.encode("ü", false, false).unwrap_err().to_string();
        assert!(message.contains("0xBC"), "{message}");
    }

    #[test]
    fn text_never_becomes_a_control_token_of_sentencepiece() {
        let tokenizer = read(sentencepiece()).unwrap();
        // "<s" and ">" are tokens, and so is their union, with the best of all scores.
        assert_eq!(encode(&tokenizer, "<s>"), [5, 11, 12]);
        assert_eq!(tokenizer.encode("<s>", false, true).unwrap(), [1]);
    }

    #[test]
    fn only_a_continuation_keeps_the_space_before_it() {
        let tokenizer = read(sentencepiece()).unwrap();
        assert_eq!(tokenizer.encode("ab", true, false).unwrap(), [1, 10]);
        assert_eq!(tokenizer.decode(&[1, 10, 8]), "ab a");
        assert_eq!(tokenizer.decode(&[10, 8]), "ab a");
        let mut detokenizer = crate::Detokenizer::new(&tokenizer);
        assert_eq!(detokenizer.push(10) + &detokenizer.push(3), " ab");
        assert_eq!(detokenizer.push(4), "é");
        assert_eq!(detokenizer.push(3) + &detokenizer.finish(), "\u{FFFD}");
        let without = with(
            sentencepiece(),
            "tokenizer.ggml.add_space_prefix",
            false.into(),
        );
        let without = read(without).unwrap();
        assert_eq!(encode(&without, "ab"), [9]);
        assert_eq!(without.decode(&[10]), " ab");
    }

    #[test]
    fn phi_3_strips_what_follows_its_special_tokens() {
        let named = with(sentencepiece(), "general.name", "Phi-3 Mini".into());
        let encode = |entries| {
            read(entries)
                .unwrap()
                .encode("</s> \n ab", false, true)
                .unwrap()
        };
        assert_eq!(encode(named), [2, 10]);
        assert!(
            read(sentencepiece())
                .unwrap()
                .encode("</s> ab", false, true)
                .unwrap()
                .len()
                > 2
        );
    }

    #[test]
    fn what_does_not_add_up_is_refused_by_name() {
        let tokens = "tokenizer.ggml.tokens";
        let types = "tokenizer.ggml.token_type";
        let scores = "tokenizer.ggml.scores";
        let cases = [
            (
                with(bpe(), "tokenizer.ggml.model", "bert".into()),
                "\"gemma4\" (the same from characters) or \"llama\" (SentencePiece), found \"bert\"",
            ),
            (
                with(bpe(), "tokenizer.ggml.pre", "default".into()),
                "kimi-k2, found \"default\"",
            ),
            (
                with(bpe(), "tokenizer.ggml.merges", texts(&["a b", "b x"])),
                "line 1: expected two tokens whose union is a token, found \"b x\"",
            ),
            (
                with(bpe(), "tokenizer.ggml.merges", texts(&["ab"])),
                "line 0",
            ),
            (
                with(bpe(), tokens, texts(&["a", "b", "a"])),
                "found \"a\" as 0 and 2",
            ),
            (with(bpe(), tokens, texts(&[])), "at least one token"),
            (
                with(bpe(), types, vec![1, 1].into()),
                "expected 12, one for each token, found 2 elements",
            ),
            (
                with(bpe(), types, vec![9; 12].into()),
                "token 0: expected a type from 0 to 6, found 9",
            ),
            (
                with(bpe(), types, vec![6; 12].into()),
                "written like \"<0x0A>\", found \"<s>\"",
            ),
            (
                with(bpe(), "tokenizer.ggml.eos_token_id", 12_u32.into()),
                "a token of the vocabulary of 12, found 12",
            ),
            (
                with(sentencepiece(), scores, vec![0.0_f32; 3].into()),
                "found 3 elements",
            ),
            (
                with(sentencepiece(), scores, vec![f32::NAN; 13].into()),
                "token 0: expected a number",
            ),
        ];
        for (entries, expected) in cases {
            let message = read(entries).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let mut without_pre = bpe();
        without_pre.retain(|(key, _)| *key != "tokenizer.ggml.pre");
        assert!(matches!(
            read(without_pre),
            Err(TokenizerError::MissingPreTokenizer { .. })
        ));
        let mut without_bos = with(bpe(), "tokenizer.ggml.add_bos_token", true.into());
        without_bos.retain(|(key, _)| *key != "tokenizer.ggml.bos_token_id");
        assert!(matches!(
            read(without_bos),
            Err(TokenizerError::NoSuchSpecialToken { name: "BOS", .. })
        ));
    }
}
