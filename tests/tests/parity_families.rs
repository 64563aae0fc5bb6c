//! Every family of models beside llama.cpp (PyPI xllamacpp): trained weights of a small model, written out as each family's file with all its
//! parts (`make_models.py`), and the log probabilities of the 20 most likely tokens at each place of two windows of text.
//!
//! All weights are F32, so what is rounded is the KV cache, to F16, and in llama.cpp GELU, by a table of F16.

use prima_engine::kernels::IsaLevel;
use prima_tests::assets;
use prima_tests::one_process::{OneProcess, log_softmax, most_likely};
use prima_tests::oracle::{self, Request, Text, TextJob};

const WINDOW: usize = 256;
const WINDOWS: usize = 2;
const TOP: usize = 20;
/// The largest difference of such a log probability.
const BOUND: f32 = 0.05;
/// Less likely tokens are never chosen.
const NEVER: f32 = -20.0;

#[test]
fn llama_with_biases_computes_what_llama_cpp_does() {
    agrees("llama-biases");
}

#[test]
fn llama_with_yarn_computes_what_llama_cpp_does() {
    agrees("llama-yarn");
}

#[test]
fn qwen3_computes_what_llama_cpp_does() {
    agrees("qwen3");
}

#[test]
fn gemma2_computes_what_llama_cpp_does() {
    agrees("gemma2");
}

#[test]
fn gemma3_computes_what_llama_cpp_does() {
    agrees("gemma3");
}

#[test]
fn phi3_computes_what_llama_cpp_does() {
    agrees("phi3");
}

#[test]
fn mistral3_computes_what_llama_cpp_does() {
    agrees("mistral3");
}

#[test]
fn smollm3_computes_what_llama_cpp_does() {
    agrees("smollm3");
}

#[test]
fn olmo2_computes_what_llama_cpp_does() {
    agrees("olmo2");
}

#[test]
fn granite_computes_what_llama_cpp_does() {
    agrees("granite");
}

#[test]
fn glm4_computes_what_llama_cpp_does() {
    agrees("glm4");
}

fn agrees(family: &str) {
    let model = assets::path(&format!("models/stories15M-{family}-F32.gguf")).unwrap();
    let request = Request {
        model: model.clone(),
        exact: false,
        threads: 2,
        context: WINDOW,
        greedy: Vec::new(),
        next: Vec::new(),
        text: Some(TextJob {
            path: assets::path("text/moby-dick.txt").unwrap(),
            window: WINDOW,
            windows: WINDOWS,
            top: TOP,
        }),
    };
    let expected = oracle::ask(&request).unwrap().text.unwrap();
    let best = IsaLevel::detect();
    let rows = logprobs(
        &OneProcess::open_at_level(&model, 2, best).unwrap(),
        &expected,
    );
    compare(family, &rows, &expected);

    // Levels have the same bits, but for those that cannot fuse a product and a sum, or do not.
    let some = &expected.tokens[..WINDOW / 4];
    for level in IsaLevel::available() {
        let engine = OneProcess::open_at_level(&model, 2, level).unwrap();
        let found = logits(&engine, some);
        let found: Vec<_> = found.iter().map(|row| log_softmax(row)).collect();
        let found = &found[..some.len() - 1];
        match level.name() {
            "scalar" | "sse4.1" => compare(&format!("{family} at {level}"), found, &expected),
            _ => assert!(
                *found == rows[..found.len()],
                "{family}: other logits at {level} than at {best}"
            ),
        }
    }
}

/// After each token but the last of every window.
fn logprobs(engine: &OneProcess, text: &Text) -> Vec<Vec<f32>> {
    let windows = text.tokens.chunks(WINDOW);
    let rows = windows.flat_map(|tokens| {
        let mut rows = logits(engine, tokens);
        rows.pop();
        rows
    });
    rows.map(|row| log_softmax(&row)).collect()
}

/// After each token.
fn logits(engine: &OneProcess, tokens: &[u32]) -> Vec<Vec<f32>> {
    let vocabulary = engine.model.spec().vocabulary;
    let logits = engine.logits(tokens, &mut engine.sequence(WINDOW)).unwrap();
    logits.chunks(vocabulary).map(<[f32]>::to_vec).collect()
}

fn compare(name: &str, rows: &[Vec<f32>], expected: &Text) {
    let (mut largest, mut decided) = (0_f32, 0);
    for (place, (row, top)) in rows.iter().zip(&expected.top).enumerate() {
        for &(token, logprob) in top.iter().filter(|(_, logprob)| *logprob > NEVER) {
            let difference = (row[token as usize] - logprob).abs();
            largest = largest.max(difference);
            assert!(
                difference <= BOUND,
                "{name}, place {place}: token {token} has {}, llama.cpp {logprob}",
                row[token as usize]
            );
        }
        if top[0].1 - top[1].1 > 2.0 * BOUND {
            decided += 1;
            assert_eq!(most_likely(row), top[0].0, "{name}, place {place}");
        }
    }
    let count = rows.len();
    println!(
        "{name}: a top-{TOP} logprob differs by up to {largest}; {decided} of {count} places are decided"
    );
    assert!(
        decided > count / 2,
        "{name}: {decided} of {count} places are decided"
    );
}
