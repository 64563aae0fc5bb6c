//! OpenAI's Python client against a ring of three: tests/openai/ holds what it does.

use prima_tests::local_ring::LocalRing;
use prima_tests::{assets, python};

#[test]
fn openai_python_client_gets_what_it_expects() {
    let model = assets::path("models/SmolLM2-135M-Instruct-Q4_1.gguf").expect("the model");
    let ring = LocalRing::builder()
        .model(&model)
        .members(3)
        .arg("--api-key")
        .arg(python::API_KEY)
        .start();
    python::run_suite("tests/openai", &ring, &[]);
    ring.stop();
}
