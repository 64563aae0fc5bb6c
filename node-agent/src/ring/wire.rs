//! Converts protobuf to domain types and back, in free functions. What arrives is untrusted: every field is checked
//! against the plan before a byte of payload is copied. `session` decides which frame may come next.

use std::ops::RangeInclusive;

use prima_crds::v1alpha1::ring_plan::{ActivationDtype, RingPlanSpec};

use super::frame::{
    Activation, Frame, FrameInput, HopEvent, MemberEvent, Operation, Refusal, Reset,
};
use super::proto;
use super::schedule::Schedule;

/// The limits that a plan sets for frames, on one member.
#[derive(Clone, Debug)]
pub struct FrameLimits {
    pub generation: i64,
    pub hidden: usize,
    pub dtype: ActivationDtype,
    /// The most rows of a frame.
    pub rows: usize,
    pub members: usize,
    pub rounds: usize,
    /// Rounds that a frame from the predecessor may carry: rank 0 begins round 0 itself.
    pub arriving: RangeInclusive<usize>,
}

/// A traceparent of version 00 has 55 characters; later versions may be longer.
const MAX_TRACEPARENT: usize = 128;
/// Bytes of a text in errors and causes; longer ones are cut.
const MAX_TEXT: usize = 512;
/// Protobuf around a payload: the fields of a frame, without its timings.
const FRAME_OVERHEAD: usize = 1024;
/// One timing in protobuf, at most: twelve numbers and their tags.
const TIMING_BYTES: usize = 144;
/// An event in protobuf, at most.
pub const MAX_EVENT_BYTES: usize = 4 * MAX_TEXT + 1024;

impl FrameLimits {
    /// `hidden`: the model's activation width in numbers.
    pub fn new(plan: &RingPlanSpec, schedule: &Schedule, hidden: usize) -> Self {
        Self {
            generation: plan.generation,
            hidden,
            dtype: plan.activation_dtype,
            rows: plan.chunk_positions as usize,
            members: schedule.members,
            rounds: schedule.rounds,
            arriving: if schedule.rank == 0 {
                1..=schedule.rounds
            } else {
                0..=schedule.rounds - 1
            },
        }
    }

    /// Size of the largest valid frame as a message, in bytes: what the transport may buffer.
    pub fn max_message_bytes(&self) -> usize {
        self.rows * self.hidden * self.dtype.bytes() + self.members * TIMING_BYTES + FRAME_OVERHEAD
    }
}

/// Checks what a predecessor sent against the limits. The payload stays where it was received.
pub fn frame_from_proto(frame: proto::Frame, limits: &FrameLimits) -> Result<Frame, Refusal> {
    use proto::frame::Operation as Wire;

    let proto::Frame {
        session,
        generation,
        sequence,
        round,
        traceparent,
        timings,
        operation,
    } = frame;
    if generation != limits.generation {
        return Err(Refusal::new("generation", limits.generation, generation));
    }
    let round = round as usize;
    if !limits.arriving.contains(&round) {
        let expected = format!("{}..={}", limits.arriving.start(), limits.arriving.end());
        return Err(Refusal::new("round", expected, round));
    }
    if traceparent.len() > MAX_TRACEPARENT {
        let expected = format!("at most {MAX_TRACEPARENT} bytes");
        return Err(Refusal::new("traceparent", expected, traceparent.len()));
    }
    if timings.len() > limits.members {
        let expected = format!("at most {} entries", limits.members);
        return Err(Refusal::new("timings", expected, timings.len()));
    }
    let operation = match operation {
        Some(Wire::Create(proto::Create {})) => Operation::Create,
        Some(Wire::Activation(activation)) => {
            Operation::Activation(activation_from_proto(activation, round, limits)?)
        }
        Some(Wire::Truncate(proto::Truncate { positions })) => Operation::Truncate {
            positions: to_usize("truncate.positions", positions)?,
        },
        Some(Wire::Fork(proto::Fork { child })) => Operation::Fork { child },
        Some(Wire::Release(proto::Release {})) => Operation::Release,
        Some(Wire::Reset(reset)) => Operation::Reset(reset_from_proto(reset)),
        None => return Err(Refusal::new("operation", "one of six operations", "none")),
    };
    let sessionless = matches!(operation, Operation::Reset(_));
    if sessionless != (session == 0) {
        let expected = if sessionless {
            "0 for a reset"
        } else {
            "above 0"
        };
        return Err(Refusal::new("session", expected, session));
    }
    Ok(Frame {
        session,
        sequence,
        round,
        traceparent,
        timings,
        operation,
    })
}

/// The message for the successor. `None` for tokens, which never leave rank 0.
pub fn frame_to_proto(frame: Frame, limits: &FrameLimits) -> Option<proto::Frame> {
    use proto::frame::Operation as Wire;

    let operation = match frame.operation {
        Operation::Create => Wire::Create(proto::Create {}),
        Operation::Activation(activation) => {
            let FrameInput::Rows(payload) = activation.input else {
                return None;
            };
            Wire::Activation(proto::Activation {
                first_position: activation.first_position as u64,
                rows: activation.rows as u32,
                hidden: limits.hidden as u32,
                dtype: dtype_to_proto(limits.dtype).into(),
                output_rows: activation.output_rows as u32,
                payload,
                refuted: activation.refuted,
            })
        }
        Operation::Truncate { positions } => Wire::Truncate(proto::Truncate {
            positions: positions as u64,
        }),
        Operation::Fork { child } => Wire::Fork(proto::Fork { child }),
        Operation::Release => Wire::Release(proto::Release {}),
        Operation::Reset(Reset::Probe { nonce }) => Wire::Reset(proto::Reset {
            nonce,
            ..Default::default()
        }),
        Operation::Reset(Reset::Lost { rank, cause }) => Wire::Reset(proto::Reset {
            nonce: 0,
            lost_rank: rank as u32,
            cause: cut(cause),
        }),
    };
    Some(proto::Frame {
        session: frame.session,
        generation: limits.generation,
        sequence: frame.sequence,
        round: frame.round as u32,
        traceparent: frame.traceparent,
        timings: frame.timings,
        operation: Some(operation),
    })
}

/// `None` for an event without content, which a newer member may send.
pub fn event_from_proto(wire: proto::HopEvent) -> Option<HopEvent> {
    use proto::hop_event::Event as Wire;

    let event = match wire.event? {
        Wire::Refused(refused) => MemberEvent::Refused {
            session: refused.session,
            sequence: refused.sequence,
            refusal: Refusal {
                field: cut(refused.field),
                expected: cut(refused.expected),
                found: cut(refused.found),
            },
        },
        Wire::Failed(failed) => MemberEvent::Failed {
            session: failed.session,
            sequence: failed.sequence,
            cause: cut(failed.cause),
        },
        Wire::Unreachable(unreachable) => MemberEvent::Unreachable {
            rank: unreachable.lost_rank as usize,
            cause: cut(unreachable.cause),
        },
        Wire::Busy(proto::Busy {}) => MemberEvent::Busy,
        Wire::Alive(proto::Alive {}) => MemberEvent::Alive,
    };
    Some(HopEvent {
        rank: wire.rank as usize,
        event,
    })
}

pub fn event_to_proto(event: HopEvent) -> proto::HopEvent {
    use proto::hop_event::Event as Wire;

    let HopEvent { rank, event } = event;
    let event = match event {
        MemberEvent::Refused {
            session,
            sequence,
            refusal,
        } => Wire::Refused(proto::Refused {
            session,
            sequence,
            field: cut(refusal.field),
            expected: cut(refusal.expected),
            found: cut(refusal.found),
        }),
        MemberEvent::Failed {
            session,
            sequence,
            cause,
        } => Wire::Failed(proto::Failed {
            session,
            sequence,
            cause: cut(cause),
        }),
        MemberEvent::Busy => Wire::Busy(proto::Busy {}),
        MemberEvent::Alive => Wire::Alive(proto::Alive {}),
        MemberEvent::Unreachable { rank, cause } => Wire::Unreachable(proto::Unreachable {
            lost_rank: rank as u32,
            cause: cut(cause),
        }),
    };
    proto::HopEvent {
        rank: rank as u32,
        event: Some(event),
    }
}

fn activation_from_proto(
    activation: proto::Activation,
    round: usize,
    limits: &FrameLimits,
) -> Result<Activation, Refusal> {
    let proto::Activation {
        first_position,
        rows,
        hidden,
        dtype,
        output_rows,
        payload,
        refuted,
    } = activation;
    let (rows, output_rows) = (rows as usize, output_rows as usize);
    if !(1..=limits.rows).contains(&rows) {
        return Err(Refusal::new(
            "activation.rows",
            format!("1..={}", limits.rows),
            rows,
        ));
    }
    if output_rows > rows {
        return Err(Refusal::new(
            "activation.output_rows",
            format!("at most {rows} (rows)"),
            output_rows,
        ));
    }
    if hidden as usize != limits.hidden {
        return Err(Refusal::new("activation.hidden", limits.hidden, hidden));
    }
    let expected = dtype_to_proto(limits.dtype);
    if dtype != i32::from(expected) {
        let found = proto::Dtype::try_from(dtype).map_or_else(
            |_| dtype.to_string(),
            |dtype| dtype.as_str_name().to_owned(),
        );
        return Err(Refusal::new(
            "activation.dtype",
            expected.as_str_name(),
            found,
        ));
    }
    let carried = if round == limits.rounds {
        output_rows
    } else {
        rows
    };
    let bytes = carried * limits.hidden * limits.dtype.bytes();
    if payload.len() != bytes {
        let expected = format!(
            "{bytes} bytes ({carried} rows of {} numbers)",
            limits.hidden
        );
        return Err(Refusal::new("activation.payload", expected, payload.len()));
    }
    Ok(Activation {
        first_position: to_usize("activation.first_position", first_position)?,
        rows,
        output_rows,
        refuted,
        input: FrameInput::Rows(payload),
    })
}

fn reset_from_proto(reset: proto::Reset) -> Reset {
    match reset.nonce {
        0 => Reset::Lost {
            rank: reset.lost_rank as usize,
            cause: cut(reset.cause),
        },
        nonce => Reset::Probe { nonce },
    }
}

fn dtype_to_proto(dtype: ActivationDtype) -> proto::Dtype {
    match dtype {
        ActivationDtype::F32 => proto::Dtype::F32,
        ActivationDtype::BF16 => proto::Dtype::Bf16,
        ActivationDtype::F16 => proto::Dtype::F16,
    }
}

fn to_usize(field: &str, value: u64) -> Result<usize, Refusal> {
    usize::try_from(value).map_err(|_| Refusal::new(field, "a number that fits the machine", value))
}

/// Cuts text from or for a peer to the limit.
fn cut(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        let end = (0..=MAX_TEXT).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
    }
    text
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use proptest::strategy::ValueTree as _;
    use proptest::test_runner::TestRunner;
    use prost::Message as _;

    use super::*;
    use crate::ring::frame::MAX_FRAME_ROWS;
    use crate::ring::payload::payload;
    use crate::ring::test_plan::plan;

    const HIDDEN: usize = 8;

    fn limits(rank: usize) -> FrameLimits {
        let plan = plan(4, 3, 2, &[1, 2, 3]);
        FrameLimits::new(&plan, &Schedule::new(&plan, rank).unwrap(), HIDDEN)
    }

    fn valid() -> proto::Frame {
        let numbers: Vec<f32> = (0..2 * HIDDEN).map(|number| number as f32 / 3.0).collect();
        proto::Frame {
            session: 1,
            generation: 7,
            sequence: 2,
            round: 1,
            traceparent: String::new(),
            timings: Vec::new(),
            operation: Some(proto::frame::Operation::Activation(proto::Activation {
                first_position: 5,
                rows: 2,
                hidden: HIDDEN as u32,
                dtype: proto::Dtype::F32.into(),
                output_rows: 1,
                payload: payload(ActivationDtype::F32, &numbers),
                refuted: true,
            })),
        }
    }

    fn activation(change: impl Fn(&mut proto::Activation)) -> proto::Frame {
        let mut frame = valid();
        if let Some(proto::frame::Operation::Activation(activation)) = &mut frame.operation {
            change(activation);
        }
        frame
    }

    #[test]
    fn each_broken_field_is_refused_by_name() {
        let cases: Vec<(&str, proto::Frame)> = vec![
            (
                "generation",
                proto::Frame {
                    generation: 6,
                    ..valid()
                },
            ),
            (
                "round",
                proto::Frame {
                    round: 2,
                    ..valid()
                },
            ),
            (
                "round",
                proto::Frame {
                    round: u32::MAX,
                    ..valid()
                },
            ),
            (
                "session",
                proto::Frame {
                    session: 0,
                    ..valid()
                },
            ),
            (
                "operation",
                proto::Frame {
                    operation: None,
                    ..valid()
                },
            ),
            (
                "traceparent",
                proto::Frame {
                    traceparent: "x".repeat(129),
                    ..valid()
                },
            ),
            (
                "timings",
                proto::Frame {
                    timings: vec![proto::HopTiming::default(); 4],
                    ..valid()
                },
            ),
            (
                "session",
                proto::Frame {
                    operation: Some(proto::frame::Operation::Reset(proto::Reset::default())),
                    ..valid()
                },
            ),
            ("activation.rows", activation(|a| a.rows = 0)),
            (
                "activation.rows",
                activation(|a| a.rows = MAX_FRAME_ROWS as u32 + 1),
            ),
            ("activation.rows", activation(|a| a.rows = u32::MAX)),
            ("activation.output_rows", activation(|a| a.output_rows = 3)),
            ("activation.hidden", activation(|a| a.hidden = 9)),
            (
                "activation.dtype",
                activation(|a| a.dtype = proto::Dtype::F16.into()),
            ),
            ("activation.dtype", activation(|a| a.dtype = 99)),
            (
                "activation.payload",
                activation(|a| a.payload = Bytes::new()),
            ),
            ("activation.payload", activation(|a| a.rows = 1)),
        ];
        for (field, frame) in cases {
            let refusal =
                frame_from_proto(frame.clone(), &limits(1)).expect_err(&format!("{frame:?}"));
            assert_eq!(refusal.field, field, "{refusal}");
        }
    }

    #[test]
    fn rank_0_takes_its_frames_back_only_with_their_output_rows() {
        let home = |rows: usize| {
            let mut frame = activation(|a| {
                a.payload = payload(ActivationDtype::F32, &vec![1.0; rows * HIDDEN])
            });
            frame.round = 2;
            frame_from_proto(frame, &limits(0))
        };
        assert!(home(1).is_ok());
        assert_eq!(home(2).unwrap_err().field, "activation.payload");
        let begun = proto::Frame {
            round: 0,
            ..valid()
        };
        assert_eq!(
            frame_from_proto(begun, &limits(0)).unwrap_err().field,
            "round"
        );
    }

    #[test]
    fn frames_and_events_survive_the_wire() {
        let limits = limits(1);
        let wire = valid();
        let frame = frame_from_proto(wire.clone(), &limits).unwrap();
        assert_eq!(frame_to_proto(frame, &limits), Some(wire));
        for operation in [
            Operation::Create,
            Operation::Truncate { positions: 3 },
            Operation::Fork { child: 9 },
            Operation::Release,
        ] {
            let mut frame = frame_from_proto(valid(), &limits).unwrap();
            frame.operation = operation;
            let spent = |rank, compute_ns| proto::HopTiming {
                rank,
                compute_ns,
                ..proto::HopTiming::default()
            };
            frame.add_timing(spent(1, 5));
            frame.add_timing(spent(2, 3));
            frame.add_timing(spent(1, 6));
            let sent = frame_to_proto(frame.clone(), &limits).unwrap();
            let back = frame_from_proto(sent, &limits).unwrap();
            assert_eq!(format!("{frame:?}"), format!("{back:?}"));
            assert_eq!(back.timings, [spent(1, 11), spent(2, 3)]);
        }
        for event in [
            MemberEvent::Refused {
                session: 1,
                sequence: 2,
                refusal: Refusal::new("round", 1, 2),
            },
            MemberEvent::Failed {
                session: 1,
                sequence: 2,
                cause: "out of memory".into(),
            },
            MemberEvent::Unreachable {
                rank: 2,
                cause: "broken pipe".into(),
            },
            MemberEvent::Busy,
            MemberEvent::Alive,
        ] {
            let event = HopEvent { rank: 1, event };
            assert_eq!(event_from_proto(event_to_proto(event.clone())), Some(event));
        }
    }

    #[test]
    fn an_event_that_is_not_known_yet_is_left_alone() {
        // Of rank 1: an empty message in a field of a later version.
        let newer = proto::HopEvent::decode([0x08_u8, 1, 0x7a, 0].as_slice()).unwrap();
        assert_eq!((newer.rank, &newer.event), (1, &None));
        assert_eq!(event_from_proto(newer), None);
    }

    #[test]
    fn a_largest_frame_fits_the_message_limit() {
        const MEMBERS: usize = 100;
        const ROWS: usize = 512;
        let limits = FrameLimits {
            members: MEMBERS,
            rows: ROWS,
            ..limits(1)
        };
        let mut frame = activation(|a| {
            a.rows = ROWS as u32;
            a.first_position = u64::MAX >> 1;
            a.payload = payload(ActivationDtype::F32, &vec![1.0; ROWS * HIDDEN]);
        });
        frame.session = u64::MAX;
        frame.sequence = u64::MAX;
        frame.traceparent = "0".repeat(MAX_TRACEPARENT);
        frame.timings = vec![
            proto::HopTiming {
                rank: u32::MAX,
                compute_ns: u64::MAX,
                wait_ns: u64::MAX,
                disk_ns: u64::MAX,
                kv_bytes: u64::MAX,
                read_bytes: u64::MAX,
                resident_bytes: u64::MAX,
                streamed_bytes: u64::MAX,
                memory_pressure_ppm: u64::MAX,
                expert_hits: u64::MAX,
                expert_misses: u64::MAX,
                gpu_copied_bytes: u64::MAX,
                missing_experts_ppm: u64::MAX,
            };
            MEMBERS
        ];
        assert!(frame.encoded_len() <= limits.max_message_bytes());
        // Without using the room left for other fields.
        let without = proto::Frame {
            timings: Vec::new(),
            ..frame.clone()
        };
        assert!(frame.encoded_len() - without.encoded_len() <= MEMBERS * TIMING_BYTES);
        assert!(frame_from_proto(frame, &limits).is_ok());
    }

    #[test]
    fn a_largest_event_fits_the_message_limit() {
        let text = "x".repeat(2 * MAX_TEXT);
        let event = MemberEvent::Refused {
            session: u64::MAX,
            sequence: u64::MAX,
            refusal: Refusal::new(&text, &text, &text),
        };
        let event = event_to_proto(HopEvent {
            rank: usize::MAX,
            event,
        });
        assert!(
            event.encoded_len() > 3 * MAX_TEXT,
            "its texts are not long ones"
        );
        assert!(event.encoded_len() <= MAX_EVENT_BYTES);
    }

    /// A valid frame of each kind, as bytes of the wire.
    fn valid_frames() -> Vec<Vec<u8>> {
        use proto::frame::Operation as Wire;

        let reset = |reset| proto::Frame {
            session: 0,
            operation: Some(Wire::Reset(reset)),
            ..valid()
        };
        let with = |operation| proto::Frame {
            traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into(),
            timings: vec![proto::HopTiming::default(); 3],
            operation: Some(operation),
            ..valid()
        };
        let frames = [
            valid(),
            with(Wire::Create(proto::Create {})),
            with(Wire::Truncate(proto::Truncate { positions: 3 })),
            with(Wire::Fork(proto::Fork { child: 9 })),
            with(Wire::Release(proto::Release {})),
            reset(proto::Reset {
                nonce: 5,
                ..proto::Reset::default()
            }),
            reset(proto::Reset {
                lost_rank: 2,
                cause: "x".repeat(MAX_TEXT),
                ..proto::Reset::default()
            }),
        ];
        frames.iter().map(proto::Frame::encode_to_vec).collect()
    }

    /// Whether rank 1 of [`limits`] may compute this frame, judged by the message's own fields.
    fn is_within_bounds(wire: &proto::Frame) -> bool {
        use proto::frame::Operation as Wire;

        let Some(operation) = &wire.operation else {
            return false;
        };
        let operation_holds = match operation {
            Wire::Activation(activation) => {
                let (rows, output_rows) =
                    (activation.rows as usize, activation.output_rows as usize);
                (1..=MAX_FRAME_ROWS).contains(&rows)
                    && output_rows <= rows
                    && activation.hidden as usize == HIDDEN
                    && activation.dtype == i32::from(proto::Dtype::F32)
                    && activation.payload.len() == rows * HIDDEN * 4
            }
            Wire::Create(_)
            | Wire::Truncate(_)
            | Wire::Fork(_)
            | Wire::Release(_)
            | Wire::Reset(_) => true,
        };
        operation_holds
            && matches!(operation, Wire::Reset(_)) == (wire.session == 0)
            && wire.generation == 7
            && wire.round < 2
            && wire.traceparent.len() <= 128
            && wire.timings.len() <= 3
    }

    /// Sets one of a frame's fields to a value near its bounds.
    fn set_field(frame: &mut proto::Frame, field: u8, value: u8) {
        use proto::frame::Operation as Wire;

        let value = u64::from(value);
        match field {
            0 => frame.session = value % 3,
            1 => frame.generation = 6 + value as i64 % 3,
            2 => frame.round = value as u32 % 4,
            3 => frame.traceparent = "0".repeat(127 + value as usize % 3),
            4 => frame.timings = vec![proto::HopTiming::default(); 2 + value as usize % 3],
            _ => {}
        }
        if let Some(Wire::Activation(activation)) = &mut frame.operation {
            let number = 4 * HIDDEN;
            match field {
                5 => activation.rows = value as u32 % 4,
                6 => activation.output_rows = value as u32 % 4,
                7 => activation.hidden = HIDDEN as u32 - 1 + value as u32 % 3,
                8 => activation.dtype = value as i32 % 5,
                9 => activation.payload = vec![0; number + value as usize % (2 * number)].into(),
                10 => activation.payload = vec![0; number * (value as usize % 4)].into(),
                11 => {
                    let rows = MAX_FRAME_ROWS - 1 + value as usize % 3;
                    activation.rows = rows as u32;
                    activation.payload = vec![0; number * rows].into();
                }
                _ => {}
            }
        }
    }

    /// Sets some fields of valid frames anew, then changes, removes or adds some bytes. A frame that still parses is taken if and only if
    /// it is within the bounds.
    #[test]
    fn mutated_frames_are_taken_exactly_when_within_bounds() {
        const MUTANTS: u32 = 20_000;
        let limits = limits(1);
        let frames = valid_frames();
        for bytes in &frames {
            let wire = proto::Frame::decode(bytes.as_slice()).unwrap();
            assert!(is_within_bounds(&wire), "{wire:?}");
            frame_from_proto(wire, &limits).unwrap();
        }
        let fields = prop::collection::vec((0..12_u8, any::<u8>()), 0..4);
        let edits =
            prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 0..3);
        // The first is the activation, which has most fields.
        let frame = prop_oneof![Just(0), 0..frames.len()];
        let mutation = (frame, fields, edits);
        let mut runner = TestRunner::deterministic();
        let (mut taken, mut refused) = (0, 0);
        for _ in 0..MUTANTS {
            let (frame, fields, edits) = mutation.new_tree(&mut runner).unwrap().current();
            let mut wire = proto::Frame::decode(frames[frame].as_slice()).unwrap();
            for (field, value) in fields {
                set_field(&mut wire, field, value);
            }
            let mut bytes = wire.encode_to_vec();
            for (at, byte, edit) in edits {
                // Most of a frame is payload, in which nothing can be wrong.
                let at = at.index(bytes.len().min(80));
                match edit {
                    0 => bytes[at] ^= 1 << (byte % 8),
                    1 => bytes[at] = byte,
                    2 => bytes.insert(at, byte),
                    _ => drop(bytes.remove(at)),
                }
            }
            let Ok(wire) = proto::Frame::decode(bytes.as_slice()) else {
                continue;
            };
            let result = frame_from_proto(wire.clone(), &limits);
            assert_eq!(
                result.is_ok(),
                is_within_bounds(&wire),
                "{wire:?}: {result:?}"
            );
            match result {
                Ok(frame) => {
                    taken += 1;
                    if let Operation::Reset(Reset::Lost { cause, .. }) = frame.operation {
                        assert!(cause.len() <= MAX_TEXT);
                    }
                }
                Err(_) => refused += 1,
            }
        }
        // There are enough mutants on both sides of the bounds.
        assert!(
            taken > MUTANTS / 10 && refused > MUTANTS / 5,
            "{taken} taken, {refused} refused"
        );
    }
}
