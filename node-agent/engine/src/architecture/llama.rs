//! The llama family: Llama 1 to 3.x, SmolLM, TinyLlama, Mistral and whatever else llama.cpp's converter writes as `llama`.
//!
//! Refuses what some files of that name add but this engine does not compute: experts, biases, other activations.

use super::Architecture;
use crate::kernels::RopePairing;

pub(super) const LLAMA: Architecture = Architecture {
    name: "llama",
    // The converter permutes the rows of the query and key matrices so that pairs are neighbours.
    rope_pairing: RopePairing::Interleaved,
    attention_biases: false,
    refused_metadata: &[("expert_count", "a mixture of experts")],
};
