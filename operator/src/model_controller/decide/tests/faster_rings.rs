//! When a ring that works gives way to one that is faster.

use prima_crds::v1alpha1::model::ModelStatus;
use serde_json::json;

use super::*;
use crate::cluster::world::Machine;
use crate::model_controller::decide::ports::{SLOTS, http};
use crate::model_controller::dereference::OtherModel;
use crate::model_controller::test_world::{GIB, machine, model, profile, ring, world};

#[test]
fn a_ring_gives_way_to_one_a_fifth_faster() {
    let desk = [machine("desk")];
    let first = written(decided(&world(&desk, &[])));
    let best = first.spec.predicted.unwrap().token_microseconds;
    let just_not_worth_it = best * 5 / 4;
    let fast = speed(just_not_worth_it);
    for (old, (measured, misses), minutes, replaced) in [
        (just_not_worth_it + 1, (None, None), 11, true),
        (
            just_not_worth_it + 1,
            (speed(best * 10), Some(60)),
            11,
            true,
        ),
        (just_not_worth_it, (None, None), 11, false),
        // It is faster than it was planned: because of its experts, or since clients say again what they were told, which no plan counts on.
        (best * 10, (fast, Some(60)), 11, false),
        (best * 10, (fast, None), 11, true),
        (best * 10, (None, None), 10, false),
        (best * 10, (None, None), 9, false),
    ] {
        let mut plan = RingPlan::clone(&first);
        plan.spec.predicted = speed(old);
        let state = json!({"name": "desk", "state": "Ready", "measured": measured, "expertMissPercent": misses});
        let state = json!({"members": [state]});
        plan.status = Some(serde_json::from_value(state).unwrap());
        let world = world(&desk, &[Arc::new(plan)]);
        let (mut state, seen) = (State::default(), Instant::now());
        let at_first = decided_with(&world, &mut state, seen);
        assert!(matches!(at_first.kind, DecisionKind::Keep(_)));
        match decided_with(&world, &mut state, seen + MINUTE * minutes).kind {
            DecisionKind::New {
                spec, retire_first, ..
            } => {
                assert!(replaced, "{old} after {minutes} minutes");
                assert_eq!((spec.generation, retire_first), (2, false));
                assert_eq!(spec.predicted.unwrap().token_microseconds, best);
                assert_eq!(spec.members[0].address, "10.0.0.1:9201");
            }
            _ => assert!(!replaced, "{old} after {minutes} minutes"),
        }
    }
}

#[test]
fn each_ring_has_ten_minutes_of_its_own() {
    let desk = [machine("desk")];
    let mut plan = RingPlan::clone(&written(decided(&world(&desk, &[]))));
    let best = plan.spec.predicted.unwrap().token_microseconds;
    plan.spec.predicted = speed(best * 10);
    let (mut state, seen) = (State::default(), Instant::now());
    let mut goes_on = |generation: i64, minutes: u32| {
        plan.spec.generation = generation;
        let there = world(&desk, &[Arc::new(plan.clone())]);
        let decision = decided_with(&there, &mut state, seen + MINUTE * minutes);
        matches!(decision.kind, DecisionKind::Keep(_))
    };
    assert!(goes_on(1, 0) && goes_on(2, 9));
    assert!(goes_on(2, 19) && !goes_on(2, 20));
}

#[test]
fn a_ring_that_stands_still_is_as_fast_as_it_was() {
    let desk = [machine("desk")];
    let mut plan = RingPlan::clone(&written(decided(&world(&desk, &[]))));
    let best = plan.spec.predicted.unwrap().token_microseconds;
    // It was planned before it was known that tokens come back to the same experts.
    plan.spec.predicted = speed(best * 10);
    let mut says = |said: serde_json::Value| {
        let status = json!({"members": [said]});
        plan.status = Some(serde_json::from_value(status).unwrap());
        world(&desk, &[Arc::new(plan.clone())])
    };
    let well = says(
        json!({"name": "desk", "state": "Ready", "measured": speed(best), "expertMissPercent": 60}),
    );
    let still = says(json!({"name": "desk", "state": "Loaded"}));
    let (mut state, seen) = (State::default(), Instant::now());
    for (world, minutes) in [(&well, 0), (&still, 11), (&well, 11)] {
        let decision = decided_with(world, &mut state, seen + MINUTE * minutes);
        assert!(matches!(decision.kind, DecisionKind::Keep(_)));
    }
}

#[test]
fn plans_count_on_how_often_experts_are_missed() {
    let mut desk = machine("desk");
    let status = profile(&mut desk).status.as_mut().unwrap();
    status.memory.available_bytes = 5 * GIB;
    status.parts.push("experts".to_owned());
    let mut there = world(&[desk], &[]);
    let Resolution::Done(resolved) = &mut there.resolution else {
        panic!("not resolved");
    };
    let model = &mut resolved.profile;
    (model.experts, model.experts_per_token) = (8, 1);
    model.expert_weights = model.layer_weights.clone();
    let mut state = State::default();
    let mut planned = |expert_miss_percent| {
        let model = Arc::get_mut(&mut there.model).unwrap();
        model.status = Some(ModelStatus {
            expert_miss_percent,
            resolved: there.resolution.done().cloned(),
            ..ModelStatus::default()
        });
        let plan = written(decided_with(&there, &mut state, Instant::now()));
        plan.spec.predicted.unwrap().token_microseconds
    };
    let (alike, half) = (planned(None), planned(Some(50)));
    assert!(half < alike, "{half} {alike}");
    // The planner is not asked again for a few points.
    assert_eq!(planned(Some(53)), half);
    let more = planned(Some(70));
    assert!(half < more && more < alike, "{half} {more} {alike}");
    // Of another file, nothing is known.
    let Resolution::Done(resolved) = &mut there.resolution else {
        panic!("not resolved");
    };
    resolved.version.etag = Some("new".to_owned());
    let asked = decided_with(&there, &mut state, Instant::now());
    let plan = written(asked);
    assert_eq!(plan.spec.predicted.unwrap().token_microseconds, alike);
}

#[test]
fn a_faster_ring_waits_where_both_do_not_fit() {
    let desk = [machine("desk")];
    let mut plan = RingPlan::clone(&written(decided(&world(&desk, &[]))));
    plan.spec.predicted = speed(i64::MAX / 1000);
    // All 8 layers of 1 GiB are shared; the old ring's other 6 GiB and the new ring's 8 are more than there is.
    plan.spec.members[0].memory_bytes = Some(14 * GIB);
    let there = world(&desk, &[Arc::new(plan.clone())]);
    assert!(matches!(decided_later(&there).kind, DecisionKind::Keep(_)));
    // If the same ring is broken, it ends first, and the generation that replaces it is remembered.
    plan.spec.context_length += 1;
    let there = world(&desk, &[Arc::new(plan)]);
    let mut state = State::default();
    let decision = decided_with(&there, &mut state, Instant::now());
    let DecisionKind::New {
        spec,
        retire_first,
        why,
    } = decision.kind
    else {
        panic!("a broken ring goes on");
    };
    assert!(retire_first);
    assert_eq!(why, "the Model was changed");
    assert_eq!(state.ended_first, Some((spec.generation, why)));
}

/// Two machines that have memory for the model only together.
fn halves() -> [Machine; 2] {
    ["desk", "pi4"].map(|name| {
        let mut machine = machine(name);
        let status = profile(&mut machine).status.as_mut().unwrap();
        status.memory.available_bytes = 5 * GIB;
        machine
    })
}

#[test]
fn a_machine_is_taken_into_a_ring_that_reads_from_disk() {
    let machines = halves();
    let alone = written(decided(&world(&machines[..1], &[])));
    assert!(alone.spec.members[0].read_bytes_per_token > Some(GIB));
    let DecisionKind::New {
        spec, retire_first, ..
    } = decided_later(&world(&machines, &[alone])).kind
    else {
        panic!("it goes on alone");
    };
    assert_eq!((spec.members.len(), retire_first), (2, false));
}

#[test]
fn a_machine_that_is_not_taken_in_is_told_why() {
    let machines = halves();
    let alone = written(decided(&world(&machines[..1], &[])));
    let why = |change: fn(&mut RingPlan), minutes: u32| {
        let mut plan = RingPlan::clone(&alone);
        change(&mut plan);
        let there = world(&machines, &[Arc::new(plan)]);
        let (mut state, seen) = (State::default(), Instant::now());
        decided_with(&there, &mut state, seen);
        let decision = decided_with(&there, &mut state, seen + MINUTE * minutes);
        assert!(matches!(decision.kind, DecisionKind::Keep(_)));
        let [out] = decision.out.as_slice() else {
            panic!("not one is out");
        };
        assert_eq!(out.name, "pi4");
        out.why.clone()
    };
    assert_eq!(why(|_| {}, 10), TOO_SOON);
    assert_eq!(why(|plan| plan.spec.predicted = speed(1), 11), NOT_WORTH_IT);
    // More than its layers, which alone could be read again.
    let crowded = |plan: &mut RingPlan| plan.spec.members[0].memory_bytes = Some(14 * GIB);
    assert_eq!(why(crowded, 11), NO_ROOM);
}

#[test]
fn a_machine_is_told_what_comes_before_a_ring_with_it() {
    let machines = halves();
    let alone = written(decided(&world(&machines[..1], &[])));
    let mut there = world(&machines, &[alone]);
    let why = |there: &World| {
        let decision = decided_later(there);
        assert!(matches!(decision.kind, DecisionKind::Keep(_)));
        decision.out[0].why.clone()
    };
    let with_port = |slot: i32| {
        let mut plan = RingPlan::clone(&ring(&[(0, 8)], 0, 0));
        plan.spec.http_port = Some(http(slot));
        plan.spec.members.clear();
        Arc::new(plan)
    };
    there.others = (0..SLOTS).map(with_port).collect();
    assert_eq!(
        why(&there),
        "a ring with it would be faster, but all 200 ring ports are in use; delete or suspend other Models"
    );
    there.others.clear();
    let (mut other, _) = model();
    other.metadata.uid = Some("other".to_owned());
    there.models.push(OtherModel {
        model: Arc::new(other),
        priority: 10,
        standing: None,
    });
    assert_eq!(why(&there), OTHERS_FIRST);
}

#[test]
fn why_a_machine_is_left_out_stands_while_a_search_goes_on() {
    let mut machines = halves();
    let mut alone = RingPlan::clone(&written(decided(&world(&machines[..1], &[]))));
    alone.spec.members[0].memory_bytes = Some(14 * GIB);
    let plans = [Arc::new(alone)];
    let (mut state, seen) = (State::default(), Instant::now());
    let why = |decision: &Decision| decision.out[0].why.clone();
    let there = world(&machines, &plans);
    decided_with(&there, &mut state, seen);
    let later = seen + SETTLE + MINUTE;
    assert_eq!(why(&decided_with(&there, &mut state, later)), NO_ROOM);
    let status = profile(&mut machines[1]).status.as_mut().unwrap();
    status.memory.available_bytes = 6 * GIB;
    let (decision, _) = decide(&world(&machines, &plans), &state, later);
    assert!(matches!(decision.kind, DecisionKind::Ask(_)));
    assert_eq!(why(&decision), NO_ROOM);
    // Nothing of that is known of the next ring.
    let mut next = RingPlan::clone(&plans[0]);
    next.spec.generation += 1;
    let (decision, _) = decide(&world(&machines, &[Arc::new(next)]), &state, later);
    assert_eq!(why(&decision), NOT_WORTH_IT);
}
