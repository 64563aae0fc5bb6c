//! What is said of machines that a ring does without.

use kube::ResourceExt;
use prima_crds::v1alpha1::model::NodeShare;

use super::{Answer, Apart, DecisionKind, MACHINES_APART};
use crate::model_controller::candidates::Candidates;
use crate::model_controller::dereference::World;

/// Why a working ring goes on without a machine.
pub const NOT_WORTH_IT: &str =
    "a ring with it would not be so much faster that it is worth an interruption";
pub const TOO_SOON: &str =
    "a ring with it would be faster; a working ring is replaced after ten minutes at the earliest";
pub const OTHERS_FIRST: &str =
    "a ring with it would be faster, but a Model of higher priority is planned first";
pub const NO_ROOM: &str = "a ring with it would be faster, but memory does not suffice for it beside the ring that runs; to end that one first, \
    set spec.suspend to true and back to false";

/// The same where no ring with it may be planned, as this says.
pub fn refused(kind: &DecisionKind) -> String {
    match kind.why_not() {
        Some((_, message)) => format!("a ring with it would be faster, but {message}"),
        None => NOT_WORTH_IT.to_owned(),
    }
}

/// Why nothing can be planned where no machine can take part.
pub fn no_machines(candidates: &Candidates) -> String {
    match candidates.out.as_slice() {
        [] => "no agent has been heard of; is the DaemonSet of agents running (kubectl get pods -A -l app.kubernetes.io/component=agent)?".to_owned(),
        out => {
            let out: Vec<_> = out.iter().map(|(name, why)| format!("{name}: {why}")).collect();
            format!("no machine can take part: {}", out.join("; "))
        }
    }
}

/// For people. Where a Wi-Fi keeps its clients apart, it may be very many.
fn some_of(names: &[&str]) -> Option<String> {
    const NAMED: usize = 4;
    match names {
        [] => None,
        names if names.len() <= NAMED => Some(names.join(", ")),
        names => Some(format!(
            "{}, and {} more",
            names[..NAMED].join(", "),
            names.len() - NAMED
        )),
    }
}

/// Machines that are neither in the running ring nor in the next, and why. `kept`: why the running ring goes on without those that the best ring
/// has. A ring that waits until two of its machines reach each other has all of them that are not lost.
pub fn out_of_ring(
    kind: &DecisionKind,
    kept: &str,
    world: &World,
    candidates: &Candidates,
    apart: &[Apart],
    answer: Option<&Answer>,
) -> Vec<NodeShare> {
    let current = world.current().map(|plan| &plan.spec.members[..]);
    let reason = kind.why_not().map(|(reason, _)| reason);
    let waits = reason == Some(MACHINES_APART);
    let (members, runs) = match kind {
        DecisionKind::Keep(plan) => (&plan.spec.members[..], true),
        DecisionKind::Ask(_) => (current.unwrap_or_default(), current.is_some()),
        DecisionKind::New { spec, .. } => (&spec.members[..], false),
        DecisionKind::NoPlace { .. } if waits => (current.unwrap_or_default(), false),
        DecisionKind::Released { .. }
        | DecisionKind::Impossible { .. }
        | DecisionKind::NoPlace { .. } => (&[][..], false),
    };
    let planned = answer.and_then(|answer| answer.plan.as_ref().ok());
    let idle = candidates.profiles.iter().map(|profile| {
        let name = profile.name_any();
        let left_out = planned
            .and_then(|plan| plan.report.left_out.iter().find(|out| out.name == name))
            .map(|out| out.why.clone());
        let mut why = left_out.unwrap_or_else(|| match runs {
            true => kept.to_owned(),
            false => "it could take part".to_owned(),
        });
        let pairs = apart.iter().map(|apart| &apart.pair);
        let pairs = pairs.filter(|pair| pair.contains(&name));
        let others = pairs.flatten().filter(|other| **other != name);
        let others: Vec<&str> = others.map(String::as_str).collect();
        if let Some(named) = some_of(&others) {
            why += &format!("; it and {named} do not reach each other");
        }
        (name, why)
    });
    candidates
        .out
        .iter()
        .cloned()
        .chain(idle)
        .filter(|(name, _)| {
            let is_lost = waits && candidates.why_out(name).is_some();
            is_lost || members.iter().all(|member| member.name != *name)
        })
        .map(|(name, why)| NodeShare {
            name,
            in_ring: false,
            why,
            fetched_bytes: None,
            total_bytes: None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prima_crds::v1alpha1::ring_plan::RingPlan;

    use super::*;
    use crate::model_controller::decide::{AwaitedRoom, DOES_NOT_FIT};
    use crate::model_controller::test_world::{machine, profile, ring, world};

    #[test]
    fn a_ring_that_waits_for_two_to_meet_has_its_members() {
        let mut plan = RingPlan::clone(&ring(&[(0, 8)], 0, 0));
        for name in ["laptop", "pi4"] {
            let mut member = plan.spec.members[0].clone();
            member.name = name.to_owned();
            plan.spec.members.push(member);
        }
        let there = world(&[], &[Arc::new(plan)]);
        // One is lost, and one was never in it.
        let mut idle = machine("laptop");
        profile(&mut idle).metadata.name = Some("nas".to_owned());
        let mut profiles = ["desk", "laptop"].map(machine);
        let members = profiles.iter_mut().map(|machine| profile(machine).clone());
        let candidates = Candidates {
            profiles: members.chain([profile(&mut idle).clone()]).collect(),
            out: vec![("pi4".to_owned(), "its agent does not run".to_owned())],
            ..Candidates::default()
        };
        let out = |reason| {
            let kind = DecisionKind::NoPlace {
                reason,
                message: String::new(),
                awaits: AwaitedRoom::Any,
            };
            let out = out_of_ring(&kind, NOT_WORTH_IT, &there, &candidates, &[], None);
            out.into_iter().map(|out| out.name).collect::<Vec<_>>()
        };
        assert_eq!(out(MACHINES_APART), ["pi4", "nas"]);
        assert_eq!(out(DOES_NOT_FIT), ["pi4", "desk", "laptop", "nas"]);
    }

    #[test]
    fn not_all_of_very_many_are_named() {
        let names = ["desk", "pi4", "laptop", "nas", "tv", "phone"];
        assert_eq!(some_of(&[]), None);
        assert_eq!(some_of(&names[..2]).unwrap(), "desk, pi4");
        assert_eq!(some_of(&names[..4]).unwrap(), "desk, pi4, laptop, nas");
        let all = "desk, pi4, laptop, nas, and 2 more";
        assert_eq!(some_of(&names).unwrap(), all);
    }
}
