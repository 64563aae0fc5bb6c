//! `prima-node-agent inspect --cpu`: which kernels this processor gets, and why.
//!
//! Decides only how this is shown; the engine chooses the kernels.

use std::path::Path;

use comfy_table::{ContentArrangement, Table, presets};
use prima_engine::Compute;
use prima_engine::kernels::{IsaLevel, LEVEL_VARIABLE};
use serde::Serialize;

use crate::inspect::{InspectError, OutputFormat, shown};
use crate::profile::system;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary {
    processor: String,
    kernels: &'static str,
    /// Whether `PRIMA_CPU_LEVEL` asks for them.
    asked_for: bool,
    threads: usize,
    page_bytes: usize,
    levels: Vec<Level>,
}

/// Of kernels, and what they need of a processor.
#[derive(Serialize)]
struct Level {
    level: &'static str,
    needs: Vec<&'static str>,
    missing: Vec<&'static str>,
}

/// In lines that end in a newline.
///
/// # Errors
/// [`InspectError::Kernels`].
pub fn inspect_cpu(format: OutputFormat) -> Result<String, InspectError> {
    let used = IsaLevel::from_environment()?;
    let summary = Summary {
        processor: system::cpu_model(Path::new("/")),
        kernels: used.name(),
        asked_for: used != IsaLevel::detect(),
        threads: Compute::available_threads(),
        page_bytes: rustix::param::page_size(),
        levels: IsaLevel::known().into_iter().map(Level::new).collect(),
    };
    shown(&summary, format, text)
}

impl Level {
    fn new((level, features): (&'static str, Vec<(&'static str, bool)>)) -> Self {
        let missing = features.iter().filter(|(_, present)| !present);
        Self {
            level,
            missing: missing.map(|(name, _)| *name).collect(),
            needs: features.iter().map(|(name, _)| *name).collect(),
        }
    }
}

fn text(summary: &Summary) -> String {
    let Summary {
        processor,
        kernels,
        asked_for,
        threads,
        page_bytes,
        levels,
    } = summary;
    let why = match asked_for {
        false => "the highest level that this processor has".to_owned(),
        true => format!("as {LEVEL_VARIABLE} asks for it"),
    };
    format!(
        "processor  {processor}\nkernels    {kernels}: {why}\n\
         threads    {threads}: as many cores as this process may use (its affinity and its cgroup's quota)\n\
         pages      {} KiB each: what this system deals out memory in\n\n{}\n",
        page_bytes / 1024,
        table(kernels, levels),
    )
}

fn table(used: &str, levels: &[Level]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(["LEVEL", "NEEDS", "HERE"]);
    for Level {
        level,
        needs,
        missing,
    } in levels
    {
        let here = match missing.as_slice() {
            _ if *level == used => "used".to_owned(),
            [] => "yes".to_owned(),
            missing => format!("no, it lacks {}", missing.join(" ")),
        };
        table.add_row([(*level).to_owned(), needs.join(" "), here]);
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
        let text = table("scalar", &known.map(Level::new)).to_string();
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
        let text = inspect_cpu(OutputFormat::Table).unwrap();
        assert!(text.contains("kernels ") && text.contains("used"), "{text}");
        let json = inspect_cpu(OutputFormat::Json).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let used = json["levels"].as_array().unwrap().iter();
        let mut used = used.filter(|level| level["level"] == json["kernels"]);
        assert_eq!(used.next().unwrap()["missing"], serde_json::json!([]));
    }
}
