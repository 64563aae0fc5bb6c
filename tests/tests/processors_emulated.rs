//! One program per architecture runs on every processor of it: each takes the highest kernels that it has, and these compute what plain
//! Rust computes, in every family of models; members with different processors make one ring.

use std::path::Path;
use std::process::Command;

use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::RingPlan;
use prima_engine::kernels::IsaLevel;
use prima_gguf::GgmlType;
use prima_test_models::MadeUpModel;
use prima_tests::emulated::{
    CORTEX_A72, CORTEX_A76, HASWELL, NEHALEM, NEWEST_ARM, Processor, RASPBERRY_PI_5, natively,
};
use prima_tests::local_ring::smollm2;
use prima_tests::machine_ring::{Host, MachineRing, Node, ThisMachine, plan};
use prima_tests::one_process::OneProcess;
use prima_tests::{Endpoint, http, inputs};
use serde_json::{Value, json};

/// Tests that take long under QEMU. It runs a part of each of the first three, under other names; the last computes nothing that depends on
/// the processor. (`tests/run` says so.)
const SLOW: [&str; 4] = [
    "a_row_has_the_same_bits_in_every_batch",
    "a_row_has_the_same_bits_however_a_prefill_is_cut",
    "products_are_exact_but_for_quantized_activations",
    "formats_without_a_codebook_dequantize_to_their_formulas",
];

#[test]
fn kernels_of_nehalem() {
    kernels(NEHALEM, &["sse4.1"]);
}

#[test]
fn kernels_of_haswell() {
    kernels(HASWELL, &["sse4.1", "avx2"]);
}

#[test]
fn kernels_of_a_raspberry_pi_4() {
    kernels(CORTEX_A72, &["neon"]);
}

#[test]
fn kernels_of_a_raspberry_pi_5() {
    kernels(CORTEX_A76, &["neon", "neon-dotprod"]);
}

#[test]
fn kernels_of_the_newest_arm64() {
    kernels(NEWEST_ARM, &["neon", "neon-dotprod", "neon-i8mm"]);
}

/// The kernels' tests at the highest of `levels`, those that the processor has beside plain Rust. Each lower one is the highest of another
/// processor.
fn kernels(processor: Processor, levels: &[&str]) {
    let printed = run(processor
        .run("kernels")
        .args(["--nocapture", "levels_are_named"]));
    let named = format!("levels: scalar {}\n", levels.join(" "));
    assert!(printed.contains(&named), "{named}: {printed}");

    let mut command = processor.run("kernels");
    command.env("PRIMA_TEST_LEVELS", "highest");
    for slow in SLOW {
        command.args(["--skip", slow]);
    }
    let printed = run(&mut command);
    let products = "products_have_the_same_bits_at_every_level_that_fuses ... ok";
    assert!(printed.contains(products), "{printed}");
}

/// Each level computes what plain Rust does, within a bound; and those that fuse products with sums have the same bits on all processors.
/// This machine stands for x86-64, if it has such levels: emulated, that takes a minute more. (In parts, as each takes long.)
#[test]
fn dense_families_have_the_same_bits_on_every_processor() {
    families("dense_families", 11);
}

#[test]
fn mixtures_have_the_same_bits_on_every_processor() {
    families("mixtures", 9);
}

#[test]
fn options_have_the_same_bits_on_every_processor() {
    families("options", 20);
}

/// The tests whose names begin with `tests` print the digests of so many models.
fn families(tests: &str, count: usize) {
    const PROGRAM: &str = "families_at_every_level";
    let digests = |mut program: Command| {
        let printed = run(program.args([tests, "--nocapture"]));
        let digest = |line: &str| {
            line.split_once(": ")
                .is_some_and(|(_, digest)| digest.len() == 16)
        };
        let lines: Vec<String> = printed
            .lines()
            .filter(|line| digest(line))
            .map(str::to_owned)
            .collect();
        assert!(lines.len() == count, "{printed}");
        lines
    };
    // Both go through all levels that older ones have.
    let x86 = match IsaLevel::detect().fuses() {
        true => natively(PROGRAM),
        false => HASWELL.run(PROGRAM),
    };
    assert_eq!(digests(NEWEST_ARM.run(PROGRAM)), digests(x86));
}

/// What it printed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{}: {printed}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    printed
}

/// How far apart the two best logits must be for a token to be the same on processors that round differently. (Arm64 and AVX2 compute
/// the same bits; this machine may be older.)
const NOISE: f32 = 0.05;
/// The same where weights are floats, as then no activation is rounded to eight bits.
const NOISE_OF_FLOATS: f32 = 0.01;

const PROMPTS: [&str; 4] = [
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "Once upon a time there was a",
    "The opposite of hot is",
];
const TOKENS: usize = 8;

#[test]
fn a_ring_of_x86_and_arm64_answers_as_one_process_does() {
    ring_with(&CORTEX_A76, &smollm2(), &PROMPTS, NOISE);
}

#[test]
fn qwen3moe_on_x86_and_arm64_answers_as_one_process_does() {
    mixture_ring("qwen3moe");
}

#[test]
fn gpt_oss_on_x86_and_arm64_answers_as_one_process_does() {
    mixture_ring("gpt-oss");
}

#[test]
fn deepseek2_on_x86_and_arm64_answers_as_one_process_does() {
    mixture_ring("deepseek2");
}

/// Of floats: were activations rounded, an older processor might choose other experts. Every character is a token there, and a space is none.
fn mixture_ring(family: &'static str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mixture.gguf");
    let model = MadeUpModel {
        formats: vec![GgmlType::F16],
        ..MadeUpModel::of(family)
    };
    model.write_for_ring(&path);
    let prompts = ["Once", "Paris", "12345", "hot", "x+y=", "(a,b)"];
    ring_with(&CORTEX_A76, &path, &prompts, NOISE_OF_FLOATS);
}

#[test]
fn a_raspberry_pi_5_has_large_pages() {
    let printed = run(RASPBERRY_PI_5
        .run("prima-node-agent")
        .args(["inspect", "--cpu"]));
    assert!(printed.contains("\npages      16 KiB each"), "{printed}");
    assert!(printed.contains("\nkernels    neon-dotprod:"), "{printed}");
    ring_with(&RASPBERRY_PI_5, &smollm2(), &PROMPTS[..2], NOISE);
}

/// Pages of its system are larger than the blocks in which weights are read. (Not those of experts: what the page cache has is asked with mincore,
/// for which QEMU 7.2 writes a byte for each of this machine's smaller pages, more than there is room for.)
#[test]
fn weights_stream_on_a_raspberry_pi_5() {
    let printed = run(&mut RASPBERRY_PI_5.run("streamed_weights"));
    assert!(
        printed.contains("every_budget_gives_the_same_bits ... ok"),
        "{printed}"
    );
}

/// Its planner finds as good a plan as this machine's does; the solver rounds differently there.
#[test]
fn a_raspberry_pi_5_runs_the_operators_program() {
    let version = format!("prima {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(run(CORTEX_A76.run("prima").arg("--version")), version);

    let sample = |name: &str| inputs::file(&format!("operator/samples/{name}.yaml"));
    let token_milliseconds = |mut prima: Command| {
        prima
            .args(["plan", "--all", "-o", "json", "--model"])
            .arg(sample("models/qwen3-8b"))
            .arg("--profiles")
            .arg(sample("machines/pc-and-two-pis"));
        let planned: Value = serde_json::from_str(&run(&mut prima)).unwrap();
        let plan: RingPlan = serde_json::from_value(planned["ringPlan"].clone()).unwrap();
        plan.spec.validate().unwrap();
        assert_eq!(plan.spec.members.len(), 3, "{planned:#}");
        planned["report"]["tpotMilliseconds"].as_f64().unwrap()
    };
    let here = token_milliseconds(Command::new(inputs::program("prima")));
    let there = token_milliseconds(CORTEX_A76.run("prima"));
    assert!((there / here - 1.0).abs() < 0.02, "{there} and {here} ms");
}

/// This machine and `other` answer as one process does, where the choice of tokens is beyond `noise`; for half of the prompts at least.
fn ring_with(other: &'static Processor, model: &Path, prompts: &[&str], noise: f32) {
    let engine = OneProcess::open(model, 2).unwrap();
    let yaml = std::fs::read_to_string(inputs::file("tests/assets/machine.yaml"));
    let profile = NodeProfile::from_yaml("machine", &yaml.unwrap()).unwrap();
    let planned = plan(model, vec![profile.clone(), profile], &["--rounds", "2"]);
    let members = planned.plan.spec.members.iter();
    println!(
        "{:#?}",
        members.map(|member| &member.windows).collect::<Vec<_>>()
    );
    let node = |machine: &'static dyn Host| Node {
        machine,
        model: model.to_owned(),
    };
    let nodes = [node(&ThisMachine), node(other)];
    let ring = MachineRing::start(planned.plan, &nodes, &[]);

    let mut decided = 0;
    for prompt in prompts {
        let (expected, gap) = greedy(&engine, prompt);
        let body = json!({ "model": ring.model(), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0 });
        let answer = http::post(ring.address(), "/v1/completions", &body).unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        let text = answer.json()["choices"][0]["text"]
            .as_str()
            .unwrap()
            .to_owned();
        println!("{prompt:?}: {text:?}, smallest gap {gap}");
        if gap > noise {
            decided += 1;
            assert_eq!(text, expected, "{prompt:?}, smallest gap {gap}");
        }
    }
    assert!(
        2 * decided >= prompts.len(),
        "only {decided} prompts are decided beyond the noise"
    );
}

/// The greedy continuation, at most as far as a token that ends it, and the smallest gap of the two best logits on the way.
fn greedy(engine: &OneProcess, prompt: &str) -> (String, f32) {
    let mut tokens = engine.tokenizer.encode(prompt, true, false).unwrap();
    let mut kv = engine.sequence(tokens.len() + TOKENS);
    let mut answer = Vec::new();
    let mut smallest = f32::INFINITY;
    while answer.len() < TOKENS {
        let logits = engine.last_logits(&tokens, &mut kv).unwrap();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        smallest = smallest.min(logits[order[0]] - logits[order[1]]);
        let best = order[0] as u32;
        if engine.tokenizer.is_end_of_generation(best) {
            break;
        }
        tokens = vec![best];
        answer.push(best);
    }
    (engine.tokenizer.decode(&answer), smallest)
}
