//! What it gives to run ahead: tokens per second of one request on a ring whose machines are far from one another, without speculation, with
//! one draft after the other, and with further drafts before the first is verified.
//!
//! The members are processes of this machine, of one thread each. They share its processors, and rank 0 knows that: what runs ahead fills the
//! time of links only. Rings of several machines gain more (`scheduler/timed_ring.rs`).

use std::time::Duration;

use prima_tests::assets;
use prima_tests::machine_ring::{MachineRing, Node, ThisMachine, draft, plan, usual_profile};
use prima_tests::one_process::{OneProcess, end_tokens};

use crate::Effort;
use crate::client::Client;
use crate::error::BenchError;
use crate::speculation::{Cell, WORKLOADS, workloads};

pub const MODEL: &str = "SmolLM2-135M-Instruct-F32";
/// The same weights in another format: no draft is better.
const DRAFT: &str = "SmolLM2-135M-Instruct-Q4_1";
pub const MEMBERS: usize = 4;
const CONTEXT: &str = "2048";
const TURNS: usize = 3;
/// Milliseconds from each member to the next.
const DELAYS: [u64; 2] = [5, 25];
/// The first is without speculation.
const SETTINGS: [(&str, &[&str]); 3] = [
    ("off", &["--no-speculation"]),
    ("one draft after the other", &["--no-run-ahead"]),
    ("drafts that run ahead", &[]),
];

/// The settings at one distance.
pub struct FarLinks {
    pub milliseconds: u64,
    pub settings: Vec<(&'static str, [Cell; WORKLOADS.len()])>,
}

pub fn measure(effort: &Effort) -> Result<Vec<FarLinks>, BenchError> {
    DELAYS
        .iter()
        .map(|&delay| measure_at(effort, delay))
        .collect()
}

fn measure_at(effort: &Effort, milliseconds: u64) -> Result<FarLinks, BenchError> {
    let (model, small) = (path(MODEL)?, path(DRAFT)?);
    let never = end_tokens(&OneProcess::open(&model, 1)?);
    let workloads = workloads()?;
    let profiles = vec![usual_profile(); MEMBERS];
    let mut plan = plan(&model, profiles, &["--context", CONTEXT]).plan;
    plan.spec.draft = Some(draft(&small));
    let node = || Node {
        machine: &ThisMachine,
        model: model.clone(),
    };
    let nodes: Vec<Node<'_>> = (0..MEMBERS).map(|_| node()).collect();
    let mut settings: Vec<_> = SETTINGS
        .iter()
        .map(|&(name, options)| (name, options, Default::default()))
        .collect();
    for turn in 1..=TURNS.min(effort.turns) {
        // Who begins alternates.
        settings.reverse();
        for (name, options, cells) in &mut settings {
            eprintln!("far links, turn {turn}: {milliseconds} ms, {name}");
            let options = [&["--threads", "1"], *options].concat();
            let delay = Duration::from_millis(milliseconds);
            let ring = MachineRing::start_apart(plan.clone(), &nodes, &options, delay);
            let client = Client::of(ring, &never);
            client.seconds_per_token("Once upon a time", 8)?;
            let cells: &mut [Cell; WORKLOADS.len()] = cells;
            for (workload, cell) in workloads.iter().zip(cells) {
                cell.measure(&client, workload, effort.decode, turn)?;
            }
        }
    }
    settings.sort_by_key(|(name, ..)| SETTINGS.iter().position(|one| one.0 == *name));
    let settings = settings.into_iter().map(|(name, _, cells)| (name, cells));
    let settings: Vec<(_, [Cell; WORKLOADS.len()])> = settings.collect();
    let texts = |cells: &[Cell; WORKLOADS.len()]| cells.each_ref().map(|cell| cell.answers.clone());
    if settings
        .iter()
        .any(|(_, cells)| texts(cells) != texts(&settings[0].1))
    {
        let what = format!("a prompt, by speculation over links of {milliseconds} ms");
        return Err(BenchError::Changed { what });
    }
    Ok(FarLinks {
        milliseconds,
        settings,
    })
}

fn path(model: &str) -> Result<std::path::PathBuf, BenchError> {
    Ok(assets::path(&format!("models/{model}.gguf"))?)
}
