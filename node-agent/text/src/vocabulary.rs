//! The tokens of a model: their texts, their kinds, and which of them begin and end texts.
//!
//! Decides: what `tokenizer.ggml.tokens`, `token_type` and the `*_token_id` keys mean; which tokens end a generation. Refuses: a token
//! that occurs twice, a kind that is not one, an id outside the vocabulary.

use std::collections::HashMap;

use prima_gguf::Metadata;

use crate::tokenizer_error::TokenizerError;

/// What kind of token it is: `tokenizer.ggml.token_type`, with llama.cpp's numbers in GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// A part of words (1).
    Normal,
    /// Stands for what has no token (2).
    Unknown,
    /// Structure, never text (3).
    Control,
    /// A text that is always one token (4).
    UserDefined,
    /// No text at all (5, and 0).
    Unused,
    /// One byte of a character that has no token of its own (6).
    Byte(u8),
}

/// The tokens with which a model that completes code is asked to fill in what is missing in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillIn {
    /// Stands before the text before.
    pub before: u32,
    /// Stands before the text after.
    pub after: u32,
    /// Stands before what the model writes.
    pub between: u32,
    /// Stands before the name of a repository, if the model knows repositories.
    pub repository: Option<u32>,
    /// Stands before the name of a file.
    pub file: Option<u32>,
}

/// The tokens of a model.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    texts: Vec<String>,
    kinds: Vec<TokenKind>,
    ids: HashMap<String, u32>,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) fill_in: Option<FillIn>,
    end_of_generation: Vec<u32>,
}

impl Vocabulary {
    /// Reads the tokens. `default_bos` and `default_eos` are those of the tokenizer's model, where the keys are absent.
    pub(crate) fn from_gguf(
        metadata: &Metadata,
        default_bos: Option<u32>,
        default_eos: Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let texts = metadata.require_strings(TOKENS)?;
        if texts.is_empty() || u32::try_from(texts.len()).is_err() {
            return Err(TokenizerError::Length {
                key: TOKENS,
                expected: "at least one token and at most 4294967295".to_owned(),
                found: texts.len(),
            });
        }
        let texts: Vec<String> = texts
            .iter()
            .enumerate()
            .map(|(id, text)| match text {
                // As llama.cpp does: an empty text would be found everywhere.
                "" => format!("[EMPTY_{id}]"),
                text => text.to_owned(),
            })
            .collect();
        let mut ids = HashMap::with_capacity(texts.len());
        for (id, text) in (0..).zip(&texts) {
            if let Some(first) = ids.insert(text.clone(), id) {
                return Err(TokenizerError::DuplicateToken {
                    text: text.clone(),
                    first,
                    second: id,
                });
            }
        }
        let mut kinds = kinds(metadata, &texts)?;

        let special = |key: &'static str| match metadata.u32(key)? {
            Some(id) if id as usize >= texts.len() => Err(TokenizerError::SpecialTokenId {
                key,
                id,
                vocabulary: texts.len(),
            }),
            id => Ok(id),
        };
        let in_vocabulary = |id: &u32| (*id as usize) < texts.len();
        let bos = special("tokenizer.ggml.bos_token_id")?.or(default_bos.filter(in_vocabulary));
        let eos = special("tokenizer.ggml.eos_token_id")?.or(default_eos.filter(in_vocabulary));
        let mut end_of_generation: Vec<u32> = eos.into_iter().collect();
        for key in END_OF_GENERATION_KEYS {
            end_of_generation.extend(special(key)?);
        }
        let mut fill_in = [None; 5];
        for (place, (keys, names)) in fill_in.iter_mut().zip(FILL_IN) {
            for key in keys {
                *place = place.or(special(key)?);
            }
            let named = || names.iter().find_map(|name| ids.get(*name).copied());
            *place = place.or_else(named);
        }
        // In Gemma's vocabulary it ends struck-out text. Gemma ends its answers otherwise.
        let is_markup = |text: &str, id: u32| {
            let gemma = ["<end_of_turn>", "<|tool_response>"];
            text == "</s>" && eos != Some(id) && gemma.iter().any(|text| ids.contains_key(*text))
        };
        let control_texts = FILL_IN.iter().flat_map(|(_, names)| names.iter());
        let control_texts = control_texts.chain(&END_OF_GENERATION_TEXTS);
        for text in control_texts.chain(&NEVER_WRITTEN) {
            let Some(&id) = ids.get(*text).filter(|id| !is_markup(text, **id)) else {
                continue;
            };
            // A normal token with such a text is a word that somebody may write, but for some. If the converter marked it as
            // user-defined, it is still structure: llama.cpp overrides its kind too.
            let kind = &mut kinds[id as usize];
            let marked = matches!(*kind, TokenKind::Control | TokenKind::UserDefined);
            if !marked && !NEVER_WRITTEN.contains(text) {
                continue;
            }
            *kind = TokenKind::Control;
            if END_OF_GENERATION_TEXTS.contains(text) {
                end_of_generation.push(id);
            }
        }
        // Models that write several messages in an answer end each one with this.
        let ends = |text: &str| {
            let id = ids.get(text);
            id.is_some_and(|id| end_of_generation.contains(id))
        };
        if ends("<|return|>") && ends("<|call|>") || ends("<|flush|>") && ends("<|calls|>") {
            let end = ids.get(END_OF_MESSAGE).copied();
            end_of_generation.retain(|id| Some(*id) != end);
        }
        end_of_generation.sort_unstable();
        end_of_generation.dedup();

        Ok(Self {
            texts,
            kinds,
            ids,
            bos,
            eos,
            fill_in: match fill_in {
                [Some(before), Some(after), Some(between), repository, file] => Some(FillIn {
                    before,
                    after,
                    between,
                    repository,
                    file,
                }),
                _ => None,
            },
            end_of_generation,
        })
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.texts.len()
    }

    /// Bytes of the longest text of a token, at least 1.
    pub(crate) fn longest_text(&self) -> usize {
        self.texts.iter().map(String::len).max().unwrap_or(1)
    }

    /// The text and kind of a token, as the file has them.
    pub(crate) fn get(&self, token: u32) -> Option<(&str, TokenKind)> {
        let text = self.texts.get(token as usize)?;
        Some((text, self.kinds[token as usize]))
    }

    /// Every token with its text and kind, by id.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &str, TokenKind)> {
        (0..)
            .zip(self.texts.iter().zip(&self.kinds))
            .map(|(id, (text, kind))| (id, text.as_str(), *kind))
    }

    /// The token with exactly this text, of whatever kind.
    pub(crate) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Whether a model that produces this token has finished its answer.
    pub(crate) fn is_end_of_generation(&self, token: u32) -> bool {
        self.end_of_generation.binary_search(&token).is_ok()
    }
}

pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";

/// Keys whose tokens end a generation, besides EOS. The last three come from models that complete code: what follows is padding, or
/// another file.
const END_OF_GENERATION_KEYS: [&str; 5] = [
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
];

/// Ends a message, and with it the generation, but for models that write several in an answer.
const END_OF_MESSAGE: &str = "<|end|>";

/// Texts that end a generation in the models that have them as control tokens, whatever the keys say; as llama.cpp has them. The last one
/// is not among llama.cpp's: GLM writes it behind a call of a tool, and what follows would be the tool's answer.
const END_OF_GENERATION_TEXTS: [&str; 34] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    END_OF_MESSAGE,
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "[EOT]",
    "[EOS]",
    "[PAD]",
    "[e~[",
    "<turn|>",
    "<|tool_response>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "</s>",
    "<eos>",
    "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
    "<|observation|>",
];

/// Texts that only templates write. They are structure even where a file has them as normal tokens, as Google's first quantized files of
/// Gemma 3 do.
const NEVER_WRITTEN: [&str; 7] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<turn|>",
    "<|end_of_text|>",
    "<start_of_turn>",
    "<end_of_turn>",
];

/// The tokens of code completion: keys, those of older files last, and the texts that models have for them. They are structure, though
/// they end nothing; some converters mark them as user-defined.
const FILL_IN: [(&[&str], &[&str]); 5] = [
    (
        &[
            "tokenizer.ggml.fim_pre_token_id",
            "tokenizer.ggml.prefix_token_id",
        ],
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<\u{FF5C}fim\u{2581}begin\u{FF5C}>",
            "<PRE>",
            "\u{2581}<PRE>",
            "<|code_prefix|>",
        ],
    ),
    (
        &[
            "tokenizer.ggml.fim_suf_token_id",
            "tokenizer.ggml.suffix_token_id",
        ],
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<\u{FF5C}fim\u{2581}hole\u{FF5C}>",
            "<SUF>",
            "\u{2581}<SUF>",
            "<|code_suffix|>",
        ],
    ),
    (
        &[
            "tokenizer.ggml.fim_mid_token_id",
            "tokenizer.ggml.middle_token_id",
        ],
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<\u{FF5C}fim\u{2581}end\u{FF5C}>",
            "<MID>",
            "\u{2581}<MID>",
            "<|code_middle|>",
        ],
    ),
    (
        &["tokenizer.ggml.fim_rep_token_id"],
        &[
            "<|fim_repo|>",
            "<|repo_name|>",
            "<fim-repo>",
            "<REPO>",
            "<reponame>",
        ],
    ),
    (&["tokenizer.ggml.fim_sep_token_id"], &["<|file_sep|>"]),
];

fn kinds(metadata: &Metadata, texts: &[String]) -> Result<Vec<TokenKind>, TokenizerError> {
    let Some(types) = metadata.i32s(TOKEN_TYPE)? else {
        return Ok(vec![TokenKind::Normal; texts.len()]);
    };
    if types.len() != texts.len() {
        return Err(TokenizerError::Length {
            key: TOKEN_TYPE,
            expected: format!("{}, one for each token", texts.len()),
            found: types.len(),
        });
    }
    (0..)
        .zip(texts.iter().zip(types))
        .map(|(token, (text, token_type))| {
            Ok(match token_type {
                1 => TokenKind::Normal,
                2 => TokenKind::Unknown,
                3 => TokenKind::Control,
                4 => TokenKind::UserDefined,
                0 | 5 => TokenKind::Unused,
                6 => TokenKind::Byte(byte_of(text).ok_or_else(|| TokenizerError::ByteToken {
                    token,
                    text: text.clone(),
                })?),
                found => return Err(TokenizerError::TokenType { token, found }),
            })
        })
        .collect()
}

/// The byte that a byte token's text names: `<0x0A>` is 10.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let two_digits = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    two_digits.then(|| u8::from_str_radix(digits, 16).ok())?
}
