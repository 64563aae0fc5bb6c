//! gpt-oss: biases everywhere, a window in every other layer, a score for attending to nothing, an activation of its own.

use super::llama::DENSE;
use super::{EXPERTS, ExpertKind, Family, Presence, WindowPattern, WindowedRope};
use crate::rope::RopePairing;
use crate::spec::{ActivationFunction, Gating};

pub const GPT_OSS: Family = Family {
    architecture: "gpt-oss",
    rope_pairing: RopePairing::Halves,
    feed_forward_norm: "post_attention_norm.weight",
    attention_biases: Presence::Always,
    other_biases: Presence::Always,
    activation: ActivationFunction::ClampedSwiglu,
    windows: WindowPattern::Some {
        period: 2,
        default: Some(128),
        rope: WindowedRope::Same,
    },
    sinks: true,
    experts: Some(ExpertKind {
        gating: Gating::SoftmaxOfChosen,
        normalized: false,
        biases: Presence::Always,
        ..EXPERTS
    }),
    ..DENSE
};
