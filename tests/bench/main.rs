//! `make bench`: how fast this is, beside llama.cpp and beside the bare network, in one run on one machine.
//!
//! Decides what is measured and in which order: whatever is compared takes turns, again and again, so that a machine that gets
//! slower does so for both; medians are reported. Refuses to judge by one sample, and to hide what comes out badly.
//!
//! `--quick` takes one small sample of everything, to try the bench itself; its numbers mean nothing and are not kept.

mod client;
mod engine_speed;
mod error;
mod hop_cost;
mod machines;
mod memory_limit;
mod peer;
mod ping_pong;
mod planning_speed;
mod plot;
mod prediction;
mod report;
mod ring_speed;
mod statistics;

use std::path::Path;
use std::process::ExitCode;

use error::BenchError;

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
    let quick = std::env::args().any(|argument| argument == "--quick");
    if std::env::args().any(|a| a == "--machines") {
        let only: Vec<usize> = std::env::var("ONLY")
            .map(|s| s.split(',').map(|x| x.parse().unwrap()).collect())
            .unwrap_or_default();
        let effort = Effort {
            turns: if quick { 1 } else { 2 },
            ..FULL
        };
        for o in machines::measure_only(&effort, &only).unwrap().unwrap() {
            println!(
                "{} | predicted {:.3} measured {:.3} error {:+.0} % | read {:.0} planned {:.0}",
                o.setting.describe(),
                o.predicted.median(),
                o.measured.median(),
                o.error_percent(),
                o.read.median(),
                o.planned_read.median()
            );
        }
        return ExitCode::SUCCESS;
    }
    match run(quick) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                eprintln!("  because {error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn run(quick: bool) -> Result<(), BenchError> {
    let effort = if quick { QUICK } else { FULL };
    let engine = engine_speed::measure(&effort)?;
    let hops = hop_cost::measure(&effort)?;
    let ring = ring_speed::measure(&effort)?;
    let predictions = prediction::measure(&effort)?;
    let planning = planning_speed::measure(&effort)?;
    let limits = memory_limit::measure(&effort)?;
    let mut table = report::markdown(&effort, &engine, &hops, &ring);
    table += &report::memory_limits(limits.as_deref());
    table += &report::planner(&predictions, &planning);
    println!("{table}");
    if !quick {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/results");
        report::write(&folder.join("latest.md"), &table)?;
        report::write(&folder.join("hops.svg"), &plot::hops(&hops))?;
        println!("written to {}", folder.display());
    }
    Ok(())
}
