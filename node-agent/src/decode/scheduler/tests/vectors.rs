//! Requests for the vector of a text, which are answered with states instead of tokens.

use super::*;
use crate::ring::MAX_FRAME_ROWS;

#[test]
fn the_mean_needs_every_state_also_of_a_kept_prefix() {
    let mut world = World::new(SMALL);
    let prompt = tokens(1, 300);
    world.ask(1, &prompt, 1);
    world.embed(2, &prompt, Read::AllStates);
    world.run();
    world.is_quiet();
    assert_eq!(world.finished[&2].cached, Some(0));
    assert_eq!(world.finished[&2].states.len(), 300);
}

#[test]
fn the_last_state_needs_no_kept_prefix_anew() {
    let mut world = World::new(SMALL);
    let prompt = tokens(1, 300);
    world.ask(1, &prompt, 1);
    for id in [2, 3] {
        world.embed(id, &prompt, Read::LastState);
        world.run();
        world.is_quiet();
    }
    assert_eq!(world.finished[&2].cached, Some(299));
}

#[test]
fn vectors_leave_nothing_of_their_texts_on_the_ring() {
    for read in [Read::LastState, Read::AllStates] {
        let mut world = World::new(SMALL);
        for id in 1..=20 {
            world.embed(id, &tokens(id, 1 + 9 * id as usize), read);
        }
        world.run();
        world.is_quiet();
        assert_eq!(world.finished.len(), 20);
        assert_eq!(world.ring.sessions(), 0);
    }
}

#[test]
fn a_cancelled_vector_frees_its_session() {
    let mut world = World::new(SMALL);
    world.embed(1, &tokens(1, 500), Read::AllStates);
    world.run_some(2);
    world.cancel(1);
    world.run();
    world.is_quiet();
    assert_eq!((world.finished.len(), world.ring.sessions()), (0, 0));
}

#[test]
fn a_mean_that_was_set_aside_begins_anew() {
    let mut world = World::new(SMALL);
    world.submit(1, &long_prompts().next().unwrap(), 1, 200, 0);
    world.embed(2, &tokens(2, 440), Read::AllStates);
    let session = |world: &World, id| {
        let running = world.scheduler.running.iter();
        let mut own = running.filter(|(_, other)| **other == (id, 0));
        own.next().map(|(session, _)| *session)
    };
    // Most of it is there when the answer needs the room.
    let own = session(&world, 2).unwrap();
    (0..3).for_each(|_| world.comes_home(own));
    assert_eq!(world.clients[&2].states.len(), 3 * MAX_FRAME_ROWS);
    let answering = session(&world, 1).unwrap();
    while session(&world, 2).is_some() {
        world.comes_home(answering);
    }
    world.run();
    world.is_quiet();
    assert_eq!(world.finished.len(), 2);
    assert_eq!(world.finished[&2].states.len(), 440);
}
