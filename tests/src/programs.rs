//! What the tests build or make once for all of them, by scripts that do nothing where that has been done.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// A program of those that `control-plane/build.sh` builds, for example `kubectl`.
pub fn program(name: &str) -> PathBuf {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| folder_made_by("control-plane/build.sh"));
    let program = FOLDER.join(name);
    assert!(program.is_file(), "{} is not there", program.display());
    program
}

/// The last line that a script in `tests/` prints: the folder that it has filled.
pub(crate) fn folder_made_by(script: &str) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let output = Command::new(&script).stderr(Stdio::inherit()).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run {}: {error}", script.display()));
    let printed = String::from_utf8_lossy(&output.stdout);
    match (output.status.success(), printed.lines().last()) {
        (true, Some(folder)) => folder.into(),
        _ => panic!("{}: {}", script.display(), output.status),
    }
}
