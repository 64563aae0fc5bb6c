//! What the tests build or make once for all of them, by scripts that do nothing where that has been done.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use crate::inputs;

/// One of the programs that `control-plane/build.sh` builds, for example `kubectl`.
pub fn program(name: &str) -> PathBuf {
    static API_SERVER: LazyLock<PathBuf> = LazyLock::new(|| control_plane("api-server"));
    static NODES: LazyLock<PathBuf> = LazyLock::new(|| control_plane("nodes"));
    let program = API_SERVER.join(name);
    if program.is_file() {
        return program;
    }
    let program = NODES.join(name);
    assert!(program.is_file(), "{} is not there", program.display());
    program
}

fn control_plane(group: &str) -> PathBuf {
    folder_made_by(group, &["tests/control-plane/build.sh", group])
}

/// The last line that a script prints: the folder that it has filled. `need`: what its users must list as a need.
pub(crate) fn folder_made_by(need: &str, command: &[&str]) -> PathBuf {
    inputs::need(need);
    let script = inputs::repository().join(command[0]);
    let output = Command::new(&script)
        .args(&command[1..])
        .stderr(Stdio::inherit())
        .output();
    let output = output.unwrap_or_else(|error| panic!("cannot run {}: {error}", script.display()));
    let printed = String::from_utf8_lossy(&output.stdout);
    match (output.status.success(), printed.lines().last()) {
        (true, Some(folder)) => folder.into(),
        _ => panic!("{}: {}", script.display(), output.status),
    }
}
