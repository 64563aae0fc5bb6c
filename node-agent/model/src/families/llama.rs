//! Llama 1 to 3.x, SmolLM, TinyLlama, Mistral and whatever else llama.cpp's converter writes as `llama`.

use super::{EmbeddingScale, Family, HeadNormKind, Presence, Softcap, Softcaps, Windows};
use crate::rope::RopePairing;
use crate::spec::Activation;

pub const LLAMA: Family = Family {
    architecture: "llama",
    // The converter permutes the rows of the query and key matrices so that pairs are neighbours.
    rope_pairing: RopePairing::Interleaved,
    unrotated: None,
    pre_norms: true,
    post_norms: false,
    head_norms: HeadNormKind::None,
    attention_biases: Presence::IfThere,
    other_biases: Presence::IfThere,
    activation: Activation::Silu,
    embedding_scale: EmbeddingScale::One,
    windows: Windows::None,
    softcaps: Softcaps {
        attention: Softcap::Never,
        logits: Softcap::Never,
    },
    scaled_by_width: None,
    scale_keys: false,
    long_context_keys: false,
    classifier: Presence::Never,
    refused: &[("expert_count", "a mixture of experts")],
};
