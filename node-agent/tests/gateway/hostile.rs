//! Bodies that nobody would write: whatever comes in is answered, and never as an error of ours.

use std::time::Duration;

use prima_node_agent::generation::{FinishReason, Instead, SubmitError};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Map, Value, json};

use crate::client::{get, post};
use crate::server::{MODEL, Server, TEMPLATE, options, text_with};

/// Fields that the gateway reads, and keywords of schemas, wherever it reads them.
const FIELDS: [&str; 82] = [
    "model",
    "messages",
    "role",
    "content",
    "type",
    "text",
    "name",
    "tool_calls",
    "prompt",
    "echo",
    "suffix",
    "best_of",
    "stream",
    "stream_options",
    "include_usage",
    "stop",
    "n",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "max_completion_tokens",
    "tools",
    "functions",
    "function",
    "parameters",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "json_schema",
    "schema",
    "grammar",
    "regex",
    "chat_template_kwargs",
    "reasoning_effort",
    "input",
    "instructions",
    "previous_response_id",
    "reasoning",
    "system",
    "input_schema",
    "stop_sequences",
    "thinking",
    "budget_tokens",
    "thinking_budget_tokens",
    "tool_use",
    "tool_result",
    "format",
    "options",
    "think",
    "num_predict",
    "tokens",
    "encoding_format",
    "dimensions",
    "truncate",
    "query",
    "documents",
    "top_n",
    "input_prefix",
    "input_suffix",
    "input_extra",
    "with_pieces",
    "raw",
    "keep_alive",
    "strict",
    "reasoning_content",
    "arguments",
    "properties",
    "required",
    "enum",
    "anyOf",
    "$ref",
    "additionalProperties",
];

/// Every route that takes a body, and what a body must have to get past the first hurdle. With `ring`: such bodies reach the ring.
struct Route {
    path: &'static str,
    needs: fn() -> Value,
    ring: bool,
}

const fn asks(path: &'static str, needs: fn() -> Value) -> Route {
    Route {
        path,
        needs,
        ring: true,
    }
}

const fn answers_itself(path: &'static str, needs: fn() -> Value) -> Route {
    Route {
        path,
        needs,
        ring: false,
    }
}

fn chat() -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}]})
}

fn prompt() -> Value {
    json!({"model": MODEL, "prompt": "a"})
}

fn input() -> Value {
    json!({"model": MODEL, "input": "a"})
}

const ROUTES: [Route; 17] = [
    asks("/v1/chat/completions", chat),
    asks("/v1/completions", prompt),
    asks("/v1/responses", input),
    asks(
        "/v1/messages",
        || json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ),
    asks("/api/chat", chat),
    asks("/api/generate", prompt),
    asks("/v1/embeddings", input),
    asks("/api/embed", input),
    asks("/api/embeddings", prompt),
    asks("/v1/rerank", || json!({"query": "a", "documents": ["b"]})),
    asks(
        "/infill",
        || json!({"input_prefix": "a", "input_suffix": "b"}),
    ),
    answers_itself("/v1/messages/count_tokens", chat),
    answers_itself("/api/show", || json!({"model": MODEL})),
    answers_itself("/api/pull", || json!({"model": MODEL})),
    answers_itself("/tokenize", || json!({"content": "a"})),
    answers_itself("/detokenize", || json!({"tokens": [65]})),
    answers_itself("/apply-template", chat),
];

/// Whose errors name the field.
const OPENAI_ERRORS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0..3).prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        proptest::sample::select(vec![
            "user",
            "assistant",
            "tool",
            "text",
            "json_object",
            "json_schema",
            "required",
            "function"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            any_object(inner).prop_map(Value::Object),
        ]
    })
}

fn any_object(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Map<String, Value>> {
    let name = prop_oneof![
        9 => proptest::sample::select(&FIELDS[..]).prop_map(String::from),
        1 => ".{0,4}",
    ];
    proptest::collection::vec((name, value), 0..6).prop_map(Map::from_iter)
}

fn full() -> SubmitError {
    SubmitError::Full {
        running: 1,
        waiting: 1,
        retry_after: Duration::from_secs(1),
    }
}

/// A model that can do all that is asked for somewhere.
async fn able_server() -> Server {
    let templates = [
        ("tokenizer.chat_template", TEMPLATE),
        ("tokenizer.chat_template.rerank", "{query} {document}"),
    ];
    let fill_in = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    Server::start_with(options(), Some(text_with(&templates, &fill_in))).await
}

/// Answers what reaches the ring next, or says that it is full.
async fn answer(server: &mut Server, refuses: bool) {
    if refuses {
        return server.refuse(full()).await;
    }
    let accepted = server.accept().await;
    match accepted.request.instead {
        Some(Instead::Score) => accepted.score(0.5).await,
        Some(_) => accepted.embedding(&[0.5; 4]).await,
        None => {
            for choice in 0..accepted.request.choices {
                accepted.token(choice, "{").await;
                accepted.finish(choice, FinishReason::Stop, "").await;
            }
            let prompt_tokens = accepted.request.prompt.len();
            accepted
                .usage(prompt_tokens, accepted.request.choices)
                .await;
        }
    }
}

#[tokio::test]
async fn no_body_is_answered_with_an_error_of_ours() {
    let mut server = able_server().await;
    let address = server.address;
    let mut runner = TestRunner::deterministic();
    let bodies = any_object(any_json());
    // Of each route: bodies that the ring got, and those that were answered.
    let mut submitted = [0; ROUTES.len()];
    let mut answered = [0; ROUTES.len()];
    let mut turn = 0;
    for round in 0..600 {
        let body = bodies.new_tree(&mut runner).unwrap().current();
        for (place, route) in ROUTES.iter().enumerate() {
            let mut body = body.clone();
            // Half of them get past the first hurdle.
            if let (0, Value::Object(needed)) = (round % 2, (route.needs)()) {
                body.extend(needed);
            }
            let body = Value::Object(body);
            let path = route.path;
            let mut asking = std::pin::pin!(async {
                let reply = post(path, &body).send(address).await;
                (reply.status, reply.text().await)
            });
            let before = turn;
            let (status, text) = loop {
                tokio::select! {
                    biased;
                    whole = &mut asking => break whole,
                    () = answer(&mut server, turn % 3 == 0) => turn += 1,
                }
            };
            submitted[place] += usize::from(turn > before);
            answered[place] += usize::from(status == 200);
            assert!(status < 500, "{status} to {path} {body}: {text}");
            if status != 200 && OPENAI_ERRORS.contains(&path) {
                let error = serde_json::from_str::<Value>(&text).unwrap()["error"].take();
                assert!(error["message"].is_string(), "{path} {body}: {text}");
                // Of 429, the ring is full.
                let named = error["param"].is_string();
                assert!(named || status == 429, "{status} to {path} {body}: {text}");
            }
        }
    }
    for (place, route) in ROUTES.iter().enumerate() {
        let (path, submitted, answered) = (route.path, submitted[place], answered[place]);
        eprintln!("{path}: {submitted} submitted, {answered} answered");
        assert!(answered > 50, "{path}: only {answered} were answered");
        assert!(
            !route.ring || submitted > 50,
            "{path}: only {submitted} were taken"
        );
    }
    assert_eq!(get("/health").send(address).await.status, 200);
}

#[tokio::test]
async fn no_grammar_brings_the_server_down() {
    let mut server = Server::start().await;
    let address = server.address;
    let chain = |name: &str, end: &str| {
        let rules = (0..4000).map(|nth| format!("{name}{nth}: {name}{}", nth + 1));
        let rules: Vec<String> = rules.collect();
        format!("start: {name}0\n{}\n{name}4000: {end}", rules.join("\n"))
    };
    let gbnf: Vec<String> = (0..3000)
        .map(|nth| format!("r{nth} ::= r{} | \"a\"", nth + 1))
        .collect();
    let refs: Vec<String> = (0..1200)
        .map(|nth| format!("\"d{nth}\": {{\"$ref\": \"#/$defs/d{}\"}}", nth + 1))
        .collect();
    let schema = format!(
        "{{\"$ref\": \"#/$defs/d0\", \"$defs\": {{{}, \"d1200\": {{\"type\": \"null\"}}}}}}",
        refs.join(", ")
    );
    let schema: Value = serde_json::from_str(&schema).unwrap();
    for (form, must_refuse) in [
        (json!({"grammar": chain("r", "\"a\"")}), false),
        (json!({"grammar": chain("T", "\"a\"")}), false),
        (
            json!({"grammar": format!("root ::= r0\n{}\nr3000 ::= \"b\"", gbnf.join("\n"))}),
            false,
        ),
        (
            json!({"grammar": format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000))}),
            true,
        ),
        (
            json!({"grammar": format!("start: \"{}\"", "a".repeat(70_000))}),
            true,
        ),
        (
            json!({"regex": format!("{}a{}", "(".repeat(20_000), ")".repeat(20_000))}),
            true,
        ),
        (json!({"regex": "((a{1,999}){1,999}){1,999}"}), false),
        (json!({"grammar": "start: start start | \"a\""}), false),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
            false,
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}}}),
            true,
        ),
    ] {
        let mut body = form.clone();
        body["messages"] = json!([{"role": "user", "content": "a"}]);
        body["max_tokens"] = 1.into();
        let request = post("/v1/chat/completions", &body).send(address);
        let reply = tokio::select! {
            reply = request => reply,
            never = server.refuse_all(full()) => match never {},
        };
        match reply.status {
            400 => {}
            // It was taken, and the ring is full.
            429 => assert!(!must_refuse, "{form}"),
            status => panic!("{status} to {form}"),
        }
        assert_eq!(get("/health").send(address).await.status, 200);
    }
}
