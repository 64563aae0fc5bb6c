//! What the package promises, against a server that behaves as the Hugging Face hub does, and misbehaves.

#[path = "../support/mod.rs"]
mod support;

mod cache;
mod faults;
mod header;
mod hub;
mod killed;
mod shares;
