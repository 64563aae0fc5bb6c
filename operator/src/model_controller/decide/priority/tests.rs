//! Which rings end for whom, that none ends in vain, and that they come back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use prima_crds::v1alpha1::model::ModelStatus;
use prima_crds::v1alpha1::ring_plan::RingPlan;
use serde_json::json;

use super::super::tests::{decided, decided_with, impossible, written};
use super::super::{Decision, decide};
use super::*;
use crate::cluster::world::Machine;
use crate::model_controller::resolve::Resolution;
use crate::model_controller::standing::{SeenRoom, Standings};
use crate::model_controller::test_world::{
    GIB, gpu, machine, model, profile, ring, unmeasured, world,
};

const DISPLACED_BY_BIG: &str = "its memory goes to big (priority 10), and its own priority is 0; it is planned again when there is room";

/// 12 GiB of memory, and no disk to rely on: what does not fit does not run.
fn without_disk(name: &str) -> Machine {
    let mut machine = machine(name);
    profile(&mut machine).spec.disk_allowed = Some(false);
    machine
}

/// The world of a Model of this priority, which takes 8 GiB and a little.
fn world_of(priority: i32, machines: &[Machine]) -> World {
    let mut there = world(machines, &[]);
    let own = own(&mut there);
    own.metadata.uid = Some("m".to_owned());
    own.spec.priority = priority;
    there
}

fn own(there: &mut World) -> &mut Model {
    Arc::get_mut(&mut there.model).unwrap()
}

/// Adds a Model of this name, and uid, which was made in this second.
fn add_model(
    there: &mut World,
    name: &str,
    (priority, second): (i32, i64),
    standing: Option<Standing>,
) {
    let (mut other, _) = model();
    other.metadata.name = Some(name.to_owned());
    other.metadata.uid = Some(name.to_owned());
    other.metadata.creation_timestamp = Some(Time(Timestamp::from_second(second).unwrap()));
    other.spec.priority = priority;
    there.models.push(OtherModel {
        model: Arc::new(other),
        priority,
        standing,
    });
}

/// Gives it a ring, with so many bytes of this machine.
fn add_ring(there: &mut World, name: &str, machine: &str, bytes: i64) {
    let mut plan = RingPlan::clone(&ring(&[(0, 8)], bytes, 0));
    plan.spec.members[0].name = machine.to_owned();
    there.others.push(owned(plan, name));
}

fn owned(mut plan: RingPlan, name: &str) -> Arc<RingPlan> {
    plan.metadata.uid = Some(format!("{name}-1"));
    plan.metadata.owner_references = Some(vec![OwnerReference {
        name: name.to_owned(),
        uid: name.to_owned(),
        ..OwnerReference::default()
    }]);
    Arc::new(plan)
}

fn is_owned_by(plan: &RingPlan, name: &str) -> bool {
    plan.owner_references()[0].name == name
}

fn end(there: &mut World, name: &str) {
    there.others.retain(|plan| !is_owned_by(plan, name));
}

/// Room is being made for it on `machine`.
fn displaces(models: &[&str], machine: &str) -> Standing {
    Standing::Displaces {
        models: models.iter().map(|uid| (*uid).to_owned()).collect(),
        machines: vec![machine.to_owned()],
    }
}

/// Whose rings are to end, by name.
fn ending(decision: &Decision) -> Vec<String> {
    let models = decision.displaces().iter();
    models.map(|model| model.name_any()).collect()
}

fn is_new(decision: &Decision) -> bool {
    matches!(decision.kind, DecisionKind::New { .. })
}

#[test]
fn the_fewest_rings_end_and_those_of_the_lowest_priority() {
    let mut there = world_of(10, &[without_disk("desk")]);
    for (name, priority, second, machine) in [
        ("third", 5, 1, "desk"),
        ("second", 0, 1, "desk"),
        ("first", 0, 2, "desk"),
        ("lost", -5, 1, "a machine that is gone"),
    ] {
        add_model(&mut there, name, (priority, second), None);
        add_ring(&mut there, name, machine, 2 * GIB);
    }
    let decision = decided(&there);
    let said =
        "waits until first (priority 0), second (priority 0) have ended, to take their memory";
    assert_eq!(impossible(&decision), ("AwaitingRoom", said));
    assert_eq!(ending(&decision), ["first", "second"]);
    assert!(decision.awaits());
    let standing = decision.standing(&there);
    assert_eq!(standing, displaces(&["first", "second"], "desk"));

    // When one has ended, it still takes the same other.
    end(&mut there, "first");
    let said = "waits until second (priority 0) has ended, to take its memory";
    assert_eq!(impossible(&decided(&there)), ("AwaitingRoom", said));
    end(&mut there, "second");
    let decision = decided(&there);
    assert!(is_new(&decision));
    assert_eq!(decision.standing(&there), Standing::NoClaim);
}

#[test]
fn a_ring_that_has_less_than_a_step_of_memory_ends_too() {
    let mut desk = without_disk("desk");
    let memory = &mut profile(&mut desk).status.as_mut().unwrap().memory;
    // A step is 5 GiB, and with the other ring or without there are from 5 to 10.
    (memory.total_bytes, memory.available_bytes) = (100 * GIB, 99 * GIB / 10);
    let mut there = world_of(10, &[desk]);
    assert!(is_new(&decided(&there)));
    add_model(&mut there, "low", (0, 1), None);
    add_ring(&mut there, "low", "desk", 2 * GIB);
    assert_eq!(ending(&decided(&there)), ["low"]);
}

#[test]
fn a_small_ring_does_not_end_where_a_large_one_has_to() {
    // Also where weights could be read from disk, which is much slower.
    for desk in [without_disk("desk"), machine("desk")] {
        let mut there = world_of(10, &[desk]);
        for (name, second, bytes) in [("small", 2, GIB), ("large", 1, 6 * GIB)] {
            add_model(&mut there, name, (0, second), None);
            add_ring(&mut there, name, "desk", bytes);
        }
        assert_eq!(ending(&decided(&there)), ["large"]);
    }
}

/// With its GPU, a token takes less than half the time.
fn with_gpu(mut machine: Machine) -> Machine {
    profile(&mut machine).status.as_mut().unwrap().gpus = vec![gpu(64 * GIB)];
    machine
}

/// Rows as wide as layers of this size have, for which a GPU needs buffers.
fn world_of_wide_rows(machines: &[Machine]) -> World {
    let mut there = world_of(10, machines);
    let Resolution::Done(resolved) = &mut there.resolution else {
        panic!("not resolved");
    };
    resolved.profile.hidden_size = 4096;
    there
}

/// Gives it a ring that has all of this machine's GPU.
fn add_ring_on_gpu(there: &mut World, name: &str, machine: &str, bytes: i64) {
    let mut plan = RingPlan::clone(&ring(&[(0, 8)], bytes, 64 * GIB));
    plan.spec.members[0].name = machine.to_owned();
    there.others.push(owned(plan, name));
}

#[test]
fn nobody_ends_for_a_ring_that_would_only_be_faster() {
    let mut there = world_of_wide_rows(&[with_gpu(without_disk("desk"))]);
    let members = written(decided(&there)).spec.members.clone();
    assert!(members[0].uses_gpu());
    add_model(&mut there, "low", (0, 1), None);
    add_ring_on_gpu(&mut there, "low", "desk", 0);
    assert!(is_new(&decided(&there)));
}

#[test]
fn the_lowest_ends_though_anothers_end_would_gain_more() {
    let machines = [without_disk("desk"), with_gpu(without_disk("pi4"))];
    let mut there = world_of_wide_rows(&machines);
    add_model(&mut there, "low", (0, 1), None);
    add_ring(&mut there, "low", "desk", 10 * GIB);
    add_model(&mut there, "higher", (5, 1), None);
    add_ring_on_gpu(&mut there, "higher", "pi4", 10 * GIB);
    assert_eq!(ending(&decided(&there)), ["low"]);
}

#[test]
fn nothing_ends_for_an_equal_or_in_vain() {
    let desk = [without_disk("desk")];
    let nobody_ends = |there: &World| {
        let decision = decided(there);
        assert_eq!(impossible(&decision).0, "DoesNotFit");
        let standing = decision.standing(there);
        assert_eq!(standing, Standing::Waits(there.room()));
        assert!(!decision.awaits());
    };
    let mut there = world_of(0, &desk);
    add_model(&mut there, "equal", (0, 1), None);
    add_ring(&mut there, "equal", "desk", 6 * GIB);
    nobody_ends(&there);

    let mut there = world_of(10, &desk);
    for (name, priority, bytes) in [("low", 0, 2 * GIB), ("high", 20, 6 * GIB)] {
        add_model(&mut there, name, (priority, 1), Some(Standing::NoClaim));
        add_ring(&mut there, name, "desk", bytes);
    }
    nobody_ends(&there);

    // A plan whose Model is gone will soon go, too, and nobody else can end it.
    let mut there = world_of(10, &desk);
    add_ring(&mut there, "deleted", "desk", 6 * GIB);
    nobody_ends(&there);

    // Nor for a ring that its namespace may not have.
    let mut there = world_of(10, &desk);
    add_model(&mut there, "low", (0, 1), None);
    add_ring(&mut there, "low", "desk", 6 * GIB);
    own(&mut there).metadata.namespace = Some("kids".to_owned());
    let quota =
        json!({"metadata": {"name": "home"}, "spec": {"hard": {"prima.dev/memory": "1Gi"}}});
    there.quotas = vec![Arc::new(serde_json::from_value(quota).unwrap())];
    let decision = decided(&there);
    assert_eq!(impossible(&decision).0, "OverQuota");
    assert_eq!(decision.standing(&there), Standing::NoClaim);
}

#[test]
fn a_broken_ring_displaces_others_and_a_working_one_nobody() {
    let desk = [without_disk("desk")];
    let plan = written(decided(&world_of(10, &desk)));
    let mut there = world_of(10, &desk);
    there.plans = vec![plan];
    add_model(&mut there, "low", (0, 1), None);
    add_ring(&mut there, "low", "desk", 6 * GIB);
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    own(&mut there).spec.context_length = Some(128);
    let decision = decided(&there);
    assert_eq!(impossible(&decision).0, "AwaitingRoom");
    assert_eq!(ending(&decision), ["low"]);
    // Another priority alone is no other plan.
    own(&mut there).spec.context_length = None;
    own(&mut there).spec.priority = 11;
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
}

#[test]
fn weights_read_from_disk_need_room_if_that_is_much_slower() {
    let decided_beside = |priority: i32, available: i64, taken: i64| {
        let mut desk = machine("desk");
        let status = profile(&mut desk).status.as_mut().unwrap();
        status.memory.available_bytes = available;
        let mut there = world_of(10, &[desk]);
        add_model(&mut there, "other", (priority, 1), None);
        add_ring(&mut there, "other", "desk", taken);
        decided(&there)
    };
    let decision = decided_beside(0, 12 * GIB, 6 * GIB);
    assert_eq!(impossible(&decision).0, "AwaitingRoom");
    assert!(is_new(&decided_beside(10, 12 * GIB, 6 * GIB)));
    // It would be read anyway.
    assert!(is_new(&decided_beside(0, 6 * GIB, 3 * GIB / 10)));
}

#[test]
fn what_waits_for_an_old_rings_end_needs_no_further_search() {
    let mut desk = machine("desk");
    let status = profile(&mut desk).status.as_mut().unwrap();
    status.memory.available_bytes = 6 * GIB;
    let mut there = world_of(10, &[desk]);
    add_model(&mut there, "low", (0, 1), None);
    add_ring(&mut there, "low", "desk", 3 * GIB / 10);
    let mut old = RingPlan::clone(&ring(&[(0, 8)], 14 * GIB, 0));
    old.spec.context_length += 1;
    there.plans = vec![Arc::new(old)];
    let (mut state, now) = (State::default(), Instant::now());
    let first = decided_with(&there, &mut state, now).kind;
    assert!(matches!(
        first,
        DecisionKind::New {
            retire_first: true,
            ..
        }
    ));
    assert!(is_new(&decide(&there, &state, now).0));
}

#[test]
fn a_displaced_model_says_so_and_comes_back_when_there_is_room() {
    let (mut state, now) = (State::default(), Instant::now());
    let mut there = world_of(0, &[without_disk("desk")]);
    there.plans = vec![written(decided_with(&there, &mut state, now))];
    let standing = displaces(&["m"], "desk");
    add_model(&mut there, "big", (10, 1), Some(standing));
    let DecisionKind::Released { reason, message } = decided_with(&there, &mut state, now).kind
    else {
        panic!("its ring goes on");
    };
    assert_eq!((reason, &message[..]), (DISPLACED, DISPLACED_BY_BIG));

    // It does not come back into the room that the other one waits for.
    there.plans.clear();
    let decision = decided_with(&there, &mut state, now);
    assert_eq!(impossible(&decision), (DISPLACED, DISPLACED_BY_BIG));
    assert!(decision.awaits());
    assert_eq!(decision.standing(&there), Standing::Undecided);

    there.models[0].standing = Some(Standing::NoClaim);
    add_ring(&mut there, "big", "desk", 9 * GIB);
    let decision = decided_with(&there, &mut state, now);
    assert_eq!(impossible(&decision), (DISPLACED, DISPLACED_BY_BIG));
    assert!(!decision.awaits());

    // An operator that has just begun knows by what was said.
    assert_eq!(impossible(&decided(&there)).0, "DoesNotFit");
    let said = Condition {
        type_: "Planned".to_owned(),
        status: "False".to_owned(),
        reason: DISPLACED.to_owned(),
        message: String::new(),
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        observed_generation: None,
    };
    own(&mut there).status = Some(ModelStatus {
        conditions: vec![said],
        ..ModelStatus::default()
    });
    there.models[0].standing = None;
    assert_eq!(impossible(&decided(&there)), (DISPLACED, DISPLACED_BY_BIG));

    // It takes what room there is beside the other.
    there.models[0].standing = Some(Standing::NoClaim);
    there.machines.push(without_disk("pi4"));
    let plan = written(decided(&there));
    let mut members = plan.spec.members.iter();
    assert!(members.any(|member| member.name == "pi4"));
    // Or its own again, once the other has none.
    there.machines.pop();
    end(&mut there, "big");
    let other = &mut there.models[0].model;
    Arc::make_mut(other).spec.suspend = true;
    // If there is no room either, nobody has its memory.
    profile(&mut there.machines[0]).spec.memory_cap_bytes = Some(1);
    let decision = decided_with(&there, &mut state, now);
    assert_eq!(impossible(&decision).0, "DoesNotFit");
    profile(&mut there.machines[0]).spec.memory_cap_bytes = None;
    assert!(is_new(&decided_with(&there, &mut state, now)));
}

#[test]
fn free_room_is_offered_to_higher_priorities_first() {
    let mut there = world_of(0, &[without_disk("desk")]);
    add_model(&mut there, "highest", (20, 1), Some(Standing::NoClaim));
    add_ring(&mut there, "highest", "desk", 9 * GIB);
    let standing = Standing::Waits(there.room());
    add_model(&mut there, "high", (10, 1), Some(standing));
    assert_eq!(impossible(&decided(&there)).0, "DoesNotFit");

    end(&mut there, "highest");
    there.models.remove(0);
    let waits_for_high = |there: &World| {
        let decision = decided(there);
        let said = ("AwaitingRoom", "high (priority 10) is planned first");
        assert_eq!(impossible(&decision), said);
        assert!(decision.awaits() && ending(&decision).is_empty());
        assert_eq!(decision.standing(there), Standing::Undecided);
    };
    waits_for_high(&there);
    there.models[0].standing = Some(Standing::Undecided);
    waits_for_high(&there);
    there.models[0].standing = Some(displaces(&["somebody"], "desk"));
    waits_for_high(&there);
    // Room that is made elsewhere is none of its business.
    there.models[0].standing = Some(displaces(&["somebody"], "pi4"));
    assert!(is_new(&decided(&there)));
    // It was looked at again, and what there is does not do for it.
    there.models[0].standing = Some(Standing::Waits(there.room()));
    assert!(is_new(&decided(&there)));
    for (priority, suspend) in [(0, false), (10, true)] {
        let other = &mut there.models[0];
        other.standing = Some(Standing::Undecided);
        other.priority = priority;
        Arc::make_mut(&mut other.model).spec.suspend = suspend;
        assert!(is_new(&decided(&there)), "{priority}");
    }
}

#[test]
fn a_new_operator_decides_about_higher_priorities_first() {
    let mut there = world_of(0, &[without_disk("desk")]);
    add_model(&mut there, "high", (10, 1), None);
    assert_eq!(impossible(&decided(&there)).0, "AwaitingRoom");
    // Its ring may be broken, and others may have ended for the next one.
    add_ring(&mut there, "high", "a machine that is gone", 9 * GIB);
    assert_eq!(impossible(&decided(&there)).0, "AwaitingRoom");
    there.models[0].standing = Some(Standing::NoClaim);
    assert!(is_new(&decided(&there)));
}

#[test]
fn a_broken_ring_waits_only_where_room_is_being_made() {
    let desk = [without_disk("desk")];
    let plan = written(decided(&world_of(0, &desk)));
    let mut there = world_of(0, &desk);
    there.plans = vec![plan];
    own(&mut there).spec.context_length = Some(128);
    add_model(&mut there, "high", (10, 1), None);
    let gone = [owned(RingPlan::clone(&ring(&[(0, 8)], GIB, 0)), "gone")];
    let seen = SeenRoom::new(&there.machines, gone.iter());
    for standing in [
        None,
        Some(Standing::NoClaim),
        Some(Standing::Undecided),
        Some(Standing::Waits(seen)),
        Some(displaces(&["somebody"], "pi4")),
    ] {
        there.models[0].standing = standing.clone();
        assert!(is_new(&decided(&there)), "{standing:?}");
    }
    there.models[0].standing = Some(displaces(&["somebody"], "desk"));
    let decision = decided(&there);
    assert_eq!(impossible(&decision).0, "AwaitingRoom");
    assert!(decision.awaits());
}

#[test]
fn what_comes_soon_is_undecided_and_what_fails_claims_nothing() {
    let mut there = world_of(10, &[without_disk("desk")]);
    let mut standing = |resolution: Resolution| {
        there.resolution = resolution;
        decided(&there).standing(&there)
    };
    let asked = Resolution::Awaited("asks the hub".to_owned());
    assert_eq!(standing(asked), Standing::Undecided);
    let failed = Resolution::Failed("there is no such file".to_owned());
    assert_eq!(standing(failed), Standing::NoClaim);
    // A search.
    let there = world_of(10, &[without_disk("desk")]);
    let (decision, _) = decide(&there, &State::default(), Instant::now());
    assert_eq!(decision.standing(&there), Standing::Undecided);
    // While one for a faster ring goes on, nobody waits.
    let mut there = world_of(10, &[without_disk("desk")]);
    there.plans = vec![written(decided(&there))];
    let (decision, _) = decide(&there, &State::default(), Instant::now());
    assert!(matches!(decision.kind, DecisionKind::Ask(_)));
    assert_eq!(decision.standing(&there), Standing::NoClaim);
    // A machine that is being measured.
    let there = world_of(10, &[without_disk("desk"), unmeasured("pi4", 1)]);
    let decision = decided(&there);
    assert_eq!(impossible(&decision).0, "AwaitingMachines");
    assert_eq!(decision.standing(&there), Standing::Undecided);
}

#[test]
fn a_quota_bounds_priorities_and_what_a_ring_counts_as() {
    let mut there = world_of(10, &[without_disk("desk")]);
    add_model(&mut there, "low", (7, 1), None);
    add_ring(&mut there, "low", "desk", 3 * GIB);
    let plan = written(decided(&there));
    let quota =
        json!({"metadata": {"name": "home"}, "spec": {"hard": {"prima.dev/priority": "5"}}});
    there.quotas = vec![Arc::new(serde_json::from_value(quota).unwrap())];
    let decision = decided(&there);
    let said = "ResourceQuota home, prima.dev/priority: Models of the namespace may have a priority of 5 at most, and this one has 10";
    assert_eq!(impossible(&decision), ("OverQuota", said));
    // One that runs goes on, and ends for whoever has more than it may have.
    there.plans = vec![plan];
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    there.models[0].standing = Some(displaces(&["m"], "desk"));
    let DecisionKind::Released { reason, message } = decided(&there).kind else {
        panic!("its ring goes on");
    };
    assert_eq!(reason, DISPLACED);
    let said = "goes to low (priority 7), and its own priority is 5";
    assert!(message.contains(said), "{message}");
}

#[test]
fn models_of_other_namespaces_are_not_named() {
    let mut there = world_of(10, &[without_disk("desk")]);
    own(&mut there).metadata.namespace = Some("kids".to_owned());
    add_model(&mut there, "secret", (0, 1), None);
    add_ring(&mut there, "secret", "desk", 6 * GIB);
    let said =
        "waits until a Model of another namespace (priority 0) has ended, to take its memory";
    assert_eq!(impossible(&decided(&there)), ("AwaitingRoom", said));
}

/// An operator's passes over two Models whose rings do not fit beside each other, as `reconcile` makes them.
struct Operator {
    desk: [Machine; 1],
    now: Instant,
    /// The Model of higher priority exists.
    high_is_made: bool,
    states: BTreeMap<&'static str, State>,
    standings: Standings,
    plans: Vec<Arc<RingPlan>>,
    /// Whose rings have ended.
    ended: Vec<&'static str>,
}

/// How a pass goes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pass {
    Whole,
    /// The planner does not answer in time.
    Slow,
    /// Something cannot be read or written.
    Fails,
}

impl Operator {
    fn new() -> Self {
        Self {
            desk: [without_disk("desk")],
            now: Instant::now(),
            high_is_made: false,
            states: BTreeMap::new(),
            standings: Standings::default(),
            plans: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Another one takes over, which knows what the API server has.
    fn restart(&mut self) {
        self.states.clear();
        self.standings = Standings::default();
    }

    fn world_of(&self, name: &str) -> World {
        let (priority, other, others_priority) = match name {
            "low" => (0, "high", 10),
            _ => (10, "low", 0),
        };
        let mut there = world_of(priority, &self.desk);
        own(&mut there).metadata.uid = Some(name.to_owned());
        if other == "low" || self.high_is_made {
            let standing = self.standings.of(other, self.now);
            add_model(&mut there, other, (others_priority, 1), standing);
        }
        let plans = self.plans.iter().cloned();
        let (of_own, others): (Vec<_>, Vec<_>) = plans.partition(|plan| is_owned_by(plan, name));
        (there.plans, there.others) = (of_own, others);
        there
    }

    fn pass(&mut self, name: &'static str, pass: Pass) {
        let there = self.world_of(name);
        let state = self.states.entry(name).or_default();
        let decision = loop {
            let (decision, next) = decide(&there, state, self.now);
            *state = next;
            let standing = decision.standing(&there);
            self.standings.decided(name, standing, self.now);
            match decision.kind {
                DecisionKind::Ask(question) if pass != Pass::Slow => {
                    state.learn(question.answer());
                }
                _ => break decision,
            }
        };
        if pass == Pass::Fails {
            return self.standings.failed(name, self.now);
        }
        let standing = decision.standing(&there);
        match decision.kind {
            DecisionKind::Released { .. } => {
                self.plans.retain(|plan| !is_owned_by(plan, name));
                self.ended.push(name);
            }
            DecisionKind::New { spec, .. } => {
                self.plans.push(owned(RingPlan::new("plan", *spec), name));
            }
            _ => {}
        }
        self.standings.passed(name, standing, self.now);
    }

    /// Who has a ring.
    fn rings(&self) -> Vec<&str> {
        let owners = self.plans.iter().map(|plan| plan.owner_references());
        owners.map(|owners| owners[0].name.as_str()).collect()
    }
}

#[test]
fn in_any_order_it_ends_the_same_and_no_ring_ends_twice() {
    let mut seed: u64 = 1;
    let mut random = |below: u64| {
        for (left, shift) in [(true, 13), (false, 7), (true, 17)] {
            seed ^= if left { seed << shift } else { seed >> shift };
        }
        seed % below
    };
    for run in 0..50 {
        let mut operator = Operator::new();
        let mut history = Vec::new();
        let made = random(8);
        for turn in 0..16 {
            operator.high_is_made |= turn >= made;
            let name = match random(2) {
                1 if operator.high_is_made => "high",
                _ => "low",
            };
            let pass = match random(6) {
                0 => Pass::Slow,
                1 => Pass::Fails,
                _ => Pass::Whole,
            };
            operator.pass(name, pass);
            let restarts = random(8) == 0;
            if restarts {
                operator.restart();
            }
            history.push((name, pass, restarts));
            assert!(operator.rings().len() < 2, "{run}: {history:?}");
        }
        for name in ["high", "low", "high", "high", "low"] {
            operator.pass(name, Pass::Whole);
        }
        assert_eq!(operator.rings(), ["high"], "{run}: {history:?}");
        assert!(!operator.ended.contains(&"high"), "{run}: {history:?}");
        assert!(operator.ended.len() < 2, "{run}: {history:?}");
    }
}

#[test]
fn nobody_ends_for_a_model_whose_passes_fail() {
    let mut operator = Operator::new();
    operator.pass("low", Pass::Whole);
    operator.high_is_made = true;
    // Its Service cannot be written, or its plan, which is tried out.
    for _ in 0..5 {
        operator.pass("high", Pass::Fails);
        operator.pass("low", Pass::Whole);
    }
    assert_eq!(operator.rings(), ["low"]);
    operator.pass("high", Pass::Whole);
    operator.pass("low", Pass::Whole);
    assert_eq!(
        (operator.rings().len(), &operator.ended[..]),
        (0, &["low"][..])
    );
    // If its plan is refused then, others keep away for a while.
    operator.pass("high", Pass::Fails);
    operator.pass("low", Pass::Whole);
    assert!(operator.rings().is_empty());
    operator.now += Duration::from_secs(60);
    operator.pass("low", Pass::Whole);
    assert_eq!(operator.rings(), ["low"]);
    // It does not end again before a pass has succeeded.
    operator.pass("high", Pass::Fails);
    operator.pass("low", Pass::Whole);
    assert_eq!(operator.rings(), ["low"]);
}
