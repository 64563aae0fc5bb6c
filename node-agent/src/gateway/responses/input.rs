//! The items that a request brings, said again as a chat.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::tools::{Namespaced, flat_name, functions};
use crate::gateway::chat;
use crate::gateway::openai_error::ApiError;
use crate::gateway::request::{Fields, shown};
use crate::gateway::tools::result_text;

/// A request as a chat.
pub struct Chat {
    pub fields: Map<String, Value>,
    /// Without the instructions, which hold for one request only.
    pub messages: Vec<Value>,
    /// Functions that have another name in it.
    pub namespaced: Namespaced,
}

/// `messages`: of the conversation that the request goes on with. `referenced`: the items that it names.
pub fn as_chat(
    fields: &Fields<'_>,
    mut messages: Vec<Value>,
    mut referenced: HashMap<String, Value>,
) -> Result<Chat, ApiError> {
    // A chat may say that there is no limit.
    fields.integer("max_output_tokens", 1..=i64::MAX)?;
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
    let mut namespaced = Namespaced::new();
    if let Some(tools) = fields.array("tools")? {
        let functions = functions(tools, &mut namespaced)?;
        chat.insert("tools".into(), functions.into());
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
    match fields.get("input") {
        None => return Err(fields.missing("input")),
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (number, item) in items.iter().enumerate() {
                match reference(item) {
                    None => said(number, item, &mut messages)?,
                    Some(id) => {
                        // Each once, so that a conversation is no larger than what is sent and kept.
                        match referenced.remove(id) {
                            Some(item) => said(number, &item, &mut messages)?,
                            // The conversation goes on without a thought.
                            None if id.starts_with(REASONING) => {}
                            None => return Err(not_kept(number, id)),
                        }
                    }
                }
            }
        }
        Some(other) => return Err(fields.wrong("input", "a string or an array of items", other)),
    }
    let mut whole = messages.clone();
    if let Some(instructions) = fields.string("instructions")? {
        whole.insert(0, json!({"role": "system", "content": instructions}));
    }
    chat.insert("messages".into(), whole.into());
    Ok(Chat {
        fields: chat,
        messages,
        namespaced,
    })
}

/// The id of an item that stands for another one, as Vercel's AI SDK sends what was answered before.
pub fn reference(item: &Value) -> Option<&str> {
    let is_reference = item["type"] == "item_reference";
    is_reference.then(|| item["id"].as_str().unwrap_or_default())
}

/// What the ids of thoughts begin with, at OpenAI's, too.
const REASONING: &str = "rs_";

fn not_kept(number: usize, id: &str) -> ApiError {
    let path = format!("input[{number}].id");
    let problem = format!(
        "{path}: no item `{}` is kept here (any more), or it is named twice; send the item itself",
        shown(id)
    );
    ApiError::invalid(path, problem)
}

/// Adds one item of the input to the conversation.
pub fn said(number: usize, item: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
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
            let name = match (item["namespace"].as_str(), item["name"].as_str()) {
                (Some(namespace), Some(name)) => Value::from(flat_name(namespace, name)),
                _ => item["name"].clone(),
            };
            let call = json!({
                "id": item["call_id"],
                "type": "function",
                "function": {"name": name, "arguments": item["arguments"]},
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
                Value::Array(parts) if parts.iter().all(|part| part["type"].is_string()) => {
                    result_text(parts)
                }
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
