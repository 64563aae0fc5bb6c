//! POST /v1/chat/completions: turns messages into one prompt with the model's chat template, and answers with messages.
//! Text only; no tools, no images.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use prima_text::{Tokenizer, TokenizerError};
use serde_json::{Map, Value, json};

use crate::generation::{FinishReason, TokenLogprob};

use super::answer::{self, Envelope};
use super::auth::Caller;
use super::in_flight::{Asked, InFlight};
use super::logprobs::chat_token;
use super::openai_error::ApiError;
use super::request::{Fields, GenerationOptions, MAX_TOP_LOGPROBS};
use super::sse::{self, ChunkFormat, choice};
use super::{Gateway, ModelText};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let read = {
        let (gateway, text) = (gateway.clone(), text.clone());
        move |fields: &Fields<'_>| asked(&gateway, &text, fields)
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
        let format = ChatChunks { text, envelope };
        return Ok(sse::stream(in_flight, format, include_usage));
    }
    let (choices, usage) = in_flight.collect().await?;
    let choices = choices.into_iter().enumerate().map(|(index, answered)| {
        let tokens = logprobs.is_some().then_some(answered.tokens.as_slice());
        choice(
            index,
            (
                "message",
                json!({"role": "assistant", "content": answered.text, "refusal": null}),
            ),
            chat_logprobs(&text.tokenizer, tokens),
            answer::finish_reason(answered.reason).into(),
        )
    });
    let mut body = envelope.around("chat.completion", choices.collect());
    body["usage"] = answer::usage(&usage);
    body["timings"] = answer::timings(&usage);
    Ok(Json(body).into_response())
}

fn asked(gateway: &Gateway, text: &ModelText, fields: &Fields<'_>) -> Result<Asked, ApiError> {
    if let Some(model) = fields.string("model")? {
        gateway.0.model.check(model)?;
    }
    let options = GenerationOptions::parse(fields, text.tokenizer.vocab_size())?;
    let logprobs = logprobs(fields)?;
    let prompt = prompt(text, messages(fields)?)?;
    Ok(Asked {
        prompts: vec![prompt],
        // If the client sets no limit, the context is the limit.
        max_tokens: options.max_tokens.unwrap_or(usize::MAX),
        options,
        logprobs,
    })
}

struct ChatChunks {
    text: Arc<ModelText>,
    envelope: Envelope,
}

impl ChunkFormat for ChatChunks {
    fn opening(&self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        Some(choice(index, ("delta", delta), Value::Null, Value::Null))
    }

    fn delta(&mut self, index: usize, text: &str, token: Option<(u32, TokenLogprob)>) -> Value {
        let logprobs = chat_logprobs(
            &self.text.tokenizer,
            token.as_ref().map(std::slice::from_ref),
        );
        choice(
            index,
            ("delta", json!({"content": text})),
            logprobs,
            Value::Null,
        )
    }

    fn finish(&self, index: usize, reason: FinishReason) -> Value {
        let reason = answer::finish_reason(reason).into();
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

/// How many alternatives per token, if logprobs are asked for.
fn logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let asked = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS as i64)?;
    match (asked, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "top_logprobs",
            "top_logprobs is only allowed when logprobs is true",
        )),
    }
}

/// The messages as templates expect them: a role, and the content as one string.
fn messages(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let messages = fields
        .array("messages")?
        .ok_or_else(|| fields.missing("messages"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages must not be empty"));
    }
    messages
        .iter()
        .enumerate()
        .map(|(number, value)| message(number, value))
        .collect()
}

fn message(number: usize, value: &Value) -> Result<Value, ApiError> {
    let path = format!("messages[{number}]");
    let map = value
        .as_object()
        .ok_or_else(|| ApiError::invalid(&path, format!("{path} must be an object")))?;
    let fields = Fields::at(map, format!("{path}."));
    let role = fields
        .string("role")?
        .ok_or_else(|| fields.missing("role"))?;
    if !ROLES.contains(&role) {
        let must = format!("one of {}", ROLES.join(", "));
        return Err(fields.wrong("role", &must, &role.into()));
    }
    if fields
        .array("tool_calls")?
        .is_some_and(|calls| !calls.is_empty())
    {
        return Err(ApiError::not_supported(
            format!("{path}.tool_calls"),
            "tool calls are not supported by this server yet",
        ));
    }
    let content = match fields.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => joined_parts(&path, parts)?,
        Some(other) => {
            return Err(fields.wrong("content", "a string or an array of text parts", other));
        }
        None if role == "assistant" => String::new(),
        None => return Err(fields.missing("content")),
    };
    // Templates know the older name of the same role.
    let role = if role == "developer" { "system" } else { role };
    let mut message = BTreeMap::from([("role", role), ("content", &content)]);
    if let Some(name) = fields.string("name")? {
        message.insert("name", name);
    }
    Ok(json!(message))
}

fn joined_parts(path: &str, parts: &[Value]) -> Result<String, ApiError> {
    let texts: Result<Vec<&str>, ApiError> = parts
        .iter()
        .enumerate()
        .map(|(number, part)| {
            let path = format!("{path}.content[{number}]");
            let map = part
                .as_object()
                .ok_or_else(|| ApiError::invalid(&path, format!("{path} must be an object")))?;
            let fields = Fields::at(map, format!("{path}."));
            let kind = fields
                .string("type")?
                .ok_or_else(|| fields.missing("type"))?;
            if kind != "text" {
                return Err(fields.wrong(
                    "type",
                    "`text`, all that this model reads",
                    &kind.into(),
                ));
            }
            fields.string("text")?.ok_or_else(|| fields.missing("text"))
        })
        .collect();
    Ok(texts?.join("\n"))
}

/// The prompt's tokens.
fn prompt(text: &ModelText, messages: Vec<Value>) -> Result<Arc<[u32]>, ApiError> {
    let template = text.chat_template.as_ref().ok_or_else(|| {
        ApiError::invalid(
            "messages",
            "this model has no chat template; use /v1/completions",
        )
    })?;
    // A template refuses what its model was not trained for, roles out of turn for instance.
    let refused = |error: &dyn std::error::Error| {
        ApiError::invalid(
            "messages",
            format!("the model's chat template: {}", in_words(error)),
        )
    };
    let prompt = template
        .render(&Value::Array(messages), true, &Map::new())
        .map_err(|error| refused(&error))?;
    // One more than the context holds, since one may go again.
    let mut tokens = text
        .tokenizer
        .encode_at_most(text.context_length + 1, &prompt, true, true)
        .map_err(|error| match error {
            TokenizerError::TooLong { .. } => text.context_exceeded(),
            error => refused(&error),
        })?;
    // Some templates write the beginning-of-sequence token, some leave it to the tokenizer: there must be exactly one.
    if let (Some(bos), [first, second, ..]) = (text.tokenizer.bos(), tokens.as_slice())
        && *first == bos
        && *second == bos
    {
        tokens.remove(0);
    }
    if tokens.is_empty() {
        return Err(ApiError::invalid("messages", "the messages make no token"));
    }
    Ok(tokens.into())
}

/// An error and its causes.
fn in_words(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let words: Vec<String> = causes.map(ToString::to_string).collect();
    words.join(": ")
}
