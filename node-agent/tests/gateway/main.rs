//! The gateway over real TCP, with the test in the ring's place: every status code, body and stream, and what happens
//! when the client or the ring goes away. What the ring itself answers is tested where there is one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod access;
mod apis;
mod client;
mod continuing;
mod embeddings;
mod fill_in;
mod generating;
mod hostile;
mod limits;
mod observing;
mod ollama;
mod refusals;
mod rerank;
mod server;
mod streaming;
