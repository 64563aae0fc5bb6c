//! `prima-node-agent inspect --gpu`: which GPU layers would run on, and why no other.
//!
//! Decides only how this is shown; the engine chooses.

use comfy_table::{ContentArrangement, Table, presets};
use prima_engine::{EngineError, Gpu, GpuApi, GpuFacts};

/// In lines that end in a newline. That there is none is no error, but told.
///
/// # Errors
/// The driver of a GPU fails, or `PRIMA_GPU` is none of its values.
pub fn inspect_gpu() -> Result<String, EngineError> {
    match Gpu::list() {
        Ok(listed) => Ok(format!("{}\n", table(&listed))),
        Err(none @ EngineError::NoGpu { .. }) => {
            Ok(format!("{none}; layers run on the processor\n"))
        }
        Err(error) => Err(error),
    }
}

fn table(listed: &[(GpuFacts, Option<String>)]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(["GPU", "THROUGH", "MEMORY", "USE"]);
    for (facts, unused) in listed {
        let api = match facts.api {
            GpuApi::Vulkan => "Vulkan",
            GpuApi::Cuda => "CUDA",
            GpuApi::Metal => "Metal",
        };
        let gibibytes = facts.total_bytes as f64 / f64::from(1 << 30);
        let shared = if facts.unified_memory {
            ", the processor's"
        } else {
            ""
        };
        table.add_row([
            facts.name.clone(),
            api.to_owned(),
            format!("{gibibytes:.1} GiB{shared}"),
            match unused {
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
            unified_memory,
            total_bytes: 3 << 29,
            available_bytes: 0,
        };
        let listed = [
            (facts("fast", false), None),
            (facts("slow", true), Some("it is slow".to_owned())),
        ];
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
