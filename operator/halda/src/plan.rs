//! The answer and its reasons: which member runs which layers, what that is predicted to take and why, what was left out, and what would
//! change it. All decisions are `search`'s; it is asked again for every "what if". `no_ring` says why there is none.

mod no_ring;

use std::num::NonZero;
use std::{panic, slice, thread};

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::{CHUNK_POSITIONS, PlannedGpu};
use serde::Serialize;

use crate::found::{Found, evaluate};
use crate::input::{Device, ExpertWeights, HopCost, Options, PlanningInput};
use crate::latency::{Assignment, LayerShare, MemberLatency};
use crate::search::{Effort, search};
use crate::windows::Window;
pub use no_ring::{Infeasible, PlanError};

/// A ring, and why this one.
#[derive(Clone, Debug)]
pub struct Plan {
    pub rounds: usize,
    /// Long sequences for which each context has memory in layers with windows.
    pub windowed_sequences: usize,
    /// In ring order, rank 0 first.
    pub members: Vec<PlannedMember>,
    pub report: PlanReport,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMember {
    pub name: String,
    /// One per round.
    pub windows: Vec<Window>,
}

/// What people and programs read of a plan.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanReport {
    pub model: String,
    pub layers: usize,
    pub rounds: usize,
    /// From one token to the next.
    pub tpot_milliseconds: f64,
    /// From the request to the first token.
    pub ttft_milliseconds: f64,
    pub prompt_tokens: usize,
    pub answer_tokens: usize,
    /// The most positions of a prompt that go round together.
    pub chunk_positions: usize,
    /// No plan with chunks of this size answers such a request faster by more than this share of its time, within the model. Where layers differ in
    /// their KV caches, this is of plans with a reserve of memory for them: others may fit, or read less from disk, because a member happens to hold
    /// the small ones.
    pub proven_gap_percent: f64,
    pub members: Vec<MemberReport>,
    pub bottleneck: Bottleneck,
    pub left_out: Vec<LeftOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_best: Option<Alternative>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub what_if: Vec<WhatIf>,
}

/// One member; milliseconds are for one token, all rounds together.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberReport {
    pub name: String,
    pub layers: usize,
    pub gpu_layers: usize,
    pub output_head_on_gpu: bool,
    pub draft_on_gpu: bool,
    /// Passes of at least so many rows are computed on the GPU through all layers; `None`: through its own only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_from_rows: Option<usize>,
    pub cpu_milliseconds: f64,
    pub gpu_milliseconds: f64,
    pub copy_milliseconds: f64,
    pub head_milliseconds: f64,
    pub disk_milliseconds: f64,
    pub hop_milliseconds: f64,
    /// For a chunk of the prompt.
    pub chunk_milliseconds: f64,
    pub memory_bytes: u64,
    pub memory_budget_bytes: u64,
    pub gpu_memory_bytes: u64,
    /// Where the machine has several: those that its layers on GPUs are split among.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<PlannedGpu>,
    /// Of both: for the KV caches of the layers that it holds, of all requests together.
    pub kv_bytes: u64,
    /// Weights that do not fit: they are read for every token, and experts when they are needed.
    pub overflow_bytes: u64,
    /// Read from disk for every token: the overflow (of experts, the part that a token uses), and with several rounds what the read-ahead
    /// buffer displaces.
    pub read_bytes_per_token: u64,
    /// Of the experts that a token needs in layers on the CPU, those that are expected in memory; `None`: there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_hit_percent: Option<f64>,
    /// Read in a round, while others work.
    pub read_ahead_bytes: u64,
    pub why: String,
}

/// Where most of a token's time goes.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Bottleneck {
    pub member: String,
    /// `cpu`, `gpu`, `copy`, `head`, `disk` or `hop`.
    pub term: &'static str,
    pub share_percent: f64,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LeftOut {
    pub name: String,
    pub why: String,
}

/// Another plan with other members.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Alternative {
    pub members: Vec<String>,
    pub rounds: usize,
    pub tpot_milliseconds: f64,
    pub ttft_milliseconds: f64,
    /// Of a request's time.
    pub slower_percent: f64,
}

/// What a change of the machines would do.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WhatIf {
    pub change: String,
    pub tpot_milliseconds: f64,
    pub ttft_milliseconds: f64,
    /// Of a request's time.
    pub faster_percent: f64,
}

/// With more machines than this, each one's reasons come from its own numbers instead of another search.
const SEARCH_REASONS: usize = 8;
/// Reasons need no proof to a thousandth.
const REASONS_GAP: f64 = 0.01;
const GIB: f64 = (1_u64 << 30) as f64;

/// The best ring of these machines, with chunks of the best size, and its reasons.
///
/// # Errors
/// [`PlanError`].
pub fn plan_ring(
    model: &ModelProfile,
    nodes: &[NodeProfile],
    options: &Options,
) -> Result<Plan, PlanError> {
    best_of(&PlanningInput::of_each_chunk_size(model, nodes, options)?)
}

/// The best ring for `input`, with chunks of the size that it says, and its reasons.
///
/// # Errors
/// [`PlanError`].
pub fn plan(input: &PlanningInput) -> Result<Plan, PlanError> {
    best_of(slice::from_ref(input))
}

/// Of the rings for each of `inputs`, which differ in the size of chunks, the one that answers a request soonest.
fn best_of(inputs: &[PlanningInput]) -> Result<Plan, PlanError> {
    let effort = Effort::default();
    let mut best: Option<(&PlanningInput, Found)> = None;
    for (input, found) in inputs.iter().zip(with_chunks(inputs, effort)) {
        let known = best
            .as_ref()
            .map_or(f64::INFINITY, |(_, best)| best.seconds);
        // Searches are no more exact than that.
        if let Some(found) = found
            && found.seconds < known * (1.0 - effort.relative_gap)
        {
            best = Some((input, found));
        }
    }
    let (input, found) = best.ok_or_else(|| no_ring::why(inputs))?;
    Ok(Plan {
        rounds: found.assignment.rounds,
        windowed_sequences: input.windowed_sequences,
        members: members(input, &found),
        report: report(input, &found),
    })
}

/// What is found for each of `inputs`. Since others wait longer for larger chunks than usual, only rings have them that copy weights for each chunk.
fn with_chunks(inputs: &[PlanningInput], effort: Effort) -> Vec<Option<Found>> {
    let mut searched = search_each(inputs.iter(), effort);
    for (input, found) in inputs.iter().zip(&mut searched) {
        let copies = |found: &Found| {
            let mut members = found.latency.members.iter();
            members.any(|member| member.gpu_from_rows.is_some())
        };
        if input.chunk_positions > CHUNK_POSITIONS && !found.as_ref().is_some_and(copies) {
            *found = None;
        }
    }
    searched
}

fn members(input: &PlanningInput, found: &Found) -> Vec<PlannedMember> {
    let ring = found.assignment.ring.iter();
    ring.zip(found.assignment.windows())
        .map(|(&index, windows)| PlannedMember {
            name: input.devices[index].name.clone(),
            windows,
        })
        .collect()
}

/// Of a member whose layers on the CPU have so many bytes of `experts`.
fn expert_hit_percent(bytes: f64, experts: &ExpertWeights, latency: &MemberLatency) -> Option<f64> {
    let missed = match latency.overflow_bytes > 0.0 {
        // If other weights are read for every token, no expert stays, however often tokens come back to it.
        true => 1.0,
        false => experts.misses * latency.missing_expert_bytes / bytes,
    };
    (bytes > 0.0).then_some(100.0 * (1.0 - missed))
}

fn report(input: &PlanningInput, found: &Found) -> PlanReport {
    let mut reasons = reasons(input, found);
    for (why, device) in reasons.why.iter_mut().zip(&input.devices) {
        if let Some(unused) = &device.gpu_unused {
            *why += &format!("; its GPU is not used: {unused}");
        }
    }
    let mut members = Vec::new();
    for (&index, latency) in found.assignment.ring.iter().zip(&found.latency.members) {
        let device = &input.devices[index];
        let share = found.assignment.shares[index];
        let expert_hit_percent = expert_hit_percent(
            share.cpu_layers as f64 * input.model.experts.layer_bytes,
            &input.model.experts,
            latency,
        );
        let mut why = reasons.why[index].clone();
        if let Some(hits) = expert_hit_percent.filter(|hits| *hits < 99.5) {
            why +=
                &format!("; of 100 experts that its layers need, {hits:.0} are expected in memory");
        }
        members.push(MemberReport {
            name: device.name.clone(),
            layers: share.layers(),
            gpu_layers: share.gpu_layers,
            output_head_on_gpu: latency.output_head_on_gpu,
            draft_on_gpu: latency.draft_on_gpu,
            gpu_from_rows: latency.gpu_from_rows,
            cpu_milliseconds: latency.cpu_seconds * 1e3,
            gpu_milliseconds: latency.gpu_seconds * 1e3,
            copy_milliseconds: latency.copy_seconds * 1e3,
            head_milliseconds: latency.head_seconds * 1e3,
            disk_milliseconds: latency.disk_seconds * 1e3,
            hop_milliseconds: latency.hop_seconds * 1e3,
            chunk_milliseconds: latency.chunk_seconds * 1e3,
            memory_bytes: latency.memory_bytes as u64,
            memory_budget_bytes: device.memory_bytes as u64,
            gpu_memory_bytes: match share.gpu_layers {
                0 => latency.gpu_memory_bytes as u64,
                _ => (latency.gpu_memory_bytes + device.gpu_split_bytes) as u64,
            },
            gpus: planned_gpus(input, device, share, latency),
            kv_bytes: latency.kv_bytes.round() as u64,
            overflow_bytes: latency.lacking_bytes() as u64,
            read_bytes_per_token: latency.read_bytes() as u64,
            expert_hit_percent,
            read_ahead_bytes: latency.read_ahead_bytes as u64,
            why,
        });
    }
    let mut left_out: Vec<LeftOut> = input
        .left_out
        .iter()
        .map(|(name, why)| LeftOut {
            name: name.clone(),
            why: why.clone(),
        })
        .collect();
    for (index, device) in input.devices.iter().enumerate() {
        if !found.assignment.ring.contains(&index) {
            left_out.push(LeftOut {
                name: device.name.clone(),
                why: reasons.why[index].clone(),
            });
        }
    }
    PlanReport {
        model: input.model.name.clone(),
        layers: input.model.layers,
        rounds: found.assignment.rounds,
        tpot_milliseconds: found.latency.token_seconds * 1e3,
        ttft_milliseconds: found.latency.prompt_seconds * 1e3,
        prompt_tokens: input.workload.prompt_tokens,
        answer_tokens: input.workload.answer_tokens,
        chunk_positions: input.chunk_positions,
        proven_gap_percent: 100.0 * (found.seconds - found.bound_seconds).max(0.0) / found.seconds,
        members,
        bottleneck: bottleneck(input, found),
        left_out,
        next_best: reasons.next_best,
        what_if: what_if(input, found),
    }
}

/// The GPUs that a member uses, and what they have beside layers. On the first that is more.
fn planned_gpus(
    input: &PlanningInput,
    device: &Device,
    share: LayerShare,
    latency: &MemberLatency,
) -> Vec<PlannedGpu> {
    if share.gpu_layers == 0 && latency.gpu_from_rows.is_none() {
        return Vec::new();
    }
    let model = &input.model;
    let streamed = device.gpu.as_ref().and_then(|gpu| gpu.streamed);
    let streamed = streamed.filter(|_| latency.gpu_from_rows.is_some());
    let extras = [
        latency.output_head_on_gpu.then_some(model.gpu_output_bytes),
        latency.draft_on_gpu.then_some(model.gpu_draft_bytes),
        streamed.map(|streamed| streamed.room_bytes),
    ];
    let extras: f64 = extras.into_iter().flatten().sum();
    // Without layers of its own, only the first computes.
    let used = match share.gpu_layers {
        0 => 1,
        _ => device.gpus.len(),
    };
    let gpus = device.gpus.iter().take(used).enumerate();
    let gpus = gpus.map(|(place, name)| {
        let beside = match place {
            0 => model.gpu_buffer_bytes + extras,
            _ => model.gpu_buffer_bytes,
        };
        PlannedGpu {
            name: name.clone(),
            beside_layers_bytes: beside as i64,
        }
    });
    gpus.collect()
}

fn terms(member: &MemberLatency) -> [(&'static str, f64); 6] {
    [
        ("cpu", member.cpu_seconds),
        ("gpu", member.gpu_seconds),
        ("copy", member.copy_seconds),
        ("head", member.head_seconds),
        ("disk", member.disk_seconds),
        ("hop", member.hop_seconds),
    ]
}

fn bottleneck(input: &PlanningInput, found: &Found) -> Bottleneck {
    let mut worst = (0, "cpu", 0.0);
    for (&index, member) in found.assignment.ring.iter().zip(&found.latency.members) {
        for (term, seconds) in terms(member) {
            if seconds > worst.2 {
                worst = (index, term, seconds);
            }
        }
    }
    Bottleneck {
        member: input.devices[worst.0].name.clone(),
        term: worst.1,
        share_percent: 100.0 * worst.2 / found.latency.token_seconds,
    }
}

struct Reasons {
    /// One per device.
    why: Vec<String>,
    next_best: Option<Alternative>,
}

/// Why each device is in or out: what the best ring without it, or with it, would take, with chunks of the same size.
fn reasons(input: &PlanningInput, found: &Found) -> Reasons {
    if input.devices.len() > SEARCH_REASONS {
        return Reasons {
            why: (0..input.devices.len())
                .map(|index| by_its_numbers(input, found, index))
                .collect(),
            next_best: None,
        };
    }
    let is_in = |index: usize| found.assignment.ring.contains(&index);
    // `None` where a machine cannot be left out.
    let others: Vec<Option<PlanningInput>> = (0..input.devices.len())
        .map(|index| {
            let all = input.devices[index].required || input.devices.len() <= input.fewest;
            if is_in(index) && (all || input.devices.len() == 1) {
                return None;
            }
            let mut other = input.clone();
            if is_in(index) {
                remove(&mut other, index);
            } else {
                other.devices[index].required = true;
            }
            Some(other)
        })
        .collect();
    let effort = for_reasons(found.assignment.rounds);
    let alternatives = search_each(others.iter().flatten(), effort);
    let mut alternatives = alternatives.into_iter();
    let mut next_best: Option<(f64, Alternative)> = None;
    let mut why = Vec::new();
    for (index, other) in others.iter().enumerate() {
        let (is_in, name) = (is_in(index), &input.devices[index].name);
        let Some(other) = other else {
            why.push(match input.devices.len() {
                1 => "the only machine".to_owned(),
                _ => "every machine is to take part".to_owned(),
            });
            continue;
        };
        let Some(alternative) = alternatives.next().flatten() else {
            why.push(no_alternative(input, is_in));
            continue;
        };
        let slower = 100.0 * (alternative.seconds / found.seconds - 1.0);
        let tpot = alternative.latency.token_seconds * 1e3;
        if next_best
            .as_ref()
            .is_none_or(|(best, _)| alternative.seconds < *best)
        {
            let names = alternative.assignment.ring.iter();
            let summary = Alternative {
                members: names.map(|&i| other.devices[i].name.clone()).collect(),
                rounds: alternative.assignment.rounds,
                tpot_milliseconds: tpot,
                ttft_milliseconds: alternative.latency.prompt_seconds * 1e3,
                slower_percent: slower,
            };
            next_best = Some((alternative.seconds, summary));
        }
        let with = if is_in { "without" } else { "with" };
        why.push(match slower < 100.0 * REASONS_GAP {
            true => format!("{with} {name}, a request takes about as long ({tpot:.1} ms a token)"),
            false => format!(
                "{with} {name}, a request takes {slower:.0} % longer ({tpot:.1} ms a token)"
            ),
        });
    }
    Reasons {
        why,
        next_best: next_best.map(|(_, alternative)| alternative),
    }
}

/// Why there is no ring without a machine that is in, or with one that is out.
fn no_alternative(input: &PlanningInput, is_in: bool) -> String {
    let mut none = match is_in {
        true => "without it the model does not fit",
        false => "it cannot hold a layer",
    }
    .to_owned();
    if input.first_token_seconds.is_some() {
        none += match is_in {
            true => ", or the first token comes later than it may",
            false => ", or the first token would come later than it may",
        };
    }
    if !input.all_meet() {
        none += ", or machines would be neighbours that do not reach each other";
    }
    none
}

/// For reasons that are compared with a plan of so many rounds.
fn for_reasons(rounds: usize) -> Effort {
    Effort {
        relative_gap: REASONS_GAP,
        time_limit_seconds: 0.5,
        few_rounds_and: Some(rounds),
    }
}

/// What is found for each of `inputs`. Several are searched at a time: people wait for them, and after a loss a ring does.
fn search_each<'a>(
    inputs: impl Iterator<Item = &'a PlanningInput>,
    effort: Effort,
) -> Vec<Option<Found>> {
    let inputs: Vec<&PlanningInput> = inputs.collect();
    let at_once = thread::available_parallelism().map_or(1, NonZero::get);
    let mut found = Vec::with_capacity(inputs.len());
    for some in inputs.chunks(at_once) {
        thread::scope(|scope| {
            let begin = |input| scope.spawn(move || search(input, effort));
            let begun: Vec<_> = some.iter().copied().map(begin).collect();
            found.extend(begun.into_iter().map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|cause| panic::resume_unwind(cause))
            }));
        });
    }
    found
}

fn by_its_numbers(input: &PlanningInput, found: &Found, index: usize) -> String {
    let layer = |index: usize| {
        let device = &input.devices[index];
        let gpu = device.gpu.as_ref().map(|gpu| gpu.layer.decode_seconds);
        gpu.unwrap_or(f64::INFINITY).min(device.cpu.decode_seconds) * 1e3
    };
    let slowest = found
        .assignment
        .ring
        .iter()
        .map(|&i| layer(i))
        .fold(0.0, f64::max);
    let own = layer(index);
    match found.assignment.ring.contains(&index) {
        true => format!("a layer takes {own:.2} ms here, {slowest:.2} ms on the slowest member"),
        false => format!(
            "not needed: a layer takes {own:.2} ms here, at most {slowest:.2} ms on the members"
        ),
    }
}

fn remove(input: &mut PlanningInput, index: usize) {
    input.devices.remove(index);
    input.hops.remove(index);
    for hops in &mut input.hops {
        hops.remove(index);
    }
    // The required rank 0 has moved up; or it is gone, and any device may be.
    input.rank0 = match input.rank0 {
        Some(rank0) if rank0 > index => Some(rank0 - 1),
        Some(rank0) if rank0 == index => None,
        other => other,
    };
}

/// What more memory, a faster disk and wires would change, where they could.
fn what_if(input: &PlanningInput, found: &Found) -> Vec<WhatIf> {
    let mut changes: Vec<(String, PlanningInput)> = Vec::new();
    let worst_disk = found
        .assignment
        .ring
        .iter()
        .zip(&found.latency.members)
        .filter(|(_, member)| member.lacking_bytes() > 0.0)
        .max_by(|a, b| a.1.disk_seconds.total_cmp(&b.1.disk_seconds));
    if let Some((&index, _)) = worst_disk {
        let name = &input.devices[index].name;
        let mut more = input.clone();
        more.devices[index].memory_bytes += GIB;
        changes.push((format!("1 GiB more memory in {name}"), more));
        let mut faster = input.clone();
        let device = &mut faster.devices[index];
        let rates = [
            &mut device.disk_bytes_per_second,
            &mut device.expert_read_bytes_per_second,
        ];
        for rate in rates.into_iter().flatten() {
            *rate *= 2.0;
        }
        changes.push((format!("a disk twice as fast in {name}"), faster));
    }
    if input.devices.len() > 1 {
        let mut wired = input.clone();
        let mut shorter = false;
        for hop in wired.hops.iter_mut().flatten() {
            let wire = wire(input, hop);
            shorter |= wire.decode_seconds < hop.decode_seconds;
            *hop = wire;
        }
        if shorter {
            changes.push(("wires (1 Gbit/s) between all machines".to_owned(), wired));
        }
    }
    let effort = for_reasons(found.assignment.rounds);
    let searched = search_each(changes.iter().map(|(_, input)| input), effort);
    let with_changes = changes.into_iter().zip(searched);
    with_changes
        .filter_map(|((change, input), searched)| {
            let Assignment {
                rounds,
                ring,
                shares,
            } = found.assignment.clone();
            let as_planned = evaluate(&input, rounds, ring, shares);
            let then = [as_planned, searched]
                .into_iter()
                .flatten()
                .min_by(|a, b| a.seconds.total_cmp(&b.seconds))?;
            Some(WhatIf {
                change,
                tpot_milliseconds: then.latency.token_seconds * 1e3,
                ttft_milliseconds: then.latency.prompt_seconds * 1e3,
                // Sums in another order may come out a bit higher.
                faster_percent: 100.0 * (1.0 - then.seconds / found.seconds).max(0.0),
            })
        })
        .collect()
}

/// The hop over a wire of 1 Gbit/s, if that is shorter. Where there is no way, a better one is not the question.
fn wire(input: &PlanningInput, hop: &HopCost) -> HopCost {
    const LATENCY: f64 = 0.2e-3;
    const BYTES_PER_SECOND: f64 = 117e6;
    if !hop.is_way() {
        return *hop;
    }
    let payload = input.model.activation_bytes / BYTES_PER_SECOND;
    HopCost {
        decode_seconds: hop.decode_seconds.min(LATENCY + payload),
        chunk_seconds: hop
            .chunk_seconds
            .min(LATENCY + payload * input.workload.chunk_tokens as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_expert_is_expected_where_other_weights_do_not_fit() {
        let experts = ExpertWeights {
            misses: 0.5,
            ..ExpertWeights::default()
        };
        let hits = |overflow_bytes, missing_expert_bytes| {
            let latency = MemberLatency {
                overflow_bytes,
                missing_expert_bytes,
                ..MemberLatency::default()
            };
            expert_hit_percent(100.0, &experts, &latency)
        };
        assert_eq!(hits(0.0, 0.0), Some(100.0));
        // Of a half that is missing, tokens need half of their share.
        assert_eq!(hits(0.0, 50.0), Some(75.0));
        assert_eq!(hits(1.0, 100.0), Some(0.0));
        let latency = MemberLatency::default();
        assert_eq!(expert_hit_percent(0.0, &experts, &latency), None);
    }
}
