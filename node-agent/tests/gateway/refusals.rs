//! Every request that is refused: status, body and headers.

use std::time::Duration;

use prima_node_agent::generation::{GenerationError, Readiness, SubmitError};
use serde_json::{Value, json};

use crate::client::{Reply, get, post, post_bytes, request};
use crate::server::{MODEL, Server, VOCABULARY, options, ring, text};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "hello"}]})
}

/// Checks the body's form, and returns (type, param, code).
async fn error_of(reply: Reply) -> (String, Value, Value) {
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert!(reply.header("x-request-id").is_some());
    let body = reply.json().await;
    let error = &body["error"];
    assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
    assert_eq!(error.as_object().unwrap().len(), 4, "{body}");
    assert!(!error["message"].as_str().unwrap().is_empty(), "{body}");
    let kind = error["type"].as_str().unwrap().to_string();
    (kind, error["param"].clone(), error["code"].clone())
}

#[tokio::test]
async fn unknown_routes_methods_and_models() {
    let server = Server::start().await;
    let reply = get("/v2/models").send(server.address).await;
    assert_eq!(reply.status, 404);
    assert_eq!(error_of(reply).await.2, "no_such_route");

    let reply = get(CHAT).send(server.address).await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    assert_eq!(error_of(reply).await.2, "method_not_allowed");
    let reply = request("DELETE", "/health").send(server.address).await;
    assert_eq!(
        (reply.status, reply.header("allow")),
        (405, Some("GET,HEAD"))
    );
    assert_eq!(error_of(reply).await.2, "method_not_allowed");

    for route in [CHAT, COMPLETIONS] {
        let body = json!({"model": "gpt-4o", "messages": [], "prompt": ""});
        let reply = post(route, &body).send(server.address).await;
        assert_eq!(reply.status, 404);
        let expected = (
            "invalid_request_error".into(),
            json!("model"),
            json!("model_not_found"),
        );
        assert_eq!(error_of(reply).await, expected);
    }
    let reply = get("/v1/models/gpt-4o").send(server.address).await;
    assert_eq!(reply.status, 404);
    assert_eq!(error_of(reply).await.2, "model_not_found");
}

#[tokio::test]
async fn bodies_that_are_no_json_objects() {
    let mut server = Server::start().await;
    let json_type = |body: &[u8]| post_bytes(CHAT, body).header("content-type", "application/json");
    for (body, said) in [
        (&b"{\"messages\": [}"[..], "line 1 column 15"),
        (b"[]", "it is an array"),
        (b"", "EOF"),
        (b"{\"a\": \"\xff\"}", "unicode"),
    ] {
        let reply = json_type(body).send(server.address).await;
        assert_eq!(reply.status, 400);
        let body = reply.json().await;
        assert_eq!(body["error"]["code"], "invalid_json");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains(said), "{message}");
    }
    let deep = format!("{{\"a\": {}", "[".repeat(100_000));
    assert_eq!(
        json_type(deep.as_bytes()).send(server.address).await.status,
        400
    );

    let reply = json_type(&vec![b' '; (4 << 20) + 1])
        .send(server.address)
        .await;
    assert_eq!(reply.status, 413);
    assert_eq!(error_of(reply).await.2, "body_too_large");
    assert!(server.nothing_submitted());
}

#[tokio::test]
async fn wrong_fields_are_named() {
    let mut server = Server::start().await;
    let part = |part: Value| json!({"messages": [{"role": "user", "content": [part]}]});
    let turn = |turn: Value| json!({"messages": [{"role": "user", "content": "a"}, turn]});
    let chat = [
        ("messages", json!({})),
        ("messages", json!({"messages": []})),
        ("messages", json!({"messages": "hello"})),
        ("messages[1]", turn(json!("hello"))),
        ("messages[1].role", turn(json!({"content": "a"}))),
        (
            "messages[1].role",
            turn(json!({"role": "robot", "content": "a"})),
        ),
        ("messages[1].role", turn(json!({"role": 1, "content": "a"}))),
        ("messages[1].content", turn(json!({"role": "user"}))),
        (
            "messages[1].content",
            turn(json!({"role": "user", "content": 1})),
        ),
        (
            "messages[1].name",
            turn(json!({"role": "user", "content": "a", "name": 1})),
        ),
        ("messages[0].content[0]", part(json!("a"))),
        ("messages[0].content[0].type", part(json!({"text": "a"}))),
        (
            "messages[0].content[0].type",
            part(json!({"type": "image_url", "image_url": {}})),
        ),
        ("messages[0].content[0].text", part(json!({"type": "text"}))),
        // The template's own refusal.
        ("messages", turn(json!({"role": "tool", "content": "a"}))),
        ("temperature", merged(hello(), json!({"temperature": 3}))),
        ("top_logprobs", merged(hello(), json!({"top_logprobs": 2}))),
        (
            "top_logprobs",
            merged(hello(), json!({"logprobs": true, "top_logprobs": 21})),
        ),
        ("logprobs", merged(hello(), json!({"logprobs": 3}))),
        ("model", merged(hello(), json!({"model": 3}))),
        (
            "logit_bias",
            merged(hello(), json!({"logit_bias": {VOCABULARY.to_string(): 1}})),
        ),
    ];
    let completions = [
        ("prompt", json!({})),
        ("prompt", json!({"prompt": {}})),
        ("prompt", json!({"prompt": [VOCABULARY]})),
        ("prompt", json!({"prompt": [[]]})),
        ("logprobs", json!({"prompt": "a", "logprobs": true})),
        ("best_of", json!({"prompt": "a", "best_of": 0})),
    ];
    let bodies = chat.into_iter().map(|case| (CHAT, case));
    for (route, (param, body)) in bodies.chain(completions.map(|case| (COMPLETIONS, case))) {
        let reply = post(route, &body).send(server.address).await;
        assert_eq!(reply.status, 400, "{body}");
        let (kind, named, _) = error_of(reply).await;
        assert_eq!(
            (kind.as_str(), named),
            ("invalid_request_error", json!(param)),
            "{body}"
        );
    }
    assert!(server.nothing_submitted());
}

#[tokio::test]
async fn what_is_not_supported_is_named() {
    let mut server = Server::start().await;
    let functions = json!({"functions": [{"name": "f"}]});
    for (route, param, body) in [
        (CHAT, "functions", merged(hello(), functions)),
        (
            COMPLETIONS,
            "echo",
            json!({"prompt": "a", "echo": true, "logprobs": 1}),
        ),
        (COMPLETIONS, "best_of", json!({"prompt": "a", "best_of": 2})),
    ] {
        let reply = post(route, &body).send(server.address).await;
        assert_eq!(reply.status, 400);
        let expected = (
            "invalid_request_error".into(),
            json!(param),
            json!("unsupported_parameter"),
        );
        assert_eq!(error_of(reply).await, expected);
    }
    assert!(server.nothing_submitted());
}

#[tokio::test]
async fn a_model_without_a_chat_template_takes_completions_only() {
    let mut server = Server::start_with(options(), Some(text(None))).await;
    let reply = post(CHAT, &hello()).send(server.address).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text().await.contains("no chat template"));
    let completion = post(COMPLETIONS, &json!({"prompt": "a"}));
    let sent = tokio::spawn(completion.send(server.address));
    assert_eq!(server.accept().await.prompt(), "a");
    sent.abort();
}

#[tokio::test]
async fn a_loading_ring_answers_503_and_lists_its_model() {
    let server = Server::start_with(options(), None).await;
    let loading = |awaited: &str| {
        let message = format!("Loading model: {awaited}");
        json!({"error": {
            "message": message, "type": "unavailable_error", "param": null, "code": 503
        }})
    };
    // First without the model file, then with it but before a token went round, then ready.
    for step in 0..3 {
        let expected = if step < 2 { 503 } else { 200 };
        match step {
            0 => {}
            1 => {
                server
                    .status
                    .send_replace(ring(Readiness::Loading("laptop".into())));
                server.text.send_replace(Some(text(None).into()));
            }
            _ => {
                server.status.send_replace(ring(Readiness::Ready));
            }
        }
        for probe in ["/health", "/readyz"] {
            let reply = get(probe).send(server.address).await;
            assert_eq!(reply.status, expected);
        }
        if expected == 503 {
            for route in [CHAT, COMPLETIONS] {
                let reply = post(route, &hello()).send(server.address).await;
                assert_eq!(
                    (reply.status, reply.header("retry-after")),
                    (503, Some("2"))
                );
                assert_eq!(
                    reply.json().await,
                    loading(["its vocabulary", "laptop"][step])
                );
            }
        }
        assert_eq!(get("/livez").send(server.address).await.status, 200);
        let models = get("/v1/models").send(server.address).await.json().await;
        assert_eq!(models["data"][0]["id"], MODEL);
    }
    server
        .status
        .send_replace(ring(Readiness::Failed("laptop is gone".into())));
    let reply = get("/health").send(server.address).await;
    assert_eq!(reply.status, 503);
    assert!(reply.text().await.contains("laptop is gone"));
}

#[tokio::test]
async fn the_rings_refusals() {
    let mut server = Server::start().await;
    let full = |millis| SubmitError::Full {
        running: 4,
        waiting: 8,
        retry_after: Duration::from_millis(millis),
    };
    let too_long = SubmitError::ContextExceeded { context: 2048 };
    let not_ready = SubmitError::NotReady {
        reason: "shutting down".into(),
    };
    let invalid = SubmitError::Invalid {
        field: "n",
        problem: "the KV cache holds 2".into(),
    };
    for (error, status, retry_after, code) in [
        (full(0), 429, Some("1"), json!("rate_limit_exceeded")),
        (full(2500), 429, Some("3"), json!("rate_limit_exceeded")),
        (too_long, 400, None, json!("context_length_exceeded")),
        (not_ready, 503, Some("2"), json!(503)),
        (invalid, 400, None, json!("invalid_value")),
    ] {
        for stream in [false, true] {
            let body = merged(hello(), json!({"stream": stream}));
            let (reply, ()) = tokio::join!(
                post(CHAT, &body).send(server.address),
                server.refuse(error.clone())
            );
            assert_eq!(
                (reply.status, reply.header("retry-after")),
                (status, retry_after)
            );
            assert_eq!(error_of(reply).await.2, code);
        }
    }
}

#[tokio::test]
async fn a_generation_that_fails_is_an_error_with_its_cause() {
    let mut server = Server::start().await;
    let lost = GenerationError::MemberLost {
        member: "laptop".into(),
        cause: "connection reset".into(),
    };
    let refused = GenerationError::Refused {
        reason: "stale plan".into(),
    };
    let logits = GenerationError::Logits {
        reason: "NaN".into(),
    };
    for (error, status, code) in [
        (lost, 502, "member_lost"),
        (
            GenerationError::Deadline { seconds: 30 },
            504,
            "deadline_exceeded",
        ),
        (refused, 500, "ring_refused"),
        (logits, 500, "bad_logits"),
        (GenerationError::ShuttingDown, 503, "shutting_down"),
    ] {
        let said = error.to_string();
        let (reply, ()) = tokio::join!(post(CHAT, &hello()).send(server.address), async {
            let accepted = server.accept().await;
            accepted.token(0, "half an ans").await;
            accepted.fail(error).await;
        });
        assert_eq!(reply.status, status);
        let body = reply.json().await;
        assert_eq!(body["error"]["message"], said);
        assert_eq!(
            (&body["error"]["type"], &body["error"]["code"]),
            (&json!("server_error"), &json!(code))
        );
    }
    // A ring that forgets a request without a word.
    let (reply, ()) = tokio::join!(post(CHAT, &hello()).send(server.address), async {
        drop(server.accept().await);
    });
    assert_eq!(reply.status, 500);
}

fn merged(mut body: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}
