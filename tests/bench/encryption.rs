//! What it costs a hop that members prove who they are and that others cannot read what they hand on: the same ring of two members on one
//! machine, once as `prima run` starts it there, in the clear, and once with a member that `prima agent` lends, over TLS.
//!
//! What members computed, by their own clocks, is taken off, as in `hop_cost`; and of what a token costs beside that, only what more hops add
//! counts.

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
/// Of each member.
const LAYERS: usize = 15;
/// A token goes from member to member twice a round.
pub const FEW_HOPS: usize = 2;
pub const MANY_HOPS: usize = 2 * LAYERS;

/// Milliseconds of a hop.
#[derive(Default)]
pub struct Encryption {
    pub plain: Samples,
    pub encrypted: Samples,
}

pub fn measure(effort: &Effort) -> Result<Encryption, BenchError> {
    let path = assets::path(&format!("models/{MODEL}.gguf"))?;
    let never = end_tokens(&OneProcess::open(&path, 1)?);
    let per_hop = |way: &dyn Fn(LocalRingBuilder) -> LocalRingBuilder| {
        let beside_computing = |hops: usize| -> Result<f64, BenchError> {
            let ring = LocalRing::builder().model(&path).split(&[LAYERS; 2]);
            let ring = ring.rounds(hops / 2).arg("--threads").arg("1");
            let client = Client::of(way(ring.arg("--no-speculation")).start(), &never);
            client.token_cost(8)?;
            let cost = client.token_cost(effort.decode)?;
            Ok(1e3 * (cost.seconds - cost.computing))
        };
        let more = beside_computing(MANY_HOPS)? - beside_computing(FEW_HOPS)?;
        Ok::<_, BenchError>(more / (MANY_HOPS - FEW_HOPS) as f64)
    };
    let in_the_clear = |ring| ring;
    let (owner, user) = (User::default(), User::default());
    let lender = owner.lend("other", &free_address().to_string(), None);
    // At the first time it asks for the word, which is for one borrower; then it is known.
    let first = LocalRing::builder().model(&path).split(&[LAYERS; 2]);
    drop(user.borrowing(first, &lender.invitation()).start());
    let over_tls = |ring| user.borrowing(ring, &lender.address);
    let mut measured = Encryption::default();
    for turn in 1..=effort.turns {
        eprintln!("encryption, turn {turn}");
        // Who begins alternates.
        let (plain, encrypted) = match turn.is_multiple_of(2) {
            true => {
                let plain = per_hop(&in_the_clear)?;
                (plain, per_hop(&over_tls)?)
            }
            false => {
                let encrypted = per_hop(&over_tls)?;
                (per_hop(&in_the_clear)?, encrypted)
            }
        };
        measured.plain.push(plain);
        measured.encrypted.push(encrypted);
    }
    Ok(measured)
}
