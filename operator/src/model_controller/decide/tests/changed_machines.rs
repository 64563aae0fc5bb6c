//! What becomes of a ring whose machine leaves, or is reached elsewhere.

use super::*;
use crate::model_controller::test_world::{GIB, machine, profile, world};

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
