//! The tokenizers of real models against llama.cpp's own test vectors, and texts that must survive the way there and back.
//!
//! Needs `make assets`: the vocabularies and vectors that llama.cpp ships, and SmolLM2.

use prima_gguf::Gguf;
use prima_tests::assets;
use prima_text::{Detokenizer, Tokenizer};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// llama.cpp's vocabularies that come with vectors and that we know; each has 46 cases, qwen35 four more.
const VOCABULARIES: [&str; 14] = [
    "llama-bpe",
    "llama-spm",
    "qwen2",
    "gpt-2",
    "deepseek-llm",
    "deepseek-coder",
    "qwen35",
    "command-r",
    "falcon",
    "mpt",
    "refact",
    "starcoder",
    "phi-3",
    "gemma-4",
];

#[test]
fn every_vector_of_llama_cpp_is_met() {
    for name in VOCABULARIES {
        let tokenizer = vocabulary(name);
        let inputs = read(&format!("vocab/ggml-vocab-{name}.gguf.inp"));
        let outputs = read(&format!("vocab/ggml-vocab-{name}.gguf.out"));
        let cases: Vec<(&str, &str)> = inputs
            .split("\n__ggml_vocab_test__\n")
            .zip(outputs.lines())
            .collect();
        let count = if name == "qwen35" { 50 } else { 46 };
        assert_eq!(cases.len(), count, "{name}");
        assert_eq!(outputs.lines().count(), count, "{name}");
        for (input, output) in cases {
            let expected: Vec<u32> = output
                .split_whitespace()
                .map(|token| token.parse().unwrap())
                .collect();
            let found = tokenizer.encode(input, false, false).unwrap();
            assert_eq!(found, expected, "{name}: {input:?}");
            assert_eq!(tokenizer.decode(&found), input, "{name}");
        }
    }
}

#[test]
fn random_unicode_survives_the_way_there_and_back() {
    let mut tokenizers: Vec<(&str, Tokenizer)> = VOCABULARIES
        .iter()
        .map(|name| (*name, vocabulary(name)))
        .collect();
    tokenizers.push(("SmolLM2", smollm2()));
    let tokenizers: Vec<_> = tokenizers
        .into_iter()
        .map(|(name, tokenizer)| (name, single_bytes(&tokenizer), tokenizer))
        .collect();
    let text = prop_oneof![
        // Any characters, with the rarest planes as likely as the most common one.
        prop::collection::vec(any::<char>(), 0..40).prop_map(String::from_iter),
        // What people write: words, digits, white space of all kinds, marks, a few scripts.
        "([a-zA-Z']{1,9}|[0-9]{1,5}|[ \t\r\n\u{a0}\u{3000}\u{2581}]{1,4}|[!-/:-@]{1,3}|[а-яё]{1,5}|[ぁ-ん一-龥]{1,4}|[ก-๛]{1,4}|[\u{300}-\u{36f}]|[😀-🙏])(){0,30}",
    ];
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&text, |text| {
            for (name, single_bytes, tokenizer) in &tokenizers {
                let expected = match *name {
                    // To SentencePiece U+2581 is a space, in llama.cpp too.
                    "llama-spm" | "phi-3" | "gemma-4" => text.replace('\u{2581}', " "),
                    // Some vocabularies lack control characters and the bytes of planes 4 to 11; llama.cpp leaves them out too.
                    _ => {
                        let known = text.bytes().filter(|byte| single_bytes[usize::from(*byte)]);
                        String::from_utf8_lossy(&known.collect::<Vec<u8>>()).into_owned()
                    }
                };
                let tokens = tokenizer.encode(&text, false, false).unwrap();
                prop_assert_eq!(tokenizer.decode(&tokens), expected.clone(), "{}", name);
                let mut detokenizer = Detokenizer::new(tokenizer);
                let mut streamed: String = tokens
                    .iter()
                    .map(|token| detokenizer.push(*token))
                    .collect();
                streamed += &detokenizer.finish();
                if matches!(*name, "llama-spm" | "phi-3") && !text.is_empty() {
                    prop_assert_eq!(streamed, format!(" {expected}"), "{}", name);
                } else {
                    prop_assert_eq!(streamed, expected, "{}", name);
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn control_tokens_are_structure_only_where_asked_for() {
    let tokenizer = smollm2();
    let prompt = "<|im_start|>user\nHello<|im_end|>\n";
    let parsed = tokenizer.encode(prompt, true, true).unwrap();
    assert_eq!(parsed[0], 1);
    assert_eq!(parsed.iter().filter(|token| **token <= 2).count(), 2);
    assert_eq!(tokenizer.decode(&parsed), "user\nHello\n");
    let written = tokenizer.encode(prompt, true, false).unwrap();
    assert!(written.iter().all(|token| *token > 16), "{written:?}");
    assert_eq!(tokenizer.decode(&written), prompt);

    assert_eq!(tokenizer.token_text(1), "<|im_start|>");
    assert!(tokenizer.is_end_of_generation(2));
    assert!(!tokenizer.is_end_of_generation(1));
    assert_eq!(tokenizer.vocab_size(), 49152);
}

#[test]
fn begin_of_text_is_added_where_the_model_wants_it() {
    let first = |name: &str| vocabulary(name).encode("x", true, false).unwrap()[0];
    assert_eq!(first("llama-bpe"), 128_000);
    assert_eq!(first("llama-spm"), 1);
    assert_eq!(
        vocabulary("qwen2").encode("x", true, false).unwrap().len(),
        1
    );
    assert_eq!(
        vocabulary("llama-spm").encode("", true, false).unwrap(),
        [1]
    );
}

/// Which bytes have a token of their own.
fn single_bytes(tokenizer: &Tokenizer) -> [bool; 256] {
    let mut known = [false; 256];
    for token in 0..tokenizer.vocab_size() as u32 {
        if let [byte] = *tokenizer.token_bytes(token) {
            known[usize::from(byte)] = true;
        }
    }
    known
}

fn vocabulary(name: &str) -> Tokenizer {
    tokenizer(&format!("vocab/ggml-vocab-{name}.gguf"))
}

fn smollm2() -> Tokenizer {
    tokenizer("models/SmolLM2-135M-Instruct-Q4_1.gguf")
}

fn tokenizer(asset: &str) -> Tokenizer {
    let gguf = Gguf::open(&assets::path(asset).unwrap()).unwrap();
    Tokenizer::from_gguf(&gguf.metadata).unwrap()
}

fn read(asset: &str) -> String {
    std::fs::read_to_string(assets::path(asset).unwrap()).unwrap()
}
