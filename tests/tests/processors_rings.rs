//! Members with different processors make one ring: one here, and one on an emulated Raspberry Pi 5.

use std::path::Path;

use prima_gguf::GgmlType;
use prima_test_models::MadeUpModel;
use prima_tests::emulated::{CORTEX_A76, Processor, RASPBERRY_PI_5, output};
use prima_tests::local_ring::smollm2;
use prima_tests::machine_ring::{Host, MachineRing, Node, ThisMachine, cut};
use prima_tests::one_process::OneProcess;
use prima_tests::{Endpoint, http};
use serde_json::json;

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
const CONTEXT: i32 = 256;

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
    let printed = output(
        RASPBERRY_PI_5
            .run("prima-node-agent")
            .args(["inspect", "--cpu"]),
    );
    assert!(printed.contains("\npages      16 KiB each"), "{printed}");
    assert!(printed.contains("\nkernels    neon-dotprod:"), "{printed}");
    ring_with(&RASPBERRY_PI_5, &smollm2(), &PROMPTS[..2], NOISE);
}

/// This machine and `other` answer as one process does, where the choice of tokens is beyond `noise`; for half of the prompts at least.
fn ring_with(other: &'static Processor, model: &Path, prompts: &[&str], noise: f32) {
    let engine = OneProcess::open(model, 2).unwrap();
    let node = |machine: &'static dyn Host| Node {
        machine,
        model: model.to_owned(),
    };
    let nodes = [node(&ThisMachine), node(other)];
    let ring = MachineRing::start(cut(model, CONTEXT, 2, 2), &nodes, &[]);

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
