//! What a text may cost in memory: no more for each byte than a few copies of it, however its words are cut.
//!
//! One test only: the counter sees every thread of the process.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use peak_alloc::PeakAlloc;
use prima_gguf::{Array, Metadata, Value};
use prima_text::{Tokenizer, TokenizerError};

#[global_allocator]
static ALLOCATIONS: PeakAlloc = PeakAlloc;

const MIB: usize = 1 << 20;

/// Two tokens for the letter `a`, one for a space, a special one, and one that is longer than the others by far.
fn tokenizer(model: &str) -> Tokenizer {
    let space = if model == "gpt2" { "Ġ" } else { "▁" };
    let long = "x".repeat(1024);
    let tokens = ["a", "aa", space, "<s>", &long];
    let strings = |texts: &[&str]| Value::Array(Array::String(texts.iter().collect()));
    let entries = [
        ("model", Value::String(model.into())),
        ("pre", Value::String("gpt-2".into())),
        ("tokens", strings(&tokens)),
        ("token_type", Value::Array(Array::I32(vec![1, 1, 1, 3, 1]))),
        (
            "scores",
            Value::Array(Array::F32(vec![-2.0, -1.0, -3.0, 0.0, 0.0])),
        ),
        ("merges", strings(&["a a"])),
        ("add_bos_token", Value::Bool(false)),
        ("add_space_prefix", Value::Bool(false)),
    ];
    let entries = entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value));
    let metadata = Metadata::new("test model", entries.into_iter().collect()).unwrap();
    Tokenizer::from_gguf(&metadata).unwrap()
}

/// The peak of bytes allocated by tokenizing.
fn peak_of(tokenizer: &Tokenizer, limit: usize, text: &str) -> (usize, Option<usize>) {
    ALLOCATIONS.reset_peak_usage();
    let before = ALLOCATIONS.current_usage();
    let tokens = match tokenizer.encode_at_most(limit, text, false, true) {
        Ok(tokens) => Some(tokens.len()),
        Err(TokenizerError::TooLong { .. }) => None,
        Err(error) => unreachable!("{error}"),
    };
    (ALLOCATIONS.peak_usage() - before, tokens)
}

#[test]
fn memory_is_bounded_by_the_length_and_the_limit() {
    for model in ["gpt2", "llama", "gemma4"] {
        let tokenizer = tokenizer(model);
        let (peak, found) = peak_of(&tokenizer, usize::MAX, &"a".repeat(MIB));
        assert_eq!(found, Some(MIB / 2), "{model}");
        assert!(peak < 30 * MIB, "{model}: {peak} bytes for one long word");
        for text in ["a", "a ", "<s>"].map(|text| text.repeat(2 * MIB / text.len())) {
            // As many tokens as a context holds.
            let (peak, found) = peak_of(&tokenizer, 8192, &text);
            assert_eq!(found, None, "{model}");
            assert!(peak < 30 * MIB, "{model}: {peak} bytes for 8192 tokens");
            // Too long by its length alone.
            let (peak, found) = peak_of(&tokenizer, 1000, &text);
            assert_eq!(found, None, "{model}");
            assert!(peak < MIB, "{model}: {peak} bytes for nothing");
        }
    }
}
