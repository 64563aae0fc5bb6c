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

/// As large as the plan says while nobody is answered; then of the usual size, since their weights are copied for each.
#[test]
fn larger_chunks_are_of_the_usual_size_beside_tokens() {
    let mut world = World::new(Shape {
        contexts: 2,
        chunk_positions: 512,
        speculate: false,
        ..SMALL
    });
    world.scheduler.limits.whole_chunks = true;
    world.submit(1, &tokens(1, 600), 1, 1, 1);
    assert_eq!(chunks(&mut world), [512, 88]);

    world.submit(2, &long_prompts().next().unwrap(), 1, 200, 2);
    world.run_some(10);
    world.sent.clear();
    world.submit(3, &tokens(3, 300), 1, 1, 3);
    assert_eq!(chunks(&mut world), [MAX_FRAME_ROWS, MAX_FRAME_ROWS, 44]);
}

/// A GPU computes large ones in no time, and the processor the others.
#[test]
fn what_usual_chunks_take_is_not_told_by_larger_ones() {
    let mut world = World::new(Shape {
        contexts: 2,
        chunk_positions: 512,
        speculate: false,
        ..SMALL
    });
    (world.trip, world.row) = (16, 0);
    world.ask(1, &tokens(1, 512), 1);
    world.row = 3;
    for (id, rows) in [(2, 128), (3, 44)] {
        world.ask(id, &tokens(id, rows), 1);
    }
    world.submit(4, &long_prompts().next().unwrap(), 1, 200, 4);
    world.run_some(10);
    world.sent.clear();
    world.submit(5, &tokens(5, 2 * BESIDE_TOKENS), 1, 1, 5);
    assert_eq!(chunks(&mut world), [BESIDE_TOKENS; 2]);
}

#[test]
fn a_token_behind_a_chunk_tells_nothing_of_passes() {
    let mut world = World::new(Shape {
        contexts: 2,
        speculate: false,
        ..SMALL
    });
    world.submit(1, &long_prompts().next().unwrap(), 1, 200, 1);
    world.step(1);
    let answered = world.ring.flying()[0];
    let token_after = |world: &mut World, seconds| {
        world.now += Duration::from_secs(seconds);
        world.comes_home(answered);
    };
    let is_a_second = |world: &World| {
        let pass = world.scheduler.cost.of(1).as_secs_f64();
        assert!((pass - 1.0).abs() < 1e-6, "{pass}");
    };
    for _ in 0..3 {
        token_after(&mut world, 1);
    }
    is_a_second(&world);
    world.submit(2, &tokens(2, 60), 1, 1, 2);
    // This one left before the chunk, the next one behind it.
    token_after(&mut world, 30);
    is_a_second(&world);
    let flying = world.ring.flying().into_iter();
    for chunk in flying.filter(|session| *session != answered) {
        world.comes_home(chunk);
    }
    token_after(&mut world, 30);
    is_a_second(&world);
    world.run();
    world.is_quiet();
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
    assert!(whole(|member| member.gpu_from_rows = Some(128)));
    // Those of the usual size stay with the processor.
    assert!(!whole(|member| member.gpu_from_rows = Some(129)));

    let mut world = that_has_told();
    world.scheduler.limits.whole_chunks = true;
    world.submit(2, &long_prompts().next().unwrap(), 1, 200, 2);
    world.run_some(10);
    world.sent.clear();
    world.submit(3, &tokens(3, 2 * MAX_FRAME_ROWS), 1, 1, 3);
    assert_eq!(chunks(&mut world), [MAX_FRAME_ROWS; 2]);
}
