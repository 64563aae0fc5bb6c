//! Vocabularies for tests, so small that each token can be seen.

use prima_gguf::{Metadata, Value};

use crate::bpe::byte_of;
use crate::grammar::{Grammar, GrammarReader};
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

/// Whether the grammar allows all of `text`, which ends the answer.
pub(crate) fn allows(tokenizer: &Tokenizer, grammar: &Grammar, text: &str) -> bool {
    let reader = GrammarReader::new(tokenizer).unwrap();
    let mut constraint = reader.read(grammar.clone()).unwrap();
    let tokens = tokenizer.encode(text, false, true).unwrap();
    tokens.into_iter().all(|token| {
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        constraint.restrict(&mut logits).unwrap();
        let allowed = logits[token as usize] == 0.0;
        allowed && (tokenizer.is_end_of_generation(token) || constraint.accept(token).is_ok())
    })
}
