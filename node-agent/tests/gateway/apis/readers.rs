//! How a request looks in each API, and what its answers say.

use prima_node_agent::generation::FinishReason;
use serde_json::{Value, json};

use super::{question, tool};
use crate::client::post;
use crate::server::{MODEL, Server};

/// What an answer says: content, reasoning, calls, and why it ended.
#[derive(Debug, Default, PartialEq)]
pub struct Said {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<(String, Value)>,
    pub reason: String,
    /// What came after what, in the words of APIs that tell it.
    pub order: Vec<String>,
}

/// One API: its route, how a request looks, how its answers are read.
pub struct Api {
    pub route: &'static str,
    pub request: fn(stream: bool) -> Value,
    pub whole: fn(&Value) -> Said,
    pub streamed: fn(&str) -> Said,
}

pub const APIS: [Api; 4] = [
    Api {
        route: "/v1/chat/completions",
        request: |stream| json!({"stream": stream, "messages": question(), "tools": [tool()]}),
        whole: |body| {
            let choice = &body["choices"][0];
            let calls = choice["message"]["tool_calls"].as_array();
            Said {
                content: string(&choice["message"]["content"]),
                reasoning: string(&choice["message"]["reasoning_content"]),
                calls: calls
                    .into_iter()
                    .flatten()
                    .map(|call| of_function(&call["function"]))
                    .collect(),
                reason: string(&choice["finish_reason"]),
                order: Vec::new(),
            }
        },
        streamed: |stream| {
            let (mut said, mut calls) = (Said::default(), Vec::new());
            for event in data(stream) {
                let choice = &event["choices"][0];
                let delta = &choice["delta"];
                said.content += &string(&delta["content"]);
                said.reasoning += &string(&delta["reasoning_content"]);
                said.reason += &string(&choice["finish_reason"]);
                for call in delta["tool_calls"].as_array().into_iter().flatten() {
                    if call["id"].is_string() {
                        assert_eq!(call["index"], calls.len());
                        calls.push((string(&call["function"]["name"]), String::new()));
                    }
                    calls[call["index"].as_u64().unwrap() as usize].1 +=
                        &string(&call["function"]["arguments"]);
                }
            }
            assert!(stream.ends_with("data: [DONE]\n\n"));
            said.calls = put_together(calls);
            said
        },
    },
    Api {
        route: "/v1/responses",
        request: |stream| json!({"stream": stream, "input": "a", "tools": [flat_tool()]}),
        whole: items,
        streamed: |stream| {
            let events = data(stream);
            let numbers: Vec<u64> = events
                .iter()
                .map(|event| event["sequence_number"].as_u64().unwrap())
                .collect();
            assert!(numbers.iter().copied().eq(0..numbers.len() as u64));
            let (mut said, mut calls) = (Said::default(), Vec::new());
            // The part that is open: openai-node refuses texts of a part that was not added.
            let mut open = Value::Null;
            let part = |event: &Value, kind: &Value| {
                json!([
                    event["item_id"],
                    event["output_index"],
                    event["content_index"],
                    kind
                ])
            };
            for event in &events {
                match event["type"].as_str().unwrap() {
                    "response.content_part.added" => {
                        assert_eq!(open, Value::Null);
                        open = part(event, &event["part"]["type"]);
                    }
                    "response.content_part.done" => {
                        assert_eq!(open.take(), part(event, &event["part"]["type"]));
                    }
                    "response.output_text.delta" => {
                        assert_eq!(open, part(event, &"output_text".into()));
                        said.content += &string(&event["delta"]);
                    }
                    "response.reasoning_text.delta" => {
                        assert_eq!(open, part(event, &"reasoning_text".into()));
                        said.reasoning += &string(&event["delta"]);
                    }
                    "response.output_item.added" => {
                        said.order.push(string(&event["item"]["type"]));
                        if event["item"]["type"] == "function_call" {
                            calls.push((string(&event["item"]["name"]), String::new()));
                        }
                    }
                    "response.function_call_arguments.delta" => {
                        calls.last_mut().unwrap().1 += &string(&event["delta"]);
                    }
                    _ => {}
                }
            }
            assert_eq!(open, Value::Null);
            said.calls = put_together(calls);
            let last = items(&events.last().unwrap()["response"]);
            said.reason = last.reason.clone();
            assert_eq!(said, last, "the last event says it all again");
            said
        },
    },
    Api {
        route: "/v1/messages",
        request: |stream| json!({"stream": stream, "max_tokens": 50, "messages": question(), "tools": [claude_tool()]}),
        whole: |body| {
            let mut said = Said {
                reason: string(&body["stop_reason"]),
                ..Said::default()
            };
            for block in body["content"].as_array().unwrap() {
                said.order.push(string(&block["type"]));
                match block["type"].as_str().unwrap() {
                    "text" => said.content += &string(&block["text"]),
                    "thinking" => said.reasoning += &string(&block["thinking"]),
                    _ => said
                        .calls
                        .push((string(&block["name"]), block["input"].clone())),
                }
            }
            said
        },
        streamed: |stream| {
            let (mut said, mut calls) = (Said::default(), Vec::new());
            for event in data(stream) {
                let delta = &event["delta"];
                match event["type"].as_str().unwrap() {
                    "content_block_start" => {
                        said.order.push(string(&event["content_block"]["type"]));
                        if event["content_block"]["type"] == "tool_use" {
                            calls.push((string(&event["content_block"]["name"]), String::new()));
                        }
                    }
                    "content_block_delta" => {
                        said.content += &string(&delta["text"]);
                        said.reasoning += &string(&delta["thinking"]);
                        if delta["type"] == "input_json_delta" {
                            calls.last_mut().unwrap().1 += &string(&delta["partial_json"]);
                        }
                    }
                    "message_delta" => said.reason = string(&delta["stop_reason"]),
                    _ => {}
                }
            }
            said.calls = put_together(calls);
            said
        },
    },
    Api {
        route: "/api/chat",
        request: |stream| json!({"model": MODEL, "stream": stream, "messages": question(), "tools": [tool()]}),
        whole: |body| lines(std::slice::from_ref(body)),
        streamed: |stream| {
            let read = stream
                .lines()
                .map(|line| serde_json::from_str(line).unwrap());
            lines(&read.collect::<Vec<Value>>())
        },
    },
];

fn flat_tool() -> Value {
    json!({"type": "function", "name": "f", "parameters": {"type": "object"}})
}

fn claude_tool() -> Value {
    json!({"name": "f", "input_schema": {"type": "object"}})
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Arguments that a limit cut off are none, as clients that get them whole see it.
fn parsed(arguments: &str) -> Value {
    serde_json::from_str(arguments).unwrap_or_else(|_| json!({}))
}

/// Names of calls, and their arguments, all pieces of which have come.
fn put_together(calls: Vec<(String, String)>) -> Vec<(String, Value)> {
    let calls = calls.into_iter();
    calls
        .map(|(name, arguments)| (name, parsed(&arguments)))
        .collect()
}

fn of_function(function: &Value) -> (String, Value) {
    (
        string(&function["name"]),
        parsed(function["arguments"].as_str().unwrap()),
    )
}

pub fn data(stream: &str) -> Vec<Value> {
    let data = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let json = data.filter(|data| *data != "[DONE]");
    json.map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

fn items(response: &Value) -> Said {
    let mut said = Said {
        reason: string(&response["status"]),
        ..Said::default()
    };
    let output = response["output"].as_array().unwrap();
    for item in output {
        said.order.push(string(&item["type"]));
        match item["type"].as_str().unwrap() {
            "message" => said.content += &string(&item["content"][0]["text"]),
            "reasoning" => said.reasoning += &string(&item["content"][0]["text"]),
            _ => said.calls.push(of_function(item)),
        }
    }
    assert_eq!(output.last().unwrap()["status"], response["status"]);
    said
}

fn lines(lines: &[Value]) -> Said {
    let mut said = Said::default();
    for line in lines {
        let message = &line["message"];
        said.content += &string(&message["content"]);
        said.reasoning += &string(&message["thinking"]);
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            said.calls
                .push((string(&function["name"]), function["arguments"].clone()));
        }
        said.reason += &string(&line["done_reason"]);
    }
    assert_eq!(lines.last().unwrap()["done"], true);
    said
}

/// The body of the answer to a request, which the ring gives in these pieces.
pub async fn answered(
    server: &mut Server,
    route: &str,
    body: &Value,
    pieces: &[String],
    reason: FinishReason,
) -> String {
    let (request, address) = (post(route, body), server.address);
    let asking = async {
        let reply = request.send(address).await;
        assert_eq!(reply.status, 200, "{route}");
        reply.text().await
    };
    let answering = async {
        let accepted = server.accept().await;
        for piece in pieces {
            accepted.token(0, piece).await;
        }
        accepted.finish(0, reason, "").await;
        accepted.usage(10, pieces.len()).await;
    };
    tokio::join!(asking, answering).0
}

pub async fn said(
    server: &mut Server,
    api: &Api,
    stream: bool,
    pieces: &[String],
    reason: FinishReason,
) -> Said {
    let body = answered(server, api.route, &(api.request)(stream), pieces, reason).await;
    match stream {
        true => (api.streamed)(&body),
        false => (api.whole)(&serde_json::from_str(&body).unwrap()),
    }
}
