//! Mixtures of experts beside llama.cpp: in memory, and with memory for a part of the experts.
//!
//! The models are as wide as published ones and have as many experts, in fewer layers, with random weights. Their routers are random, too: a
//! token goes to any expert with the same chance, and what is in memory helps as little as it can.

use std::path::Path;

use prima_engine::Compute;
use prima_engine::kernels::{IsaLevel, ThreadPool};
use prima_gguf::Gguf;
use prima_tests::Endpoint;
use prima_tests::assets;
use prima_tests::http;
use prima_tests::local_ring::LocalRing;
use prima_tests::machine::{Limits, Machine, drop_cached};
use prima_tests::one_process::{OneProcess, end_tokens};
use prima_tests::statistics::Samples;

use crate::Effort;
use crate::client::Client;
use crate::engine_speed::{Pair, decode, prefill};
use crate::error::BenchError;
use crate::peer::{self, Programs};

const MODELS: [&str; 2] = [
    "shape-qwen3-30b-a3b-8-layers-Q4_K_M",
    "shape-gpt-oss-20b-8-layers-MXFP4",
];
/// Of the experts, what there is memory for.
const SHARES: [f64; 2] = [0.5, 0.25];
/// Beside weights: the process, its buffers, keys and values.
const OTHER_BYTES: f64 = 400e6;
const TURNS: usize = 5;
const TURNS_UNDER_LIMIT: usize = 3;
const WARM_UP: usize = 48;
const TOKENS: usize = 32;
/// For llama.cpp, which takes long for each; before them it decodes as many.
const PEER_TOKENS: usize = 16;

pub struct ExpertSpeed {
    pub model: &'static str,
    pub threads: usize,
    pub decode_tokens: usize,
    pub decode: Pair,
    pub prefill_tokens: usize,
    pub prefill: Pair,
    /// `None` where no cgroup can be made.
    pub limited: Option<Vec<Limited>>,
}

/// With memory for a part of the experts.
pub struct Limited {
    pub share: f64,
    pub megabytes: u64,
    /// Tokens per second.
    pub ring: Samples,
    pub llama_cpp: Samples,
    /// Of the experts that tokens needed, those that were in memory.
    pub hit_rate: Samples,
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
        limited: None,
    };
    eprintln!("{model}: beside llama.cpp, in memory");
    for turn in 0..effort.turns.min(TURNS) {
        let decoded = speed.decode_tokens;
        speed.decode.take_turn(
            turn,
            || decode(&engine, &mut engine.sequence(1 + decoded), decoded),
            || peer.tokens_per_second(&path, threads, 0, decoded),
        )?;
        let prefilled = speed.prefill_tokens;
        speed.prefill.take_turn(
            turn,
            || prefill(&engine, &mut engine.sequence(prefilled), prefilled),
            || peer.tokens_per_second(&path, threads, prefilled, 0),
        )?;
    }
    drop(engine);
    if let Err(error) = Machine::new("try", &Limits::of_memory(1 << 30), Path::new("/")) {
        eprintln!("memory limits: left out, they take root and a writable memory cgroup ({error})");
        return Ok(speed);
    }
    let mut limited: Vec<Limited> = SHARES
        .iter()
        .map(|&share| Limited {
            share,
            megabytes: ((weights.others + share * weights.experts + OTHER_BYTES) / 1e6) as u64,
            ring: Samples::default(),
            llama_cpp: Samples::default(),
            hit_rate: Samples::default(),
            read_ratio: Samples::default(),
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
                    }
                }
            }
        }
    }
    speed.limited = Some(limited);
    Ok(speed)
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
        let ring = LocalRing::builder()
            .model(path)
            .measured()
            .arg("--threads")
            .arg(threads.to_string())
            .arg("--context")
            .arg("512")
            .start_on(machine);
        let address = ring.address();
        let client = Client::of(ring, never);
        // Fills memory with experts.
        client.seconds_per_random_token(1, WARM_UP)?;
        let metrics = || {
            let metric =
                |name| http::metric(address, name).map_err(|source| BenchError::Http { source });
            Ok::<_, BenchError>([
                metric("prima_member_read_bytes_total")?,
                metric("prima_member_expert_hits_total")?,
                metric("prima_member_expert_misses_total")?,
            ])
        };
        let before = metrics()?;
        let seconds = client.seconds_per_random_token(2, TOKENS)?;
        let after = metrics()?;
        let [read, hits, misses] = [0, 1, 2].map(|place| after[place] - before[place]);
        self.ring.push(1.0 / seconds);
        self.hit_rate.push(hits / (hits + misses));
        self.read_ratio.push(read / (misses * weights.expert));
        Ok(())
    }
}
