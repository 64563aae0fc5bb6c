//! `prima-node-agent inspect --gpu`: which GPUs layers would run on, and why no other.
//!
//! Decides only how this is shown; the engine chooses.

use comfy_table::{ContentArrangement, Table, presets};
use prima_engine::{EngineError, Gpu, GpuApi, GpuFacts};
use serde::Serialize;

use crate::inspect::{InspectError, OutputFormat, shown};

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary {
    gpus: Vec<Listed>,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    none: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Listed {
    name: String,
    through: &'static str,
    memory_bytes: u64,
    /// The memory is the processor's.
    unified_memory: bool,
    /// Why no layers run on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    unused: Option<String>,
}

/// In lines that end in a newline. That there is none is no error, but told.
///
/// # Errors
/// [`InspectError::Gpu`].
pub fn inspect_gpu(format: OutputFormat) -> Result<String, InspectError> {
    let summary = match Gpu::list() {
        Ok(listed) => Summary {
            gpus: listed.into_iter().map(Listed::new).collect(),
            none: None,
        },
        Err(none @ EngineError::NoGpu { .. }) => Summary {
            gpus: Vec::new(),
            none: Some(none.to_string()),
        },
        Err(error) => return Err(error.into()),
    };
    shown(&summary, format, text)
}

impl Listed {
    fn new((facts, unused): (GpuFacts, Option<String>)) -> Self {
        Self {
            name: facts.name,
            through: match facts.api {
                GpuApi::Vulkan => "Vulkan",
                GpuApi::Cuda => "CUDA",
                GpuApi::Metal => "Metal",
            },
            memory_bytes: facts.total_bytes,
            unified_memory: facts.unified_memory,
            unused,
        }
    }
}

fn text(summary: &Summary) -> String {
    match &summary.none {
        Some(none) => format!("{none}; layers run on the processor\n"),
        None => format!("{}\n", table(&summary.gpus)),
    }
}

fn table(listed: &[Listed]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(["GPU", "THROUGH", "MEMORY", "USE"]);
    for gpu in listed {
        let gibibytes = gpu.memory_bytes as f64 / f64::from(1 << 30);
        let shared = match gpu.unified_memory {
            true => ", the processor's",
            false => "",
        };
        table.add_row([
            gpu.name.clone(),
            gpu.through.to_owned(),
            format!("{gibibytes:.1} GiB{shared}"),
            match &gpu.unused {
                None => "layers run on it where that is faster".to_owned(),
                Some(reason) => format!("not used: {reason}"),
            },
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_comes_with_its_memory_and_others_with_why_not() {
        let facts = |name: &str, unified_memory| GpuFacts {
            api: GpuApi::Vulkan,
            name: name.to_owned(),
            pci: None,
            pci_address: None,
            unified_memory,
            total_bytes: 3 << 29,
            available_bytes: 0,
            most_buffer_bytes: None,
        };
        let listed = [
            (facts("fast", false), None),
            (facts("slow", true), Some("it is slow".to_owned())),
        ]
        .map(Listed::new);
        let json = serde_json::to_value(&listed).unwrap();
        assert_eq!(json[0]["memoryBytes"], 3 << 29);
        assert_eq!(json[1]["unused"], "it is slow");
        let text = table(&listed).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[1].contains("fast") && lines[1].contains(" 1.5 GiB "),
            "{text}"
        );
        assert!(
            lines[2].contains("processor's") && lines[2].contains("not used: it is slow"),
            "{text}"
        );
    }
}
