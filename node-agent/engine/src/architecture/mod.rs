//! The differences between model families, as data that the engine's single forward pass reads. A new family whose layers have the
//! same parts needs only one more file with one more constant.
//!
//! Refuses: to compute anything, and to guess at families that it does not list.

mod llama;
mod qwen2;

use crate::kernels::RopePairing;

/// A family of models, by the name that GGUF files give it in `general.architecture`.
#[derive(Debug)]
pub struct Architecture {
    /// The name, which is also the prefix of the family's metadata keys.
    pub name: &'static str,
    /// Which two elements of a head RoPE rotates together.
    pub rope_pairing: RopePairing,
    /// Whether the query, key and value projections have biases.
    pub attention_biases: bool,
    /// Keys (without the prefix) that must be absent or zero, and the feature that each would turn on.
    pub refused_metadata: &'static [(&'static str, &'static str)],
}

/// One side of a tensor, in terms of the model's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Hidden,
    /// All query heads side by side.
    Queries,
    /// All key (or value) heads side by side.
    KeysValues,
    FeedForward,
    Vocabulary,
}

/// A tensor that a family's files must have.
#[derive(Debug, Clone, Copy)]
pub struct TensorSpec {
    /// Name, in a layer without its `blk.N.`.
    pub name: &'static str,
    /// In GGUF order: inputs first, then outputs.
    pub shape: &'static [Side],
}

/// The families that the engine runs.
pub const ALL: &[&Architecture] = &[&llama::LLAMA, &qwen2::QWEN2];

pub const EMBEDDING: TensorSpec = TensorSpec {
    name: "token_embd.weight",
    shape: &[Side::Hidden, Side::Vocabulary],
};
pub const OUTPUT_NORM: TensorSpec = TensorSpec {
    name: "output_norm.weight",
    shape: &[Side::Hidden],
};
/// Absent in models that reuse the embedding for it.
pub const OUTPUT: TensorSpec = TensorSpec {
    name: "output.weight",
    shape: &[Side::Hidden, Side::Vocabulary],
};
/// Optional: one divisor for each RoPE frequency (Llama 3.1 and later store their scaling this way).
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

pub const ATTENTION_NORM: TensorSpec = TensorSpec {
    name: "attn_norm.weight",
    shape: &[Side::Hidden],
};
pub const QUERY: TensorSpec = TensorSpec {
    name: "attn_q.weight",
    shape: &[Side::Hidden, Side::Queries],
};
pub const KEY: TensorSpec = TensorSpec {
    name: "attn_k.weight",
    shape: &[Side::Hidden, Side::KeysValues],
};
pub const VALUE: TensorSpec = TensorSpec {
    name: "attn_v.weight",
    shape: &[Side::Hidden, Side::KeysValues],
};
pub const QUERY_BIAS: TensorSpec = TensorSpec {
    name: "attn_q.bias",
    shape: &[Side::Queries],
};
pub const KEY_BIAS: TensorSpec = TensorSpec {
    name: "attn_k.bias",
    shape: &[Side::KeysValues],
};
pub const VALUE_BIAS: TensorSpec = TensorSpec {
    name: "attn_v.bias",
    shape: &[Side::KeysValues],
};
pub const ATTENTION_OUTPUT: TensorSpec = TensorSpec {
    name: "attn_output.weight",
    shape: &[Side::Queries, Side::Hidden],
};
pub const FEED_FORWARD_NORM: TensorSpec = TensorSpec {
    name: "ffn_norm.weight",
    shape: &[Side::Hidden],
};
pub const GATE: TensorSpec = TensorSpec {
    name: "ffn_gate.weight",
    shape: &[Side::Hidden, Side::FeedForward],
};
pub const UP: TensorSpec = TensorSpec {
    name: "ffn_up.weight",
    shape: &[Side::Hidden, Side::FeedForward],
};
pub const DOWN: TensorSpec = TensorSpec {
    name: "ffn_down.weight",
    shape: &[Side::FeedForward, Side::Hidden],
};

const LAYER: &[TensorSpec] = &[
    ATTENTION_NORM,
    QUERY,
    KEY,
    VALUE,
    ATTENTION_OUTPUT,
    FEED_FORWARD_NORM,
    GATE,
    UP,
    DOWN,
];
/// A layer's matrices in the order in which a pass uses them.
pub const MATRICES: &[TensorSpec] = &[QUERY, KEY, VALUE, ATTENTION_OUTPUT, GATE, UP, DOWN];
const ATTENTION_BIASES: &[TensorSpec] = &[QUERY_BIAS, KEY_BIAS, VALUE_BIAS];

impl Architecture {
    /// The family of this name.
    pub fn by_name(name: &str) -> Option<&'static Architecture> {
        ALL.iter().copied().find(|known| known.name == name)
    }

    /// What every layer consists of.
    pub fn layer_tensors(&self) -> impl Iterator<Item = &'static TensorSpec> {
        let biases = if self.attention_biases {
            ATTENTION_BIASES
        } else {
            &[]
        };
        LAYER.iter().chain(biases)
    }
}
