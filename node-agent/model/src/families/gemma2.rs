//! Gemma 2. The converter has added the 1 to the weights of norms.

use super::llama::DENSE;
use super::{EmbeddingScale, Family, Presence, Softcap, Softcaps, WindowPattern, WindowedRope};
use crate::rope::RopePairing;
use crate::spec::ActivationFunction;

pub const GEMMA2: Family = Family {
    architecture: "gemma2",
    rope_pairing: RopePairing::Halves,
    post_norms: true,
    attention_biases: Presence::Never,
    other_biases: Presence::Never,
    activation: ActivationFunction::Gelu,
    embedding_scale: EmbeddingScale::RootOfWidth,
    windows: WindowPattern::Some {
        period: 2,
        default: Some(4096),
        rope: WindowedRope::Same,
    },
    softcaps: Softcaps {
        attention: Softcap::Key(Some(50.0)),
        logits: Softcap::Key(Some(30.0)),
    },
    scaled_by_width: Some(46),
    ..DENSE
};
