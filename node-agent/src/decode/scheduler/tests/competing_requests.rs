//! Who runs, who waits and who is set aside where there is no room for all.

use super::*;

#[test]
fn requests_that_fill_the_context_together_are_all_answered() {
    let mut world = World::new(Shape {
        at_once: 16,
        ..SMALL
    });
    for id in 1..=16 {
        world.submit(id, &tokens(id, 100), 1, 500, 0);
    }
    world.run();
    world.is_quiet();
    assert_eq!(world.finished.len(), 16);
}

/// Two windows, a chunk and a block are seven blocks, and so are a prompt of 300 and an answer of 100.
#[test]
fn as_many_run_as_windows_have_room_for() {
    for together in [4, 16] {
        let mut world = World::new(Shape {
            context: 8192,
            at_once: 16,
            window: Some(128),
            windowed_sequences: together as i32,
            ..SMALL
        });
        for id in 1..=16 {
            world.submit(id, &tokens(id, 300), 1, 100, 0);
        }
        assert_eq!(world.scheduler.running.len(), together);
        world.run();
        world.is_quiet();
        assert_eq!(world.finished.len(), 16);
    }
}

/// Four may be answered at once, so room for an answer is a quarter of the context.
#[test]
fn as_many_begin_as_have_room_for_usual_answers() {
    for (prompt, together) in [(150, 2), (250, 1)] {
        let mut world = World::new(SMALL);
        for id in 1..=2 {
            world.submit(id, &tokens(id, prompt), 1, 500, 0);
        }
        assert_eq!(world.scheduler.requests(), (together, 2 - together));
        world.run();
        world.is_quiet();
    }
}

#[test]
fn one_that_was_set_aside_goes_on_where_it_was() {
    let mut world = World::new(Shape {
        speculate: false,
        ..SMALL
    });
    world.submit(1, &long_prompts().next().unwrap(), 1, 200, 0);
    world.run_some(60);
    world.scheduler.set_aside((1, 0), world.now);
    for action in std::mem::take(&mut world.scheduler.actions) {
        world.ring.apply(&action);
    }
    world.sent.clear();
    world.run();
    world.is_quiet();
    assert!(world.sent.len() > 100 && world.sent.iter().all(|&rows| rows == 1));
}

#[test]
fn the_oldest_is_never_set_aside() {
    let mut world = World::new(SMALL);
    // Both fit as expected, but their answers are longer.
    let (a, b) = (tokens(11, 60), tokens(5, 60));
    world.submit(1, &a, 1, 580, 0);
    world.submit(2, &b, 1, 580, 0);
    let mut steps = 0;
    while world.clients.contains_key(&1) {
        world.step(steps);
        steps += 1;
        let running = world.scheduler.running.values();
        assert!(!world.clients.contains_key(&1) || running.clone().any(|id| id.0 == 1));
    }
    world.run();
    world.is_quiet();
}

#[test]
fn choices_share_their_prompt() {
    let mut world = World::new(SMALL);
    world.submit(1, &tokens(1, 500), 4, 10, 0);
    world.run();
    world.is_quiet();
    assert_eq!(world.finished[&1].choices.len(), 4);
}

#[test]
fn all_choices_go_on_from_the_same_prompt() {
    let mut world = World::new(Shape {
        speculate: false,
        ..SMALL
    });
    world.sent.clear();
    world.submit(1, &tokens(1, 100), 4, 10, 0);
    world.step(1);
    let choices = world.clients[&1].choices.iter();
    let going_on = choices.filter(|(_, ended)| !ended).count();
    assert!(going_on > 1, "{going_on}");
    // Each sends its first token, and nothing of the prompt again.
    let (prompt, first_tokens) = world.sent.split_at(1);
    assert_eq!((prompt, first_tokens), (&[100][..], &vec![1; going_on][..]));
}

/// Steps until the first token of this request.
fn steps_to_first_token(world: &mut World, request: RequestId) -> usize {
    let waits = |world: &World| {
        let client = world.clients.get(&request);
        client.is_some_and(|client| client.choices[0].0.is_empty())
    };
    let mut steps = 0;
    while waits(world) {
        world.step(steps);
        steps += 1;
    }
    steps
}

#[test]
fn a_flood_of_prompts_leaves_others_their_turn() {
    let shape = Shape {
        members: 1,
        at_once: 12,
        contexts: 12,
        ..SMALL
    };
    let mut world = World::new(shape);
    for id in 1..=11 {
        world.submit(id, &tokens(id, 600), 1, 1, 0);
    }
    // Three chunks of its own, one of another's after each, and what is on its way.
    world.submit(12, &tokens(12, 300), 1, 1, 1);
    let steps = steps_to_first_token(&mut world, 12);
    assert!(steps <= 12, "{steps} steps");
    world.run();
    world.is_quiet();
}

#[test]
fn a_client_with_many_answers_gives_way_to_one_with_none() {
    let shape = Shape {
        at_once: 4,
        contexts: 5,
        ..SMALL
    };
    let mut world = World::new(shape);
    let long = long_prompts();
    for (id, prompt) in (1..=50).zip(long) {
        world.submit(id, &prompt, 1, 200, 0);
    }
    for step in 0..100 {
        world.step(step);
    }
    world.submit(51, &tokens(51, 100), 1, 5, 1);
    // Its chunk comes home beside the others' tokens; an answer of theirs would take hundreds of steps.
    let steps = steps_to_first_token(&mut world, 51);
    assert!(steps < 20, "{steps} steps");
    world.run();
    world.is_quiet();
    assert_eq!(world.finished.len(), 51);
}

/// A request for all places, and one whose prompt fills the context.
const LARGE: [(usize, usize); 2] = [(30, SMALL.at_once), (600, 1)];

#[test]
fn a_small_request_passes_one_that_does_not_fit() {
    for (length, choices) in LARGE {
        // Also one of its own client, which has none on the ring, or another.
        for [long, large, small] in [[1, 2, 3], [1, 2, 2], [1, 1, 1]] {
            let mut world = World::new(SMALL);
            world.submit(1, &long_prompts().next().unwrap(), 1, 200, long);
            world.run_some(10);
            world.submit(2, &tokens(2, length), choices, 5, large);
            world.submit(3, &tokens(3, 30), 1, 1, small);
            let steps = steps_to_first_token(&mut world, 3);
            assert!(steps < 10, "{steps} steps");
            assert!(world.clients.contains_key(&1), "the long answer goes on");
            assert_eq!(world.clients[&2].cached, None);
            world.run();
            world.is_quiet();
            assert_eq!(world.finished.len(), 3);
        }
    }
}

#[test]
fn one_that_does_not_fit_is_passed_so_often_and_no_more() {
    let ways = [false, true].map(|same_client| LARGE.map(|large| (same_client, large)));
    for (same_client, (length, choices)) in ways.into_iter().flatten() {
        let client = |id| if same_client { 1 } else { id };
        let mut world = World::new(SMALL);
        let mut prompts = long_prompts();
        let mut submit_small = |world: &mut World, id| {
            world.submit(id, &prompts.next().unwrap(), 1, 20, client(id));
        };
        // They end one after the other.
        for id in 1..=3 {
            submit_small(&mut world, id);
            world.run_some(5);
        }
        let large = 4;
        world.submit(large, &tokens(large, length), choices, 5, client(large));
        let waits = |world: &World| {
            let client = world.clients.get(&large);
            client.is_some_and(|client| client.cached.is_none())
        };
        let (mut last, mut steps) = (large, 0);
        while waits(&world) {
            // Three small ones are always there.
            while world.clients.len() < 4 {
                last += 1;
                submit_small(&mut world, last);
            }
            world.step(steps);
            steps += 1;
            assert!(steps < 5000, "it never begins");
        }
        let others = world.clients.iter().chain(&world.finished);
        let begun = others.filter(|(id, other)| **id > large && other.cached.is_some());
        assert_eq!(begun.count(), admission::PASSED_BY);
        world.run();
        world.is_quiet();
    }
}

#[test]
fn a_client_may_let_as_much_wait_as_others() {
    let mut world = World::new(SMALL);
    assert!(!world.scheduler.turns_away(7, PROMPT_TOKENS + 1));
    // Sixteen may wait.
    for id in 1..=30 {
        assert_eq!(world.scheduler.turns_away(7, 1), id > 17, "{id}");
        world.submit(id, &tokens(id, 500), 1, 50, 7);
    }
    for id in 31..=40 {
        assert_eq!(world.scheduler.turns_away(8, 1), id > 38, "{id}");
        world.submit(id, &tokens(id, 500), 1, 50, 8);
    }
    let prompts = world.scheduler.requests.values();
    let in_hand: usize = prompts.map(|one| one.prompt.len()).sum();
    assert!(!world.scheduler.turns_away(9, PROMPT_TOKENS - in_hand));
    assert!(world.scheduler.turns_away(9, PROMPT_TOKENS - in_hand + 1));
    world.run();
    world.is_quiet();
}

#[test]
fn choices_that_wait_for_their_first_one_hold_no_places() {
    let mut world = World::new(SMALL);
    // As long as there is room for: what comes later is set aside.
    let mut long = long_prompts();
    world.submit(1, &long.next().unwrap(), 1, 200, 7);
    world.submit(5, &tokens(5, 300), 4, 20, 7);
    world.submit(7, &tokens(9, 400), 2, 2, 8);
    world.scheduler.set_aside((7, 0), world.now);
    for action in std::mem::take(&mut world.scheduler.actions) {
        world.ring.apply(&action);
    }
    world.cancel(1);
    world.run();
    world.is_quiet();
    assert!(world.finished.contains_key(&5) && world.finished.contains_key(&7));
}

#[test]
fn nobody_gives_way_for_one_that_gains_nothing_by_it() {
    let shape = Shape {
        at_once: 8,
        contexts: 1,
        ..SMALL
    };
    let mut world = World::new(shape);
    for id in 1..=4 {
        world.submit(id, &tokens(id, 20), 1, 60, 0);
    }
    world.run_some(20);
    let running = world.scheduler.running.len();
    // All of the context, so even one other is too many.
    world.submit(9, &tokens(9, 600), 1, 40, 1);
    assert_eq!(world.scheduler.running.len(), running);
    world.run();
    world.is_quiet();
}

#[test]
fn whose_turn_it_was_is_forgotten_with_its_requests() {
    let mut world = World::new(Shape {
        contexts: 2,
        ..SMALL
    });
    world.submit(1, &tokens(1, 100), 1, 1, 7);
    world.run();
    world.submit(2, &long_prompts().next().unwrap(), 1, 200, 8);
    world.tell(Event::Tick, &[]);
    let clients: Vec<ClientId> = world.scheduler.turns.keys().copied().collect();
    assert_eq!(clients, [8]);
    world.run();
    world.is_quiet();
}
