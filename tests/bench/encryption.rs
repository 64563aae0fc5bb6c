//! What it costs a hop that members prove who they are and that others cannot read what they hand on: the same ring of two members on one
//! machine, once as `prima run` starts it there, in the clear, and once with a member that `prima agent` lends, over TLS.
//!
//! What members computed, by their own clocks, is taken off, as in `hop_cost`.

use prima_tests::assets;
use prima_tests::free_ports::free_address;
use prima_tests::lending::User;
use prima_tests::local_ring::{LocalRing, LocalRingBuilder};
use prima_tests::one_process::{OneProcess, end_tokens};
use prima_tests::statistics::Samples;

use crate::Effort;
use crate::client::Client;
use crate::error::BenchError;

pub const MODEL: &str = "SmolLM2-135M-Instruct-Q4_1";
/// Of each member's 15 layers, 3 a round.
pub const ROUNDS: usize = 5;
const LAYERS: usize = 15;
/// Of two members, in a token.
pub const HOPS: usize = 2 * ROUNDS;
/// Rings for each way in a turn: the clocks of one are seldom those of the next.
const RINGS: usize = 2;

/// Milliseconds of a hop.
#[derive(Default)]
pub struct Encryption {
    pub plain: Samples,
    pub encrypted: Samples,
}

pub fn measure(effort: &Effort) -> Result<Encryption, BenchError> {
    let path = assets::path(&format!("models/{MODEL}.gguf"))?;
    let never = end_tokens(&OneProcess::open(&path, 1)?);
    let ring = || {
        LocalRing::builder()
            .model(&path)
            .rounds(ROUNDS)
            .split(&[LAYERS; 2])
            .arg("--threads")
            .arg("1")
            .arg("--no-speculation")
    };
    let per_hop = |ring: LocalRingBuilder| -> Result<f64, BenchError> {
        let client = Client::of(ring.start(), &never);
        client.token_cost(8)?;
        let cost = client.token_cost(effort.decode)?;
        Ok(1e3 * (cost.seconds - cost.computing) / HOPS as f64)
    };
    let (owner, user) = (User::default(), User::default());
    let lender = owner.lend("other", &free_address().to_string(), None);
    let mut member = lender.invitation();
    let mut measured = Encryption::default();
    for turn in 1..=effort.turns * RINGS {
        eprintln!("encryption, turn {turn}");
        let lent = user.variables().into_iter();
        let lent = lent.fold(ring(), |ring, (name, value)| ring.env(name, value));
        let lent = lent.arg("--member").arg(&member);
        // Who begins alternates.
        let (plain, encrypted) = match turn.is_multiple_of(2) {
            true => {
                let plain = per_hop(ring())?;
                (plain, per_hop(lent)?)
            }
            false => {
                let encrypted = per_hop(lent)?;
                (per_hop(ring())?, encrypted)
            }
        };
        // From the second time on it is known.
        member.clone_from(&lender.address);
        measured.plain.push(plain);
        measured.encrypted.push(encrypted);
    }
    Ok(measured)
}
