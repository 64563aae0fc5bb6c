//! Each condition, and the order of preference.

use std::time::Duration;

use serde_json::json;

use prima_crds::v1alpha1::model::ModelStatus;
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::{KvDtype, MemberState, MemberStatus};

use super::memory::{could_do, fits_beside};
use super::ports::{SLOTS, free_slot, http};
use super::*;
use crate::cluster::world::AgentState;
use crate::model_controller::resolve::Resolution;
use crate::model_controller::test_world::{
    GIB, add_draft, gpu, machine, model, profile, ring, unmeasured, world,
};

const MINUTE: Duration = Duration::from_secs(60);

fn speed(token_microseconds: i64) -> Option<Speed> {
    Some(Speed {
        token_microseconds,
        first_token_microseconds: 1,
    })
}

fn member() -> RingMember {
    serde_json::from_value(json!({
        "name": "desk",
        "address": "10.0.0.1:9200",
        "windows": [{"first": 0, "last": 8}],
        "memoryBytes": 4 * GIB,
    }))
    .unwrap()
}

/// A ring whose only member is in this state.
fn reported(state: MemberState, message: &str) -> Arc<RingPlan> {
    let mut plan = RingPlan::clone(&ring(&[(0, 8)], GIB, 0));
    let status = json!({"members": [{"name": "desk", "state": state, "message": message}]});
    plan.status = Some(serde_json::from_value(status).unwrap());
    Arc::new(plan)
}

/// Decides, and asks the planner as often as that takes.
pub(super) fn decided_with(world: &World, state: &mut State, now: Instant) -> Decision {
    loop {
        let (decision, next) = decide(world, state, now);
        *state = next;
        match decision.kind {
            DecisionKind::Ask(question) => state.learn(question.answer()),
            _ => return decision,
        }
    }
}

pub(super) fn decided(world: &World) -> Decision {
    decided_with(world, &mut State::default(), Instant::now())
}

/// What is decided when the ring that runs has been known for long.
fn decided_later(world: &World) -> Decision {
    let (mut state, seen) = (State::default(), Instant::now());
    decided_with(world, &mut state, seen);
    decided_with(world, &mut state, seen + SETTLE + MINUTE)
}

/// The plan that was decided, as if it had been written.
pub(super) fn written(decision: Decision) -> Arc<RingPlan> {
    let DecisionKind::New { spec, .. } = decision.kind else {
        panic!("there is no new plan");
    };
    Arc::new(RingPlan::new("m-1", *spec))
}

pub(super) fn impossible(decision: &Decision) -> (&str, &str) {
    decision.kind.why_not().expect("it is possible")
}

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
fn a_ring_fits_beside_another_but_for_layers_that_both_have() {
    let (_, resolved) = model();
    let mut desk = machine("desk");
    let status = profile(&mut desk).status.as_mut().unwrap();
    status.memory.available_bytes = 8 * GIB;
    status.gpus = vec![gpu(6 * GIB)];
    let candidates = Candidates {
        profiles: vec![profile(&mut desk).clone()],
        ..Candidates::default()
    };
    let fits = |new: &Arc<RingPlan>, old: &Arc<RingPlan>| {
        fits_beside(
            &new.spec,
            std::slice::from_ref(old),
            &candidates,
            &resolved.profile,
        )
    };
    let new = ring(&[(0, 4)], 4 * GIB, 0);
    assert!(fits(&new, &ring(&[(4, 8)], 4 * GIB, 0)), "just");
    assert!(
        !fits(&new, &ring(&[(4, 8)], 4 * GIB + 1, 0)),
        "a byte too much"
    );
    assert!(
        fits(&new, &ring(&[(0, 2), (2, 4)], 8 * GIB, 0)),
        "the same layers"
    );
    assert!(!fits(&new, &ring(&[(0, 2), (2, 4)], 8 * GIB + 1, 0)));
    assert!(
        !fits(&new, &ring(&[(3, 8)], 5 * GIB + 1, 0)),
        "one layer is the same"
    );
    assert!(fits(&new, &ring(&[(3, 8)], 5 * GIB, 0)));
    // A GPU holds both rings in full.
    let new = ring(&[(0, 4)], 0, 3 * GIB);
    assert!(fits(&new, &ring(&[(0, 4)], 0, 3 * GIB)));
    assert!(!fits(&new, &ring(&[(0, 4)], 0, 3 * GIB + 1)));
    assert!(fits(&ring(&[(0, 4)], 0, 0), &ring(&[(0, 4)], 0, 9 * GIB)));
}

#[test]
fn ports_are_used_once_and_end_some_time() {
    let with_port = |slot: i32| {
        let mut plan = RingPlan::clone(&ring(&[(0, 8)], 0, 0));
        plan.spec.http_port = Some(http(slot));
        Arc::new(plan)
    };
    let mut there = world(&[], &[with_port(0)]);
    assert_eq!(free_slot(&there), Some(1));
    there.others = (1..SLOTS)
        .filter(|slot| *slot != 7)
        .map(with_port)
        .collect();
    assert_eq!(free_slot(&there), Some(7));
    there.others.push(with_port(7));
    assert_eq!(free_slot(&there), None);
    // A plan without ports takes none.
    there.plans = vec![ring(&[(0, 8)], 0, 0)];
    assert_eq!(free_slot(&there), Some(0));
}

#[test]
fn a_refusal_counts_for_ten_minutes() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut refusals = Refusals::default();
    let refused = reported(MemberState::Refused, "no disk");
    let known = refusals.note(Some(&refused), &[], start);
    assert_eq!(known["desk"], "no disk");
    assert_eq!(refusals.note(None, &[], at(599)).len(), 1);
    assert!(refusals.note(None, &[], at(600)).is_empty());
    // A machine that has done what was asked is trusted again at once.
    refusals.note(Some(&refused), &[], start);
    let loading = reported(MemberState::Loading, "");
    assert_eq!(refusals.note(Some(&loading), &[], at(1)).len(), 1);
    let loaded = reported(MemberState::Loaded, "");
    assert!(refusals.note(Some(&loaded), &[], at(1)).is_empty());
    // So is one whose agent was replaced, perhaps by one of another version.
    let mut desk = machine("desk");
    refusals.note(Some(&refused), &[], start);
    assert_eq!(refusals.note(None, &[desk.clone()], at(1)).len(), 1);
    let agent = &mut profile(&mut desk).status.as_mut().unwrap().agent;
    agent.as_mut().unwrap().address = "10.0.0.9".to_owned();
    assert!(refusals.note(None, &[desk], at(1)).is_empty());
}

#[test]
fn who_fails_for_two_minutes_has_refused() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut refusals = Refusals::default();
    let failed = reported(MemberState::Failed, "it broke");
    assert!(refusals.note(Some(&failed), &[], start).is_empty());
    assert!(refusals.note(Some(&failed), &[], at(120)).is_empty());
    assert_eq!(
        refusals.note(Some(&failed), &[], at(121))["desk"],
        "it broke"
    );
    // If it recovers in between, its time begins anew.
    let mut refusals = Refusals::default();
    refusals.note(Some(&failed), &[], start);
    refusals.note(Some(&reported(MemberState::Loading, "")), &[], at(60));
    assert!(refusals.note(Some(&failed), &[], at(121)).is_empty());
    assert!(refusals.note(Some(&failed), &[], at(241)).is_empty());
    assert_eq!(refusals.note(Some(&failed), &[], at(242)).len(), 1);
}

#[test]
fn a_machine_at_which_the_ring_fails_has_refused_soon() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let in_state = |state, fails_at: Option<&str>| {
        let mut plan = RingPlan::clone(&reported(MemberState::Loaded, "waiting for pi4"));
        plan.spec.members.push(RingMember {
            name: "pi4".to_owned(),
            ..member()
        });
        let states = &mut plan.status.as_mut().unwrap().members;
        // Its own agent finds nothing wrong with it.
        states.push(MemberStatus {
            name: "pi4".to_owned(),
            state,
            ..states[0].clone()
        });
        states[0].fails_at = fails_at.map(str::to_owned);
        Arc::new(plan)
    };
    let ring = |fails_at| in_state(MemberState::Loaded, fails_at);
    let none = &[];
    let mut refusals = Refusals::default();
    let fails = ring(Some("pi4"));
    assert!(refusals.note(Some(&fails), none, start).is_empty());
    assert!(refusals.wait(start));
    assert!(refusals.note(Some(&fails), none, at(25)).is_empty());
    let refused = refusals.note(Some(&fails), none, at(26));
    let why = "the ring fails there, says desk: waiting for pi4";
    assert_eq!(refused, [("pi4".to_owned(), why.to_owned())].into());
    // As long as there is no ring without it, it may come back to this one.
    let whole = ring(None);
    assert!(refusals.note(Some(&whole), none, at(27)).is_empty());
    assert!(!refusals.wait(at(27)));
    // One that its agent starts again is waited for, and its time begins anew.
    refusals.note(Some(&fails), none, at(28));
    let starts = in_state(MemberState::Loading, Some("pi4"));
    assert!(refusals.note(Some(&starts), none, at(60)).is_empty());
    assert!(refusals.note(Some(&fails), none, at(61)).is_empty());
    assert_eq!(refusals.note(Some(&fails), none, at(87)).len(), 1);
    assert_eq!(refusals.note(None, none, at(686)).len(), 1);
    assert!(refusals.note(None, none, at(687)).is_empty());
    // It was off.
    refusals.note(Some(&fails), none, at(700));
    refusals.note(Some(&fails), none, at(726));
    let mut off = machine("pi4");
    assert_eq!(refusals.note(None, &[off.clone()], at(727)).len(), 1);
    off.agent = AgentState::Silent;
    assert!(refusals.note(None, &[off], at(728)).is_empty());
    // So was rank 0, whose last word stands.
    refusals.note(Some(&fails), none, at(730));
    assert_eq!(refusals.note(Some(&fails), none, at(756)).len(), 1);
    let mut off = machine("desk");
    off.agent = AgentState::Silent;
    assert!(refusals.note(Some(&fails), &[off], at(757)).is_empty());
    // What others would have to fetch is waited for longer; and nobody is left out for what is not in the plan.
    let mut fetched = RingPlan::clone(&fails);
    let source = json!({"huggingFace": {"repo": "o/r", "file": "m.gguf"}});
    fetched.spec.model.source = serde_json::from_value(source).unwrap();
    let fetched = Arc::new(fetched);
    assert!(refusals.note(Some(&fetched), none, at(800)).is_empty());
    assert!(refusals.note(Some(&fetched), none, at(920)).is_empty());
    assert_eq!(refusals.note(Some(&fetched), none, at(921)).len(), 1);
    let mut refusals = Refusals::default();
    let stranger = ring(Some("laptop"));
    refusals.note(Some(&stranger), none, start);
    assert!(refusals.note(Some(&stranger), none, at(100)).is_empty());
}

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

#[test]
fn a_machine_that_leaves_is_replaced_where_that_costs_nothing() {
    let mut desk = machine("desk");
    let first = written(decided(&world(std::slice::from_ref(&desk), &[])));
    desk.leaving = true;
    // Alone, it serves as long as it does.
    let alone = world(std::slice::from_ref(&desk), std::slice::from_ref(&first));
    assert!(matches!(decided(&alone).kind, DecisionKind::Keep(_)));
    let both = [desk, machine("pi4")];
    let DecisionKind::New {
        spec, retire_first, ..
    } = decided(&world(&both, std::slice::from_ref(&first))).kind
    else {
        panic!("no ring without it");
    };
    assert!(!retire_first);
    assert_eq!(spec.members[0].name, "pi4");
    // A ring that also lies on the other machine leaves no room for the next one.
    let mut wide = RingPlan::clone(&first);
    let mut other = wide.spec.members[0].clone();
    other.name = "pi4".to_owned();
    other.memory_bytes = Some(14 * GIB);
    for window in &mut other.windows {
        (window.first, window.last) = (window.last, window.last);
    }
    wide.spec.members.push(other);
    let crowded = world(&both, &[Arc::new(wide)]);
    assert!(matches!(decided(&crowded).kind, DecisionKind::Keep(_)));
}

#[test]
fn another_kv_dtype_replaces_the_ring() {
    let desk = [machine("desk")];
    let f16 = written(decided(&world(&desk, &[])));
    let mut there = world(&desk, std::slice::from_ref(&f16));
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    Arc::get_mut(&mut there.model).unwrap().spec.kv_dtype = KvDtype::Q8_0;
    let Resolution::Done(resolved) = &mut there.resolution else {
        panic!("not resolved");
    };
    resolved.profile.quantized_kv_bytes_per_position_and_layer = 136;
    let DecisionKind::New { spec, why, .. } = decided(&there).kind else {
        panic!("the ring goes on with F16");
    };
    assert_eq!(why, "the Model was changed");
    assert_eq!(spec.kv_dtype, KvDtype::Q8_0);
    let memory = |spec: &RingPlanSpec| spec.members[0].memory_bytes.unwrap();
    // 8 layers, 512 positions.
    assert_eq!(memory(&f16.spec) - memory(&spec), 8 * 512 * (256 - 136));
}

#[test]
fn a_draft_model_is_planned_at_rank_0() {
    let desk = [machine("desk")];
    let without = written(decided(&world(&desk, &[])));
    assert_eq!(without.spec.draft, None);
    let mut there = world(&desk, std::slice::from_ref(&without));
    add_draft(&mut there, &["desk"]);
    let decision = decided(&there);
    let DecisionKind::New { spec, why, .. } = &decision.kind else {
        panic!("the ring goes on without");
    };
    assert_eq!(why, "the Model was changed");
    // 2 layers, 512 positions of 256 bytes.
    let bytes = GIB + 2 * 512 * 256;
    let draft = spec.draft.as_ref().unwrap();
    assert_eq!(draft.memory_bytes, bytes);
    let PlannedModel {
        name,
        file,
        size_bytes,
        layers,
        source,
        version,
    } = &draft.model;
    assert_eq!((&name[..], &file[..]), ("m-draft", "/models/d.gguf"));
    assert_eq!((*size_bytes, *layers), (GIB, 2));
    assert_eq!(
        (source, &version.as_ref().unwrap().header_sha256[..]),
        (&None, "d")
    );
    let memory = |spec: &RingPlanSpec| spec.members[0].memory_bytes.unwrap();
    assert_eq!(memory(spec), memory(&without.spec) + bytes);
    // A token is guessed for each that is computed.
    let speed = |spec: &RingPlanSpec| spec.predicted.unwrap().token_microseconds;
    assert!(speed(spec) > speed(&without.spec));

    let drafting = written(decision);
    there.plans = vec![drafting];
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    // Another one is another ring.
    let Resolution::Done(resolved) = &mut there.resolution else {
        panic!("not resolved");
    };
    resolved.draft.as_mut().unwrap().version.etag = Some("new".to_owned());
    assert!(matches!(decided(&there).kind, DecisionKind::New { .. }));
}

#[test]
fn suspension_then_a_missing_key_come_before_all_else() {
    let mut there = world(&[], &[ring(&[(0, 8)], GIB, 0)]);
    there.resolution = Resolution::Failed("no".to_owned());
    there.api_keys = KnownApiKeys::Missing("no Secret".to_owned());
    let reason = |world: &World| match decided(world).kind {
        DecisionKind::Released { reason, .. } => reason,
        _ => "it is not released",
    };
    assert_eq!(reason(&there), "NoApiKey");
    Arc::get_mut(&mut there.model).unwrap().spec.suspend = true;
    assert_eq!(reason(&there), "Suspended");
}

#[test]
fn a_ring_survives_an_unseen_source_and_not_an_edit() {
    let mut there = world(&[], &[ring(&[(0, 8)], GIB, 0)]);
    there.resolution = Resolution::Failed("the server is away".to_owned());
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    there.plans.clear();
    assert_eq!(impossible(&decided(&there)).0, "NotResolved");
    there.plans = vec![ring(&[(0, 8)], GIB, 0)];
    let source = json!({"hostPath": {"path": "/models/another.gguf"}});
    Arc::get_mut(&mut there.model).unwrap().spec.source = serde_json::from_value(source).unwrap();
    assert_eq!(impossible(&decided(&there)).0, "NotResolved");

    let source = |file: &str| {
        let source = json!({"huggingFace": {"repo": "a/b", "file": file}});
        serde_json::from_value::<ModelSource>(source).unwrap()
    };
    let mut plan = RingPlan::clone(&ring(&[(0, 8)], GIB, 0));
    plan.spec.model.source = Some(source("m.gguf"));
    there.plans = vec![Arc::new(plan)];
    let mut wants = |file: &str| {
        Arc::get_mut(&mut there.model).unwrap().spec.source = source(file);
        decided(&there)
    };
    assert!(matches!(wants("m.gguf").kind, DecisionKind::Keep(_)));
    assert_eq!(impossible(&wants("other.gguf")).0, "NotResolved");
}

#[test]
fn a_ring_that_moved_keeps_its_layers_and_asks_nobody() {
    let first = decided(&world(&[machine("desk")], &[]));
    let mut first = written(first);
    Arc::make_mut(&mut first).spec.rounds = 2;
    let mut desk = machine("desk");
    let agent = profile(&mut desk)
        .status
        .as_mut()
        .unwrap()
        .agent
        .as_mut()
        .unwrap();
    agent.address = "fd00::7".to_owned();
    let (decision, _) = decide(
        &world(&[desk], std::slice::from_ref(&first)),
        &State::default(),
        Instant::now(),
    );
    let DecisionKind::New { spec, why, .. } = decision.kind else {
        panic!("it is not decided without the planner");
    };
    assert_eq!(why, "desk has another address now");
    assert_eq!(spec.members[0].address, "[fd00::7]:9201");
    assert_eq!(spec.members[0].windows, first.spec.members[0].windows);
    assert_eq!(spec.predicted, first.spec.predicted);
    assert_eq!(spec.rounds, 2);
}

#[test]
fn a_broken_ring_goes_on_until_the_planner_answers() {
    let desk = [machine("desk")];
    let first = world(&desk, &[]);
    let (decision, state) = decide(&first, &State::default(), Instant::now());
    let DecisionKind::Ask(question) = decision.kind else {
        panic!("nobody is asked");
    };
    assert!(!question.urgent);
    assert!(state.answers.is_empty());

    let mut plan = RingPlan::clone(&written(decided(&first)));
    plan.spec.context_length += 1;
    let (decision, _) = decide(
        &world(&desk, &[Arc::new(plan)]),
        &State::default(),
        Instant::now(),
    );
    let DecisionKind::Ask(question) = decision.kind else {
        panic!("nobody is asked");
    };
    assert!(question.urgent);
    assert!(decision.out.is_empty(), "its machine is in the ring");
}

#[test]
fn an_answer_counts_while_the_world_is_as_it_was() {
    let there = world(&[machine("desk")], &[]);
    let mut state = State::default();
    decided_with(&there, &mut state, Instant::now());
    let asks = |world: &World| {
        matches!(
            decide(world, &state, Instant::now()).0.kind,
            DecisionKind::Ask(_)
        )
    };
    assert!(!asks(&there));
    let changed = |change: fn(&mut NodeProfile)| {
        let mut desk = machine("desk");
        change(profile(&mut desk));
        world(&[desk], &[])
    };
    assert!(asks(&changed(
        |profile| profile.spec.disk_allowed = Some(false)
    )));
    assert!(asks(&changed(|profile| {
        let memory = &mut profile.status.as_mut().unwrap().memory;
        memory.available_bytes -= memory.total_bytes / 10;
    })));
    assert!(asks(&changed(|profile| {
        profile.status.as_mut().unwrap().links[0].latency_nanoseconds *= 2;
    })));
    assert!(!asks(&changed(|profile| {
        profile.status.as_mut().unwrap().links[0].latency_nanoseconds += 1;
    })));
    let mut another = world(&[machine("desk")], &[]);
    Arc::get_mut(&mut another.model)
        .unwrap()
        .spec
        .context_length = Some(100);
    assert!(asks(&another));
}

#[test]
fn without_ports_or_room_it_says_so_and_a_working_ring_goes_on() {
    let desk = [machine("desk")];
    let with_port = |slot: i32| {
        let mut plan = RingPlan::clone(&ring(&[(0, 8)], 0, 0));
        plan.spec.http_port = Some(http(slot));
        plan.spec.members.clear();
        Arc::new(plan)
    };
    let mut there = world(&desk, &[]);
    there.others = (0..SLOTS).map(with_port).collect();
    let decision = decided(&there);
    let (reason, message) = impossible(&decision);
    assert_eq!(reason, "NoPorts");
    assert!(message.contains("200 ring ports"), "{message}");

    let mut plan = RingPlan::clone(&written(decided(&world(&desk, &[]))));
    plan.spec.predicted = speed(i64::MAX / 1000);
    there.plans = vec![Arc::new(plan)];
    assert!(matches!(decided_later(&there).kind, DecisionKind::Keep(_)));

    let mut desk = machine("desk");
    let owner = &mut profile(&mut desk).spec;
    owner.memory_cap_bytes = Some(1);
    owner.disk_allowed = Some(false);
    assert_eq!(impossible(&decided(&world(&[desk], &[]))).0, "DoesNotFit");
}

#[test]
fn a_quota_refuses_a_new_ring_and_ends_none() {
    let desk = [machine("desk")];
    let mut there = world(&desk, &[]);
    Arc::get_mut(&mut there.model).unwrap().metadata.namespace = Some("kids".to_owned());
    let quota =
        json!({"metadata": {"name": "home"}, "spec": {"hard": {"prima.dev/memory": "1Gi"}}});
    there.quotas = vec![Arc::new(serde_json::from_value(quota).unwrap())];
    let decision = decided(&there);
    let (reason, message) = impossible(&decision);
    assert_eq!(reason, "OverQuota");
    assert!(message.contains("may take 1.0 GiB"), "{message}");

    // One that runs goes on, but has to stay as it is.
    let quotas = std::mem::take(&mut there.quotas);
    let plan = written(decided(&there));
    there.plans = vec![plan];
    there.quotas = quotas;
    assert!(matches!(decided_later(&there).kind, DecisionKind::Keep(_)));
    let model = Arc::get_mut(&mut there.model).unwrap();
    model.spec.context_length = Some(128);
    assert_eq!(impossible(&decided(&there)).0, "OverQuota");
}

#[test]
fn only_the_namespaces_own_models_count_for_its_quota() {
    let desk = [machine("desk")];
    let mut there = world(&desk, &[]);
    Arc::get_mut(&mut there.model).unwrap().metadata.namespace = Some("kids".to_owned());
    let needed = written(decided(&there)).spec.members[0]
        .memory_bytes
        .unwrap();
    let hard = json!({"prima.dev/memory": (needed + GIB).to_string()});
    let quota = json!({"metadata": {"name": "home"}, "spec": {"hard": hard}});
    there.quotas = vec![Arc::new(serde_json::from_value(quota).unwrap())];
    // On a machine that is not there any more, so that it takes nothing of the other one.
    let mut other = RingPlan::clone(&ring(&[(0, 8)], 2 * GIB, 0));
    other.spec.members[0].name = "gone".to_owned();
    other.metadata.namespace = Some("parents".to_owned());
    there.others = vec![Arc::new(other.clone())];
    assert!(matches!(decided(&there).kind, DecisionKind::New { .. }));
    other.metadata.namespace = Some("kids".to_owned());
    there.others = vec![Arc::new(other)];
    assert_eq!(impossible(&decided(&there)).0, "OverQuota");
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
fn a_machine_goes_on_elsewhere_only_with_what_it_needs() {
    let (_, resolved) = model();
    let yaml = include_str!("../../../../crds/tests/node-profile.yaml");
    let mut profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
    let status = profile.status.as_mut().unwrap();
    status.memory.available_bytes = 5 * GIB;
    status.gpus.clear();
    assert!(could_do(&profile, &member(), &resolved.profile));

    let mut reserved = profile.clone();
    reserved.spec.reserved_memory_bytes = Some(2 * GIB);
    assert!(!could_do(&reserved, &member(), &resolved.profile));
    let mut capped = profile.clone();
    capped.spec.memory_cap_bytes = Some(3 * GIB);
    assert!(!could_do(&capped, &member(), &resolved.profile));

    let on_gpu = RingMember {
        gpu_memory_bytes: Some(GIB),
        ..member()
    };
    assert!(
        !could_do(&profile, &on_gpu, &resolved.profile),
        "there is no GPU any more"
    );

    let streamed = RingMember {
        memory_bytes: Some(8 * GIB),
        read_bytes_per_token: Some(4 * GIB),
        ..member()
    };
    assert!(could_do(&profile, &streamed, &resolved.profile));
    profile.spec.disk_allowed = Some(false);
    assert!(!could_do(&profile, &streamed, &resolved.profile));
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
fn a_ring_with_another_rank_0_than_wanted_ends() {
    let first = decided(&world(&[machine("desk")], &[]));
    let mut first = written(first);
    Arc::make_mut(&mut first).spec.generation = 5;
    let mut there = world(&[machine("desk"), machine("pi4")], &[first]);
    let want = |there: &mut World, name: &str| {
        Arc::get_mut(&mut there.model).unwrap().spec.rank0 = Some(name.to_owned());
    };
    want(&mut there, "desk");
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    want(&mut there, "pi4");
    let DecisionKind::New { spec, why, .. } = decided(&there).kind else {
        panic!("it goes on");
    };
    assert_eq!(why, "spec.rank0 is pi4 now");
    assert_eq!(spec.generation, 6);
    assert_eq!(spec.members[0].name, "pi4");
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
