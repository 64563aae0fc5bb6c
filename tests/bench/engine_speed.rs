//! The engine alone against llama.cpp's own benchmarks: same file, same number of threads, taking turns; and against what the machine
//! can do at most.
//!
//! Both count as llama-bench and llama-batched-bench do: prefill is one batch of a prompt with the logits after its last token; decode
//! is one token at a time of each sequence, output head included, sampling not. Each first decodes a token that is not counted.

use std::path::Path;
use std::time::Instant;

use prima_engine::kernels::{IsaLevel, ThreadPool, limits};
use prima_engine::{Compute, KvCache};
use prima_gguf::Gguf;
use prima_node_agent::profile::cache_bytes;
use prima_tests::assets;
use prima_tests::one_process::OneProcess;

use crate::Effort;
use crate::error::BenchError;
use crate::peer::{self, FlashAttention};
use prima_tests::statistics::Samples;

/// What is measured of one file.
struct Subject {
    model: &'static str,
    /// One in this many of a turn's tokens is measured: large models take long.
    share: usize,
    /// What is measured after [`DEEP`] tokens, too.
    deep: &'static [Deep],
}

/// A measurement after [`DEEP`] tokens of context.
#[derive(Clone, Copy)]
pub enum Deep {
    Decode,
    Prefill,
}

impl Deep {
    /// Tokens that are counted: few of an answer, as the peer computes the context anew each time.
    pub fn tokens(self) -> usize {
        match self {
            Self::Decode => 16,
            Self::Prefill => 512,
        }
    }
}

const SUBJECTS: [Subject; 8] = [
    subject("stories15M-F32", 1, &[]),
    subject("SmolLM2-135M-Instruct-Q4_1", 1, &[Deep::Decode]),
    subject("TinyLlama-1.1B-Chat-Q4_K_M", 1, &[Deep::Decode]),
    subject("TinyLlama-1.1B-Chat-Q8_0", 1, &[]),
    // Most of its layers see 512 positions.
    subject("gemma-3-270m-Q4_K_M", 1, &[Deep::Decode, Deep::Prefill]),
    subject("shape-1b-Q4_K_M", 1, &[Deep::Decode]),
    subject("shape-8b-Q4_K_M", 4, &[]),
    subject("shape-qwen3-8b-Q4_K_M", 4, &[]),
];

const fn subject(model: &'static str, share: usize, deep: &'static [Deep]) -> Subject {
    Subject { model, share, deep }
}

/// Tokens of context of the deep measurements, and turns of them.
pub const DEEP: usize = 4096;
const DEEP_TURNS: usize = 3;

/// Sequences of the batched decode.
pub const AT_ONCE: usize = 8;
/// Tokens of each one's prompt.
const AT_ONCE_PROMPT: usize = 16;

/// Bytes of memory that are read to find the limit; caches hold less.
const READ: usize = 1 << 30;

/// All models, beside the machine.
pub struct EngineSpeeds {
    pub threads: usize,
    /// The machine's limits, a sample before each model: bytes read per second, and operations per second on bytes in registers.
    pub read: Samples,
    pub operations: Samples,
    pub models: Vec<EngineSpeed>,
}

/// One model, in tokens per second.
pub struct EngineSpeed {
    pub model: &'static str,
    /// Bytes of weights that a token reads from memory; none where caches hold a good part of them.
    pub bytes: Option<f64>,
    /// Operations on quantized weights for one token of a prompt; the output head has no part in it. None with float weights.
    pub operations: Option<f64>,
    pub decode_tokens: usize,
    pub decode: Pair,
    pub prefill_tokens: usize,
    pub prefill: Pair,
    /// After [`DEEP`] tokens, each with the peer's better setting.
    pub deep: Vec<(Deep, Pair, FlashAttention)>,
    /// Decode of [`AT_ONCE`] sequences, all together.
    pub at_once_tokens: usize,
    pub at_once: Pair,
}

/// The same measurement of both.
#[derive(Default)]
pub struct Pair {
    pub engine: Samples,
    pub llama_cpp: Samples,
}

impl Pair {
    /// Measures both once. Who begins alternates: whoever comes second finds a warmer processor.
    pub fn take_turn(
        &mut self,
        turn: usize,
        engine: impl FnOnce() -> Result<f64, BenchError>,
        llama_cpp: impl FnOnce() -> Result<f64, BenchError>,
    ) -> Result<(), BenchError> {
        if turn.is_multiple_of(2) {
            self.engine.push(engine()?);
            self.llama_cpp.push(llama_cpp()?);
        } else {
            self.llama_cpp.push(llama_cpp()?);
            self.engine.push(engine()?);
        }
        Ok(())
    }

    /// How many times as fast the engine is, by medians.
    pub fn ratio(&self) -> f64 {
        self.engine.median() / self.llama_cpp.median()
    }
}

/// Measures every model with as many threads as there are cores.
pub fn measure(effort: &Effort) -> Result<EngineSpeeds, BenchError> {
    let peer = peer::build()?;
    let threads = Compute::available_threads();
    let pool = ThreadPool::new(threads, IsaLevel::detect())?;
    let mut speeds = EngineSpeeds {
        threads,
        read: Samples::default(),
        operations: Samples::default(),
        models: Vec::new(),
    };
    for subject in &SUBJECTS {
        let memory = vec![1_u64; READ / size_of::<u64>()];
        let read = limits::read_bytes_per_second(&pool, &memory);
        drop(memory);
        speeds.read.push(read);
        speeds
            .operations
            .push(limits::byte_operations_per_second(&pool));
        let path = assets::path(&format!("models/{}.gguf", subject.model))?;
        eprintln!("{}: beside llama.cpp", subject.model);
        speeds
            .models
            .push(measure_model(effort, subject, &path, &peer, &pool)?);
    }
    Ok(speeds)
}

fn measure_model(
    effort: &Effort,
    subject: &Subject,
    path: &Path,
    peer: &peer::Programs,
    pool: &ThreadPool,
) -> Result<EngineSpeed, BenchError> {
    let threads = pool.threads();
    let engine = OneProcess::open_at_level(path, threads, pool.level())?;
    let (bytes, operations) = work(engine.model.gguf());
    let from_memory = bytes > 2.0 * cache_bytes(Path::new("/")) as f64;
    let mut speed = EngineSpeed {
        model: subject.model,
        bytes: from_memory.then_some(bytes),
        operations,
        decode_tokens: effort.decode / subject.share,
        decode: Pair::default(),
        prefill_tokens: effort.prefill / subject.share,
        prefill: Pair::default(),
        deep: Vec::new(),
        at_once_tokens: effort.decode / subject.share / 4,
        at_once: Pair::default(),
    };
    for turn in 0..effort.turns {
        let decoded = speed.decode_tokens;
        speed.decode.take_turn(
            turn,
            || decode(&engine, &mut engine.sequence(1 + decoded), decoded),
            || peer.tokens_per_second(path, threads, 0, decoded),
        )?;
        let prefilled = speed.prefill_tokens;
        speed.prefill.take_turn(
            turn,
            || prefill(&engine, &mut engine.sequence(prefilled), prefilled),
            || peer.tokens_per_second(path, threads, prefilled, 0),
        )?;
        let decoded = speed.at_once_tokens;
        speed.at_once.take_turn(
            turn,
            || decode_at_once(&engine, decoded),
            || peer.tokens_per_second_at_once(path, threads, AT_ONCE, AT_ONCE_PROMPT, decoded),
        )?;
    }
    for &deep in subject.deep {
        let (pair, setting) = measure_deep(effort, deep, path, peer, &engine, threads)?;
        speed.deep.push((deep, pair, setting));
    }
    Ok(speed)
}

/// After [`DEEP`] tokens, with the setting that is the peer's better one.
fn measure_deep(
    effort: &Effort,
    deep: Deep,
    path: &Path,
    peer: &peer::Programs,
    engine: &OneProcess,
    threads: usize,
) -> Result<(Pair, FlashAttention), BenchError> {
    let count = deep.tokens();
    let (prefilled, decoded) = match deep {
        Deep::Decode => (0, count),
        Deep::Prefill => (count, 0),
    };
    let mut kv = engine.sequence(DEEP + count + 1);
    engine.last_logits(&tokens(engine, DEEP), &mut kv)?;
    let mut measured = FlashAttention::BOTH.map(|setting| (Pair::default(), setting));
    for turn in 0..effort.turns.min(DEEP_TURNS) {
        for (pair, setting) in &mut measured {
            kv.truncate(DEEP);
            pair.take_turn(
                turn,
                || match deep {
                    Deep::Decode => decode(engine, &mut kv, count),
                    Deep::Prefill => prefill(engine, &mut kv, count),
                },
                || peer.tokens_per_second_deep(path, threads, prefilled, decoded, DEEP, *setting),
            )?;
        }
    }
    let [one, other] = measured;
    let second_is_better = other.0.llama_cpp.median() > one.0.llama_cpp.median();
    Ok(if second_is_better { other } else { one })
}

/// Bytes of weights that one token reads, and operations on quantized weights (two for each) for one token of a prompt.
fn work(gguf: &Gguf) -> (f64, Option<f64>) {
    let (mut bytes, mut weights, mut quantized) = (0, 0, true);
    let own_head = gguf.tensor("output.weight").is_some();
    for tensor in &gguf.tensors {
        // A token takes one row of the embedding; where it is the output head as well, all of it.
        if tensor.name != "token_embd.weight" || !own_head {
            bytes += tensor.byte_len;
        }
        if tensor.name.starts_with("blk.") && tensor.shape.len() > 1 {
            weights += tensor.weights();
            quantized &= tensor.ggml_type.block_len() > 1;
        }
    }
    (bytes as f64, quantized.then_some(2.0 * weights as f64))
}

pub fn decode(engine: &OneProcess, kv: &mut KvCache, count: usize) -> Result<f64, BenchError> {
    let tokens = tokens(engine, count);
    engine.last_logits(&tokens[..1], kv)?;
    let start = Instant::now();
    for &token in &tokens {
        engine.last_logits(&[token], kv)?;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

pub fn prefill(engine: &OneProcess, kv: &mut KvCache, count: usize) -> Result<f64, BenchError> {
    let tokens = tokens(engine, count);
    let start = Instant::now();
    engine.last_logits(&tokens, kv)?;
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

fn decode_at_once(engine: &OneProcess, count: usize) -> Result<f64, BenchError> {
    let prompt = tokens(engine, AT_ONCE_PROMPT);
    let mut sequences = Vec::new();
    for _ in 0..AT_ONCE {
        let mut kv = engine.sequence(AT_ONCE_PROMPT + count);
        engine.last_logits(&prompt, &mut kv)?;
        sequences.push(kv);
    }
    let start = Instant::now();
    for &token in &tokens(engine, count) {
        engine.step(&[token; AT_ONCE], &mut sequences)?;
    }
    Ok((AT_ONCE * count) as f64 / start.elapsed().as_secs_f64())
}

/// Tokens from all over the vocabulary, as llama-bench takes random ones.
fn tokens(engine: &OneProcess, count: usize) -> Vec<u32> {
    let vocabulary = engine.model.spec().vocabulary;
    (1..=count)
        .map(|i| (i * 7919 % vocabulary) as u32)
        .collect()
}
