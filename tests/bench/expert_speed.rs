//! Mixtures of experts beside llama.cpp: in memory, and with memory for a part of the experts.
//!
//! The models are as wide as published ones and have as many experts, in fewer layers, with random weights. Their routers are random, too: a
//! token goes to any expert with nearly the same chance, and what is in memory helps little more than its share. Where tokens come back, as in
//! texts, so do their experts.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use prima_engine::Compute;
use prima_engine::kernels::{IsaLevel, ThreadPool};
use prima_gguf::Gguf;
use prima_tests::Endpoint;
use prima_tests::assets;
use prima_tests::expert_replay::Trace;
use prima_tests::http;
use prima_tests::local_ring::{LocalRing, LocalRingBuilder};
use prima_tests::machine::{Limits, Machine, drop_cached};
use prima_tests::one_process::{OneProcess, end_tokens};
use prima_tests::statistics::Samples;

use crate::Effort;
use crate::client::Client;
use crate::engine_speed::{Pair, decode, prefill};
use crate::error::BenchError;
use crate::peer::{self, Programs};
use crate::prediction::predicted;

const MODELS: [&str; 2] = [
    "shape-qwen3-30b-a3b-8-layers-Q4_K_M",
    "shape-gpt-oss-20b-8-layers-MXFP4",
];
/// Of the experts, what there is memory for.
const SHARES: [f64; 2] = [0.5, 0.25];
/// Beside weights: the process, its buffers, keys and values.
pub const OTHER_BYTES: f64 = 400e6;
const TURNS_UNDER_LIMIT: usize = 3;
/// Tokens of which the experts fill memory.
pub const WARM_UP: usize = 48;
/// Tokens until nearly all experts were used. (Of 128, of which a token uses 8, 5 % are not used yet after 48.) Where memory holds all, the first
/// use of one maps its pages.
pub const WARM_UP_OF_ALL: usize = 192;
const TOKENS: usize = 32;
/// Tokens whose experts are traced.
const TRACED: usize = 256;
/// For llama.cpp, which takes long for each; before them it decodes as many.
pub const PEER_TOKENS: usize = 16;

pub struct ExpertSpeed {
    pub model: &'static str,
    pub threads: usize,
    pub decode_tokens: usize,
    pub decode: Pair,
    pub prefill_tokens: usize,
    pub prefill: Pair,
    /// Of a ring of one member that has memory for all.
    pub in_memory: Ring,
    /// `None` where no cgroup can be made.
    pub limited: Option<Vec<Limited>>,
    /// What tokens needed that were drawn from all alike, and by Zipf's law.
    pub traces: [Trace; 2],
}

/// With memory for a part of the experts.
pub struct Limited {
    pub share: f64,
    pub megabytes: u64,
    /// Tokens per second, of tokens that are drawn from all alike.
    pub llama_cpp: Samples,
    /// Of tokens that come back.
    pub llama_cpp_recurring: Samples,
    /// What was predicted of tokens that are drawn from all alike.
    pub predicted: Samples,
    /// Of tokens that are drawn from all alike, as llama.cpp's.
    pub uniform: Ours,
    /// Of tokens that come back.
    pub recurring: Ours,
}

/// Tokens per second: what `prima run` predicted, and what the ring decoded.
#[derive(Default)]
pub struct Ring {
    pub predicted: Samples,
    pub measured: Samples,
}

/// What a ring does under a limit.
#[derive(Default)]
pub struct Ours {
    /// Tokens per second.
    pub rate: Samples,
    /// Of the experts that tokens needed, those that were in memory.
    pub hit_rate: Samples,
    /// Of all experts, those that memory held afterwards.
    pub held: Samples,
    /// Bytes that were read, over those of the experts that were not in memory.
    pub read_ratio: Samples,
}

/// Bytes of a model's weights.
struct Weights {
    experts: f64,
    others: f64,
    /// Gate, up and down of one expert, on average over layers.
    expert: f64,
}

pub fn measure(effort: &Effort) -> Result<Vec<ExpertSpeed>, BenchError> {
    let peer = peer::build()?;
    let models = MODELS
        .iter()
        .map(|model| measure_model(effort, model, &peer));
    models.collect()
}

fn measure_model(
    effort: &Effort,
    model: &'static str,
    peer: &Programs,
) -> Result<ExpertSpeed, BenchError> {
    let path = assets::path(&format!("models/{model}.gguf"))?;
    let threads = Compute::available_threads();
    let pool = ThreadPool::new(threads, IsaLevel::detect())?;
    let engine = OneProcess::open_at_level(&path, threads, pool.level())?;
    let weights = Weights::of(engine.model.gguf());
    let never = end_tokens(&engine);
    let mut speed = ExpertSpeed {
        model,
        threads,
        decode_tokens: effort.decode / 2,
        decode: Pair::default(),
        prefill_tokens: effort.prefill,
        prefill: Pair::default(),
        in_memory: Ring::default(),
        limited: None,
        traces: traces(&path, threads, &never)?,
    };
    eprintln!("{model}: beside llama.cpp, in memory");
    // A prompt first: it maps the pages of all experts, as llama.cpp does when it loads them.
    for turn in 0..effort.turns {
        let prefilled = speed.prefill_tokens;
        speed.prefill.take_turn(
            turn,
            || prefill(&engine, &mut engine.sequence(prefilled), prefilled),
            || peer.tokens_per_second(&path, threads, prefilled, 0),
        )?;
        let decoded = speed.decode_tokens;
        speed.decode.take_turn(
            turn,
            || decode(&engine, &mut engine.sequence(1 + decoded), decoded),
            || peer.tokens_per_second(&path, threads, 0, decoded),
        )?;
    }
    drop(engine);
    for _ in 0..effort.turns.min(TURNS_UNDER_LIMIT) {
        let ring = ring_of(&path, threads).start();
        speed.in_memory.predicted.push(predicted(&ring)?);
        let client = Client::of(ring, &never);
        client.seconds_per_random_token(1, WARM_UP_OF_ALL)?;
        let seconds = client.seconds_per_random_token(2, TOKENS)?;
        speed.in_memory.measured.push(1.0 / seconds);
    }
    if let Err(error) = Machine::new("try", &Limits::of_memory(1 << 30), Path::new("/")) {
        eprintln!("memory limits: left out, they take root and a writable memory cgroup ({error})");
        return Ok(speed);
    }
    let mut limited: Vec<Limited> = SHARES
        .iter()
        .map(|&share| Limited {
            share,
            megabytes: ((weights.others + share * weights.experts + OTHER_BYTES) / 1e6) as u64,
            llama_cpp: Samples::default(),
            llama_cpp_recurring: Samples::default(),
            predicted: Samples::default(),
            uniform: Ours::default(),
            recurring: Ours::default(),
        })
        .collect();
    for turn in 0..effort.turns.min(TURNS_UNDER_LIMIT) {
        for limit in &mut limited {
            eprintln!("{model}: {} MB, turn {}", limit.megabytes, turn + 1);
            let cgroup = |source| BenchError::Cgroup { source };
            let page_cache = |source| BenchError::PageCache { source };
            let limits = Limits::of_memory(limit.megabytes * 1_000_000);
            let machine = Machine::new("bench", &limits, &path).map_err(cgroup)?;
            // Who begins alternates.
            for ours in [turn.is_multiple_of(2), !turn.is_multiple_of(2)] {
                drop_cached(&path).map_err(page_cache)?;
                match ours {
                    true => limit.ring(&path, &machine, threads, &never, &weights)?,
                    false => {
                        let rate =
                            peer.tokens_per_second_in(&machine, &path, threads, PEER_TOKENS, 2)?;
                        limit.llama_cpp.push(rate);
                        // It takes minutes.
                        if turn == 0 {
                            let options = ["--load-mode", "mmap", "--no-repack"];
                            let server =
                                peer.server_on(Some(&machine), &path, threads, 512, &options)?;
                            let client = Client::of(server, &never);
                            client.seconds_per_recurring_token(1, WARM_UP)?;
                            let seconds = client.seconds_per_recurring_token(2, PEER_TOKENS)?;
                            limit.llama_cpp_recurring.push(1.0 / seconds);
                        }
                    }
                }
            }
        }
    }
    speed.limited = Some(limited);
    Ok(speed)
}

/// One member, which computes a token at a time.
fn ring_of(path: &Path, threads: usize) -> LocalRingBuilder {
    LocalRing::builder()
        .model(path)
        .measured()
        .arg("--threads")
        .arg(threads.to_string())
        .arg("--context")
        .arg("512")
        .arg("--no-speculation")
}

/// The experts of tokens that are drawn from all alike, and by Zipf's law.
fn traces(path: &Path, threads: usize, never: &[u32]) -> Result<[Trace; 2], BenchError> {
    let trace = |recurring: bool| {
        let folder = tempfile::tempdir().map_err(|source| BenchError::Trace { source })?;
        let ring = ring_of(path, threads)
            .env("PRIMA_ROUTING_TRACE", folder.path())
            .start();
        let client = Client::of(ring, never);
        match recurring {
            false => client.seconds_per_random_token(3, TRACED)?,
            true => client.seconds_per_recurring_token(3, TRACED)?,
        };
        // The ring has answered; it may write a moment longer.
        let file = folder.path().join("m0.routing");
        let mut text = String::new();
        loop {
            let read = fs::read_to_string(&file).map_err(|source| BenchError::Trace { source })?;
            if read == text && read.ends_with('\n') {
                break;
            }
            text = read;
            thread::sleep(Duration::from_secs(1));
        }
        Trace::parse(&text).map_err(|source| BenchError::TraceFile { path: file, source })
    };
    Ok([trace(false)?, trace(true)?])
}

impl Weights {
    fn of(gguf: &Gguf) -> Weights {
        let (experts, others): (Vec<_>, Vec<_>) = gguf
            .tensors
            .iter()
            .partition(|tensor| tensor.name.ends_with("_exps.weight"));
        let bytes = |tensors: &[&prima_gguf::TensorInfo]| -> f64 {
            tensors.iter().map(|tensor| tensor.byte_len as f64).sum()
        };
        // Each has a gate, an up and a down of its own in every layer.
        let each = experts.iter().map(|tensor| tensor.shape[2] as f64);
        let count = each.sum::<f64>() / 3.0;
        Weights {
            experts: bytes(&experts),
            others: bytes(&others),
            expert: bytes(&experts) / count,
        }
    }
}

impl Limited {
    fn ring(
        &mut self,
        path: &Path,
        machine: &Machine,
        threads: usize,
        never: &[u32],
        weights: &Weights,
    ) -> Result<(), BenchError> {
        let ring = ring_of(path, threads).start_on(machine);
        self.predicted.push(predicted(&ring)?);
        let address = ring.address();
        let client = Client::of(ring, never);
        // The first tokens of each fill memory with experts.
        client.seconds_per_random_token(1, WARM_UP)?;
        self.uniform.push(address, weights, || {
            client.seconds_per_random_token(2, TOKENS)
        })?;
        client.seconds_per_recurring_token(1, WARM_UP)?;
        self.recurring.push(address, weights, || {
            client.seconds_per_recurring_token(2, TOKENS)
        })
    }
}

impl Ours {
    /// Of tokens, each of which takes the seconds that `answer` finds.
    fn push(
        &mut self,
        address: SocketAddr,
        weights: &Weights,
        answer: impl FnOnce() -> Result<f64, BenchError>,
    ) -> Result<(), BenchError> {
        let metric =
            |name| http::metric(address, name).map_err(|source| BenchError::Http { source });
        let metrics = || {
            Ok::<_, BenchError>([
                metric("prima_member_read_bytes_total")?,
                metric("prima_member_expert_hits_total")?,
                metric("prima_member_expert_misses_total")?,
            ])
        };
        let before = metrics()?;
        let seconds = answer()?;
        let after = metrics()?;
        let [read, hits, misses] = [0, 1, 2].map(|place| after[place] - before[place]);
        self.rate.push(1.0 / seconds);
        self.hit_rate.push(hits / (hits + misses));
        // All that every token uses stays, so what does not is experts.
        let streamed = metric("prima_member_streamed_weight_bytes")?;
        self.held.push(1.0 - streamed / weights.experts);
        if misses > 0.0 {
            self.read_ratio.push(read / (misses * weights.expert));
        }
        Ok(())
    }
}
