//! The four APIs for conversations: whatever an answer holds and however it is cut, streamed and put together it is what the whole answer
//! says.

use prima_node_agent::generation::{FinishReason, GenerationError};
use prima_text::{Sampler, SamplingParams};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use crate::client::{get, post};
use crate::server::{Accepted, CONTEXT, MODEL, Server, options, text};

/// Of a model that reasons, and calls tools as Hermes does.
pub const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: \
    {% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}\
    {% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}|\
    {% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{# </think> #}assistant: ";

/// What an answer says: content, reasoning, calls, and why it ended.
#[derive(Debug, Default, PartialEq)]
struct Said {
    content: String,
    reasoning: String,
    calls: Vec<(String, Value)>,
    reason: String,
    /// What came after what, in the words of APIs that tell it.
    order: Vec<String>,
}

/// One API: its route, how a request looks, how its answers are read.
struct Api {
    route: &'static str,
    request: fn(stream: bool) -> Value,
    whole: fn(&Value) -> Said,
    streamed: fn(&str) -> Said,
}

const APIS: [Api; 4] = [
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
            said.calls = calls
                .iter()
                .map(|(name, arguments)| (name.clone(), parsed(arguments)))
                .collect();
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
            let (mut said, mut arguments) = (Said::default(), Vec::new());
            for event in &events {
                match event["type"].as_str().unwrap() {
                    "response.output_text.delta" => said.content += &string(&event["delta"]),
                    "response.reasoning_text.delta" => said.reasoning += &string(&event["delta"]),
                    "response.output_item.added" => {
                        said.order.push(string(&event["item"]["type"]));
                        if event["item"]["type"] == "function_call" {
                            arguments.push((string(&event["item"]["name"]), String::new()));
                        }
                    }
                    "response.function_call_arguments.delta" => {
                        arguments.last_mut().unwrap().1 += &string(&event["delta"]);
                    }
                    _ => {}
                }
            }
            said.calls = arguments
                .iter()
                .map(|(name, arguments)| (name.clone(), parsed(arguments)))
                .collect();
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
            said.calls = calls
                .iter()
                .map(|(name, arguments)| (name.clone(), parsed(arguments)))
                .collect();
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

fn question() -> Value {
    json!([{"role": "user", "content": "a"}])
}

fn tool() -> Value {
    json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})
}

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

fn of_function(function: &Value) -> (String, Value) {
    (
        string(&function["name"]),
        parsed(function["arguments"].as_str().unwrap()),
    )
}

fn data(stream: &str) -> Vec<Value> {
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

/// Texts with all that an answer may hold, whole and broken.
fn answer() -> impl Strategy<Value = Vec<String>> {
    let piece = proptest::sample::select(vec![
        "<think>",
        "hm",
        "</think>",
        "Hello",
        "\n",
        " <",
        "é",
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"f\", \"arguments\": {\"a\": \"}\"}}",
        "{\"name\": \"f\", \"arg",
        "uments\": {}}",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"b\": [1]}}</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>{\"arguments\": {\"c\": null}, \"name\": \"f\"}</tool_call>",
    ]);
    let whole = proptest::collection::vec(piece, 0..9).prop_map(|pieces| pieces.concat());
    (whole, proptest::collection::vec(1..6usize, 40)).prop_map(|(text, sizes)| {
        let mut characters = text.chars().peekable();
        let mut cut = Vec::new();
        for size in sizes.iter().cycle() {
            if characters.peek().is_none() {
                break;
            }
            cut.push(characters.by_ref().take(*size).collect());
        }
        cut
    })
}

/// The body of the answer to a request, which the ring gives in these pieces.
async fn answered(
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

async fn said(
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

/// Has an empty answer come to a request, and returns what the ring got.
pub async fn accepted(server: &mut Server, route: &str, body: &Value) -> Accepted {
    let (request, address) = (post(route, body), server.address);
    let answering = async {
        let accepted = server.accept().await;
        accepted.finish(0, FinishReason::Stop, "").await;
        accepted.usage(1, 0).await;
        accepted
    };
    let (reply, accepted) = tokio::join!(request.send(address), answering);
    assert_eq!(reply.status, 200, "{route} {body}");
    accepted
}

/// Whether the answer may begin like this, by what it is held to.
fn may_begin(accepted: &Accepted, answer: &str) -> bool {
    let mut sampler = Sampler::new(SamplingParams::default()).unwrap();
    sampler.constrain(accepted.request.constraint.clone());
    let tokens = text(None).tokenizer.encode(answer, false, false).unwrap();
    let mut tokens = tokens.into_iter();
    tokens.all(|token| sampler.accept(token).is_ok())
}

#[tokio::test]
async fn streams_add_up_to_the_whole_answer_in_every_api() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let mut runner = TestRunner::deterministic();
    let (mut called, mut reasoned) = (0, 0);
    for round in 0..60 {
        let pieces = answer().new_tree(&mut runner).unwrap().current();
        let reason = match round % 4 {
            0 => FinishReason::Length,
            _ => FinishReason::Stop,
        };
        let mut all = Vec::new();
        for api in &APIS {
            let whole = said(&mut server, api, false, &pieces, reason).await;
            let streamed = said(&mut server, api, true, &pieces, reason).await;
            assert_eq!(streamed, whole, "{} of {:?}", api.route, pieces.concat());
            all.push(whole);
        }
        let first = &all[0];
        for other in &all[1..] {
            assert_eq!(
                (&other.content, &other.reasoning, &other.calls),
                (&first.content, &first.reasoning, &first.calls),
                "of {:?}",
                pieces.concat()
            );
        }
        called += first.calls.len();
        reasoned += usize::from(!first.reasoning.is_empty());
    }
    assert!(called > 20 && reasoned > 3, "{called} {reasoned}");
}

#[tokio::test]
async fn a_call_ends_the_answer_in_the_words_of_each_api() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let pieces = [
        "<think>hm</think>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>",
    ]
    .map(String::from);
    for (api, (reason, order)) in APIS.iter().zip([
        ("tool_calls", vec![]),
        ("completed", vec!["reasoning", "function_call"]),
        ("tool_use", vec!["thinking", "tool_use"]),
        ("stop", vec![]),
    ]) {
        let expected = Said {
            content: String::new(),
            reasoning: "hm".into(),
            calls: vec![("f".into(), json!({"a": 1}))],
            reason: reason.into(),
            order: order.into_iter().map(String::from).collect(),
        };
        for stream in [false, true] {
            let found = said(&mut server, api, stream, &pieces, FinishReason::Stop).await;
            assert_eq!(found, expected, "{}", api.route);
        }
    }
}

#[tokio::test]
async fn tokens_of_thoughts_are_counted() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (route, body, place) in [
        (
            "/v1/chat/completions",
            json!({"messages": question()}),
            "/usage/completion_tokens_details/reasoning_tokens",
        ),
        (
            "/v1/responses",
            json!({"input": "a"}),
            "/usage/output_tokens_details/reasoning_tokens",
        ),
    ] {
        let request = post(route, &body).send(server.address);
        let answering = async {
            let accepted = server.accept().await;
            for piece in ["<think>", "h", "m", "</think>", "Yes", "."] {
                accepted.token(0, piece).await;
            }
            accepted.finish(0, FinishReason::Stop, "").await;
            accepted.usage(10, 6).await;
        };
        let (reply, ()) = tokio::join!(request, answering);
        assert_eq!(reply.json().await.pointer(place), Some(&json!(2)));
    }
}

#[tokio::test]
async fn what_was_said_becomes_the_same_prompt_in_every_api() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let call =
        json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    let bodies = [
        (
            "/v1/chat/completions",
            json!({"messages": [
                {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                {"role": "assistant", "content": "x", "reasoning_content": "h\nm", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "r"},
            ]}),
        ),
        (
            "/v1/responses",
            json!({"instructions": "s", "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "u"}]}, {"type": "reasoning", "summary": []},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "m"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{\"a\":1}"},
                {"type": "function_call_output", "call_id": "1", "output": "r"},
            ]}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "system": [{"type": "text", "text": "s"}], "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "h\nm", "signature": ""}, {"type": "text", "text": "x"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]}]},
            ]}),
        ),
        (
            "/api/chat",
            json!({"model": MODEL, "stream": false, "messages": [
                {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                {"role": "assistant", "content": "x", "thinking": "h\nm", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
                {"role": "tool", "tool_name": "f", "content": "r"},
            ]}),
        ),
    ];
    for (route, body) in bodies {
        let prompt = accepted(&mut server, route, &body).await.prompt();
        let expected = "system: s|user: u|assistant: (h\nm)x<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>|tool: r|assistant: ";
        assert_eq!(prompt, expected, "{route}");
    }
}

#[tokio::test]
async fn a_bound_on_thoughts_comes_from_every_api() {
    let template = "{{ enable_thinking }}{# </think> #}|{{ reasoning_effort }}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let chat = |field: &str, value: Value| json!({"messages": question(), field: value});
    let response = |field: &str, value: Value| json!({"input": "u", field: value});
    let message = |thinking: Value| json!({"max_tokens": 9, "messages": [{"role": "user", "content": "u"}], "thinking": thinking});
    let ollama = |think: Value| json!({"model": MODEL, "stream": false, "think": think, "messages": question()});
    let (chats, messages, chatted) = ("/v1/chat/completions", "/v1/messages", "/api/chat");
    let responses = "/v1/responses";
    // Whether the sampler holds a bound, and what the template is told.
    for (route, body, bound, told) in [
        (chats, json!({"messages": question()}), false, "|"),
        (chats, chat("thinking_budget_tokens", json!(7)), true, "|"),
        (chats, chat("thinking_token_budget", json!(7)), true, "|"),
        (
            chats,
            chat("thinking_budget_tokens", json!(0)),
            true,
            "False|",
        ),
        (chats, chat("thinking_budget_tokens", json!(-1)), false, "|"),
        (
            messages,
            message(json!({"type": "enabled", "budget_tokens": 7})),
            true,
            "True|",
        ),
        (
            messages,
            message(json!({"type": "disabled"})),
            true,
            "False|",
        ),
        (chatted, ollama(json!(false)), true, "False|"),
        (chatted, ollama(json!(true)), false, "True|"),
        (
            responses,
            response("thinking_budget_tokens", json!(7)),
            true,
            "|",
        ),
        // What is said to the template.
        (
            chats,
            chat("reasoning_effort", json!("low")),
            false,
            "True|low",
        ),
        (
            chats,
            chat("reasoning_effort", json!("none")),
            true,
            "False|none",
        ),
        (
            chats,
            chat("chat_template_kwargs", json!({"enable_thinking": false})),
            false,
            "False|",
        ),
        (
            responses,
            response("reasoning", json!({"effort": "high"})),
            false,
            "True|high",
        ),
        (chatted, ollama(json!("low")), false, "True|low"),
    ] {
        let accepted = accepted(&mut server, route, &body).await;
        let found = (accepted.request.reasoning.is_some(), accepted.prompt());
        assert_eq!(found, (bound, told.to_owned()), "{body}");
    }
    let wrong = post(chats, &chat("thinking_budget_tokens", json!(-2)));
    let reply = wrong.send(server.address).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text().await.contains("thinking_budget_tokens"));
}

/// The prompt opens a thought. What must match an expression is the answer all the same.
#[tokio::test]
async fn an_answer_by_an_expression_is_content_where_models_think() {
    let template = "{{ messages[0].content }}<think>{# </think> #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let chat = &APIS[0];
    for (form, content, reasoning) in [
        (json!({}), "", "ab"),
        (json!({"regex": "ab"}), "ab", ""),
        (json!({"grammar": "root ::= \"ab\""}), "ab", ""),
    ] {
        let mut body = json!({"messages": question()});
        for (field, value) in form.as_object().unwrap() {
            body[field] = value.clone();
        }
        let pieces = ["ab".to_owned()];
        let reply = answered(&mut server, chat.route, &body, &pieces, FinishReason::Stop).await;
        let said = (chat.whole)(&serde_json::from_str(&reply).unwrap());
        assert_eq!(
            (said.content.as_str(), said.reasoning.as_str()),
            (content, reasoning),
            "{body}"
        );
    }
}

#[tokio::test]
async fn thoughts_before_a_call_go_back_into_harmony() {
    let template = "{% for message in messages %}{{ message.thinking }}/{{ message.content }}|{% endfor %}\
        {# <|channel|>analysis<|message|> tools #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let body = json!({"messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "y", "reasoning_content": "so"},
    ]});
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    assert_eq!(accepted.prompt(), "/u|hm\n\nx/|/r|/y|");
}

#[tokio::test]
async fn thoughts_go_back_as_blocks_where_templates_have_them_so() {
    let template = "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}\
        {% for block in message.content %}{{ block.thinking }}[{{ block.text }}]{% endfor %}{% endif %}|{% endfor %}{# tools [TOOL_CALLS] #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let body = json!({"messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "user", "content": "v"},
    ]});
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    assert_eq!(accepted.prompt(), "u|hm[][x]|v|");
}

#[tokio::test]
async fn tools_are_told_in_words_where_no_form_is_known() {
    let messages =
        "{% for message in messages %}{{ message.role }}: {{ message.content }}|{% endfor %}";
    // The second is of DeepSeek's distilled models: it shows calls, and tells of no tools.
    for told in [
        "{{ tools | tojson }}",
        "{# <\u{FF5C}tool\u{2581}sep\u{FF5C}> #}",
    ] {
        let template = format!("{told}{messages}");
        let mut server = Server::start_with(options(), Some(text(Some(&template)))).await;
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let body = json!({"messages": question(), "tools": [tool], "tool_choice": "required"});
        let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
        let prompt = accepted.prompt();
        assert!(
            prompt.contains("system: You may call one or more functions"),
            "{prompt}"
        );
        assert!(prompt.contains("<tool_call>"), "{prompt}");
        // It is held to what it is told.
        let call = "<tool_call>\n{\"name\": \"f\"";
        assert!(may_begin(&accepted, call), "{told}");
    }
}

/// Tools that run at OpenAI's or Anthropic's.
#[tokio::test]
async fn tools_of_other_kinds_are_left_out() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (route, body) in [
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": question(), "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ),
        (
            "/v1/responses",
            json!({"input": "u", "tools": [{"type": "web_search"}]}),
        ),
    ] {
        let prompt = accepted(&mut server, route, &body).await.prompt();
        assert!(!prompt.contains("web_search"), "{route}: {prompt}");
    }
}

#[tokio::test]
async fn the_version_may_be_left_out_everywhere() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (route, body) in [
        ("/chat/completions", json!({"messages": question()})),
        ("/completions", json!({"prompt": "u"})),
        ("/responses", json!({"input": "u"})),
        (
            "/messages",
            json!({"max_tokens": 9, "messages": question()}),
        ),
    ] {
        accepted(&mut server, route, &body).await;
    }
    assert_eq!(get("/models").send(server.address).await.status, 200);
    let count = json!({"messages": question()});
    let counted = post("/messages/count_tokens", &count)
        .send(server.address)
        .await;
    assert_eq!(counted.status, 200);
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_told_in_every_api() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (route, body, between, told) in [
        (
            "/v1/responses",
            json!({"input": "u", "stream": true}),
            "\n\n",
            "event: response.failed",
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": question(), "stream": true}),
            "\n\n",
            "event: error",
        ),
        (
            "/api/chat",
            json!({"model": MODEL, "messages": question()}),
            "\n",
            "{\"error\":",
        ),
    ] {
        let lost = GenerationError::MemberLost {
            member: "laptop".into(),
            cause: "connection reset".into(),
        };
        let address = server.address;
        let asking = async { post(route, &body).send(address).await.text().await };
        let answering = async {
            let accepted = server.accept().await;
            accepted.token(0, "Hel").await;
            accepted.fail(lost).await;
        };
        let (said, ()) = tokio::join!(asking, answering);
        let last = said.trim_end().rsplit(between).next().unwrap();
        let holds = |text| last.contains(text);
        assert!(
            holds(told) && holds("ring member laptop was lost"),
            "{route}: {said}"
        );
    }
}

#[tokio::test]
async fn one_tool_that_cannot_be_held_frees_no_other() {
    let tool = |name: &str, strict: bool, parameters: &Value| json!({"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}});
    let days = json!({"type": "object", "properties": {"days": {"type": "integer"}}});
    // What no form of calls can be held to, and what JSON cannot.
    let least = json!({"type": "object", "minProperties": 1});
    let expression =
        json!({"type": "object", "properties": {"days": {"type": "string", "format": "regex"}}});
    type CallText = fn(&str, &str) -> String;
    let by_name: CallText = |name, value| {
        format!("<tool_call>\n<function={name}>\n<parameter=days>\n{value}\n</parameter>\n")
    };
    let as_json: CallText = |name, value| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"days\": {value}")
    };
    let forms = [
        ("<tool_call><function=", by_name, &least, "`minProperties`"),
        ("<tool_call>", as_json, &expression, "`format`"),
    ];
    for (marks, call, other, named) in forms {
        let template = format!("{{{{ tools | tojson }}}}{{# {marks} #}}");
        let mut server = Server::start_with(options(), Some(text(Some(&template)))).await;
        let tools = |strict| json!([tool("f", false, &days), tool("g", strict, other)]);
        let body = json!({"messages": question(), "tools": tools(false)});
        let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
        let allowed = |call: &str| may_begin(&accepted, call);
        assert!(allowed(&call("f", "3")), "{marks}");
        assert!(!allowed(&call("f", "\"three")), "{marks}");
        assert!(allowed(&call("g", "\"three")), "{marks}");
        let body = json!({"messages": question(), "tools": tools(true)});
        let reply = post("/v1/chat/completions", &body)
            .send(server.address)
            .await;
        assert_eq!(reply.status, 400);
        let error = reply.json().await["error"].take();
        assert!(
            error["message"].as_str().unwrap().contains(named),
            "{error}"
        );
    }
}

/// Its arguments are held to the tool's schema; what the text would have to be does not matter.
#[tokio::test]
async fn a_call_that_must_come_needs_no_form_of_the_text() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let form = json!({"type": "json_schema", "json_schema": {"schema": {"type": "array"}}});
    let mut body = json!({"messages": question(), "tools": [tool()], "response_format": form});
    body["tool_choice"] = "required".into();
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {";
    assert!(may_begin(&accepted, call));
}

#[tokio::test]
async fn a_strict_schema_that_cannot_be_kept_to_is_named() {
    let server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "string", "format": "regex"}}});
    let tool = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": schema}});
    let body = json!({"messages": question(), "tools": [tool]});
    let reply = post("/v1/chat/completions", &body)
        .send(server.address)
        .await;
    assert_eq!(reply.status, 400);
    let message = "tools: answers cannot be held to the `format` regex";
    assert_eq!(reply.json().await["error"]["message"], message);
}

/// Anthropic's structured answers, by the name of today and the one before.
#[tokio::test]
async fn an_output_format_holds_a_message() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let format = json!({"type": "json_schema", "schema": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"], "additionalProperties": false}});
    for (field, value) in [
        ("output_config", json!({"format": format, "effort": "low"})),
        ("output_format", format.clone()),
    ] {
        let mut body = json!({"max_tokens": 9, "messages": question()});
        body[field] = value;
        let accepted = accepted(&mut server, "/v1/messages", &body).await;
        let allowed = |answer: &str| may_begin(&accepted, answer);
        assert!(
            allowed("{\"days\": 3}") && !allowed("{\"days\": \"3"),
            "{field}"
        );
        assert!(!allowed("Three"), "{field}");
    }
    // An effort alone asks for no form.
    let body = json!({"max_tokens": 9, "messages": question(), "output_config": {"effort": "low"}});
    let free = accepted(&mut server, "/v1/messages", &body).await;
    assert!(free.request.constraint.is_none());
}

#[tokio::test]
async fn a_response_that_is_not_kept_is_not_found() {
    let server = Server::start().await;
    let reply = get("/v1/responses/resp_none").send(server.address).await;
    assert_eq!(reply.status, 404);
    assert_eq!(reply.json().await["error"]["code"], "response_not_found");
    let body = json!({"input": "a", "previous_response_id": "resp_none"});
    let reply = post("/v1/responses", &body).send(server.address).await;
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json().await["error"]["param"], "previous_response_id");
}

#[tokio::test]
async fn calls_that_came_together_go_back_one_by_one() {
    let template = "{% for message in messages %}{{ message.thinking }}\
        {% for call in message.tool_calls %}{{ call.id }}{% endfor %}{{ message.content }}|{% endfor %}\
        {# <|channel|>analysis<|message|> tools #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let result =
        |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let body = json!({"messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call("1"), call("2"), call("3")]},
        result("2", "r2"), result("1", "r1"), result("4", "r4"),
        {"role": "user", "content": "v"},
    ]});
    let accepted = accepted(&mut server, "/v1/chat/completions", &body).await;
    assert_eq!(accepted.prompt(), "u|hm1|r1|2|r2|3|r4|v|");
}

#[tokio::test]
async fn anthropics_clients_are_told_how_long_a_prompt_is() {
    let server = Server::start().await;
    // The context, without what the template adds to it: `user: `, a new line, `assistant: ` and the token that begins texts.
    let room = CONTEXT - 19;
    let message = |letters: usize| json!({"max_tokens": 9, "messages": [{"role": "user", "content": "a".repeat(letters)}]});
    let counted = async |letters| {
        let reply = post("/v1/messages/count_tokens", &message(letters))
            .send(server.address)
            .await;
        reply.json().await["input_tokens"].clone()
    };
    assert_eq!(counted(room).await, CONTEXT);
    assert_eq!(counted(room + 1234).await, CONTEXT + 1234);
    for letters in [room + 1, room + 1234] {
        let reply = post("/v1/messages", &message(letters))
            .send(server.address)
            .await;
        assert_eq!(reply.status, 400);
        let tokens = CONTEXT + letters - room;
        let error = json!({
            "type": "invalid_request_error",
            "message": format!("prompt is too long: {tokens} tokens > {CONTEXT} maximum"),
        });
        assert_eq!(reply.json().await, json!({"type": "error", "error": error}));
    }
}

#[tokio::test]
async fn tokens_are_counted_without_reading_grammars() {
    let server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    // A schema that cannot be kept to.
    let schema = json!({"type": "object", "properties": {"a": {"not": {"type": "string"}}}});
    let body = json!({
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "u"}],
        "tools": [{"name": "f", "input_schema": schema, "strict": true}],
    });
    for (route, status) in [("/v1/messages", 400), ("/v1/messages/count_tokens", 200)] {
        let reply = post(route, &body).send(server.address).await;
        assert_eq!(reply.status, status, "{route}");
    }
}
