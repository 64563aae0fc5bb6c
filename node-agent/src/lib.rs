//! One member of a ring. Every member runs its layer windows and passes activations on (`ring`); rank 0 also owns
//! tokenizer, embedding, output head and sampling (`decode`) and serves HTTP (`gateway`).

pub mod available_memory;
pub mod cluster;
pub mod decode;
pub mod gateway;
pub mod generation;
pub mod inspect;
pub mod inspect_cpu;
pub mod memory_watch;
pub mod plan_source;
mod process_stat;
pub mod profile;
pub mod ring;
pub mod serve;
mod stop_signal;

use std::error::Error;

/// An error with its causes, in one line: `what failed: why: why that`.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
