//! `make bench`: how fast this is, beside llama.cpp and beside the bare network, in one run on one machine.
//!
//! Decides what is measured and in which order: whatever is compared takes turns, again and again, so that a machine that gets
//! slower does so for both; medians are reported. Refuses to judge by one sample, and to hide what comes out badly.
//!
//! `--quick` takes one small sample of everything, to try the bench itself; its numbers mean nothing and are not kept. `--engine` measures
//! the engine alone, `--rings` rings and the planner, `--conversations` what users of conversations notice, `--kernels` the kernels, format
//! by level, `--experts` mixtures of experts, `--experts-ring` and `--70b` large models in a small ring, and nothing else. Names of sections of conversations
//! choose these. Results are kept in a folder for each kind of machine. `--replay FILE...` measures nothing: it tells what ways of keeping experts would
//! have found in memory, by traces of `prima-node-agent serve --routing-trace`.

mod beside_prompt;
mod chats;
mod client;
mod contenders;
mod encryption;
mod engine_speed;
mod error;
mod expert_speed;
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
mod report_experts;
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
use prima_tests::expert_replay::Trace;

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
    let mut arguments = std::env::args().skip(1);
    if arguments.any(|argument| argument == "--replay") {
        return ended(replay(arguments.map(PathBuf::from)));
    }
    let asked = |option: &str| std::env::args().any(|argument| argument == option);
    let effort = if asked("--quick") { QUICK } else { FULL };
    let quick = asked("--quick");
    let section = |argument: &String| CONVERSATIONS.iter().any(|(name, ..)| name == argument);
    let mut names = std::env::args().skip(1);
    if let Some(unknown) = names.find(|name| !name.starts_with("--") && !section(name)) {
        let known: Vec<&str> = CONVERSATIONS.iter().map(|(name, ..)| *name).collect();
        eprintln!(
            "bench: no section is named {unknown}; there are {}",
            known.join(", ")
        );
        return ExitCode::FAILURE;
    }
    let measured = if asked("--70b") {
        run_70b()
    } else if asked("--experts-ring") {
        run_experts_ring()
    } else if asked("--experts") {
        run_experts(&effort, quick)
    } else if asked("--kernels") {
        run_kernels(&effort, quick)
    } else if asked("--engine") {
        run_engine(&effort, quick)
    } else if asked("--rings") {
        run_rings(&effort, quick)
    } else if asked("--conversations") || std::env::args().any(|name| section(&name)) {
        run_conversations(&effort, quick)
    } else {
        run_engine(&effort, quick)
            .and_then(|()| run_rings(&effort, quick))
            .and_then(|()| run_conversations(&effort, quick))
            .and_then(|()| run_experts(&effort, quick))
    };
    ended(measured)
}

fn ended(result: Result<(), BenchError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn replay(files: impl Iterator<Item = PathBuf>) -> Result<(), BenchError> {
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).map_err(|source| BenchError::Read {
            path: path.clone(),
            source,
        })?;
        let name = path.display().to_string();
        let trace = Trace::parse(&text);
        Ok((
            name,
            trace.map_err(|source| BenchError::TraceFile { path, source })?,
        ))
    };
    let traces: Vec<(String, Trace)> = files.map(read).collect::<Result<_, BenchError>>()?;
    if traces.is_empty() {
        return Err(BenchError::NoTraces);
    }
    let traces = traces.iter().map(|(name, trace)| (name.clone(), trace));
    println!("{}", report_experts::replayed("trace", traces));
    Ok(())
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

/// A part of what users of conversations notice: its name on the command line, whether llama-server is in its table, and what measures it.
type Section = (
    &'static str,
    bool,
    fn(&Effort) -> Result<String, BenchError>,
);

const CONVERSATIONS: [Section; 9] = [
    ("second-turns", true, |effort| {
        second_turn::measure(effort, &peer::build()?)
            .map(|measured| report_conversations::second_turns(&measured))
    }),
    ("chats", true, |effort| {
        chats::measure(effort, &peer::build()?)
            .map(|measured| report_conversations::chats(&measured))
    }),
    ("beside-prompt", true, |effort| {
        beside_prompt::measure(effort, &peer::build()?)
            .map(|measured| report_conversations::beside_prompt(&measured))
    }),
    ("speculation", true, |effort| {
        speculation::measure(effort, &peer::build()?)
            .map(|measured| report_conversations::speculation(&measured))
    }),
    ("streamed", true, |effort| {
        streamed_speculation::measure(effort, &peer::build()?)
            .map(|measured| report_conversations::streamed_speculation(measured.as_deref()))
    }),
    ("far-links", false, |effort| {
        far_links::measure(effort).map(|measured| report_conversations::far_links(&measured))
    }),
    ("encryption", false, |effort| {
        encryption::measure(effort).map(|measured| report_conversations::encryption(&measured))
    }),
    ("masks", false, |effort| {
        masks::measure(effort, &peer::build()?)
            .map(|measured| report_conversations::masks(&measured))
    }),
    ("siege", false, |effort| {
        siege::measure(effort).map(|measured| report_conversations::siege(&measured))
    }),
];

/// All sections, or those whose names are given. Each has a file of its own, so that what was measured is kept, whatever fails later.
fn run_conversations(effort: &Effort, quick: bool) -> Result<(), BenchError> {
    let chosen = |name: &str| std::env::args().any(|argument| argument == name);
    let some = CONVERSATIONS.iter().any(|(name, ..)| chosen(name));
    for (name, beside, measure) in CONVERSATIONS {
        if some && !chosen(name) {
            continue;
        }
        let measured = measure(effort)?;
        let preamble = match beside {
            true => report_conversations::preamble(Compute::available_threads()),
            false => String::new(),
        };
        let report = report::title("make bench-conversations") + &preamble + &measured;
        println!("{report}");
        if !quick {
            let file = format!("conversations/{name}.md");
            report::write(&results().join(file), &report)?;
        }
    }
    Ok(())
}

fn run_experts(effort: &Effort, quick: bool) -> Result<(), BenchError> {
    let speeds = expert_speed::measure(effort)?;
    let report = report::title("make bench-experts") + &report_experts::experts(&speeds);
    println!("{report}");
    match quick {
        true => Ok(()),
        false => report::write(&results().join("experts.md"), &report),
    }
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

fn run_experts_ring() -> Result<(), BenchError> {
    let Some(outcomes) = machines::measure_mixture()? else {
        return Ok(());
    };
    let table = report::machines_mixture(&outcomes);
    println!("{table}");
    report::write(&results().join("experts-ring.md"), &table)
}

fn results() -> PathBuf {
    report::folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("results"))
}
