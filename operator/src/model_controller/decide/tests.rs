//! Each condition, and the order of preference: a file for each subject.

mod asking_the_planner;
mod changed_machines;
mod changed_models;
mod failing_machines;
mod faster_rings;
mod machines_apart;
mod room;
mod who_takes_part;
mod windowed_sequences;

use serde_json::json;

use super::*;
use crate::model_controller::test_world::GIB;

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
