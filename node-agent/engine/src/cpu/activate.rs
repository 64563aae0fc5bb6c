//! What makes the feed-forward part non-linear.

use prima_model::Activation;

use crate::kernels::{self, ThreadPool};

/// gate = activation(gate) * up
pub fn activate(pool: &ThreadPool, activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Silu => kernels::swiglu(pool, gate, up),
        Activation::Gelu => kernels::geglu(pool, gate, up),
        Activation::ClampedSwiglu => kernels::clamped_swiglu(pool, gate, up),
    }
}
