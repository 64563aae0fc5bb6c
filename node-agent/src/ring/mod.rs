//! The ring: every member runs its layer windows on what arrives and sends the result to its successor.
//!
//! `schedule`, `session` and `queue` are pure and decide; `worker` computes; `hop` runs them together on one thread; `transport`
//! and `wire` carry frames between members; `client` is rank 0's handle on the ring; `link` measures the link to a
//! member; `member` starts it all.

mod client;
mod connection;
mod frame;
mod held;
mod hop;
mod hop_timing;
mod link;
mod member;
mod queue;
mod schedule;
mod session;
#[cfg(test)]
pub(crate) mod test_plan;
mod transport;
mod wire;
mod worker;

pub use client::{RingClient, RingError, RingEvent, RoundCost};
pub use frame::{MAX_FRAME_ROWS, Output, SessionId};
pub use hop::HopError;
pub use hop_timing::{HOP_METRICS, HopMetric, HopTiming, Kind};
pub use link::{EchoServer, LinkError, LinkMeasurement, MAX_PAYLOAD_BYTES, measure_link};
pub use member::{Member, MemberError, MemberOptions, session_capacity};
pub use transport::{GENERATION_KEY, RANK_KEY, TransportError};
pub use wire::proto;
pub use worker::WorkerError;
