//! POST /v1/responses: OpenAI's newer API, said again as a chat, and answered as items. Tools that run at OpenAI's are ignored; what an
//! answer said is kept for a while, so that the next request can name it instead of sending it again.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use prima_text::AnswerPart;
use serde_json::{Map, Value, json};

use crate::generation::{FinishReason, Usage};

use super::Gateway;
use super::auth::Caller;
use super::chat;
use super::conversation::call_id;
use super::in_flight::{AnswerProgress, AnsweredChoice, Block, InFlight};
use super::models::unix_seconds;
use super::openai_error::ApiError;
use super::request::Fields;
use super::request_id;
use super::said::Conversation;
use super::stream::{self, Format, Message};

pub async fn create(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let text = gateway.ready()?;
    let keyspace = caller.keyspace;
    let read = {
        let (gateway, text) = (gateway.clone(), text.clone());
        move |fields: &Fields<'_>| {
            let previous = previous(&gateway, keyspace, fields)?;
            let (chat, messages) = as_chat(fields, previous)?;
            let asked = chat::asked(&gateway, &text, &Fields::new(&chat))?;
            Ok((asked, answer(&gateway, fields, messages, keyspace)?))
        }
    };
    let (taken, mut answer) = gateway.0.intake.take(request, read).await?.apart();
    let stream = taken.asked.options.stream;
    let in_flight = InFlight::submit(&gateway, caller, taken).await?;
    if stream {
        return Ok(stream::events(in_flight, Events::new(answer)));
    }
    let (answered, usage) = in_flight.collect_one().await?;
    answer.take(answered);
    Ok(Json(answer.end(&usage)).into_response())
}

/// GET /v1/responses/{id}
pub async fn get(
    State(gateway): State<Gateway>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let kept = gateway.0.said.get(&id, caller.keyspace);
    let kept = kept.ok_or(ApiError::NoSuchResponse { id })?;
    Ok(Json(kept.response.clone()))
}

fn previous(
    gateway: &Gateway,
    keyspace: u64,
    fields: &Fields<'_>,
) -> Result<Option<Arc<Conversation>>, ApiError> {
    let Some(id) = fields.string("previous_response_id")? else {
        return Ok(None);
    };
    let kept = gateway.0.said.get(id, keyspace);
    kept.map(Some).ok_or_else(|| {
        let gone = ApiError::NoSuchResponse { id: id.to_owned() };
        ApiError::invalid(
            "previous_response_id",
            format!("previous_response_id: {gone}"),
        )
    })
}

// ---- the request as a chat ----

/// The chat's fields, and its messages without the instructions, which hold for one request only.
fn as_chat(
    fields: &Fields<'_>,
    previous: Option<Arc<Conversation>>,
) -> Result<(Map<String, Value>, Vec<Value>), ApiError> {
    let mut chat = fields.renamed(&[
        ("model", "model"),
        ("max_output_tokens", "max_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("stream", "stream"),
        ("parallel_tool_calls", "parallel_tool_calls"),
        ("chat_template_kwargs", "chat_template_kwargs"),
        (chat::THINKING_BUDGET, chat::THINKING_BUDGET),
    ]);
    if let Some(reasoning) = fields.object("reasoning")?
        && let Some(effort) = reasoning.string("effort")?
    {
        chat.insert("reasoning_effort".into(), effort.into());
    }
    if let Some(text) = fields.object("text")?
        && let Some(format) = text.object("format")?
    {
        // The same form, one level less deep.
        let form = match format.string("type")? {
            Some("json_schema") => {
                json!({"type": "json_schema", "json_schema": format.to_map()})
            }
            _ => Value::Object(format.to_map()),
        };
        chat.insert("response_format".into(), form);
    }
    if let Some(tools) = fields.array("tools")? {
        let functions = tools.iter().filter(|tool| tool["type"] == "function");
        let functions =
            functions.map(|tool| json!({"type": "function", "function": without_type(tool)}));
        chat.insert("tools".into(), functions.collect());
    }
    match fields.get("tool_choice") {
        None => {}
        Some(Value::Object(choice)) if choice.get("type") == Some(&"function".into()) => {
            let name = choice.get("name").cloned().unwrap_or_default();
            let chosen = json!({"type": "function", "function": {"name": name}});
            chat.insert("tool_choice".into(), chosen);
        }
        // One of OpenAI's own tools.
        Some(Value::Object(_)) => {}
        Some(word) => {
            chat.insert("tool_choice".into(), word.clone());
        }
    }
    let mut messages = previous.map_or(Vec::new(), |previous| previous.messages.clone());
    match fields.get("input") {
        None => return Err(fields.missing("input")),
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (number, item) in items.iter().enumerate() {
                said(number, item, &mut messages)?;
            }
        }
        Some(other) => return Err(fields.wrong("input", "a string or an array of items", other)),
    }
    let mut whole = messages.clone();
    if let Some(instructions) = fields.string("instructions")? {
        whole.insert(0, json!({"role": "system", "content": instructions}));
    }
    chat.insert("messages".into(), whole.into());
    Ok((chat, messages))
}

fn without_type(tool: &Value) -> Value {
    let mut function = tool.clone();
    if let Some(map) = function.as_object_mut() {
        map.remove("type");
    }
    function
}

/// Adds one item of the input to the conversation.
fn said(number: usize, item: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let path = format!("input[{number}]");
    let wrong = |must: &str| ApiError::invalid(&path, format!("{path} must be {must}"));
    match item["type"].as_str().unwrap_or("message") {
        "message" => {
            let role = item["role"]
                .as_str()
                .ok_or_else(|| wrong("a message with a role"))?;
            let content = match &item["content"] {
                Value::String(text) => text.clone(),
                Value::Array(parts) => {
                    let texts: Option<Vec<&str>> = parts
                        .iter()
                        .map(|part| part["text"].as_str().or(part["refusal"].as_str()))
                        .collect();
                    texts
                        .ok_or_else(|| wrong("a message of text, all that this model reads"))?
                        .join("\n")
                }
                _ => return Err(wrong("a message with a content")),
            };
            match messages
                .last_mut()
                .filter(|last| role == "assistant" && lacks_text(last))
            {
                // Thoughts, text and calls of one answer are one message.
                Some(last) => last["content"] = content.into(),
                None => messages.push(json!({"role": role, "content": content})),
            }
        }
        "function_call" => {
            let call = json!({
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            });
            let answer = messages
                .last_mut()
                .filter(|last| last["role"] == "assistant");
            match answer.and_then(Value::as_object_mut) {
                Some(answer) => {
                    let calls = answer.entry("tool_calls").or_insert_with(|| json!([]));
                    if let Some(calls) = calls.as_array_mut() {
                        calls.push(call);
                    }
                }
                None => {
                    messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}))
                }
            }
        }
        "function_call_output" => {
            let output = match &item["output"] {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            messages
                .push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": output}));
        }
        // Comes before what it led to.
        "reasoning" => {
            let parts = item["content"].as_array().into_iter().flatten();
            let thoughts: Vec<&str> = parts.filter_map(|part| part["text"].as_str()).collect();
            let thought = thoughts.join("\n");
            match messages
                .last_mut()
                .filter(|last| last["role"] == "assistant")
            {
                _ if thought.is_empty() => {}
                None => messages.push(json!({
                    "role": "assistant", "content": "", "reasoning_content": thought,
                })),
                // Between calls that go together.
                Some(last) if last["tool_calls"].is_array() => {}
                Some(last) => {
                    let before = last["reasoning_content"].as_str();
                    let both = before.map(|before| format!("{before}\n{thought}"));
                    last["reasoning_content"] = both.unwrap_or(thought).into();
                }
            }
        }
        // What OpenAI's own tools said.
        _ => {}
    }
    Ok(())
}

/// Of an answer whose thoughts or calls have come.
fn lacks_text(message: &Value) -> bool {
    let begun = message["tool_calls"].is_array() || message["reasoning_content"].is_string();
    message["role"] == "assistant" && message["content"] == "" && begun
}

// ---- the answer as items ----

struct Answer {
    gateway: Gateway,
    keyspace: u64,
    store: bool,
    /// The conversation before the answer.
    messages: Vec<Value>,
    /// What of the request is said again.
    echoed: Map<String, Value>,
    id: String,
    created: u64,
    output: Vec<Value>,
    reason: FinishReason,
}

fn answer(
    gateway: &Gateway,
    fields: &Fields<'_>,
    messages: Vec<Value>,
    keyspace: u64,
) -> Result<Answer, ApiError> {
    let mut echoed = Map::new();
    for (name, absent) in [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", true.into()),
        ("previous_response_id", Value::Null),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("temperature", 1.0.into()),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("top_p", 1.0.into()),
        ("truncation", "disabled".into()),
    ] {
        echoed.insert(name.into(), fields.get(name).cloned().unwrap_or(absent));
    }
    Ok(Answer {
        gateway: gateway.clone(),
        keyspace,
        store: fields.boolean("store")?.unwrap_or(true),
        messages,
        echoed,
        id: request_id::unique("resp").replace('-', "_"),
        created: unix_seconds(),
        output: Vec::new(),
        reason: FinishReason::Stop,
    })
}

impl Answer {
    fn response(&self, status: &str, usage: Value) -> Value {
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": null,
            "model": self.gateway.0.model.name,
            "output": self.output,
            "store": self.store,
            "usage": usage,
        });
        for (name, value) in &self.echoed {
            response[name] = value.clone();
        }
        if status == "incomplete" {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response
    }

    fn take(&mut self, answered: AnsweredChoice) {
        let items = answered.blocks.iter().map(|block| match block {
            Block::Content(text) => message(text, "completed"),
            Block::Reasoning(text) => reasoning(text, "completed"),
            Block::Call { name, arguments } => function_call(name, arguments, "completed"),
        });
        self.output = items.collect();
        if self.output.is_empty() {
            self.output.push(message("", "completed"));
        }
        self.reason = answered.reason;
        let status = self.status();
        if let Some(last) = self.output.last_mut() {
            last["status"] = status.into();
        }
    }

    /// Of the response and its last item.
    fn status(&self) -> &'static str {
        match self.reason {
            FinishReason::Length => "incomplete",
            FinishReason::Stop | FinishReason::StopString(_) => "completed",
        }
    }

    /// The whole response; it is kept.
    fn end(&mut self, usage: &Usage) -> Value {
        let status = self.status();
        let usage = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        });
        let response = self.response(status, usage);
        if self.store {
            let mut messages = std::mem::take(&mut self.messages);
            for (number, item) in self.output.iter().enumerate() {
                // A call that a limit cut off is none that could be gone on from.
                if item["type"] == "function_call" && status == "incomplete" {
                    continue;
                }
                // Ours are never wrong.
                let _ = said(number, item, &mut messages);
            }
            let conversation = Conversation {
                messages,
                response: response.clone(),
            };
            self.gateway
                .0
                .said
                .keep(self.id.clone(), self.keyspace, conversation);
        }
        response
    }
}

fn message(text: &str, status: &str) -> Value {
    json!({
        "type": "message",
        "id": request_id::unique("msg").replace('-', "_"),
        "role": "assistant",
        "status": status,
        "content": [output_text(text)],
    })
}

fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn reasoning(text: &str, status: &str) -> Value {
    json!({
        "type": "reasoning",
        "id": request_id::unique("rs").replace('-', "_"),
        "status": status,
        "summary": [],
        "content": [reasoning_text(text)],
    })
}

fn reasoning_text(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

fn function_call(name: &str, arguments: &str, status: &str) -> Value {
    json!({
        "type": "function_call",
        "id": request_id::unique("fc").replace('-', "_"),
        "call_id": call_id(request_id::random()),
        "name": name,
        "arguments": arguments,
        "status": status,
    })
}

/// A response as it streams: items one after the other, each opened, continued and closed, and all events counted.
struct Events {
    answer: Answer,
    sequence: u64,
    /// The item that is open: its kind, and its text so far.
    open: Option<(ItemKind, String)>,
}

#[derive(Clone, Copy, PartialEq)]
enum ItemKind {
    Message,
    Reasoning,
    Call,
}

impl ItemKind {
    /// The one part of an item's content.
    fn part(self, text: &str) -> Option<Value> {
        match self {
            Self::Message => Some(output_text(text)),
            Self::Reasoning => Some(reasoning_text(text)),
            Self::Call => None,
        }
    }
}

impl Events {
    fn new(answer: Answer) -> Self {
        Self {
            answer,
            sequence: 0,
            open: None,
        }
    }

    /// An event says its name twice.
    fn event(&mut self, name: &'static str, mut data: Value) -> Message {
        data["type"] = name.into();
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        Message::named(name, &data)
    }

    fn index(&self) -> usize {
        self.answer.output.len().saturating_sub(1)
    }

    fn item_id(&self) -> Value {
        self.answer
            .output
            .last()
            .map_or(Value::Null, |item| item["id"].clone())
    }

    /// An event about a part of the open item.
    fn of_part(&mut self, name: &'static str, mut data: Value) -> Message {
        data["item_id"] = self.item_id();
        data["output_index"] = self.index().into();
        data["content_index"] = 0.into();
        self.event(name, data)
    }

    fn begin(&mut self, kind: ItemKind, item: Value, messages: &mut Vec<Message>) {
        self.close("completed", messages);
        let mut shown = item.clone();
        if kind != ItemKind::Call {
            shown["content"] = json!([]);
        }
        self.answer.output.push(item);
        let added = json!({"output_index": self.index(), "item": shown});
        messages.push(self.event("response.output_item.added", added));
        // Clients take a text only for a part that they know.
        if let Some(part) = kind.part("") {
            messages.push(self.of_part("response.content_part.added", json!({ "part": part })));
        }
        self.open = Some((kind, String::new()));
    }

    fn part(&mut self, part: AnswerPart, messages: &mut Vec<Message>) {
        let (kind, name, text) = match part {
            AnswerPart::Content(text) => (ItemKind::Message, "response.output_text.delta", text),
            AnswerPart::Reasoning(text) => {
                (ItemKind::Reasoning, "response.reasoning_text.delta", text)
            }
            AnswerPart::Call { name } => {
                let item = function_call(&name, "", "in_progress");
                return self.begin(ItemKind::Call, item, messages);
            }
            AnswerPart::Arguments(text) => (
                ItemKind::Call,
                "response.function_call_arguments.delta",
                text,
            ),
        };
        if self.open.as_ref().map(|(kind, _)| *kind) != Some(kind) {
            let item = match kind {
                ItemKind::Reasoning => reasoning("", "in_progress"),
                _ => message("", "in_progress"),
            };
            self.begin(kind, item, messages);
        }
        let mut delta = json!({ "delta": text });
        if kind == ItemKind::Message {
            delta["logprobs"] = json!([]);
        }
        messages.push(self.of_part(name, delta));
        if let Some((_, whole)) = &mut self.open {
            *whole += &text;
        }
    }

    fn close(&mut self, status: &'static str, messages: &mut Vec<Message>) {
        let Some((kind, text)) = self.open.take() else {
            return;
        };
        let (name, done) = match kind {
            ItemKind::Message => (
                "response.output_text.done",
                json!({"text": text, "logprobs": []}),
            ),
            ItemKind::Reasoning => ("response.reasoning_text.done", json!({ "text": text })),
            ItemKind::Call => (
                "response.function_call_arguments.done",
                json!({ "arguments": text }),
            ),
        };
        messages.push(self.of_part(name, done));
        if let Some(part) = kind.part(&text) {
            messages.push(self.of_part("response.content_part.done", json!({ "part": part })));
        }
        let index = self.index();
        let Some(item) = self.answer.output.last_mut() else {
            return;
        };
        item["status"] = status.into();
        match kind {
            ItemKind::Call => item["arguments"] = text.into(),
            _ => item["content"][0]["text"] = text.into(),
        }
        let done = json!({"output_index": index, "item": item});
        messages.push(self.event("response.output_item.done", done));
    }
}

impl Format for Events {
    fn begin(&mut self, _: usize) -> Vec<Message> {
        let response = json!({"response": self.answer.response("in_progress", Value::Null)});
        vec![
            self.event("response.created", response.clone()),
            self.event("response.in_progress", response),
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
            AnswerProgress::Finished { reason, parts, .. } => {
                for part in parts {
                    self.part(part, &mut messages);
                }
                if self.answer.output.is_empty() {
                    self.begin(ItemKind::Message, message("", "in_progress"), &mut messages);
                }
                self.answer.reason = reason;
                self.close(self.answer.status(), &mut messages);
            }
            AnswerProgress::Done(usage) => {
                let name = match self.answer.reason {
                    FinishReason::Length => "response.incomplete",
                    _ => "response.completed",
                };
                let response = self.answer.end(&usage);
                messages.push(self.event(name, json!({ "response": response })));
            }
            AnswerProgress::Failed(error) => {
                let mut response = self.answer.response("failed", Value::Null);
                response["error"] = json!({"code": "server_error", "message": error.to_string()});
                messages.push(self.event("response.failed", json!({ "response": response })));
            }
        }
        messages
    }
}
