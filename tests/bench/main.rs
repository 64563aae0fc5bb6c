//! `make bench`: how fast this is, beside llama.cpp and beside the bare network, in one run on one machine.
//!
//! Decides what is measured and in which order: whatever is compared takes turns, again and again, so that a machine that gets
//! slower does so for both; medians are reported. Refuses to judge by one sample, and to hide what comes out badly.
//!
//! `--quick` takes one small sample of everything, to try the bench itself; its numbers mean nothing and are not kept. `--engine` measures
//! the engine alone, `--rings` rings and the planner, `--conversations` what users of conversations notice, `--kernels` the kernels, format
//! by level, `--70b` a model of 70B in a small ring, and nothing else. Results are kept in a folder for each kind of machine.

mod chats;
mod client;
mod contenders;
mod engine_speed;
mod error;
mod far_links;
mod hop_cost;
mod kernel_speed;
mod machines;
mod masks;
mod memory_limit;
mod peer;
mod ping_pong;
mod planning_speed;
mod plot;
mod prediction;
mod report;
mod report_conversations;
mod ring_speed;
mod second_turn;
mod siege;
mod speculation;
mod streamed_speculation;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use error::BenchError;
use prima_crds::error_chain;
use prima_engine::Compute;

/// How much is measured.
pub struct Effort {
    /// Turns of everything that is compared.
    pub turns: usize,
    /// Tokens of a prompt.
    pub prefill: usize,
    /// Tokens of an answer.
    pub decode: usize,
}

const FULL: Effort = Effort {
    turns: 7,
    prefill: 512,
    decode: 128,
};

const QUICK: Effort = Effort {
    turns: 1,
    prefill: 64,
    decode: 16,
};

fn main() -> ExitCode {
    let asked = |option: &str| std::env::args().any(|argument| argument == option);
    let effort = if asked("--quick") { QUICK } else { FULL };
    let quick = asked("--quick");
    let measured = if asked("--70b") {
        run_70b()
    } else if asked("--kernels") {
        run_kernels(&effort, quick)
    } else if asked("--engine") {
        run_engine(&effort, quick)
    } else if asked("--rings") {
        run_rings(&effort, quick)
    } else if asked("--conversations") {
        run_conversations(&effort, quick)
    } else {
        run_engine(&effort, quick)
            .and_then(|()| run_rings(&effort, quick))
            .and_then(|()| run_conversations(&effort, quick))
    };
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn run_rings(effort: &Effort, quick: bool) -> Result<(), BenchError> {
    let hops = hop_cost::measure(effort)?;
    let ring = ring_speed::measure(effort)?;
    let predictions = prediction::measure(effort)?;
    let planning = planning_speed::measure(effort)?;
    let limits = memory_limit::measure(effort)?;
    let machines = machines::measure(effort)?;
    let mut table = report::title("make bench-rings");
    table += &report::rings(&hops, &ring);
    table += &report::memory_limits(limits.as_deref());
    table += &report::machines(machines.as_deref());
    table += &report::planner(&predictions, &planning);
    println!("{table}");
    if !quick {
        let folder = results();
        report::write(&folder.join("rings.md"), &table)?;
        report::write(&folder.join("hops.svg"), &plot::hops(&hops))?;
        if let Some(machines) = machines {
            report::write(&folder.join("reading.svg"), &plot::reading(&machines))?;
        }
        println!("written to {}", folder.display());
    }
    Ok(())
}

fn run_engine(effort: &Effort, quick: bool) -> Result<(), BenchError> {
    let speeds = engine_speed::measure(effort)?;
    let report = report::title("make bench-engine") + &report::engine(&speeds);
    println!("{report}");
    match quick {
        true => Ok(()),
        false => report::write(&results().join("engine.md"), &report),
    }
}

/// Writes after each section what there is by then: if a later one fails, an hour's results are kept.
fn run_conversations(effort: &Effort, quick: bool) -> Result<(), BenchError> {
    let peer = peer::build()?;
    let mut sections = report_conversations::preamble(Compute::available_threads());
    let mut keep = |section: String| {
        sections += &section;
        let report = report::title("make bench-conversations") + &sections;
        match quick {
            true => Ok(report),
            false => report::write(&results().join("conversations.md"), &report).map(|()| report),
        }
    };
    let second_turns = second_turn::measure(effort, &peer)?;
    keep(report_conversations::second_turns(&second_turns))?;
    let chats = chats::measure(effort, &peer)?;
    keep(report_conversations::chats(&chats))?;
    let speculation = speculation::measure(effort, &peer)?;
    keep(report_conversations::speculation(&speculation))?;
    let streamed = streamed_speculation::measure(effort, &peer)?;
    let streamed = streamed.as_deref();
    keep(report_conversations::streamed_speculation(streamed))?;
    let far_links = far_links::measure(effort)?;
    keep(report_conversations::far_links(&far_links))?;
    let masks = masks::measure(effort, &peer)?;
    keep(report_conversations::masks(&masks))?;
    let siege = siege::measure(effort)?;
    let report = keep(report_conversations::siege(&siege))?;
    println!("{report}");
    Ok(())
}

fn run_kernels(effort: &Effort, quick: bool) -> Result<(), BenchError> {
    let speeds = kernel_speed::measure(effort)?;
    let report = report::title("make bench-kernels") + &report::kernels(&speeds);
    println!("{report}");
    match quick {
        true => Ok(()),
        false => report::write(&results().join("kernels.md"), &report),
    }
}

fn run_70b() -> Result<(), BenchError> {
    let Some(outcomes) = machines::measure_70b()? else {
        return Ok(());
    };
    let table = report::machines_70b(&outcomes);
    println!("{table}");
    report::write(&results().join("70b.md"), &table)
}

fn results() -> PathBuf {
    report::folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/results"))
}
