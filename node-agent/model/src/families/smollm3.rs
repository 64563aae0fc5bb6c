//! SmolLM 3.

use super::llama::LLAMA;
use super::{Family, Presence};

pub const SMOLLM3: Family = Family {
    architecture: "smollm3",
    unrotated: Some(4),
    other_biases: Presence::Never,
    ..LLAMA
};
