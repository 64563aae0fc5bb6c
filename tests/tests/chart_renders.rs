//! What the chart renders, for each scenario of `charts/prima/ci/`, compared with `tests/chart/golden/`, and what it refuses.
//! `UPDATE_GOLDEN=1` writes these files anew; review them as one reviews code.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use prima_tests::inputs;
use prima_tests::programs::program;
use serde_json::Value;

#[test]
fn every_scenario_renders_as_reviewed() {
    let golden = inputs::file("tests/chart/golden");
    for scenario in scenarios() {
        // The definitions are files of the chart already.
        let rendered = template(&["--values", text(&scenario), "--set", "crds.install=false"]);
        let rendered = rendered.unwrap_or_else(|error| panic!("{}: {error}", scenario.display()));
        let file = golden
            .join(scenario.file_name().expect("a file"))
            .with_extension("golden.yaml");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&file, &rendered)
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
        let expected = read(&file);
        let line = rendered
            .lines()
            .zip(expected.lines())
            .position(|(a, b)| a != b);
        assert!(
            rendered == expected,
            "{} does not render as {} says, from line {}: if that is meant, run this test with UPDATE_GOLDEN=1",
            scenario.display(),
            file.display(),
            line.unwrap_or_else(|| rendered.lines().count().min(expected.lines().count())) + 1,
        );
    }
}

#[test]
fn every_scenario_passes_lint() {
    for scenario in scenarios() {
        let chart = chart();
        helm(&[
            "lint",
            "--strict",
            text(&chart),
            "--values",
            text(&scenario),
        ])
        .unwrap_or_else(|error| panic!("{}: {error}", scenario.display()));
    }
}

#[test]
fn definitions_are_installed_as_generated_and_kept() {
    for file in files_of(&chart().join("files/crds")) {
        let generated = read(&file);
        let kept = template(&[]).expect("renders");
        let name = file.file_stem().expect("a name").to_string_lossy();
        let annotated = generated.replacen(
            "\nmetadata:\n",
            "\nmetadata:\n  annotations:\n    helm.sh/resource-policy: keep\n",
            1,
        );
        assert!(
            kept.contains(annotated.trim()),
            "{name} is not installed as generated"
        );
        let loose = template(&["--set", "crds.keep=false"]).expect("renders");
        assert!(
            loose.contains(generated.trim()),
            "{name} is not installed as generated"
        );
    }
    let none = template(&["--set", "crds.install=false"]).expect("renders");
    assert!(!none.contains("kind: CustomResourceDefinition"));
}

#[test]
fn values_that_mean_nothing_are_refused_by_name() {
    for (set, named) in [
        ("operator.replica=2", "'replica'"),
        ("operator.replicas=two", "/operator/replicas"),
        ("agent.dataDir=var/lib/prima", "/agent/dataDir"),
        ("agent.modelDirs={/}", "/agent/modelDirs/0"),
        ("agent.image.digest=latest", "/agent/image/digest"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        (
            "ingress.models[0].name=qwen2.5,ingress.models[0].host=a",
            "/ingress/models/0/name",
        ),
        ("ingress.models[0].name=qwen", "'host'"),
        ("httpRoute.enabled=true", "/httpRoute/parentRefs"),
        ("agent.createNamespace=true", "agent.namespace: name it"),
    ] {
        let refused = template(&["--set", set]).expect_err(set);
        assert!(refused.contains(named), "{set}: {refused}");
    }
}

#[test]
fn the_readme_lists_every_value() {
    let readme = read(&chart().join("README.md"));
    let values: Value = serde_saphyr::from_str(&read(&chart().join("values.yaml"))).expect("YAML");
    let mut paths = Vec::new();
    leaves("", &values, &mut paths);
    assert!(paths.len() > 50, "the walk finds values: {paths:?}");
    for path in paths {
        // A value that is handed on as it is, such as resources, is listed as a whole.
        let mut ancestors = path
            .match_indices('.')
            .map(|(at, _)| &path[..at])
            .chain([&*path]);
        assert!(
            ancestors.any(|path| readme.contains(&format!("| `{path}` |"))),
            "README.md of the chart does not list {path}"
        );
    }
}

fn leaves(path: &str, value: &Value, paths: &mut Vec<String>) {
    match value.as_object().filter(|fields| !fields.is_empty()) {
        Some(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                leaves(&path, value, paths);
            }
        }
        None => paths.push(path.into()),
    }
}

fn template(args: &[&str]) -> Result<String, String> {
    let chart = chart();
    helm(
        &[
            &["template", "prima", text(&chart), "--namespace", "prima"],
            args,
        ]
        .concat(),
    )
}

fn helm(args: &[&str]) -> Result<String, String> {
    let output = Command::new(program("helm"))
        .args(args)
        .output()
        .expect("start helm");
    let written = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(written(&output.stdout)),
        false => Err(written(&output.stdout) + &written(&output.stderr)),
    }
}

fn scenarios() -> Vec<PathBuf> {
    files_of(&chart().join("ci"))
}

fn files_of(folder: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files
}

fn chart() -> PathBuf {
    inputs::file("charts/prima")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}
