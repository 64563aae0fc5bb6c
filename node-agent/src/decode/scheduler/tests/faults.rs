//! Members and frames that are lost, warm-ups that fail, and rings that are only slow.

use super::*;

#[test]
fn a_lost_member_fails_what_runs_and_the_ring_begins_anew() {
    let mut world = World::new(SMALL);
    world.ask(1, &tokens(1, 100), 1);
    world.submit(2, &tokens(2, 300), 1, 10, 0);
    world.ring.clear();
    world.tell(
        Event::Lost {
            rank: 1,
            missed_by: None,
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
        missed_by: None,
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

/// A member that cannot compute any more says why; then its streams break.
#[test]
fn why_a_member_was_lost_first_is_what_is_said() {
    let waits = Shape {
        outlast_seconds: 30,
        ..SMALL
    };
    let lost = |rank, cause: &str| Event::Lost {
        rank,
        missed_by: None,
        cause: cause.into(),
    };
    let says = |world: &World, member: &str, cause: &str| {
        let said = Readiness::Loading(format!("waiting for member {member}: {cause}"));
        assert_eq!(*world.scheduler.readiness(), said);
        assert_eq!(world.scheduler.fails_at(), Some(member));
    };
    let mut world = World::new(waits);
    world.submit(1, &tokens(1, 100), 1, 10, 0);
    world.ring.clear();
    world.tell(lost(1, "its GPU hangs"), &[]);
    says(&world, "m1", "its GPU hangs");
    world.tell(lost(1, "its stream has ended"), &[]);
    says(&world, "m1", "its GPU hangs");
    // Another one.
    world.tell(lost(0, "its cable was cut"), &[]);
    says(&world, "m0", "its cable was cut");
    world.tell(lost(1, "its stream has ended"), &[]);
    world.ticks_after(30);
    let named = GenerationError::MemberLost {
        member: "m1".to_owned(),
        cause: "its stream has ended".to_owned(),
    };
    assert_eq!(world.failed.get(&1), Some(&named));
    // What is said of it later is of later.
    world.tell(lost(1, "its port is in use"), &[]);
    says(&world, "m1", "its port is in use");
    world.becomes_ready();
}

/// Of a member that is off, both neighbours say so. Of a way that is cut, both of its ends.
#[test]
fn only_who_is_missed_by_one_neighbour_may_be_there() {
    let mut world = World::new(Shape {
        members: 4,
        ..SMALL
    });
    let lost = |world: &mut World, rank, missed_by| {
        let lost = Event::Lost {
            rank,
            missed_by,
            cause: "no answer".into(),
        };
        world.tell(lost, &[]);
        let scheduler = &world.scheduler;
        let said = [scheduler.fails_at(), scheduler.missed_by()];
        said.map(|name| name.map(str::to_owned))
    };
    let named = |names: [&str; 2]| names.map(|name| Some(name.to_owned()));
    world.ring.clear();
    assert_eq!(lost(&mut world, 1, Some(2)), named(["m1", "m2"]));
    // It is said again with each probe.
    for _ in 0..3 {
        assert_eq!(lost(&mut world, 2, Some(1)), named(["m2", "m1"]));
    }
    let m2 = Some("m2".to_owned());
    assert_eq!(lost(&mut world, 2, Some(3)), [m2.clone(), None]);
    assert_eq!(lost(&mut world, 2, Some(1)), [m2.clone(), None]);
    // That was before the ring was whole.
    world.becomes_ready();
    assert_eq!(world.scheduler.missed_by(), None);
    world.ring.clear();
    assert_eq!(lost(&mut world, 2, Some(1)), named(["m2", "m1"]));
    // It ends itself.
    world.becomes_ready();
    world.ring.clear();
    assert_eq!(lost(&mut world, 2, None), [m2, None]);
    // Nobody has such a neighbour.
    assert_eq!(lost(&mut world, 1, Some(4)), [Some("m1".to_owned()), None]);
    world.becomes_ready();
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
fn nobody_waits_for_a_ring_of_which_nothing_comes_home() {
    let mut world = World::new(SMALL);
    for id in 1..=2 {
        world.submit(id, &tokens(id, 100), 1, 10, 0);
    }
    world.ticks_after(DEADLINE.as_secs() + 1);
    assert_eq!(world.failed.len(), 2);
    let asks_anew = matches!(world.scheduler.readiness(), Readiness::Loading(_));
    assert!(asks_anew, "{:?}", world.scheduler.readiness());
    world.becomes_ready();
    world.is_quiet();
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

/// Long before it counts as lost, whoever has the choice is told to ask elsewhere; and nothing is broken off.
#[test]
fn what_stays_out_is_late_until_something_comes_home() {
    let slow = Shape {
        planned_seconds: 1,
        ..SMALL
    };
    let quarters = |world: &mut World, count: u32| {
        for _ in 0..count {
            world.now += Duration::from_millis(250);
            world.tell(Event::Tick, &[]);
        }
    };
    let mut world = World::new(slow);
    // Nothing is waited for.
    quarters(&mut world, 60);
    assert!(!world.scheduler.is_late());
    world.submit(1, &tokens(5, 60), 1, 580, 0);
    // Four times what is planned, and 2.5 s.
    quarters(&mut world, 26);
    assert!(!world.scheduler.is_late());
    quarters(&mut world, 1);
    assert!(world.scheduler.is_late());
    // A member is at it.
    world.tell(Event::Busy, &[]);
    assert!(!world.scheduler.is_late());
    quarters(&mut world, 27);
    assert!(world.scheduler.is_late());
    // Rank 0 stood still itself, and then has to take in first what came home.
    world.tell(Event::Busy, &[]);
    world.ticks_after(7);
    assert!(!world.scheduler.is_late());
    quarters(&mut world, 27);
    assert!(world.scheduler.is_late());
    assert_eq!(*world.scheduler.readiness(), Readiness::Ready);
    assert!(world.failed.is_empty());
    let session = world.ring.flying()[0];
    world.comes_home(session);
    assert!(!world.scheduler.is_late());
    world.run();
    quarters(&mut world, 60);
    assert!(!world.scheduler.is_late() && world.failed.is_empty());
    world.is_quiet();
}

/// Rank 0 takes in what comes home when it has computed its part of the chunk.
#[test]
fn a_token_behind_anothers_chunk_is_not_late() {
    let mut world = World::new(SMALL);
    world.scheduler.limits.planned = Some(Speed {
        token_microseconds: 100_000,
        first_token_microseconds: 10_000_000,
    });
    // Nothing counts as lost meanwhile.
    world.scheduler.limits.options.grace = Duration::from_secs(600);
    world.submit(1, &tokens(5, 60), 1, 580, 0);
    world.step(1);
    let ticks_until_late = |world: &mut World| {
        let late = (1..1000).find(|_| {
            world.now += Duration::from_millis(250);
            world.tell(Event::Tick, &[]);
            world.scheduler.is_late()
        });
        late.unwrap()
    };
    // Its token goes round.
    let alone = ticks_until_late(&mut world);
    assert!((12..40).contains(&alone), "{alone}");
    world.tell(Event::Busy, &[]);
    world.submit(2, &tokens(11, 60), 1, 580, 0);
    let with_a_chunk = ticks_until_late(&mut world);
    assert!((170..300).contains(&with_a_chunk), "{with_a_chunk}");
    assert!(world.failed.is_empty());
    world.run();
    world.is_quiet();
}

#[test]
fn a_release_is_waited_for_as_long_as_its_frames() {
    let slow = Shape {
        planned_seconds: 20,
        ..SMALL
    };
    let mut world = World::new(slow);
    world.embed(1, &tokens(1, 300), Read::LastState);
    world.submit(2, &tokens(2, 100), 1, 10, 0);
    world.cancel(1);
    // Three chunks, and a tenth of the time that they may take.
    world.ticks_after(25);
    assert_eq!(*world.scheduler.readiness(), Readiness::Ready);
    assert!(world.failed.is_empty());
    world.run();
    world.is_quiet();
    assert!(world.finished.contains_key(&2));
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
        missed_by: None,
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
        missed_by: None,
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
    // What an earlier session was refused is no failure either.
    let earlier = Event::Refused {
        session: session - 1,
        rank: 0,
        reason: "no room".to_owned(),
    };
    world.tell(earlier, &[]);
    assert!(matches!(world.scheduler.readiness(), Readiness::Loading(_)));
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
    // A probe of before says nothing of what failed since.
    world.tell(Event::Whole { nonce }, &[]);
    assert!(world.ring.flying().is_empty());
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
