//! With the operator beside the agents: what becomes of a Model with a draft model, and how soon API keys count.

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use prima_tests::node_agent::{AgentMachine, NodeAgent};
use prima_tests::operator::{self, Operator};
use prima_tests::stopwatch::Stopwatch;
use prima_tests::{assets, http, wait_until};
use serde_json::{Value, json};

use crate::{Stage, hub_with_the_model_as, model, runtime};

/// Those of both machines.
fn agents(stage: &Stage) -> [NodeAgent; 2] {
    let machines = ["one", "two"].map(|node| AgentMachine::new(node, stage.folder.path()));
    machines.map(|machine| {
        let mut agent = machine.start_agent(&stage.api, operator::NAMESPACE);
        agent.wait_until_ready();
        agent
    })
}

/// Makes a Model, and waits until its first ring is ready: where rank 0 answers, and the plan.
fn serve(stage: &Stage, operator: &Operator, name: &str, spec: Value) -> (SocketAddr, Value) {
    stage.apply_model(name, &spec);
    stage.wait_for_ring(operator, &format!("{name}-1"))
}

/// From the Secret to the ring that runs: the operator looks at it, the plan tells it to the agent, and the agent's file to rank 0.
#[test]
fn api_keys_come_and_go_within_five_seconds() {
    /// A promise to users.
    const COUNTS_WITHIN: Duration = Duration::from_secs(5);
    let stage = Stage::with_chart();
    let agents = agents(&stage);
    let operator = Operator::start(&stage.api, "one");
    let secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "keys", "namespace": "default"},
        "stringData": {"alice": "abc"},
    });
    stage.api.apply(&secret.to_string()).expect("a Secret");
    let spec = json!({
        "source": {"hostPath": {"path": model()}},
        "contextLength": 512,
        "apiKeySecretRef": {"name": "keys"},
    });
    let (address, _) = serve(&stage, &operator, "guarded", spec);
    let statuses = || {
        ["abc", "abd"].map(|key| {
            let models = http::get_with_key(address, "/v1/models", key);
            models.expect("an answer").status
        })
    };
    assert_eq!(statuses(), [200, 401]);
    let members = agents.each_ref().map(NodeAgent::members);
    for (what, change, expected) in [
        (
            "a key is added",
            json!({"stringData": {"bob": "abd"}}),
            [200, 200],
        ),
        (
            "a key is revoked",
            json!({"data": {"alice": null}}),
            [401, 200],
        ),
        (
            "one takes the other's place",
            json!({"data": {"bob": null}, "stringData": {"carol": "abc"}}),
            [200, 401],
        ),
    ] {
        let patch = change.to_string();
        let patch = ["patch", "secret", "keys", "--type=merge", "-p", &patch];
        stage.api.kubectl(&patch).expect("a patch");
        let begun = Stopwatch::start();
        wait_until(what, || statuses() == expected);
        let took = begun.elapsed();
        println!("{what}: it counts after {:.1} s", took.as_secs_f64());
        assert!(took < COUNTS_WITHIN, "{what}: {took:?}");
    }
    // It is the same ring.
    assert_eq!(agents.each_ref().map(NodeAgent::members), members);
}

/// The model is on the machines, its draft model on a hub: the same weights, quantized.
#[test]
fn a_model_with_a_draft_model_says_the_same_in_fewer_trips() {
    let stage = Stage::with_chart();
    let runtime = runtime();
    let hub = hub_with_the_model_as("draft.gguf", &stage, &runtime);
    let exact = assets::path("models/SmolLM2-135M-Instruct-F32.gguf").expect("a model");
    let exact = exact.canonicalize().expect("an absolute path");

    let _agents = agents(&stage);
    let operator = Operator::start(&stage.api, "one");
    let serve = |name: &str, speculation: Value| {
        let spec = json!({
            "source": {"hostPath": {"path": exact}},
            "contextLength": 512,
            "speculation": speculation,
        });
        serve(&stage, &operator, name, spec)
    };
    // Texts, and how many of their tokens were guessed and were right.
    let complete = |name: &str, address: SocketAddr| {
        let prompts = ["The capital of France is", "def fibonacci(n):\n"];
        let answers = prompts.map(|prompt| {
            let body = json!({"model": name, "prompt": prompt, "max_tokens": 60, "temperature": 0});
            let answer = http::post(address, "/v1/completions", &body).expect("an answer");
            assert_eq!(answer.status, 200, "{}", answer.body);
            answer.json()
        });
        let sum = |count: &str| -> u64 {
            let counts = answers
                .iter()
                .map(|answer| answer["timings"][count].as_u64());
            counts.map(|count| count.expect("a count")).sum()
        };
        let texts = answers
            .each_ref()
            .map(|answer| answer["choices"][0]["text"].clone());
        (texts, sum("draft_n"), sum("draft_n_accepted"))
    };

    let (address, plan) = serve("plain", Value::Null);
    assert_eq!(plan["draft"], Value::Null);
    // A ring of several is encrypted.
    let members = plan["members"].as_array().expect("members");
    for member in members {
        let node = member["name"].as_str().expect("a name");
        let key = match members.len() {
            1 => Value::Null,
            _ => stage.key(node),
        };
        assert_eq!(member["publicKeySha256"], key, "{node}");
    }
    let (texts, _, by_text) = complete("plain", address);
    let draft = json!({"repo": "people/models", "file": "draft.gguf", "endpoint": hub.endpoint()});
    let draft = json!({"draft": {"huggingFace": draft}});
    let (address, plan) = serve("drafting", draft);
    let (same, drafted, accepted) = complete("drafting", address);
    assert_eq!(same, texts);
    // How much is drafted follows what passes take, and so how busy the machine is.
    assert!(
        2 * accepted > drafted && accepted > by_text,
        "{accepted} of {drafted}, {by_text} without a draft model"
    );

    // Rank 0 has fetched all of it, of the version that was resolved.
    let whole = fs::metadata(model()).expect("a model").len();
    assert_eq!(plan["draft"]["model"]["sizeBytes"], whole);
    let resolved = stage.object("model/drafting")["status"]["resolved"].clone();
    assert_eq!(
        plan["draft"]["model"]["version"],
        resolved["draft"]["version"]
    );
    let rank0 = plan["members"][0]["name"].as_str().expect("a name");
    let member = stage.member("drafting-1", rank0);
    assert_eq!(member["fetchedBytes"], member["totalBytes"]);
    let fetched = member["fetchedBytes"].as_u64().expect("bytes");
    assert!(whole - fetched < 64 << 10, "{fetched} of {whole}");
}
