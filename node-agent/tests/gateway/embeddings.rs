//! Vectors of texts: OpenAI's /v1/embeddings and Ollama's /api/embed.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prima_node_agent::generation::{GenerationError, Instead, SubmitError};
use serde_json::{Value, json};

use crate::client::{Reply, post};
use crate::server::{CONTEXT, MODEL, Server, VOCABULARY, id_of, soon};

/// Asks, and answers each input with a vector that begins with its number of tokens. The inputs as they reached the ring come along.
async fn embed(server: &mut Server, route: &'static str, body: Value) -> (Reply, Vec<Vec<u32>>) {
    let address = server.address;
    let mut asking = tokio::spawn(async move { post(route, &body).send(address).await });
    let mut inputs = Vec::new();
    loop {
        tokio::select! {
            biased;
            reply = &mut asking => return (reply.unwrap(), inputs),
            accepted = server.accept() => {
                assert!(accepted.request.instead.is_some());
                accepted.embedding(&[accepted.request.prompt.len() as f32, 0.25]).await;
                inputs.push(accepted.request.prompt.to_vec());
            }
        }
    }
}

/// With the token that begins a text.
fn tokens(text: &str) -> Vec<u32> {
    [1].into_iter().chain(text.bytes().map(id_of)).collect()
}

#[tokio::test]
async fn inputs_come_in_four_shapes_and_answers_in_order() {
    let mut server = Server::start().await;
    let many: Vec<String> = (0..20).map(|length| "a".repeat(length)).collect();
    let many_tokens = many.iter().map(|text| tokens(text)).collect();
    let cases = [
        (json!("ab"), vec![tokens("ab")]),
        (json!(["ab", "c"]), vec![tokens("ab"), tokens("c")]),
        (json!([5, 6, 7]), vec![vec![5, 6, 7]]),
        (json!([[5, 6, 7], [8]]), vec![vec![5, 6, 7], vec![8]]),
        (json!(many), many_tokens),
    ];
    for (input, expected) in cases {
        for route in ["/v1/embeddings", "/embeddings"] {
            let body = json!({"input": input, "model": MODEL});
            let (reply, inputs) = embed(&mut server, route, body).await;
            assert_eq!(reply.status, 200);
            assert_eq!(reply.header("content-type"), Some("application/json"));
            assert_eq!(inputs, expected);
            let answer = reply.json().await;
            let data: Vec<Value> = expected.iter().enumerate().map(|(index, input)| {
                json!({"object": "embedding", "index": index, "embedding": [input.len() as f64, 0.25]})
            }).collect();
            let count: usize = expected.iter().map(Vec::len).sum();
            let whole = json!({
                "object": "list", "data": data, "model": MODEL,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            });
            assert_eq!(answer, whole);
        }
    }
}

#[tokio::test]
async fn base64_has_the_same_numbers() {
    let mut server = Server::start().await;
    let body = json!({"input": "abc", "encoding_format": "base64"});
    let (reply, _) = embed(&mut server, "/v1/embeddings", body).await;
    let answer = reply.json().await;
    let bytes = STANDARD.decode(answer["data"][0]["embedding"].as_str().unwrap());
    let numbers: Vec<f32> = bytes
        .unwrap()
        .chunks(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect();
    assert_eq!(numbers, [4.0, 0.25]);
}

#[tokio::test]
async fn dimensions_reach_the_ring_which_may_refuse_them() {
    let mut server = Server::start().await;
    for route in ["/v1/embeddings", "/api/embed"] {
        let body = json!({"input": "a", "dimensions": 7, "model": MODEL});
        let asking = tokio::spawn(post(route, &body).send(server.address));
        let accepted = server.accept().await;
        let dimensions = Some(7);
        assert_eq!(
            accepted.request.instead,
            Some(Instead::Embedding { dimensions })
        );
        accepted.embedding(&[1.0]).await;
        assert_eq!(soon(asking).await.unwrap().status, 200);
    }
    let asking = tokio::spawn(
        post("/v1/embeddings", &json!({"input": "a", "dimensions": 9})).send(server.address),
    );
    let problem = "more than the width".to_owned();
    server
        .refuse(SubmitError::Invalid {
            field: "dimensions",
            problem,
        })
        .await;
    let reply = soon(asking).await.unwrap();
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json().await["error"]["param"], "dimensions");
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let mut server = Server::start().await;
    let long = "a".repeat(CONTEXT);
    let long_tokens = vec![5; CONTEXT + 1];
    for (field, body) in [
        ("input", json!({})),
        ("input", json!({"input": []})),
        ("input", json!({"input": [[]]})),
        ("input", json!({"input": [VOCABULARY]})),
        ("input", json!({"input": vec!["a"; 2049]})),
        ("input", json!({"input": long})),
        ("input", json!({"input": ["a", long]})),
        ("input", json!({"input": long_tokens})),
        ("input", json!({"input": {"a": 1}})),
        (
            "encoding_format",
            json!({"input": "a", "encoding_format": "int8"}),
        ),
        (
            "encoding_format",
            json!({"input": "a", "encoding_format": 1}),
        ),
        ("dimensions", json!({"input": "a", "dimensions": 0})),
        ("dimensions", json!({"input": "a", "dimensions": "9"})),
    ] {
        let reply = post("/v1/embeddings", &body).send(server.address).await;
        assert_eq!(reply.status, 400, "{field}");
        assert_eq!(reply.json().await["error"]["param"], field);
    }
    let reply = post("/v1/embeddings", &json!({"input": "a", "model": "other"}))
        .send(server.address)
        .await;
    assert_eq!(reply.status, 404);
    assert!(server.nothing_submitted());
}

#[tokio::test]
async fn a_batch_on_a_full_ring_waits_unless_it_is_new() {
    let mut server = Server::start().await;
    let full = || SubmitError::Full {
        running: 1,
        waiting: 1,
        retry_after: Duration::from_millis(10),
    };
    let body = json!({"input": ["a", "bc"]});
    let asking = tokio::spawn(post("/v1/embeddings", &body).send(server.address));
    let first = server.accept().await;
    server.refuse(full()).await;
    server.refuse(full()).await;
    let second = server.accept().await;
    second.embedding(&[2.0]).await;
    first.embedding(&[1.0]).await;
    let answer = soon(asking).await.unwrap().json().await;
    assert_eq!(answer["data"][0]["embedding"], json!([1.0]));
    assert_eq!(answer["data"][1]["embedding"], json!([2.0]));
    let asking = tokio::spawn(post("/v1/embeddings", &body).send(server.address));
    server.refuse(full()).await;
    assert_eq!(soon(asking).await.unwrap().status, 429);
}

#[tokio::test]
async fn one_failed_input_fails_and_cancels_the_others() {
    let mut server = Server::start().await;
    let body = json!({"input": ["a", "b", "c"]});
    let asking = tokio::spawn(post("/v1/embeddings", &body).send(server.address));
    let accepted = [
        server.accept().await,
        server.accept().await,
        server.accept().await,
    ];
    accepted[0]
        .fail(GenerationError::Deadline { seconds: 9 })
        .await;
    assert_eq!(soon(asking).await.unwrap().status, 504);
    accepted[1].cancelled().await;
    accepted[2].cancelled().await;
}

#[tokio::test]
async fn ollama_embeds_one_text_several_or_none() {
    let mut server = Server::start().await;
    for (input, expected) in [
        (json!("ab"), json!([[3.0, 0.25]])),
        (json!(["ab", ""]), json!([[3.0, 0.25], [1.0, 0.25]])),
        (json!(""), json!([])),
        (json!([]), json!([])),
    ] {
        let body = json!({"input": input, "model": format!("{MODEL}:latest")});
        let (reply, inputs) = embed(&mut server, "/api/embed", body).await;
        let answer = reply.json().await;
        assert_eq!(answer["embeddings"], expected);
        assert_eq!(answer["model"], MODEL);
        let count: usize = inputs.iter().map(Vec::len).sum();
        assert_eq!(answer["prompt_eval_count"], count);
        assert!(answer["total_duration"].is_u64() && answer["load_duration"].is_u64());
    }
    for input in [json!(1), json!([1, 2]), json!({})] {
        let body = json!({"input": input, "model": MODEL});
        let reply = post("/api/embed", &body).send(server.address).await;
        assert_eq!(reply.status, 400);
        assert!(reply.json().await["error"].is_string());
    }
}

#[tokio::test]
async fn ollama_cuts_a_long_text_unless_told_not_to() {
    let mut server = Server::start().await;
    // Longer also than what is looked at.
    for length in [CONTEXT, 100 * CONTEXT] {
        let long = "é".repeat(length);
        let body = json!({"input": long, "model": MODEL});
        let (reply, inputs) = embed(&mut server, "/api/embed", body).await;
        assert_eq!(reply.status, 200);
        assert_eq!(inputs, [tokens(&long)[..CONTEXT].to_vec()]);
        let body = json!({"input": long, "model": MODEL, "truncate": false});
        let reply = post("/api/embed", &body).send(server.address).await;
        assert_eq!(reply.status, 400);
    }
}
