//! By which keys the members of a ring know each other.

use prima_crds::v1alpha1::ring_plan::{RingMember, RingPlan};

use crate::cluster::world::Machine;
use crate::model_controller::candidates::Candidates;

/// The keys of all members, in their order; none at all if the agent of one is of an earlier version, which has no key. So a ring is
/// encrypted whenever all of its members can, and works during an upgrade.
pub fn of_members(members: &[RingMember], candidates: &Candidates) -> Vec<Option<String>> {
    // A member that is alone talks to nobody.
    if members.len() < 2 {
        return vec![None; members.len()];
    }
    let keys = members.iter();
    let keys = keys.map(|member| candidates.public_key(&member.name).cloned());
    let all: Option<Vec<String>> = keys.collect();
    match all {
        Some(keys) => keys.into_iter().map(Some).collect(),
        None => vec![None; members.len()],
    }
}

/// For a Model's status: why the plan's members talk without TLS, where they do.
pub fn in_the_clear(plan: &RingPlan, machines: &[Machine]) -> String {
    if plan.spec.is_encrypted() || plan.spec.members.len() < 2 {
        return String::new();
    }
    let has_key = |name: &str| {
        let machine = machines.iter().find(|machine| machine.name == name);
        machine.is_some_and(|machine| machine.public_key().is_some())
    };
    let members = plan.spec.members.iter().map(|member| member.name.as_str());
    let lacking: Vec<&str> = members.filter(|name| !has_key(name)).collect();
    match lacking.as_slice() {
        // There will be another plan.
        [] => String::new(),
        lacking => format!(
            "; its members talk without encryption, since the agents on {} are of a version without it: update them",
            lacking.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::tests::{decided, written};
    use super::super::{DecisionKind, State, decide};
    use super::in_the_clear;
    use crate::cluster::world::Machine;
    use crate::model_controller::test_world::{machine, profile, ring, world};

    /// A machine whose agent has this key.
    fn keyed(name: &str, key: Option<&str>) -> Machine {
        let mut machine = machine(name);
        let status = profile(&mut machine).status.as_mut().unwrap();
        let agent = status.agent.as_mut().unwrap();
        agent.public_key_sha256 = key.map(|key| key.repeat(64));
        machine
    }

    fn desk_and_pi(keys: [Option<&str>; 2]) -> [Machine; 2] {
        let [desk, pi] = keys;
        [keyed("desk", desk), keyed("pi4", pi)]
    }

    /// A running ring of both, planned when they had these keys; then what is decided when they have `now`.
    fn decided_after(
        then: [Option<&str>; 2],
        now: [Option<&str>; 2],
    ) -> Option<(String, Vec<Option<String>>)> {
        let mut plan = written(decided(&world(&desk_and_pi(then), &[])));
        let spec = &mut std::sync::Arc::make_mut(&mut plan).spec;
        let halves = [(0, 4), (4, 8)];
        let members = halves.iter().zip(["desk", "pi4"]).zip(then);
        spec.rounds = 1;
        spec.members = members
            .map(|((window, name), key)| {
                let mut member = ring(&[*window], 1, 0).spec.members[0].clone();
                member.name = name.to_owned();
                member.public_key_sha256 = key
                    .filter(|_| then.iter().all(Option::is_some))
                    .map(|key| key.repeat(64));
                member
            })
            .collect();
        spec.validate().unwrap();
        let there = world(&desk_and_pi(now), std::slice::from_ref(&plan));
        // The planner is not asked: every machine keeps its layers.
        let (decision, _) = decide(&there, &State::default(), Instant::now());
        match decision.kind {
            DecisionKind::New { spec, why, .. } => {
                spec.validate().unwrap();
                for (new, old) in spec.members.iter().zip(&plan.spec.members) {
                    assert_eq!(new.windows, old.windows);
                }
                let keys = spec
                    .members
                    .into_iter()
                    .map(|member| member.public_key_sha256);
                Some((why, keys.collect()))
            }
            _ => None,
        }
    }

    #[test]
    fn a_ring_is_encrypted_when_all_its_members_can_be() {
        let all = |text: &str| -> Vec<_> {
            let keys = text.chars();
            keys.map(|key| Some(key.to_string().repeat(64))).collect()
        };
        let (a, b, c) = (Some("a"), Some("b"), Some("c"));
        for (then, now, why, keys) in [
            (
                [None, b],
                [a, b],
                "all of its members have keys now",
                all("ab"),
            ),
            ([a, b], [a, c], "the key of pi4 changed", all("ac")),
            (
                [a, b],
                [a, None],
                "an agent of an earlier version has no key",
                vec![None; 2],
            ),
        ] {
            assert_eq!(decided_after(then, now), Some((why.to_owned(), keys)));
        }
    }

    #[test]
    fn a_member_that_is_alone_has_no_key_that_could_change() {
        let alone = written(decided(&world(&[keyed("desk", Some("a"))], &[])));
        assert_eq!(alone.spec.members[0].public_key_sha256, None);
        let there = world(&[keyed("desk", Some("c"))], std::slice::from_ref(&alone));
        assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    }

    #[test]
    fn who_keeps_a_ring_from_being_encrypted_is_said() {
        let machines = desk_and_pi([None, Some("b")]);
        let mut plan = (*ring(&[(0, 4)], 1, 0)).clone();
        assert_eq!(in_the_clear(&plan, &machines), "", "it is alone");
        let mut pi = plan.spec.members[0].clone();
        pi.name = "pi4".to_owned();
        plan.spec.members.push(pi);
        let said = in_the_clear(&plan, &machines);
        assert!(said.contains("the agents on desk are"), "{said}");
        plan.spec.members[0].public_key_sha256 = Some("a".repeat(64));
        assert_eq!(in_the_clear(&plan, &machines), "");
    }

    #[test]
    fn a_ring_whose_keys_are_as_planned_goes_on() {
        let (a, b, c) = (Some("a"), Some("b"), Some("c"));
        assert_eq!(super::of_members(&[], &Default::default()), []);
        for (then, now) in [
            ([a, b], [a, b]),
            ([None, b], [None, b]),
            ([None, b], [None, c]),
        ] {
            let decided = decided_after(then, now);
            assert!(decided.is_none(), "{decided:?}");
        }
    }
}
