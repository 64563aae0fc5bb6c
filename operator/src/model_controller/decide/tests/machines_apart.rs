//! Two machines that are there and do not reach each other: the next ring goes round them, or it is said that there is none.

use prima_crds::v1alpha1::ring_plan::MemberState;
use serde_json::json;

use super::*;
use crate::cluster::world::{AgentState, Machine};
use crate::model_controller::test_world::{known_for, machine, profile, world};

const NAMES: [&str; 3] = ["desk", "laptop", "pi4"];

/// All of them, whose agents have renewed their Leases then.
fn heard(at: Instant) -> Vec<Machine> {
    let heard = |name| Machine {
        heard: Some(at),
        ..machine(name)
    };
    NAMES.map(heard).to_vec()
}

/// The plan, all of whose members have loaded. Rank 0 is `state`, and says of this one that the other does not reach it.
fn saying(plan: &RingPlan, state: MemberState, missed: Option<(&str, &str)>) -> Arc<RingPlan> {
    let mut plan = plan.clone();
    let members = plan.spec.members.iter().enumerate();
    let members = members.map(|(rank, member)| {
        let mut status = json!({"name": member.name, "state": MemberState::Loaded});
        if rank == 0 {
            status["state"] = json!(state);
            status["message"] = json!("it waits");
            status["failsAt"] = json!(missed.map(|(at, _)| at));
            status["missedBy"] = json!(missed.map(|(_, by)| by));
        }
        status
    });
    let status = json!({"members": members.collect::<Vec<_>>()});
    plan.status = Some(serde_json::from_value(status).unwrap());
    Arc::new(plan)
}

fn loaded(plan: &RingPlan, missed: (&str, &str)) -> Arc<RingPlan> {
    saying(plan, MemberState::Loaded, Some(missed))
}

/// A plan for a ring of these, in this order.
fn ring_of(names: &[&str]) -> RingPlan {
    let mut plan = RingPlan::clone(&crate::model_controller::test_world::ring(
        &[(0, 8)],
        GIB,
        0,
    ));
    let one = plan.spec.members[0].clone();
    let members = names.iter().map(|name| RingMember {
        name: (*name).to_owned(),
        ..one.clone()
    });
    plan.spec.members = members.collect();
    plan
}

/// What is known after a ring has failed for longer than it takes to count; and who is refused.
fn after_26_seconds(
    fails: &Arc<RingPlan>,
    machines: &[Machine],
    start: Instant,
) -> (Refusals, Vec<String>) {
    let mut refusals = Refusals::default();
    refusals.note(Some(fails), machines, start);
    let refused = refusals.note(Some(fails), machines, start + Duration::from_secs(26));
    (refusals, refused.into_keys().collect())
}

fn pair(one: &str, other: &str) -> [String; 2] {
    [one, other].map(str::to_owned)
}

#[test]
fn who_is_heard_of_and_missed_by_one_neighbour_is_apart() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let fails = loaded(&ring_of(&NAMES), ("pi4", "laptop"));
    let mut refusals = Refusals::default();
    let machines = heard(at(20));
    let mut noted = |seconds| {
        let refused = refusals.note(Some(&fails), &machines, at(seconds));
        assert!(refused.is_empty(), "{refused:?}");
        refusals.apart(at(seconds))
    };
    for seconds in [0, 25] {
        assert_eq!(noted(seconds), []);
    }
    let apart = Apart {
        pair: pair("laptop", "pi4"),
        why: "desk says: it waits".to_owned(),
        planned: true,
        told_by_ring: true,
    };
    assert_eq!(noted(26), [apart]);
    // One that is cut off from all was not heard of since.
    for silent in ["laptop", "pi4"] {
        let mut machines = heard(at(20));
        let mut silents = machines.iter_mut().filter(|machine| machine.name == silent);
        silents.next().unwrap().heard = Some(start);
        let (refusals, refused) = after_26_seconds(&fails, &machines, start);
        assert_eq!(refused, ["pi4"], "{silent}");
        assert_eq!(refusals.apart(at(26)), []);
    }
}

#[test]
fn only_neighbours_can_be_apart() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let ring = ring_of(&["desk", "laptop", "nas", "pi4"]);
    for by in ["laptop", "pi4"] {
        let fails = loaded(&ring, ("pi4", by));
        let (refusals, refused) = after_26_seconds(&fails, &heard(at(20)), start);
        assert_eq!(refused, ["pi4"], "{by}");
        assert_eq!(refusals.apart(at(26)), []);
    }
}

#[test]
fn what_others_would_fetch_is_planned_later_and_said_as_soon() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut fetched = ring_of(&NAMES);
    let source = json!({"huggingFace": {"repo": "o/r", "file": "m.gguf"}});
    fetched.spec.model.source = serde_json::from_value(source).unwrap();
    let fails = loaded(&fetched, ("laptop", "desk"));
    let mut refusals = Refusals::default();
    let planned = [0, 26, 120, 121].map(|seconds| {
        refusals.note(Some(&fails), &heard(at(20)), at(seconds));
        let apart = refusals.apart(at(seconds));
        apart.first().map(|apart| apart.planned)
    });
    assert_eq!(planned, [None, Some(false), Some(false), Some(true)]);
}

#[test]
fn a_pair_is_forgotten_when_it_meets_moves_or_after_a_while() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let ring = ring_of(&NAMES);
    let fails = loaded(&ring, ("pi4", "laptop"));
    let known = || after_26_seconds(&fails, &heard(at(20)), start).0;
    let counts = |refusals: &Refusals, seconds| !refusals.apart(at(seconds)).is_empty();
    // A token goes round a ring of both.
    for (names, meet) in [(["laptop", "pi4"], true), (["desk", "pi4"], false)] {
        let mut refusals = known();
        let whole = saying(&ring_of(&names), MemberState::Ready, None);
        refusals.note(Some(&whole), &heard(at(40)), at(41));
        assert_eq!(counts(&refusals, 41), !meet);
    }
    // Its machine is off, or another agent came.
    let mut off = heard(at(20));
    off[2].agent = AgentState::Silent;
    let mut moved = heard(at(20));
    let status = profile(&mut moved[1]).status.as_mut().unwrap();
    status.agent.as_mut().unwrap().address = "10.0.0.9".to_owned();
    for machines in [off, moved] {
        let mut refusals = known();
        refusals.note(None, &machines, at(41));
        assert!(!counts(&refusals, 41));
    }
    // Ten minutes, and twice as long if it fails when it is tried again.
    let mut refusals = known();
    assert!(counts(&refusals, 625) && !counts(&refusals, 626));
    for seconds in [700, 730, 731] {
        refusals.note(Some(&fails), &heard(at(720)), at(seconds));
    }
    assert!(counts(&refusals, 1930) && !counts(&refusals, 1931));
    // For a day without it, it is as new.
    refusals.note(None, &heard(at(720)), at(731 + 1200 + 86_400));
    for seconds in [90_000, 90_026] {
        refusals.note(Some(&fails), &heard(at(90_020)), at(seconds));
    }
    assert!(counts(&refusals, 90_625) && !counts(&refusals, 90_626));
}

/// Asks for so many machines at least.
fn wants(least: i32, machines: Vec<Machine>, plans: &[Arc<RingPlan>]) -> World {
    let mut there = world(&machines, plans);
    Arc::get_mut(&mut there.model).unwrap().spec.min_nodes = Some(least);
    there
}

#[test]
fn a_ring_goes_round_machines_that_do_not_meet() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut state = State::default();
    let plan = written(decided_with(
        &wants(2, heard(start), &[]),
        &mut state,
        start,
    ));
    let names = plan.spec.members.iter().map(|member| member.name.clone());
    let names: Vec<String> = names.collect();
    let [_, one, other] = names.as_slice() else {
        panic!("{names:?}");
    };
    let fails = [loaded(&plan, (other.as_str(), one.as_str()))];
    let decision = decided_with(&wants(2, heard(start), &fails), &mut state, start);
    assert!(matches!(decision.kind, DecisionKind::Keep(_)) && decision.awaits());
    let there = wants(2, heard(at(20)), &fails);
    let decision = decided_with(&there, &mut state, at(26));
    let DecisionKind::New { spec, why, .. } = &decision.kind else {
        panic!("it stays as it is");
    };
    assert!(why.contains("do not reach each other (") && why.contains("it waits"));
    let next: Vec<&str> = spec.members.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(next.len(), 2);
    // In a ring of three, everybody is everybody's neighbour.
    let apart = [one, other];
    assert!(apart.iter().any(|name| !next.contains(&name.as_str())));
    // What is said of the one that is out.
    let [out] = decision.out.as_slice() else {
        panic!("{:?}", decision.out);
    };
    let stays = apart.iter().find(|name| ***name != out.name).unwrap();
    let said = format!("; it and {stays} do not reach each other");
    assert!(out.why.ends_with(&said), "{}", out.why);
    assert_eq!(decision.apart.len(), 1);
    // The next ring is no reason to forget it.
    let next = saying(
        &RingPlan::new("m-2", (**spec).clone()),
        MemberState::Ready,
        None,
    );
    let next = [next];
    let decision = decided_with(&wants(2, heard(at(40)), &next), &mut state, at(41));
    assert!(matches!(decision.kind, DecisionKind::Keep(_)));
    assert!(decision.apart.len() == 1 && decision.apart[0].planned);
    // Its owner has taken one of them out.
    let mut machines = heard(at(40));
    let mut taken_out = machines.iter_mut().filter(|one| one.name == out.name);
    profile(taken_out.next().unwrap()).spec.exclude = true;
    let decision = decided_with(&wants(2, machines, &next), &mut state, at(42));
    assert!(matches!(decision.kind, DecisionKind::Keep(_)));
    assert_eq!(decision.apart, []);
}

#[test]
fn where_no_ring_goes_round_them_they_are_waited_for() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut state = State::default();
    let plan = written(decided_with(
        &wants(3, heard(start), &[]),
        &mut state,
        start,
    ));
    let [_, one, other] = plan.spec.members.as_slice() else {
        panic!("a ring of three");
    };
    let fails = [loaded(&plan, (other.name.as_str(), one.name.as_str()))];
    decided_with(&wants(3, heard(start), &fails), &mut state, start);
    let there = wants(3, heard(at(20)), &fails);
    let decision = decided_with(&there, &mut state, at(26));
    let (reason, message) = impossible(&decision);
    assert_eq!(reason, MACHINES_APART);
    for name in [&one.name, &other.name] {
        assert!(message.contains(name), "{message}");
    }
    // Nor is it said that another is planned.
    assert!(decision.apart.len() == 1 && !decision.apart[0].planned);
    // Its machines are in it.
    assert!(decision.out.is_empty(), "{:?}", decision.out);
    // It is as it was, and goes on when they reach each other again.
    let whole = [saying(&plan, MemberState::Ready, None)];
    let decision = decided_with(&wants(3, heard(at(30)), &whole), &mut state, at(31));
    assert!(matches!(decision.kind, DecisionKind::Keep(_)));
    assert_eq!(decision.apart, []);
}

/// Of three, all of which are needed, the last two do not reach each other: what is remembered then, and the ring.
fn known_to_be_apart(start: Instant) -> (State, RingPlan, Arc<RingPlan>) {
    let later = start + Duration::from_secs(26);
    let mut state = State::default();
    let plan = written(decided_with(
        &wants(3, heard(start), &[]),
        &mut state,
        start,
    ));
    let [_, one, other] = plan.spec.members.as_slice() else {
        panic!("a ring of three");
    };
    let fails = loaded(&plan, (other.name.as_str(), one.name.as_str()));
    let plans = [fails.clone()];
    decided_with(&wants(3, heard(start), &plans), &mut state, start);
    let decision = decided_with(&wants(3, heard(later), &plans), &mut state, later);
    assert_eq!(impossible(&decision).0, MACHINES_APART);
    (state, RingPlan::clone(&plan), fails)
}

#[test]
fn who_is_apart_is_tried_again_if_no_ring_would_show_it() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let (known, plan, fails) = known_to_be_apart(start);
    let names = |members: &[RingMember]| -> Vec<String> {
        members.iter().map(|member| member.name.clone()).collect()
    };
    // The ring has ended, as that of a Model that was suspended.
    let mut state = known.clone();
    let decision = decided_with(&wants(3, heard(at(30)), &[]), &mut state, at(31));
    assert_eq!(decision.apart, []);
    let again = written(decision);
    assert_eq!(names(&again.spec.members), names(&plan.spec.members));
    // Which then waits for them as the one before.
    let fails_again = [fails.clone()];
    decided_with(&wants(3, heard(at(40)), &fails_again), &mut state, at(40));
    let there = wants(3, heard(at(60)), &fails_again);
    let decision = decided_with(&there, &mut state, at(66));
    assert_eq!(impossible(&decision).0, MACHINES_APART);

    // The agent of the third machine has another address: the ring would never go on.
    let rank0 = &plan.spec.members[0].name;
    let mut machines = heard(at(30));
    let mut third = machines.iter_mut().filter(|one| one.name == *rank0);
    let status = profile(third.next().unwrap()).status.as_mut().unwrap();
    status.agent.as_mut().unwrap().address = "10.0.0.9".to_owned();
    let there = wants(3, machines, std::slice::from_ref(&fails));
    let decision = decided_with(&there, &mut known.clone(), at(31));
    let moved = written(decision);
    assert!(moved.spec.members[0].address.starts_with("10.0.0.9:"));

    // It is off, and two will do: those that are left did not reach each other before.
    let mut machines = heard(at(30));
    let mut third = machines.iter_mut().filter(|one| one.name == *rank0);
    third.next().unwrap().agent = AgentState::Silent;
    let there = wants(2, machines, std::slice::from_ref(&fails));
    let left = written(decided_with(&there, &mut known.clone(), at(31)));
    let left = names(&left.spec.members);
    assert!(left.len() == 2 && !left.contains(rank0), "{left:?}");

    // A member's process starts again: the same ring may come to be whole.
    let mut starts = RingPlan::clone(&fails);
    let members = &mut starts.status.as_mut().unwrap().members;
    members[1].state = MemberState::Loading;
    let there = wants(3, heard(at(30)), &[Arc::new(starts)]);
    let decision = decided_with(&there, &mut known.clone(), at(31));
    assert!(matches!(decision.kind, DecisionKind::Keep(_)));
    assert_eq!(decision.apart, []);
}

#[test]
fn who_never_met_is_kept_apart_and_named() {
    let mut machines = NAMES.map(machine).to_vec();
    for (place, other) in [(1, "pi4"), (2, "laptop")] {
        let status = profile(&mut machines[place]).status.as_mut().unwrap();
        status.links.retain(|link| link.to != other);
    }
    let first = decided(&wants(2, machines.clone(), &[]));
    let [apart] = first.apart.as_slice() else {
        panic!("{:?}", first.apart);
    };
    assert!(!apart.told_by_ring);
    let told = apart.told();
    let said = "laptop and pi4 do not reach each other, though both are heard of (the link between them could not be measured, at port 9190): look at ";
    assert!(told.starts_with(said), "{told}");
    assert!(
        told.ends_with("; rings are planned in which they are no neighbours"),
        "{told}"
    );
    let plan = written(first);
    let [one, other] = plan.spec.members.as_slice() else {
        panic!("a ring of two");
    };
    let names = [one.name.as_str(), other.name.as_str()];
    assert!(names.contains(&"desk"), "{names:?}");
    // Which goes on, without the third.
    let goes_on = decided(&wants(2, machines.clone(), std::slice::from_ref(&plan)));
    assert!(matches!(goes_on.kind, DecisionKind::Keep(_)));
    assert_eq!(goes_on.apart.len(), 1);
    let [out] = goes_on.out.as_slice() else {
        panic!("{:?}", goes_on.out);
    };
    let stays = names.iter().find(|name| **name != "desk").unwrap();
    let said = format!("; it and {stays} do not reach each other");
    assert!(
        !names.contains(&out.name.as_str()) && out.why.ends_with(&said),
        "{}",
        out.why
    );
    // Neighbours in a ring have met, though it is not known any more how fast their link is.
    let ring = Arc::new(ring_of(&NAMES));
    let runs = decided(&wants(3, machines.clone(), std::slice::from_ref(&ring)));
    assert!(matches!(runs.kind, DecisionKind::Keep(_)));
    assert_eq!(runs.apart, []);

    // Nothing is said while their agents may only have been busy with others; but plans go round them.
    let mut early = machines.clone();
    early[1].agent = known_for(900);
    let early = decided(&wants(2, early, &[]));
    assert_eq!(early.apart, []);
    let mut out = early.out.iter();
    assert!(out.all(|out| !out.why.contains("do not reach each other")));
    let early = written(early);
    let has = |name: &str| early.spec.members.iter().any(|one| one.name == name);
    assert!(has("desk") && !(has("laptop") && has("pi4")));

    let none = decided(&wants(3, machines, &[]));
    let (reason, message) = impossible(&none);
    assert_eq!(reason, MACHINES_APART);
    assert!(message.contains("laptop and pi4"), "{message}");
    assert!(none.apart.len() == 1 && !none.apart[0].planned);
}
