//! OLMo 2 and 3: norms behind attention and feed-forward, and none before them.

use super::llama::DENSE;
use super::{Family, HeadNormKind, Presence, WindowPattern, WindowedRope};
use crate::rope::RopePairing;

pub const OLMO2: Family = Family {
    architecture: "olmo2",
    rope_pairing: RopePairing::Halves,
    pre_norms: false,
    post_norms: true,
    head_norms: HeadNormKind::AllHeads,
    attention_biases: Presence::Never,
    other_biases: Presence::Never,
    windows: WindowPattern::Some {
        period: 4,
        default: None,
        rope: WindowedRope::Unscaled,
    },
    ..DENSE
};
