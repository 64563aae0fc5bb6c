//! POST /v1/messages: Anthropic's API, said again as a chat of OpenAI's, and answered in its words. What it has and this server has not
//! (images, tools that run at Anthropic's, citations) is refused or ignored as servers for local models do. An image or a document that a
//! tool brings is a note.

use std::borrow::Cow;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use prima_text::AnswerPart;
use serde_json::{Map, Value, json};

use crate::generation::{FinishReason, SubmitError, Usage};

use super::auth::Caller;
use super::chat;
use super::conversation::call_id;
use super::in_flight::{AnswerProgress, AnsweredChoice, Block, InFlight};
use super::openai_error::{ApiError, with_body};
use super::request::Fields;
use super::request_id;
use super::stream::{self, Format, Message};
use super::tools::part_text;
use super::{Gateway, ModelText};

pub async fn create(
    state: State<Gateway>,
    caller: Extension<Caller>,
    request: Request,
) -> Response {
    answer(state, caller, request).await.unwrap_or_else(refusal)
}

async fn answer(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let read = {
        let gateway = gateway.clone();
        move |fields: &Fields<'_>| {
            if fields.integer("max_tokens", 1..=i64::MAX)?.is_none() {
                return Err(fields.missing("max_tokens"));
            }
            let chat = as_chat(fields)?;
            let asked = chat::asked(&gateway, &text, &Fields::new(&chat));
            asked.map_err(|error| with_length(error, &text, &chat))
        }
    };
    let taken = gateway.0.intake.take(request, read).await?;
    let stream = taken.asked.options.stream;
    let answer = Answer {
        id: request_id::unique("msg"),
        model: gateway.0.model.name.clone(),
        stop: taken.asked.options.stop.clone(),
        prompt_tokens: taken.asked.prompts.iter().map(|prompt| prompt.len()).sum(),
    };
    let in_flight = InFlight::submit(&gateway, caller, taken).await?;
    if stream {
        return Ok(stream::events(in_flight, Events::new(answer)));
    }
    let (answered, usage) = in_flight.collect_one().await?;
    Ok(Json(answer.whole(answered, &usage)).into_response())
}

/// POST /v1/messages/count_tokens: what a request's prompt would have, without computing anything.
pub async fn count_tokens(state: State<Gateway>, request: Request) -> Response {
    counted(state, request).await.unwrap_or_else(refusal)
}

async fn counted(State(gateway): State<Gateway>, request: Request) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let own = gateway.clone();
    let count = move |fields: &Fields<'_>| {
        if let Some(model) = fields.string("model")? {
            own.0.model.check(model)?;
        }
        let chat = as_chat(fields)?;
        chat::count(&text, &Fields::new(&chat))
    };
    let taken = gateway.0.intake.take(request, count).await?;
    Ok(Json(json!({ "input_tokens": taken.asked })).into_response())
}

/// Of a prompt that is too long Anthropic's clients want to know how long it is, so that they can shorten it.
fn with_length(error: ApiError, text: &ModelText, chat: &Map<String, Value>) -> ApiError {
    match error {
        ApiError::Submit(SubmitError::ContextExceeded { context }) => {
            let counted = chat::count(text, &Fields::new(chat));
            counted.map_or(error, |tokens| ApiError::PromptTooLong { tokens, context })
        }
        error => error,
    }
}

/// Anthropic's error body, with our status and headers.
pub fn refusal(error: ApiError) -> Response {
    let body = error.body();
    let response = error.into_response();
    let kind = match response.status().as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    };
    let message = &body["error"]["message"];
    let body = json!({"type": "error", "error": {"type": kind, "message": message}});
    with_body(response, &body)
}

// ---- the request as a chat ----

fn as_chat(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut chat = fields.renamed(&[
        ("model", "model"),
        ("max_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("stream", "stream"),
    ]);
    let mut messages = Vec::new();
    if let Some(system) = fields.get("system") {
        messages.push(json!({"role": "system", "content": text_of(fields, "system", system)?}));
    }
    let turns = fields
        .array("messages")?
        .ok_or_else(|| fields.missing("messages"))?;
    for (number, turn) in turns.iter().enumerate() {
        let path = format!("messages[{number}]");
        said(&Fields::of(turn, &path)?, &mut messages)?;
    }
    chat.insert("messages".into(), messages.into());
    if let Some(tools) = fields.array("tools")? {
        // Those with another type run at Anthropic's.
        let own = tools
            .iter()
            .filter(|tool| tool["type"].is_null() || tool["type"] == "custom");
        let own = own.map(|tool| {
            json!({"type": "function", "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
                "strict": tool["strict"],
            }})
        });
        chat.insert("tools".into(), own.collect());
    }
    if let Some(choice) = fields.object("tool_choice")? {
        let kind = choice
            .string("type")?
            .ok_or_else(|| choice.missing("type"))?;
        let chosen = match kind {
            "auto" | "none" => kind.into(),
            "any" => "required".into(),
            "tool" => {
                json!({"type": "function", "function": {"name": choice.string("name")?}})
            }
            other => {
                return Err(choice.wrong("type", "`auto`, `any`, `tool` or `none`", &other.into()));
            }
        };
        chat.insert("tool_choice".into(), chosen);
        let one = choice
            .boolean("disable_parallel_tool_use")?
            .unwrap_or(false);
        chat.insert("parallel_tool_calls".into(), (!one).into());
    }
    let config = fields.object("output_config")?;
    let format = config.map(|config| config.object("format")).transpose()?;
    // `output_format` is the older name.
    let format = match format.flatten() {
        None => fields.object("output_format")?,
        format => format,
    };
    if let Some(format) = format {
        let schema = format.get("schema");
        let schema = schema.ok_or_else(|| format.missing("schema"))?;
        let form = json!({"type": "json_schema", "json_schema": {"schema": schema}});
        chat.insert("response_format".into(), form);
    }
    if let Some(thinking) = fields.object("thinking")? {
        let enabled = thinking.string("type")? != Some("disabled");
        chat.insert(
            "chat_template_kwargs".into(),
            json!({ "enable_thinking": enabled }),
        );
        let budget = match enabled {
            true => thinking.integer("budget_tokens", 0..=i64::MAX)?,
            // Also where the template knows no such word.
            false => Some(0),
        };
        chat.extend(budget.map(|tokens| (chat::THINKING_BUDGET.to_owned(), tokens.into())));
    }
    Ok(chat)
}

/// One turn: its text, its calls or the results that it brings.
fn said(turn: &Fields<'_>, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = turn.string("role")?.ok_or_else(|| turn.missing("role"))?;
    if !matches!(role, "user" | "assistant" | "system") {
        return Err(turn.wrong("role", "`user` or `assistant`", &role.into()));
    }
    let blocks = match turn.get("content") {
        None => return Err(turn.missing("content")),
        Some(Value::Array(blocks)) => blocks,
        Some(content) => {
            messages.push(json!({"role": role, "content": text_of(turn, "content", content)?}));
            return Ok(());
        }
    };
    let (mut text, mut thought, mut calls) = (Vec::new(), String::new(), Vec::new());
    for block in blocks {
        match block["type"].as_str() {
            Some("text") => text.push(block["text"].as_str().unwrap_or_default()),
            Some("thinking") => thought += block["thinking"].as_str().unwrap_or_default(),
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(json!({
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": block["input"].to_string()},
            })),
            Some("tool_result") => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    Value::Array(blocks) => result_of(turn, blocks)?,
                    content => text_of(turn, "content", content)?,
                };
                messages.push(json!({
                    "role": "tool",
                    "tool_call_id": block["tool_use_id"],
                    "content": content,
                }));
            }
            _ => {
                let must = "blocks of text, thinking, tool_use or tool_result";
                return Err(turn.wrong("content", must, block));
            }
        }
    }
    if text.is_empty() && calls.is_empty() {
        return Ok(());
    }
    let mut message = json!({"role": role, "content": text.join("\n")});
    if !thought.is_empty() {
        message["reasoning_content"] = thought.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

/// What a tool brings, in blocks.
fn result_of(turn: &Fields<'_>, blocks: &[Value]) -> Result<String, ApiError> {
    let texts = blocks.iter().map(|block| match block["type"].as_str() {
        None | Some("text") => block["text"].as_str().map(Cow::Borrowed).ok_or(block),
        Some(_) => Ok(part_text(block)),
    });
    let texts: Result<Vec<Cow<'_, str>>, &Value> = texts.collect();
    let must = "a string or an array of blocks, those of text with a text";
    let texts = texts.map_err(|block| turn.wrong("content", must, block))?;
    Ok(texts.join("\n"))
}

/// A text, or blocks of text.
fn text_of(fields: &Fields<'_>, name: &str, value: &Value) -> Result<String, ApiError> {
    let must = "a string or an array of text blocks";
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let texts = blocks.iter().map(|block| block["text"].as_str());
            let texts: Option<Vec<&str>> = texts.collect();
            Ok(texts
                .ok_or_else(|| fields.wrong(name, must, value))?
                .join("\n"))
        }
        other => Err(fields.wrong(name, must, other)),
    }
}

// ---- the answer as a message ----

struct Answer {
    id: String,
    model: String,
    stop: Vec<String>,
    prompt_tokens: usize,
}

impl Answer {
    fn around(&self, content: Vec<Value>, stop: (Value, Value), usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop.0,
            "stop_sequence": stop.1,
            "usage": usage,
        })
    }

    fn whole(&self, answered: AnsweredChoice, usage: &Usage) -> Value {
        let called = answered.calls().next().is_some() && !answered.in_call;
        let content = answered.blocks.iter().map(|block| match block {
            Block::Content(text) => json!({"type": "text", "text": text}),
            Block::Reasoning(text) => {
                json!({"type": "thinking", "thinking": text, "signature": ""})
            }
            Block::Call { name, arguments } => {
                let mut block = tool_use(name);
                // A call that max_tokens cut off has no arguments that could be read.
                block["input"] = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
                block
            }
        });
        self.around(
            content.collect(),
            self.stop_reason(answered.reason, called),
            counts(usage),
        )
    }

    /// `stop_reason` and `stop_sequence`.
    fn stop_reason(&self, reason: FinishReason, called: bool) -> (Value, Value) {
        match reason {
            FinishReason::Length => ("max_tokens".into(), Value::Null),
            _ if called => ("tool_use".into(), Value::Null),
            FinishReason::Stop => ("end_turn".into(), Value::Null),
            FinishReason::StopString(place) => {
                ("stop_sequence".into(), self.stop.get(place).cloned().into())
            }
        }
    }
}

fn tool_use(name: &str) -> Value {
    let id = call_id(request_id::random());
    json!({"type": "tool_use", "id": id, "name": name, "input": {}})
}

fn counts(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    })
}

/// A message as it streams: blocks one after the other, each opened, continued and closed.
struct Events {
    answer: Answer,
    /// What kind of block is open.
    open: Option<&'static str>,
    blocks: usize,
    called: bool,
    stop: (Value, Value),
}

impl Events {
    fn new(answer: Answer) -> Self {
        Self {
            answer,
            open: None,
            blocks: 0,
            called: false,
            stop: (Value::Null, Value::Null),
        }
    }

    fn part(&mut self, part: AnswerPart, messages: &mut Vec<Message>) {
        let (kind, begin, delta) = match part {
            AnswerPart::Content(text) => (
                "text",
                json!({"type": "text", "text": ""}),
                json!({"type": "text_delta", "text": text}),
            ),
            AnswerPart::Reasoning(text) => (
                "thinking",
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                json!({"type": "thinking_delta", "thinking": text}),
            ),
            AnswerPart::Call { name } => {
                self.close(messages);
                self.called = true;
                return self.begin("tool_use", tool_use(&name), messages);
            }
            AnswerPart::Arguments(json) => (
                "tool_use",
                Value::Null,
                json!({"type": "input_json_delta", "partial_json": json}),
            ),
        };
        if self.open != Some(kind) {
            self.close(messages);
            self.begin(kind, begin, messages);
        }
        let index = self.blocks.saturating_sub(1);
        messages.push(event(
            "content_block_delta",
            json!({"index": index, "delta": delta}),
        ));
    }

    fn begin(&mut self, kind: &'static str, block: Value, messages: &mut Vec<Message>) {
        let index = self.blocks;
        messages.push(event(
            "content_block_start",
            json!({"index": index, "content_block": block}),
        ));
        self.open = Some(kind);
        self.blocks += 1;
    }

    fn close(&mut self, messages: &mut Vec<Message>) {
        if self.open.take().is_some() {
            let index = self.blocks.saturating_sub(1);
            messages.push(event("content_block_stop", json!({ "index": index })));
        }
    }
}

impl Format for Events {
    fn begin(&mut self, _: usize) -> Vec<Message> {
        let usage = json!({"input_tokens": self.answer.prompt_tokens, "output_tokens": 0});
        let message = self
            .answer
            .around(Vec::new(), (Value::Null, Value::Null), usage);
        vec![
            event("message_start", json!({ "message": message })),
            event("ping", json!({})),
        ]
    }

    fn write(&mut self, progress: AnswerProgress) -> Vec<Message> {
        let mut messages = Vec::new();
        match progress {
            AnswerProgress::Token { parts, .. } => {
                for part in parts {
                    self.part(part, &mut messages);
                }
            }
            AnswerProgress::Finished {
                reason,
                parts,
                in_call,
                ..
            } => {
                for part in parts {
                    self.part(part, &mut messages);
                }
                self.close(&mut messages);
                let called = self.called && !in_call;
                self.stop = self.answer.stop_reason(reason, called);
            }
            AnswerProgress::Done(usage) => {
                let (reason, sequence) = std::mem::take(&mut self.stop);
                let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
                let told = json!({"delta": delta, "usage": counts(&usage)});
                messages.push(event("message_delta", told));
                messages.push(event("message_stop", json!({})));
            }
            AnswerProgress::Failed(error) => {
                let message = error.to_string();
                let error = json!({"type": "api_error", "message": message});
                messages.push(event("error", json!({ "error": error })));
            }
        }
        messages
    }
}

/// An event says its name twice.
fn event(name: &'static str, mut data: Value) -> Message {
    data["type"] = name.into();
    Message::named(name, &data)
}
