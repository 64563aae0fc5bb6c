//! The harness of the suites in `tests/`: what they need to start, talk to and break, always the real programs.
//!
//! Nothing here decides what is right: that is the suites' part. A panic here is a failed test.

pub mod agent_stage;
pub mod api_server;
pub mod assets;
pub mod chart;
pub mod cluster;
pub mod command;
pub mod containerd;
pub mod declared_machines;
pub mod definitions;
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
pub mod software_gpu;
pub mod split_model;
pub mod statistics;
pub mod stopwatch;
pub mod trace_collector;

use std::net::SocketAddr;

use serde_json::{Value, json};

pub use patience::{PATIENCE, timeout_argument, wait_for, wait_until};

/// A ring that serves.
pub trait Endpoint {
    /// Where it serves HTTP.
    fn address(&self) -> SocketAddr;
    /// The name that requests give.
    fn model(&self) -> &str;

    /// The greedy continuation of `prompt`, at most `max_tokens` tokens; panics unless the answer is 200.
    fn complete(&self, prompt: &str, max_tokens: usize) -> String {
        let body = json!({
            "model": self.model(),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
        });
        answer(self.address(), "/v1/completions", &body, "/choices/0/text")
    }

    /// The greedy answer to one message of a chat; panics unless the answer is 200.
    fn chat(&self, message: &str, max_tokens: usize) -> String {
        let body = json!({
            "model": self.model(),
            "messages": [{"role": "user", "content": message}],
            "max_tokens": max_tokens,
            "temperature": 0,
        });
        let text_at = "/choices/0/message/content";
        answer(self.address(), "/v1/chat/completions", &body, text_at)
    }
}

fn answer(address: SocketAddr, path: &str, body: &Value, text_at: &str) -> String {
    let response = http::post(address, path, body).expect("an answer");
    assert_eq!(response.status, 200, "{}", response.body);
    let json = response.json();
    let text = json.pointer(text_at).and_then(Value::as_str);
    text.unwrap_or_else(|| panic!("no {text_at} in {json}"))
        .to_owned()
}
