//! Rings whose members run layers on a GPU, which is Vulkan on the processor here (lavapipe): real processes, the programs as they ship.

use std::fs;
use std::path::Path;
use std::process::Command;

use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::machine_ring::{Host, MachineRing, Node, ThisMachine, plan, usual_profile};
use prima_tests::patience::wait_until;
use prima_tests::{Endpoint, http, inputs};
use serde_json::json;

/// This machine, with Vulkan on its processor as a GPU.
struct WithGpu;

impl Host for WithGpu {
    fn program(&self, name: &str) -> Command {
        inputs::need("vulkan");
        let mut command = ThisMachine.program(name);
        command.env("PRIMA_GPU", "software");
        command
    }
}

const PROMPT: &str = "The capital of France is";
/// Tokens of an answer: few, since rounding may turn what is not clear.
const TOKENS: usize = 3;

/// Whether a process has lavapipe in it.
fn has_gpu(pid: u32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process of ours");
    maps.contains("libvulkan_lvp")
}

fn node(machine: &dyn Host) -> Node<'_> {
    Node {
        machine,
        model: smollm2(),
    }
}

/// The most likely continuation of `prompt`.
fn complete(ring: &impl Endpoint, prompt: &str) -> String {
    let body =
        json!({"model": ring.model(), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0});
    let answer = http::post(ring.address(), "/v1/completions", &body).expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.body);
    let text = answer.json().pointer("/choices/0/text").cloned();
    text.expect("a text").as_str().expect("a string").to_owned()
}

#[test]
fn members_with_and_without_gpus_answer_like_processors() {
    let profiles = vec![usual_profile(), usual_profile()];
    let planned = plan(&smollm2(), profiles, &["--context", "512", "--rounds", "2"]);
    let nodes = [node(&WithGpu), node(&ThisMachine)];
    let ring = MachineRing::start(planned.plan.clone(), &nodes, &[]);
    let expected = complete(&ring, PROMPT);
    assert!(ring.pids().iter().all(|&pid| !has_gpu(pid)));
    drop(ring);

    let mut mixed = planned.plan;
    let windows = &mut mixed.spec.members[0].windows;
    assert_eq!(windows.len(), 2);
    (windows[0].gpu_layers, windows[1].gpu_layers) = (1, 2);
    mixed.spec.members[0].output_head_on_gpu = true;
    let ring = MachineRing::start(mixed, &nodes, &[]);
    let pids = ring.pids();
    assert!(has_gpu(pids[0]) && !has_gpu(pids[1]));
    assert_eq!(complete(&ring, PROMPT), expected);
    // A conversation goes on where it stopped, over a prompt of two blocks of positions.
    let long = format!(
        "{} {PROMPT}",
        "One two three four five six seven. ".repeat(9)
    );
    let first = complete(&ring, &long);
    assert_eq!(complete(&ring, &long), first);
}

#[test]
fn prompts_go_to_the_gpu_through_layers_of_the_processor() {
    let profiles = vec![usual_profile(), usual_profile()];
    let planned = plan(&smollm2(), profiles, &["--context", "512"]);
    let nodes = [node(&WithGpu), node(&ThisMachine)];
    let ring = MachineRing::start(planned.plan.clone(), &nodes, &[]);
    let expected = complete(&ring, PROMPT);
    assert_eq!(copied_bytes(&ring), [0.0, 0.0]);
    drop(ring);

    let mut copying = planned.plan;
    let member = &mut copying.spec.members[0];
    member.windows[0].gpu_layers = 1;
    member.gpu_from_rows = Some(2);
    let ring = MachineRing::start(copying, &nodes, &[]);
    assert_eq!(complete(&ring, PROMPT), expected);
    // Rank 0 tells of its members a little later.
    wait_until("weights were copied for a prompt", || {
        copied_bytes(&ring)[0] > 0.0
    });
    let first = copied_bytes(&ring)[0];
    // A prompt of several chunks, which see those before.
    let long = format!(
        "{} {PROMPT}",
        "One two three four five six seven. ".repeat(30)
    );
    let answer = complete(&ring, &long);
    assert!(answer.contains("Paris"), "{answer}");
    wait_until("weights were copied for each chunk", || {
        copied_bytes(&ring)[0] > 2.0 * first
    });
    assert_eq!(copied_bytes(&ring)[1], 0.0, "of the member without a GPU");
}

/// Of each member.
fn copied_bytes(ring: &impl Endpoint) -> Vec<f64> {
    let metrics = http::get(ring.address(), "/metrics")
        .expect("an answer")
        .body;
    let lines = metrics.lines();
    let own = lines.filter(|line| line.starts_with("prima_member_gpu_copied_bytes_total"));
    let values = own.map(|line| line.rsplit(' ').next().and_then(|value| value.parse().ok()));
    values.map(|value| value.expect("a number")).collect()
}

/// The usual machine, with a GPU that is said to be fast, and has memory for some layers.
fn machine_with_gpu(folder: &Path) -> std::path::PathBuf {
    let mut profile: NodeProfile = usual_profile();
    let status = profile.status.as_mut().expect("a status");
    let mut throughput = status.cpu.throughput.clone();
    for one in &mut throughput {
        one.decode_bytes_per_second *= 10;
        one.prefill_flop_per_second *= 10;
    }
    let gpu = json!({
        "name": "fast", "backend": "Vulkan",
        "measured": {
            "unifiedMemory": false, "totalBytes": 40 << 20, "availableBytes": 40 << 20,
            "readBytesPerSecond": 200_000_000_000_i64, "kvAppendBytesPerSecond": 200_000_000_000_i64,
            "toGpuBytesPerSecond": 10_000_000_000_i64, "fromGpuBytesPerSecond": 10_000_000_000_i64,
            "copyOverheadNanoseconds": 10_000, "layerOverheadNanoseconds": 10_000,
            "throughput": throughput,
        },
    });
    status.gpus = vec![serde_json::from_value(gpu).expect("a GPU")];
    let file = folder.join("machine.yaml");
    fs::write(&file, serde_saphyr::to_string(&profile).expect("YAML")).expect("write a profile");
    file
}

#[test]
fn prima_run_plans_layers_on_a_gpu_and_answers() {
    let folder = tempfile::tempdir().unwrap();
    let profile = machine_with_gpu(folder.path());
    let ring = LocalRing::builder()
        .model(&smollm2())
        .members(1)
        .arg("--context")
        .arg("512")
        .arg("--profile")
        .arg(&profile)
        .env("PRIMA_GPU", "software")
        .start();
    assert!(has_gpu(ring.members()[0].pid));
    let answer = complete(&ring, PROMPT);
    assert!(answer.contains("Paris"), "{answer}");
    ring.stop();

    let ended = LocalRing::builder()
        .model(&smollm2())
        .members(1)
        .arg("--profile")
        .arg(&profile)
        .env("PRIMA_GPU", "none")
        .run_to_end();
    assert!(!ended.status.success(), "{ended:#?}");
    for part in ["no GPU can be used", "PRIMA_GPU is `none`"] {
        assert!(ended.stderr.contains(part), "no {part:?} in {ended:#?}");
    }
}

/// Whether it succeeded, and what it wrote.
fn inspect_gpu(variable: &str, value: &str) -> (bool, String) {
    inputs::need("vulkan");
    let mut command = Command::new(inputs::program("prima-node-agent"));
    command.args(["inspect", "--gpu"]).env(variable, value);
    let output = command.output().expect("the program");
    let written = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8(written).expect("text"),
    )
}

#[test]
fn inspect_says_what_is_used_and_what_is_missing() {
    for (variable, value, expected) in [
        (
            "PRIMA_GPU",
            "software",
            &["llvmpipe", "layers run on it"][..],
        ),
        ("PRIMA_GPU", "none", &["llvmpipe", "not used"]),
        (
            "VK_DRIVER_FILES",
            "/nowhere.json",
            &[
                "no GPU can be used",
                "finds no driver",
                "mesa-vulkan-drivers",
            ],
        ),
    ] {
        let (succeeded, text) = inspect_gpu(variable, value);
        assert!(succeeded, "{text}");
        for part in expected {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }
    let (succeeded, text) = inspect_gpu("PRIMA_GPU", "fast");
    assert!(
        !succeeded && text.contains("PRIMA_GPU is \"fast\", expected"),
        "{text}"
    );
}
