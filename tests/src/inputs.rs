//! What a suite reaches outside of its own program: the programs that cargo built, the repository's files, and tools. `suites.json` lists
//! it for each suite, and nothing else can be reached from here. So `make test` knows what a suite depends on, and runs it again only when
//! one of these has changed (`tests/run/inputs.py`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::Deserialize;

/// One suite's, as listed.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Inputs {
    /// Started from where cargo builds them.
    programs: Vec<String>,
    /// Files and folders of the repository.
    files: Vec<String>,
    /// Names of `tests/run/machine.py`.
    needs: Vec<String>,
    /// The same, of some of its tests (`PARTS` of `tests/run/__main__.py`).
    parts: Vec<String>,
}

/// The program `name` that cargo built: it lies one folder above the test that runs, or beside the benchmark.
pub fn program(name: &str) -> PathBuf {
    demand("programs", |inputs| inputs.programs.clone(), name);
    let own = std::env::current_exe().expect("own path");
    let folder = own.parent().expect("own folder");
    let folder = match folder.ends_with("deps") {
        true => folder.parent().expect("target folder"),
        false => folder,
    };
    let binary = folder.join(name);
    assert!(
        binary.is_file(),
        "{} is not there: `cargo build --workspace --bins` builds it",
        binary.display()
    );
    binary
}

/// The file or folder `path` of the repository, for example `charts/prima`.
pub fn file(path: &str) -> PathBuf {
    let listed = |entry: &String| {
        let below = path.strip_prefix(entry.as_str());
        below.is_some_and(|rest| rest.is_empty() || entry.is_empty() || rest.starts_with('/'))
    };
    if let Some(inputs) = of_this_suite() {
        assert!(
            inputs.files.iter().any(listed),
            "{path} is not among the files that suites.json lists for this suite"
        );
    }
    repository().join(path)
}

/// Panics unless the suite lists the tool that is about to be used.
pub fn need(name: &str) {
    let needs = |inputs: &Inputs| [&inputs.needs[..], &inputs.parts[..]].concat();
    demand("needs", needs, name);
}

/// The repository, for what is no suite's input: cargo's folder, and scripts of tools.
pub(crate) fn repository() -> &'static Path {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the repository")
}

fn demand(field: &str, listed: fn(&Inputs) -> Vec<String>, name: &str) {
    if let Some(inputs) = of_this_suite() {
        assert!(
            listed(inputs).iter().any(|entry| entry == name),
            "{name} is not among the {field} that suites.json lists for this suite"
        );
    }
}

/// The running suite's; `None` for the benchmark, which may reach everything.
fn of_this_suite() -> Option<&'static Inputs> {
    static INPUTS: LazyLock<Option<Inputs>> = LazyLock::new(|| {
        let mut suites: BTreeMap<String, Inputs> =
            serde_json::from_str(include_str!("../suites.json")).expect("suites.json");
        let own = std::env::current_exe().expect("own path");
        let stem = own.file_stem().expect("own name").to_string_lossy();
        // cargo appends a hash to the names of tests.
        let (name, _) = stem.rsplit_once('-')?;
        let inputs = suites.remove(name);
        Some(inputs.unwrap_or_else(|| panic!("suites.json does not list the suite {name}")))
    });
    INPUTS.as_ref()
}
