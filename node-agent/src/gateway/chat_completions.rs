//! POST /v1/chat/completions: messages in, messages out, with calls of tools and reasoning apart from the content.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use prima_text::{Part, Tokenizer};
use serde_json::{Value, json};

use crate::generation::{FinishReason, TokenLogprob};

use super::answer::{self, Envelope};
use super::auth::Caller;
use super::chat;
use super::chunks::{ChunkFormat, Chunks, choice};
use super::conversation::call_id;
use super::in_flight::{AnsweredChoice, InFlight};
use super::logprobs::chat_token;
use super::openai_error::ApiError;
use super::request::Fields;
use super::request_id;
use super::stream;
use super::{Gateway, ModelText};

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let read = {
        let (gateway, text) = (gateway.clone(), text.clone());
        move |fields: &Fields<'_>| chat::asked(&gateway, &text, fields)
    };
    let taken = gateway.0.intake.take(request, read).await?;
    let (stream, include_usage) = (
        taken.asked.options.stream,
        taken.asked.options.include_usage,
    );
    let logprobs = taken.asked.logprobs;
    let in_flight = InFlight::submit(&gateway, caller, taken).await?;
    let envelope = Envelope::new("chatcmpl", &gateway.0.model.name);
    if stream {
        let format = ChatChunks {
            text,
            envelope,
            calls: vec![0; in_flight.choices()],
        };
        let chunks = Chunks {
            format,
            include_usage,
        };
        return Ok(stream::events(in_flight, chunks));
    }
    let (choices, usage) = in_flight.collect().await?;
    let choices = choices.into_iter().enumerate().map(|(index, answered)| {
        let tokens = logprobs.is_some().then_some(answered.tokens.as_slice());
        let logprobs = chat_logprobs(&text.tokenizer, tokens);
        let reason = finish_reason(answered.reason, answered.calls.len());
        choice(index, ("message", message(answered)), logprobs, reason)
    });
    let mut body = envelope.around("chat.completion", choices.collect());
    body["usage"] = answer::usage(&usage);
    body["timings"] = answer::timings(&usage);
    Ok(Json(body).into_response())
}

struct ChatChunks {
    text: Arc<ModelText>,
    envelope: Envelope,
    /// How many calls each choice has begun.
    calls: Vec<usize>,
}

impl ChunkFormat for ChatChunks {
    fn opening(&self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        Some(choice(index, ("delta", delta), Value::Null, Value::Null))
    }

    fn delta(&mut self, index: usize, part: Part, token: Option<(u32, TokenLogprob)>) -> Value {
        let logprobs = chat_logprobs(
            &self.text.tokenizer,
            token.as_ref().map(std::slice::from_ref),
        );
        let begun = self.calls.get(index).copied().unwrap_or(0);
        let delta = match part {
            Part::Content(text) => json!({"content": text}),
            Part::Reasoning(text) => json!({"reasoning_content": text}),
            Part::Call { name } => {
                if let Some(calls) = self.calls.get_mut(index) {
                    *calls += 1;
                }
                let mut call = tool_call(name, String::new());
                call["index"] = begun.into();
                json!({ "tool_calls": [call] })
            }
            Part::Arguments(text) => {
                let index = begun.saturating_sub(1);
                json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            }
        };
        choice(index, ("delta", delta), logprobs, Value::Null)
    }

    fn finish(&self, index: usize, reason: FinishReason) -> Value {
        let calls = self.calls.get(index).copied().unwrap_or(0);
        let reason = finish_reason(reason, calls);
        choice(index, ("delta", json!({})), Value::Null, reason)
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        self.envelope.around("chat.completion.chunk", choices)
    }
}

fn chat_logprobs(tokenizer: &Tokenizer, tokens: Option<&[(u32, TokenLogprob)]>) -> Value {
    let Some(tokens) = tokens else {
        return Value::Null;
    };
    let content: Vec<Value> = tokens
        .iter()
        .map(|(token, logprob)| chat_token(tokenizer, *token, logprob))
        .collect();
    json!({"content": content, "refusal": null})
}

/// A whole answer as a message.
fn message(answered: AnsweredChoice) -> Value {
    let calls = answered.calls.into_iter();
    let calls: Vec<Value> = calls
        .map(|(name, arguments)| tool_call(name, arguments))
        .collect();
    let content = match answered.content.is_empty() && !calls.is_empty() {
        true => Value::Null,
        false => answered.content.into(),
    };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !answered.reasoning.is_empty() {
        message["reasoning_content"] = answered.reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}

fn tool_call(name: String, arguments: String) -> Value {
    json!({
        "id": call_id(request_id::random()),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    })
}

fn finish_reason(reason: FinishReason, calls: usize) -> Value {
    match reason {
        FinishReason::Stop | FinishReason::StopString(_) if calls > 0 => "tool_calls".into(),
        reason => answer::finish_reason(reason).into(),
    }
}
