//! Qwen 3 (dense), and what is distilled into it.

use super::llama::DENSE;
use super::{Family, HeadNormKind, Presence};
use crate::rope::RopePairing;

pub const QWEN3: Family = Family {
    architecture: "qwen3",
    rope_pairing: RopePairing::Halves,
    head_norms: HeadNormKind::EachHead,
    attention_biases: Presence::Never,
    other_biases: Presence::Never,
    classifier: Presence::IfThere,
    ..DENSE
};
