//! Gemma 3, its text part. Variants that embed texts have tensors of their own (`dense_2`), and are refused by them.

use super::gemma2::GEMMA2;
use super::{Family, HeadNormKind, Softcap, Softcaps, WindowPattern, WindowedRope};

pub const GEMMA3: Family = Family {
    architecture: "gemma3",
    head_norms: HeadNormKind::EachHead,
    windows: WindowPattern::Some {
        period: 6,
        default: None,
        rope: WindowedRope::Base(10_000.0),
    },
    softcaps: Softcaps {
        attention: Softcap::Never,
        logits: Softcap::Key(None),
    },
    scaled_by_width: Some(62),
    ..GEMMA2
};
