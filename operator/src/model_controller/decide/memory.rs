//! What machines have memory for.

use std::collections::HashSet;
use std::sync::Arc;

use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::{RingMember, RingPlan, RingPlanSpec};

use crate::model_controller::candidates::Candidates;

/// Whether a machine can do what a plan asks of it, and its owner wants it.
pub fn could_do(profile: &NodeProfile, member: &RingMember, model: &ModelProfileSpec) -> bool {
    let Some(status) = profile.status.as_ref().filter(|status| status.runs(model)) else {
        return false;
    };
    let owner = &profile.spec;
    staying_bytes(member) <= owner.left_to_running_ring(status, model)
        && member.gpu_memory_bytes.unwrap_or(0) <= status.own_gpu_bytes(model).unwrap_or(0)
        && (!streams(member) || owner.disk_allowed != Some(false))
}

/// Whether it reads weights from disk for every token.
pub fn streams(member: &RingMember) -> bool {
    member.read_bytes_per_token.unwrap_or(0) > 0
}

/// Whether the machines have memory for the new ring while the old ones still run. If a machine has a layer in both, its page cache holds
/// the weights once; a GPU holds both rings in full. Where the old ring reads weights from disk anyway, both may read more of them until it
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
        let on_gpu = member.gpu_memory_bytes.unwrap_or(0);
        needed <= status.available_bytes(model)
            && (on_gpu == 0 || on_gpu + gpu_held <= status.own_gpu_bytes(model).unwrap_or(0))
    })
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
            Some((memory, status.own_gpu_bytes(model).unwrap_or(0)))
        };
        let less = left(less);
        // One that reads weights from disk was promised more than there is, and has all of it.
        less == left(more)
            || less.is_some_and(|(memory, gpu)| {
                member.memory_bytes.unwrap_or(0) <= memory
                    && member.gpu_memory_bytes.unwrap_or(0) <= gpu
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

fn layers(member: &RingMember) -> HashSet<i32> {
    let windows = member.windows.iter();
    windows
        .flat_map(|window| window.first..window.last)
        .collect()
}
