//! The ring: every member runs its layer windows on what arrives and sends the result to its successor.
//!
//! `schedule`, `session` and `queue` are pure and decide; `worker` computes; `hop` runs them together on one thread; `transport`,
//! `wire` and `payload` carry frames between members; `identity`, `tls` and `greeting` say who is a neighbour; `signs_of_life` who is there;
//! `client` is rank 0's handle on the ring; `link` measures the link to a member; `member` starts it all.

mod client;
pub(crate) mod connection;
mod frame;
mod greeting;
mod held;
mod hop;
mod hop_timing;
mod identity;
mod link;
mod member;
mod member_gpus;
mod payload;
pub mod proto;
mod queue;
mod schedule;
mod session;
mod signs_of_life;
#[cfg(test)]
pub(crate) mod test_plan;
mod tls;
mod transport;
mod wire;
mod worker;

/// What `tests/fuzz` gives frames to.
pub mod fuzzed {
    pub use super::frame::Operation;
    pub use super::schedule::Schedule;
    pub use super::session::SessionTable;
    pub use super::wire::{
        FrameLimits, event_from_proto, event_to_proto, frame_from_proto, frame_to_proto,
    };
}

pub use client::{RingClient, RingError, RingEvent, RoundCost};
pub use frame::{MAX_FRAME_ROWS, Output, SessionId};
pub use greeting::{GENERATION_KEY, RANK_KEY, RING_VERSION, UID_KEY, VERSION_KEY};
pub use hop::HopError;
pub use hop_timing::{HOP_METRICS, HopMetric, HopTiming, MetricKind};
pub use identity::{Fingerprint, FingerprintStart, Identity, IdentityError, NoFingerprint};
pub use link::{EchoServer, LinkError, LinkMeasurement, MAX_PAYLOAD_BYTES, measure_link};
pub use member::{Member, MemberError, MemberOptions, session_capacity};
pub use signs_of_life::{SILENT_FOR, STOOD_STILL};
pub use tls::{
    Accepted, Connector, OwnKey, Peer, Pins, Proven, connector, fixed, incoming, is_other_key,
    server_config,
};
pub use transport::TransportError;
pub use worker::WorkerError;
