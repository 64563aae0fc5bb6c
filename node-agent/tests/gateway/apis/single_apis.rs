//! What only Anthropic's API has, or only OpenAI's of responses.

use serde_json::json;

use super::{TEMPLATE, accepted, may_begin, question};
use crate::client::{get, post};
use crate::server::{CONTEXT, Server, options, text};

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
