//! Rings whose members run layers on a GPU, which is Vulkan on the processor here (lavapipe): real processes, the programs as they ship.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::PlannedGpu;
use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::machine_ring::{
    Host, MachineRing, Node, ThisMachine, cut, draft, plan, usual_profile,
};
use prima_tests::patience::wait_until;
use prima_tests::software_gpu::{self, PROMPT, fast_gpu};
use prima_tests::{Endpoint, http, inputs};
use serde_json::{Value, json};

/// This machine, with Vulkan on its processor as a GPU.
struct WithGpu;

impl Host for WithGpu {
    fn program(&self, name: &str) -> Command {
        inputs::need("vulkan");
        let mut command = ThisMachine.program(name);
        command.env(software_gpu::GPU, software_gpu::SOFTWARE);
        command
    }
}

/// The same with two such GPUs, which have one name.
struct WithTwoGpus {
    drivers: OsString,
}

impl Host for WithTwoGpus {
    fn program(&self, name: &str) -> Command {
        let mut command = WithGpu.program(name);
        command.env(software_gpu::DRIVERS, &self.drivers);
        command
    }
}

fn node(machine: &dyn Host) -> Node<'_> {
    Node {
        machine,
        model: smollm2(),
    }
}

/// As [`software_gpu::complete`].
fn complete(ring: &impl Endpoint, prompt: &str) -> String {
    let answer = software_gpu::complete(ring.address(), ring.model(), prompt);
    answer.unwrap_or_else(|error| panic!("{error}"))
}

/// So many tokens of it.
fn complete_with(ring: &impl Endpoint, prompt: &str, tokens: usize) -> String {
    let body =
        json!({"model": ring.model(), "prompt": prompt, "max_tokens": tokens, "temperature": 0});
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
    assert!(ring.pids().iter().all(|&pid| !software_gpu::is_in(pid)));
    drop(ring);

    let mut mixed = planned.plan;
    let windows = &mut mixed.spec.members[0].windows;
    assert_eq!(windows.len(), 2);
    (windows[0].gpu_layers, windows[1].gpu_layers) = (1, 2);
    mixed.spec.members[0].output_head_on_gpu = true;
    let ring = MachineRing::start(mixed, &nodes, &[]);
    let pids = ring.pids();
    assert!(software_gpu::is_in(pids[0]) && !software_gpu::is_in(pids[1]));
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
fn layers_of_a_member_are_split_among_its_two_gpus() {
    // Of each window. Of the first GPU's memory, the plan leaves room for two or three: their matrices have 2.2 MB each.
    const LAYERS: i32 = 4;
    const ROOM: i64 = 8 << 20;
    let folder = tempfile::tempdir().unwrap();
    let machine = WithTwoGpus {
        drivers: software_gpu::listed_twice(folder.path()),
    };
    let nodes = [node(&machine)];
    let mut split = cut(&smollm2(), 512, 1, 2);
    let ring = MachineRing::start(split.clone(), &nodes, &[]);
    let expected = complete(&ring, PROMPT);
    assert!(!software_gpu::is_in(ring.pids()[0]));
    drop(ring);

    let name = software_gpu::name();
    let gpu = |beside_layers_bytes| PlannedGpu {
        name: name.clone(),
        beside_layers_bytes,
    };
    let member = &mut split.spec.members[0];
    member.gpus = vec![gpu(software_gpu::memory_bytes() - ROOM), gpu(0)];
    for window in &mut member.windows {
        window.gpu_layers = LAYERS;
    }
    let ring = MachineRing::start(split, &nodes, &[]);
    wait_until("the member says which GPU has how many layers", || {
        layers_of_gpus(&ring).len() == 2
    });
    let taken = layers_of_gpus(&ring);
    assert!((1..LAYERS).contains(&taken[0]), "{taken:?}");
    assert_eq!(taken[0] + taken[1], 2 * LAYERS);
    assert_eq!(complete(&ring, PROMPT), expected);
    // It goes on where it stopped, with keys and values on both.
    assert_eq!(complete(&ring, PROMPT), expected);
}

/// How many layers each GPU of the only member has, as it says.
fn layers_of_gpus(ring: &MachineRing) -> Vec<i32> {
    let told = ring.errors().concat();
    let lines = told.lines().filter(|line| line.contains("takes layers"));
    let counts = lines.filter_map(|line| line.rsplit("layers=").next()?.trim().parse().ok());
    counts.collect()
}

#[test]
fn a_client_that_hangs_up_leaves_nothing_on_gpus() {
    let profiles = vec![usual_profile(), usual_profile()];
    let mut plan = plan(&smollm2(), profiles, &["--context", "512"]).plan;
    for member in &mut plan.spec.members {
        member.windows[0].gpu_layers = 2;
    }
    let ring = MachineRing::start(plan, &[node(&WithGpu), node(&WithGpu)], &[]);
    assert!(ring.pids().iter().all(|&pid| software_gpu::is_in(pid)));
    let expected = complete(&ring, PROMPT);
    let body = json!({
        "model": ring.model(), "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": true,
    });
    let mut answer = http::post_streaming(ring.address(), "/v1/completions", &body).unwrap();
    answer.next().expect("an event").unwrap();
    drop(answer);
    wait_until("only what is kept is left", || {
        let told = http::get(ring.address(), "/ring").unwrap().json();
        let number = |path: &str| told.pointer(path).and_then(Value::as_u64).expect(path);
        number("/ring/running_requests") == 0
            && number("/ring/kv/used_positions") == number("/ring/kv/kept_positions")
    });
    assert_eq!(complete(&ring, PROMPT), expected);
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

/// The ring's layers are on the processor, so whatever is guessed, its answer is the same to the bit.
#[test]
fn a_draft_model_on_a_gpu_changes_no_answer() {
    let planned = plan(&smollm2(), vec![usual_profile()], &["--context", "512"]);
    let nodes = [node(&WithGpu)];
    let answer = |ring: &MachineRing| complete_with(ring, PROMPT, 40);
    let ring = MachineRing::start(planned.plan.clone(), &nodes, &["--no-speculation"]);
    let expected = answer(&ring);
    assert!(!software_gpu::is_in(ring.pids()[0]));
    drop(ring);

    let mut drafting = planned.plan;
    drafting.spec.draft = Some(draft(&smollm2()));
    drafting.spec.members[0].draft_on_gpu = true;
    let ring = MachineRing::start(drafting, &nodes, &[]);
    assert!(software_gpu::is_in(ring.pids()[0]));
    assert_eq!(answer(&ring), expected);
    // It goes on where it stopped, with what the draft model has taken in.
    assert_eq!(answer(&ring), expected);
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
    status.gpus = vec![fast_gpu("fast", &status.cpu)];
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
        .env(software_gpu::GPU, software_gpu::SOFTWARE)
        .start();
    assert!(software_gpu::is_in(ring.members()[0].pid));
    let answer = complete(&ring, PROMPT);
    assert!(answer.contains("Paris"), "{answer}");
    ring.stop();

    let ended = LocalRing::builder()
        .model(&smollm2())
        .members(1)
        .arg("--profile")
        .arg(&profile)
        .env(software_gpu::GPU, "none")
        .run_to_end();
    assert!(!ended.status.success(), "{ended:#?}");
    // By this line, agents of clusters know.
    let said = "m0 | without its GPU: no GPU can be used: PRIMA_GPU is `none`";
    assert!(ended.stderr.contains(said), "{ended:#?}");
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
            software_gpu::DRIVERS,
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
