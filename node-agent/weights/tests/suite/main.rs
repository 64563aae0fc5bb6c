//! What the package promises, against a server that behaves as the Hugging Face hub does, and misbehaves.

// A list of one range is what is meant, everywhere.
#![allow(clippy::single_range_in_vec_init)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cache;
mod faults;
mod header;
mod hub;
mod killed;
mod no_room;
mod shares;
mod support;
mod tls;
