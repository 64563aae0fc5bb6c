//! What holds for the repository as a whole. The direction of dependencies, as ARCHITECTURE.md states it: what each package must never reach,
//! however far away (`deny.toml` says who may depend directly on whom). And that links of its documents lead somewhere.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use prima_tests::inputs;

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
        ("prima-model", &["prima-crds", "prima-kernels", "memmap2"]),
        ("prima-text", &["prima-crds", "prima-engine", "candle-core"]),
        (
            "prima-weights",
            &["prima-engine", "kube-client", "aws-lc-sys"],
        ),
        ("prima-kernels", &["prima-crds", "prima-text", "kube"]),
        ("prima-engine", &["prima-crds", "prima-text", "kube"]),
        (
            "prima",
            &["prima-node-agent", "prima-engine", "candle-core"],
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
        "prima-model",
        "prima-text",
        "prima-kernels",
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

/// Suites would otherwise test other code than people run: a test's dependency may turn on a feature of a package that the
/// programs have without it.
#[test]
fn the_tests_have_the_features_that_ship() {
    let packages = ["--package", "prima", "--package", "prima-node-agent"];
    let shipped = [&packages[..], &["--edges", "normal,build"]].concat();
    let shipped = cargo_tree(&shipped, "{p} {f}");
    let tested = cargo_tree(&["--workspace", "--edges", "all"], "{p} {f}");
    let other: Vec<_> = shipped.difference(&tested).collect();
    assert!(
        shipped.len() > 100 && other.is_empty(),
        "the tests have these with more features: {other:?}"
    );
    let path = inputs::file("images/compile.sh");
    let compile = fs::read_to_string(&path).expect("a script");
    assert!(
        compile.contains(&packages.join(" ")),
        "{} builds other packages than {packages:?}",
        path.display()
    );
}

#[test]
fn links_of_documents_lead_somewhere() {
    let tracked = tracked();
    let documents: Vec<&PathBuf> = tracked
        .iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "md"))
        .collect();
    let mut links = 0;
    let mut broken = Vec::new();
    for document in &documents {
        let text = read(document);
        links += links_in(&text).count();
        let of_this = broken_links(document, &text, &tracked);
        broken.extend(of_this.map(|link| format!("{}: {link}", document.display())));
    }
    assert!(
        documents.len() > 5 && links > 30,
        "{documents:?} have {links} links"
    );
    assert!(broken.is_empty(), "{broken:#?}");

    let document = inputs::file("charts/docs/running.md");
    let text = "# A, b\n[b](models.md) [c](models.md#ask-it) [d](../../tests) [e](https://f.example/g) [h](#a-b)
        [i](missing.md) [j](models.md#missing) [k](#missing) [l](../../target)";
    let found: Vec<&str> = broken_links(&document, text, &tracked).collect();
    assert_eq!(
        found,
        [
            "missing.md",
            "models.md#missing",
            "#missing",
            "../../target"
        ]
    );
}

/// The links of `document` that lead to no heading of a document of ours, and to nothing that is `tracked`.
fn broken_links<'a>(
    document: &'a Path,
    text: &'a str,
    tracked: &'a [PathBuf],
) -> impl Iterator<Item = &'a str> {
    let links = links_in(text).filter(|link| !link.contains("://"));
    links.filter(move |link| {
        let (path, heading) = link.split_once('#').unwrap_or((link, ""));
        let target = match path {
            "" => document.to_owned(),
            path => plain(&document.parent().unwrap().join(path)),
        };
        let known = tracked.iter().any(|file| file.starts_with(&target));
        let leads = match (heading, path) {
            ("", _) => true,
            (heading, "") => headings_of(text).contains(heading),
            (heading, _) => known && headings_of(&read(&target)).contains(heading),
        };
        !(known && leads)
    })
}

/// All files of the repository.
fn tracked() -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(inputs::file(""))
        .output()
        .expect("git lists files");
    let listed = String::from_utf8(listed.stdout).expect("names in UTF-8");
    let files = listed.lines().map(inputs::file);
    files.filter(|file| file.exists()).collect()
}

/// Without `..`, and without looking whether it is there.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}

fn read(document: &Path) -> String {
    fs::read_to_string(document).unwrap_or_else(|error| panic!("{}: {error}", document.display()))
}

/// Where `[text](target)` leads to.
fn links_in(text: &str) -> impl Iterator<Item = &str> {
    let ends = text.split("](").skip(1);
    ends.filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target)
        .filter(|target| !target.contains(char::is_whitespace))
}

/// As GitHub turns them into anchors: small letters, without punctuation, with dashes for spaces.
fn headings_of(text: &str) -> HashSet<String> {
    let headings = text.lines().filter_map(|line| {
        let (marks, heading) = line.split_once(' ')?;
        (!marks.is_empty() && marks.chars().all(|mark| mark == '#')).then_some(heading)
    });
    let anchor = |heading: &str| -> String {
        let kept = heading.to_lowercase();
        kept.chars()
            .filter(|letter| letter.is_alphanumeric() || "-_ ".contains(*letter))
            .map(|letter| if letter == ' ' { '-' } else { letter })
            .collect()
    };
    headings.map(anchor).collect()
}

/// Names of all packages that `package` depends on, directly or not, with the features that it asks for itself, not those that others ask
/// of the same packages. Without what only tests and build scripts use.
fn reached_from(package: &str) -> HashSet<String> {
    let mut reached: HashSet<_> = cargo_tree(&["--package", package, "--edges", "normal"], "{p}")
        .iter()
        .filter_map(|line| line.split(' ').next())
        .map(str::to_owned)
        .collect();
    reached.remove(package);
    reached
}

/// The lines of `cargo tree`, each once.
fn cargo_tree(arguments: &[&str], format: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--prefix", "none"])
        .args(["--format", format])
        .args(arguments)
        .current_dir(inputs::file(""))
        .output()
        .expect("cargo tree");
    assert!(output.status.success(), "{output:?}");
    let tree = String::from_utf8(output.stdout).expect("names in UTF-8");
    // A star means that what is below was printed before.
    tree.lines()
        .map(|line| line.trim_end_matches(" (*)").to_owned())
        .collect()
}
