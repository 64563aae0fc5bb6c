//! Vocabularies for tests, so small that each token can be seen.

use prima_gguf::{Metadata, Value};

use crate::bpe::byte_of;
use crate::tokenizer::Tokenizer;

/// Every byte is a token, and so are these marks, as tokens of structure. Text between the marks has a token for each byte.
pub(crate) fn signs_and<'m>(marks: impl IntoIterator<Item = &'m &'static str>) -> Tokenizer {
    let letters = ('\0'..='\u{200}').filter(|letter| byte_of(*letter).is_some());
    let bytes = letters.map(|letter| (letter.to_string(), 1));
    let marks = marks.into_iter().map(|mark| (mark.to_string(), 3));
    let (texts, kinds): (Vec<String>, Vec<i32>) = bytes.chain(marks).unzip();
    let entries = [
        ("model", "gpt2".into()),
        ("pre", "gpt-2".into()),
        ("tokens", Value::from(texts)),
        ("token_type", kinds.into()),
        ("merges", Value::from(Vec::<String>::new())),
    ];
    let entries = entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value));
    let metadata = Metadata::new("signs", entries.into_iter().collect()).unwrap();
    Tokenizer::from_gguf(&metadata).unwrap()
}
