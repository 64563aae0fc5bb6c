//! The header of a model file: bytes as a file of that length, and as the beginning of a longer one. What parses is read as a model is, with
//! its tokenizer and its templates.
//!
//! Finds panics, overflows (checked in this build), hangs, memory above libFuzzer's limit, and headers that parse but break a
//! promise of `Gguf`.

#![no_main]

#[path = "../../../node-agent/gguf/tests/support/promises.rs"]
mod promises;

use libfuzzer_sys::fuzz_target;
use prima_gguf::{Gguf, part_names};
use prima_text::{ChatTemplate, RankTemplate, Tokenizer};
use prima_weights::model_profile;

fuzz_target!(|bytes: &[u8]| {
    let len = bytes.len() as u64;
    // The second length holds the tensors that a small input can only describe.
    for file_len in [len, len + (1 << 40)] {
        match Gguf::parse("fuzz", bytes, file_len) {
            Ok(gguf) => {
                promises::check(&gguf);
                read(&gguf);
            }
            Err(error) => assert!(error.to_string().len() < 2000, "an error of any length"),
        }
    }
});

/// As the operator and rank 0 do.
fn read(gguf: &Gguf) {
    let _ = part_names("fuzz-00001-of-00002.gguf", gguf);
    if let Err(error) = model_profile("fuzz", gguf) {
        assert!(
            format!("{error:?}").len() < 10_000,
            "an error of any length"
        );
    }
    let _ = RankTemplate::from_gguf(&gguf.metadata);
    if let Ok(tokenizer) = Tokenizer::from_gguf(&gguf.metadata) {
        if let Ok(tokens) = tokenizer.encode("All that <s> 12é", true, true) {
            tokenizer.decode(&tokens);
        }
        let _ = ChatTemplate::from_gguf(&gguf.metadata, &tokenizer);
    }
}
