//! Qwen 2 and 2.5 (dense).

use super::llama::DENSE;
use super::{Family, Presence};
use crate::rope::RopePairing;

pub const QWEN2: Family = Family {
    architecture: "qwen2",
    rope_pairing: RopePairing::Halves,
    attention_biases: Presence::Always,
    other_biases: Presence::Never,
    ..DENSE
};
