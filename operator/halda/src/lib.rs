//! Halda: who runs which layers, on CPU or GPU, in how many rounds, so that a request is answered soonest.
//!
//! Documents in, plan and reasons out; no I/O, and of the environment only how many processors there are. The mathematics is that of
//! "PRIMA.CPP: Speeding Up 70B-Scale LLM Inference on Low-Resource Everyday Home Clusters" (Li et al. 2025, arXiv 2504.08791), with
//! what it leaves open settled as [`latency`] says. [`reference`] is its Algorithm 1 as published, to compare with.
//!
//! | paper | here |
//! | --- | --- |
//! | M, L, k | `devices.len()`, `model.layers`, `rounds` |
//! | l_m, l_m^gpu | `LayerShare::cpu_layers + LayerShare::gpu_layers`, `LayerShare::gpu_layers` |
//! | sum f^q/s^{cpu,q} + t^{kv_cpy} + b'/T | `LayerCost::decode_seconds` |
//! | b, b' | `model.layer_bytes`, and with `model.layer_kv_bytes` (on GPUs `model.gpu_layer_kv_bytes`) |
//! | b_i/V, b_o | part of `model.head_bytes` |
//! | c^cpu, c^gpu | `model.buffer_bytes`, `model.gpu_buffer_bytes` |
//! | d^avail + d^swapout, d_cuda, d_metal | `Device::memory_bytes`, `GpuCost::memory_bytes` |
//! | s^disk | `Device::disk_bytes_per_second` |
//! | t^comm | `HopCost::decode_seconds` |
//!
//! The paper has no mixtures of experts: of weights that do not fit, experts come first, and a token reads those that it uses
//! (`model.experts`), at a rate of their own (`Device::expert_read_bytes_per_second`). It has no draft models; one adds to
//! `model.rank0_bytes` and a part of `Device::head_seconds` to rank 0.

pub mod check;
pub mod found;
pub mod greedy;
pub mod input;
pub mod latency;
mod milp;
mod order;
pub mod plan;
pub mod reference;
pub mod search;
pub mod windows;

pub use input::{InputError, Options, PlanningInput};
pub use plan::{Plan, PlanError, PlanReport, plan, plan_ring};
