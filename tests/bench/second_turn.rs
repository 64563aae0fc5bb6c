//! How soon the second turn of a conversation is answered, when the ring has computed all but its last words already.
//!
//! Prompts are tokens, the same for both. Each turn has new processes, so that nothing is known of the conversation before; and a
//! ring that has never seen it must answer the second turn with the same text.

use crate::Effort;
use crate::contenders::{Both, Contender, Contenders, moby_dick};
use crate::error::BenchError;
use crate::peer::Programs;
use prima_tests::statistics::Samples;

/// Models, and the most turns: large ones take long.
const SUBJECTS: [(&str, usize); 2] = [("SmolLM2-135M-Instruct-Q4_1", 7), ("shape-1b-Q4_K_M", 3)];
/// Tokens of the first turn, in units of what an effort prefills: 4096 where it counts.
const FIRST: usize = 8;
/// Tokens that the second turn adds to the first and its answer; and of an answer.
const QUESTION: usize = 64;
const ANSWER: usize = 16;

pub struct SecondTurn {
    pub model: &'static str,
    /// Tokens of the first turn.
    pub shared: usize,
    pub waits: Both<Waits>,
}

/// Seconds to the first token of each turn, and tokens of the second that were not computed again.
#[derive(Default)]
pub struct Waits {
    pub first: Samples,
    pub second: Samples,
    pub cached: Samples,
}

pub fn measure(effort: &Effort, peer: &Programs) -> Result<Vec<SecondTurn>, BenchError> {
    const LETTERS_PER_TOKEN: usize = 8; // at most, in this text
    let letters = LETTERS_PER_TOKEN * FIRST * effort.prefill;
    let text: String = moby_dick()?.chars().take(letters).collect();
    let mut measured = Vec::new();
    for (model, turns) in SUBJECTS {
        let contenders = Contenders::open(model, peer)?;
        let tokens = contenders.tokens(&text)?;
        let (first, question) = tokens.split_at(FIRST * effort.prefill);
        let mut second_turn = SecondTurn {
            model,
            shared: first.len(),
            waits: Both::default(),
        };
        for turn in 1..=turns.min(effort.turns) {
            eprintln!("second turn of a conversation, turn {turn}: {model}");
            second_turn.waits.take_turn(turn, |contender, waits| {
                let client = contenders.start(contender, &[])?;
                let before = client.answer(&client.request(first, ANSWER))?;
                let answered = contenders.tokens(&before.text)?;
                let second = [first, &answered, &question[..QUESTION]].concat();
                let after = client.answer(&client.request(second.clone(), ANSWER))?;
                waits.first.push(before.first_token_seconds);
                waits.second.push(after.first_token_seconds);
                waits.cached.push(after.cached_tokens as f64);
                drop(client);
                if let Contender::Prima = contender {
                    let fresh = contenders.start(contender, &[])?;
                    let alone = fresh.answer(&fresh.request(second, ANSWER))?;
                    if alone.text != after.text || alone.cached_tokens > 0 {
                        let what = format!("the second turn with {model}");
                        return Err(BenchError::Changed { what });
                    }
                }
                Ok(())
            })?;
        }
        measured.push(second_turn);
    }
    Ok(measured)
}
