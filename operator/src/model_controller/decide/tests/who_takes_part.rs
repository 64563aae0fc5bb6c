//! Which machines a ring may have, and what is said of those that are out.

use super::*;
use crate::model_controller::test_world::{machine, profile, unmeasured, world};

#[test]
fn a_first_plan_waits_for_who_is_measured_and_not_for_ever() {
    let desk = machine("desk");
    let there = world(&[desk.clone(), unmeasured("pi4", 179)], &[]);
    let decision = decided(&there);
    let DecisionKind::Impossible { reason, message } = &decision.kind else {
        panic!("it does not wait");
    };
    assert_eq!(*reason, "AwaitingMachines");
    assert_eq!(message, "waiting for pi4: its agent measures it");
    assert!(decision.awaits());

    let there = world(&[desk, unmeasured("pi4", 180)], &[]);
    let decision = decided(&there);
    let DecisionKind::New { spec, .. } = &decision.kind else {
        panic!("it waits for ever");
    };
    assert_eq!(spec.members.len(), 1);
    assert_eq!(spec.members[0].address, "10.0.0.1:9200");
    assert!(!decision.awaits());
    let out: Vec<_> = decision
        .out
        .iter()
        .map(|out| (&out.name[..], &out.why[..]))
        .collect();
    assert_eq!(out, [("pi4", "its agent measures it")]);
}

#[test]
fn a_machine_that_its_owner_excludes_is_out() {
    let mut desk = machine("desk");
    profile(&mut desk).spec.exclude = true;
    let decision = decided(&world(&[desk], &[]));
    let DecisionKind::Impossible { reason, message } = &decision.kind else {
        panic!("it is used");
    };
    assert_eq!(*reason, "NoMachines");
    assert!(message.contains("desk: its owner excludes it"), "{message}");
}

#[test]
fn a_machine_of_another_version_is_out_and_the_others_are_not() {
    let mut newer = machine("pi4");
    profile(&mut newer).status = None;
    newer.unreadable = Some("unknown variant `Plan9`".to_owned());
    let decision = decided(&world(&[machine("desk"), newer], &[]));
    let DecisionKind::New { spec, .. } = &decision.kind else {
        panic!("there is no plan");
    };
    assert_eq!(spec.members[0].name, "desk");
    let why = &decision.out[0].why;
    assert!(why.contains("version") && why.contains("Plan9"), "{why}");
    assert!(!decision.awaits(), "it does not change by itself");
}

#[test]
fn rank_0_must_be_there() {
    let mut there = world(&[machine("desk")], &[]);
    Arc::get_mut(&mut there.model).unwrap().spec.rank0 = Some("nas".to_owned());
    let decision = decided(&there);
    let (reason, message) = impossible(&decision);
    assert_eq!(reason, "DoesNotFit");
    assert_eq!(
        message,
        "spec.rank0 is nas, but there is no NodeProfile of that name"
    );
}

#[test]
fn a_machine_that_the_planner_leaves_out_says_why() {
    let mut pi4 = machine("pi4");
    for link in &mut profile(&mut pi4).status.as_mut().unwrap().links {
        link.latency_nanoseconds = 1_000_000_000;
    }
    let there = world(&[machine("desk"), pi4], &[]);
    let mut state = State::default();
    let decision = decided_with(&there, &mut state, Instant::now());
    let plan = state.answers.pop().unwrap().plan.unwrap();
    let [left_out] = plan.report.left_out.as_slice() else {
        panic!("both are needed");
    };
    let [out] = decision.out.as_slice() else {
        panic!("nobody is out");
    };
    assert_eq!((&out.name, &out.why), (&left_out.name, &left_out.why));
}

#[test]
fn a_ring_has_as_many_machines_as_the_model_asks_for() {
    // Hops that cost more than what they save.
    let machines = ["desk", "pi4", "laptop"].map(|name| {
        let mut machine = machine(name);
        let status = profile(&mut machine).status.as_mut().unwrap();
        for link in &mut status.links {
            link.latency_nanoseconds = 500_000_000;
        }
        machine
    });
    let asks_for = |least: i32, plans: &[Arc<RingPlan>]| {
        let mut there = world(&machines, plans);
        Arc::get_mut(&mut there.model).unwrap().spec.min_nodes = Some(least);
        decided(&there)
    };
    let members = |decision: &Decision| match &decision.kind {
        DecisionKind::New { spec, .. } => spec.members.len(),
        _ => 0,
    };
    let alone = decided(&world(&machines, &[]));
    assert_eq!(members(&alone), 1, "one is enough for it");
    assert_eq!(members(&asks_for(2, &[])), 2);
    assert_eq!(members(&asks_for(3, &[])), 3);
    let too_many = asks_for(4, &[]);
    let (reason, message) = impossible(&too_many);
    assert_eq!(reason, "DoesNotFit");
    assert!(message.contains("at least 4 machines"), "{message}");

    // A ring that was planned before is replaced.
    let plan = [written(alone)];
    assert_eq!(members(&asks_for(2, &plan)), 2);
    assert!(matches!(asks_for(1, &plan).kind, DecisionKind::Keep(_)));
}
