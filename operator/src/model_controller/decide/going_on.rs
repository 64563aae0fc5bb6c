//! Whether the ring that runs can go on, and is what the Model asks for.

use prima_crds::v1alpha1::model::{Model, ResolvedModel};
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::{
    CHUNK_POSITIONS, RingPlan, RingPlanSpec, USUAL_WINDOWED_SEQUENCES,
};

use super::apart::Apart;
use super::{keys, memory};
use crate::model_controller::candidates::Candidates;

/// Why a ring cannot go on, for people.
#[derive(Debug, PartialEq)]
pub enum Broken {
    /// Agents have new addresses or keys, and could do what they did.
    Moved(String),
    /// Agents were asked to end, and run their members until another ring serves, or for a while.
    Leaving(String),
    /// A machine lacks a GPU that it had.
    WithoutGpu {
        machine: String,
        /// What became of the GPU.
        lacks: String,
    },
    Changed(String),
}

impl Broken {
    pub fn why(&self) -> String {
        match self {
            Self::Moved(why) | Self::Leaving(why) | Self::Changed(why) => why.clone(),
            Self::WithoutGpu { machine, lacks } => {
                format!("the GPU of {machine} cannot be used any more: {lacks}")
            }
        }
    }
}

/// Characters of what became of a GPU: where it is said, others have to be said, too.
const SAID_OF_GPU: usize = 700;

/// `skeleton`: what the Model says of its plan now. `apart`: machines that do not reach each other.
pub fn going_on(
    plan: &RingPlan,
    model: &Model,
    resolved: &ResolvedModel,
    skeleton: &RingPlanSpec,
    candidates: &Candidates,
    apart: &[Apart],
) -> Result<(), Broken> {
    let asked = RingPlanSpec {
        generation: plan.spec.generation,
        // The planner's, as members are. A plan of an earlier version has fewer, and goes on.
        windowed_sequences: plan.spec.windowed_sequences,
        chunk_positions: plan.spec.chunk_positions,
        rounds: plan.spec.rounds,
        members: plan.spec.members.clone(),
        predicted: plan.spec.predicted,
        http_port: plan.spec.http_port,
        ..skeleton.clone()
    };
    if asked != plan.spec {
        return Err(Broken::Changed("the Model was changed".to_owned()));
    }
    let rank0 = plan.spec.members.first().map(|member| &member.name);
    if let Some(wanted) = &model.spec.rank0
        && Some(wanted) != rank0
    {
        return Err(Broken::Changed(format!("spec.rank0 is {wanted} now")));
    }
    if let Some(least) = model.spec.min_nodes
        && (plan.spec.members.len() as i32) < least
    {
        return Err(Broken::Changed(format!("spec.minNodes is {least} now")));
    }
    let mut moved = Vec::new();
    let mut leaving = None;
    for member in &plan.spec.members {
        let name = &member.name;
        let Some(address) = candidates.address(name) else {
            let why = candidates.why_out(name).unwrap_or("it has no NodeProfile");
            let why = format!("{name} is out: {why}");
            match candidates.is_leaving(name) {
                true => leaving = Some(why),
                false => return Err(Broken::Changed(why)),
            }
            continue;
        };
        if member.host() != Some(address) {
            moved.push(name.as_str());
        }
        let profile = candidates.profile(name);
        let lacks =
            profile.and_then(|profile| memory::lacks_gpu(profile, member, &resolved.profile));
        if let Some(lacks) = lacks {
            return Err(Broken::WithoutGpu {
                machine: name.clone(),
                lacks: lacks.chars().take(SAID_OF_GPU).collect(),
            });
        }
    }
    let mut apart = apart.iter().filter(|apart| apart.planned);
    if let Some(apart) = apart.find(|apart| apart.are_neighbours(&plan.spec.members)) {
        let pair = apart.pair.join(" and ");
        return Err(Broken::Changed(format!(
            "{pair} do not reach each other ({})",
            apart.why
        )));
    }
    // What has moved is planned again then, too; but what would have to be fetched elsewhere waits for the next agent.
    let fetched = resolved.source.local_path().is_none();
    if let Some(why) = leaving
        && (fetched || moved.is_empty())
    {
        return Err(Broken::Leaving(why));
    }
    let why = match moved.as_slice() {
        [] => match keys_changed(plan, candidates) {
            Some(why) => why,
            None => return Ok(()),
        },
        [one] => format!("{one} has another address now"),
        several => format!("{} have other addresses now", several.join(", ")),
    };
    // While its agent restarted, a machine may have lost memory to other programs; or the next agent is of an earlier version.
    let could_do = plan.spec.members.iter().all(|member| {
        let profile = candidates.profile(&member.name);
        profile.is_some_and(|profile| {
            reads(profile, &plan.spec)
                && (!member.draft_on_gpu || runs_drafts(profile))
                && memory::could_do(profile, member, &resolved.profile)
        })
    });
    Err(match could_do {
        true => Broken::Moved(why),
        false => Broken::Changed(why),
    })
}

/// Whether a machine's agent reads all that the plan says, of whichever member: it refuses the whole plan otherwise.
fn reads(profile: &NodeProfile, plan: &RingPlanSpec) -> bool {
    let Some(status) = &profile.status else {
        return false;
    };
    let usual = plan.windowed_sequences == USUAL_WINDOWED_SEQUENCES;
    let usual_chunks = plan.chunk_positions == CHUNK_POSITIONS as i32;
    let mut members = plan.members.iter();
    let says_of_gpus = members.any(|member| !member.gpus.is_empty() || member.draft_on_gpu);
    (usual || status.reads_windowed_sequences)
        && (usual_chunks || status.reads_chunk_positions)
        && (!says_of_gpus || status.reads_gpus)
}

/// Whether the machine has a GPU on which its agent runs draft models.
fn runs_drafts(profile: &NodeProfile) -> bool {
    let gpus = profile.status.iter().flat_map(|status| &status.gpus);
    let mut measured = gpus.filter_map(|gpu| gpu.measured.as_ref());
    measured.any(|gpu| gpu.runs_drafts)
}

/// How the keys that the members should have differ from the plan's.
fn keys_changed(plan: &RingPlan, candidates: &Candidates) -> Option<String> {
    let members = &plan.spec.members;
    let keys = keys::of_members(members, candidates);
    let pairs = members.iter().zip(&keys);
    let changed: Vec<&str> = pairs
        .filter(|(member, key)| member.public_key_sha256 != **key)
        .map(|(member, _)| member.name.as_str())
        .collect();
    match (plan.spec.is_encrypted(), keys.iter().all(Option::is_some)) {
        _ if changed.is_empty() => None,
        (true, true) => Some(format!("the key of {} changed", changed.join(", "))),
        (false, _) => Some("all of its members have keys now".to_owned()),
        (true, false) => Some("an agent of an earlier version has no key".to_owned()),
    }
}
