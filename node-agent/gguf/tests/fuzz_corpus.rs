//! Every input that the fuzzer found worth keeping (tests/fuzz/corpus/header) goes through the parser as in the fuzz target.

mod support;

use std::path::Path;

use prima_gguf::Gguf;
use support::promises;

#[test]
fn every_input_of_the_corpus_is_refused_or_keeps_the_promises() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus/header");
    let (mut parsed, mut refused) = (0, 0);
    for entry in std::fs::read_dir(&corpus).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        for file_len in [bytes.len() as u64, bytes.len() as u64 + (1 << 40)] {
            match Gguf::parse("corpus", &bytes, file_len) {
                Ok(gguf) => {
                    promises::check(&gguf);
                    parsed += 1;
                }
                Err(_) => refused += 1,
            }
        }
    }
    // A corpus that holds only one kind reaches half of the parser.
    assert!(
        parsed >= 10 && refused >= 100,
        "{parsed} inputs parsed, {refused} refused in {}",
        corpus.display()
    );
}
