//! What the package promises, against a server that behaves as the Hugging Face hub does, and misbehaves.

#![allow(
    clippy::single_range_in_vec_init,
    reason = "a list of one range is meant"
)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod cache;
mod faults;
mod header;
mod hub;
mod killed;
mod no_room;
mod several_files;
mod shares;
mod support;
mod tls;
