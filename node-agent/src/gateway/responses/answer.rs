//! What is answered, as items; and what is kept of it.

use serde_json::{Map, Value, json};

use super::input::{Chat, said};
use super::tools::Namespaced;
use crate::gateway::Gateway;
use crate::gateway::conversation::call_id;
use crate::gateway::in_flight::{AnsweredChoice, Block};
use crate::gateway::models::unix_seconds;
use crate::gateway::openai_error::ApiError;
use crate::gateway::request::Fields;
use crate::gateway::request_id;
use crate::generation::{FinishReason, Usage};

/// OpenAI's limits.
const MAX_METADATA: usize = 16;
const MAX_METADATA_NAME: usize = 64;
const MAX_METADATA_VALUE: usize = 512;

/// A response: what has been answered, and what of the request is in it.
pub struct Answer {
    gateway: Gateway,
    keyspace: u64,
    store: bool,
    /// The conversation before the answer.
    messages: Vec<Value>,
    namespaced: Namespaced,
    /// What of the request is said again.
    echoed: Map<String, Value>,
    id: String,
    created: u64,
    pub output: Vec<Value>,
    pub reason: FinishReason,
}

impl Answer {
    pub fn new(
        gateway: &Gateway,
        fields: &Fields<'_>,
        chat: Chat,
        keyspace: u64,
    ) -> Result<Self, ApiError> {
        if let Some(metadata) = fields.get("metadata") {
            let is_within = |text: &str, most: usize| text.chars().count() <= most;
            let is_short = |(name, value): (&String, &Value)| {
                let value = value.as_str();
                is_within(name, MAX_METADATA_NAME)
                    && value.is_some_and(|value| is_within(value, MAX_METADATA_VALUE))
            };
            let are_few_strings = metadata.as_object().is_some_and(|strings| {
                strings.len() <= MAX_METADATA && strings.iter().all(is_short)
            });
            if !are_few_strings {
                let must = format!(
                    "an object of at most {MAX_METADATA} strings of at most {MAX_METADATA_VALUE} characters, with names of at most \
                     {MAX_METADATA_NAME}"
                );
                return Err(fields.wrong("metadata", &must, metadata));
            }
        }
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
        Ok(Self {
            gateway: gateway.clone(),
            keyspace,
            store: fields.boolean("store")?.unwrap_or(true),
            messages: chat.messages,
            namespaced: chat.namespaced,
            echoed,
            id: request_id::unique("resp").replace('-', "_"),
            created: unix_seconds(),
            output: Vec::new(),
            reason: FinishReason::Stop,
        })
    }

    pub fn response(&self, status: &str, usage: Value) -> Value {
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

    pub fn take(&mut self, answered: AnsweredChoice) {
        let items = answered.blocks.iter().map(|block| match block {
            Block::Content(text) => message(text, "completed"),
            Block::Reasoning(text) => reasoning(text, "completed"),
            Block::Call { name, arguments } => self.function_call(name, arguments, "completed"),
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

    /// With the name that the client knows.
    pub fn function_call(&self, name: &str, arguments: &str, status: &str) -> Value {
        let mut call = json!({
            "type": "function_call",
            "id": request_id::unique("fc").replace('-', "_"),
            "call_id": call_id(request_id::random()),
            "name": name,
            "arguments": arguments,
            "status": status,
        });
        if let Some((namespace, name)) = self.namespaced.get(name) {
            call["namespace"] = namespace.as_str().into();
            call["name"] = name.as_str().into();
        }
        call
    }

    /// Of the response and its last item.
    pub fn status(&self) -> &'static str {
        match self.reason {
            FinishReason::Length => "incomplete",
            FinishReason::Stop | FinishReason::StopString(_) => "completed",
        }
    }

    /// The whole response; it is kept.
    pub fn end(&mut self, usage: &Usage) -> Value {
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
            let kept = &self.gateway.0.said;
            kept.keep(self.id.clone(), self.keyspace, messages, &response);
        }
        response
    }
}

pub fn message(text: &str, status: &str) -> Value {
    json!({
        "type": "message",
        "id": request_id::unique("msg").replace('-', "_"),
        "role": "assistant",
        "status": status,
        "content": [output_text(text)],
    })
}

pub fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

pub fn reasoning(text: &str, status: &str) -> Value {
    json!({
        "type": "reasoning",
        "id": request_id::unique("rs").replace('-', "_"),
        "status": status,
        "summary": [],
        "content": [reasoning_text(text)],
    })
}

pub fn reasoning_text(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}
