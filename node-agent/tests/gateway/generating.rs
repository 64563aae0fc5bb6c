//! Whole answers: what reaches the ring, and what comes back.

use prima_node_agent::generation::{FinishReason, TokenLogprob};
use serde_json::{Value, json};

use crate::client::post;
use crate::server::{MODEL, Server, id_of};

#[tokio::test]
async fn a_chat_is_rendered_asked_and_answered() {
    let mut server = Server::start().await;
    let body = json!({
        "model": MODEL, "max_tokens": 7, "seed": 9, "temperature": 0, "stop": "END",
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}]},
            {"role": "assistant", "content": null},
        ],
    });
    let (reply, ()) = tokio::join!(
        post("/v1/chat/completions", &body).send(server.address),
        async {
            let accepted = server.accept().await;
            assert_eq!(
                accepted.prompt(),
                "system: Be kind.\nuser: two\nlines\nassistant: \nassistant: "
            );
            let request = &accepted.request;
            assert_eq!(request.prompt[0], 1, "the beginning-of-sequence token");
            assert_ne!(request.prompt[1], 1);
            assert_eq!(
                (request.max_tokens, request.choices, request.logprobs),
                (7, 1, None)
            );
            assert_eq!(
                (request.sampling.seed, request.sampling.temperature),
                (9, 0.0)
            );
            assert_eq!(request.stop, ["END"]);
            accepted.token(0, "Hi").await;
            accepted.token(0, "").await;
            accepted.finish(0, FinishReason::Length, " you").await;
            accepted.usage(40, 3).await;
        }
    );
    assert_eq!(reply.status, 200);
    let answer = reply.json().await;
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(
        (&answer["object"], &answer["model"]),
        (&json!("chat.completion"), &json!(MODEL))
    );
    assert!(answer["created"].as_u64().unwrap() > 1_600_000_000);
    assert_eq!(
        answer["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "Hi you", "refusal": null},
            "logprobs": null,
            "finish_reason": "length",
        }])
    );
    assert_eq!(
        answer["usage"],
        json!({
            "prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 0},
        })
    );
    assert_eq!(answer["timings"]["prompt_per_second"], 64.0);
    assert_eq!(answer["timings"]["predicted_per_second"], 1.0);
    assert_eq!(answer["timings"]["draft_n"], 2);
    assert_eq!(answer["timings"]["draft_n_accepted"], 1);
}

#[tokio::test]
async fn without_a_limit_a_chat_fills_the_context() {
    let mut server = Server::start().await;
    let messages = json!([{"role": "user", "content": "a"}]);
    for (route, body, expected) in [
        (
            "/v1/chat/completions",
            json!({"messages": messages}),
            usize::MAX,
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": -1}),
            usize::MAX,
        ),
        ("/v1/completions", json!({"prompt": "a"}), 16),
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": -1}),
            usize::MAX,
        ),
    ] {
        let sent = tokio::spawn(post(route, &body).send(server.address));
        assert_eq!(server.accept().await.request.max_tokens, expected);
        sent.abort();
    }
    // Other APIs have no word for it.
    for (route, body, named) in [
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": -1}),
            "max_tokens",
        ),
        (
            "/v1/responses",
            json!({"input": "a", "max_output_tokens": -1}),
            "max_output_tokens",
        ),
    ] {
        let reply = post(route, &body).send(server.address).await;
        assert_eq!(reply.status, 400, "{route}");
        let problem = format!("{named} must be an integer of at least 1");
        assert!(reply.text().await.contains(&problem), "{route}");
    }
}

#[tokio::test]
async fn several_prompts_and_choices_keep_their_numbers() {
    let mut server = Server::start().await;
    let body = json!({"prompt": [[id_of(b'a')], [id_of(b'b')]], "n": 2});
    let (reply, ()) = tokio::join!(post("/v1/completions", &body).send(server.address), async {
        let (first, second) = (server.accept().await, server.accept().await);
        assert_eq!((first.prompt(), second.prompt()), ("a".into(), "b".into()));
        assert_eq!(
            first.request.prompt.len(),
            1,
            "token ids are taken as they are"
        );
        assert_eq!((first.request.choices, second.request.choices), (2, 2));
        for (ring, name) in [(&second, "b"), (&first, "a")] {
            ring.token(1, &format!("{name}1")).await;
            ring.token(0, &format!("{name}0")).await;
            ring.finish(1, FinishReason::Length, "").await;
            ring.finish(0, FinishReason::Stop, "").await;
            ring.usage(1, 2).await;
        }
    });
    let answer = reply.json().await;
    assert_eq!(answer["object"], "text_completion");
    let choice = |index, text: &str, reason: &str| json!({"index": index, "text": text, "logprobs": null, "finish_reason": reason});
    let expected = json!([
        choice(0, "a0", "stop"),
        choice(1, "a1", "length"),
        choice(2, "b0", "stop"),
        choice(3, "b1", "length"),
    ]);
    assert_eq!(answer["choices"], expected);
    assert_eq!(answer["usage"]["total_tokens"], 6);
}

#[tokio::test]
async fn when_the_ring_refuses_one_prompt_the_others_are_cancelled() {
    let mut server = Server::start().await;
    let body = json!({"prompt": ["a", "b"]});
    let (reply, ()) = tokio::join!(post("/v1/completions", &body).send(server.address), async {
        let first = server.accept().await;
        let error = prima_node_agent::generation::SubmitError::ContextExceeded { context: 8 };
        server.refuse(error).await;
        first.cancelled().await;
    });
    assert_eq!(reply.status, 400);
}

#[tokio::test]
async fn logprobs_in_both_forms() {
    let mut server = Server::start().await;
    let logprob = |logprob, top: &[(u8, f32)]| {
        let top = top
            .iter()
            .map(|(byte, logprob)| (id_of(*byte), *logprob))
            .collect();
        Some(TokenLogprob { logprob, top })
    };
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 2});
    let completion = json!({"prompt": "a", "logprobs": 2});
    let mut answers = Vec::new();
    for (route, body) in [
        ("/v1/chat/completions", &chat),
        ("/v1/completions", &completion),
    ] {
        let (reply, ()) = tokio::join!(post(route, body).send(server.address), async {
            let accepted = server.accept().await;
            assert_eq!(accepted.request.logprobs, Some(2));
            accepted
                .token_with(0, "x", logprob(-0.5, &[(b'x', -0.5), (b'y', -1.5)]))
                .await;
            // Half a character, and an alternative that cannot follow.
            accepted
                .token_with(0, "\u{e9}", logprob(-2.0, &[(0xa9, f32::NEG_INFINITY)]))
                .await;
            accepted.finish(0, FinishReason::Stop, "").await;
            accepted.usage(2, 2).await;
        });
        answers.push(reply.json().await["choices"][0]["logprobs"].clone());
    }
    let token = |token: &str, logprob: f64, bytes: &[u8]| json!({"token": token, "logprob": logprob, "bytes": bytes});
    let with_top = |mut token: Value, top: Value| {
        token["top_logprobs"] = top;
        token
    };
    let x = token("x", -0.5, b"x");
    assert_eq!(
        answers[0],
        json!({"refusal": null, "content": [
            with_top(x.clone(), json!([x, token("y", -1.5, b"y")])),
            with_top(token("\u{fffd}", -2.0, &[0xc3]), json!([token("\u{fffd}", -9999.0, &[0xa9])])),
        ]})
    );
    assert_eq!(
        answers[1],
        json!({
            "tokens": ["x", "bytes:\\xc3"],
            "token_logprobs": [-0.5, -2.0],
            "top_logprobs": [{"x": -0.5, "y": -1.5}, {"bytes:\\xa9": -9999.0}],
            "text_offset": [0, 1],
        })
    );
}

#[tokio::test]
async fn a_client_that_hangs_up_before_its_answer_cancels() {
    let mut server = Server::start().await;
    let body = json!({"prompt": "a", "n": 2});
    let sent = tokio::spawn(post("/v1/completions", &body).send(server.address));
    let accepted = server.accept().await;
    accepted.token(0, "x").await;
    sent.abort();
    accepted.cancelled().await;
}
