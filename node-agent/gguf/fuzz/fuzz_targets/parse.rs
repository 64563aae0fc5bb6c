//! Feeds bytes to the parser as a file of that length, and as the beginning of a longer one.
//!
//! Finds panics, overflows (checked in this build), hangs, memory above libFuzzer's limit, and headers that parse but break a
//! promise of `Gguf`.

#![no_main]

#[path = "../../tests/support/promises.rs"]
mod promises;

use libfuzzer_sys::fuzz_target;
use prima_gguf::Gguf;

fuzz_target!(|bytes: &[u8]| {
    let len = bytes.len() as u64;
    // The second length holds the tensors that a small input can only describe.
    for file_len in [len, len + (1 << 40)] {
        match Gguf::parse("fuzz", bytes, file_len) {
            Ok(gguf) => promises::check(&gguf),
            Err(error) => assert!(error.to_string().len() < 2000, "an error of any length"),
        }
    }
});
