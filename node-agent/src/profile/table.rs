//! A NodeProfile as people read it: units rounded, decimal for rates and binary for memory, as tools of each kind do.

use comfy_table::{CellAlignment, ContentArrangement, Table, TableComponent, presets};
use prima_crds::printable;
use prima_crds::v1alpha1::node_profile::{NodeProfileStatus, Throughput};

use crate::inspect::bytes;

/// Lines that end in a newline.
pub fn show(name: &str, status: &NodeProfileStatus) -> String {
    let NodeProfileStatus {
        conditions: _,
        measured_at,
        agent_version,
        architectures,
        parts: _,
        reads_windowed_sequences: _,
        reads_gpus: _,
        reads_chunk_positions: _,
        system,
        cpu,
        memory,
        disk,
        gpus,
        links,
        agent: _,
    } = status;
    let container = if system.in_container {
        ", in a container"
    } else {
        ""
    };
    let experts = disk
        .expert_read_bytes_per_second
        .map(|experts| format!("{} by experts, ", rate(experts, "B/s")))
        .unwrap_or_default();
    let mut lines = vec![
        format!(
            "{name}: {}, kernel {}, {}{container}",
            printable(&system.os_name),
            printable(&system.kernel),
            system.architecture
        ),
        format!(
            "measured at {measured_at} by agent {agent_version}, which runs {}",
            printable(&architectures.join(", "))
        ),
        format!(
            "processor  {}, {} threads, {} kernels; a layer takes {} beside its weights",
            printable(&cpu.model),
            cpu.threads,
            cpu.kernels,
            time(cpu.layer_overhead_nanoseconds)
        ),
        format!(
            "memory     {}, {} available; read at {}, keys and values appended at {}",
            bytes(memory.total_bytes as u64),
            bytes(memory.available_bytes as u64),
            rate(memory.read_bytes_per_second, "B/s"),
            rate(memory.kv_append_bytes_per_second, "B/s")
        ),
        format!(
            "disk       {}: read at {} in order, {experts}{} page by page; reading and computing at once reach {} and {} %",
            printable(&disk.path),
            rate(disk.sequential_read_bytes_per_second, "B/s"),
            rate(disk.random_read_bytes_per_second, "B/s"),
            disk.read_while_computing_percent,
            disk.compute_while_reading_percent
        ),
    ];
    lines.extend(
        disk.caveat
            .iter()
            .map(|caveat| format!("           ({caveat})")),
    );
    for gpu in gpus {
        let use_of_it = match (&gpu.unusable, &gpu.measured) {
            (Some(reason), _) => format!("not used: {reason}"),
            (None, Some(measured)) => format!(
                "{}, {} available; read at {}",
                bytes(measured.total_bytes as u64),
                bytes(measured.available_bytes as u64),
                rate(measured.read_bytes_per_second, "B/s")
            ),
            (None, None) => "not measured".to_owned(),
        };
        lines.push(format!(
            "GPU        {}: {}",
            printable(&gpu.name),
            printable(&use_of_it)
        ));
    }
    for link in links {
        lines.push(format!(
            "link       {}: {} one way, {}",
            link.to,
            time(link.latency_nanoseconds),
            rate(link.bytes_per_second, "B/s")
        ));
    }
    format!("{}\n\n{}\n", lines.join("\n"), formats(&cpu.throughput))
}

fn formats(throughput: &[Throughput]) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_HORIZONTAL_ONLY)
        .remove_style(TableComponent::HorizontalLines)
        .remove_style(TableComponent::MiddleIntersections)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(["weights", "decode", "prefill", "spread"]);
    for one in throughput {
        let spread = one.spread_percent;
        table.add_row([
            one.format.clone(),
            rate(one.decode_bytes_per_second, "B/s"),
            rate(one.prefill_flop_per_second, "FLOP/s"),
            spread.map_or(String::new(), |percent| format!("{percent} %")),
        ]);
    }
    for column in 1..4 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// With three digits: 31.4 GB/s.
fn rate(per_second: i64, unit: &str) -> String {
    let mut value = per_second as f64;
    let mut prefixes = ["k", "M", "G", "T", "P"].iter();
    let mut prefix = "";
    while value >= 999.5
        && let Some(next) = prefixes.next()
    {
        value /= 1000.0;
        prefix = next;
    }
    format!("{} {prefix}{unit}", three_digits(value))
}

fn time(nanoseconds: i64) -> String {
    let nanoseconds = nanoseconds as f64;
    match nanoseconds {
        ..999.5 => format!("{nanoseconds} ns"),
        ..999_500.0 => format!("{} µs", three_digits(nanoseconds / 1e3)),
        _ => format!("{} ms", three_digits(nanoseconds / 1e6)),
    }
}

fn three_digits(value: f64) -> String {
    match value {
        ..9.995 => format!("{value:.2}"),
        ..99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prima_crds::v1alpha1::node_profile::NodeProfile;

    #[test]
    fn a_profile_reads_well() {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        assert_eq!(
            show("desk", &profile.status.unwrap()),
            include_str!("../../tests/golden/profile_desk.txt")
        );
    }

    #[test]
    fn rates_and_times_take_the_unit_that_fits() {
        assert_eq!(rate(999, "B/s"), "999 B/s");
        assert_eq!(rate(1000, "B/s"), "1.00 kB/s");
        assert_eq!(rate(31_444_000_000, "B/s"), "31.4 GB/s");
        assert_eq!(rate(999_600_000, "FLOP/s"), "1.00 GFLOP/s");
        assert_eq!(time(120), "120 ns");
        assert_eq!(time(75_300), "75.3 µs");
        assert_eq!(time(12_000_000), "12.0 ms");
    }
}
