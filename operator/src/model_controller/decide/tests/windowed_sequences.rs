//! For how many sequences layers with windows have memory, before and after agents are updated.

use std::slice;

use prima_crds::v1alpha1::ring_plan::KvDtype;

use super::*;
use crate::cluster::world::Machine;
use crate::model_controller::test_world::{machine, profile, world};

/// Of the model's 8 layers, all but the last have a window of 16.
fn with_windows(machines: &[Machine], plans: &[Arc<RingPlan>]) -> World {
    let mut there = world(machines, plans);
    let Resolution::Done(resolved) = &mut there.resolution else {
        panic!("not resolved");
    };
    let profile = &mut resolved.profile;
    profile.trained_context_length = 8192;
    (profile.windowed_layers, profile.attention_window) = (7, 16);
    profile.full_attention_layers = vec![7];
    there
}

/// One whose agent reads plans that say for how many.
fn updated(name: &str) -> Machine {
    let mut machine = machine(name);
    let status = profile(&mut machine).status.as_mut().unwrap();
    status.reads_windowed_sequences = true;
    machine
}

/// With its next agent.
fn elsewhere(mut machine: Machine) -> Machine {
    let status = profile(&mut machine).status.as_mut().unwrap();
    status.agent.as_mut().unwrap().address = "10.0.0.9".to_owned();
    machine
}

#[test]
fn windows_have_room_for_all_requests_if_all_agents_are_told() {
    let planned = |machines: &[Machine]| {
        let plan = written(decided(&with_windows(machines, &[])));
        (plan.spec.windowed_sequences, plan.spec.members[0].kv_bytes)
    };
    // Of a sequence: two windows, a chunk and a block.
    let kv_bytes = |sequences: i64| Some(256 * (8192 + 7 * sequences * (2 * 16 + 128 + 64)));
    assert_eq!(planned(&[updated("desk")]), (16, kv_bytes(16)));
    assert_eq!(planned(&[machine("desk")]), (4, kv_bytes(4)));
    // Each of them may become a member.
    let both = [updated("desk"), machine("pi4")];
    assert_eq!(planned(&both).0, 4);
}

#[test]
fn a_ring_keeps_the_windows_that_its_memory_was_planned_for() {
    let before = written(decided(&with_windows(&[machine("desk")], &[])));
    let there = with_windows(&[updated("desk")], slice::from_ref(&before));
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));

    let mut edited = there;
    Arc::get_mut(&mut edited.model).unwrap().spec.kv_dtype = KvDtype::Q8_0;
    assert_eq!(written(decided(&edited)).spec.windowed_sequences, 16);

    let moved = with_windows(&[elsewhere(updated("desk"))], slice::from_ref(&before));
    let moved = written(decided(&moved));
    assert_eq!(moved.spec.windowed_sequences, 4);
    let memory = |plan: &RingPlan| plan.spec.members[0].memory_bytes;
    assert_eq!(memory(&moved), memory(&before));
}

#[test]
fn an_agent_of_before_is_told_nothing_that_it_does_not_read() {
    let before = written(decided(&with_windows(&[updated("desk")], &[])));
    assert_eq!(before.spec.windowed_sequences, 16);
    for (agent, sequences) in [(updated("desk"), 16), (machine("desk"), 4)] {
        let there = with_windows(&[elsewhere(agent)], slice::from_ref(&before));
        let next = written(decided(&there));
        assert_eq!(next.spec.windowed_sequences, sequences);
    }
}
