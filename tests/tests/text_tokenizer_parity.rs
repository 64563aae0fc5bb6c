//! The tokenizers against llama.cpp itself: hundreds of texts, every token's bytes, and which tokens end a generation.
//!
//! Needs `make assets`: the vocabularies that llama.cpp ships, SmolLM2, Moby Dick, and a Python with xllamacpp.

use std::path::{Path, PathBuf};

use prima_gguf::{Gguf, Value, writer::GgufWriter};
use prima_tests::assets;
use prima_tests::python::ask_oracle;
use prima_text::Tokenizer;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::string::string_regex;
use proptest::test_runner::{Config, TestRng, TestRunner};
use serde_json::json;

#[test]
fn llama_bpe() {
    agrees(&vocabulary("llama-bpe"));
}

#[test]
fn llama_spm() {
    agrees(&vocabulary("llama-spm"));
}

#[test]
fn qwen2() {
    agrees(&vocabulary("qwen2"));
}

#[test]
fn gpt_2() {
    agrees(&vocabulary("gpt-2"));
}

#[test]
fn deepseek_llm() {
    agrees(&vocabulary("deepseek-llm"));
}

#[test]
fn deepseek_coder() {
    agrees(&vocabulary("deepseek-coder"));
}

#[test]
fn smollm() {
    agrees(&assets::path("models/SmolLM2-135M-Instruct-Q4_1.gguf").unwrap());
}

#[test]
fn phi_3() {
    agrees(&vocabulary("phi-3"));
}

#[test]
fn qwen35() {
    agrees(&vocabulary("qwen35"));
}

#[test]
fn gemma3() {
    agrees(&assets::path("models/gemma-3-270m-Q4_K_M.gguf").unwrap());
}

/// No file with this pre-tokenizer is at hand. Such files hold Qwen2's vocabulary under that name.
#[test]
fn deepseek_r1_qwen() {
    let folder = tempfile::tempdir().unwrap();
    let qwen2 = Gguf::open(&vocabulary("qwen2")).unwrap();
    agrees(&relabelled(folder.path(), &qwen2, "deepseek-r1-qwen"));
}

/// No files with these are at hand. How they cut a text into words shows with any vocabulary of byte pairs.
#[test]
fn pre_tokenizers_without_a_file() {
    let names = ["dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "deepseek-v3"];
    cut_as_llama_cpp(&names, |_| true);
}

/// In the published patterns, words may begin where a capital follows a small letter. llama.cpp has every letter beyond ASCII in both cases,
/// and marks in neither; so it is asked about ASCII and scripts that have neither.
#[test]
fn pre_tokenizers_that_cut_by_case() {
    let without_case = |character: char| {
        character.is_ascii()
            || character.is_whitespace()
            || matches!(character, 'ぁ'..='ん' | 'ァ'..='ン' | '一'..='龥' | '가'..='힣')
    };
    let names = ["gpt-4o", "llama4", "minimax-m2", "tekken"];
    cut_as_llama_cpp(&names, without_case);
}

/// The same, but here llama.cpp cuts no word by case.
#[test]
fn kimi() {
    let without_capitals = |character: char| {
        !character.is_uppercase()
            && (character.is_ascii()
                || character.is_whitespace()
                || matches!(character, 'ぁ'..='ん' | 'ァ'..='ン' | '一'..='龥' | '가'..='힣'))
    };
    cut_as_llama_cpp(&["kimi-k2"], without_capitals);
}

/// Llama 3's vocabulary, said to have each of these pre-tokenizers, gives the same tokens for texts of the characters that are `wanted`.
fn cut_as_llama_cpp(pre_tokenizers: &[&str], wanted: impl Fn(char) -> bool) {
    let folder = tempfile::tempdir().unwrap();
    let llama_bpe = Gguf::open(&vocabulary("llama-bpe")).unwrap();
    // A quarter of them, as the vocabulary is tested with all.
    let texts = texts(&llama_bpe).into_iter().step_by(4);
    let texts = texts.map(|text| text.chars().filter(|&one| wanted(one)).collect());
    let jobs = jobs(texts);
    for pre_tokenizer in pre_tokenizers {
        let path = relabelled(folder.path(), &llama_bpe, pre_tokenizer);
        let gguf = Gguf::open(&path).unwrap();
        let answer = llama_cpp(&path, &jobs, false);
        same_tokens(
            pre_tokenizer,
            &Tokenizer::from_gguf(&gguf.metadata).unwrap(),
            &jobs,
            &answer,
        );
    }
}

/// A vocabulary, said to have another pre-tokenizer than its own.
fn relabelled(folder: &Path, vocabulary: &Gguf, pre_tokenizer: &str) -> PathBuf {
    let path = folder.join(format!("{pre_tokenizer}.gguf"));
    let mut writer = GgufWriter::new();
    for (key, value) in vocabulary.metadata.iter() {
        let value = match key {
            "tokenizer.ggml.pre" => Value::from(pre_tokenizer),
            _ => value.clone(),
        };
        writer.metadata(key, value);
    }
    let file = std::fs::File::create(&path).unwrap();
    writer.write_header(file).unwrap().finish().unwrap();
    path
}

/// Words so long that they are merged in windows.
#[test]
fn words_without_an_end() {
    let repeat = |text: &str| text.repeat(150_000 / text.len());
    let mut random = TestRunner::deterministic();
    let letters = "[a-z]{150000}".new_tree(&mut random).unwrap().current();
    let texts = ["a", "ab", "abcdefghij", " "]
        .map(repeat)
        .into_iter()
        .chain([letters]);
    let jobs: Vec<_> = texts.map(|text| (text, false, false)).collect();
    for name in ["llama-bpe", "llama-spm", "gemma-4"] {
        let model = vocabulary(name);
        let gguf = Gguf::open(&model).unwrap();
        let tokenizer = Tokenizer::from_gguf(&gguf.metadata).unwrap();
        let answer = llama_cpp(&model, &jobs, false);
        for ((text, ..), expected) in jobs.iter().zip(&answer.texts) {
            let found = tokenizer.encode(text, false, false).unwrap();
            assert!(&found == expected, "{name}: {:?}...", &text[..20]);
        }
        assert_eq!(answer.texts.len(), jobs.len());
    }
}

fn agrees(model: &Path) {
    let gguf = Gguf::open(model).unwrap();
    let tokenizer = Tokenizer::from_gguf(&gguf.metadata).unwrap();
    let ids = 0..tokenizer.vocab_size() as u32;

    let jobs = jobs(texts(&gguf).into_iter());
    let answer = llama_cpp(model, &jobs, true);
    same_tokens(&model.display().to_string(), &tokenizer, &jobs, &answer);

    // Qwen2 has "</s>" as a word of HTML. llama.cpp takes every token with that text for the end; here a normal token is text.
    let word = |token: u32| {
        tokenizer.token_text(token) == "</s>" && *tokenizer.token_bytes(token) == b"</s>"[..]
    };
    for (token, expected) in ids.clone().zip(&answer.pieces) {
        if word(token) {
            continue;
        }
        let found = tokenizer.token_bytes(token);
        assert_eq!(
            *found,
            **expected,
            "{token} {:?}",
            tokenizer.token_text(token)
        );
    }
    assert_eq!(answer.pieces.len(), tokenizer.vocab_size());

    let ends: Vec<u32> = ids
        .filter(|token| tokenizer.is_end_of_generation(*token))
        .collect();
    let expected: Vec<u32> = answer
        .ends
        .into_iter()
        .filter(|token| !word(*token))
        .collect();
    assert_eq!(ends, expected);
}

/// A text, whether BOS and the like are added, and whether special tokens in it are read as such.
type Job = (String, bool, bool);

fn jobs(texts: impl Iterator<Item = String>) -> Vec<Job> {
    let numbered = texts.enumerate();
    numbered
        .map(|(number, text)| (text, number % 2 == 1, number % 4 >= 2))
        .collect()
}

fn same_tokens(name: &str, tokenizer: &Tokenizer, jobs: &[Job], answer: &Answer) {
    assert_eq!(answer.texts.len(), jobs.len());
    for ((text, add_special, parse_special), expected) in jobs.iter().zip(&answer.texts) {
        let found = tokenizer.encode(text, *add_special, *parse_special);
        assert_eq!(
            &found.unwrap(),
            expected,
            "{name}: {text:?}, add {add_special}, parse {parse_special}"
        );
    }
}

/// Prose, random text of many scripts, and special tokens in the midst of it; the same on every run.
fn texts(gguf: &Gguf) -> Vec<String> {
    let book = std::fs::read_to_string(assets::path("text/moby-dick.txt").unwrap()).unwrap();
    let characters: Vec<char> = book.chars().collect();
    let prose = characters.chunks(1500).take(50).map(String::from_iter);

    let kinds = gguf
        .metadata
        .i32s("tokenizer.ggml.token_type")
        .unwrap()
        .unwrap();
    let texts = gguf
        .metadata
        .require_strings("tokenizer.ggml.tokens")
        .unwrap();
    let special: Vec<String> = texts
        .iter()
        .zip(kinds)
        .filter(|(_, kind)| matches!(kind, 2..=4))
        .map(|(text, _)| text.to_owned())
        .collect();
    // As a `str`, a pattern would be parsed again for every part of every text.
    let like = |pattern: &str| string_regex(pattern).unwrap();
    let part = prop_oneof![
        4 => like("[a-zA-Z]{1,9}"),
        2 => like("[0-9]{1,6}"),
        3 => like("[ \t\r\n\u{85}\u{a0}\u{2009}\u{3000}]{1,4}"),
        2 => like("[!-/:-@\\[-`{-~]{1,4}"),
        2 => like("('s|'T|'re|'VE|'m|'Ll|'d)"),
        1 => like("[а-яА-ЯёЁα-ωΑ-Ω]{1,6}"),
        1 => like("[一-龥ぁ-んァ-ン가-힣]{1,6}"),
        1 => like("[ก-๛अ-हا-ي]{1,5}"),
        1 => like("[\u{300}-\u{36f}\u{200b}-\u{200f}½²٣Ⅻ]{1,3}"),
        1 => like("[😀-🙏👨👩👧\u{200d}\u{fe0f}]{1,4}"),
        1 => prop::collection::vec(any::<char>(), 1..4).prop_map(String::from_iter),
        1 => prop::sample::select(special),
    ];
    let text = prop::collection::vec(part, 0..40).prop_map(|parts| parts.concat());
    let algorithm = prop::test_runner::RngAlgorithm::XorShift;
    let rng = TestRng::deterministic_rng(algorithm);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let random = (0..800).map(|_| text.new_tree(&mut runner).unwrap().current());
    prose.chain(random.collect::<Vec<_>>()).collect()
}

#[derive(serde::Deserialize)]
struct Answer {
    texts: Vec<Vec<u32>>,
    pieces: Vec<Vec<u8>>,
    ends: Vec<u32>,
}

fn llama_cpp(model: &Path, jobs: &[Job], vocabulary: bool) -> Answer {
    let texts: Vec<_> = jobs
        .iter()
        .map(|(text, add_special, parse_special)| {
            json!({"text": text, "add_special": add_special, "parse_special": parse_special})
        })
        .collect();
    let request = json!({"model": model, "vocabulary": vocabulary, "texts": texts});
    ask_oracle("llama_cpp_tokens.py", &request)
}

fn vocabulary(name: &str) -> PathBuf {
    assets::path(&format!("vocab/ggml-vocab-{name}.gguf")).unwrap()
}
