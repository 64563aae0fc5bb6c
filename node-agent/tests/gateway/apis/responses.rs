//! What only OpenAI's API of responses has: namespaces of functions.

use prima_node_agent::generation::FinishReason;
use serde_json::{Value, json};

use super::readers::{answered, data};
use super::{TEMPLATE, accepted};
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
