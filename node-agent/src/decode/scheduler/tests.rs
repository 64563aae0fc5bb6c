mod world;

use prima_crds::v1alpha1::ring_plan::DRAFTED_ROWS;

use super::*;
use crate::ring::MAX_FRAME_ROWS;
use world::*;

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

#[test]
fn a_lost_member_fails_what_runs_and_the_ring_begins_anew() {
    let mut world = World::new(SMALL);
    world.ask(1, &tokens(1, 100), 1);
    world.submit(2, &tokens(2, 300), 1, 10, 0);
    world.ring.clear();
    world.tell(
        Event::Lost {
            rank: 1,
            cause: "gone".into(),
        },
        &[],
    );
    assert!(matches!(
        world.failed[&2],
        GenerationError::MemberLost { .. }
    ));
    assert_eq!(world.scheduler.kv().used_positions, 0);
    world.becomes_ready();
    assert_eq!(world.ask(3, &tokens(1, 100), 1).cached, Some(0));
}

/// Requests wait for a member that is started again, with what they have been answered so far.
#[test]
fn requests_outlast_the_loss_of_a_member() {
    let waits = Shape {
        outlast_seconds: 30,
        ..SMALL
    };
    let lost = || Event::Lost {
        rank: 1,
        cause: "gone".into(),
    };
    let in_the_middle = || {
        let mut world = World::new(waits);
        let prompt = long_prompts().next().unwrap();
        world.submit(1, &prompt, 2, 200, 0);
        world.run_some(100);
        assert!((20..180).contains(&world.clients[&1].choices[0].0.len()));
        world
    };
    let breaks = |world: &mut World| {
        world.ring.clear();
        world.tell(lost(), &[]);
    };
    // It says so again and again.
    let stays_broken = |world: &mut World, seconds| {
        for _ in 0..seconds {
            world.ticks_after(1);
            world.tell(lost(), &[]);
        }
    };
    let mut world = in_the_middle();
    breaks(&mut world);
    stays_broken(&mut world, 10);
    assert_eq!(world.failed.len(), 0);
    assert_eq!(world.scheduler.kv().used_positions, 0);
    world.becomes_ready();
    world.run();
    world.is_quiet();
    assert_eq!((world.finished.len(), world.failed.len()), (1, 0));

    // Not for ever,
    let mut world = in_the_middle();
    breaks(&mut world);
    stays_broken(&mut world, 29);
    assert_eq!(world.failed.len(), 0);
    world.ticks_after(1);
    let named = GenerationError::MemberLost {
        member: "m1".to_owned(),
        cause: "gone".to_owned(),
    };
    assert_eq!(world.failed.get(&1), Some(&named));
    world.becomes_ready();
    world.is_quiet();

    // nor again and again: one of them may be what kills it.
    let mut world = in_the_middle();
    for _ in 0..3 {
        breaks(&mut world);
        world.ticks_after(1);
        let nonce = world.nonce.take().expect("a probe");
        world.tell(Event::Whole { nonce }, &[]);
        world.run_some(20);
    }
    assert_eq!(world.failed.len(), 0);
    breaks(&mut world);
    assert_eq!(world.failed.get(&1), Some(&named));
    world.becomes_ready();
    world.is_quiet();
}

#[test]
fn a_lost_frame_fails_its_request_after_the_deadline() {
    let mut world = World::new(SMALL);
    world.submit(1, &tokens(1, 100), 1, 10, 0);
    world.now += DEADLINE + Duration::from_secs(1);
    world.tell(Event::Tick, &[]);
    assert!(matches!(
        world.failed[&1],
        GenerationError::Deadline { seconds: 10 }
    ));
    world.becomes_ready();
    world.is_quiet();
    assert_eq!(world.ring.sessions(), 0);
}

#[test]
fn a_text_that_repeats_takes_fewer_trips_than_tokens() {
    let trips = |speculate, prompt: &[u32]| {
        let shape = Shape { speculate, ..SMALL };
        let mut world = World::new(shape);
        world.submit(1, prompt, 1, 200, 0);
        let mut trips = 0;
        while world.step(1) {
            trips += 1;
        }
        world.is_quiet();
        (trips, world.finished[&1].choices[0].0.len())
    };
    let long = long_prompts();
    let with_drafts = long.take(8).map(|prompt| {
        assert_eq!(trips(false, &prompt), (200, 200));
        let (drafting, tokens) = trips(true, &prompt);
        assert_eq!(tokens, 200);
        drafting
    });
    let with_drafts: Vec<usize> = with_drafts.collect();
    assert!(
        with_drafts.iter().sum::<usize>() < 8 * 150,
        "{with_drafts:?}"
    );
}

#[test]
fn tokens_that_a_form_forces_take_no_trips() {
    let trips = |speculate, seed| {
        let mut world = World::new(Shape { speculate, ..SMALL });
        world.form = Form::Runs;
        world.submit(1, &tokens(seed, 30), 1, 60, 0);
        let mut trips = 0;
        while world.step(1) {
            trips += 1;
        }
        world.is_quiet();
        (trips, world.finished[&1].choices[0].0.clone())
    };
    let mut saved = 0;
    for seed in 0..20 {
        let (one_by_one, answer) = trips(false, seed);
        let (jumping, same) = trips(true, seed);
        assert_eq!(answer, same);
        let forced = answer.windows(2).filter(|pair| pair[0] % RUN < FORCED);
        let least = one_by_one - forced.count();
        assert!(jumping <= least, "{jumping} {least} {answer:?}");
        saved += one_by_one - jumping;
    }
    assert!(saved > 100, "{saved}");
}

#[test]
fn drafts_of_all_together_have_few_rows() {
    let mut world = World::new(Shape {
        members: 8,
        at_once: 8,
        contexts: 2,
        ..SMALL
    });
    world.form = Form::Circle;
    for id in 0..8 {
        world.submit(id, &tokens(id, 20), 1, 100, 0);
    }
    world.run();
    world.is_quiet();
    assert_eq!(world.most_drafted, DRAFTED_ROWS);
}

#[test]
fn a_draft_takes_nobodys_room() {
    let mut world = World::new(SMALL);
    // All ten blocks: the draft would need an eleventh.
    let text = tokens(3, 20).repeat(32)[..639].to_vec();
    world.ask(1, &text, 500);
    assert_eq!(world.drafted, 0);
}

#[test]
fn a_ring_as_slow_as_planned_is_waited_for() {
    let slow = Shape {
        planned_seconds: 20,
        ..SMALL
    };
    let mut world = World::new(slow);
    world.submit(1, &tokens(1, 100), 1, 10, 0);
    world.ticks_after(85);
    assert!(world.failed.is_empty());
    // A member says that it gets on.
    world.tell(Event::Busy, &[]);
    world.ticks_after(85);
    assert!(world.failed.is_empty());
    world.ticks_after(10);
    assert!(matches!(
        world.failed[&1],
        GenerationError::Deadline { seconds: 90 }
    ));
    world.becomes_ready();
}

#[test]
fn passes_that_took_long_are_waited_for_longer() {
    let mut world = World::new(SMALL);
    world.submit(1, &tokens(5, 60), 1, 580, 0);
    for _ in 0..4 {
        world.now += Duration::from_secs(9);
        world.step(1);
    }
    world.ticks_after(40);
    assert!(world.failed.is_empty());
    world.ticks_after(10);
    assert_eq!(world.failed.len(), 1);
}

#[test]
fn a_frame_that_only_got_lost_itself_ends_its_request_only() {
    let mut world = World::new(SMALL);
    world.submit(1, &tokens(5, 60), 1, 580, 0);
    let lost = world.ring.flying()[0];
    world.submit(2, &tokens(11, 60), 1, 580, 0);
    for _ in 0..70 {
        world.now += Duration::from_millis(200);
        let other = world.ring.flying().into_iter().find(|one| *one != lost);
        world.comes_home(other.unwrap());
    }
    world.tell(Event::Tick, &[]);
    assert!(world.failed.contains_key(&1) && !world.failed.contains_key(&2));
    world.run();
    world.is_quiet();
}

#[test]
fn any_probe_that_is_under_way_shows_that_the_ring_is_whole() {
    let mut world = World::new(SMALL);
    let lost = Event::Lost {
        rank: 0,
        cause: "gone".into(),
    };
    let stale = world.scheduler.last_nonce;
    world.ring.clear();
    world.tell(lost, &[]);
    // A link on which a trip takes longer than the pause between two probes.
    for _ in 0..3 {
        world.ticks_after(1);
    }
    world.tell(Event::Whole { nonce: stale }, &[]);
    assert_eq!(world.scheduler.kv().sessions, 0);
    world.tell(Event::Whole { nonce: stale + 1 }, &[]);
    world.run();
    assert_eq!(*world.scheduler.readiness(), Readiness::Ready);
}

/// What was lacking, a disk or memory, may be there again.
#[test]
fn a_warm_up_that_failed_is_tried_again() {
    let mut world = World::new(SMALL);
    world.ring.clear();
    let lost = Event::Lost {
        rank: 0,
        cause: "gone".into(),
    };
    world.tell(lost, &[]);
    assert_eq!(world.scheduler.fails_at(), Some("m0"));
    world.ticks_after(1);
    let nonce = world.nonce.take().expect("a probe");
    world.tell(Event::Whole { nonce }, &[]);
    // The first token may take long, and is nobody's failure.
    assert_eq!(world.scheduler.fails_at(), None);
    let session = world.ring.flying()[0];
    let reason = "no disk".to_owned();
    let failed = Readiness::Failed(reason.clone());
    let refused = Event::Refused {
        session,
        rank: 1,
        reason,
    };
    world.tell(refused, &[]);
    assert_eq!(*world.scheduler.readiness(), failed);
    assert_eq!(world.scheduler.fails_at(), Some("m1"));
    world.run();
    world.ticks_after(1);
    assert_eq!(world.nonce, None);

    world.ticks_after(5);
    let nonce = world.nonce.take().expect("a probe");
    world.tell(Event::Whole { nonce }, &[]);
    // Until a token went round.
    assert_eq!(*world.scheduler.readiness(), failed);
    world.run();
    assert_eq!(*world.scheduler.readiness(), Readiness::Ready);
    assert_eq!(world.scheduler.fails_at(), None);
    world.is_quiet();
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
        let mut world = World::new(SMALL);
        world.submit(1, &long_prompts().next().unwrap(), 1, 200, 1);
        world.run_some(10);
        world.submit(2, &tokens(2, length), choices, 5, 2);
        world.submit(3, &tokens(3, 30), 1, 1, 3);
        let steps = steps_to_first_token(&mut world, 3);
        assert!(steps < 10, "{steps} steps");
        assert!(world.clients.contains_key(&1), "the long answer goes on");
        assert_eq!(world.clients[&2].cached, None);
        world.run();
        world.is_quiet();
        assert_eq!(world.finished.len(), 3);
    }
}

#[test]
fn one_that_does_not_fit_is_passed_so_often_and_no_more() {
    for (length, choices) in LARGE {
        let mut world = World::new(SMALL);
        let mut prompts = long_prompts();
        let mut submit_small = |world: &mut World, id| {
            world.submit(id, &prompts.next().unwrap(), 1, 20, id);
        };
        // They end one after the other.
        for id in 1..=3 {
            submit_small(&mut world, id);
            world.run_some(5);
        }
        let large = 4;
        world.submit(large, &tokens(large, length), choices, 5, large);
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
    assert!(!world.scheduler.turns_away(9, 1));
    assert!(world.scheduler.turns_away(9, PROMPT_TOKENS + 1));
    world.run();
    world.is_quiet();
}

#[test]
fn a_draft_model_brings_several_tokens_a_trip() {
    let trips = |draft_model| {
        let shape = Shape {
            draft_model,
            ..SMALL
        };
        let mut total = 0;
        for seed in 0..20 {
            let mut world = World::new(shape);
            world.submit(1, &tokens(seed, 30), 1, 100, 0);
            while !world.ring.flying().is_empty() || world.guesses() {
                total += usize::from(world.step(1));
                while world.guesses() {}
            }
            world.is_quiet();
        }
        total
    };
    let (without, with) = (trips(false), trips(true));
    assert!(3 * with < 2 * without, "{with} and {without} trips");
}

#[test]
fn a_draft_model_that_is_gone_is_not_waited_for() {
    let shape = Shape {
        draft_model: true,
        ..SMALL
    };
    let mut world = World::new(shape);
    let prompt = long_prompts().next().unwrap();
    world.submit(1, &prompt, 1, 100, 0);
    world.until_somebody_waits_for_a_guess();
    assert!(matches!(
        world.asked.front(),
        Some(Action::Guess { count: 1.., .. })
    ));
    world.asked.clear();
    world.tell(Event::NoMoreGuesses, &[]);
    world.run();
    world.is_quiet();
    assert!(world.asked.is_empty());
}

#[test]
fn a_draft_model_is_told_whose_a_text_is() {
    let shape = Shape {
        draft_model: true,
        ..SMALL
    };
    let mut world = World::new(shape);
    for keyspace in [7, 8] {
        let id = keyspace;
        world.submit(id, &tokens(id, 100), 1, 5, keyspace);
        let asked = world.asked.front();
        assert!(matches!(asked, Some(Action::Guess { keyspace: own, .. }) if *own == keyspace));
        world.run();
    }
    world.is_quiet();
}

#[test]
fn a_branch_leaves_the_draft_behind() {
    let mut world = World::new(SMALL);
    let prompt = long_prompts().next().unwrap();
    world.submit(1, &prompt, 1, 200, 0);
    let drafted = |world: &World| {
        let sequence = &world.scheduler.requests[&1].sequences[0];
        sequence.speculation.drafted().len() > 0
    };
    while !drafted(&world) {
        world.step(1);
    }
    let so_far = world.clients[&1].next_turn(&[3, 1, 2]);
    world.submit(2, &so_far, 1, 20, 0);
    world.run();
    world.is_quiet();
    assert_eq!(world.finished[&2].cached, Some(so_far.len() - 3));
}

#[test]
fn a_guess_that_is_late_is_not_waited_for() {
    let shape = Shape {
        draft_model: true,
        ..SMALL
    };
    let mut world = World::new(shape);
    let prompt = long_prompts().next().unwrap();
    world.submit(1, &prompt, 1, 100, 0);
    world.until_somebody_waits_for_a_guess();
    world.ticks_after(3);
    assert!(!world.ring.flying().is_empty());
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
fn a_guess_for_one_that_was_set_aside_is_not_sent() {
    let shape = Shape {
        at_once: 2,
        contexts: 2,
        draft_model: true,
        ..SMALL
    };
    let mut world = World::new(shape);
    let long = long_prompts();
    for (id, prompt) in (1..=2).zip(long) {
        world.submit(id, &prompt, 1, 200, 0);
    }
    let waits = |world: &World| {
        let asked = world.scheduler.asked.as_ref();
        asked.is_some_and(|asked| asked.id == (2, 0) && asked.waits)
    };
    let mut steps = 0;
    while !waits(&world) {
        world.step(steps);
        steps += 1;
    }
    // Another client's request takes its place, and leaves it before the guess comes.
    world.submit(3, &tokens(99, 40), 1, 5, 1);
    assert!(!waits(&world));
    world.cancel(3);
    world.run();
    world.is_quiet();
}

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

/// Long random mixes: no session leaks, no request is forgotten, no budget is passed, and every answer is that of an empty ring.
#[test]
fn any_mix_of_requests_is_answered_as_by_an_empty_ring() {
    let (mut cached, mut finished, mut drafted, mut accepted) = (0, 0, 0, 0);
    let (mut ran_ahead, mut refuted, mut vectors) = (0, 0, 0);
    let (mut slow, mut without_fault, mut outlasted) = (0, 0, 0);
    for seed in 0..1000 {
        let mut random = Random(seed);
        let shape = Shape {
            members: 1 + random.below(4),
            context: CONTEXTS_END,
            contexts: 1 + random.below(2),
            at_once: 1 + random.below(5),
            window: [None, Some(16), Some(70), Some(200)][random.below(4)],
            speculate: random.below(4) > 0,
            draft_model: random.below(2) > 0,
            planned_seconds: 0,
            outlast_seconds: [0, 30][random.below(2)],
            overlap: [1, 2, 5, 12][random.below(4)],
        };
        let mut world = World::new(shape);
        // What members may be silent for, up to nearly what counts as lost.
        world.silence = [
            Duration::ZERO,
            DEADLINE / 1000,
            DEADLINE / 10,
            DEADLINE * 9 / 10,
        ][random.below(4)];
        world.random = Random(!seed);
        // Requests that a fault of the ring ended.
        let (mut faults, mut losses, mut ended) = (0, 0, 0);
        let mut texts: Vec<Vec<u32>> = vec![tokens(seed, 300)];
        for id in 1..=1 + random.below(24) as RequestId {
            let base = &texts[random.below(texts.len())];
            let cut = random.below(base.len().min(500) + 1);
            let new = 1 + random.below(120);
            let prompt = [&base[..cut], &tokens(random.next(), new)].concat();
            let choices = 1 + random.below(shape.at_once);
            let (max_tokens, keyspace) = (1 + random.below(200), random.below(2) as u64);
            let (read, asked) = match random.below(10) {
                0 => (Read::AllStates, (1, 0)),
                1 => (Read::LastState, (1, 0)),
                _ => (Read::Continuation, (choices, max_tokens)),
            };
            world.form = [Form::Free, Form::Free, Form::Runs, Form::Circle][random.below(4)];
            let client = 2 * random.below(3) as u64 + keyspace;
            world.submit_to_read(id, &prompt, read, asked, keyspace, client);
            texts.push(prompt);
            for _ in 0..random.below(60) {
                let chosen = random.below(1000);
                world.step(chosen);
            }
            let fault = random.below(40);
            let before = world.failed.len();
            match fault {
                0..4 => world.cancel(1 + random.below(id as usize) as RequestId),
                4 => {
                    world.ring.clear();
                    let (rank, cause) = (random.below(shape.members), "gone".to_owned());
                    let named = GenerationError::MemberLost {
                        member: format!("m{rank}"),
                        cause: cause.clone(),
                    };
                    let in_hand: Vec<RequestId> = world.clients.keys().copied().collect();
                    world.tell(Event::Lost { rank, cause }, &[]);
                    losses += 1;
                    let failed = |id: &RequestId| world.failed.get(id) == Some(&named);
                    match shape.outlast_seconds {
                        0 => assert!(in_hand.iter().all(failed)),
                        _ if losses <= 3 => assert!(!in_hand.iter().any(failed)),
                        _ => {}
                    }
                    outlasted += in_hand.iter().filter(|id| !failed(id)).count();
                    let member = format!("m{rank}");
                    assert_eq!(world.scheduler.fails_at(), Some(&*member));
                }
                5 => {
                    if let Some(&session) = world.ring.flying().first() {
                        let refused = Event::Refused {
                            session,
                            rank: 0,
                            reason: "no".into(),
                        };
                        world.tell(refused, &[]);
                    }
                }
                6 => {
                    world.now += DEADLINE * 2;
                    world.tell(Event::Tick, &[]);
                    // What is waited for longer comes home.
                    world.tell(Event::Busy, &[]);
                }
                _ => {}
            }
            if let 4..=6 = fault {
                faults += 1;
                ended += world.failed.len() - before;
            }
            if *world.scheduler.readiness() != Readiness::Ready {
                world.becomes_ready();
            }
            texts.extend(
                world
                    .finished
                    .values()
                    .next_back()
                    .map(|done| done.next_turn(&[])),
            );
        }
        world.run();
        world.is_quiet();
        // Nothing else ends any.
        assert_eq!(world.failed.len(), ended, "{seed}: {:?}", world.failed);
        slow += usize::from(!world.silence.is_zero());
        without_fault += usize::from(faults == 0);
        let answers = world.finished.values();
        let answers = answers.filter(|done| done.read == Read::Continuation);
        finished += answers.clone().count();
        vectors += world.finished.len() - answers.clone().count();
        drafted += world.drafted;
        accepted += world.accepted;
        ran_ahead += world.ring.ran_ahead;
        refuted += world.ring.refuted;
        cached += answers.filter_map(|done| done.cached).sum::<usize>();
    }
    assert!(
        finished > 5000 && cached > 20 * finished,
        "{finished} finished, {cached} cached"
    );
    assert!(
        accepted > 5 * finished && drafted > accepted + finished,
        "{accepted} of {drafted} drafted tokens were right"
    );
    assert!(vectors > 1000, "{vectors} vectors");
    assert!(
        slow > 600 && without_fault > 200,
        "{slow} slow rings, {without_fault} without a fault"
    );
    assert!(outlasted > 200, "{outlasted} outlasted a loss");
    assert!(
        ran_ahead > finished && refuted > finished / 4,
        "{ran_ahead} frames ran ahead, {refuted} were refuted"
    );
}
