//! When the planner is asked, and for how long its answer counts.

use prima_crds::v1alpha1::node_profile::NodeProfile;

use super::*;
use crate::model_controller::test_world::{machine, profile, world};

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
fn who_edits_a_model_whose_ring_answers_goes_before_nobody() {
    let desk = [machine("desk")];
    let mut plan = RingPlan::clone(&written(decided(&world(&desk, &[]))));
    plan.spec.context_length += 1;
    for (state, urgent) in [("Ready", false), ("Loaded", true)] {
        let status = json!({"members": [{"name": "desk", "state": state}]});
        plan.status = Some(serde_json::from_value(status).unwrap());
        let there = world(&desk, &[Arc::new(plan.clone())]);
        let (decision, _) = decide(&there, &State::default(), Instant::now());
        // Its ring is needed all the same: others do not take the room meanwhile.
        assert!(matches!(decision.standing(&there), Standing::Undecided));
        let DecisionKind::Ask(question) = decision.kind else {
            panic!("nobody is asked");
        };
        assert!(question.needed);
        assert_eq!(question.urgent, urgent, "{state}");
    }
}

#[test]
fn no_more_answers_are_remembered_than_a_plan_takes() {
    let mut state = State::default();
    let answer = |nth: usize| Answer {
        fingerprint: nth.to_string(),
        plan: Err(NoRing {
            reason: "",
            message: String::new(),
        }),
    };
    for nth in 0..ANSWERS + 2 {
        state.learn(answer(nth));
    }
    assert_eq!(state.answers.len(), ANSWERS);
    assert!(state.answer_to("1").is_none() && state.answer_to("2").is_some());
    // The same once more takes nobody's place.
    state.learn(answer(5));
    assert_eq!(state.answers.len(), ANSWERS);
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
