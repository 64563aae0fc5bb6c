//! Whether the ring that runs can go on, and is what the Model asks for.

use prima_crds::v1alpha1::model::{Model, ResolvedModel};
use prima_crds::v1alpha1::ring_plan::{RingPlan, RingPlanSpec};

use super::{keys, memory};
use crate::model_controller::candidates::Candidates;

/// Why a ring cannot go on, for people.
#[derive(Debug, PartialEq)]
pub enum Broken {
    /// Agents have new addresses or keys, and could do what they did.
    Moved(String),
    /// Agents were asked to end, and run their members until another ring serves, or for a while.
    Leaving(String),
    Changed(String),
}

impl Broken {
    pub fn why(&self) -> &str {
        match self {
            Self::Moved(why) | Self::Leaving(why) | Self::Changed(why) => why,
        }
    }
}

/// `skeleton`: what the Model says of its plan now.
pub fn going_on(
    plan: &RingPlan,
    model: &Model,
    resolved: &ResolvedModel,
    skeleton: &RingPlanSpec,
    candidates: &Candidates,
) -> Result<(), Broken> {
    let asked = RingPlanSpec {
        generation: plan.spec.generation,
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
    }
    // What has moved is planned anew then, too; but what would have to be fetched elsewhere waits for the next agent.
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
    // While its agent restarted, a machine may have lost a GPU, or memory to other programs.
    let could_do = plan.spec.members.iter().all(|member| {
        let profile = candidates.profile(&member.name);
        profile.is_some_and(|profile| memory::could_do(profile, member, &resolved.profile))
    });
    Err(match could_do {
        true => Broken::Moved(why),
        false => Broken::Changed(why),
    })
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
