//! What members that wait cost the others, and what several requests at once gain.
//!
//! Rings of one and of three members on this machine, each member with as many threads as there are cores. A token is computed by
//! one member at a time, so three members can be as fast as one only if those that wait leave the cores alone.

use prima_engine::Compute;
use prima_tests::assets;
use prima_tests::one_process::{OneProcess, end_tokens};

use crate::Effort;
use crate::client::Client;
use crate::error::BenchError;
use prima_tests::statistics::Samples;

const PROMPT: &str = "Once upon a time";
const MODEL: &str = "SmolLM2-135M-Instruct-Q4_1";
pub const REQUESTS: [usize; 3] = [1, 4, 16];
const MEMBERS: [usize; 2] = [1, 3];

/// One ring.
pub struct RingSpeed {
    pub model: &'static str,
    pub members: usize,
    pub threads: usize,
    /// Tokens per second of one request, from its first token on.
    pub decode: Samples,
    /// Tokens per second of all requests together, prompts included, for each of [`REQUESTS`].
    pub at_once: [Samples; REQUESTS.len()],
}

/// The rings of one and of three members, in this order.
pub fn measure(effort: &Effort) -> Result<Vec<RingSpeed>, BenchError> {
    let path = assets::path(&format!("models/{MODEL}.gguf"))?;
    let threads = Compute::available_threads();
    let never = end_tokens(&OneProcess::open(&path, 1)?);
    let mut rings = MEMBERS.map(|members| RingSpeed {
        model: MODEL,
        members,
        threads,
        decode: Samples::default(),
        at_once: Default::default(),
    });
    for turn in 1..=effort.turns {
        // Who begins alternates.
        rings.reverse();
        for ring in &mut rings {
            eprintln!("requests at once, turn {turn}: {} members", ring.members);
            let client = Client::start(&path, ring.members, 1, threads, &never);
            client.seconds_per_token(PROMPT, 8)?;
            let seconds = client.seconds_per_token(PROMPT, effort.decode)?;
            ring.decode.push(1.0 / seconds);
            for (requests, samples) in REQUESTS.iter().zip(&mut ring.at_once) {
                let answers = client.at_once(*requests, effort.decode)?;
                samples.push(answers.tokens_per_second);
            }
        }
    }
    rings.sort_by_key(|ring| ring.members);
    Ok(rings.into())
}
