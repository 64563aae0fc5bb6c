//! Everything at once, at random.

use super::*;

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
            // In the larger one, windows are short of memory, and nothing else is.
            context: [4096, SMALL.context, SMALL.context][seed as usize % 3],
            contexts: 1 + random.below(2),
            at_once: 1 + random.below(5),
            window: [None, Some(16), Some(70), Some(200)][random.below(4)],
            windowed_sequences: [1, 4, 16][seed as usize / 3 % 3],
            chunk_positions: [128, 512][seed as usize / 9 % 2],
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
        // Chunks are whole, or smaller beside tokens.
        world.row = seed % 2;
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
                    let lost = Event::Lost {
                        rank,
                        missed_by: None,
                        cause,
                    };
                    world.tell(lost, &[]);
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
