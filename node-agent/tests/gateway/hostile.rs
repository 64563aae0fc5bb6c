//! Bodies that nobody would write: whatever comes in is answered, and never as an error of ours.

use std::time::Duration;

use prima_node_agent::generation::SubmitError;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Map, Value, json};

use crate::client::{get, post};
use crate::server::Server;

/// Every field that the gateway reads, wherever it reads it.
const FIELDS: [&str; 73] = [
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
    "name",
    "parameters",
    "tool_choice",
    "parallel_tool_calls",
    "tool_calls",
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
];

/// Whose errors look otherwise, or which may succeed.
const OTHER_ROUTES: [&str; 13] = [
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
    "/api/embed",
    "/v1/rerank",
    "/infill",
    "/apply-template",
];

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

#[tokio::test]
async fn no_body_is_answered_with_an_error_of_ours() {
    let mut server = Server::start().await;
    let address = server.address;
    let asking = tokio::spawn(async move {
        let mut runner = TestRunner::deterministic();
        let mut submitted = 0;
        for round in 0..600 {
            let mut body = any_object(any_json())
                .new_tree(&mut runner)
                .unwrap()
                .current();
            // Half of them get past the first hurdle.
            if round % 2 == 0 {
                body.insert("prompt".into(), json!("a"));
                body.insert("messages".into(), json!([{"role": "user", "content": "a"}]));
            }
            for route in ["/v1/chat/completions", "/v1/completions"] {
                let body = Value::Object(body.clone());
                let reply = post(route, &body).send(address).await;
                let status = reply.status;
                let error = reply.json().await["error"].take();
                assert!(error["message"].is_string(), "{route} {body}: {error}");
                match status {
                    400 | 404 => {
                        assert!(error["param"].is_string(), "{route} {body}: {error}")
                    }
                    // What reached the ring: it is full.
                    429 => submitted += 1,
                    _ => panic!("{status} to {route} {body}: {error}"),
                }
            }
            for route in OTHER_ROUTES {
                let body = Value::Object(body.clone());
                let reply = post(route, &body).send(address).await;
                assert!(reply.status < 500, "{} to {route} {body}", reply.status);
            }
        }
        submitted
    });
    let submitted = tokio::select! {
        submitted = asking => submitted.unwrap(),
        never = server.refuse_all(full()) => match never {},
    };
    assert!(submitted > 50, "only {submitted} bodies were taken");
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
