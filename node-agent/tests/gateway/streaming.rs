//! Answers as server-sent events.

use prima_node_agent::generation::{FinishReason, GenerationError, TokenLogprob};
use serde_json::{Value, json};

use crate::client::post;
use crate::server::{MODEL, Server, id_of, soon};

fn chat(more: Value) -> Value {
    let mut body = json!({"stream": true, "messages": [{"role": "user", "content": "a"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn a_chat_arrives_chunk_by_chunk() {
    let mut server = Server::start().await;
    let body = chat(json!({"stream_options": {"include_usage": true}}));
    // The head comes at once, before the first token is computed.
    let (mut reply, accepted) = tokio::join!(
        post("/v1/chat/completions", &body).send(server.address),
        server.accept()
    );
    assert_eq!(
        (reply.status, reply.header("content-type")),
        (200, Some("text/event-stream"))
    );
    assert_eq!(reply.header("cache-control"), Some("no-cache"));
    let choice = |delta: Value, finish: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]);
    let opening = reply.json_event().await;
    assert_eq!(opening["object"], "chat.completion.chunk");
    assert_eq!(
        (&opening["model"], &opening["usage"]),
        (&json!(MODEL), &Value::Null)
    );
    assert_eq!(
        opening["choices"],
        choice(json!({"role": "assistant", "content": ""}), Value::Null)
    );
    // Each token is on the wire before the next is made.
    for text in ["He", "llo\n\ndata: [DONE]", " \u{1f980}"] {
        accepted.token(0, "").await;
        accepted.token(0, text).await;
        let chunk = soon(reply.json_event()).await;
        assert_eq!(
            chunk["choices"],
            choice(json!({"content": text}), Value::Null)
        );
        assert_eq!(chunk["id"], opening["id"]);
    }
    accepted.finish(0, FinishReason::Stop, "!").await;
    accepted.usage(5, 6).await;
    assert_eq!(
        reply.json_event().await["choices"],
        choice(json!({"content": "!"}), Value::Null)
    );
    assert_eq!(
        reply.json_event().await["choices"],
        choice(json!({}), json!("stop"))
    );
    let last = reply.json_event().await;
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"],
        json!({
            "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        })
    );
    assert_eq!(last["timings"]["cache_n"], 1);
    assert_eq!(last["timings"]["prompt_n"], 4);
    assert_eq!(reply.event().await.as_deref(), Some("[DONE]"));
    assert_eq!(reply.event().await, None);
}

#[tokio::test]
async fn completions_stream_choices_and_usage_if_asked() {
    let mut server = Server::start().await;
    let body = json!({"prompt": "a", "n": 2, "stream": true, "logprobs": 0});
    let (mut reply, accepted) = tokio::join!(
        post("/v1/completions", &body).send(server.address),
        server.accept()
    );
    let logprob = || {
        Some(TokenLogprob {
            logprob: -1.0,
            top: vec![(id_of(b'z'), -1.0)],
        })
    };
    accepted.token_with(1, "xy", logprob()).await;
    accepted.token_with(0, "", logprob()).await;
    accepted.token_with(1, "y", logprob()).await;
    accepted.finish(1, FinishReason::Stop, "").await;
    accepted.finish(0, FinishReason::Length, "").await;
    accepted.usage(1, 3).await;
    let mut chunks = Vec::new();
    loop {
        let event = reply.event().await.unwrap();
        if event == "[DONE]" {
            break;
        }
        let chunk: Value = serde_json::from_str(&event).unwrap();
        assert_eq!(
            (&chunk["object"], chunk.get("usage")),
            (&json!("text_completion"), None)
        );
        let choice = &chunk["choices"][0];
        let offset = choice["logprobs"]["text_offset"][0].clone();
        chunks.push(json!([
            choice["index"],
            choice["text"],
            offset,
            choice["finish_reason"]
        ]));
    }
    assert_eq!(
        Value::from(chunks),
        json!([
            [1, "xy", 0, null],
            // A token without text of its own still has its logprobs.
            [0, "", 0, null],
            [1, "y", 1, null],
            [1, "", null, "stop"],
            [0, "", null, "length"],
        ])
    );
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_the_last_event() {
    let mut server = Server::start().await;
    let lost = GenerationError::MemberLost {
        member: "laptop".into(),
        cause: "connection reset".into(),
    };
    let (mut reply, accepted) = tokio::join!(
        post("/v1/chat/completions", &chat(json!({}))).send(server.address),
        server.accept()
    );
    accepted.token(0, "Hel").await;
    accepted.fail(lost).await;
    reply.json_event().await;
    assert_eq!(
        reply.json_event().await["choices"][0]["delta"]["content"],
        "Hel"
    );
    assert_eq!(
        reply.json_event().await,
        json!({"error": {
            "message": "ring member laptop was lost: connection reset",
            "type": "server_error", "param": null, "code": "member_lost",
        }})
    );
    assert_eq!(reply.event().await, None, "no [DONE] after a failure");

    // A ring that goes away without a word.
    let (mut reply, accepted) = tokio::join!(
        post("/v1/chat/completions", &chat(json!({}))).send(server.address),
        server.accept()
    );
    drop(accepted);
    reply.json_event().await;
    assert_eq!(reply.json_event().await["error"]["code"], "ring_refused");
    assert_eq!(reply.event().await, None);
}

#[tokio::test]
async fn when_one_prompt_fails_the_others_are_cancelled() {
    let mut server = Server::start().await;
    let body = json!({"prompt": ["a", "b"], "stream": true});
    let (reply, (first, second)) =
        tokio::join!(post("/v1/completions", &body).send(server.address), async {
            (server.accept().await, server.accept().await)
        });
    let mut reply = reply;
    second.fail(GenerationError::Deadline { seconds: 5 }).await;
    assert_eq!(
        reply.json_event().await["error"]["code"],
        "deadline_exceeded"
    );
    first.cancelled().await;
}

#[tokio::test]
async fn a_client_that_hangs_up_in_mid_stream_cancels() {
    let mut server = Server::start().await;
    let (mut reply, accepted) = tokio::join!(
        post("/v1/chat/completions", &chat(json!({"n": 2}))).send(server.address),
        server.accept()
    );
    accepted.token(0, "x").await;
    reply.json_event().await;
    drop(reply);
    accepted.cancelled().await;
}

#[tokio::test]
async fn shutting_down_lets_answers_end_and_takes_no_new_ones() {
    let mut server = Server::start().await;
    let (mut reply, accepted) = tokio::join!(
        post("/v1/chat/completions", &chat(json!({}))).send(server.address),
        server.accept()
    );
    reply.json_event().await;
    server.shutdown.take().unwrap().send(()).unwrap();
    accepted.token(0, "still here").await;
    assert_eq!(
        reply.json_event().await["choices"][0]["delta"]["content"],
        "still here"
    );
    accepted.finish(0, FinishReason::Stop, "").await;
    accepted.usage(1, 1).await;
    reply.json_event().await;
    assert_eq!(reply.event().await.as_deref(), Some("[DONE]"));
    assert_eq!(reply.event().await, None);
    soon(server.serving).await.unwrap().unwrap();
    assert!(
        tokio::net::TcpStream::connect(server.address)
            .await
            .is_err()
    );
}
