//! What it gives to run ahead: tokens per second of one request on a ring whose machines are far from one another, without speculation, with
//! one draft after the other, and with further drafts before the first is verified.
//!
//! The members are processes of this machine, of one thread each. They share its processors, and rank 0 knows that: what runs ahead fills the
//! time of links only. Where members compute for longer than a trip spends on links, nothing runs ahead. Rings of several machines gain more
//! (`scheduler/timed_ring.rs`). So a small model is there, too, with which links take most of the time.
//!
//! Code and quotations are drafted from the text itself, and of prose that is drawn few tokens are the likeliest. So what a draft model gives is
//! seen in greedy prose: short answers, since long ones turn in circles, which are drafted from the text, too.

use std::path::PathBuf;
use std::time::Duration;

use prima_tests::assets;
use prima_tests::machine_ring::{MachineRing, Node, ThisMachine, draft, plan, usual_profile};
use prima_tests::one_process::{OneProcess, end_tokens};

use crate::Effort;
use crate::client::Client;
use crate::contenders::moby_dick;
use crate::error::BenchError;
use crate::speculation::{Cell, Workload, repeated_code, repeated_passage};

/// What drafts for all. It has the same weights as the others, so no draft is better.
pub const DRAFT: &str = "SmolLM2-135M-Instruct-Q4_1";
/// Models, and what they are here.
const MODELS: [(&str, &str); 2] = [
    (
        "SmolLM2-135M-Instruct-F32",
        "computing takes most of the time",
    ),
    (DRAFT, "links do, with a draft as good as the model"),
];
pub const MEMBERS: usize = 4;
const CONTEXT: &str = "2048";
const TURNS: usize = 3;
pub const WORKLOADS: [&str; 4] = ["code edit", "quotation", "prose", "greedy prose"];
/// The last of these: tokens of an answer, and how many parts of a book are answered in each turn.
pub const GREEDY: usize = WORKLOADS.len() - 1;
pub const GREEDY_TOKENS: usize = 64;
const GREEDY_PARTS: usize = 2;
/// Milliseconds from each member to the next.
const DELAYS: [u64; 2] = [5, 25];
/// The first is without speculation.
const SETTINGS: [(&str, &[&str]); 3] = [
    ("off", &["--no-speculation"]),
    ("one draft after the other", &["--no-run-ahead"]),
    ("drafts that run ahead", &[]),
];
/// What one more row adds to a pass: as with models of 1 to 8 billion weights on two cores.
pub const ROW: f64 = 0.13;

/// The settings of one model at one distance.
pub struct FarLinks {
    pub model: &'static str,
    pub what: &'static str,
    pub milliseconds: u64,
    pub settings: Vec<(&'static str, [Cell; WORKLOADS.len()])>,
}

pub fn measure(effort: &Effort) -> Result<Vec<FarLinks>, BenchError> {
    let mut measured = Vec::new();
    for (model, what) in MODELS {
        for delay in DELAYS {
            measured.push(measure_at(effort, model, what, delay)?);
        }
    }
    Ok(measured)
}

fn measure_at(
    effort: &Effort,
    name: &'static str,
    what: &'static str,
    milliseconds: u64,
) -> Result<FarLinks, BenchError> {
    let (model, small) = (path(name)?, path(DRAFT)?);
    let never = end_tokens(&OneProcess::open(&model, 1)?);
    let book = moby_dick()?;
    let repeated = [repeated_code(), repeated_passage(&book)];
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
        let prose = Workload::prose(&book, turn);
        // Other parts than those that are answered by drawn tokens.
        let parts = (1..=GREEDY_PARTS).map(|nth| TURNS + (turn - 1) * GREEDY_PARTS + nth);
        let greedy = parts.map(|part| Workload::greedy_prose(&book, part));
        let greedy: Vec<Workload> = greedy.collect();
        for (setting, options, cells) in &mut settings {
            eprintln!("far links, turn {turn}: {name}, {milliseconds} ms, {setting}");
            let options = [&["--threads", "1"], *options].concat();
            let delay = Duration::from_millis(milliseconds);
            let ring = MachineRing::start_apart(plan.clone(), &nodes, &options, delay);
            let client = Client::of(ring, &never);
            client.seconds_per_token("Once upon a time", 8)?;
            let cells: &mut [Cell; WORKLOADS.len()] = cells;
            let asked = repeated.iter().chain([&prose]);
            for (workload, cell) in asked.zip(cells.iter_mut()) {
                cell.measure(&client, workload, effort.decode, turn)?;
            }
            for workload in &greedy {
                let tokens = GREEDY_TOKENS.min(effort.decode);
                cells[GREEDY].measure(&client, workload, tokens, turn)?;
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
        let what = format!("a prompt, by speculation with {name} over links of {milliseconds} ms");
        return Err(BenchError::Changed { what });
    }
    Ok(FarLinks {
        model: name,
        what,
        milliseconds,
        settings,
    })
}

impl FarLinks {
    /// How many times as fast tokens of a workload should come than without speculation, one draft after the other and ahead, on machines of
    /// their own. `guess`: seconds for a drafted token.
    pub fn expected(&self, workload: usize, guess: f64) -> [f64; 2] {
        let right = self.right(workload);
        let (computing, links) = (self.computing(), self.links());
        let pass = |rows: i32| computing * (1.0 + ROW * f64::from(rows - 1));
        let in_turn = (0..32).map(|draft| {
            let tokens = (1.0 - right.powi(draft + 1)) / (1.0 - right);
            tokens / (pass(draft + 1) + links + f64::from(draft) * guess)
        });
        // Frames follow one another as fast as a machine, or the draft model, takes them; the first wrong token costs a whole trip.
        let ahead = (1..32).map(|rows| {
            let interval = (pass(rows) / MEMBERS as f64).max(f64::from(rows) * guess);
            let frames = 1.0 / (1.0 - right.powi(rows));
            1.0 / (1.0 - right) / (pass(rows) + links + (frames - 1.0) * interval)
        });
        // Of the best length each.
        let best = [in_turn.fold(0.0, f64::max), ahead.fold(0.0, f64::max)];
        best.map(|speed| speed * (computing + links))
    }

    /// Seconds that members compute of a token.
    pub fn computing(&self) -> f64 {
        let cells = &self.settings[0].1;
        let times = cells.iter().map(|cell| 1.0 / cell.decode.median());
        times.sum::<f64>() / cells.len() as f64 - self.links()
    }

    /// Seconds of a trip that it spends on links.
    fn links(&self) -> f64 {
        MEMBERS as f64 * self.milliseconds as f64 / 1000.0
    }

    /// The share of drafted tokens that are right if those before them are, from what passes brought when one draft came after the other.
    fn right(&self, workload: usize) -> f64 {
        let cell = &self.settings[1].1[workload];
        let tokens = cell.decoded;
        let (accepted, passes) = (cell.accepted as f64, (tokens - cell.accepted) as f64);
        let draft = cell.drafted as f64 / passes;
        let brought = |right: f64| (1.0 - right.powf(draft + 1.0)) / (1.0 - right);
        // No more than so many tokens can show.
        let (mut low, mut high) = (0.0, accepted / (accepted + 1.0));
        for _ in 0..50 {
            let middle = (low + high) / 2.0;
            match brought(middle) < tokens as f64 / passes {
                true => low = middle,
                false => high = middle,
            }
        }
        low
    }
}

fn path(model: &str) -> Result<PathBuf, BenchError> {
    Ok(assets::path(&format!("models/{model}.gguf"))?)
}
