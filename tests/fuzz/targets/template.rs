//! A chat template, which comes with a model that nobody trusts: the text is read, and renders conversations.
//!
//! Finds panics of ours, and templates that do not come to an end. One that takes too much memory ends the program with the reason, as it does
//! rank 0; that is no fault.

#![no_main]

use std::panic;
use std::sync::{LazyLock, Once};

use libfuzzer_sys::{Corpus, fuzz_target};
use prima_gguf::{Metadata, Value};
use prima_text::{ChatTemplate, TemplateAllocator, Tokenizer};
use serde_json::{Map, json};

#[global_allocator]
static ALLOCATOR: TemplateAllocator = TemplateAllocator;

static TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_gguf(&metadata("")).expect("a tokenizer"));

fn metadata(template: &str) -> Metadata {
    let tokens: Vec<String> = ["<s>", "</s>"].map(str::to_owned).into();
    let mut entries = vec![
        (
            "tokenizer.ggml.model".to_owned(),
            Value::String("llama".into()),
        ),
        ("tokenizer.ggml.tokens".into(), tokens.into()),
        (
            "tokenizer.ggml.scores".into(),
            Value::Array(prima_gguf::Array::F32(vec![0.0; 2])),
        ),
        (
            "tokenizer.ggml.token_type".into(),
            Value::Array(prima_gguf::Array::I32(vec![3, 3])),
        ),
        ("tokenizer.ggml.bos_token_id".into(), Value::U32(0)),
        ("tokenizer.ggml.eos_token_id".into(), Value::U32(1)),
    ];
    entries.push((
        "tokenizer.chat_template".into(),
        Value::String(template.into()),
    ));
    Metadata::new("fuzz", entries).expect("metadata")
}

fuzz_target!(|bytes: &[u8]| -> Corpus {
    caught_panics_are_allowed();
    let Ok(template) = str::from_utf8(bytes) else {
        return Corpus::Reject;
    };
    let Ok(Some(template)) = ChatTemplate::from_gguf(&metadata(template), &TOKENIZER) else {
        return Corpus::Keep;
    };
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, null]}}});
    let messages = json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hé"}]},
        {"role": "assistant", "content": null, "tool_calls": [call], "reasoning_content": "why"},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]);
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let mut extra = Map::new();
    let _ = template.render(&messages, true, &extra);
    extra.insert("tools".into(), json!([tool]));
    extra.insert("enable_thinking".into(), json!(false));
    let _ = template.render(&messages, false, &extra);
    Corpus::Keep
});

/// minijinja panics over a few templates, and `render` catches that. libFuzzer's hook would end the process all the same; a panic that nobody
/// catches still does.
fn caught_panics_are_allowed() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| panic::set_hook(Box::new(|panic| eprintln!("{panic}"))));
}
