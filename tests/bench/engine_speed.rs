//! Decode and prefill of the engine alone against llama-bench: same file, same number of threads, taking turns.
//!
//! Both count as llama-bench does: prefill is one batch of a prompt with the logits after its last token; decode is one token at
//! a time from an empty context, output head included, sampling not. Neither counts the first, warming run.

use std::path::Path;
use std::time::Instant;

use prima_engine::Compute;
use prima_tests::assets;
use prima_tests::one_process::OneProcess;

use crate::Effort;
use crate::error::BenchError;
use crate::peer;
use crate::statistics::Samples;

const MODELS: [&str; 3] = [
    "SmolLM2-135M-Instruct-Q4_1",
    "stories15M-F32",
    "TinyLlama-1.1B-Chat-Q4_K_M",
];

/// One model, in tokens per second.
pub struct EngineSpeed {
    pub model: &'static str,
    pub threads: usize,
    pub decode: Pair,
    pub prefill: Pair,
}

/// The same measurement of both.
#[derive(Default)]
pub struct Pair {
    pub engine: Samples,
    pub llama_cpp: Samples,
}

impl Pair {
    /// How many times as fast the engine is, by medians.
    pub fn ratio(&self) -> f64 {
        self.engine.median() / self.llama_cpp.median()
    }
}

/// Measures every model with as many threads as there are cores.
pub fn measure(effort: &Effort) -> Result<Vec<EngineSpeed>, BenchError> {
    let binary = peer::build()?;
    let threads = Compute::available_threads();
    MODELS
        .iter()
        .map(|model| {
            let path = assets::path(&format!("models/{model}.gguf"))?;
            eprintln!("{model}: decode and prefill, beside llama-bench");
            measure_model(effort, model, &path, &binary, threads)
        })
        .collect()
}

fn measure_model(
    effort: &Effort,
    model: &'static str,
    path: &Path,
    binary: &Path,
    threads: usize,
) -> Result<EngineSpeed, BenchError> {
    let engine = OneProcess::open(path, threads)?;
    let mut speed = EngineSpeed {
        model,
        threads,
        decode: Pair::default(),
        prefill: Pair::default(),
    };
    decode(&engine, effort.decode.min(8))?;
    for _ in 0..effort.turns {
        let Pair {
            engine: own,
            llama_cpp,
        } = &mut speed.decode;
        own.push(decode(&engine, effort.decode)?);
        llama_cpp.push(peer::tokens_per_second(
            binary,
            path,
            threads,
            0,
            effort.decode,
        )?);
        let Pair {
            engine: own,
            llama_cpp,
        } = &mut speed.prefill;
        own.push(prefill(&engine, effort.prefill)?);
        llama_cpp.push(peer::tokens_per_second(
            binary,
            path,
            threads,
            effort.prefill,
            0,
        )?);
    }
    Ok(speed)
}

fn decode(engine: &OneProcess, count: usize) -> Result<f64, BenchError> {
    let mut kv = engine.sequence(count);
    let tokens = tokens(engine, count);
    let start = Instant::now();
    for &token in &tokens {
        engine.last_logits(&[token], &mut kv)?;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

fn prefill(engine: &OneProcess, count: usize) -> Result<f64, BenchError> {
    let mut kv = engine.sequence(count);
    let tokens = tokens(engine, count);
    let start = Instant::now();
    engine.last_logits(&tokens, &mut kv)?;
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

/// Tokens from all over the vocabulary, as llama-bench takes random ones.
fn tokens(engine: &OneProcess, count: usize) -> Vec<u32> {
    let vocabulary = engine.model.config().vocabulary;
    (1..=count)
        .map(|i| (i * 7919 % vocabulary) as u32)
        .collect()
}
