//! What holds for every API: whatever an answer holds and however it is cut, streamed and put together it is what the whole answer says.

use prima_node_agent::generation::{FinishReason, GenerationError};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use serde_json::json;

use super::readers::{APIS, Said, said};
use super::{TEMPLATE, accepted, question};
use crate::client::{get, post};
use crate::server::{MODEL, Server, options, text};

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

/// Agents would carry out half of one.
#[tokio::test]
async fn a_stop_string_within_a_call_leaves_no_call() {
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}{# tools <tool_call><function= #}";
    let mut server = Server::start_with(options(), Some(text(Some(template)))).await;
    let begun = "<tool_call>\n<function=f>\n<parameter=a>\nb";
    let whole = format!("{begun}\n</parameter>\n</function>\n</tool_call>");
    let call = ("f".to_owned(), json!({"a": "b"}));
    // OpenAI's responses have no stop strings.
    for (place, stopped, called) in [
        (0, "stop", "tool_calls"),
        (2, "stop_sequence", "tool_use"),
        (3, "stop", "stop"),
    ] {
        let api = &APIS[place];
        for (text, calls, reason) in [
            (begun.to_owned(), vec![], stopped),
            (whole.clone(), vec![call.clone()], called),
            (format!("{whole}{begun}"), vec![call.clone()], stopped),
        ] {
            let stop = FinishReason::StopString(0);
            let pieces = [text];
            let answer = said(&mut server, api, false, &pieces, stop).await;
            let found = (answer.calls, answer.reason.as_str());
            assert_eq!(found, (calls, reason), "{} {pieces:?}", api.route);
            let streamed = said(&mut server, api, true, &pieces, stop).await;
            assert_eq!(streamed.reason, reason, "{} {pieces:?}", api.route);
        }
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
