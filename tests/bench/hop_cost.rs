//! What going round the ring costs: time per token over 1 to 30 hops (members x rounds), less the time that members computed.
//!
//! One thread per member. What they computed is by their own clocks, because the noise of computing is greater than what hops cost; one
//! process is measured beside them, so that a ring that computes more slowly is seen, too. The same turn has a raw TCP ring that hands on
//! the same bytes as often, with as much computing between. A ring of one member hands nothing on: what it adds is the fixed part: gateway,
//! sampling, streaming. A straight line through the medians of all others gives the cost of a hop; at zero hops it lies higher, because the
//! fewer the hops, the longer a member sleeps and the colder are its caches.

use std::time::{Duration, Instant};

use prima_tests::assets;
use prima_tests::one_process::{OneProcess, end_tokens};
use prima_text::most_likely;

use crate::Effort;
use crate::client::{Client, TokenCost};
use crate::error::BenchError;

use crate::ping_pong;
use prima_tests::statistics::{Line, Samples};

const MODEL: &str = "SmolLM2-135M-Instruct-Q4_1";
const THREADS: usize = 1;
const PROMPT: &str = "Once upon a time";
/// Members and rounds; the first has no hops.
const RINGS: [(usize, usize); 8] = [
    (1, 1),
    (2, 1),
    (3, 1),
    (2, 3),
    (3, 4),
    (3, 6),
    (3, 8),
    (3, 10),
];

/// The costs of all rings measured.
pub struct HopCost {
    pub model: &'static str,
    /// Bytes of one activation.
    pub bytes: usize,
    /// One process without a ring, milliseconds per token.
    pub one_process: Samples,
    pub rings: Vec<Ring>,
}

/// One shape of ring.
pub struct Ring {
    pub members: usize,
    pub rounds: usize,
    /// Milliseconds per token that members compute.
    pub computing: Samples,
    /// Milliseconds per token beside computing.
    pub ring: Samples,
    /// What handing the same bytes on as often costs on bare TCP, milliseconds per token.
    pub tcp: Samples,
}

impl Ring {
    pub fn hops(&self) -> usize {
        match self.members {
            1 => 0,
            members => members * self.rounds,
        }
    }
}

impl HopCost {
    /// Milliseconds per token over hops, of the ring and of bare TCP.
    pub fn lines(&self) -> (Line, Line) {
        let line = |of: fn(&Ring) -> &Samples| {
            let points: Vec<_> = self
                .rings
                .iter()
                .filter(|ring| ring.hops() > 0)
                .map(|ring| (ring.hops() as f64, of(ring).median()))
                .collect();
            Line::through(&points)
        };
        (line(|ring| &ring.ring), line(|ring| &ring.tcp))
    }

    /// Milliseconds per token besides hops: what a ring of one member adds.
    pub fn fixed(&self) -> f64 {
        let alone = self.rings.iter().find(|ring| ring.hops() == 0);
        alone.map_or(f64::NAN, |ring| ring.ring.median())
    }
}

pub fn measure(effort: &Effort) -> Result<HopCost, BenchError> {
    let path = assets::path(&format!("models/{MODEL}.gguf"))?;
    let engine = OneProcess::open(&path, THREADS)?;
    let never = end_tokens(&engine);
    let bytes = engine.model.spec().hidden * size_of::<f32>();
    let mut cost = HopCost {
        model: MODEL,
        bytes,
        one_process: Samples::default(),
        rings: RINGS
            .iter()
            .map(|&(members, rounds)| Ring {
                members,
                rounds,
                computing: Samples::default(),
                ring: Samples::default(),
                tcp: Samples::default(),
            })
            .collect(),
    };
    decode(&engine, effort.decode.min(8))?;
    for turn in 1..=effort.turns {
        for ring in &mut cost.rings {
            eprintln!(
                "hops, turn {turn}: {} members x {} rounds",
                ring.members, ring.rounds
            );
            let hops = ring.hops();
            let alone = || decode(&engine, effort.decode);
            let on_ring = || -> Result<TokenCost, BenchError> {
                let client = Client::start(&path, ring.members, ring.rounds, THREADS, &never);
                client.token_cost(8)?;
                client.token_cost(effort.decode)
            };
            // Who begins alternates. The bare network comes last: it waits between hops as the process computed.
            let (computing, on_ring) = match turn.is_multiple_of(2) {
                true => {
                    let on_ring = on_ring()?;
                    (alone()?, on_ring)
                }
                false => (alone()?, on_ring()?),
            };
            let tcp = match hops {
                0 => 0.0,
                _ => {
                    let between = Duration::from_secs_f64(computing / hops as f64);
                    let messages = (effort.decode * hops).next_multiple_of(2);
                    ping_pong::seconds_per_hop(bytes, messages, between)?
                }
            };
            cost.one_process.push(1e3 * computing);
            ring.computing.push(1e3 * on_ring.computing);
            ring.ring.push(1e3 * (on_ring.seconds - on_ring.computing));
            ring.tcp.push(1e3 * tcp * hops as f64);
        }
    }
    Ok(cost)
}

/// Seconds per token of a greedy continuation in this process, by the same steps as rank 0 takes, without ring and endpoint.
fn decode(engine: &OneProcess, count: usize) -> Result<f64, BenchError> {
    let prompt = engine
        .tokenizer
        .encode(PROMPT, true, false)
        .map_err(prima_tests::one_process::OneProcessError::from)?;
    let mut kv = engine.sequence(prompt.len() + count);
    let mut token = most_likely(&engine.last_logits(&prompt, &mut kv)?);
    let start = Instant::now();
    for _ in 1..count {
        token = most_likely(&engine.last_logits(&[token], &mut kv)?);
    }
    Ok(start.elapsed().as_secs_f64() / (count - 1) as f64)
}
