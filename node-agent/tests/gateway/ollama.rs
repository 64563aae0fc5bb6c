//! What only Ollama's API has.

use prima_node_agent::generation::FinishReason;
use serde_json::{Value, json};

use crate::apis::{TEMPLATE, accepted};
use crate::client::{get, post};
use crate::server::{CONTEXT, MODEL, MODEL_BYTES, Server, options, text, text_with};

/// The ring is not asked.
#[tokio::test]
async fn ollamas_model_is_loaded_by_asking_nothing() {
    let server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (route, body, reason) in [
        ("/api/generate", json!({}), "load"),
        (
            "/api/generate",
            json!({"prompt": "", "keep_alive": "5m"}),
            "load",
        ),
        ("/api/generate", json!({"keep_alive": 0}), "unload"),
        ("/api/chat", json!({"messages": []}), "load"),
        (
            "/api/chat",
            json!({"messages": [], "keep_alive": "0s"}),
            "unload",
        ),
    ] {
        let mut asked = body.clone();
        asked["model"] = MODEL.into();
        let reply = post(route, &asked).send(server.address).await;
        assert_eq!(reply.status, 200, "{body}");
        let said: Value = serde_json::from_str(&reply.text().await).unwrap();
        assert_eq!(
            (&said["done"], &said["done_reason"]),
            (&json!(true), &json!(reason)),
            "{body}"
        );
    }
}

#[tokio::test]
async fn ollamas_prompts_go_on_where_editors_want_it() {
    let fill_in = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    let templates = [("tokenizer.chat_template", TEMPLATE)];
    let mut server = Server::start_with(options(), Some(text_with(&templates, &fill_in))).await;
    for (more, prompt) in [
        (json!({}), "user: f(|assistant: "),
        (json!({"raw": true}), "f("),
        (json!({"suffix": ""}), "user: f(|assistant: "),
        (json!({"suffix": ")"}), "f()"),
    ] {
        let mut body = json!({"model": MODEL, "prompt": "f(", "stream": false});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let address = server.address;
        let asked = body.clone();
        let asking = tokio::spawn(async move { post("/api/generate", &asked).send(address).await });
        let accepted = server.accept().await;
        assert_eq!(accepted.prompt(), prompt, "{body}");
        accepted.token(0, "x").await;
        accepted.finish(0, FinishReason::Stop, "").await;
        accepted.usage(3, 1).await;
        let reply = asking.await.unwrap().json().await;
        assert_eq!(
            (&reply["response"], &reply["done"]),
            (&json!("x"), &json!(true)),
            "{body}"
        );
    }
    let shown = post("/api/show", &json!({"model": MODEL}))
        .send(server.address)
        .await;
    let shown = shown.json().await;
    assert_eq!(shown["model_info"]["llama.context_length"], CONTEXT);
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert_eq!(
        shown["capabilities"],
        json!(["completion", "tools", "thinking", "insert"])
    );
}

/// Clients that put streamed calls together by their numbers take one without for the first.
#[tokio::test]
async fn calls_of_one_answer_are_numbered() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let address = server.address;
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    for stream in [false, true] {
        let body = json!({"model": MODEL, "stream": stream, "messages": [{"role": "user", "content": "a"}], "tools": [tool]});
        let asking = tokio::spawn(async move {
            let reply = post("/api/chat", &body).send(address).await;
            reply.text().await
        });
        let accepted = server.accept().await;
        for call in [1, 2] {
            let call = format!(
                "<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": {call}}}}}</tool_call>"
            );
            accepted.token(0, &call).await;
        }
        accepted.finish(0, FinishReason::Stop, "").await;
        accepted.usage(1, 2).await;
        let lines = asking.await.unwrap();
        let lines = lines
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let calls: Vec<Value> = lines
            .filter_map(|line| line["message"]["tool_calls"].as_array().cloned())
            .flatten()
            .map(|call| {
                json!([
                    call["function"]["index"],
                    call["function"]["arguments"]["a"]
                ])
            })
            .collect();
        assert_eq!(calls, [json!([0, 1]), json!([1, 2])], "stream: {stream}");
    }
}

#[tokio::test]
async fn what_is_loaded_stays_so() {
    let server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (route, loaded) in [("/api/tags", false), ("/api/ps", true)] {
        let listed = get(route).send(server.address).await.json().await;
        let model = &listed["models"][0];
        assert_eq!(
            (&model["name"], &model["size"], &model["details"]["family"]),
            (&json!(MODEL), &json!(MODEL_BYTES), &json!("llama"))
        );
        assert_eq!(model["expires_at"].is_string(), loaded, "{route}");
        // The same at every look.
        let again = get(route).send(server.address).await.json().await;
        assert_eq!(listed, again);
    }
}

#[tokio::test]
async fn images_are_not_left_out_in_silence() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let said = |images: Value| json!({"model": MODEL, "messages": [{"role": "user", "content": "a", "images": images}]});
    for (route, body, param) in [
        (
            "/api/chat",
            said(json!(["iVBORw0KGgo="])),
            "messages[0].images",
        ),
        (
            "/api/generate",
            json!({"model": MODEL, "prompt": "a", "images": ["iVBORw0KGgo="]}),
            "images",
        ),
    ] {
        let reply = post(route, &body).send(server.address).await;
        assert_eq!(reply.status, 400, "{route}");
        let problem = reply.json().await["error"].to_string();
        let expected = format!("{param} must be left out: this model reads text only");
        assert!(problem.contains(&expected), "{problem}");
    }
    let body = said(json!([]));
    accepted(&mut server, "/api/chat", &body).await;
}

/// The test's context holds few tokens, each a byte.
#[tokio::test]
async fn the_oldest_turns_of_a_long_conversation_are_left_out() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let of = |role: &str, sign: &str, length: usize| json!({"role": role, "content": sign.repeat(length)});
    let quarter = CONTEXT / 4;
    let conversation = |last: usize| {
        let messages = [
            of("system", "s", 3),
            of("user", "a", quarter),
            of("assistant", "b", quarter),
            of("user", "c", quarter),
            of("assistant", "d", 3),
            of("user", "e", last),
        ];
        json!({"model": MODEL, "stream": false, "messages": messages})
    };
    for (last, kept) in [(3, "sabcde"), (quarter, "scde"), (3 * quarter, "se")] {
        let accepted = accepted(&mut server, "/api/chat", &conversation(last)).await;
        let mut prompt = accepted.prompt();
        for word in ["system: ", "user: ", "assistant: ", "|"] {
            prompt = prompt.replace(word, "");
        }
        let mut signs: Vec<char> = prompt.chars().collect();
        signs.dedup();
        assert_eq!(signs.into_iter().collect::<String>(), kept, "{last}");
    }
    // A last turn that is too long stays an error.
    for last in [CONTEXT, 100 * CONTEXT] {
        let reply = post("/api/chat", &conversation(last)).send(server.address);
        assert_eq!(reply.await.status, 400, "{last}");
    }
}

#[tokio::test]
async fn older_clients_name_the_model_by_name() {
    let server = Server::start_with(options(), Some(text(None))).await;
    for route in ["/api/show", "/api/pull"] {
        for (body, status) in [
            (json!({"name": MODEL}), 200),
            (json!({"name": "qwen3"}), 404),
            (json!({"model": MODEL, "name": "qwen3"}), 200),
            (json!({}), 400),
        ] {
            let reply = post(route, &body).send(server.address).await;
            assert_eq!(reply.status, status, "{route} {body}");
        }
    }
}

#[tokio::test]
async fn what_is_served_needs_no_pulling() {
    let server = Server::start_with(options(), Some(text(None))).await;
    for (model, status) in [
        (MODEL, 200),
        ("household/test-model:latest", 200),
        ("qwen3", 404),
    ] {
        let reply = post("/api/pull", &json!({"model": model}))
            .send(server.address)
            .await;
        assert_eq!(reply.status, status, "{model}");
        let said = reply.json().await;
        assert_eq!(said["status"] == "success", status == 200);
        assert_eq!(said["error"].is_string(), status == 404);
    }
}

/// Home Assistant's lists, of which several may be chosen, and its entities.
#[tokio::test]
async fn forms_that_are_no_more_than_remarks_are_taken() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    let schema = json!({"type": "object", "required": ["chosen", "lamp"], "properties": {
        "chosen": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": true},
        "lamp": {"type": "string", "format": "entity_id"},
    }});
    let body = json!({"model": MODEL, "stream": false, "format": schema, "messages": [{"role": "user", "content": "a"}]});
    let accepted = accepted(&mut server, "/api/chat", &body).await;
    assert!(accepted.request.constraint.is_some());
    // Whoever asks OpenAI's way relies on it.
    let form = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    let body = json!({"response_format": form, "messages": [{"role": "user", "content": "a"}]});
    let reply = post("/v1/chat/completions", &body)
        .send(server.address)
        .await;
    assert_eq!(reply.status, 400);
    assert!(reply.text().await.contains("`uniqueItems`"));
}

#[tokio::test]
async fn answers_are_drawn_as_ollama_does_unless_told_otherwise() {
    let mut server = Server::start_with(options(), Some(text(Some(TEMPLATE)))).await;
    for (options, expected) in [
        (json!({}), (0.8, 40, 0.9)),
        (json!({"temperature": 0, "top_k": 7}), (0.0, 7, 0.9)),
    ] {
        let body = json!({"model": MODEL, "prompt": "a", "stream": false, "options": options});
        let accepted = accepted(&mut server, "/api/generate", &body).await;
        let sampling = &accepted.request.sampling;
        let found = (sampling.temperature, sampling.top_k, sampling.top_p);
        assert_eq!(found, expected);
    }
}

#[tokio::test]
async fn an_older_route_gives_the_vector_of_one_text() {
    let mut server = Server::start_with(options(), Some(text(None))).await;
    let address = server.address;
    let body = json!({"model": MODEL, "prompt": "ab"});
    let asking = tokio::spawn(async move {
        let reply = post("/api/embeddings", &body).send(address).await;
        reply.json().await
    });
    let accepted = server.accept().await;
    assert_eq!(accepted.prompt(), "ab");
    accepted.embedding(&[0.5, -1.0]).await;
    assert_eq!(asking.await.unwrap(), json!({"embedding": [0.5, -1.0]}));
    let none = post("/api/embeddings", &json!({"model": MODEL})).send(address);
    assert_eq!(none.await.json().await, json!({"embedding": []}));
}
