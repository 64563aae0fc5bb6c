//! What machines have memory for, and a GPU.

use std::collections::HashSet;
use std::slice;
use std::sync::Arc;

use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::node_profile::{GpuProfile, NodeProfile, NodeProfileStatus};
use prima_crds::v1alpha1::ring_plan::{RingMember, RingPlan, RingPlanSpec};

use crate::model_controller::candidates::Candidates;

/// Whether a machine can do what a plan asks of it, and its owner wants it.
pub fn could_do(profile: &NodeProfile, member: &RingMember, model: &ModelProfileSpec) -> bool {
    let Some(status) = profile.status.as_ref().filter(|status| status.runs(model)) else {
        return false;
    };
    let owner = &profile.spec;
    staying_bytes(member) <= owner.left_to_running_ring(status, model)
        && member.gpu_memory_bytes.unwrap_or(0)
            <= status.own_bytes_of(&member.gpus, model).unwrap_or(0)
        && first_has_room(member, 0, status, model)
        && is_lent_enough(member, 0, status, model)
        && (!streams(member) || owner.disk_allowed != Some(false))
}

/// Why a machine cannot do any more what a plan has its GPU do, as its agent says; `None` if it can.
pub fn lacks_gpu(
    profile: &NodeProfile,
    member: &RingMember,
    model: &ModelProfileSpec,
) -> Option<String> {
    let status = profile.status.as_ref()?;
    let planned = &member.gpus;
    let found = status.gpus_named(planned, model).len();
    if !member.uses_gpu() || found >= planned.len().max(1) {
        return None;
    }
    let is_planned = |gpu: &&GpuProfile| {
        let mut names = planned.iter().map(|planned| &planned.name);
        planned.is_empty() || names.any(|name| gpu.is_named(name))
    };
    let mut gpus = status.gpus.iter().filter(is_planned);
    let unusable = gpus.find_map(|gpu| Some(format!("{}: {}", gpu.name, gpu.unusable.as_ref()?)));
    Some(unusable.unwrap_or_else(|| "it has none for this model".to_owned()))
}

/// Whether it reads weights from disk for every token.
pub fn streams(member: &RingMember) -> bool {
    member.read_bytes_per_token.unwrap_or(0) > 0
}

/// Whether the machines have memory for the new ring while the old ones still run. If a machine's processor has a layer in both, its page cache
/// holds the weights once; a GPU holds both rings in full. Where the old ring reads weights from disk anyway, both may read more of them until it
/// ends: then only what cannot be read again has to fit. All this goes for rings of the same file: of another one, no layer is shared, and how much
/// could be read again is not known.
pub fn fits_beside(
    spec: &RingPlanSpec,
    old: &[Arc<RingPlan>],
    candidates: &Candidates,
    model: &ModelProfileSpec,
) -> bool {
    let layer_bytes = model.layer_bytes();
    spec.members.iter().all(|member| {
        let before = old.iter().filter_map(|plan| {
            let mut members = plan.spec.members.iter();
            let before = members.find(|before| before.name == member.name)?;
            let same_file = plan.spec.model.version == spec.model.version;
            Some((before, same_file))
        });
        let before: Vec<(&RingMember, bool)> = before.collect();
        // Where no old ring is, the new one was planned with all that there is.
        if before.is_empty() {
            return true;
        }
        let profile = candidates.profile(&member.name);
        let Some(status) = profile.and_then(|profile| profile.status.as_ref()) else {
            return true;
        };
        let can_read = |(before, same_file): &(&RingMember, bool)| *same_file && streams(before);
        let needed: i64 = match before.iter().all(can_read) {
            true => {
                let both = before.iter().map(|(before, _)| *before).chain([member]);
                both.map(|one| fixed_bytes(one, layer_bytes)).sum()
            }
            false => {
                let ours = layers(member);
                let held = before.iter().map(|(before, same_file)| {
                    let shared = match same_file {
                        true => layers(before).intersection(&ours).count() as i64,
                        false => 0,
                    };
                    (before.memory_bytes.unwrap_or(0) - shared * layer_bytes).max(0)
                });
                staying_bytes(member) + held.sum::<i64>()
            }
        };
        let gpu_held: i64 = before
            .iter()
            .filter_map(|(before, _)| before.gpu_memory_bytes)
            .sum();
        let lent_held = before.iter().filter(|(before, _)| before.uses_gpu());
        let lent_held = lent_held.map(|(before, same_file)| match same_file {
            true => lent_bytes(before, layer_bytes),
            // How large its layers are is not known.
            false => before.memory_bytes.unwrap_or(0),
        });
        needed <= status.available_bytes(model)
            && gpus_have_room(member, gpu_held, status, model)
            && is_lent_enough(member, lent_held.sum(), status, model)
    })
}

/// Whether the member's GPUs have room for it where so many bytes of theirs are held. On which of several these lie is not known: what is no layer
/// has to fit the first as if all lay there.
fn gpus_have_room(
    member: &RingMember,
    held: i64,
    status: &NodeProfileStatus,
    model: &ModelProfileSpec,
) -> bool {
    let on_gpus = member.gpu_memory_bytes.unwrap_or(0);
    let available = status.own_bytes_of(&member.gpus, model).unwrap_or(0);
    let first_has_room = held == 0 || first_has_room(member, held, status, model);
    on_gpus == 0 || (on_gpus + held <= available && first_has_room)
}

/// Whether the first of the member's GPUs has room for what is no layer, where so many bytes of it are held. One that shares the machine's memory
/// has none of its own to lack.
fn first_has_room(
    member: &RingMember,
    held: i64,
    status: &NodeProfileStatus,
    model: &ModelProfileSpec,
) -> bool {
    let first = member.gpus.first();
    first.is_none_or(|first| {
        let available = status.own_bytes_of(slice::from_ref(first), model);
        available.is_none_or(|available| first.beside_layers_bytes + held <= available)
    })
}

/// Whether the member's GPU, if it shares the machine's memory, is lent as much of it as the member has there, where so many bytes of that are held.
fn is_lent_enough(
    member: &RingMember,
    held: i64,
    status: &NodeProfileStatus,
    model: &ModelProfileSpec,
) -> bool {
    let on_gpu = lent_bytes(member, model.layer_bytes());
    let gpus = status.gpus_named(&member.gpus, model);
    let lent = gpus.first().and_then(|gpu| gpu.lent_bytes());
    on_gpu == 0 || lent.is_none_or(|lent| on_gpu.saturating_add(held) <= lent)
}

/// What a member has on a GPU that shares the machine's memory, about: its layers there, and as large a part of its KV caches.
fn lent_bytes(member: &RingMember, layer_bytes: i64) -> i64 {
    let windows = member.windows.iter();
    let (all, on_gpu) = windows.fold((0_i64, 0_i64), |(all, on_gpu), window| {
        let layers = i64::from(window.last - window.first);
        (all + layers, on_gpu + i64::from(window.gpu_layers))
    });
    let kv = member.kv_bytes.unwrap_or(0) / all.max(1) * on_gpu;
    (on_gpu * layer_bytes).saturating_add(kv)
}

/// Whether a ring that was planned with machines as in `more` also has the memory where other Models' rings leave it `less`.
pub fn fits_in_less(
    members: &[RingMember],
    less: &Candidates,
    more: &Candidates,
    model: &ModelProfileSpec,
) -> bool {
    members.iter().all(|member| {
        let left = |candidates: &Candidates| {
            let profile = candidates.profile(&member.name)?;
            let status = profile.status.as_ref()?;
            let memory = profile.spec.left_to_ring(status, model);
            let on_gpus = status.own_bytes_of(&member.gpus, model).unwrap_or(0);
            let first_has_room = first_has_room(member, 0, status, model);
            let is_lent_enough = is_lent_enough(member, 0, status, model);
            Some((memory, on_gpus, first_has_room && is_lent_enough))
        };
        let less = left(less);
        // One that reads weights from disk was promised more than there is, and has all of it.
        less == left(more)
            || less.is_some_and(|(memory, gpu, has_room)| {
                member.memory_bytes.unwrap_or(0) <= memory
                    && member.gpu_memory_bytes.unwrap_or(0) <= gpu
                    && has_room
            })
    })
}

/// Of the machine's memory, what a member keeps: what is read anew for every token does not stay.
fn staying_bytes(member: &RingMember) -> i64 {
    member.memory_bytes.unwrap_or(0) - member.read_bytes_per_token.unwrap_or(0)
}

/// Of the machine's memory, what a member cannot give up: all but the weights of its layers, which are on its disk, too.
fn fixed_bytes(member: &RingMember, layer_bytes: i64) -> i64 {
    let windows = member.windows.iter();
    let layers: i32 = windows
        .map(|window| window.last - window.first - window.gpu_layers)
        .sum();
    (member.memory_bytes.unwrap_or(0) - i64::from(layers) * layer_bytes).max(0)
}

/// The layers of its processor, whose weights the page cache holds.
fn layers(member: &RingMember) -> HashSet<i32> {
    let windows = member.windows.iter();
    windows
        .flat_map(|window| window.first..window.last - window.gpu_layers)
        .collect()
}
