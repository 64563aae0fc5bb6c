//! Suites for Node: runs its own test runner beside the packages that `make assets` fetches from npm, and reports what it says.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::machine_ring::API_KEY;
use crate::{Endpoint, assets, inputs};

/// Runs every `*.test.mjs` in `folder` against `ring`, which [`API_KEY`] opens.
/// Panics with Node's output unless there were tests and all passed.
pub fn run_suite(folder: &str, ring: &impl Endpoint) {
    inputs::need("node");
    let packages = assets::path("node/node_modules").unwrap_or_else(|error| panic!("{error}"));
    // Node looks for packages beside the file that imports them, and above.
    let work = tempfile::tempdir().expect("a folder");
    symlink(packages, work.path().join("node_modules")).expect("a link to the packages");
    let mut tests = Vec::new();
    for entry in fs::read_dir(inputs::file(folder)).expect("the suite's folder") {
        let entry = entry.expect("an entry of the suite's folder");
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        fs::copy(entry.path(), work.path().join(&name)).expect("a copy");
        if name.ends_with(".test.mjs") {
            tests.push(name);
        }
    }
    assert!(!tests.is_empty(), "{folder} holds no *.test.mjs");
    tests.sort();
    let output = Command::new("node")
        .arg("--test")
        .args(tests)
        .current_dir(work.path())
        .env("PRIMA_URL", format!("http://{}", ring.address()))
        .env("PRIMA_MODEL", ring.model())
        .env("PRIMA_KEY", API_KEY)
        .output()
        .expect("start node (Debian: apt-get install nodejs)");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
