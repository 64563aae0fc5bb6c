//! Which sessions a member holds, and which frame of each may come next. Pure: nothing is computed or stored beyond
//! counters. A session stays until rank 0 releases it, or is lost: only rank 0 knows what may be used again.
//!
//! Every stage (round) of a session has a cursor of its own, because chunks follow one another through the ring: while
//! chunk 1 is in round 1, chunk 2 is in round 0. A frame is admitted before its payload is read. Admitting it moves the
//! cursor, so a second copy of it is refused as a replay. The table refuses; it never repairs.

use std::collections::HashMap;

use super::frame::{Frame, Operation, Refusal, SessionId};

/// The sessions of one member.
#[derive(Debug)]
pub struct SessionTable {
    capacity: usize,
    context_length: usize,
    stages: usize,
    sessions: HashMap<SessionId, Session>,
    /// Per stage, the newest session so far. Ids only grow, so a replayed create or fork is seen and refused.
    youngest: Vec<SessionId>,
}

#[derive(Debug)]
struct Session {
    /// `None`: not yet created in this stage, or released already.
    cursors: Vec<Option<Cursor>>,
    /// The sequence of the last frame that took positions back, and how many were left.
    taken_back: (u64, usize),
}

#[derive(Clone, Copy, Debug)]
struct Cursor {
    /// Positions admitted so far.
    length: usize,
    /// Sequence of the last frame admitted.
    sequence: u64,
}

impl SessionTable {
    /// `capacity`: sessions at the same time. `stages`: rounds, on rank 0 one more (see `schedule`).
    pub fn new(capacity: usize, context_length: usize, stages: usize) -> Self {
        Self {
            capacity,
            context_length,
            stages,
            sessions: HashMap::new(),
            youngest: vec![0; stages],
        }
    }

    /// Admits `frame` and moves its session's cursor, or says which field broke which rule and changes nothing.
    /// `frame.round` must be below `stages` (which `wire` checks on arrival). A reset clears the table.
    pub fn admit(&mut self, frame: &Frame) -> Result<(), Refusal> {
        match &frame.operation {
            Operation::Reset(_) => {
                self.clear();
                return Ok(());
            }
            Operation::Create => return self.admit_create(frame),
            // Must pass even where the create was refused: only a release that comes home shows that every member
            // has freed it.
            Operation::Release if self.cursor(frame).is_err() => return Ok(()),
            _ => {}
        }
        let cursor = self.cursor(frame)?;
        if frame.sequence <= cursor.sequence {
            let expected = format!("above {} in round {}", cursor.sequence, frame.round);
            return Err(Refusal::new("sequence", expected, frame.sequence));
        }
        let mut moved = Some(Cursor {
            length: cursor.length,
            sequence: frame.sequence,
        });
        match &frame.operation {
            Operation::Activation(activation) => {
                let first = activation.first_position;
                if first > cursor.length {
                    return Err(Refusal::new(
                        "activation.first_position",
                        format!(
                            "at most {} (the session's length in round {})",
                            cursor.length, frame.round
                        ),
                        first,
                    ));
                }
                let length = first + activation.rows;
                if length > self.context_length {
                    return Err(Refusal::new(
                        "activation.rows",
                        format!(
                            "at most {} (to context length {})",
                            self.context_length - first,
                            self.context_length
                        ),
                        activation.rows,
                    ));
                }
                moved = moved.map(|cursor| Cursor { length, ..cursor });
            }
            Operation::Truncate { positions } => {
                if *positions > cursor.length {
                    let expected = format!("at most {} (the session's length)", cursor.length);
                    return Err(Refusal::new("truncate.positions", expected, positions));
                }
                moved = moved.map(|cursor| Cursor {
                    length: *positions,
                    ..cursor
                });
            }
            Operation::Fork { child } => {
                self.insert(
                    "fork.child",
                    *child,
                    frame.round,
                    Cursor {
                        length: cursor.length,
                        sequence: 0,
                    },
                )?;
            }
            Operation::Release => moved = None,
            Operation::Create | Operation::Reset(_) => {}
        }
        if let Some(session) = self.sessions.get_mut(&frame.session) {
            if let Some(length) = frame.operation.kept_length()
                && length < cursor.length
                && frame.sequence > session.taken_back.0
            {
                session.taken_back = (frame.sequence, length);
            }
            session.cursors[frame.round] = moved;
            if session.cursors.iter().all(Option::is_none) {
                self.sessions.remove(&frame.session);
            }
        }
        Ok(())
    }

    /// Whether a later frame, admitted in any stage, takes all positions of this activation back.
    pub fn takes_back(&self, frame: &Frame) -> bool {
        let (Some(session), Operation::Activation(activation)) =
            (self.sessions.get(&frame.session), &frame.operation)
        else {
            return false;
        };
        let (sequence, length) = session.taken_back;
        frame.sequence < sequence && activation.first_position >= length
    }

    /// Forgets everything: the ring begins anew.
    pub fn clear(&mut self) {
        self.sessions.clear();
        self.youngest.fill(0);
    }

    fn admit_create(&mut self, frame: &Frame) -> Result<(), Refusal> {
        let cursor = Cursor {
            length: 0,
            sequence: frame.sequence,
        };
        self.insert("session", frame.session, frame.round, cursor)
    }

    fn insert(
        &mut self,
        field: &str,
        id: SessionId,
        round: usize,
        cursor: Cursor,
    ) -> Result<(), Refusal> {
        if id <= self.youngest[round] {
            let expected = format!("a new session, above {}", self.youngest[round]);
            return Err(Refusal::new(field, expected, id));
        }
        if !self.sessions.contains_key(&id) && self.sessions.len() >= self.capacity {
            let expected = format!("at most {} sessions", self.capacity);
            return Err(Refusal::new(field, expected, "one more"));
        }
        self.youngest[round] = id;
        let session = self.sessions.entry(id).or_insert_with(|| Session {
            cursors: vec![None; self.stages],
            taken_back: (0, 0),
        });
        session.cursors[round] = Some(cursor);
        Ok(())
    }

    fn cursor(&self, frame: &Frame) -> Result<Cursor, Refusal> {
        self.sessions
            .get(&frame.session)
            .and_then(|session| session.cursors[frame.round])
            .ok_or_else(|| {
                let expected = format!(
                    "one of the {} sessions held in round {}",
                    self.sessions.len(),
                    frame.round
                );
                Refusal::new("session", expected, frame.session)
            })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::ring::frame::{Activation, FrameInput, Reset};

    fn frame(session: SessionId, sequence: u64, round: usize, operation: Operation) -> Frame {
        Frame {
            session,
            sequence,
            round,
            traceparent: String::new(),
            timings: Vec::new(),
            operation,
        }
    }

    fn rows(first_position: usize, rows: usize) -> Operation {
        Operation::Activation(Activation {
            first_position,
            rows,
            output_rows: 0,
            refuted: false,
            input: FrameInput::Rows(Bytes::new()),
        })
    }

    struct Fixture(SessionTable);

    impl Fixture {
        fn new() -> Self {
            Self(SessionTable::new(2, 16, 2))
        }

        fn admit(
            &mut self,
            session: SessionId,
            sequence: u64,
            round: usize,
            operation: Operation,
        ) -> Result<(), Refusal> {
            self.0.admit(&frame(session, sequence, round, operation))
        }

        fn refused(
            &mut self,
            session: SessionId,
            sequence: u64,
            round: usize,
            operation: Operation,
        ) -> String {
            self.admit(session, sequence, round, operation)
                .unwrap_err()
                .field
        }
    }

    #[test]
    fn chunks_follow_one_another_through_the_rounds() {
        let mut table = Fixture::new();
        table.admit(1, 1, 0, Operation::Create).unwrap();
        table.admit(1, 2, 0, rows(0, 4)).unwrap();
        table.admit(1, 3, 0, rows(4, 4)).unwrap();
        table.admit(1, 1, 1, Operation::Create).unwrap();
        table.admit(1, 2, 1, rows(0, 4)).unwrap();
        table.admit(1, 4, 0, rows(8, 8)).unwrap();
        table.admit(1, 3, 1, rows(4, 4)).unwrap();
    }

    #[test]
    fn names_the_field_that_breaks_a_rule() {
        let mut table = Fixture::new();
        assert_eq!(table.refused(1, 1, 0, rows(0, 1)), "session");
        table.admit(1, 1, 0, Operation::Create).unwrap();
        assert_eq!(table.refused(1, 1, 0, Operation::Create), "session");
        assert_eq!(
            table.refused(1, 2, 0, rows(1, 1)),
            "activation.first_position"
        );
        assert_eq!(table.refused(1, 2, 0, rows(0, 17)), "activation.rows");
        table.admit(1, 2, 0, rows(0, 16)).unwrap();
        assert_eq!(table.refused(1, 2, 0, rows(16, 1)), "sequence");
        assert_eq!(table.refused(1, 3, 0, rows(16, 1)), "activation.rows");
        assert_eq!(
            table.refused(1, 3, 0, Operation::Truncate { positions: 17 }),
            "truncate.positions"
        );
        let all = Operation::Truncate { positions: 16 };
        table.admit(1, 3, 0, all).unwrap();
        assert_eq!(table.refused(1, 3, 1, rows(0, 1)), "session");
        assert_eq!(
            table.refused(1, 4, 0, Operation::Fork { child: 1 }),
            "fork.child"
        );
        table.admit(2, 1, 0, Operation::Create).unwrap();
        assert_eq!(table.refused(3, 1, 0, Operation::Create), "session");
        assert_eq!(
            table.refused(1, 4, 0, Operation::Fork { child: 3 }),
            "fork.child"
        );
    }

    #[test]
    fn rows_that_begin_earlier_replace_what_was_there() {
        let mut table = Fixture::new();
        table.admit(1, 1, 0, Operation::Create).unwrap();
        table.admit(1, 2, 0, rows(0, 12)).unwrap();
        table.admit(1, 3, 0, rows(5, 4)).unwrap();
        assert_eq!(
            table.refused(1, 4, 0, rows(10, 1)),
            "activation.first_position"
        );
        assert_eq!(table.refused(1, 4, 0, rows(9, 8)), "activation.rows");
        table.admit(1, 4, 0, rows(9, 7)).unwrap();
    }

    #[test]
    fn a_fork_continues_where_its_parent_stood() {
        let mut table = Fixture::new();
        table.admit(1, 1, 0, Operation::Create).unwrap();
        table.admit(1, 2, 0, rows(0, 5)).unwrap();
        table.admit(1, 3, 0, Operation::Fork { child: 2 }).unwrap();
        table.admit(2, 1, 0, rows(5, 1)).unwrap();
        table
            .admit(1, 4, 0, Operation::Truncate { positions: 2 })
            .unwrap();
        table.admit(1, 5, 0, rows(2, 1)).unwrap();
        table.admit(2, 2, 0, rows(6, 1)).unwrap();
        assert_eq!(table.0.sessions.len(), 2);
    }

    #[test]
    fn what_comes_home_after_it_was_taken_back_is_known() {
        let mut table = Fixture::new();
        table.admit(1, 1, 0, Operation::Create).unwrap();
        table.admit(1, 2, 0, rows(0, 4)).unwrap();
        table.admit(1, 3, 0, rows(4, 4)).unwrap();
        table.admit(1, 4, 0, rows(8, 4)).unwrap();
        let home = |sequence, first| frame(1, sequence, 1, rows(first, 4));
        assert!(!table.0.takes_back(&home(4, 8)));
        table.admit(1, 5, 0, rows(7, 1)).unwrap();
        assert!(table.0.takes_back(&home(4, 8)));
        // One of its positions stays.
        assert!(!table.0.takes_back(&home(3, 4)));
        assert!(!table.0.takes_back(&home(6, 8)));
        table.admit(1, 6, 0, rows(8, 1)).unwrap();
        assert!(table.0.takes_back(&home(4, 8)));
    }

    #[test]
    fn a_session_is_gone_when_every_round_released_it() {
        let mut table = Fixture::new();
        table.admit(1, 1, 0, Operation::Create).unwrap();
        table.admit(1, 1, 1, Operation::Create).unwrap();
        table.admit(1, 2, 0, Operation::Release).unwrap();
        assert_eq!(table.0.sessions.len(), 1);
        assert_eq!(table.refused(1, 3, 0, rows(0, 1)), "session");
        table.admit(1, 2, 1, Operation::Release).unwrap();
        assert!(table.0.sessions.is_empty());
        // A release passes where nothing is held, and a repeated create is refused.
        table.admit(1, 3, 0, Operation::Release).unwrap();
        assert_eq!(table.refused(1, 1, 0, Operation::Create), "session");
        assert!(table.0.sessions.is_empty());
    }

    #[test]
    fn a_reset_clears_and_ids_begin_anew() {
        let mut table = Fixture::new();
        table.admit(2, 1, 0, Operation::Create).unwrap();
        table
            .admit(0, 0, 0, Operation::Reset(Reset::Probe { nonce: 1 }))
            .unwrap();
        assert!(table.0.sessions.is_empty());
        // A new rank 0 counts its sessions from 1 again.
        table.admit(1, 1, 0, Operation::Create).unwrap();
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            Just(Operation::Create),
            (0usize..20, 1usize..8).prop_map(|(first, count)| rows(first, count)),
            (0usize..20).prop_map(|positions| Operation::Truncate { positions }),
            (0u64..6).prop_map(|child| Operation::Fork { child }),
            Just(Operation::Release),
        ]
    }

    proptest! {
        /// Whatever arrives: never more sessions than the capacity, never a position outside the context, and no
        /// frame but a release is admitted twice.
        #[test]
        fn holds_its_bounds(frames in prop::collection::vec((0u64..6, 0u64..12, 0usize..2, operation()), 0..200)) {
            let mut table = Fixture::new();
            for (session, sequence, round, operation) in frames {
                let releases = matches!(operation, Operation::Release);
                let admitted = table.admit(session, sequence, round, operation.clone()).is_ok();
                prop_assert!(table.0.sessions.len() <= 2);
                for held in table.0.sessions.values() {
                    prop_assert!(held.cursors.iter().any(Option::is_some));
                    prop_assert!(held.cursors.iter().flatten().all(|cursor| cursor.length <= 16));
                }
                if admitted && !releases {
                    prop_assert!(table.admit(session, sequence, round, operation).is_err());
                }
            }
        }
    }
}
