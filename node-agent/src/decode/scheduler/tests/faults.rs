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
