//! What speculation gives where weights are read from disk for every pass: tokens per second of one request, off against on, under a limit of
//! memory, and the mean number of tokens that a pass brought. A pass with drafts reads as much as one without, so the gain should be nearly
//! that number.
//!
//! Leaves itself out where no cgroup can be made.

use std::path::Path;

use prima_engine::Compute;
use prima_tests::assets;
use prima_tests::local_ring::LocalRing;
use prima_tests::machine::{Limits, Machine, drop_cached};
use prima_tests::one_process::{OneProcess, end_tokens};

use crate::Effort;
use crate::client::Client;
use crate::contenders::Contender;
use crate::error::BenchError;
use crate::peer::Programs;
use crate::speculation::{Workload, repeated_code};
use prima_tests::statistics::Samples;

struct Subject {
    model: &'static str,
    megabytes: u64,
    turns: usize,
    /// Tokens of an answer.
    tokens: usize,
    /// Whether llama.cpp is fast enough there to be waited for.
    peer: bool,
}

/// The second has random weights, whose answers turn in circles after a while: then drafts are right for that reason.
const SUBJECTS: [Subject; 2] = [
    Subject {
        model: "TinyLlama-1.1B-Chat-Q4_K_M",
        megabytes: 500,
        turns: 3,
        tokens: 64,
        peer: true,
    },
    Subject {
        model: "shape-8b-Q4_K_M",
        megabytes: 2560,
        turns: 3,
        tokens: 128,
        peer: false,
    },
];
const CONTEXT: usize = 2048;

const SETTINGS: [(&str, Contender, &[&str]); 4] = [
    ("prima, off", Contender::Prima, &["--no-speculation"]),
    ("prima", Contender::Prima, &[]),
    ("llama.cpp, off", Contender::LlamaCpp, &[]),
    (
        "llama.cpp, ngram-simple",
        Contender::LlamaCpp,
        &["--spec-type", "ngram-simple", "--spec-draft-n-max", "64"],
    ),
];

/// One model under its limit.
pub struct Streamed {
    pub model: &'static str,
    pub megabytes: u64,
    pub tokens: usize,
    pub settings: Vec<Measured>,
}

pub struct Measured {
    pub name: &'static str,
    pub contender: Contender,
    options: &'static [&'static str],
    /// Tokens per second, from the first token on.
    pub decode: Samples,
    /// Tokens that a pass brought, where the program tells.
    pub per_pass: Samples,
    answers: Vec<String>,
}

/// `None` where no cgroup can be made.
pub fn measure(effort: &Effort, peer: &Programs) -> Result<Option<Vec<Streamed>>, BenchError> {
    if let Err(error) = Machine::new("try", &Limits::of_memory(1 << 30), Path::new("/")) {
        eprintln!(
            "streamed speculation: left out, it takes root and a writable memory cgroup ({error})"
        );
        return Ok(None);
    }
    let workload = repeated_code();
    let measured = SUBJECTS
        .iter()
        .map(|subject| measure_model(effort, peer, subject, &workload));
    measured.collect::<Result<_, _>>().map(Some)
}

fn measure_model(
    effort: &Effort,
    peer: &Programs,
    subject: &Subject,
    workload: &Workload,
) -> Result<Streamed, BenchError> {
    let path = assets::path(&format!("models/{}.gguf", subject.model))?;
    let never = end_tokens(&OneProcess::open(&path, 1)?);
    let compared = SETTINGS
        .iter()
        .filter(|(_, contender, _)| subject.peer || *contender == Contender::Prima);
    let mut settings: Vec<Measured> = compared
        .map(|&(name, contender, options)| Measured {
            name,
            contender,
            options,
            decode: Samples::default(),
            per_pass: Samples::default(),
            answers: Vec::new(),
        })
        .collect();
    let tokens = subject.tokens.min(effort.decode);
    for turn in 1..=subject.turns.min(effort.turns) {
        // Who begins alternates.
        settings.reverse();
        for setting in &mut settings {
            eprintln!(
                "streamed speculation, turn {turn}: {}, {}",
                subject.model, setting.name
            );
            let limits = Limits::of_memory(subject.megabytes * 1_000_000);
            let machine = Machine::new("bench", &limits, &path)
                .map_err(|source| BenchError::Cgroup { source })?;
            drop_cached(&path).map_err(|source| BenchError::PageCache { source })?;
            let client = setting.start(&path, &machine, peer, &never)?;
            setting.answer(&client, workload, tokens)?;
        }
    }
    settings.sort_by_key(|setting| SETTINGS.iter().position(|one| one.0 == setting.name));
    let [off, on, ..] = settings.as_slice() else {
        unreachable!("both of prima's settings are measured")
    };
    if off.answers != on.answers {
        let what = format!("a prompt, by speculation with {}", subject.model);
        return Err(BenchError::Changed { what });
    }
    Ok(Streamed {
        model: subject.model,
        megabytes: subject.megabytes,
        tokens,
        settings,
    })
}

impl Measured {
    fn start(
        &self,
        path: &Path,
        machine: &Machine,
        peer: &Programs,
        never: &[u32],
    ) -> Result<Client, BenchError> {
        let threads = Compute::available_threads();
        Ok(match self.contender {
            Contender::Prima => {
                let ring = LocalRing::builder()
                    .model(path)
                    .members(1)
                    .arg("--threads")
                    .arg(threads.to_string())
                    .arg("--context")
                    .arg(CONTEXT.to_string());
                let options = self.options.iter();
                let ring = options.fold(ring, |ring, option| ring.arg(option));
                Client::of(ring.start_on(machine), never)
            }
            Contender::LlamaCpp => {
                // Its best setting there: with weights in its map as they are.
                let options = [&["--no-repack"], self.options].concat();
                let server = peer.server_on(Some(machine), path, threads, CONTEXT, &options)?;
                Client::of(server, never)
            }
        })
    }

    fn answer(
        &mut self,
        client: &Client,
        workload: &Workload,
        tokens: usize,
    ) -> Result<(), BenchError> {
        let answer = client.answer(&client.request(workload.prompt(), tokens))?;
        self.decode.push(1.0 / answer.seconds_per_token);
        // The first token comes with the prompt. A draft may be longer than what is left of the answer.
        let passes = (tokens - 1).saturating_sub(answer.accepted).max(1);
        self.per_pass.push((tokens - 1) as f64 / passes as f64);
        self.answers.push(answer.text);
        Ok(())
    }
}
