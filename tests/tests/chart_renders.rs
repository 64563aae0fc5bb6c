//! What the chart renders, and what it refuses. `tests/chart/golden.txt` shows the default rendering whole, and for each scenario of
//! `charts/prima/ci/` what differs from it. `UPDATE_GOLDEN=1` writes it again; review it as one reviews code.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use prima_tests::chart::{Objects, differences, objects, shown};
use prima_tests::inputs;
use prima_tests::programs::program;
use serde_json::Value;

#[test]
fn every_scenario_renders_as_reviewed() {
    let default = rendered(&[]);
    let mut all = format!("# default\n{}", shown(&default));
    for scenario in scenarios() {
        // Another name changes every object; it has a test of its own.
        let args = ["--values", text(&scenario), "--set", "fullnameOverride="];
        let name = scenario.file_stem().expect("a name").to_string_lossy();
        let differences = differences(&default, &rendered(&args));
        all += &format!("\n# {name}\n{differences}");
    }
    let file = inputs::file("tests/chart").join("golden.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&file, &all).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
    let expected = read(&file);
    let differs = all.lines().zip(expected.lines()).position(|(a, b)| a != b);
    let line = differs.unwrap_or_else(|| all.lines().count().min(expected.lines().count()));
    assert!(
        all == expected,
        "it differs from {} in line {}, which would be\n{}\nIf that is meant, run this test with UPDATE_GOLDEN=1",
        file.display(),
        line + 1,
        all.lines().nth(line).unwrap_or_default()
    );
}

#[test]
fn every_object_bears_the_recommended_labels() {
    for scenario in scenarios() {
        let args = ["--values", text(&scenario)];
        for (key, object) in rendered(&args) {
            let labels = &object["metadata"]["labels"];
            for (label, value) in [
                ("helm.sh/chart", "prima-0.1.0"),
                ("app.kubernetes.io/name", "prima"),
                ("app.kubernetes.io/instance", "prima"),
                ("app.kubernetes.io/version", "0.1.0"),
                ("app.kubernetes.io/managed-by", "Helm"),
            ] {
                assert_eq!(labels[label], value, "{key}: {label}");
            }
            assert!(
                labels["app.kubernetes.io/component"].is_string(),
                "{key}: {labels}"
            );
        }
    }
}

#[test]
fn another_name_is_the_name_of_every_object_and_reference() {
    let default = template(&["--set", "crds.install=false"]).expect("renders");
    let named = template(&[
        "--set",
        "crds.install=false",
        "--set",
        "fullnameOverride=home",
    ])
    .expect("renders");
    assert_ne!(default, named);
    // Names begin with the release's; it is also the release, the namespace, the chart, and a part of images and folders.
    let renamed: Vec<_> = default
        .lines()
        .zip(named.lines())
        .filter(|(a, b)| a != b)
        .collect();
    for (before, after) in &renamed {
        assert_eq!(&before.replacen("prima-", "home-", 1), after);
    }
    let named = objects(&named);
    assert_eq!(named.len(), objects(&default).len());
    for (key, object) in &named {
        let name = object["metadata"]["name"].as_str().expect("a name");
        assert!(name.starts_with("home"), "{key}");
        assert!(
            !object["roleRef"]["name"]
                .as_str()
                .is_some_and(|role| role.starts_with("prima"))
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

/// Where pods have IPv6 addresses, the kubelet asks there.
#[test]
fn pods_know_their_address_and_none_listens_at_ipv4_only() {
    for scenario in scenarios() {
        let args = ["--values", text(&scenario)];
        for (key, object) in rendered(&args) {
            assert!(!object.to_string().contains("0.0.0.0"), "{key}");
            let containers = object["spec"]["template"]["spec"]["containers"].as_array();
            for container in containers.into_iter().flatten() {
                let variables = container["env"].as_array().into_iter().flatten();
                let mut of_pod = variables.filter(|variable| variable["name"] == "POD_IP");
                let address = of_pod.next().expect("the pod's address");
                let field = &address["valueFrom"]["fieldRef"]["fieldPath"];
                assert_eq!(field, "status.podIP", "{key}");
            }
        }
    }
}

#[test]
fn values_that_mean_nothing_are_refused_by_name() {
    for (set, named) in [
        ("operator.replica=2", "'replica'"),
        ("operator.replicas=two", "/operator/replicas"),
        ("agent.dataDir=var/lib/prima", "/agent/dataDir"),
        ("agent.modelDirs={/}", "/agent/modelDirs/0"),
        ("agent.image.digest=latest", "/agent/image/digest"),
        ("agent.gpus.dri.count=0", "/agent/gpus/dri/count"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("allowedServers={http://nas:8080}", "/allowedServers/0"),
        ("allowedServers={nas:8080}", "/allowedServers/0"),
        (
            "ingress.models[0].name=qwen2.5,ingress.models[0].host=a",
            "/ingress/models/0/name",
        ),
        ("ingress.models[0].name=qwen", "'host'"),
        ("httpRoute.enabled=true", "/httpRoute/parentRefs"),
        ("agent.createNamespace=true", "agent.namespace: name it"),
        (
            "agent.claimNodeLabel.key=kubernetes.io/hostname",
            "/agent/claimNodeLabel/value",
        ),
        (
            "agent.updateStrategy.rollingUpdate.maxSurge=1",
            "/agent/updateStrategy/rollingUpdate/maxSurge",
        ),
    ] {
        let refused = template(&["--set", set]).expect_err(set);
        assert!(refused.contains(named), "{set}: {refused}");
    }
}

/// As with `--reuse-values` from a chart that had no such label.
#[test]
fn claims_are_mounted_by_all_agents_without_a_label() {
    let claims = ["--set", "agent.persistentVolumeClaims={models}"];
    let without = ["--set", "agent.claimNodeLabel=null"];
    let by_default = template(&claims).expect("renders");
    let without = template(&[claims, without].concat()).expect("renders");
    assert_eq!(without, by_default);
    assert!(by_default.contains("claimName: models"));
    assert!(!by_default.contains("-claims\n"));
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

/// What helm renders, without the definitions, which are files of the chart already. Contents of the chart's other files are replaced by
/// their names.
fn rendered(args: &[&str]) -> Objects {
    let yaml = template(&[args, &["--set", "crds.install=false"]].concat());
    let mut objects = objects(&yaml.unwrap_or_else(|error| panic!("{args:?}: {error}")));
    let files: Vec<_> = files_of(&chart().join("files"))
        .into_iter()
        .filter(|file| file.is_file())
        .map(|file| (read(&file), file))
        .collect();
    let data = objects
        .values_mut()
        .filter_map(|object| object.get_mut("data")?.as_object_mut());
    for value in data.flat_map(|data| data.values_mut()) {
        let same = |(content, _): &&(String, PathBuf)| value == content.trim_end();
        if let Some((_, file)) = files.iter().find(same) {
            *value = format!("the file {}", file.file_name().expect("a name").display()).into();
        }
    }
    objects
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
