//! Every weight format, with the kernels of every level: the engine computes with it at least as precisely as llama.cpp does.
//!
//! Kernels for quantized weights round activations to eight bits, so two right engines differ visibly (llama.cpp from itself by
//! 0.2 to 0.5 in a logprob). The yardstick is therefore the distance of each to the exact values, which llama.cpp computes with
//! the same weights written out as F32 by the gguf package: root mean square over the 20 most likely tokens at each place of
//! two windows of text, or of half of one where a level is slow. A wrong scale, minimum or nibble order in a kernel shows as a multiple of
//! llama.cpp's distance. Levels that compute the same bits are compared with each other. Formats into which llama.cpp does not quantize
//! without measurements are compared with random blocks.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use prima_engine::Compute;
use prima_engine::kernels::{self, IsaLevel, Matrix};
use prima_gguf::writer::GgufWriter;
use prima_gguf::{GgmlType, Gguf};
use prima_tests::one_process::{OneProcess, lower_levels};
use prima_tests::oracle::{self, Request, Text, TextJob};
use prima_tests::{assets, inputs};
use prima_text::log_sum_exp;

/// Two would wait for each other where other tests run beside these. Bits do not depend on it: the prima-kernels tests say so of every format.
const THREADS: usize = 1;
const WINDOW: usize = 128;
const TOP: usize = 20;

/// Less likely tokens are never chosen. Where one token is certain, thousands of others are alike.
const NEVER: f32 = -20.0;

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
fn iq3_s_weights() {
    as_precise_as_llama_cpp("stories15M-wide-IQ3_S");
}

#[test]
fn iq4_nl_weights() {
    as_precise_as_llama_cpp("stories15M-wide-IQ4_NL");
}

#[test]
fn iq4_xs_weights() {
    as_precise_as_llama_cpp("stories15M-wide-IQ4_XS");
}

#[test]
fn iq1_s_weights() {
    as_precise_as_llama_cpp("stories15M-random-IQ1_S");
}

#[test]
fn iq1_m_weights() {
    as_precise_as_llama_cpp("stories15M-random-IQ1_M");
}

#[test]
fn iq2_xxs_weights() {
    as_precise_as_llama_cpp("stories15M-random-IQ2_XXS");
}

#[test]
fn iq2_xs_weights() {
    as_precise_as_llama_cpp("stories15M-random-IQ2_XS");
}

#[test]
fn iq2_s_weights() {
    as_precise_as_llama_cpp("stories15M-random-IQ2_S");
}

#[test]
fn iq3_xxs_weights() {
    as_precise_as_llama_cpp("stories15M-random-IQ3_XXS");
}

#[test]
fn mxfp4_weights() {
    as_precise_as_llama_cpp("stories15M-random-MXFP4");
}

#[test]
fn smollm2_q4_1_weights() {
    as_precise_as_llama_cpp("SmolLM2-135M-Instruct-Q4_1");
}

#[test]
fn gemma3_270m_q4_k_m_weights() {
    as_precise_as_llama_cpp("gemma-3-270m-Q4_K_M");
}

/// Blocks of random bytes in each format, read by the engine's formulas and by the gguf package's.
#[test]
fn every_format_holds_what_the_gguf_package_reads() {
    const SHAPE: [u64; 2] = [256, 64];
    let folder = tempfile::tempdir().unwrap();
    let [random, exact] = ["random.gguf", "exact.gguf"].map(|file| folder.path().join(file));
    let all = GgmlType::ALL.iter().copied();
    let formats = all.filter(|format| format.block_len() > 1 && kernels::supported(*format));
    let weights = (SHAPE[0] * SHAPE[1]) as usize;
    let mut state = 1_u64;
    let blocks: Vec<(GgmlType, Vec<u8>)> = formats
        .map(|format| {
            let len = weights / format.block_len() * format.block_bytes();
            let random = std::iter::repeat_with(|| {
                // Knuth's MMIX generator; the upper bits are the good ones.
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                (state >> 56) as u8
            });
            (format, random.take(len).collect())
        })
        .collect();
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "llama");
    for (format, _) in &blocks {
        writer.tensor(format.name(), *format, &SHAPE);
    }
    let mut file = writer.write_header(Vec::new()).unwrap();
    for (_, bytes) in &blocks {
        file.tensor(bytes).unwrap();
    }
    fs::write(&random, file.finish().unwrap()).unwrap();

    let output = Command::new(assets::path("venv/bin/python").unwrap())
        .arg(inputs::file("tests/assets/dequantize.py"))
        .args([&random, &exact])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");

    let gguf = Gguf::open(&exact).unwrap();
    let exact = fs::read(&exact).unwrap();
    for (format, bytes) in &blocks {
        let tensor = gguf.tensor(format.name()).unwrap();
        let expected = &exact[tensor.offset as usize..][..4 * weights];
        let expected = expected
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes));
        let mut found = vec![0.0; weights];
        let matrix = Matrix::new(*format, 1, weights, bytes).unwrap();
        kernels::dequantize_row(matrix, 0, &mut found);
        let (mut finite, mut largest) = (0, 0.0_f32);
        for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
            // A scale may be infinite, and so its weights.
            if !expected.is_finite() {
                assert!(
                    !found.is_finite(),
                    "{format} {place}: {found} for {expected}"
                );
                continue;
            }
            finite += 1;
            largest = largest.max(expected.abs());
            // Where a minimum is added, both terms may be much larger than their sum.
            let bound = 1e-6
                * expected
                    .abs()
                    .max(if has_minimums(*format) { largest } else { 0.0 });
            assert!(
                (found - expected).abs() <= bound,
                "{format} {place}: {found} for {expected}"
            );
        }
        assert!(
            finite > weights / 2 && largest > 0.0,
            "{format}: {finite} of {weights}"
        );
    }
    assert_eq!(blocks.len(), 20);
}

fn has_minimums(format: GgmlType) -> bool {
    use GgmlType::*;
    matches!(format, Q4_1 | Q5_1 | Q2K | Q4K | Q5K)
}

fn as_precise_as_llama_cpp(name: &str) {
    let file = |name: &str| assets::path(&format!("models/{name}.gguf")).unwrap();
    // Where the same weights as F32 are at hand, nobody has to write them out.
    let exact = match name {
        "SmolLM2-135M-Instruct-Q4_1" => Some("SmolLM2-135M-Instruct-F32"),
        "gemma-3-270m-Q4_K_M" => Some("gemma-3-270m-F32"),
        "stories15M-wide-F32" => Some(name),
        _ => None,
    };
    let exact = match exact {
        Some(exact) => ask(file(exact), false, Vec::new()),
        None => ask(file(name), true, Vec::new()),
    };
    let most_likely = exact.top.iter().map(|top| {
        let tokens = top.iter().map(|(token, _)| *token);
        tokens.collect::<Vec<u32>>()
    });
    let llama_cpp = ask(file(name), false, most_likely.collect());

    let best = IsaLevel::detect();
    let mut engine = OneProcess::open_at_level(&file(name), THREADS, best).unwrap();
    let logits = logits_of(&engine, &exact.tokens);
    let vocabulary = engine.model.spec().vocabulary;
    let agrees = |level: IsaLevel, logits: &[f32]| {
        let rows = logits.chunks(vocabulary);
        compare(&format!("{name} at {level}"), rows, &exact, &llama_cpp);
    };
    agrees(best, &logits);
    for level in lower_levels() {
        engine.compute = Compute::at_level(THREADS, level).unwrap();
        // Other levels are slow, or have the same bits.
        let found = logits_of(&engine, &exact.tokens[..WINDOW / 2]);
        match level.name() {
            // They cannot fuse a product and a sum, or do not.
            "scalar" | "sse4.1" => agrees(level, &found),
            _ => assert!(
                found[..] == logits[..found.len()],
                "{name} at {level}: other logits than at {best}"
            ),
        }
    }
}

/// After each token but the last of every window, a row of the vocabulary's size.
fn logits_of(engine: &OneProcess, tokens: &[u32]) -> Vec<f32> {
    let mut logits = Vec::new();
    for tokens in tokens.chunks(WINDOW) {
        let mut kv = engine.sequence(WINDOW);
        let places = 0..tokens.len() - 1;
        let rows = engine.logits_after(tokens, places, &mut kv);
        logits.append(&mut rows.unwrap());
    }
    logits
}

fn compare<'a>(
    name: &str,
    rows: impl ExactSizeIterator<Item = &'a [f32]>,
    exact: &Text,
    llama_cpp: &Text,
) {
    let all = rows.len() * TOP;
    let (mut engine_squares, mut llama_cpp_squares, mut count) = (0.0, 0.0, 0);
    let places = exact.top.iter().zip(&llama_cpp.top);
    for (row, (exact, llama_cpp)) in rows.zip(places) {
        let whole = log_sum_exp(row);
        assert_eq!((exact.len(), llama_cpp.len()), (TOP, TOP));
        for (&(token, wanted), &(same, peer)) in exact.iter().zip(llama_cpp) {
            assert_eq!(token, same, "{name}");
            if wanted <= NEVER {
                continue;
            }
            let logprob = (f64::from(row[token as usize]) - whole) as f32;
            engine_squares += f64::from(logprob - wanted).powi(2);
            llama_cpp_squares += f64::from(peer - wanted).powi(2);
            count += 1;
        }
    }
    assert!(count > all * 9 / 10 && count <= all, "{count} of {all}");
    let mean = count as f64;
    let engine_error = (engine_squares / mean).sqrt();
    let llama_cpp_error = (llama_cpp_squares / mean).sqrt();
    println!(
        "{name}: distance to the exact logprobs {engine_error:.5}, llama.cpp's {llama_cpp_error:.5}"
    );
    assert!(
        engine_error <= SLACK * llama_cpp_error + KV_NOISE,
        "{name}: the engine is {engine_error} from the exact logprobs, llama.cpp {llama_cpp_error}"
    );
}

/// What llama.cpp makes of the text: the most likely tokens at each place, or those that are named.
fn ask(model: PathBuf, exact: bool, tokens: Vec<Vec<u32>>) -> Text {
    let request = Request {
        model,
        exact,
        quantized_kv: false,
        threads: THREADS,
        context: WINDOW,
        greedy: Vec::new(),
        text: Some(TextJob {
            path: assets::path("text/moby-dick.txt").unwrap(),
            window: WINDOW,
            windows: 2,
            top: TOP,
            of: tokens,
        }),
    };
    oracle::ask(&request).unwrap().text.unwrap()
}
