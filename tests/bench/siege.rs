//! What streams notice while other clients send 200 bodies of 4 MiB and open 1,000 connections that do nothing: seconds from one token to the
//! next, with and without the siege, on the same ring.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use prima_engine::Compute;
use prima_node_agent::idle_thread::only_when_idle;
use prima_tests::Endpoint;
use prima_tests::assets;
use prima_tests::local_ring::LocalRing;
use prima_tests::one_process::{OneProcess, end_tokens};
use prima_tests::process::peak_memory;
use prima_tests::siege::{allow_open_files, hostile_bodies, siege};

use crate::Effort;
use crate::client::Client;
use crate::error::BenchError;
use prima_tests::statistics::Samples;

/// A small one, whose tokens take no longer than a system's other work does at a time, and one of the size that people talk to.
const MODELS: [&str; 2] = ["SmolLM2-135M-Instruct-Q4_1", "TinyLlama-1.1B-Chat-Q4_K_M"];
/// Streams at a time.
pub const STREAMS: usize = 3;
/// Tokens of an answer; one follows the other while the siege lasts.
const TOKENS: usize = 100;
const TURNS: usize = 5;
/// How long it is looked at without a siege: a hundredth of what comes in it is still several tokens.
const PEACE: Duration = Duration::from_secs(20);

/// Seconds from one token to the next of all streams of a turn.
#[derive(Default)]
pub struct Siege {
    pub model: &'static str,
    pub p99_in_peace: Samples,
    pub p99_under_siege: Samples,
    pub p50_in_peace: Samples,
    pub p50_under_siege: Samples,
    /// How much more memory rank 0 had at its peak, in MiB.
    pub grown: Samples,
}

pub fn measure(effort: &Effort) -> Result<Vec<Siege>, BenchError> {
    MODELS.iter().map(|model| of_model(effort, model)).collect()
}

fn of_model(effort: &Effort, model: &'static str) -> Result<Siege, BenchError> {
    let path = assets::path(&format!("models/{model}.gguf"))?;
    let never = end_tokens(&OneProcess::open(&path, 1)?);
    let bodies = hostile_bodies();
    let mut measured = Siege {
        model,
        ..Siege::default()
    };
    for turn in 1..=effort.turns.min(TURNS) {
        eprintln!("siege of {model}, turn {turn}");
        let threads = Compute::available_threads().to_string();
        let ring = LocalRing::builder()
            .model(&path)
            .members(1)
            .arg("--threads")
            .arg(threads)
            // The answers are the same each time: what was said before would be guessed.
            .arg("--no-speculation")
            .start();
        allow_open_files(4096);
        let (address, rank_0) = (ring.address(), ring.members()[0].pid);
        let client = Client::of(ring, &never);
        let before = peak_memory(rank_0);
        let peace = || streams(&client, || thread::sleep(PEACE));
        let war = || streams(&client, || besiege(address, &bodies));
        // Who begins alternates.
        let (in_peace, under_siege) = match turn.is_multiple_of(2) {
            true => (peace()?, war()?),
            false => {
                let under_siege = war()?;
                (peace()?, under_siege)
            }
        };
        measured.p99_in_peace.push(in_peace.quantile(0.99));
        measured.p50_in_peace.push(in_peace.median());
        measured.p99_under_siege.push(under_siege.quantile(0.99));
        measured.p50_under_siege.push(under_siege.median());
        let grown = peak_memory(rank_0).saturating_sub(before);
        measured.grown.push(grown as f64 / f64::from(1 << 20));
    }
    Ok(measured)
}

/// With what the ring and its streams leave of the processors: who besieges a ring does it from another machine.
fn besiege(address: SocketAddr, bodies: &[(&'static str, String)]) {
    thread::scope(|threads| {
        threads.spawn(|| {
            only_when_idle().expect("anyone may wait");
            siege(address, bodies)
        });
    });
}

/// Streams answers for as long as `meanwhile` takes, and returns the time between tokens. Only tokens of that time count: answers that are under
/// way at its end still come, in peace.
fn streams(client: &Client, meanwhile: impl FnOnce()) -> Result<Samples, BenchError> {
    let over: OnceLock<Instant> = OnceLock::new();
    thread::scope(|threads| {
        let streaming: Vec<_> = (0..STREAMS)
            .map(|number| {
                let over = &over;
                threads.spawn(move || {
                    let mut times = Vec::new();
                    while over.get().is_none() {
                        let prompt = format!("Story number {number}: once upon a time");
                        times.push(client.answer(&client.request(prompt, TOKENS))?.times);
                    }
                    Ok::<_, BenchError>(times)
                })
            })
            .collect();
        meanwhile();
        let end = *over.get_or_init(Instant::now);
        let mut gaps = Samples::default();
        for one in streaming {
            let answers = one.join().expect("a client that does not panic")?;
            let pairs = answers.iter().flat_map(|times| times.windows(2));
            for pair in pairs.filter(|pair| pair[0] < end) {
                gaps.push((pair[1] - pair[0]).as_secs_f64());
            }
        }
        Ok(gaps)
    })
}
