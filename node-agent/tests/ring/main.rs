//! Whole rings in one process, over real sockets: what the ring computes, and what becomes of it when something breaks.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod conversations;
mod deadlines;
mod decoding;
mod embedding;
mod faults;
mod forms;
mod harness;
mod identity;
mod impostors;
mod speculation;
