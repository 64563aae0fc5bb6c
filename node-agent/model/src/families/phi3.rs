//! Phi 3, 3.5 and 4 (dense). Files name a window that llama.cpp does not use, and of another size than the models were trained with.

use super::llama::DENSE;
use super::{Family, Presence, WindowPattern};
use crate::rope::RopePairing;

pub const PHI3: Family = Family {
    architecture: "phi3",
    rope_pairing: RopePairing::Halves,
    attention_biases: Presence::Never,
    other_biases: Presence::Never,
    windows: WindowPattern::Ignored,
    ..DENSE
};
