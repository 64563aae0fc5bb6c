//! Every weight format: the engine computes with it at least as precisely as llama.cpp does.
//!
//! Kernels for quantized weights round activations to eight bits, so two right engines differ visibly (llama.cpp from itself by
//! 0.2 to 0.5 in a logprob). The yardstick is therefore the distance of each to the exact values, which llama.cpp computes with
//! the same weights written out as F32 by the gguf package: root mean square over the 20 most likely tokens at each place of
//! two windows of text. A wrong scale, minimum or nibble order in a kernel shows as a multiple of llama.cpp's distance.

use std::path::PathBuf;

use prima_tests::assets;
use prima_tests::one_process::{OneProcess, log_softmax};
use prima_tests::oracle::{self, Request, Text, TextJob};

const WINDOW: usize = 128;
const TOP: usize = 20;

/// The engine may be this much further from the exact values than llama.cpp: other roundings, the same amount of them.
const SLACK: f64 = 1.15;
/// What the KV cache's F16 alone does, in both engines; the only difference left with F32 weights.
const KV_NOISE: f64 = 0.002;

#[test]
fn f32_weights() {
    as_precise_as_llama_cpp("stories15M-wide-F32");
}

#[test]
fn f16_weights() {
    as_precise_as_llama_cpp("stories15M-wide-F16");
}

#[test]
fn bf16_weights() {
    as_precise_as_llama_cpp("stories15M-wide-BF16");
}

#[test]
fn q4_0_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q4_0");
}

#[test]
fn q4_1_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q4_1");
}

#[test]
fn q5_0_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q5_0");
}

#[test]
fn q5_1_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q5_1");
}

#[test]
fn q8_0_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q8_0");
}

#[test]
fn q2_k_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q2_K");
}

#[test]
fn q3_k_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q3_K");
}

#[test]
fn q4_k_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q4_K");
}

#[test]
fn q5_k_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q5_K");
}

#[test]
fn q6_k_weights() {
    as_precise_as_llama_cpp("stories15M-wide-Q6_K");
}

#[test]
fn smollm2_q4_1_weights() {
    as_precise_as_llama_cpp("SmolLM2-135M-Instruct-Q4_1");
}

fn as_precise_as_llama_cpp(name: &str) {
    let model = assets::path(&format!("models/{name}.gguf")).unwrap();
    let exact = ask(model.clone(), true);
    let llama_cpp = ask(model.clone(), false);
    let engine = OneProcess::open(&model, 2).unwrap();

    let (mut engine_squares, mut llama_cpp_squares, mut count) = (0.0, 0.0, 0);
    let mut places = exact.top.iter().zip(&llama_cpp.top);
    for part in exact.tokens.chunks(WINDOW) {
        let logits = engine.logits(part, &mut engine.sequence(WINDOW)).unwrap();
        let rows = logits.chunks(engine.model.config().vocabulary);
        for row in rows.take(WINDOW - 1) {
            let logprobs = log_softmax(row);
            let (exact, llama_cpp) = places.next().unwrap();
            for &(token, wanted) in &exact[..TOP] {
                let peer = llama_cpp.iter().find(|&&(known, _)| known == token);
                let peer = peer
                    .unwrap_or_else(|| panic!("llama.cpp's answer lacks token {token}"))
                    .1;
                engine_squares += f64::from(logprobs[token as usize] - wanted).powi(2);
                llama_cpp_squares += f64::from(peer - wanted).powi(2);
                count += 1;
            }
        }
    }
    assert_eq!(count, 2 * (WINDOW - 1) * TOP);
    let engine_error = (engine_squares / f64::from(count as u32)).sqrt();
    let llama_cpp_error = (llama_cpp_squares / f64::from(count as u32)).sqrt();
    println!(
        "{name}: distance to the exact logprobs {engine_error:.5}, llama.cpp's {llama_cpp_error:.5}"
    );
    assert!(
        engine_error <= SLACK * llama_cpp_error + KV_NOISE,
        "{name}: the engine is {engine_error} from the exact logprobs, llama.cpp {llama_cpp_error}"
    );
}

fn ask(model: PathBuf, exact: bool) -> Text {
    let request = Request {
        model,
        exact,
        threads: 2,
        context: WINDOW,
        greedy: Vec::new(),
        next: Vec::new(),
        text: Some(TextJob {
            path: assets::path("text/moby-dick.txt").unwrap(),
            window: WINDOW,
            windows: 2,
            // More of llama.cpp's own, so that the exact ones are surely among them.
            top: if exact { TOP } else { 40 * TOP },
        }),
    };
    oracle::ask(&request).unwrap().text.unwrap()
}
