//! The harness of the suites in `tests/`: what they need to start, talk to and break, always the real programs.
//!
//! Nothing here decides what is right: that is the suites' part. A panic here is a failed test.

pub mod assets;
pub mod http;
pub mod local_ring;
pub mod memory_group;
pub mod one_process;
pub mod oracle;
pub mod python;
