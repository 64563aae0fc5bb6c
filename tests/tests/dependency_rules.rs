//! The direction of dependencies, as ARCHITECTURE.md states it: what each package must never reach, however far
//! away. `deny.toml` says who may depend directly on whom; this file is about everything behind that.

use std::collections::{HashMap, HashSet};
use std::process::Command;

use serde_json::Value;

/// Runtimes and networks that synchronous packages must not reach.
const ASYNCHRONOUS: [&str; 4] = ["tokio", "hyper", "tonic", "axum"];

#[test]
fn no_package_reaches_what_it_must_not() {
    let graph = Graph::of_this_workspace();
    for (package, forbidden) in [
        (
            "prima-crds",
            &["prima-gguf", "prima-engine", "kube-client"][..],
        ),
        (
            "prima-gguf",
            &["prima-crds", "prima-text", "prima-engine", "candle-core"],
        ),
        ("prima-text", &["prima-crds", "prima-engine", "candle-core"]),
        (
            "prima-weights",
            &[
                "prima-crds",
                "prima-text",
                "prima-engine",
                "kube",
                "aws-lc-sys",
            ],
        ),
        ("prima-engine", &["prima-crds", "prima-text", "kube"]),
        (
            "prima",
            &[
                "prima-node-agent",
                "prima-engine",
                "prima-text",
                "candle-core",
            ],
        ),
        (
            "prima-halda",
            &["prima-gguf", "prima-engine", "kube-client"],
        ),
        ("prima-node-agent", &["prima", "prima-halda", "kube-client"]),
    ] {
        let reached = graph.reached_from(package);
        for name in forbidden {
            assert!(!reached.contains(name), "{package} reaches {name}");
        }
    }
    for package in [
        "prima-crds",
        "prima-halda",
        "prima-gguf",
        "prima-text",
        "prima-engine",
    ] {
        let reached = graph.reached_from(package);
        for name in ASYNCHRONOUS {
            assert!(!reached.contains(name), "{package} reaches {name}");
        }
    }
    // The walk does walk: a rule that finds nothing because it looks at nothing is no rule.
    assert!(graph.reached_from("prima-node-agent").contains("tokio"));
    assert!(graph.reached_from("prima").contains("prima-gguf"));
}

/// Who depends on whom, without dependencies that only tests have.
struct Graph {
    names: HashMap<String, String>,
    dependencies: HashMap<String, Vec<String>>,
}

impl Graph {
    fn of_this_workspace() -> Self {
        let output = Command::new(env!("CARGO"))
            .args(["metadata", "--format-version", "1", "--offline", "--locked"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("cargo metadata");
        assert!(output.status.success(), "{output:?}");
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let text = |value: &Value| value.as_str().expect("a string").to_owned();
        let list = |value: &Value| value.as_array().expect("a list").clone();
        let names = list(&metadata["packages"])
            .iter()
            .map(|package| (text(&package["id"]), text(&package["name"])))
            .collect();
        let dependencies = list(&metadata["resolve"]["nodes"])
            .iter()
            .map(|node| {
                let normal = list(&node["deps"])
                    .into_iter()
                    .filter(|dependency| {
                        // Kind null is a normal dependency; "dev" and "build" are not part of the program.
                        list(&dependency["dep_kinds"])
                            .iter()
                            .any(|kind| kind["kind"].is_null())
                    })
                    .map(|dependency| text(&dependency["pkg"]))
                    .collect();
                (text(&node["id"]), normal)
            })
            .collect();
        Self {
            names,
            dependencies,
        }
    }

    /// Names of all packages that `package` depends on, near and far.
    fn reached_from(&self, package: &str) -> HashSet<&str> {
        let (start, _) = self
            .names
            .iter()
            .find(|(_, name)| *name == package)
            .unwrap_or_else(|| panic!("no package {package}"));
        let mut reached = HashSet::new();
        let mut waiting = vec![start];
        while let Some(id) = waiting.pop() {
            for next in &self.dependencies[id] {
                if reached.insert(next) {
                    waiting.push(next);
                }
            }
        }
        reached.iter().map(|id| self.names[*id].as_str()).collect()
    }
}
