//! GLM 4.5 to 4.7 with experts: some dense layers first, then experts that are chosen with a bias, and one for all tokens.

use super::llama::DENSE;
use super::{EXPERTS, ExpertKind, Family, HeadNormKind, Presence};
use crate::rope::RopePairing;
use crate::spec::Gating;

pub const GLM4MOE: Family = Family {
    architecture: "glm4moe",
    rope_pairing: RopePairing::Halves,
    feed_forward_norm: "post_attention_norm.weight",
    head_norms: HeadNormKind::EachHeadIfThere,
    other_biases: Presence::Never,
    experts: Some(ExpertKind {
        gating: Gating::Sigmoid,
        selection_bias: Presence::Always,
        shared: Presence::IfThere,
        ..EXPERTS
    }),
    ..DENSE
};
