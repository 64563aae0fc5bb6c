//! What waits at a member: which frames run together next, and which need not run any more. Pure.
//!
//! Frames of a session never overtake one another, nothing overtakes a control operation of its own round, and nothing at all overtakes a reset. Each
//! round has caches of its own, so what a control operation changes is nothing to other rounds. What came home overtakes what is still on its way.

use std::collections::{HashSet, VecDeque};
use std::time::Instant;

use prima_crds::v1alpha1::ring_plan::MOST_BATCH_ROWS;

use super::frame::{Activation, Frame, Operation};

/// Frames in the order of their arrival.
#[derive(Default)]
pub struct Queue(VecDeque<Queued>);

pub struct Queued {
    pub frame: Frame,
    pub arrived: Instant,
}

impl Queue {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn front(&self) -> Option<&Frame> {
        self.0.front().map(|first| &first.frame)
    }

    pub fn pop_front(&mut self) -> Option<Queued> {
        self.0.pop_front()
    }

    /// Adds a frame. Those before it whose positions it takes back are refuted from now on.
    pub fn push(&mut self, frame: Frame, arrived: Instant) {
        if let Some(length) = frame.operation.kept_length() {
            let own = self.0.iter_mut().rev().map(|queued| &mut queued.frame);
            let own = own.filter(|one| (one.session, one.round) == (frame.session, frame.round));
            // What was there when the session was forked is the fork's, too.
            let unshared = own.take_while(|one| !matches!(one.operation, Operation::Fork { .. }));
            for one in unshared {
                if let Operation::Activation(activation) = &mut one.operation {
                    activation.refuted |= activation.first_position >= length;
                }
            }
        }
        self.0.push_back(Queued { frame, arrived });
    }

    /// The round of the activations that are next, if one is first: of what came `home` before all other. Clients wait for its output, which takes
    /// little.
    pub fn next_round(&self, home: usize) -> usize {
        let activation = |one: &&Frame| matches!(one.operation, Operation::Activation(_));
        let frames = self.0.iter().map(|queued| &queued.frame);
        let mut seen = HashSet::new();
        let mut first_of_sessions = frames
            .take_while(activation)
            .filter(|frame| seen.insert(frame.session));
        match first_of_sessions.any(|frame| frame.round == home) {
            true => home,
            false => self.front().map_or(0, |first| first.round),
        }
    }

    /// The first activation of this round and all others that can run with it, up to [`MOST_BATCH_ROWS`]: more gain nothing, and make others wait. (A
    /// plan may have larger chunks, which run alone.) Of each session there is one, which refuted ones may precede. None is from behind a control
    /// operation of this round, or a reset.
    pub fn take_batch(&mut self, round: usize) -> Vec<Queued> {
        let mut batch = Vec::new();
        let mut rest = VecDeque::with_capacity(self.0.len());
        let mut seen = HashSet::new();
        let mut rows = 0;
        let mut open = true;
        for queued in self.0.drain(..) {
            let (session, same_round) = (queued.frame.session, queued.frame.round == round);
            let fits = match &queued.frame.operation {
                Operation::Activation(Activation { refuted: true, .. }) => {
                    open && same_round && !seen.contains(&session)
                }
                Operation::Activation(activation) => {
                    let own = activation.rows;
                    let room = rows == 0 || rows + own <= MOST_BATCH_ROWS;
                    let fits = open && same_round && room && seen.insert(session);
                    rows += if fits { own } else { 0 };
                    fits
                }
                operation => {
                    open &= !same_round && !matches!(operation, Operation::Reset(_));
                    false
                }
            };
            if fits {
                batch.push(queued);
            } else {
                // Later frames of its session stay behind it.
                seen.insert(session);
                rest.push_back(queued);
            }
        }
        self.0 = rest;
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::frame::{FrameInput, MAX_FRAME_ROWS, Reset, SessionId};

    fn queue(frames: impl IntoIterator<Item = Frame>) -> Queue {
        let mut queue = Queue::default();
        for frame in frames {
            queue.push(frame, Instant::now());
        }
        queue
    }

    fn frame(session: SessionId, operation: Operation) -> Frame {
        Frame {
            session,
            sequence: 0,
            round: 0,
            traceparent: String::new(),
            timings: Vec::new(),
            operation,
        }
    }

    fn rows(session: SessionId, first_position: usize, rows: usize) -> Frame {
        let activation = Activation {
            first_position,
            rows,
            output_rows: rows,
            refuted: false,
            input: FrameInput::Tokens(Vec::new()),
        };
        frame(session, Operation::Activation(activation))
    }

    /// Of a ring of two rounds.
    const HOME: usize = 2;

    /// Session, first position, and whether it is refuted.
    fn batch(queue: &mut Queue) -> Vec<(SessionId, usize, bool)> {
        let round = queue.next_round(HOME);
        let taken = queue.take_batch(round).into_iter().map(|one| one.frame);
        let taken = taken.map(|frame| match frame.operation {
            Operation::Activation(one) => (frame.session, one.first_position, one.refuted),
            operation => panic!("{operation:?}"),
        });
        taken.collect()
    }

    #[test]
    fn what_a_later_frame_takes_back_is_refuted() {
        let frames = [
            rows(1, 0, 4),
            rows(1, 4, 2),
            rows(2, 4, 2),
            rows(1, 6, 2),
            rows(1, 5, 1),
        ];
        let mut queue = queue(frames);
        // The second keeps its first position.
        assert_eq!(batch(&mut queue), [(1, 0, false), (2, 4, false)]);
        assert_eq!(batch(&mut queue), [(1, 4, false)]);
        assert_eq!(batch(&mut queue), [(1, 6, true), (1, 5, false)]);
        assert!(queue.is_empty());
    }

    #[test]
    fn refuted_frames_go_before_what_replaces_them() {
        let frames = [rows(2, 0, 1), rows(1, 4, 2), rows(1, 6, 2), rows(1, 4, 1)];
        let expected = [(2, 0, false), (1, 4, true), (1, 6, true), (1, 4, false)];
        assert_eq!(batch(&mut queue(frames)), expected);
    }

    #[test]
    fn a_fork_keeps_what_was_there() {
        let fork = frame(1, Operation::Fork { child: 3 });
        let frames = [rows(1, 4, 2), fork, rows(1, 6, 2), rows(1, 4, 1)];
        let mut queue = queue(frames);
        assert_eq!(batch(&mut queue), [(1, 4, false)]);
        queue.pop_front().unwrap();
        assert_eq!(batch(&mut queue), [(1, 6, true), (1, 4, false)]);
    }

    #[test]
    fn what_is_released_or_cut_off_is_refuted() {
        for (operation, refuted) in [
            (Operation::Release, [true, true]),
            (Operation::Truncate { positions: 5 }, [false, true]),
        ] {
            let frames = [rows(1, 4, 2), rows(1, 6, 2), frame(1, operation)];
            let mut queue = queue(frames);
            for (first, refuted) in [4, 6].into_iter().zip(refuted) {
                assert_eq!(queue.0[0].frame.session, 1);
                let Operation::Activation(one) = queue.pop_front().unwrap().frame.operation else {
                    panic!("an activation");
                };
                assert_eq!((one.first_position, one.refuted), (first, refuted));
            }
        }
    }

    #[test]
    fn nothing_overtakes_a_control_operation_of_its_round() {
        for operation in [
            Operation::Create,
            Operation::Truncate { positions: 1 },
            Operation::Fork { child: 4 },
            Operation::Release,
        ] {
            for round in [0, HOME] {
                let control = frame(2, operation.clone());
                let frames = [rows(1, 0, 1), control, rows(3, 0, 1)];
                let mut queue = queue(frames.map(|frame| Frame { round, ..frame }));
                assert_eq!(batch(&mut queue), [(1, 0, false)], "{operation:?}");
                let next = &queue.front().unwrap().operation;
                assert!(!matches!(next, Operation::Activation(_)), "{operation:?}");
            }
        }
    }

    /// Else what came behind it would have a pass of its own, and so would all that is sent meanwhile.
    #[test]
    fn a_control_operation_closes_no_batch_of_other_rounds() {
        let truncate = frame(3, Operation::Truncate { positions: 1 });
        for (round, other) in [(0, HOME), (HOME, 0), (1, 0)] {
            let control = Frame {
                round: other,
                ..truncate.clone()
            };
            let frames = [rows(1, 0, 1), rows(2, 0, 1), rows(3, 1, 1)];
            let [one, next, own] = frames.map(|frame| Frame { round, ..frame });
            let mut queue = queue([one, control, next, own]);
            assert_eq!(batch(&mut queue), [(1, 0, false), (2, 0, false)], "{round}");
            // Its own session stays behind it.
            assert_eq!(queue.pop_front().unwrap().frame.round, other);
            assert_eq!(batch(&mut queue), [(3, 1, false)]);
        }
    }

    #[test]
    fn nothing_overtakes_a_reset() {
        for round in [0, 1] {
            let reset = Frame {
                round,
                ..frame(0, Operation::Reset(Reset::Probe { nonce: 1 }))
            };
            let mut queue = queue([rows(1, 0, 1), reset, rows(2, 0, 1)]);
            assert_eq!(batch(&mut queue), [(1, 0, false)]);
            assert_eq!(queue.front().unwrap().session, 0);
        }
    }

    /// Session and round of each frame, none of which can run with another.
    fn rounds(frames: &[(SessionId, usize)]) -> Vec<(SessionId, usize)> {
        let mut queue = queue(frames.iter().map(|&(session, round)| Frame {
            round,
            ..rows(session, 0, 1)
        }));
        let mut taken = Vec::new();
        while !queue.is_empty() {
            let round = queue.next_round(HOME);
            let batch = queue.take_batch(round).into_iter();
            taken.extend(batch.map(|one| (one.frame.session, one.frame.round)));
        }
        taken
    }

    #[test]
    fn what_came_home_goes_first() {
        let chunks = [(1, 0), (2, 1), (3, HOME)];
        assert_eq!(rounds(&chunks), [(3, HOME), (1, 0), (2, 1)]);
        // But not before an earlier frame of its session.
        let own = [(1, 0), (1, HOME), (2, HOME)];
        assert_eq!(rounds(&own), [(2, HOME), (1, 0), (1, HOME)]);
    }

    #[test]
    fn what_came_home_overtakes_no_control_operation() {
        let home = Frame {
            round: HOME,
            ..rows(3, 0, 1)
        };
        let mut queue = queue([rows(1, 0, 1), frame(2, Operation::Create), home]);
        assert_eq!(queue.next_round(HOME), 0);
        queue.pop_front();
        queue.pop_front();
        assert_eq!(queue.next_round(HOME), HOME);
    }

    #[test]
    fn a_chunk_that_is_larger_is_computed_alone() {
        let frames = [rows(1, 0, 1), rows(2, 0, 512), rows(3, 0, 1)];
        let mut queue = queue(frames);
        assert_eq!(batch(&mut queue), [(1, 0, false), (3, 0, false)]);
        queue.push(rows(4, 0, 1), Instant::now());
        assert_eq!(batch(&mut queue), [(2, 0, false)]);
        assert_eq!(batch(&mut queue), [(4, 0, false)]);
    }

    #[test]
    fn a_batch_is_bounded() {
        let mut queue = queue((1..=5).map(|session| rows(session, 0, MAX_FRAME_ROWS)));
        assert_eq!(batch(&mut queue).len(), 2);
    }
}
