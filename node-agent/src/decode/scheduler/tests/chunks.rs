//! How many rows of a prompt go together.

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingMember, RingPlanSpec};

use super::*;
use crate::ring::MAX_FRAME_ROWS;

/// Rows that take four times what a pass without any does, where a row takes 3 ms and a pass 16 ms.
const BESIDE_TOKENS: usize = 21;

/// A ring that has told what chunks take. It sends no drafts, so all frames but tokens are chunks.
fn that_has_told() -> World {
    let mut world = World::new(Shape {
        contexts: 2,
        speculate: false,
        ..SMALL
    });
    (world.trip, world.row) = (16, 3);
    world.ask(1, &tokens(1, 300), 1);
    world
}

/// Rows of the chunks that were sent while all was answered that is asked.
fn chunks(world: &mut World) -> Vec<usize> {
    world.run();
    world.is_quiet();
    world.sent.retain(|&rows| rows > 1);
    std::mem::take(&mut world.sent)
}

#[test]
fn chunks_are_small_beside_tokens_and_whole_without() {
    let mut world = that_has_told();
    world.sent.clear();
    world.submit(2, &tokens(2, 300), 1, 1, 2);
    assert_eq!(chunks(&mut world), [MAX_FRAME_ROWS, MAX_FRAME_ROWS, 44]);

    world.submit(3, &long_prompts().next().unwrap(), 1, 200, 3);
    world.run_some(10);
    world.sent.clear();
    world.submit(4, &tokens(4, 300), 1, 1, 4);
    let mut expected = vec![BESIDE_TOKENS; 14];
    expected.push(6);
    assert_eq!(chunks(&mut world), expected);
}

/// Where a slow chunk was believed, chunks had the fewest rows.
#[test]
fn one_slow_chunk_changes_no_others() {
    let mut world = World::new(Shape {
        contexts: 2,
        speculate: false,
        ..SMALL
    });
    (world.trip, world.row) = (5000, 3);
    world.submit(1, &tokens(1, 300), 1, 1, 1);
    world.step(1);
    world.trip = 16;
    world.run();
    world.submit(2, &long_prompts().next().unwrap(), 1, 200, 2);
    world.run_some(10);
    world.sent.clear();
    world.submit(3, &tokens(3, 2 * BESIDE_TOKENS), 1, 1, 3);
    assert_eq!(chunks(&mut world), [BESIDE_TOKENS; 2]);
}

#[test]
fn chunks_are_whole_beside_the_last_chunks_of_prompts() {
    let mut world = that_has_told();
    world.sent.clear();
    for id in [2, 3] {
        world.submit(id, &tokens(id, 300), 1, 1, id);
    }
    let mut rows = chunks(&mut world);
    rows.sort_unstable();
    let whole = [MAX_FRAME_ROWS; 4];
    assert_eq!(rows, [&[44; 2][..], &whole].concat());
}

#[test]
fn chunks_for_vectors_are_small_beside_tokens_only() {
    let mut world = that_has_told();
    world.sent.clear();
    for id in [2, 3] {
        world.embed(id, &tokens(id, 128), Read::AllStates);
    }
    assert_eq!(chunks(&mut world), [MAX_FRAME_ROWS; 2]);

    world.submit(4, &long_prompts().next().unwrap(), 1, 200, 4);
    world.run_some(10);
    world.sent.clear();
    world.embed(5, &tokens(5, 2 * BESIDE_TOKENS), Read::AllStates);
    assert_eq!(chunks(&mut world), [BESIDE_TOKENS; 2]);
}

#[test]
fn chunks_are_whole_until_they_have_told_what_they_take() {
    let mut world = World::new(Shape {
        contexts: 2,
        speculate: false,
        ..SMALL
    });
    (world.trip, world.row) = (16, 3);
    world.submit(1, &long_prompts().next().unwrap(), 1, 200, 1);
    world.run_some(10);
    world.sent.clear();
    world.submit(2, &tokens(2, 2 * MAX_FRAME_ROWS), 1, 1, 2);
    assert_eq!(chunks(&mut world), [MAX_FRAME_ROWS; 2]);
}

#[test]
fn chunks_are_whole_where_weights_come_or_go_for_each() {
    let whole = |change: fn(&mut RingMember)| {
        let addresses = ["h0:1", "h1:1"].map(str::to_owned);
        let model = PlannedModel::new("m", "m.gguf", 1, 2);
        let mut plan = RingPlanSpec::cut(model, 640, &addresses, &[1, 2]);
        change(&mut plan.members[1]);
        let options = Options {
            grace: DEADLINE,
            outlast: Duration::ZERO,
            speculate: false,
            run_ahead: false,
            draft_model: false,
        };
        Scheduler::new(&plan, None, 1, options).limits.whole_chunks
    };
    assert!(!whole(|_| {}));
    assert!(!whole(|member| member.read_bytes_per_token = Some(0)));
    assert!(whole(|member| member.read_bytes_per_token = Some(1)));
    assert!(whole(|member| member.gpu_from_rows = Some(32)));

    let mut world = that_has_told();
    world.scheduler.limits.whole_chunks = true;
    world.submit(2, &long_prompts().next().unwrap(), 1, 200, 2);
    world.run_some(10);
    world.sent.clear();
    world.submit(3, &tokens(3, 2 * MAX_FRAME_ROWS), 1, 1, 3);
    assert_eq!(chunks(&mut world), [MAX_FRAME_ROWS; 2]);
}
