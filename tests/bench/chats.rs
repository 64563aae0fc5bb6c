//! Many short chats at once: what they get together, and how evenly each one's tokens come.

use crate::Effort;
use crate::contenders::{Both, Contender, Contenders};
use crate::error::BenchError;
use crate::peer::Programs;
use prima_tests::statistics::Samples;

/// Models, and the most turns: large ones take long.
const SUBJECTS: [(&str, usize); 2] = [("SmolLM2-135M-Instruct-Q4_1", 7), ("shape-1b-Q4_K_M", 3)];
pub const AT_ONCE: usize = 16;
/// A ring computes as many at once by default, in one context's memory; llama-server, when told so.
const LLAMA_SERVER: [&str; 3] = ["-np", "16", "--kv-unified"];

pub struct Chats {
    pub model: &'static str,
    /// Tokens of each answer.
    pub tokens: usize,
    pub together: Both<Together>,
}

#[derive(Default)]
pub struct Together {
    /// Of all answers, prompts included.
    pub tokens_per_second: Samples,
    /// Milliseconds from one token of an answer to its next: quantiles over all answers of a turn.
    pub p50: Samples,
    pub p99: Samples,
}

pub fn measure(effort: &Effort, peer: &Programs) -> Result<Vec<Chats>, BenchError> {
    let mut measured = Vec::new();
    for (model, turns) in SUBJECTS {
        let contenders = Contenders::open(model, peer)?;
        let mut chats = Chats {
            model,
            tokens: effort.decode,
            together: Both::default(),
        };
        for turn in 1..=turns.min(effort.turns) {
            eprintln!("{AT_ONCE} chats at once, turn {turn}: {model}");
            chats.together.take_turn(turn, |contender, together| {
                let options: &[&str] = match contender {
                    Contender::Prima => &[],
                    Contender::LlamaCpp => &LLAMA_SERVER,
                };
                let client = contenders.start(contender, options)?;
                let answers = client.at_once(AT_ONCE, effort.decode)?;
                together.tokens_per_second.push(answers.tokens_per_second);
                together.p50.push(1e3 * answers.gaps.quantile(0.5));
                together.p99.push(1e3 * answers.gaps.quantile(0.99));
                Ok(())
            })?;
        }
        measured.push(chats);
    }
    Ok(measured)
}
