//! The clients that people have, against a ring of three: tests/clients/ holds what they do.

use prima_tests::local_ring::LocalRing;
use prima_tests::{assets, python};

#[test]
fn clients_get_what_they_expect() {
    let model = assets::path("models/SmolLM2-135M-Instruct-Q4_1.gguf").expect("the model");
    let ring = LocalRing::builder()
        .model(&model)
        .members(3)
        .arg("--api-key")
        .arg(python::API_KEY)
        .start();
    python::run_suite("tests/clients", &ring, &[]);
    ring.stop();
}
