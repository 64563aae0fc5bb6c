//! Every family of models beside llama.cpp (PyPI xllamacpp): the log probabilities of the 20 most likely tokens at each place of a text.
//!
//! Once with trained weights of a small model, written out as each family's file with all its parts (`make_models.py`). All of them are F32,
//! so what is rounded is the KV cache, to F16, and in llama.cpp GELU, by a table of F16. And once with random weights, made up here, in the
//! kinds of formats that weights come in; llama.cpp has them written out as F32, so what is rounded beside are our activations.

#[path = "../../node-agent/engine/tests/support/mod.rs"]
#[allow(clippy::expect_used, reason = "these are tests")]
mod support;

use std::fs;

use prima_engine::kernels::IsaLevel;
use prima_gguf::GgmlType;
use prima_gguf::writer::GgufWriter;
use prima_tests::assets;
use prima_tests::one_process::{OneProcess, log_softmax, most_likely};
use prima_tests::oracle::{self, Request, Text, TextJob};
use support::{FAMILIES, MadeUpModel, Random};

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
        quantized_kv: false,
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
    let decided = compare(family, BOUND, &rows, &expected);
    assert!(
        decided > rows.len() / 2,
        "{decided} of {} places are decided",
        rows.len()
    );

    // Levels have the same bits, but for those that cannot fuse a product and a sum, or do not.
    let some = &expected.tokens[..WINDOW / 4];
    for level in IsaLevel::available() {
        let engine = OneProcess::open_at_level(&model, 2, level).unwrap();
        let found = logits(&engine, some);
        let found: Vec<_> = found.iter().map(|row| log_softmax(row)).collect();
        let found = &found[..some.len() - 1];
        match level.name() {
            "scalar" | "sse4.1" => {
                compare(&format!("{family} at {level}"), BOUND, found, &expected);
            }
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

/// Panics when a log probability differs by more than `bound`, or another token is the most likely where the gap is wide enough to decide it.
/// Returns at how many places it is.
fn compare(name: &str, bound: f32, rows: &[Vec<f32>], expected: &Text) -> usize {
    let (mut largest, mut decided) = (0_f32, 0);
    for (place, (row, top)) in rows.iter().zip(&expected.top).enumerate() {
        for &(token, logprob) in top.iter().filter(|(_, logprob)| *logprob > NEVER) {
            let difference = (row[token as usize] - logprob).abs();
            largest = largest.max(difference);
            assert!(
                difference <= bound,
                "{name}, place {place}: token {token} has {}, llama.cpp {logprob}",
                row[token as usize]
            );
        }
        if top[0].1 - top[1].1 > 2.0 * bound {
            decided += 1;
            assert_eq!(most_likely(row), top[0].0, "{name}, place {place}");
        }
    }
    let count = rows.len();
    println!(
        "{name}: a top-{TOP} logprob differs by up to {largest}; {decided} of {count} places are decided"
    );
    decided
}

#[test]
fn every_family_in_f32_computes_what_llama_cpp_does() {
    made_up(GgmlType::F32, 0.01);
}

#[test]
fn every_family_in_f16_computes_what_llama_cpp_does() {
    made_up(GgmlType::F16, 0.01);
}

#[test]
fn every_family_in_q8_0_is_as_near_as_llama_cpp() {
    made_up(GgmlType::Q8_0, 0.2);
}

#[test]
fn every_family_in_q4_k_is_as_near_as_llama_cpp() {
    made_up(GgmlType::Q4K, 1.0);
}

/// Random models of every family, all matrices in one format; windows are of 8 positions, and the text of 48.
fn made_up(format: GgmlType, bound: f32) {
    const LENGTH: usize = 48;
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    let mut random = Random(1);
    let characters = (0..LENGTH).map(|_| random.within(34..126) as u8);
    fs::write(&text, characters.collect::<Vec<u8>>()).unwrap();
    for architecture in FAMILIES {
        let model = MadeUpModel {
            formats: vec![format],
            ..MadeUpModel::of(architecture)
        };
        let path = folder.path().join(format!("{architecture}.gguf"));
        model.write_with(&path, model.tensors(), characters_as_tokens);
        let ask = |exact, top| {
            let request = Request {
                model: path.clone(),
                exact,
                quantized_kv: false,
                threads: 2,
                context: LENGTH,
                greedy: Vec::new(),
                next: Vec::new(),
                text: Some(TextJob {
                    path: text.clone(),
                    window: LENGTH,
                    windows: 1,
                    top,
                }),
            };
            oracle::ask(&request).unwrap().text.unwrap()
        };
        let exact = ask(true, TOP);
        let engine = OneProcess::open(&path, 2).unwrap();
        let mut rows = logits(&engine, &exact.tokens);
        rows.pop();
        let rows: Vec<_> = rows.iter().map(|row| log_softmax(row)).collect();
        let name = format!("{architecture} in {format}");
        let decided = compare(&name, bound, &rows, &exact);
        if format.block_len() == 1 {
            assert!(
                decided > rows.len() / 3,
                "{name}: {decided} places are decided"
            );
            continue;
        }
        // Both round activations to eight bits. In random layers that grows, more in some families than in others.
        let all = ask(false, model.vocabulary);
        let peers: Vec<Vec<f32>> = all
            .top
            .iter()
            .map(|top| {
                let mut row = vec![0.0; model.vocabulary];
                top.iter()
                    .for_each(|&(token, logprob)| row[token as usize] = logprob);
                row
            })
            .collect();
        let (own, peers) = (distance(&rows, &exact), distance(&peers, &exact));
        println!("{name}: distance to the exact logprobs {own:.4}, llama.cpp's {peers:.4}");
        assert!(own <= 1.3 * peers, "{name}: {own}, llama.cpp {peers}");
    }
}

/// Root mean square of the differences of the most likely tokens' log probabilities.
fn distance(rows: &[Vec<f32>], exact: &Text) -> f64 {
    let differences = rows.iter().zip(&exact.top).flat_map(|(row, top)| {
        top.iter()
            .map(|&(token, logprob)| f64::from(row[token as usize] - logprob))
    });
    let squares: f64 = differences.map(|difference| difference.powi(2)).sum();
    (squares / (rows.len() * TOP) as f64).sqrt()
}

/// One token for each printable character, one for two of them, as there must be a merge, and one that ends a text.
fn characters_as_tokens(writer: &mut GgufWriter) {
    let characters = (b'!'..=b'~').map(|byte| char::from(byte).to_string());
    let tokens: Vec<String> = characters
        .chain(["!!".to_owned(), "<end>".to_owned()])
        .collect();
    let types = [vec![1; 95], vec![3]].concat();
    writer
        .metadata("tokenizer.ggml.model", "gpt2")
        .metadata("tokenizer.ggml.pre", "gpt-2")
        .metadata("tokenizer.ggml.tokens", tokens)
        .metadata("tokenizer.ggml.token_type", types)
        .metadata("tokenizer.ggml.merges", vec!["! !".to_owned()])
        .metadata("tokenizer.ggml.eos_token_id", 95_u32);
}
