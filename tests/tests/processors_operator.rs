//! The operator's program on an emulated Raspberry Pi 5.

use std::process::Command;

use prima_crds::v1alpha1::ring_plan::RingPlan;
use prima_tests::emulated::{CORTEX_A76, output};
use prima_tests::inputs;
use serde_json::Value;

/// Its planner finds as good a plan as this machine's does; the solver rounds differently there. Each number of rounds is a program of its own, which
/// it solves or gives up after two seconds; emulated beside other tests it might give up some of many. So there is one.
#[test]
fn a_raspberry_pi_5_runs_the_operators_program() {
    let version = format!("prima {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(output(CORTEX_A76.run("prima").arg("--version")), version);

    let sample = |name: &str| inputs::file(&format!("operator/samples/{name}.yaml"));
    let token_milliseconds = |mut prima: Command| {
        prima
            .args(["plan", "--all", "--rounds", "1", "-o", "json", "--model"])
            .arg(sample("models/qwen3-8b"))
            .arg("--profiles")
            .arg(sample("machines/pc-and-two-pis"));
        let planned: Value = serde_json::from_str(&output(&mut prima)).unwrap();
        let plan: RingPlan = serde_json::from_value(planned["ringPlan"].clone()).unwrap();
        plan.spec.validate().unwrap();
        assert_eq!(plan.spec.members.len(), 3, "{planned:#}");
        planned["report"]["tpotMilliseconds"].as_f64().unwrap()
    };
    let here = token_milliseconds(Command::new(inputs::program("prima")));
    let there = token_milliseconds(CORTEX_A76.run("prima"));
    assert!((there / here - 1.0).abs() < 0.02, "{there} and {here} ms");
}
