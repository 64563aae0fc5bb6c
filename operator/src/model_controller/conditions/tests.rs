//! What each state of a Model reads like.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use prima_crds::v1alpha1::model::NodeShare;
use serde_json::{Value, json};

use super::*;
use crate::model_controller::test_world::{GIB, add_draft, decision, machine, ring, world};

/// An encrypted plan of this generation for `desk` and `pi4`, and what these say of it.
fn plan(generation: i64, states: &[Value]) -> Arc<RingPlan> {
    let mut plan = RingPlan::clone(&ring(&[(0, 2), (5, 6)], GIB, 0));
    plan.spec.generation = generation;
    let mut other = plan.spec.members[0].clone();
    other.name = "pi4".to_owned();
    other.windows.remove(1);
    plan.spec.members.push(other);
    for member in &mut plan.spec.members {
        member.public_key_sha256 = Some("0".repeat(64));
    }
    let named = states.iter().zip(["desk", "pi4"]).map(|(state, name)| {
        let mut state = state.clone();
        state["name"] = name.into();
        state
    });
    let status = json!({"members": named.collect::<Vec<_>>()});
    plan.status = Some(serde_json::from_value(status).unwrap());
    Arc::new(plan)
}

fn state(name: &str) -> Value {
    json!({"state": name, "message": "so it is"})
}

fn keep(plan: &Arc<RingPlan>) -> DecisionKind {
    DecisionKind::Keep(plan.clone())
}

/// Each condition as `Kind=Status Reason: message`.
fn told(world: &World, decision: &Decision, ring: &Ring) -> Vec<String> {
    let made = of(world, decision, ring, &decide::State::default(), &[]);
    let line = |one: &Condition| {
        format!(
            "{}={} {}: {}",
            one.type_, one.status, one.reason, one.message
        )
    };
    made.iter().map(line).collect()
}

/// With all that a ring of this plan has to say.
fn of_plan(plan: &Arc<RingPlan>, serves: bool) -> Vec<String> {
    let ring = Ring {
        newest: Some(plan.clone()),
        serving: serves.then(|| plan.clone()),
    };
    told(&world(&[], &[]), &decision(keep(plan)), &ring)
}

const NO_RING: Ring = Ring {
    newest: None,
    serving: None,
};

#[test]
fn a_ring_that_answers_is_all_well() {
    let plan = plan(3, &[state("Ready"), state("Loaded")]);
    assert_eq!(
        of_plan(&plan, true),
        [
            "Resolved=True Resolved: /models/m.gguf: 8.0 GiB, 8 layers",
            "Profiled=True Profiled: all machines are measured",
            "Planned=True Planned: desk [0, 2) [5, 6) -> pi4 [0, 2)",
            "Downloaded=True Downloaded: every machine has its part of the file",
            "Loaded=True Loaded: every machine runs its layers",
            "Ready=True Ready: answers on desk [0, 2) [5, 6) -> pi4 [0, 2)",
            "Degraded=False AsPlanned: the ring is as planned",
        ]
    );
}

#[test]
fn a_draft_model_is_resolved_too() {
    let mut world = world(&[], &[]);
    add_draft(&mut world, &[]);
    let all = told(&world, &decision(keep(&plan(1, &[]))), &NO_RING);
    let draft = "; draft model /models/d.gguf: 1.0 GiB, 2 layers";
    assert!(all[0].ends_with(draft), "{}", all[0]);
}

#[test]
fn members_on_their_way_say_how_far_they_are() {
    let fetching =
        json!({"state": "Fetching", "message": "", "fetchedBytes": GIB, "totalBytes": 4 * GIB});
    let all = of_plan(&plan(1, &[fetching]), false);
    let lacking =
        "desk: fetching, 1.0 GiB of 4.0 GiB (25 %); pi4: its agent has not taken up the plan yet";
    assert_eq!(
        all[3..],
        [
            format!("Downloaded=False Downloading: {lacking}"),
            format!("Loaded=False Downloading: {lacking}"),
            format!("Ready=False Downloading: {lacking}"),
            "Degraded=False AsPlanned: the ring is as planned".to_owned(),
        ]
    );
    let all = of_plan(&plan(1, &[state("Loading"), state("Loaded")]), false);
    assert_eq!(
        all[3..6],
        [
            "Downloaded=True Downloaded: every machine has its part of the file",
            "Loaded=False Loading: desk: loading: so it is",
            "Ready=False Loading: desk: loading: so it is",
        ]
    );
    let all = of_plan(&plan(1, &[]), false);
    assert!(
        all[5].starts_with("Ready=False AgentsStart: desk: its agent"),
        "{}",
        all[5]
    );
}

#[test]
fn a_failed_member_is_the_reason_before_all_others() {
    let all = of_plan(&plan(1, &[state("Fetching"), state("Failed")]), false);
    let lacking = "desk: fetching: so it is; pi4: failed: so it is";
    for (at, kind) in [(3, "Downloaded"), (4, "Loaded"), (5, "Ready")] {
        assert_eq!(all[at], format!("{kind}=False MemberFailed: {lacking}"));
    }
}

#[test]
fn a_ring_of_one_is_explained_where_there_are_more_machines() {
    let (desk, pi4) = (machine("desk"), machine("pi4"));
    let ring_of_one = ring(&[(0, 8)], GIB, 0);
    let planned = |world: &World| {
        let decision = decision(keep(&ring_of_one));
        let there = Ring {
            newest: Some(ring_of_one.clone()),
            serving: None,
        };
        told(world, &decision, &there)[2].clone()
    };
    let explained = planned(&world(&[desk.clone(), pi4.clone()], &[]));
    assert!(
        explained.contains("spec.minNodes asks for more"),
        "{explained}"
    );
    assert_eq!(
        planned(&world(std::slice::from_ref(&desk), &[])),
        "Planned=True Planned: desk [0, 8)"
    );
    let mut asked = world(&[desk, pi4], &[]);
    Arc::get_mut(&mut asked.model).unwrap().spec.min_nodes = Some(1);
    assert_eq!(planned(&asked), "Planned=True Planned: desk [0, 8)");
}

#[test]
fn the_summary_is_the_reason_with_percent_of_all_members() {
    let summary_of = |plan: &Arc<RingPlan>, serving: Option<Arc<RingPlan>>| {
        let ring = Ring {
            newest: Some(plan.clone()),
            serving,
        };
        let made = of(
            &world(&[], &[]),
            &decision(keep(plan)),
            &ring,
            &decide::State::default(),
            &[],
        );
        summary(&made, Some(plan)).unwrap()
    };
    let part = |state: &str, done: i64, total: i64| json!({"state": state, "fetchedBytes": done, "totalBytes": total});
    let fetching = plan(1, &[part("Fetching", 10, 100), part("Loaded", 50, 50)]);
    assert_eq!(summary_of(&fetching, None), "Downloading 40 %");
    let unknown = plan(1, &[state("Fetching")]);
    assert_eq!(summary_of(&unknown, None), "Downloading 0 %");
    let connecting = plan(1, &[state("Loaded"), state("Loaded")]);
    assert_eq!(summary_of(&connecting, None), "Connecting");
    let well = plan(1, &[state("Ready"), state("Loaded")]);
    assert_eq!(summary_of(&well, Some(well.clone())), "Ready");
    let failed = plan(1, &[state("Ready"), state("Failed")]);
    assert_eq!(
        summary_of(&failed, Some(failed.clone())),
        "Ready, MemberFailed"
    );
    assert_eq!(summary_of(&fetching, Some(well)), "Ready");
}

#[test]
fn where_all_are_there_rank_0_says_what_is_waited_for() {
    let all = of_plan(&plan(1, &[state("Loaded"), state("Loaded")]), false);
    assert_eq!(all[5], "Ready=False Connecting: desk: loaded: so it is");
}

#[test]
fn a_member_that_failed_degrades_the_ring() {
    let failed = json!({"state": "Failed", "message": "no room", "retryAfterSeconds": 8});
    let all = of_plan(&plan(1, &[state("Ready"), failed]), true);
    let said = "pi4: failed: no room (tried again in 8 s)";
    assert_eq!(all[6], format!("Degraded=True MemberFailed: {said}"));
    assert!(all[5].starts_with("Ready=True"), "{}", all[5]);
}

#[test]
fn a_machine_that_is_out_is_why_a_ring_is_not_ready() {
    let plan = plan(1, &[state("Loaded"), state("Loaded")]);
    let out = |name: &str| NodeShare {
        name: name.to_owned(),
        in_ring: false,
        why: "lost".to_owned(),
        fetched_bytes: None,
        total_bytes: None,
    };
    let decision = Decision {
        out: vec![out("pi4"), out("no-member")],
        ..decision(keep(&plan))
    };
    let ring = Ring {
        newest: Some(plan),
        serving: None,
    };
    let all = told(&world(&[], &[]), &decision, &ring);
    assert_eq!(all[5], "Ready=False MachineOut: pi4: lost");
}

#[test]
fn a_rank_0_that_is_not_reached_is_not_ready() {
    let mut old = RingPlan::clone(&plan(1, &[state("Ready")]));
    let mut new = RingPlan::clone(&plan(2, &[state("Ready"), state("Loaded")]));
    old.metadata.uid = Some("old".to_owned());
    new.metadata.uid = Some("new".to_owned());
    let (old, new) = (Arc::new(old), Arc::new(new));
    let mut world = world(&[], &[]);
    let why = "its HTTP endpoint at 10.0.0.1:9400: no answer within 2 s";
    let not_reached = NotReady::NotReached(why.to_owned());
    world.unready = Arc::new([("new".to_owned(), not_reached)].into());
    let ring = |serving| Ring {
        newest: Some(new.clone()),
        serving,
    };
    let all = told(&world, &decision(keep(&new)), &ring(None));
    let said = format!("Ready=False NotReached: rank 0 does not answer: {why}");
    assert_eq!(all[5], said);
    let all = told(&world, &decision(keep(&new)), &ring(Some(old)));
    let said = "generation 1 serves until generation 2 answers again";
    assert_eq!(all[6], format!("Degraded=True Replacing: {said}"));
    // One that is reached, and says so itself, stands still most often.
    let said = NotReady::Said("no sign of life from member pi4".to_owned());
    world.unready = Arc::new([("new".to_owned(), said)].into());
    let all = told(&world, &decision(keep(&new)), &ring(None));
    let said = "Ready=False Connecting: rank 0 says: no sign of life from member pi4";
    assert_eq!(all[5], said);
}

#[test]
fn a_way_that_loses_packets_is_named_and_takes_nothing_back() {
    let mut plan = RingPlan::clone(&plan(1, &[state("Ready"), state("Loaded")]));
    plan.metadata.uid = Some("plan".to_owned());
    let plan = Arc::new(plan);
    let mut world = world(&[], &[]);
    world.lossy = ["plan".to_owned()].into();
    let ring = Ring {
        newest: Some(plan.clone()),
        serving: Some(plan.clone()),
    };
    let all = told(&world, &decision(keep(&plan)), &ring);
    assert!(all[5].starts_with("Ready=True Ready: "), "{}", all[5]);
    let said = "packets get lost between the operator and desk: look at its cable or Wi-Fi";
    assert_eq!(all[6], format!("Degraded=True PacketsLost: {said}"));
}

#[test]
fn machines_apart_are_named_with_what_to_look_at() {
    let plan = plan(1, &[state("Loaded"), state("Loaded")]);
    let apart = |pair: [&str; 2]| Apart {
        pair: pair.map(str::to_owned),
        why: "desk says: waiting for member pi4".to_owned(),
        planned: false,
        told_by_ring: true,
    };
    let decided = |pair| Decision {
        apart: vec![apart(pair)],
        ..decision(keep(&plan))
    };
    let ring = |serving: Option<&Arc<RingPlan>>| Ring {
        newest: Some(plan.clone()),
        serving: serving.cloned(),
    };
    let told = |decision: &Decision, serving| told(&world(&[], &[]), decision, &ring(serving));
    let said = "desk and pi4 do not reach each other, though both are heard of (desk says: waiting for member pi4): \
        look at the cables or the Wi-Fi between them, at the firewalls of both, and whether the Wi-Fi keeps its clients apart";
    let all = told(&decided(["desk", "pi4"]), None);
    assert_eq!(all[5], format!("Ready=False MachinesApart: {said}"));
    assert_eq!(all[6], format!("Degraded=True MachinesApart: {said}"));
    // Of this ring, only one of them is a member: it waits for something else, or for nothing.
    let other = decided(["laptop", "pi4"]);
    assert!(told(&other, None)[5].starts_with("Ready=False Connecting: "));
    let all = told(&other, Some(&plan));
    assert!(all[5].starts_with("Ready=True "), "{}", all[5]);
    assert!(all[6].starts_with("Degraded=True MachinesApart: laptop and pi4 do"));
    // No ring goes round them.
    let none = Decision {
        kind: DecisionKind::NoPlace {
            reason: MACHINES_APART,
            message: "there is no other ring".to_owned(),
            awaits: decide::AwaitedRoom::Any,
        },
        ..decided(["desk", "pi4"])
    };
    let all = told(&none, None);
    let planned = format!("Planned=False MachinesApart: there is no other ring; {said}");
    assert_eq!(all[2], planned);
    assert_eq!(all[5], format!("Ready=False MachinesApart: {said}"));
    // A Wi-Fi keeps all of its clients apart.
    let many =
        ["nas", "pi4", "tablet", "phone", "laptop", "tv"].map(|other| apart(["desk", other]));
    let many = Decision {
        apart: many.to_vec(),
        ..decision(keep(&plan))
    };
    let all = told(&many, Some(&plan));
    let degraded = &all[6];
    assert!(
        degraded.ends_with("its clients apart; and 2 more pairs"),
        "{degraded}"
    );
    assert_eq!(degraded.matches(" do not reach each other").count(), 4);
}

/// A guests' Wi-Fi may keep two apart for good. Every ring goes round them.
#[test]
fn two_that_never_met_degrade_no_ring() {
    let mut old = RingPlan::clone(&plan(1, &[state("Ready"), state("Loaded")]));
    old.metadata.uid = Some("old".to_owned());
    let old = Arc::new(old);
    let pair = ["laptop", "pi4"].map(str::to_owned);
    let decided = |kind: DecisionKind| Decision {
        apart: vec![Apart::never_measured(pair.clone())],
        ..decision(kind)
    };
    let degraded = |world: &World, newest: &Arc<RingPlan>| {
        let ring = Ring {
            newest: Some(newest.clone()),
            serving: Some(old.clone()),
        };
        told(world, &decided(keep(newest)), &ring)[6].clone()
    };
    let mut there = world(&[], &[]);
    let fine = "Degraded=False AsPlanned: the ring is as planned";
    assert_eq!(degraded(&there, &old), fine);
    // Nor do they hide what is.
    there.lossy = ["old".to_owned()].into();
    let lossy = degraded(&there, &old);
    assert!(lossy.starts_with("Degraded=True PacketsLost: "), "{lossy}");
    let newer = plan(2, &[state("Loading"), state("Loading")]);
    let replaced = degraded(&there, &newer);
    assert!(
        replaced.starts_with("Degraded=True Replacing: "),
        "{replaced}"
    );
    // Where there is no ring because of them, it says so.
    let planned = |reason| {
        let none = DecisionKind::NoPlace {
            reason,
            message: "there is no other ring".to_owned(),
            awaits: decide::AwaitedRoom::Any,
        };
        let ring = Ring {
            newest: None,
            serving: None,
        };
        told(&there, &decided(none), &ring)[2].clone()
    };
    let none = planned(MACHINES_APART);
    let said = "Planned=False MachinesApart: there is no other ring; laptop and pi4 do not reach each other";
    assert!(none.starts_with(said), "{none}");
    // They are not why there is none.
    let said = "Planned=False DoesNotFit: there is no other ring";
    assert_eq!(planned("DoesNotFit"), said);
}

#[test]
fn only_ready_is_taken_back() {
    let answering = plan(2, &[state("Ready"), state("Loaded")]);
    let mut world = world(&[], &[]);
    let ring = Ring {
        newest: Some(answering.clone()),
        serving: Some(answering.clone()),
    };
    let decided = decide::State::default();
    let conditions = of(&world, &decision(keep(&answering)), &ring, &decided, &[]);
    let model = Arc::make_mut(&mut world.model);
    let status = json!({"conditions": conditions, "planGeneration": 2, "summary": "Ready"});
    model.status = Some(serde_json::from_value(status).unwrap());
    assert!(!found_silent(model));

    let broken = plan(2, &[state("Ready"), state("Failed")]);
    let withdrawn = Withdrawn::of(model, Some(&broken), &[], None).unwrap();
    let ready = withdrawn.ready().unwrap();
    let said = (&*ready.status, &*ready.reason, &*ready.message);
    assert_eq!(said, ("False", "MemberFailed", "pi4: failed: so it is"));
    assert_eq!(withdrawn.summary.as_deref(), Some("MemberFailed"));
    assert_eq!(&withdrawn.conditions[5], ready);
    let others = |conditions: &[Condition]| [&conditions[..5], &conditions[6..]].concat();
    assert_eq!(others(&withdrawn.conditions), others(&conditions));

    let says = |gone: &[&str], unready: Option<NotReady>| {
        let withdrawn = Withdrawn::of(model, Some(&answering), gone, unready.as_ref()).unwrap();
        let ready = withdrawn.ready().unwrap();
        let said = format!("{}: {}", ready.reason, ready.message);
        let mut after = model.clone();
        after.status.as_mut().unwrap().conditions = withdrawn.conditions;
        // There is nothing left to take back.
        assert!(Withdrawn::of(&after, Some(&answering), gone, unready.as_ref()).is_none());
        (said, found_silent(&after))
    };
    let said = says(&["pi4"], None);
    let expected = "MachineOut: gone, or reached elsewhere now: pi4";
    assert_eq!(said, (expected.to_owned(), true));
    let not_reached = NotReady::NotReached("refused".to_owned());
    let said = says(&[], Some(not_reached));
    let expected = "NotReached: rank 0 does not answer: refused";
    assert_eq!(said, (expected.to_owned(), true));

    // Its ring has ended, and there is no other yet.
    let withdrawn = Withdrawn::of(model, None, &[], None).unwrap();
    assert_eq!(withdrawn.ready().unwrap().reason, "Planning");
    assert_eq!(withdrawn.summary.as_deref(), Some("Planning"));
}

#[test]
fn the_old_ring_serves_until_the_new_one_has_loaded() {
    let (old, new) = (plan(1, &[state("Ready")]), plan(2, &[]));
    let ring = Ring {
        newest: Some(new.clone()),
        serving: Some(old),
    };
    let all = told(&world(&[], &[]), &decision(keep(&new)), &ring);
    assert!(all[5].starts_with("Ready=True"), "{}", all[5]);
    let said = "generation 1 serves until generation 2 has loaded";
    assert_eq!(all[6], format!("Degraded=True Replacing: {said}"));
}

#[test]
fn an_old_ring_that_ended_first_is_said_until_the_new_answers() {
    let plan = plan(4, &[]);
    let mut decided = decide::State::default();
    decided.ended_first = Some((4, "a machine is lost".to_owned()));
    let reason = |serves: bool| {
        let ring = Ring {
            newest: Some(plan.clone()),
            serving: serves.then(|| plan.clone()),
        };
        let kept = decision(keep(&plan));
        let made = of(&world(&[], &[]), &kept, &ring, &decided, &[]);
        made[2].reason.clone()
    };
    assert_eq!(reason(false), "OldRingEndedFirst");
    assert_eq!(reason(true), "Planned");
}

#[test]
fn a_ring_that_has_to_end_first_is_not_ready() {
    let old = plan(3, &[state("Ready"), state("Loaded")]);
    let new = decision(DecisionKind::New {
        spec: Box::new(plan(4, &[]).spec.clone()),
        retire_first: true,
        why: "the Model was changed".to_owned(),
    });
    let ring = Ring {
        newest: Some(old),
        serving: None,
    };
    let said = "generation 3 ends, since the machines lack the memory for two rings (the Model was changed)";
    let all = told(&world(&[], &[]), &new, &ring);
    assert_eq!(all[5], format!("Ready=False Planning: {said}"));
}

#[test]
fn without_a_ring_every_condition_says_why() {
    let impossible = || {
        decision(DecisionKind::NoPlace {
            reason: "DoesNotFit",
            message: "2 GiB short".to_owned(),
            awaits: decide::AwaitedRoom::Any,
        })
    };
    let mut unresolved = world(&[], &[]);
    for (resolution, status, reason, message) in [
        (
            Resolution::Failed("no such file".to_owned()),
            "False",
            "ResolveFailed",
            "no such file",
        ),
        (
            Resolution::Awaited("asking".to_owned()),
            "Unknown",
            "Resolving",
            "asking",
        ),
    ] {
        unresolved.resolution = resolution;
        let all = told(&unresolved, &impossible(), &NO_RING);
        assert_eq!(all[0], format!("Resolved={status} {reason}: {message}"));
        assert_eq!(all[5], format!("Ready=False {reason}: {message}"));
    }
    let resolved = world(&[], &[]);
    let all = told(&resolved, &impossible(), &NO_RING);
    assert_eq!(all[2], "Planned=False DoesNotFit: 2 GiB short");
    assert_eq!(all[5], "Ready=False DoesNotFit: 2 GiB short");
    assert_eq!(all[6], "Degraded=False NoRing: there is no ring");
    // A Model that is suspended needs no file.
    let suspended = decision(DecisionKind::Released {
        reason: "Suspended",
        message: "as the Model asks".to_owned(),
    });
    unresolved.resolution = Resolution::Awaited("asking".to_owned());
    let all = told(&unresolved, &suspended, &NO_RING);
    assert_eq!(all[5], "Ready=False Suspended: as the Model asks");
}

#[test]
fn a_ring_that_cannot_be_planned_again_is_degraded() {
    let plan = plan(1, &[state("Ready"), state("Loaded")]);
    let impossible = decision(DecisionKind::Impossible {
        reason: "NoMachines",
        message: "none is left".to_owned(),
    });
    let ring = Ring {
        newest: Some(plan.clone()),
        serving: Some(plan),
    };
    let all = told(&world(&[], &[]), &impossible, &ring);
    assert_eq!(all[6], "Degraded=True CannotReplan: none is left");
}

#[test]
fn machines_that_are_waited_for_are_named() {
    let waiting = Decision {
        awaited: vec!["desk is measured".to_owned(), "so is pi4".to_owned()],
        fails: false,
        ..decision(keep(&plan(1, &[])))
    };
    let all = told(&world(&[], &[]), &waiting, &NO_RING);
    let said = "desk is measured; so is pi4";
    assert_eq!(all[1], format!("Profiled=False AwaitingMachines: {said}"));
}

/// One of long ago: its second.
fn before(kind: &str, status: &str, second: i64) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: "Before".to_owned(),
        message: String::new(),
        last_transition_time: Time(Timestamp::from_second(second).unwrap()),
        observed_generation: None,
    }
}

/// The seconds of what is Resolved=True and Profiled=True now.
fn seconds(shown: Vec<Condition>, said: &[Condition]) -> [i64; 2] {
    let mut world = world(&[], &[]);
    let model = Arc::get_mut(&mut world.model).unwrap();
    model.status = Some(ModelStatus {
        conditions: shown,
        ..ModelStatus::default()
    });
    let decision = decision(keep(&plan(1, &[])));
    let made = of(&world, &decision, &NO_RING, &decide::State::default(), said);
    let second = |one: &Condition| {
        assert_eq!(one.status, "True", "{one:?}");
        one.last_transition_time.0.as_second()
    };
    [second(&made[0]), second(&made[1])]
}

#[test]
fn a_condition_keeps_its_time_while_its_status_stays() {
    let shown = vec![
        before("Resolved", "True", 1000),
        before("Profiled", "False", 1000),
    ];
    let [resolved, profiled] = seconds(shown, &[]);
    assert_eq!(resolved, 1000);
    assert!(profiled > 1000);
}

#[test]
fn a_watch_that_lags_behind_changes_no_times() {
    let now = Timestamp::now().as_second();
    // It shows what was so before, or what was said with another time.
    let shown = || {
        vec![
            before("Resolved", "False", 1000),
            before("Profiled", "True", 1000),
        ]
    };
    let said = ["Resolved", "Profiled"].map(|kind| before(kind, "True", 1001));
    assert_eq!(seconds(shown(), &said), [1001, 1001]);
    // It is the first to show what another operator has said since.
    let said = ["Resolved", "Profiled"].map(|kind| before(kind, "True", 999));
    let [resolved, profiled] = seconds(shown(), &said);
    assert!(resolved >= now);
    assert_eq!(profiled, 1000);
    // What is so again was not in between.
    let said = [before("Profiled", "False", 1001)];
    let [_, profiled] = seconds(shown(), &said);
    assert!(profiled >= now);
}

#[test]
fn a_message_is_as_long_as_the_api_server_takes() {
    let mut world = world(&[], &[]);
    world.resolution = Resolution::Failed("é".repeat(9000));
    let decision = decision(keep(&plan(1, &[])));
    let made = of(&world, &decision, &NO_RING, &decide::State::default(), &[]);
    assert_eq!(made[0].message.chars().count(), 8000);
}
