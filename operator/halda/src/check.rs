//! Whether a plan can be true: an independent check, from the documents and the plan alone. It shares no code with the
//! solver and the latency model, so that it sees mistakes made there. Used in tests and before every plan is written.

use std::collections::HashSet;

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfile, ModelProfileSpec};
use prima_crds::v1alpha1::node_profile::{
    GpuBackend, GpuMeasurements, NodeProfile, NodeProfileStatus, Throughput,
};
use prima_crds::v1alpha1::ring_plan::{
    CHUNK_POSITIONS, KvDtype, PlannedGpu, USUAL_WINDOWED_SEQUENCES,
};

use crate::input::{Options, streaming_room};
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
        "{member}: there is no such machine, or it is in the ring twice, or its owner excludes it, or its agent cannot run the model or read the plan"
    )]
    Machine { member: String },
    #[error("{member}: the output head is on its GPU, but it is not rank 0, or has no such GPU")]
    OutputHead { member: String },
    #[error(
        "{member}: the draft model is on its GPU, but it is not rank 0, or has no such GPU, or there is no draft model"
    )]
    Draft { member: String },
    #[error("{member}: prompts are on its GPU through all layers, but it has no such GPU")]
    Streaming { member: String },
    #[error("the first token is predicted after {found} ms, but may take {most} ms")]
    FirstToken { found: f64, most: f64 },
    #[error("{found} members have layers, but at least {least} must")]
    TooFew { found: usize, least: usize },
    #[error("{member} and {next} are neighbours, but do not reach each other")]
    Apart { member: String, next: String },
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
    neighbours(plan, options, &mut findings);
    let has_layers = |member: &&PlannedMember| member.windows.iter().any(|w| w.last > w.first);
    let found = plan.members.iter().filter(has_layers).count();
    if found < options.min_nodes {
        let least = options.min_nodes;
        findings.push(Finding::TooFew { found, least });
    }
    let mut seen = HashSet::new();
    let asked = Asked {
        spec: &model.spec,
        options,
        windowed_sequences: plan.windowed_sequences,
        chunk_positions: plan.report.chunk_positions,
        says_of_gpus: plan.report.members.iter().any(says_of_gpus),
    };
    for (rank, (member, report)) in plan.members.iter().zip(&plan.report.members).enumerate() {
        let node = nodes
            .iter()
            .find(|node| node.metadata.name.as_deref() == Some(&member.name));
        match node {
            Some(node) if seen.insert(&member.name) && !node.spec.exclude => {
                machine(rank, member, report, node, &asked, &mut findings);
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
    if let Some(most) = options.first_token_seconds {
        let (found, most) = (plan.report.ttft_milliseconds, most * 1e3);
        if found > most * 1.0001 {
            findings.push(Finding::FirstToken { found, most });
        }
    }
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

/// The last member hands on to the first.
fn neighbours(plan: &Plan, options: &Options, findings: &mut Vec<Finding>) {
    let next = plan.members.iter().cycle().skip(1);
    let hops = plan
        .members
        .iter()
        .zip(next)
        .map(|(one, next)| [&one.name, &next.name]);
    for [member, next] in hops.filter(|[member, next]| member != next) {
        let mut apart = options.apart.iter();
        if apart.any(|pair| pair.contains(member) && pair.contains(next)) {
            findings.push(Finding::Apart {
                member: member.clone(),
                next: next.clone(),
            });
        }
    }
}

/// What all members are checked against.
struct Asked<'a> {
    spec: &'a ModelProfileSpec,
    options: &'a Options,
    /// The plan's.
    windowed_sequences: usize,
    chunk_positions: usize,
    /// Of any member: agents read the whole plan.
    says_of_gpus: bool,
}

/// Whether a plan says of this member what agents of earlier versions do not read.
fn says_of_gpus(report: &MemberReport) -> bool {
    !report.gpus.is_empty() || report.draft_on_gpu
}

impl Asked<'_> {
    /// Whether the member's agent runs the model, and reads the plan.
    fn can_follow(&self, status: &NodeProfileStatus) -> bool {
        let usual = self.windowed_sequences == USUAL_WINDOWED_SEQUENCES as usize;
        let usual_chunks = self.chunk_positions == CHUNK_POSITIONS;
        status.runs(self.spec)
            && (usual || status.reads_windowed_sequences)
            && (usual_chunks || status.reads_chunk_positions)
            && (!self.says_of_gpus || status.reads_gpus)
    }
}

fn machine(
    rank: usize,
    member: &PlannedMember,
    report: &MemberReport,
    node: &NodeProfile,
    asked: &Asked<'_>,
    findings: &mut Vec<Finding>,
) {
    let spec = asked.spec;
    let status = node.status.as_ref();
    let Some(status) = status.filter(|status| asked.can_follow(status)) else {
        findings.push(Finding::Machine {
            member: member.name.clone(),
        });
        return;
    };
    let share = Share::new(rank, member, report, asked);
    gpu(&share, status, spec, findings);
    kv_buffer(&share, status, spec, findings);
    // One that shares the machine's memory is no gain.
    let gpus = status.gpus_named(&report.gpus, spec);
    let first = gpus.first().copied();
    let measured = first.and_then(|gpu| gpu.measured.as_ref());
    let measured = measured.filter(|gpu| gpu.own_available_bytes().is_some());
    let has_gpu_for_head = measured.is_some_and(|gpu| {
        let mut formats = spec.output_weights.iter().map(|one| &one.format);
        formats.all(|format| gpu.throughput.iter().any(|one| one.format == *format))
    });
    if report.output_head_on_gpu && (rank > 0 || !has_gpu_for_head) {
        findings.push(Finding::OutputHead {
            member: member.name.clone(),
        });
    }
    let has_gpu_for_draft = asked.options.draft.as_ref().is_some_and(|draft| {
        let mut gpus = status.gpus_for(draft).into_iter();
        measured.is_some_and(|gpu| gpu.runs_drafts) && gpus.any(|gpu| Some(gpu) == first)
    });
    if report.draft_on_gpu && (rank > 0 || !has_gpu_for_draft) {
        findings.push(Finding::Draft {
            member: member.name.clone(),
        });
    }
    memory(&share, node, status, spec, findings);
    computing(&share, report, status, spec, findings);
}

/// What a member has by the plan.
struct Share<'a> {
    member: &'a str,
    cpu_layers: i64,
    gpu_layers: i64,
    /// Those that these are split among; none: the machine's first.
    gpus: &'a [PlannedGpu],
    /// Weights of a layer.
    layer_bytes: i64,
    /// KV caches of all its layers, on the processor and on a GPU, which has them as F16.
    kv_bytes: i64,
    gpu_kv_bytes: i64,
    /// Only of rank 0, and on the processor or on a GPU.
    head_bytes: i64,
    gpu_head_bytes: i64,
    draft_bytes: i64,
    gpu_draft_bytes: i64,
    logits_bytes: i64,
    /// Whether layers on the processor are copied to the GPU for passes of many rows, two parts of them at a time.
    streams: bool,
    streaming_room: i64,
    /// Keys and values of a layer that sees all positions, on a GPU.
    gpu_layer_kv_bytes: i64,
    /// Those of the layer that keeps most.
    largest_kv_bytes: i64,
}

impl<'a> Share<'a> {
    fn new(
        rank: usize,
        member: &'a PlannedMember,
        report: &'a MemberReport,
        asked: &Asked<'_>,
    ) -> Self {
        let Asked {
            spec,
            options,
            windowed_sequences,
            chunk_positions,
            says_of_gpus: _,
        } = *asked;
        let windows = member.windows.iter();
        let layers: i64 = windows.map(|w| w.last.saturating_sub(w.first) as i64).sum();
        let gpu_layers: i64 = member.windows.iter().map(|w| w.gpu_layers as i64).sum();
        let context = options.context_tokens;
        let kept = spec.kept_positions(context, windowed_sequences, chunk_positions);
        let (mut positions, mut gpu_positions) = (0, 0);
        for window in &member.windows {
            for layer in window.first..window.last {
                // One that the model lacks is found elsewhere.
                let kept = kept.get(layer).copied().unwrap_or_default() as i64;
                match layer + window.gpu_layers >= window.last {
                    true => gpu_positions += kept,
                    false => positions += kept,
                }
            }
        }
        let kv_bytes = |dtype, positions: i64| {
            let position = spec.kv_bytes(dtype);
            let all = positions.saturating_mul(options.kv_contexts as i64);
            all.saturating_mul(position)
        };
        let output_bytes = spec.output_weights.iter().map(|one| one.bytes).sum();
        let (head_bytes, gpu_head_bytes) = match (report.output_head_on_gpu, rank) {
            (true, _) => (0, output_bytes),
            (false, 0) => (output_bytes, 0),
            (false, _) => (0, 0),
        };
        let logits_bytes = match rank {
            0 => options.logits_bytes(spec),
            _ => 0,
        };
        let (draft_bytes, gpu_draft_bytes) = match (report.draft_on_gpu, rank) {
            (true, _) => options.draft_bytes_on_gpu(),
            (false, 0) => (options.draft_bytes(), 0),
            (false, _) => (0, 0),
        };
        Self {
            member: &member.name,
            cpu_layers: layers - gpu_layers,
            gpu_layers,
            gpus: &report.gpus,
            layer_bytes: spec.layer_bytes(),
            kv_bytes: kv_bytes(options.kv_dtype, positions),
            gpu_kv_bytes: kv_bytes(KvDtype::F16, gpu_positions),
            head_bytes,
            gpu_head_bytes,
            draft_bytes,
            gpu_draft_bytes,
            logits_bytes,
            streams: report.gpu_from_rows.is_some(),
            streaming_room: streaming_room(spec, options),
            gpu_layer_kv_bytes: kv_bytes(KvDtype::F16, options.context_tokens as i64),
            largest_kv_bytes: {
                let most = kept.iter().copied().max().unwrap_or_default();
                kv_bytes(KvDtype::F16, most as i64)
            },
        }
    }

    fn exceeds(&self, what: &'static str, found: i64, limit: i64) -> Option<Finding> {
        (found > limit).then(|| Finding::Memory {
            member: self.member.to_owned(),
            what,
            found,
            limit,
        })
    }
}

/// There are GPUs for the layers and the output head, with memory for them: their own, or what they are lent.
fn gpu(
    share: &Share<'_>,
    status: &NodeProfileStatus,
    spec: &ModelProfileSpec,
    findings: &mut Vec<Finding>,
) {
    let gpus = status.gpus_named(share.gpus, spec);
    let first = gpus.first().and_then(|gpu| gpu.measured.as_ref());
    let streamed = match share.streams {
        true => share.streaming_room,
        false => 0,
    };
    let extras = streamed
        .saturating_add(share.gpu_head_bytes)
        .saturating_add(share.gpu_draft_bytes);
    if let Some(all_bytes) = status.own_bytes_of(share.gpus, spec) {
        // Each but one may be left with less room than a layer takes.
        let split = gpus.len().saturating_sub(1) as i64;
        let limit = all_bytes - split * (share.layer_bytes + share.largest_kv_bytes);
        let what = match (share.gpu_head_bytes, share.gpu_draft_bytes) {
            (0, 0) => "GPU memory for layers and KV cache",
            (_, 0) => "GPU memory for layers, KV cache and output head",
            _ => "GPU memory for layers, KV cache and draft model",
        };
        let all = (share.gpu_layers * share.layer_bytes)
            .saturating_add(share.gpu_kv_bytes)
            .saturating_add(extras);
        findings.extend(share.exceeds(what, all, limit));
    }
    if let Some(limit) = gpus.first().and_then(|gpu| gpu.lent_bytes()) {
        let what = "layers and KV cache in the memory that the GPU's driver lends it";
        let all = (share.gpu_layers * share.layer_bytes).saturating_add(share.gpu_kv_bytes);
        findings.extend(share.exceeds(what, all, limit));
    }
    if let Some(limit) = first.and_then(GpuMeasurements::own_available_bytes)
        && gpus.len() > 1
    {
        let what = "what is no layer on the first GPU";
        findings.extend(share.exceeds(what, extras, limit));
    }
    let streams = first.is_some_and(|gpu| gpu.streams_weights && !gpu.unified_memory);
    if share.streams && !streams {
        findings.push(Finding::Streaming {
            member: share.member.to_owned(),
        });
    }
    if gpus.len() < share.gpus.len().max(1) && share.gpu_layers > 0 {
        findings.push(Finding::GpuLayers {
            member: share.member.to_owned(),
            gpu_layers: share.gpu_layers as usize,
            layers: 0,
        });
    }
}

/// The keys and values of a layer, which lie in one buffer of a GPU, are not larger than its driver allows.
fn kv_buffer(
    share: &Share<'_>,
    status: &NodeProfileStatus,
    spec: &ModelProfileSpec,
    findings: &mut Vec<Finding>,
) {
    let gpus = status.gpus_named(share.gpus, spec).into_iter();
    let limits = gpus.filter_map(|gpu| gpu.measured.as_ref()?.most_buffer_bytes);
    if let Some(limit) = limits.min().filter(|_| share.gpu_layers > 0) {
        let what = "the KV cache of a layer on the GPU";
        findings.extend(share.exceeds(what, share.gpu_layer_kv_bytes, limit));
    }
}

/// The machine's memory holds what cannot be read again, among it the layers of a GPU that shares it, and all if there is no disk to read
/// it from.
fn memory(
    share: &Share<'_>,
    node: &NodeProfile,
    status: &NodeProfileStatus,
    spec: &ModelProfileSpec,
    findings: &mut Vec<Finding>,
) {
    let (shared_gpu_layers, shared_gpu_kv) = match status.own_gpu_bytes(spec) {
        Some(_) => (0, 0),
        None => (share.gpu_layers, share.gpu_kv_bytes),
    };
    let kv = share.kv_bytes.saturating_add(shared_gpu_kv);
    // Metal maps them; for others they are copied.
    let copied = match status.gpu_for(spec) {
        Some((GpuBackend::Metal, _)) => 0,
        _ => shared_gpu_layers * share.layer_bytes,
    };
    let stays = kv
        .saturating_add(copied)
        .saturating_add(share.draft_bytes)
        .saturating_add(share.logits_bytes);
    let limit = node.spec.left_to_ring(status, spec);
    let what = match (share.logits_bytes, share.draft_bytes) {
        _ if copied > 0 => "the KV cache and the GPU's layers",
        (0, _) => "the KV cache",
        (_, 0) => "the KV cache and logits",
        _ => "the KV cache, logits and the draft model",
    };
    findings.extend(share.exceeds(what, stays, limit));
    if node.spec.disk_allowed == Some(false) {
        let layers = (share.cpu_layers + shared_gpu_layers) * share.layer_bytes;
        let weights = layers - copied + share.head_bytes;
        findings.extend(share.exceeds(
            "weights and KV cache, as the disk may not be used,",
            stays.saturating_add(weights),
            limit,
        ));
    }
}

/// Nothing computes faster than it was measured to.
fn computing(
    share: &Share<'_>,
    report: &MemberReport,
    status: &NodeProfileStatus,
    spec: &ModelProfileSpec,
    findings: &mut Vec<Finding>,
) {
    let all = milliseconds(&spec.used_weights(), &status.cpu.throughput);
    let least = all * share.cpu_layers as f64 / f64::from(spec.layers);
    let predicted = report.cpu_milliseconds;
    if predicted < least * (1.0 - 1e-9) {
        findings.push(Finding::TooFast {
            member: share.member.to_owned(),
            predicted,
            least,
        });
    }
}

fn milliseconds(weights: &[FormatWeights], throughput: &[Throughput]) -> f64 {
    weights
        .iter()
        .map(|one| {
            let rate = throughput.iter().find(|rate| rate.format == one.format);
            let rate = rate.map_or(f64::INFINITY, |rate| rate.decode_bytes_per_second as f64);
            1e3 * one.bytes as f64 / rate
        })
        .sum()
}
