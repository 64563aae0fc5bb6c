//! Which parts of layers GPUs compute, whatever makes them compute.

use prima_model::{Activation, Attention, FeedForward, LayerSpec};

use crate::error::EngineError;
use crate::layer::{Layer, Mlp};

/// What GPUs compute, and not every layer has.
pub(super) struct Parts<'a> {
    pub mlp: &'a Mlp,
    pub gate: Gate,
}

/// What a gate's numbers go through.
#[derive(Clone, Copy)]
pub(super) enum Gate {
    Silu,
    Gelu,
}

/// The parts of the layer `index`, if GPUs compute all of them. Every part is named here, so that a new one is not forgotten.
///
/// # Errors
/// [`EngineError::NotOnGpu`] names one that they do not.
pub(super) fn computed(index: usize, layer: &Layer) -> Result<Parts<'_>, EngineError> {
    let LayerSpec {
        attention,
        feed_forward,
    } = &layer.spec;
    let Attention {
        norm: _,
        heads: _,
        kv_heads: _,
        head_dim: _,
        scale: _,
        rope: _,
        temperature: _,
        query: _,
        key: _,
        value: _,
        output: _,
        head_norms: _,
        window: _,
        softcap: _,
        sinks,
        post_norm: _,
    } = attention;
    let FeedForward {
        norm: _,
        activation,
        dense: _,
        experts,
        post_norm: _,
    } = feed_forward;
    let refused = |part| EngineError::NotOnGpu { layer: index, part };
    let (Some(mlp), None) = (&layer.dense, experts) else {
        return Err(refused("experts"));
    };
    if sinks.is_some() {
        return Err(refused("attention sinks"));
    }
    if mlp.output_gate.is_some() {
        return Err(refused("a gate of its feed-forward part"));
    }
    let gate = match activation {
        Activation::Silu => Gate::Silu,
        Activation::Gelu => Gate::Gelu,
        Activation::ClampedSwiglu => return Err(refused("a clamped gate")),
    };
    Ok(Parts { mlp, gate })
}
