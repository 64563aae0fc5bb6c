//! What was computed for a text serves every text that begins alike: which parts are kept, for whom, and for how long.

use prima_crds::v1alpha1::ring_plan::KV_BLOCK_POSITIONS;

use super::*;

#[test]
fn the_next_turn_computes_only_what_is_new() {
    let mut world = World::new(SMALL);
    let first = world.ask(1, &tokens(1, 200), 30);
    assert_eq!(first.cached, Some(0));
    let second = world.ask(2, &first.next_turn(&tokens(2, 20)), 30);
    // An answer that reached its limit: its last token never went round.
    let answer = &first.choices[0].0;
    let computed = answer.len() - usize::from(answer.len() == 30);
    assert_eq!(second.cached, Some(200 + computed));
    let third = world.ask(3, &second.next_turn(&[]), 5);
    assert!(third.cached >= Some(second.prompt.len()));
}

#[test]
fn the_same_prompt_again_computes_one_token() {
    let mut world = World::new(SMALL);
    let prompt = tokens(1, 130);
    world.ask(1, &prompt, 3);
    assert_eq!(world.ask(2, &prompt, 3).cached, Some(129));
}

#[test]
fn an_edit_uses_what_comes_before_and_leaves_the_old_text() {
    let mut world = World::new(SMALL);
    let old = tokens(1, 300);
    world.ask(1, &old, 1);
    let mut edited = old.clone();
    edited[100] = edited[100] % 39 + 1;
    assert_eq!(world.ask(2, &edited, 1).cached, Some(100));
    assert_eq!(world.ask(3, &old, 1).cached, Some(299));
    assert_eq!(world.ask(4, &edited, 1).cached, Some(299));
}

#[test]
fn a_next_turn_takes_its_session_over() {
    let mut world = World::new(SMALL);
    let first = world.ask(1, &tokens(1, 200), 30);
    world.submit(2, &first.next_turn(&tokens(2, 20)), 1, 30, 0);
    assert_eq!(world.scheduler.kv().sessions, 1);
    world.run();
    world.is_quiet();
}

#[test]
fn what_an_edit_replaces_makes_room_at_once() {
    let mut world = World::new(Shape {
        contexts: 2,
        ..SMALL
    });
    let old = tokens(1, 200);
    world.ask(1, &old, 1);
    // As many chunks as there may be are on the ring.
    world.submit(2, &tokens(2, 500), 1, 1, 1);
    let before = world.scheduler.kv().used_positions;
    world.submit(3, &[&old[..100], &tokens(9, 10)].concat(), 1, 1, 0);
    // Two of its four blocks.
    let now = world.scheduler.kv().used_positions;
    assert_eq!(now, before - 2 * KV_BLOCK_POSITIONS);
    world.run();
    world.is_quiet();
}

#[test]
fn a_text_within_another_is_not_kept_beside_it() {
    let mut world = World::new(SMALL);
    let text = tokens(1, 120);
    world.submit(1, &text[..100], 1, 1, 0);
    world.submit(2, &text, 1, 1, 0);
    world.run();
    world.is_quiet();
    assert_eq!(world.scheduler.kv().sessions, 1);
}

#[test]
fn nothing_is_kept_that_a_member_did_not_compute() {
    let mut world = World::new(SMALL);
    let prompt = tokens(1, 300);
    world.submit(1, &prompt, 1, 5, 0);
    let session = world.ring.flying()[0];
    world.cancel(1);
    // Of each of its frames.
    for _ in 0..2 {
        let refused = Event::Refused {
            session,
            rank: 1,
            reason: "no memory".to_owned(),
        };
        world.tell(refused, &[]);
    }
    world.run();
    world.is_quiet();
    assert_eq!(world.ask(2, &prompt, 1).cached, Some(0));
}

#[test]
fn a_prompt_under_way_is_used_by_the_next_request() {
    let mut world = World::new(SMALL);
    let system = tokens(1, 256);
    let with = |end| [system.clone(), tokens(end, 10)].concat();
    world.submit(1, &with(2), 1, 1, 0);
    world.submit(2, &with(3), 1, 1, 0);
    world.run();
    world.is_quiet();
    assert_eq!(world.finished[&2].cached, Some(256));
}

#[test]
fn nothing_is_shared_between_key_spaces() {
    let mut world = World::new(SMALL);
    let prompt = tokens(1, 200);
    world.submit(1, &prompt, 1, 1, 7);
    world.run();
    world.submit(2, &prompt, 1, 1, 8);
    world.run();
    assert_eq!(world.finished[&2].cached, Some(0));
    world.submit(3, &prompt, 1, 1, 7);
    world.run();
    assert_eq!(world.finished[&3].cached, Some(199));
    world.is_quiet();
}

#[test]
fn a_small_request_costs_a_long_conversation_only_its_tail() {
    let mut world = World::new(SMALL);
    let long = tokens(1, 630);
    world.ask(1, &long, 1);
    world.ask(2, &tokens(2, 60), 1);
    // Ten blocks in all, of which the small request took one.
    assert_eq!(world.ask(3, &long, 1).cached, Some(576));
}

#[test]
fn the_least_recently_used_goes_first() {
    let mut world = World::new(SMALL);
    let [a, b, c] = [1, 2, 3].map(|seed| tokens(seed, 256));
    for (id, prompt) in [(1, &a), (2, &b), (3, &a), (4, &c)] {
        world.now += Duration::from_secs(1);
        world.ask(id, prompt, 1);
    }
    assert_eq!(world.ask(5, &a, 1).cached, Some(255));
    assert_eq!(world.ask(6, &c, 1).cached, Some(255));
    assert!(world.ask(7, &b, 1).cached < Some(255));
}

#[test]
fn a_conversation_is_forgotten_after_an_hour() {
    let mut world = World::new(SMALL);
    world.ask(1, &tokens(1, 100), 1);
    assert!(!world.scheduler.holds_nothing());
    world.now += KEPT_FOR + Duration::from_secs(1);
    world.tell(Event::Tick, &[]);
    assert!(!world.scheduler.holds_nothing(), "it is still on its way");
    world.run();
    assert!(world.scheduler.holds_nothing());
    assert_eq!(
        (world.ring.sessions(), world.scheduler.kv().used_positions),
        (0, 0)
    );
}

#[test]
fn nothing_is_kept_that_no_token_followed_from() {
    let mut world = World::new(SMALL);
    let prompt = tokens(1, 200);
    world.ask(1, &prompt, 1);
    world.nothing_follows = true;
    world.submit(2, &prompt, 2, 5, 0);
    world.run();
    assert!(matches!(world.failed[&2], GenerationError::Logits { .. }));
    assert_eq!(
        (world.ring.sessions(), world.scheduler.kv().sessions),
        (0, 0)
    );
    world.nothing_follows = false;
    assert_eq!(world.ask(3, &prompt, 1).cached, Some(0));
}

#[test]
fn what_it_branched_off_from_is_not_kept_either() {
    let mut world = World::new(Shape {
        contexts: 2,
        ..SMALL
    });
    // Their first tokens differ.
    let (long, other) = (tokens(1, 260), tokens(2, 100));
    world.ask(1, &long, 1);
    world.ask(2, &other, 1);
    world.submit(3, &long, 1, 1, 7);
    world.run();
    let branch = [&long[..100], &tokens(9, 20)].concat();
    world.nothing_follows = true;
    world.submit(4, &branch, 1, 5, 0);
    world.run();
    assert_eq!(world.failed.len(), 1);
    // Others' stay, and what begins otherwise.
    assert_eq!(world.scheduler.kv().sessions, 2);
    world.nothing_follows = false;
    assert_eq!(world.ask(5, &long, 1).cached, Some(0));
    assert_eq!(world.ask(6, &other, 1).cached, Some(99));
}

#[test]
fn a_window_is_gone_back_by_as_far_as_it_is_kept() {
    let mut world = World::new(Shape {
        window: Some(64),
        ..SMALL
    });
    let text = tokens(1, 400);
    world.ask(1, &text, 1);
    let changed = |at: usize| [&text[..at], &tokens(9, 20)].concat();
    assert_eq!(world.ask(2, &changed(350), 1).cached, Some(350));
    assert_eq!(world.ask(3, &changed(100), 1).cached, Some(0));
}

/// Templates leave out what was thought.
#[test]
fn a_prompt_is_kept_of_an_answer_longer_than_the_window() {
    for draft_model in [false, true] {
        let mut world = World::new(Shape {
            window: Some(64),
            contexts: 2,
            draft_model,
            ..SMALL
        });
        let prompt = prompts_with_long_answers(400).next().unwrap();
        let first = world.ask(1, &prompt, 200);
        assert_eq!(first.choices[0].0.len(), 200);
        let turn = [&prompt[..], &tokens(9, 20)].concat();
        assert_eq!(world.ask(2, &turn, 1).cached, Some(400));
        assert_eq!(world.ask(3, &prompt, 1).cached, Some(399));
    }
}

#[test]
fn the_prompt_of_several_long_answers_is_kept_once() {
    let mut world = World::new(Shape {
        window: Some(64),
        contexts: 4,
        ..SMALL
    });
    let prompt = prompts_with_long_answers(400).next().unwrap();
    world.submit(1, &prompt, 3, 200, 0);
    let waits = |world: &World| world.clients[&1].choices[0].0.is_empty();
    let mut steps = 0;
    while waits(&world) {
        world.step(steps);
        steps += 1;
    }
    // Three answers and the prompt.
    assert_eq!(world.scheduler.kv().sessions, 4);
    world.run();
    world.is_quiet();
    let turn = [&prompt[..], &tokens(9, 20)].concat();
    assert_eq!(world.ask(2, &turn, 1).cached, Some(400));
}

/// Conversations in rotation, whose answers are longer than the window and whose next turns leave out so many tokens of them, and of the end
/// of the prompt before: in which rounds each computed only what was new.
fn rounds_in_rotation(
    at_once: usize,
    conversations: u64,
    left_out: usize,
    of_prompt: usize,
) -> Vec<bool> {
    let mut world = World::new(Shape {
        window: Some(64),
        context: 4096,
        at_once,
        speculate: false,
        ..SMALL
    });
    world.form = Form::Circle;
    let mut id = 0;
    let begin = |seed| (tokens(seed, 200), 0);
    let mut prompts: Vec<(Vec<u32>, usize)> = (1..=conversations).map(begin).collect();
    let rounds = (0..4).map(|_| {
        let mut all = true;
        for (prompt, computed) in &mut prompts {
            id += 1;
            world.now += Duration::from_secs(1);
            let turn = world.ask(id, prompt, 70);
            all &= turn.cached == Some(*computed);
            let answer = &turn.choices[0].0;
            // The last token never went round.
            let stays = prompt.len() - of_prompt;
            *computed = stays + if left_out > 0 { 0 } else { answer.len() - 1 };
            *prompt = [&prompt[..stays], &answer[left_out..], &tokens(100 + id, 20)].concat();
        }
        all
    });
    rounds.collect()
}

#[test]
fn prompts_kept_apart_push_out_no_conversation() {
    // Without these, all had room.
    for (at_once, conversations) in [(4, 4), (1, 2)] {
        let rounds = rounds_in_rotation(at_once, conversations, 0, 0);
        assert_eq!(rounds, [true; 4], "{conversations}");
    }
}

#[test]
fn conversations_push_out_no_prompts_that_turns_go_on_from() {
    for (at_once, conversations) in [(4, 4), (1, 2), (1, 1)] {
        for of_prompt in [0, 1] {
            let rounds = rounds_in_rotation(at_once, conversations, 50, of_prompt);
            // The second round shows what turns go on from.
            assert_eq!(rounds[2..], [true; 2], "{conversations} {of_prompt}");
        }
    }
}

#[test]
fn no_prompt_stays_of_an_answer_within_the_window() {
    let mut world = World::new(Shape {
        window: Some(200),
        contexts: 2,
        ..SMALL
    });
    let prompt = prompts_with_long_answers(400).next().unwrap();
    world.submit(1, &prompt, 1, 150, 0);
    let (mut most, mut steps) = (0, 0);
    while world.step(steps) {
        most = most.max(world.scheduler.kv().sessions);
        steps += 1;
    }
    world.is_quiet();
    assert_eq!((most, world.scheduler.kv().sessions), (2, 1));
}
