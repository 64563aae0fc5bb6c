//! `prima-node-agent inspect --cpu`: which kernels this processor gets, and why.
//!
//! Decides only how this is shown; the engine chooses the kernels.

use std::path::Path;

use comfy_table::{ContentArrangement, Table, presets};
use prima_engine::Compute;
use prima_engine::kernels::{IsaLevel, IsaLevelError, LEVEL_VARIABLE};

use crate::profile::system;

/// In lines that end in a newline.
///
/// # Errors
/// `PRIMA_CPU_LEVEL` asks for a level that this processor lacks.
pub fn inspect_cpu() -> Result<String, IsaLevelError> {
    let used = IsaLevel::from_environment()?;
    let why = match used == IsaLevel::detect() {
        true => "the highest level that this processor has".to_owned(),
        false => format!("as {LEVEL_VARIABLE} asks for it"),
    };
    Ok(format!(
        "processor  {}\nkernels    {used}: {why}\nthreads    {}: as many cores as this process may use (its affinity and its cgroup's quota)\n\
         pages      {} KiB each: what this system deals out memory in\n\n{}\n",
        system::cpu_model(Path::new("/")),
        Compute::available_threads(),
        rustix::param::page_size() / 1024,
        table(used, &IsaLevel::known()),
    ))
}

fn table(used: IsaLevel, known: &[(&'static str, Vec<(&'static str, bool)>)]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(["LEVEL", "NEEDS", "HERE"]);
    for (name, features) in known {
        let list = |features: &[&str]| features.join(" ");
        let needs: Vec<&str> = features.iter().map(|(name, _)| *name).collect();
        let missing: Vec<&str> = features
            .iter()
            .filter_map(|(name, present)| (!present).then_some(*name))
            .collect();
        let here = match missing.as_slice() {
            _ if *name == used.name() => "used".to_owned(),
            [] => "yes".to_owned(),
            missing => format!("no, it lacks {}", list(missing)),
        };
        table.add_row([(*name).to_owned(), list(&needs), here]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_and_what_is_missing_is_told() {
        let known = [
            ("scalar", vec![]),
            ("wide", vec![("w", true)]),
            ("wider", vec![("w", true), ("v", false)]),
        ];
        let text = table(IsaLevel::SCALAR, &known).to_string();
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines[1], ["scalar", "used"]);
        assert_eq!(lines[2], ["wide", "w", "yes"]);
        assert_eq!(lines[3], ["wider", "w", "v", "no,", "it", "lacks", "v"]);
    }

    #[test]
    fn this_processor_is_described() {
        let text = inspect_cpu().unwrap();
        assert!(text.contains("kernels ") && text.contains("used"), "{text}");
    }
}
