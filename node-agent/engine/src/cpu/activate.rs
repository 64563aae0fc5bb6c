//! What makes the feed-forward part non-linear.

use prima_model::ActivationFunction;

use crate::kernels::{self, ThreadPool};

/// gate = activation(gate) * up
pub fn activate(pool: &ThreadPool, activation: ActivationFunction, gate: &mut [f32], up: &[f32]) {
    match activation {
        ActivationFunction::Silu => kernels::swiglu(pool, gate, up),
        ActivationFunction::Gelu => kernels::geglu(pool, gate, up),
        ActivationFunction::ClampedSwiglu => kernels::clamped_swiglu(pool, gate, up),
    }
}
