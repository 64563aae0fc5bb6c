//! OLMoE: experts, and one norm over all heads of queries, and of keys.

use super::llama::DENSE;
use super::{EXPERTS, ExpertKind, Family, HeadNormKind, Presence};
use crate::rope::RopePairing;

pub const OLMOE: Family = Family {
    architecture: "olmoe",
    rope_pairing: RopePairing::Halves,
    head_norms: HeadNormKind::AllHeads,
    attention_biases: Presence::Never,
    other_biases: Presence::Never,
    experts: Some(ExpertKind {
        normalized: false,
        ..EXPERTS
    }),
    ..DENSE
};
