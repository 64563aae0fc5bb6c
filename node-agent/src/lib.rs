//! One member of a ring. Every member runs its layer windows and passes activations on (`ring`); rank 0 also owns
//! tokenizer, embedding, output head and sampling (`decode`) and serves HTTP (`gateway`).

pub mod api_key_file;
pub mod available_memory;
pub mod cluster;
pub mod decode;
pub mod gateway;
pub mod generation;
mod hidden;
pub mod idle_thread;
pub mod inspect;
pub mod inspect_cpu;
pub mod inspect_gpu;
pub mod lending;
mod local_header;
pub mod memory_watch;
pub mod plan_source;
mod process_stat;
pub mod profile;
pub mod ring;
mod routing_trace;
pub mod serve;
mod stop_signal;
pub mod trace;
