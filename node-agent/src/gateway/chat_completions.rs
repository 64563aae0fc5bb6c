//! POST /v1/chat/completions: messages in, messages out, with calls of tools and reasoning apart from the content.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use prima_text::{AnswerPart, Tokenizer};
use serde_json::{Value, json};

use crate::generation::{FinishReason, TokenLogprob};

use super::answer::{self, Envelope};
use super::auth::Caller;
use super::chat;
use super::chunks::{self, ChunkFormat, choice};
use super::conversation::call_id;
use super::in_flight::AnsweredChoice;
use super::logprobs::chat_token;
use super::openai_error::ApiError;
use super::request::Fields;
use super::request_id;
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
    let format = ChatChunks {
        text,
        envelope: Envelope::new("chatcmpl", &gateway.0.model.name),
        logprobs: taken.asked.logprobs.is_some(),
        calls: vec![0; taken.asked.options.choices],
    };
    chunks::respond(&gateway, caller, taken, format).await
}

struct ChatChunks {
    text: Arc<ModelText>,
    envelope: Envelope,
    /// Whether they are asked for.
    logprobs: bool,
    /// How many calls each choice has begun.
    calls: Vec<usize>,
}

impl ChunkFormat for ChatChunks {
    fn whole(&self, index: usize, answered: AnsweredChoice) -> Value {
        let tokens = self.logprobs.then_some(answered.tokens.as_slice());
        let logprobs = chat_logprobs(&self.text.tokenizer, tokens);
        let called = answered.calls().next().is_some() && !answered.in_call;
        let reason = finish_reason(answered.reason, called);
        choice(index, ("message", message(&answered)), logprobs, reason)
    }

    fn answer(&self, choices: Vec<Value>) -> Value {
        self.envelope.around("chat.completion", choices)
    }

    fn opening(&self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        Some(choice(index, ("delta", delta), Value::Null, Value::Null))
    }

    fn delta(
        &mut self,
        index: usize,
        part: AnswerPart,
        token: Option<(u32, TokenLogprob)>,
    ) -> Value {
        let logprobs = chat_logprobs(
            &self.text.tokenizer,
            token.as_ref().map(std::slice::from_ref),
        );
        let begun = self.calls.get(index).copied().unwrap_or(0);
        let delta = match part {
            AnswerPart::Content(text) => json!({"content": text}),
            AnswerPart::Reasoning(text) => json!({"reasoning_content": text}),
            AnswerPart::Call { name } => {
                if let Some(calls) = self.calls.get_mut(index) {
                    *calls += 1;
                }
                let mut call = tool_call(&name, "");
                call["index"] = begun.into();
                json!({ "tool_calls": [call] })
            }
            AnswerPart::Arguments(text) => {
                let index = begun.saturating_sub(1);
                json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            }
        };
        choice(index, ("delta", delta), logprobs, Value::Null)
    }

    fn finish(&self, index: usize, reason: FinishReason, in_call: bool) -> Value {
        let called = self.calls.get(index).is_some_and(|calls| *calls > 0) && !in_call;
        let reason = finish_reason(reason, called);
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
fn message(answered: &AnsweredChoice) -> Value {
    let calls = answered.calls();
    let calls: Vec<Value> = calls
        .map(|(name, arguments)| tool_call(name, arguments))
        .collect();
    let (content, reasoning) = (answered.content(), answered.reasoning());
    let content = match content.is_empty() && !calls.is_empty() {
        true => Value::Null,
        false => content.into(),
    };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}

fn tool_call(name: &str, arguments: &str) -> Value {
    json!({
        "id": call_id(request_id::random()),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    })
}

fn finish_reason(reason: FinishReason, called: bool) -> Value {
    match reason {
        FinishReason::Stop | FinishReason::StopString(_) if called => "tool_calls".into(),
        reason => answer::finish_reason(reason).into(),
    }
}
