//! The ring's domain types: what goes round, what it cost, why it may be refused. They use no sockets (see `transport`)
//! and no protobuf (see `wire`), except for a hop's metrics (`hop_timing`).

use bytes::Bytes;
use prima_crds::v1alpha1::ring_plan::CHUNK_POSITIONS;

use super::hop_timing::HopTiming;

/// Counts up over the life of a ring; 0 means no session.
pub type SessionId = u64;

/// The most rows that one frame may carry, where a plan does not say more.
pub const MAX_FRAME_ROWS: usize = CHUNK_POSITIONS;

/// One operation on one session, on its way through one round.
#[derive(Clone, Debug)]
pub struct Frame {
    pub session: SessionId,
    /// Counts up within a session; the same in every round.
    pub sequence: u64,
    /// The round whose window the receiver runs (see `schedule`).
    pub round: usize,
    /// W3C traceparent, or empty.
    pub traceparent: String,
    /// At most one entry per member, summed over rounds.
    pub timings: Vec<HopTiming>,
    pub operation: Operation,
}

#[derive(Clone, Debug)]
pub enum Operation {
    Create,
    Activation(Activation),
    /// Shorten the session to this many positions.
    Truncate {
        positions: usize,
    },
    /// Make `child` a copy of the session.
    Fork {
        child: SessionId,
    },
    Release,
    /// Drop all sessions. The only operation without a session.
    Reset(Reset),
}

#[derive(Clone, Debug)]
pub struct Activation {
    /// At most the session's length. What the session holds from there on is dropped first.
    pub first_position: usize,
    pub rows: usize,
    /// How many of the last rows rank 0 reads the output of; after the last window only these are sent.
    pub output_rows: usize,
    /// A later frame takes all of its positions back: nobody computes it, and its rows hold anything.
    pub refuted: bool,
    pub input: FrameInput,
}

/// What rank 0 makes of the rows that come home. No other member knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// What may be the next token: as many numbers as the vocabulary has tokens.
    Logits,
    /// What stands for the text so far: as many numbers as the model is wide.
    States,
    /// How the model judges the text so far: as many numbers as its classifier has rows.
    Scores,
}

#[derive(Clone, Debug)]
pub enum FrameInput {
    /// Only on rank 0, in round 0: not yet embedded.
    Tokens(Vec<u32>),
    /// Row-major numbers in the plan's activation dtype, little-endian.
    Rows(Bytes),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reset {
    /// Rank 0 asks whether the ring is whole.
    Probe { nonce: u64 },
    /// A member has lost its predecessor.
    Lost { rank: usize, cause: String },
}

/// Why a frame was not computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("frame field {field}: expected {expected}, found {found}")]
pub struct Refusal {
    pub field: String,
    pub expected: String,
    pub found: String,
}

/// Event on the way back to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopEvent {
    /// The member that reports it.
    pub rank: usize,
    pub event: MemberEvent,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberEvent {
    /// A frame broke a rule and was not computed.
    Refused {
        session: SessionId,
        sequence: u64,
        refusal: Refusal,
    },
    /// Computing an admitted frame failed.
    Failed {
        session: SessionId,
        sequence: u64,
        cause: String,
    },
    /// There is no stream to the member of this rank, or it is the one that reports this, and ends.
    Unreachable { rank: usize, cause: String },
    /// A long pass gets on.
    Busy,
    /// It is there. Passed on beside all that members compute (see `signs_of_life`).
    Alive,
}

impl Operation {
    /// The positions that a session keeps at most of what it had; `None` if it keeps all.
    pub fn kept_length(&self) -> Option<usize> {
        match self {
            Self::Activation(activation) => Some(activation.first_position),
            Self::Truncate { positions } => Some(*positions),
            Self::Release => Some(0),
            Self::Create | Self::Fork { .. } | Self::Reset(_) => None,
        }
    }
}

impl Frame {
    /// Adds what this member spent to its entry.
    pub fn add_timing(&mut self, spent: HopTiming) {
        match self
            .timings
            .iter_mut()
            .find(|timing| timing.rank == spent.rank)
        {
            Some(timing) => timing.add(&spent),
            None => self.timings.push(spent),
        }
    }
}

impl Refusal {
    pub fn new(field: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self {
            field: field.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}
