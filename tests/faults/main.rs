//! `make faults`: many random sequences of faults, one after the other. Of those that fail it prints the seed, and the shortest sequence
//! that still fails, which can be given back.
//!
//! SEQUENCES: how many. SEED: of the first; the next ones have the next seeds. SEQUENCE: this one instead, as printed; several are separated
//! by `;`. CLUSTER: on the nodes of a cluster, with other faults. LOAD, with that: so many requests over upgrades and drains instead ([`load`]).

mod load;

use std::env;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use prima_tests::cluster::PrimaImages;
use prima_tests::fault_sequences::{
    FALSE_READY_GOAL, HEALING_GOAL, Machines, Nodes, ON_NETWORKS, ON_NODES, Place, Sequence,
    Setting, Stage, shrunk, with_networks,
};

/// How many sequences are tried if nobody says it.
const SEQUENCES_ON_NETWORKS: u64 = 200;
const SEQUENCES_ON_NODES: u64 = 20;

/// With what to call each.
type Sequences = Vec<(String, Sequence)>;

/// What is to be done.
enum Task {
    OnNetworks(Sequences),
    OnNodes(Sequences),
    Load(usize),
}

fn main() -> ExitCode {
    let failed = match task() {
        Ok(Task::OnNetworks(sequences)) => {
            with_networks(|networks| try_all(&sequences, || Stage::on(Machines::new(networks))))
        }
        Ok(Task::OnNodes(sequences)) => {
            let images = PrimaImages::build();
            try_all(&sequences, || Stage::on(Nodes::new(&images)))
        }
        Ok(Task::Load(requests)) => load::fails(requests),
        Err(problem) => {
            eprintln!("{problem}");
            return ExitCode::from(2);
        }
    };
    ExitCode::from(u8::from(failed))
}

/// Whether one fails.
fn try_all<P: Place>(sequences: &[(String, Sequence)], make: impl Fn() -> Stage<P>) -> bool {
    let mut stage = None;
    // Of all sequences with a fault of a kind, whatever else they have.
    let kinds = P::SETTING.kinds.iter();
    let mut worst: Vec<_> = kinds.map(|kind| (*kind, 0, 0.0_f64, 0.0_f64)).collect();
    // A sequence fails by what its faults allow. That may be more than what is wanted.
    let (mut failed, mut too_long_false, mut too_long_broken) =
        (Vec::new(), Vec::new(), Vec::new());
    for (name, sequence) in sequences {
        let there = stage.take().unwrap_or_else(&make);
        let begun = Instant::now();
        let report = there.run(sequence);
        println!(
            "{name}: {sequence}\n  {report}; {:.0} s in all",
            begun.elapsed().as_secs_f64()
        );
        for (kind, count, unseen, healed) in &mut worst {
            if sequence.has(*kind) {
                *count += 1;
                *unseen = unseen.max(report.longest_false_ready.as_secs_f64());
                *healed = healed.max(report.healed_after.unwrap_or_default().as_secs_f64());
            }
        }
        if report.longest_false_ready > FALSE_READY_GOAL {
            too_long_false.push(name);
        }
        if report.healed_after.is_none_or(|after| after > HEALING_GOAL) {
            too_long_broken.push(name);
        }
        if report.problems.is_empty() {
            stage = Some(there);
        } else {
            let shortest = shrunk(there, &make, sequence.clone());
            println!("{name} FAILED; the shortest sequence that fails: SEQUENCE='{shortest}'");
            failed.push(name);
        }
    }
    println!(
        "\n{:<20}{:>6}{:>16}{:>16}",
        "sequences with", "", "false Ready", "healed after"
    );
    for (kind, count, unseen, healed) in worst {
        println!(
            "{:<20}{count:>6}{unseen:>14.1} s{healed:>14.1} s",
            kind.name()
        );
    }
    println!("of {} sequences", sequences.len());
    for (what, names) in [
        ("failed".to_owned(), &failed),
        (
            format!("were falsely Ready for more than {FALSE_READY_GOAL:?}"),
            &too_long_false,
        ),
        (
            format!("were not healed within {HEALING_GOAL:?}"),
            &too_long_broken,
        ),
    ] {
        println!("  {} {what}", names.len());
        names.iter().for_each(|name| println!("    {name}"));
    }
    !failed.is_empty()
}

fn task() -> Result<Task, String> {
    let load = number("LOAD")?;
    match (set("CLUSTER"), load) {
        (None, None) => sequences(&ON_NETWORKS, SEQUENCES_ON_NETWORKS).map(Task::OnNetworks),
        (Some(_), None) => sequences(&ON_NODES, SEQUENCES_ON_NODES).map(Task::OnNodes),
        (Some(_), Some(requests)) => Ok(Task::Load(requests)),
        (None, Some(_)) => Err("LOAD takes CLUSTER=1".to_owned()),
    }
}

fn sequences(setting: &Setting, count: u64) -> Result<Sequences, String> {
    if let Some(given) = set("SEQUENCE") {
        let given = given.split(';').map(|text| {
            let sequence: Sequence = text.parse()?;
            match sequence.foreign_to(setting) {
                Some(kind) => {
                    let (name, kinds) = (kind.name(), setting.kinds.iter());
                    let there: Vec<&str> = kinds.map(|kind| kind.name()).collect();
                    Err(format!("no {name} here, only {}", there.join(", ")))
                }
                None => Ok(("given".to_owned(), sequence)),
            }
        });
        return given.collect();
    }
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let count = number("SEQUENCES")?.unwrap_or(count);
    let first = number("SEED")?.unwrap_or(now.as_secs());
    let seeds = first..first.saturating_add(count);
    Ok(seeds
        .map(|seed| (format!("SEED={seed}"), Sequence::from_seed(setting, seed)))
        .collect())
}

/// A number that a variable has, if it is set.
fn number<N: FromStr>(name: &str) -> Result<Option<N>, String> {
    let number = |text: String| {
        text.parse()
            .map_err(|_| format!("{name}: expected a number, found {text:?}"))
    };
    set(name).map(number).transpose()
}

fn set(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}
