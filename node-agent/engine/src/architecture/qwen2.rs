//! The Qwen 2 and 2.5 family (dense): as llama, with biases on queries, keys and values, and RoPE over halves.

use super::Architecture;
use crate::kernels::RopePairing;

pub(super) const QWEN2: Architecture = Architecture {
    name: "qwen2",
    rope_pairing: RopePairing::Halves,
    attention_biases: true,
    refused_metadata: &[("expert_count", "a mixture of experts")],
};
