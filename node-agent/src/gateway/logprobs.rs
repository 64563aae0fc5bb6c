//! How log-probabilities look in the two APIs. Chat: one object per token, with bytes. Completions: parallel arrays.

use prima_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::generation::TokenLogprob;

/// JSON has no -inf; this is what OpenAI sends for a token that cannot follow.
const IMPOSSIBLE: f32 = -9999.0;

/// `{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}]}`.
pub fn chat_token(tokenizer: &Tokenizer, token: u32, logprob: &TokenLogprob) -> Value {
    let one = |token, logprob| {
        json!({
            "token": readable(tokenizer, token),
            "logprob": finite(logprob),
            "bytes": bytes(tokenizer, token),
        })
    };
    let mut object = one(token, logprob.logprob);
    object["top_logprobs"] = logprob
        .top
        .iter()
        .map(|(token, logprob)| one(*token, *logprob))
        .collect();
    object
}

/// `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of a run of tokens. `offset` is the position of the
/// first, in characters of the choice's text, and is moved past the last.
pub fn completion_tokens<'a>(
    tokenizer: &Tokenizer,
    tokens: impl IntoIterator<Item = &'a (u32, TokenLogprob)>,
    offset: &mut usize,
) -> Value {
    let (mut texts, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for (token, logprob) in tokens {
        let top = logprob.top.iter().map(|(token, logprob)| {
            (
                unambiguous(tokenizer, *token),
                Value::from(finite(*logprob)),
            )
        });
        texts.push(unambiguous(tokenizer, *token));
        logprobs.push(finite(logprob.logprob));
        tops.push(top.collect::<Map<_, _>>());
        offsets.push(*offset);
        *offset += String::from_utf8_lossy(&tokenizer.token_bytes(*token))
            .chars()
            .count();
    }
    json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
}

fn finite(logprob: f32) -> f32 {
    // Not clamp: max also turns a NaN into a number.
    logprob.max(IMPOSSIBLE)
}

/// A token's bytes: those that it adds to the text, or those of its name if it adds none (a special token).
fn bytes(tokenizer: &Tokenizer, token: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(token);
    if bytes.is_empty() {
        return tokenizer.token_text(token).as_bytes().to_vec();
    }
    bytes.into_owned()
}

fn readable(tokenizer: &Tokenizer, token: u32) -> String {
    String::from_utf8_lossy(&bytes(tokenizer, token)).into_owned()
}

/// Writes parts of a character as OpenAI does, `bytes:\xe2\x82`, so that two such tokens are two keys.
fn unambiguous(tokenizer: &Tokenizer, token: u32) -> String {
    match String::from_utf8(bytes(tokenizer, token)) {
        Ok(text) => text,
        Err(partial) => partial
            .as_bytes()
            .iter()
            .fold("bytes:".into(), |text, byte| format!("{text}\\x{byte:02x}")),
    }
}
