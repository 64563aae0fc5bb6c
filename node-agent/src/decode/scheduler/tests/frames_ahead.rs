//! Where links are long, frames are sent before it is known what came of those before them.

use super::*;

/// A ring on which many passes can be under way.
const FAR: Shape = Shape {
    members: 4,
    overlap: 10,
    ..SMALL
};

#[test]
fn frames_run_ahead_of_what_is_known_where_links_are_long() {
    let sent = |shape: Shape| {
        let mut world = World::new(shape);
        // All that it says follows from the last tokens.
        world.submit(1, &tokens(3, 20).repeat(8), 1, 300, 0);
        world.run();
        world.is_quiet();
        (world.ring.ran_ahead, world.finished[&1].choices[0].0.len())
    };
    let with_model = Shape {
        draft_model: true,
        ..FAR
    };
    let near = Shape { overlap: 1, ..FAR };
    let off = Shape {
        speculate: false,
        ..FAR
    };
    let answer = sent(off);
    assert_eq!((sent(near), answer.0), (answer, 0));
    for shape in [FAR, with_model] {
        let (ran_ahead, tokens) = sent(shape);
        assert_eq!(tokens, answer.1);
        assert!(ran_ahead > 10, "{ran_ahead} of {shape:?}");
    }
}

#[test]
fn no_more_is_under_way_than_machines_compute_in_a_trip() {
    let mut world = World::new(Shape {
        draft_model: true,
        overlap: 3,
        ..FAR
    });
    world.submit(1, &long_prompts().next().unwrap(), 1, 200, 0);
    let mut most = 0;
    for step in 0..400 {
        // As slow as a member: a frame for each token.
        world.scheduler.guess_seconds = 1e-3;
        world.step(3 * (step % 2));
        let flights = world.scheduler.flights.values().flatten();
        most = most.max(flights.filter(|one| one.brings.is_some()).count());
    }
    assert_eq!(most, 3);
}

#[test]
fn nothing_runs_ahead_of_a_prompts_chunks() {
    let mut world = World::new(Shape { contexts: 2, ..FAR });
    world.submit(1, &tokens(3, 20).repeat(8), 1, 300, 0);
    for _ in 0..20 {
        world.step(1);
    }
    world.submit(2, &tokens(2, 400), 1, 1, 0);
    let (before, first) = (
        world.ring.ran_ahead,
        *world.scheduler.running.keys().next().unwrap(),
    );
    for _ in 0..10 {
        assert!(world.scheduler.chunks_in_flight() > 1);
        world.comes_home(first);
    }
    assert_eq!(world.ring.ran_ahead, before);
    world.run();
    world.is_quiet();
}

#[test]
fn a_guess_that_comes_beside_a_prompts_chunks_is_not_sent() {
    let mut world = World::new(Shape {
        draft_model: true,
        contexts: 2,
        ..FAR
    });
    world.submit(1, &long_prompts().next().unwrap(), 1, 200, 0);
    let runs_ahead = |world: &World| {
        let asked = world.scheduler.asked.as_ref();
        asked.is_some_and(|asked| asked.count > 0 && !asked.waits)
    };
    let mut steps = 0;
    while !runs_ahead(&world) {
        world.step(steps);
        steps += 1;
    }
    world.submit(2, &tokens(2, 400), 1, 1, 0);
    let before = world.ring.ran_ahead;
    world.guesses();
    assert_eq!(world.ring.ran_ahead, before);
    world.run();
    world.is_quiet();
}
