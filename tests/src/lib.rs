//! The harness of the suites in `tests/`: what they need to start, talk to and break, always the real programs.
//!
//! Nothing here decides what is right: that is the suites' part. A panic here is a failed test.

pub mod api_server;
pub mod assets;
pub mod chart;
pub mod cluster;
pub mod command;
pub mod containerd;
pub mod declared_machines;
pub mod emulated;
pub mod expert_replay;
pub mod fault_sequences;
pub mod free_ports;
pub mod http;
pub mod image_archive;
pub mod inputs;
pub mod lending;
pub mod local_ring;
pub mod machine;
pub mod machine_ring;
pub mod measurements;
pub mod monitoring;
pub mod network;
pub mod node;
pub mod node_agent;
pub mod one_process;
pub mod operator;
pub mod oracle;
pub mod patience;
pub mod process;
pub mod programs;
pub mod python;
pub mod refused_models;
pub mod registry;
mod service;
pub mod siege;
pub mod slow_link;
pub mod split_model;
pub mod statistics;
pub mod trace_collector;

use std::net::SocketAddr;

pub use patience::{PATIENCE, timeout_argument, wait_for, wait_until};

/// A ring that serves.
pub trait Endpoint {
    /// Where it serves HTTP.
    fn address(&self) -> SocketAddr;
    /// The name that requests give.
    fn model(&self) -> &str;
}
