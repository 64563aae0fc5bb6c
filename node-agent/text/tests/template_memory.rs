//! A template that doubles a text until no memory is left ends the program, with the reason, long before the machine suffers.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::process::Command;

use prima_gguf::{Array, Metadata, Value};
use prima_text::{ChatTemplate, TemplateAllocator, Tokenizer};
use serde_json::{Map, json};

#[global_allocator]
static ALLOCATOR: TemplateAllocator = TemplateAllocator;

/// Says which of the children below this process is.
const DOUBLINGS: &str = "PRIMA_TEST_DOUBLINGS";

/// A text of 16 bytes, doubled so many times.
fn template(doublings: u32) -> ChatTemplate {
    let text = format!(
        "{{% set text = namespace(it='0123456789abcdef') %}}{{% for _ in range({doublings}) %}}\
         {{% set text.it = text.it ~ text.it %}}{{% endfor %}}{{{{ text.it | length }}}}"
    );
    let tokens = Value::Array(Array::String(["<s>", "a"].iter().collect()));
    let entries = [
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.tokens", tokens),
        (
            "tokenizer.ggml.scores",
            Value::Array(Array::F32(vec![0.0; 2])),
        ),
        (
            "tokenizer.ggml.token_type",
            Value::Array(Array::I32(vec![3, 1])),
        ),
        ("tokenizer.chat_template", Value::String(text)),
    ];
    let entries = entries.map(|(key, value)| (key.to_owned(), value));
    let metadata = Metadata::new("test model", entries.into()).unwrap();
    let tokenizer = Tokenizer::from_gguf(&metadata).unwrap();
    ChatTemplate::from_gguf(&metadata, &tokenizer)
        .unwrap()
        .unwrap()
}

fn child(doublings: u32) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_template_ends_before_the_memory_does",
            "--nocapture",
        ])
        .env(DOUBLINGS, doublings.to_string())
        .output()
        .unwrap()
}

#[test]
fn a_template_ends_before_the_memory_does() {
    if let Ok(doublings) = std::env::var(DOUBLINGS) {
        let messages = json!([{"role": "user", "content": "a"}]);
        let rendered = template(doublings.parse().unwrap()).render(&messages, true, &Map::new());
        println!("rendered {}", rendered.unwrap());
        // What others take is not counted.
        std::hint::black_box(vec![1_u8; 600 << 20]);
        return;
    }
    // 64 MiB, of which two or three are there at a time.
    let within = child(22);
    let said = String::from_utf8_lossy(&within.stdout);
    assert!(
        within.status.success() && said.contains("rendered 67108864"),
        "{within:?}"
    );
    let beyond = child(40);
    let said = String::from_utf8_lossy(&beyond.stderr);
    assert!(!beyond.status.success(), "{beyond:?}");
    assert!(
        said.contains("error: the model's chat template takes more than 512 MiB"),
        "{said}"
    );
}
