//! What only OpenAI's API of responses has: namespaces of functions, items that stand for what was answered before,
//! results of tools in parts, and responses that are kept.

use prima_node_agent::generation::FinishReason;
use serde_json::{Value, json};

use super::readers::{answered, data};
use super::{TEMPLATE, accepted};
use crate::client::{get, post};
use crate::server::{Server, options, text};

const ROUTE: &str = "/v1/responses";

async fn server() -> Server {
    Server::start_with(options(), Some(text(Some(TEMPLATE)))).await
}

/// The whole answer to a request, which the ring gives in one piece.
async fn response(server: &mut Server, body: &Value, answer: &str) -> Value {
    let pieces = [answer.to_owned()];
    let reply = answered(server, ROUTE, body, &pieces, FinishReason::Stop).await;
    serde_json::from_str(&reply).unwrap()
}

/// So Codex sends the tools of MCP servers.
#[tokio::test]
async fn a_function_of_a_namespace_is_told_and_called() {
    let mut server = server().await;
    let status = json!({"type": "function", "name": "status", "parameters": {"type": "object"}});
    let tools =
        json!([{"type": "namespace", "name": "mcp__x", "description": "d", "tools": [status]}]);
    let question = |stream: bool| json!({"input": "u", "tools": tools, "stream": stream});
    let told = accepted(&mut server, ROUTE, &question(false))
        .await
        .prompt();
    assert!(told.contains("\"name\": \"mcp__x__status\""), "{told}");

    let call = "<tool_call>{\"name\": \"mcp__x__status\", \"arguments\": {\"a\": 1}}</tool_call>";
    let whole = response(&mut server, &question(false), call).await;
    let pieces = [call.to_owned()];
    let stream = answered(
        &mut server,
        ROUTE,
        &question(true),
        &pieces,
        FinishReason::Stop,
    )
    .await;
    let events = data(&stream);
    let of_items = events.iter().filter(|event| event["item"].is_object());
    let mut items: Vec<&Value> = of_items.map(|event| &event["item"]).collect();
    assert_eq!(items.len(), 2, "one that begins, and is done");
    let last = events.last().unwrap();
    items.extend([&whole["output"][0], &last["response"]["output"][0]]);
    for item in items {
        assert_eq!(item["type"], "function_call");
        let name = (&item["namespace"], &item["name"]);
        assert_eq!(name, (&json!("mcp__x"), &json!("status")), "{item}");
    }

    let call_item = &whole["output"][0];
    let result =
        json!({"type": "function_call_output", "call_id": call_item["call_id"], "output": "r"});
    let sent =
        json!({"input": [{"role": "user", "content": "u"}, call_item, result], "tools": tools});
    let named = json!({"input": [result], "previous_response_id": whole["id"], "tools": tools});
    for body in [sent, named] {
        let prompt = accepted(&mut server, ROUTE, &body).await.prompt();
        let expected = format!("user: u|assistant: {call}|tool: r|");
        assert!(prompt.starts_with(&expected), "{prompt}");
    }
}

/// So Vercel's AI SDK sends what was answered before.
#[tokio::test]
async fn an_item_may_be_named_instead_of_sent() {
    let mut server = server().await;
    let question = json!({"role": "user", "content": "u"});
    let function = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    let body = json!({"input": [question], "tools": [function]});
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let answer = format!("<think>hm</think>x{call}");
    let response = response(&mut server, &body, &answer).await;
    let output = response["output"].as_array().unwrap();
    let kinds: Vec<&Value> = output.iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);

    let mut input = vec![question];
    let named = output
        .iter()
        .map(|item| json!({"type": "item_reference", "id": item["id"]}));
    input.extend(named);
    input.push(
        json!({"type": "function_call_output", "call_id": output[2]["call_id"], "output": "r"}),
    );
    let prompt = accepted(&mut server, ROUTE, &json!({"input": input}))
        .await
        .prompt();
    assert_eq!(
        prompt,
        format!("user: u|assistant: (hm)x{call}|tool: r|assistant: ")
    );
}

#[tokio::test]
async fn an_item_that_is_not_kept_is_refused_by_its_id() {
    let mut server = server().await;
    let kept = response(&mut server, &json!({"input": "u"}), "x").await;
    let gone = response(&mut server, &json!({"input": "u", "store": false}), "x").await;
    let named =
        |response: &Value| json!({"type": "item_reference", "id": response["output"][0]["id"]});
    for (input, place) in [
        (json!([named(&gone)]), 0),
        (json!([named(&kept), named(&gone)]), 1),
        (json!([named(&kept), named(&kept)]), 1),
        (json!([{"type": "item_reference"}]), 0),
    ] {
        let body = json!({"input": input});
        let reply = post(ROUTE, &body).send(server.address).await;
        assert_eq!(reply.status, 400, "{body}");
        let error = reply.json().await["error"].take();
        assert_eq!(error["param"], format!("input[{place}].id"));
        let id = input[place]["id"].as_str().unwrap_or_default();
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains(&format!("no item `{id}` is kept")),
            "{message}"
        );
    }
}

/// The conversation can go on without it.
#[tokio::test]
async fn a_thought_that_is_not_kept_is_left_out() {
    let mut server = server().await;
    let body = json!({"input": "u", "store": false});
    let gone = response(&mut server, &body, "<think>hm</think>x").await;
    let [thought, message] = gone["output"].as_array().unwrap().as_slice() else {
        panic!("{gone}")
    };
    assert_eq!(thought["type"], "reasoning");
    let named = json!({"type": "item_reference", "id": thought["id"]});
    let body = json!({"input": [
        {"role": "user", "content": "u"}, named, message, {"role": "user", "content": "v"},
    ]});
    let prompt = accepted(&mut server, ROUTE, &body).await.prompt();
    assert_eq!(prompt, "user: u|assistant: x|user: v|assistant: ");
}

#[tokio::test]
async fn the_result_of_a_tool_may_come_in_parts() {
    let mut server = server().await;
    let text = |text: &str| json!({"type": "input_text", "text": text});
    let image = json!({"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="});
    for (output, told) in [
        (json!([text("r")]), "r"),
        (
            json!([text("r"), image, text("s")]),
            "r\n[a part of type input_image, which this model cannot read]\ns",
        ),
        (json!([]), ""),
        // None of the API's parts.
        (json!([{"a": 1}]), "[{\"a\":1}]"),
    ] {
        let body = json!({"input": [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": output},
        ]});
        let prompt = accepted(&mut server, ROUTE, &body).await.prompt();
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        let expected = format!("assistant: {call}|tool: {told}|assistant: ");
        assert_eq!(prompt, expected, "{body}");
    }
}

#[tokio::test]
async fn a_kept_response_comes_back_as_it_was() {
    let mut server = server().await;
    let metadata = json!({"a": "b"});
    let body = json!({"input": "u", "metadata": metadata});
    let response = response(&mut server, &body, "x").await;
    assert_eq!(response["metadata"], metadata);
    let path = format!("{ROUTE}/{}", response["id"].as_str().unwrap());
    let reply = get(path).send(server.address).await;
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(reply.json().await, response);
}

#[tokio::test]
async fn metadata_is_a_few_short_strings() {
    let mut server = server().await;
    let strings = |number: usize| -> Value {
        let named = (0..number).map(|nth| (format!("m{nth}"), "x".into()));
        Value::Object(named.collect())
    };
    let one = |name: usize, value: usize| {
        let text = |length: usize| "\u{e9}".repeat(length);
        Value::Object([(text(name), text(value).into())].into_iter().collect())
    };
    let body = |metadata: Value| json!({"input": "u", "metadata": metadata});
    let wrong = [json!([0]), json!("m"), json!({"m": 1}), strings(17)];
    for metadata in wrong.into_iter().chain([one(65, 1), one(1, 513)]) {
        let refused = post(ROUTE, &body(metadata)).send(server.address).await;
        assert_eq!(refused.status, 400);
        assert_eq!(refused.json().await["error"]["param"], "metadata");
    }
    for metadata in [Value::Null, strings(16), one(64, 512)] {
        accepted(&mut server, ROUTE, &body(metadata)).await;
    }
}
