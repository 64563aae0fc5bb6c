//! Which models three typical households can run, as README tells it: planned from the samples, so that the table is what the planner says.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use std::fmt::Write;
use std::path::{Path, PathBuf};

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_halda::check::check;
use prima_halda::{Options, PlanError, PlanReport, PlanningInput, plan, plan_ring};

const MODELS: [(&str, &str); 6] = [
    ("qwen3-8b", "Qwen3 8B"),
    ("gpt-oss-20b", "gpt-oss 20B"),
    ("qwen3-30b-a3b", "Qwen3 30B-A3B"),
    ("qwen3-32b", "Qwen3 32B"),
    ("llama-3.3-70b", "Llama 3.3 70B"),
    ("gpt-oss-120b", "gpt-oss 120B"),
];
const HOUSEHOLDS: [&str; 3] = ["pc-and-two-pis", "four-office-pcs", "gaming-pc-and-laptop"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sample(path: &str) -> String {
    std::fs::read_to_string(root().join("operator/samples").join(path)).unwrap()
}

#[test]
fn readme_says_what_the_planner_says() {
    let households = HOUSEHOLDS.map(|name| {
        let text = sample(&format!("machines/{name}.yaml"));
        NodeProfile::all_from_yaml(name, &text).unwrap()
    });
    let mut table = String::new();
    for (name, title) in MODELS {
        let text = sample(&format!("models/{name}.yaml"));
        let model = ModelProfile::from_yaml(name, &text).unwrap();
        let _ = write!(
            table,
            "| {title} | {:.0} GB",
            model.spec.size_bytes as f64 / 1e9
        );
        for nodes in &households {
            let _ = write!(table, " | {}", cell(&model, nodes));
        }
        table += " |\n";
    }
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    assert!(
        readme.contains(&table),
        "README.md lacks this, which is planned now:\n{table}"
    );
}

/// Until some 200 positions go together, the processor computes them sooner than all experts of a layer get to the GPU.
#[test]
fn experts_are_copied_for_large_chunks() {
    let machines = sample("machines/gaming-pc-and-laptop.yaml");
    let nodes = NodeProfile::all_from_yaml("machines", &machines).unwrap();
    let (desk, options) = (&nodes[..1], Options::default());
    let model = ModelProfile::from_yaml("model", &sample("models/qwen3-30b-a3b.yaml")).unwrap();
    let usual = PlanningInput::new(&model, desk, &options).unwrap();
    let usual = plan(&usual).unwrap().report;
    assert_eq!(usual.members[0].gpu_from_rows, None);
    let larger = plan_ring(&model, desk, &options).unwrap().report;
    assert_eq!(larger.chunk_positions, 512);
    let from_rows = larger.members[0].gpu_from_rows.unwrap();
    assert!((129..256).contains(&from_rows), "{from_rows}");
    let [before, after] = [usual, larger].map(|report| report.ttft_milliseconds);
    assert!(after < 0.6 * before, "{after} {before}");
}

/// Tokens per second, when the first comes, and what does it.
fn cell(model: &ModelProfile, nodes: &[NodeProfile]) -> String {
    let options = Options::default();
    let plan = match plan_ring(model, nodes, &options) {
        Ok(plan) => plan,
        Err(PlanError::Infeasible(_)) => return "no room".to_owned(),
        Err(error) => panic!("{error}"),
    };
    let findings = check(&plan, model, nodes, &options);
    assert!(findings.is_empty(), "{findings:?}");
    let report = &plan.report;
    let (rate, first) = (
        1e3 / report.tpot_milliseconds,
        report.ttft_milliseconds / 1e3,
    );
    let digits = |number: f64, whole: f64| usize::from(number < whole);
    format!(
        "**{rate:.0$}**, {first:.1$} s, {2}",
        digits(rate, 10.0),
        digits(first, 1.0),
        machines(report, nodes)
    )
}

fn machines(report: &PlanReport, nodes: &[NodeProfile]) -> String {
    let mut said = format!("{} of {}", report.members.len(), nodes.len());
    let mut members = report.members.iter();
    if members.any(|member| member.gpu_layers > 0 || member.gpu_from_rows.is_some()) {
        said += ", GPU";
    }
    if report
        .members
        .iter()
        .any(|member| member.read_bytes_per_token > 0)
    {
        said += ", disk";
    }
    said
}
