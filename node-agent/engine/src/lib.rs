//! Runs windows of transformer layers over memory-mapped GGUF weights. Synchronous; no network.

pub mod kernels;
