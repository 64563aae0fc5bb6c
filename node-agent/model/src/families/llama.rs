//! Llama 1 to 3.x, SmolLM, TinyLlama, Mistral, Mixtral and whatever else llama.cpp's converter writes as `llama`.

use super::{
    EXPERTS, EmbeddingScale, ExpertKind, Family, HeadNormKind, Presence, Softcap, Softcaps,
    WindowPattern,
};
use crate::rope::RopePairing;
use crate::spec::ActivationFunction;

pub const LLAMA: Family = Family {
    experts: Some(ExpertKind {
        presence: Presence::IfThere,
        ..EXPERTS
    }),
    ..DENSE
};

/// Llama without experts, by which other families are described.
pub const DENSE: Family = Family {
    architecture: "llama",
    // The converter permutes the rows of the query and key matrices so that pairs are neighbours.
    rope_pairing: RopePairing::Interleaved,
    sections_pair_halves: false,
    unrotated: None,
    pre_norms: true,
    feed_forward_norm: "ffn_norm.weight",
    post_norms: false,
    latent: false,
    head_norms: HeadNormKind::None,
    attention_biases: Presence::IfThere,
    other_biases: Presence::IfThere,
    activation: ActivationFunction::Silu,
    embedding_scale: EmbeddingScale::One,
    windows: WindowPattern::None,
    softcaps: Softcaps {
        attention: Softcap::Never,
        logits: Softcap::Never,
    },
    sinks: false,
    scaled_by_width: None,
    scale_keys: false,
    long_context_keys: false,
    classifier: Presence::Never,
    experts: None,
};
