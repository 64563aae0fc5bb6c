//! Several tokens for one trip round the ring: what the text repeats, what a form leaves no choice of, and what a draft model guesses.

use prima_crds::v1alpha1::ring_plan::DRAFTED_ROWS;

use super::*;

const DRAFTING: Shape = Shape {
    draft_model: true,
    ..SMALL
};

/// Nothing is on the ring but for what the draft model's guess will send.
fn waiting_for_a_guess() -> World {
    let mut world = World::new(DRAFTING);
    let prompt = long_prompts().next().unwrap();
    world.submit(1, &prompt, 1, 100, 0);
    world.until_somebody_waits_for_a_guess();
    world
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
fn a_new_sequence_knows_how_short_matches_fared() {
    let mut world = World::new(SMALL);
    for _ in 0..100 {
        world.scheduler.short_matches.add(0, false);
    }
    let mut begins_with = |id, prompt: &[u32]| {
        world.submit(id, prompt, 1, 200, 0);
        let sequence = &world.scheduler.requests[&id].sequences[0];
        let share = sequence.speculation.text_is_right();
        world.run();
        share
    };
    let shares = (1..=8).zip(long_prompts());
    let shares: Vec<f64> = shares
        .map(|(id, prompt)| begins_with(id, &prompt))
        .collect();
    assert!(shares[0] < 0.01, "{shares:?}");
    // Here texts mostly go on as they did.
    assert!(shares[7] > 0.1, "{shares:?}");
    world.is_quiet();
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

/// All that is on the ring goes in one pass, which takes ten milliseconds and one for each row.
fn pass(world: &mut World) {
    let flying = world.ring.flying();
    let rows = flying.iter().map(|&one| world.ring.rows_of_oldest(one));
    let takes = 10 + rows.sum::<usize>() as u64;
    world.now += Duration::from_millis(takes);
    for session in flying {
        world.comes_home(session);
    }
}

/// Where one drafts beside others that do not, frames of all sizes take equally long: as if drafts cost nothing.
#[test]
fn what_a_row_takes_is_told_by_frames_that_share_no_pass() {
    let mut world = World::new(Shape {
        members: 1,
        contexts: 4,
        ..SMALL
    });
    let row = |world: &World| world.scheduler.prices().row;
    let mut prompts = long_prompts();
    let mut submit = |world: &mut World, id, form| {
        world.form = form;
        world.submit(id, &prompts.next().unwrap(), 1, 200, id);
    };
    for (id, form) in [(1, Form::Free), (2, Form::Circle)] {
        submit(&mut world, id, form);
        while !world.ring.flying().is_empty() {
            pass(&mut world);
        }
        world.run();
    }
    assert!((row(&world) - 0.1).abs() < 1e-6, "{}", row(&world));

    for id in 3..=5 {
        submit(&mut world, id, Form::Free);
    }
    submit(&mut world, 6, Form::Circle);
    let mut of_all = f64::INFINITY;
    for _ in 0..10 {
        pass(&mut world);
        of_all = of_all.min(world.scheduler.cost.of_a_row());
    }
    assert!(of_all < 0.05, "{of_all}");
    assert!((row(&world) - 0.1).abs() < 1e-6, "{}", row(&world));
    world.run();
    world.is_quiet();
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
fn without_drafts_no_draft_model_is_asked() {
    let mut world = World::new(Shape {
        speculate: false,
        ..DRAFTING
    });
    world.submit(1, &tokens(1, 100), 1, 20, 0);
    assert!(world.asked.is_empty());
    world.run();
    world.is_quiet();
}

/// Of four tokens that it computes, it has two of the text yet to take in.
#[test]
fn what_a_guess_takes_is_known_from_the_latest() {
    let mut world = waiting_for_a_guess();
    let mut after_one_of = |seconds: u32| {
        let sequence = world.scheduler.sequence((1, 0)).unwrap();
        let text = sequence.text.clone();
        let taken_in = text.len();
        sequence.speculation.taken_in = taken_in - 2;
        let now = world.now;
        world.scheduler.ask_model((1, 0), text, 3, false, now);
        let guessed = Event::Guessed {
            request: 1,
            choice: 0,
            taken_in,
            tokens: vec![1; 3],
            took: 4 * Duration::from_secs(seconds.into()),
        };
        world.tell(guessed, &[]);
        world.scheduler.guess_seconds
    };
    assert_eq!(after_one_of(4), 4.0);
    assert_eq!(after_one_of(8), 5.0);
}

#[test]
fn a_draft_model_that_is_gone_is_not_waited_for() {
    let mut world = waiting_for_a_guess();
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
    let mut world = World::new(DRAFTING);
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
    let mut world = waiting_for_a_guess();
    world.ticks_after(3);
    assert!(!world.ring.flying().is_empty());
    world.run();
    world.is_quiet();
}

#[test]
fn a_guess_for_one_that_was_set_aside_is_not_sent() {
    let shape = Shape {
        at_once: 2,
        contexts: 2,
        ..DRAFTING
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
