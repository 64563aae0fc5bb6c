//! Whether a plan can be true: an independent check, from the documents and the plan alone. It shares no code with the
//! solver and the latency model, so that it sees mistakes made there. Used in tests and before every plan is written.

use std::collections::HashSet;

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfile};
use prima_crds::v1alpha1::node_profile::{GpuMeasurements, NodeProfile};
use prima_crds::v1alpha1::ring_plan::KvDtype;

use crate::input::Options;
use crate::plan::{MemberReport, Plan, PlannedMember};

/// What is wrong with a plan.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Finding {
    #[error(
        "{member}: layers {first}..{last} of round {round} do not continue at layer {expected}"
    )]
    Coverage {
        member: String,
        round: usize,
        first: usize,
        last: usize,
        expected: usize,
    },
    #[error("the windows end at layer {found}, the model has {expected}")]
    End { found: usize, expected: usize },
    #[error("{member}: {found} windows for {expected} rounds")]
    Rounds {
        member: String,
        found: usize,
        expected: usize,
    },
    #[error("{member}: {gpu_layers} GPU layers in a window of {layers}")]
    GpuLayers {
        member: String,
        gpu_layers: usize,
        layers: usize,
    },
    #[error(
        "{member}: there is no such machine, or it is in the ring twice, or its owner excludes it, or its agent cannot run the model"
    )]
    Machine { member: String },
    #[error("{member}: {what} of {found} bytes exceeds {limit} bytes")]
    Memory {
        member: String,
        what: &'static str,
        found: i64,
        limit: i64,
    },
    #[error("the terms of all members sum to {sum} ms, the plan predicts {predicted} ms per token")]
    Sum { sum: f64, predicted: f64 },
    #[error("{member}: {predicted} ms of computing, but its weights alone take {least} ms")]
    TooFast {
        member: String,
        predicted: f64,
        least: f64,
    },
}

/// Everything that is wrong with `plan`; empty for a plan that can be executed as `options` ask.
pub fn check(
    plan: &Plan,
    model: &ModelProfile,
    nodes: &[NodeProfile],
    options: &Options,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    coverage(plan, model, &mut findings);
    let mut seen = HashSet::new();
    for (rank, (member, report)) in plan.members.iter().zip(&plan.report.members).enumerate() {
        let node = nodes
            .iter()
            .find(|node| node.metadata.name.as_deref() == Some(&member.name));
        match node {
            Some(node) if seen.insert(&member.name) && !node.spec.exclude => {
                machine(rank, member, report, model, node, options, &mut findings);
            }
            _ => findings.push(Finding::Machine {
                member: member.name.clone(),
            }),
        }
    }
    let sum: f64 = plan
        .report
        .members
        .iter()
        .map(|member| {
            member.cpu_milliseconds
                + member.gpu_milliseconds
                + member.copy_milliseconds
                + member.head_milliseconds
                + member.disk_milliseconds
                + member.hop_milliseconds
        })
        .sum();
    let predicted = plan.report.tpot_milliseconds;
    if (sum - predicted).abs() > 1e-6 * predicted {
        findings.push(Finding::Sum { sum, predicted });
    }
    findings
}

fn coverage(plan: &Plan, model: &ModelProfile, findings: &mut Vec<Finding>) {
    for member in &plan.members {
        if member.windows.len() != plan.rounds {
            findings.push(Finding::Rounds {
                member: member.name.clone(),
                found: member.windows.len(),
                expected: plan.rounds,
            });
            return;
        }
    }
    let mut expected = 0;
    for round in 0..plan.rounds {
        for member in &plan.members {
            let window = member.windows[round];
            if window.first != expected || window.last < window.first {
                findings.push(Finding::Coverage {
                    member: member.name.clone(),
                    round,
                    first: window.first,
                    last: window.last,
                    expected,
                });
                return;
            }
            let layers = window.last - window.first;
            if window.gpu_layers > layers {
                findings.push(Finding::GpuLayers {
                    member: member.name.clone(),
                    gpu_layers: window.gpu_layers,
                    layers,
                });
            }
            expected = window.last;
        }
    }
    if expected != model.spec.layers as usize {
        findings.push(Finding::End {
            found: expected,
            expected: model.spec.layers as usize,
        });
    }
}

fn machine(
    rank: usize,
    member: &PlannedMember,
    report: &MemberReport,
    model: &ModelProfile,
    node: &NodeProfile,
    options: &Options,
    findings: &mut Vec<Finding>,
) {
    let Some(status) = node
        .status
        .as_ref()
        .filter(|status| status.runs(&model.spec))
    else {
        findings.push(Finding::Machine {
            member: member.name.clone(),
        });
        return;
    };
    let layers: i64 = member
        .windows
        .iter()
        .map(|w| w.last.saturating_sub(w.first) as i64)
        .sum();
    let on_gpu: i64 = member.windows.iter().map(|w| w.gpu_layers as i64).sum();
    let spec = &model.spec;
    let all: i64 = spec.layer_weights.iter().map(|one| one.bytes).sum();
    let layer = all / i64::from(spec.layers);
    let kept = spec.kept_positions(options.context_tokens as f64) as i64;
    let positions = kept * options.concurrent_requests as i64;
    let kv = spec.kv_bytes(options.kv_dtype) * positions;
    // GPUs have it as F16.
    let gpu_kv = spec.kv_bytes(KvDtype::F16) * positions;
    let gpu = status.gpu_for(spec).map(|(_, measured)| measured);
    let own_memory = gpu.and_then(GpuMeasurements::own_available_bytes);
    if let Some(limit) = own_memory
        && on_gpu * (layer + gpu_kv) > limit
    {
        findings.push(Finding::Memory {
            member: member.name.clone(),
            what: "GPU memory for layers and KV cache",
            found: on_gpu * (layer + gpu_kv),
            limit,
        });
    }
    if gpu.is_none() && on_gpu > 0 {
        findings.push(Finding::GpuLayers {
            member: member.name.clone(),
            gpu_layers: on_gpu as usize,
            layers: 0,
        });
    }
    let on_cpu = layers - on_gpu;
    let (in_memory, kv) = match own_memory {
        Some(_) => (on_cpu, on_cpu * kv),
        None => (layers, on_cpu * kv + on_gpu * gpu_kv),
    };
    let available = match gpu.filter(|gpu| gpu.unified_memory) {
        Some(gpu) => gpu.available_bytes,
        None => status.memory.available_bytes + status.memory.swappable_bytes,
    };
    let limit = available
        .saturating_sub(node.spec.reserved_memory_bytes.unwrap_or(0))
        .min(node.spec.memory_cap_bytes.unwrap_or(i64::MAX));
    let (head, draft): (i64, i64) = match rank {
        0 => {
            let head = spec.output_weights.iter().map(|one| one.bytes).sum();
            (head, options.draft_bytes())
        }
        _ => (0, 0),
    };
    let mut exceeds = |what, found| {
        if found > limit {
            findings.push(Finding::Memory {
                member: member.name.clone(),
                what,
                found,
                limit,
            });
        }
    };
    let stays = match draft {
        0 => "the KV cache",
        _ => "the KV cache and the draft model",
    };
    exceeds(stays, kv.saturating_add(draft));
    if node.spec.disk_allowed == Some(false) {
        exceeds(
            "weights and KV cache, as the disk may not be used,",
            (in_memory * layer + kv + head).saturating_add(draft),
        );
    }
    // Nothing computes faster than it was measured to.
    let least = milliseconds(&spec.layer_weights, &status.cpu.throughput) * on_cpu as f64
        / f64::from(spec.layers);
    if report.cpu_milliseconds < least * (1.0 - 1e-9) {
        findings.push(Finding::TooFast {
            member: member.name.clone(),
            predicted: report.cpu_milliseconds,
            least,
        });
    }
}

fn milliseconds(
    weights: &[FormatWeights],
    throughput: &[prima_crds::v1alpha1::node_profile::Throughput],
) -> f64 {
    weights
        .iter()
        .map(|one| {
            let rate = throughput.iter().find(|rate| rate.format == one.format);
            let rate = rate.map_or(f64::INFINITY, |rate| rate.decode_bytes_per_second as f64);
            1e3 * one.bytes as f64 / rate
        })
        .sum()
}
