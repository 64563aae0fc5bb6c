//! Programs in Python, in the virtual environment that `make assets` makes: suites, of which pytest says how they went, and oracles.

use std::process::Command;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Endpoint;
use crate::assets;
use crate::command::run;
use crate::inputs;
use crate::machine_ring::API_KEY;

/// Runs the suite in `folder` against `ring`, which [`API_KEY`] opens. `more` is further environment.
/// Panics with pytest's output unless it ran tests and all passed.
pub fn run_suite(folder: &str, ring: &impl Endpoint, more: &[(&str, String)]) {
    let output = python()
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .current_dir(inputs::file(folder))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PRIMA_URL", format!("http://{}", ring.address()))
        .env("PRIMA_MODEL", ring.model())
        .env("PRIMA_KEY", API_KEY)
        .envs(more.iter().map(|(name, value)| (name, value)))
        .output()
        .expect("start pytest");
    // pytest's status is also not 0 when it found no test.
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// What the script `name` of `tests/oracle` answers, once. Panics with what it wrote on stderr where it fails.
pub fn ask_oracle<A: DeserializeOwned>(name: &str, request: &impl Serialize) -> A {
    let mut oracle = python();
    oracle.arg(inputs::file(&format!("tests/oracle/{name}")));
    let request = serde_json::to_string(request).expect("a request in JSON");
    let answer = run(oracle, &request).unwrap_or_else(|error| panic!("{error}"));
    serde_json::from_str(&answer).expect("an answer in JSON")
}

fn python() -> Command {
    let python = assets::path("venv/bin/python").unwrap_or_else(|error| panic!("{error}"));
    Command::new(python)
}
