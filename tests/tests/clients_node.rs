//! The clients that people have for Node, against a ring of three: tests/clients_node/ holds what they do.

use prima_tests::local_ring::LocalRing;
use prima_tests::{assets, node, python};

#[test]
fn node_clients_get_what_they_expect() {
    let model = assets::path("models/SmolLM2-135M-Instruct-Q4_1.gguf").expect("the model");
    let ring = LocalRing::builder()
        .model(&model)
        .members(3)
        .arg("--api-key")
        .arg(python::API_KEY)
        .start();
    node::run_suite("tests/clients_node", &ring);
    ring.stop();
}
