//! The direction of dependencies, as ARCHITECTURE.md states it: what each package must never reach, however far
//! away. `deny.toml` says who may depend directly on whom; this file is about everything behind that.

use std::collections::HashSet;
use std::process::Command;

/// Runtimes and networks that synchronous packages must not reach.
const ASYNCHRONOUS: [&str; 5] = ["tokio", "hyper", "tonic", "axum", "kube-client"];

#[test]
fn no_package_reaches_what_it_must_not() {
    for (package, forbidden) in [
        ("prima-crds", &["prima-gguf", "prima-engine"][..]),
        (
            "prima-gguf",
            &["prima-crds", "prima-text", "prima-engine", "candle-core"],
        ),
        ("prima-text", &["prima-crds", "prima-engine", "candle-core"]),
        (
            "prima-weights",
            &["prima-text", "prima-engine", "kube-client", "aws-lc-sys"],
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
        ("prima-halda", &["prima-gguf", "prima-engine"]),
        ("prima-node-agent", &["prima", "prima-halda"]),
    ] {
        let reached = reached_from(package);
        for name in forbidden {
            assert!(!reached.contains(*name), "{package} reaches {name}");
        }
    }
    for package in [
        "prima-crds",
        "prima-halda",
        "prima-gguf",
        "prima-text",
        "prima-engine",
    ] {
        let reached = reached_from(package);
        for name in ASYNCHRONOUS {
            assert!(!reached.contains(name), "{package} reaches {name}");
        }
    }
    // A rule that finds nothing because it looks at nothing is no rule.
    assert!(reached_from("prima-node-agent").contains("tokio"));
    assert!(reached_from("prima").contains("prima-gguf"));
}

/// Names of all packages that `package` depends on, near and far, with the features that it asks for itself: what others ask
/// of the same packages is not its doing. Without what only tests and build scripts have.
fn reached_from(package: &str) -> HashSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--package", package])
        .args(["--edges", "normal", "--prefix", "none", "--format", "{p}"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo tree");
    assert!(output.status.success(), "{output:?}");
    let tree = String::from_utf8(output.stdout).expect("names in UTF-8");
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    names
        .filter(|name| *name != package)
        .map(str::to_owned)
        .collect()
}
