//! `make faults`: many random sequences of faults, one after the other. Of those that fail it prints the seed, and the shortest sequence
//! that still fails, which can be given back.
//!
//! SEQUENCES: how many. SEED: of the first; the next ones have the next seeds. SEQUENCE: this one instead, as printed; several are separated
//! by `;`.

use std::env;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use prima_tests::fault_sequences::{Kind, Sequence, Stage, shrunk, with_networks};

fn main() -> ExitCode {
    let sequences = match sequences() {
        Ok(sequences) => sequences,
        Err(problem) => {
            eprintln!("{problem}");
            return ExitCode::from(2);
        }
    };
    let failed = with_networks(|networks| {
        let mut stage = Stage::new(networks);
        // Of all sequences with a fault of a kind, whatever else they have.
        let mut worst = Kind::ALL.map(|(_, name)| (name, 0, 0.0_f64, 0.0_f64));
        let mut failed = Vec::new();
        for (name, sequence) in &sequences {
            let begun = Instant::now();
            let report = stage.run(sequence);
            println!(
                "{name}: {sequence}\n  {report}; {:.0} s in all",
                begun.elapsed().as_secs_f64()
            );
            for (kind, (_, count, unseen, healed)) in Kind::ALL.iter().zip(&mut worst) {
                if sequence.has(kind.0) {
                    *count += 1;
                    *unseen = unseen.max(report.longest_false_ready.as_secs_f64());
                    *healed = healed.max(report.healed_after.unwrap_or_default().as_secs_f64());
                }
            }
            if !report.problems.is_empty() {
                let shortest = shrunk(stage, networks, sequence.clone());
                println!("{name} FAILED; the shortest sequence that fails: SEQUENCE='{shortest}'");
                failed.push(name);
                stage = Stage::new(networks);
            }
        }
        println!(
            "\n{:<16}{:>10}{:>16}{:>16}",
            "sequences with", "", "false Ready", "healed after"
        );
        for (name, count, unseen, healed) in worst {
            println!("{name:<16}{count:>10}{unseen:>14.1} s{healed:>14.1} s");
        }
        println!(
            "{} of {} sequences failed{}",
            failed.len(),
            sequences.len(),
            if failed.is_empty() { "" } else { ":" }
        );
        failed.iter().for_each(|name| println!("  {name}"));
        !failed.is_empty()
    });
    ExitCode::from(u8::from(failed))
}

/// With what to call each.
fn sequences() -> Result<Vec<(String, Sequence)>, String> {
    if let Some(given) = set("SEQUENCE") {
        let given = given
            .split(';')
            .map(|text| Ok(("given".to_owned(), text.parse()?)));
        return given.collect();
    }
    let number = |name: &str, text: String| {
        text.parse()
            .map_err(|_| format!("{name}: expected a number, found {text:?}"))
    };
    let count: u64 = set("SEQUENCES").map_or(Ok(200), |text| number("SEQUENCES", text))?;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let first = set("SEED").map_or(Ok(now.as_secs()), |text| number("SEED", text))?;
    let seeds = first..first.saturating_add(count);
    Ok(seeds
        .map(|seed| (format!("SEED={seed}"), Sequence::from_seed(seed)))
        .collect())
}

fn set(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}
