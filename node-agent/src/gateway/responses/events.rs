//! An answer as it streams.

use prima_text::AnswerPart;
use serde_json::{Value, json};

use super::answer::{Answer, message, output_text, reasoning, reasoning_text};
use crate::gateway::in_flight::AnswerProgress;
use crate::gateway::stream::{Format, Message};
use crate::generation::FinishReason;

/// A response as it streams: items one after the other, each opened, continued and closed, and all events counted.
pub struct Events {
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
    pub fn new(answer: Answer) -> Self {
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
                let item = self.answer.function_call(&name, "", "in_progress");
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
