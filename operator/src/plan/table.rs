//! A plan for people: one table of the members, and the reasons below it.

use std::fmt::Write;

use comfy_table::{Cell, CellAlignment, Table, presets};
use indicatif::HumanBytes;
use prima_crds::v1alpha1::ring_plan::CHUNK_POSITIONS;
use prima_halda::PlanReport;
use prima_halda::plan::MemberReport;

pub fn text(report: &PlanReport) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{}: {} layers on {} of {} machines, {} round{} per token\n",
        report.model,
        report.layers,
        report.members.len(),
        report.members.len() + report.left_out.len(),
        report.rounds,
        if report.rounds == 1 { "" } else { "s" },
    );
    let chunks = match report.chunk_positions {
        CHUNK_POSITIONS => String::new(),
        larger => format!(", in chunks of {larger}"),
    };
    let _ = writeln!(
        text,
        "  per token (TPOT)   {:>9}   {:.1} tokens/s\n  first token (TTFT) {:>9}   after a prompt of {}{chunks}\n",
        milliseconds(report.tpot_milliseconds),
        1e3 / report.tpot_milliseconds,
        milliseconds(report.ttft_milliseconds),
        report.prompt_tokens,
    );
    let _ = writeln!(text, "{}\n", members(report));
    let _ = writeln!(
        text,
        "Bottleneck: {} of {}, {:.0} % of a token's time.",
        report.bottleneck.term, report.bottleneck.member, report.bottleneck.share_percent
    );
    for member in &report.members {
        let _ = writeln!(text, "In:  {}: {}.", member.name, member.why);
    }
    for out in &report.left_out {
        let _ = writeln!(text, "Out: {}: {}.", out.name, out.why);
    }
    if let Some(next) = &report.next_best {
        let _ = writeln!(
            text,
            "Next best: {} in {} round{}: {} per token, {:.0} % longer for a request.",
            next.members.join(" > "),
            next.rounds,
            if next.rounds == 1 { "" } else { "s" },
            milliseconds(next.tpot_milliseconds),
            next.slower_percent
        );
    }
    for what_if in &report.what_if {
        let _ = writeln!(
            text,
            "With {}: {} per token, requests {:.0} % faster.",
            what_if.change,
            milliseconds(what_if.tpot_milliseconds),
            what_if.faster_percent
        );
    }
    let _ = writeln!(
        text,
        "By this model of the machines, no plan is more than {:.2} % better.",
        report.proven_gap_percent
    );
    text
}

fn members(report: &PlanReport) -> Table {
    let has_experts = report
        .members
        .iter()
        .any(|member| member.expert_hit_percent.is_some());
    let mut headers = vec![
        "rank",
        "member",
        "layers",
        "on GPU",
        "cpu",
        "gpu",
        "output",
        "disk",
        "network",
        "memory",
        "budget",
        "read per token",
    ];
    if has_experts {
        headers.push("experts in memory");
    }
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_BORDERS_ONLY)
        .set_header(headers);
    for (rank, member) in report.members.iter().enumerate() {
        let MemberReport {
            name,
            layers,
            gpu_layers,
            output_head_on_gpu,
            draft_on_gpu,
            gpu_from_rows,
            cpu_milliseconds,
            gpu_milliseconds,
            copy_milliseconds,
            head_milliseconds,
            disk_milliseconds,
            hop_milliseconds,
            chunk_milliseconds: _,
            memory_bytes,
            memory_budget_bytes,
            gpu_memory_bytes: _,
            gpus: _,
            kv_bytes: _,
            overflow_bytes: _,
            read_bytes_per_token,
            expert_hit_percent,
            read_ahead_bytes: _,
            why: _,
        } = member;
        let mut numbers = vec![
            layers.to_string(),
            on_gpu(
                *gpu_layers,
                &[
                    (*output_head_on_gpu, "output"),
                    (*draft_on_gpu, "draft"),
                    (gpu_from_rows.is_some(), "prompts"),
                ],
            ),
            time(*cpu_milliseconds),
            time(gpu_milliseconds + copy_milliseconds),
            time(*head_milliseconds),
            time(*disk_milliseconds),
            time(*hop_milliseconds),
            HumanBytes(*memory_bytes).to_string(),
            HumanBytes(*memory_budget_bytes).to_string(),
            match read_bytes_per_token {
                0 => "-".to_owned(),
                bytes => HumanBytes(*bytes).to_string(),
            },
        ];
        if has_experts {
            numbers.push(match expert_hit_percent {
                Some(percent) => format!("{:.0} %", percent.floor()),
                None => "-".to_owned(),
            });
        }
        let cells = numbers
            .into_iter()
            .map(|number| Cell::new(number).set_alignment(CellAlignment::Right));
        table.add_row(
            [Cell::new(rank), Cell::new(name)]
                .into_iter()
                .chain(cells)
                .collect::<Vec<_>>(),
        );
    }
    table
}

/// What runs there: `24 + output + prompts`.
fn on_gpu(layers: usize, others: &[(bool, &str)]) -> String {
    let layers = (layers > 0).then(|| layers.to_string());
    let others = others.iter().filter(|(is_there, _)| *is_there);
    let others = others.map(|(_, name)| (*name).to_owned());
    let parts: Vec<String> = layers.into_iter().chain(others).collect();
    match parts.is_empty() {
        true => "-".to_owned(),
        false => parts.join(" + "),
    }
}

fn time(value: f64) -> String {
    match value {
        0.0 => "-".to_owned(),
        value => milliseconds(value),
    }
}

fn milliseconds(value: f64) -> String {
    match value {
        value if value >= 10_000.0 => format!("{:.1} s", value / 1e3),
        value if value >= 100.0 => format!("{value:.0} ms"),
        value if value >= 1.0 => format!("{value:.1} ms"),
        value => format!("{value:.2} ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::on_gpu;

    #[test]
    fn what_is_on_a_gpu_is_named() {
        for (layers, [output, draft, prompts], said) in [
            (0, [false, false, false], "-"),
            (24, [false, false, false], "24"),
            (24, [true, true, true], "24 + output + draft + prompts"),
            (24, [false, true, false], "24 + draft"),
            (0, [false, false, true], "prompts"),
        ] {
            let others = [(output, "output"), (draft, "draft"), (prompts, "prompts")];
            assert_eq!(on_gpu(layers, &others), said);
        }
    }
}
