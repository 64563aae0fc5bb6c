//! What becomes of an answer while another's long prompt is computed, and what the prompt waits for the answer: each alone, and both together.
//!
//! Each measurement has new processes, so nothing is known of the prompt. Nobody speculates.

use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use prima_tests::statistics::Samples;

use crate::Effort;
use crate::client::Client;
use crate::contenders::{Contender, Contenders, moby_dick};
use crate::error::BenchError;
use crate::peer::Programs;

/// Models, and the most turns: large ones take long.
const SUBJECTS: [(&str, usize); 2] = [("SmolLM2-135M-Instruct-Q4_1", 5), ("shape-1b-Q4_K_M", 3)];
/// Tokens of the prompt, in units of what an effort prefills: 2,560 where it counts.
const PROMPT: usize = 5;
/// What is answered, and how many tokens of that have come when the prompt is sent.
const STORY: &str = "Once upon a time";
pub const BEFORE: usize = 20;
/// Tokens of an answer that is still there at the prompt's first token.
const LONGEST: usize = 2000;

const SETTINGS: [(&str, Contender, &[&str]); 3] = [
    ("a ring of one", Contender::Prima, &["--no-speculation"]),
    (
        "a ring of two",
        Contender::Prima,
        &["--no-speculation", "--members", "2"],
    ),
    // A place for each of the two, in one context's memory.
    (
        "llama.cpp",
        Contender::LlamaCpp,
        &["-np", "2", "--kv-unified"],
    ),
];

/// One model.
pub struct BesidePrompt {
    pub model: &'static str,
    /// Tokens of the prompt.
    pub prompt: usize,
    pub settings: Vec<Measured>,
}

pub struct Measured {
    pub name: &'static str,
    contender: Contender,
    options: &'static [&'static str],
    pub alone: Seen,
    pub together: Seen,
}

/// What the two clients saw.
#[derive(Default)]
pub struct Seen {
    /// Tokens per second of the answer.
    pub decode: Samples,
    /// The longest time from one of its tokens to the next, in seconds.
    pub longest_gap: Samples,
    /// Seconds from the prompt to its first token.
    pub first_token: Samples,
}

pub fn measure(effort: &Effort, peer: &Programs) -> Result<Vec<BesidePrompt>, BenchError> {
    const LETTERS_PER_TOKEN: usize = 8; // at most, in this text
    let count = PROMPT * effort.prefill;
    let letters = LETTERS_PER_TOKEN * count;
    let text: String = moby_dick()?.chars().take(letters).collect();
    let mut measured = Vec::new();
    for (model, turns) in SUBJECTS {
        let contenders = Contenders::open(model, peer)?;
        let tokens = contenders.tokens(&text)?;
        let prompt = &tokens[..count];
        let mut settings = SETTINGS.map(|(name, contender, options)| Measured {
            name,
            contender,
            options,
            alone: Seen::default(),
            together: Seen::default(),
        });
        for turn in 1..=turns.min(effort.turns) {
            // Who begins alternates, and what.
            settings.reverse();
            for setting in &mut settings {
                eprintln!("beside a prompt, turn {turn}: {model}, {}", setting.name);
                let even = turn.is_multiple_of(2);
                for together in [even, !even] {
                    let client = contenders.start(setting.contender, setting.options)?;
                    match together {
                        true => setting.together.together(&client, prompt)?,
                        false => setting.alone.alone(&client, prompt, effort.decode)?,
                    }
                }
            }
        }
        settings.sort_by_key(|setting| SETTINGS.iter().position(|one| one.0 == setting.name));
        measured.push(BesidePrompt {
            model,
            prompt: count,
            settings: settings.into(),
        });
    }
    Ok(measured)
}

impl Seen {
    /// First one, then the other.
    fn alone(&mut self, client: &Client, prompt: &[u32], tokens: usize) -> Result<(), BenchError> {
        let answer = client.answer(&client.request(STORY, tokens))?;
        let gaps: Samples = answer.gaps().collect();
        let [begun, came] = first_token(client, prompt)?;
        self.decode.push(1.0 / answer.seconds_per_token);
        self.longest_gap.push(gaps.largest());
        self.first_token.push((came - begun).as_secs_f64());
        Ok(())
    }

    /// The prompt comes while the answer does. Of that only the time counts until the prompt's first token.
    fn together(&mut self, client: &Client, prompt: &[u32]) -> Result<(), BenchError> {
        let (times, prompted) = thread::scope(|threads| {
            let (tell, told) = mpsc::channel();
            let prompting = threads.spawn(move || {
                // Nobody tells if the answer breaks off before.
                let told = told.recv().ok();
                told.map(|()| first_token(client, prompt)).transpose()
            });
            let (mut times, mut over) = (Vec::new(), false);
            for event in client.events(&client.request(STORY, LONGEST))? {
                let event = event?;
                if event.text().is_none() {
                    continue;
                }
                times.push(event.came);
                if over {
                    break;
                }
                // Then the next token is the first behind it.
                over = prompting.is_finished();
                if times.len() == BEFORE {
                    // It fails only if the other has ended.
                    let _ = tell.send(());
                }
            }
            drop(tell);
            let prompted = prompting.join().expect("a client that does not panic")?;
            Ok::<_, BenchError>((times, prompted))
        })?;
        let Some([begun, came]) = prompted.filter(|[_, came]| times.last() >= Some(came)) else {
            let tokens = times.len();
            return Err(BenchError::Outpaced { tokens });
        };
        let seconds = (came - begun).as_secs_f64();
        let meanwhile = times.iter().filter(|time| (begun..=came).contains(*time));
        let pairs = times
            .windows(2)
            .filter(|pair| begun < pair[1] && pair[0] < came);
        let gaps: Samples = pairs
            .map(|pair| (pair[1] - pair[0]).as_secs_f64())
            .collect();
        self.decode.push(meanwhile.count() as f64 / seconds);
        self.longest_gap.push(gaps.largest());
        self.first_token.push(seconds);
        Ok(())
    }
}

/// When a prompt was sent, and when its first token had come: the only one, so that is the end.
fn first_token(client: &Client, prompt: &[u32]) -> Result<[Instant; 2], BenchError> {
    let begun = Instant::now();
    for event in client.events(&client.request(prompt, 1))? {
        event?;
    }
    Ok([begun, Instant::now()])
}
