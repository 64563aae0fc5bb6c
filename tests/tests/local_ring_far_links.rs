//! Over long links further drafts go round before the first is verified, and no answer changes, to the last digit.

use std::net::SocketAddr;
use std::time::Duration;

use prima_tests::machine_ring::{MachineRing, Node, ThisMachine, cut, draft};
use prima_tests::{Endpoint, assets, http};
use serde_json::{Value, json};

/// From each member to the next: much longer than the small model takes.
const DELAY: Duration = Duration::from_millis(8);

#[test]
fn running_ahead_changes_no_answer() {
    let model = assets::path("models/stories15M-F32.gguf").expect("a model");
    let ring = |members: usize, arguments: &[&str]| {
        let mut plan = cut(&model, 256, members, 1);
        plan.spec.max_concurrent_requests = 2;
        // Right unless tokens are drawn.
        plan.spec.draft = Some(draft(&model));
        let node = || Node {
            machine: &ThisMachine,
            model: model.clone(),
        };
        let nodes: Vec<Node<'_>> = (0..members).map(|_| node()).collect();
        MachineRing::start_apart(plan, &nodes, arguments, DELAY)
    };
    let alone = ring(2, &["--threads", "1", "--no-speculation"]);
    let expected = answers(alone.address());
    drop(alone);
    for members in 2..=4 {
        let ahead = ring(members, &["--threads", "1"]);
        let found = answers(ahead.address());
        for (nth, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "request {nth}, {members} members");
        }
        let metric = |name| http::metric(ahead.address(), name).unwrap();
        let drafted = metric("prima_drafted_tokens_total");
        let accepted = metric("prima_accepted_tokens_total");
        assert!(
            0.3 * drafted < accepted && accepted < drafted,
            "{accepted} of {drafted}, {members} members"
        );
    }
}

/// The choices of each request, one request after the other.
fn answers(address: SocketAddr) -> Vec<Value> {
    let list = "one, two, three, four, five, ".repeat(6);
    let requests = [
        json!({"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "logprobs": 2}),
        json!({"prompt": list, "max_tokens": 100, "temperature": 0, "logprobs": 2}),
        json!({"prompt": "Lily and her dog", "max_tokens": 100, "temperature": 0.8, "seed": 7, "logprobs": 2}),
        json!({"prompt": "One day", "max_tokens": 60, "temperature": 1, "seed": 1, "n": 2}),
    ];
    let answer = |body: Value| {
        let response = http::post(address, "/v1/completions", &body).expect("an answer");
        assert_eq!(response.status, 200, "{}", response.body);
        response.json()["choices"].take()
    };
    requests.into_iter().map(answer).collect()
}
