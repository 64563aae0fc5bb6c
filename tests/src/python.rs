//! Suites in Python: runs pytest in the virtual environment that `make assets` makes, and reports what it says.

use std::process::Command;

use crate::Endpoint;
use crate::assets;
use crate::inputs;
use crate::local_ring::{API_KEY, LocalRing};

/// Runs the suite in `folder` against `ring`, which [`API_KEY`] opens. `more` is further environment.
/// Panics with pytest's output unless it ran tests and all passed.
pub fn run_suite(folder: &str, ring: &LocalRing, more: &[(&str, String)]) {
    let python = assets::path("venv/bin/python").unwrap_or_else(|error| panic!("{error}"));
    let output = Command::new(python)
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
