//! A model that is larger than the memory it may use: tokens per second and bytes read for each, beside llama.cpp under the same limit.
//!
//! llama.cpp runs at its best setting there: its map, without repacking (with its default it is killed for memory). Each run starts
//! with nothing of the model in the page cache, in a cgroup of its own. Leaves itself out where no cgroup can be made.

use std::path::Path;

use prima_tests::Endpoint;
use prima_tests::assets;
use prima_tests::http;
use prima_tests::local_ring::LocalRing;
use prima_tests::machine::{Limits, Machine, drop_cached};
use prima_tests::one_process::{OneProcess, end_tokens};

use crate::Effort;
use crate::client::Client;
use crate::error::BenchError;
use crate::peer;
use crate::prediction::predicted;
use prima_tests::statistics::Samples;

pub const MODEL: &str = "shape-8b-Q4_K_M";
const THREADS: usize = 2;
/// Memory in units of 10^6 bytes, and the goal: how many times as fast as llama.cpp.
const LIMITS: [(u64, f64); 2] = [(4000, 3.5), (2560, 1.8)];
const PROMPT: &str = "Once upon a time";
const TURNS: usize = 3;
const TOKENS: usize = 16;
/// For llama.cpp, which takes seconds for each.
const PEER_TOKENS: usize = 4;

/// One limit.
pub struct UnderLimit {
    pub megabytes: u64,
    pub goal: f64,
    /// Tokens per second.
    pub ring: Samples,
    pub llama_cpp: Samples,
    pub predicted: Samples,
    /// Megabytes read for each token, and what the plan expected.
    pub read: Samples,
    pub planned_read: Samples,
}

/// `None` where no cgroup can be made.
pub fn measure(effort: &Effort) -> Result<Option<Vec<UnderLimit>>, BenchError> {
    if let Err(error) = Machine::new("try", &Limits::of_memory(1 << 30), Path::new("/")) {
        eprintln!("memory limits: left out, they take root and a writable memory cgroup ({error})");
        return Ok(None);
    }
    let path = assets::path(&format!("models/{MODEL}.gguf"))?;
    let bench = peer::build()?;
    let never = end_tokens(&OneProcess::open(&path, 1)?);
    let mut limits: Vec<UnderLimit> = LIMITS
        .iter()
        .map(|&(megabytes, goal)| UnderLimit {
            megabytes,
            goal,
            ring: Samples::default(),
            llama_cpp: Samples::default(),
            predicted: Samples::default(),
            read: Samples::default(),
            planned_read: Samples::default(),
        })
        .collect();
    for turn in 1..=effort.turns.min(TURNS) {
        for limit in &mut limits {
            eprintln!("memory limits, turn {turn}: {} MB", limit.megabytes);
            let cgroup = |source| BenchError::Cgroup { source };
            let page_cache = |source| BenchError::PageCache { source };
            let limits = Limits::of_memory(limit.megabytes * 1_000_000);
            let machine = Machine::new("bench", &limits, &path).map_err(cgroup)?;
            // Who begins alternates.
            for ours in [turn.is_multiple_of(2), !turn.is_multiple_of(2)] {
                drop_cached(&path).map_err(page_cache)?;
                if ours {
                    limit.ring(&path, &machine, &never)?;
                } else {
                    let rate =
                        bench.tokens_per_second_in(&machine, &path, THREADS, PEER_TOKENS, 1)?;
                    limit.llama_cpp.push(rate);
                }
            }
        }
    }
    Ok(Some(limits))
}

impl UnderLimit {
    fn ring(&mut self, path: &Path, machine: &Machine, never: &[u32]) -> Result<(), BenchError> {
        let ring = LocalRing::builder()
            .model(path)
            .measured()
            .arg("--threads")
            .arg(THREADS.to_string())
            .arg("--context")
            .arg("512")
            .start_on(machine);
        self.predicted.push(predicted(&ring)?);
        let address = ring.address();
        let client = Client::of(ring, never);
        // Loads what stays in memory.
        client.seconds_per_token(PROMPT, 8)?;
        let metric =
            |name| http::metric(address, name).map_err(|source| BenchError::Http { source });
        let before = metric("prima_member_read_bytes_total")?;
        let seconds = client.seconds_per_token(PROMPT, TOKENS)?;
        let read = metric("prima_member_read_bytes_total")? - before;
        self.ring.push(1.0 / seconds);
        // The prompt is computed at once, and so read once.
        self.read.push(read / TOKENS as f64 / 1e6);
        let planned = metric("prima_member_planned_read_bytes")?;
        self.planned_read.push(planned / 1e6);
        Ok(())
    }
}
