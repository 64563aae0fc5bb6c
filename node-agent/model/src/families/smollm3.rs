//! SmolLM 3.

use super::llama::DENSE;
use super::{Family, Presence};

pub const SMOLLM3: Family = Family {
    architecture: "smollm3",
    unrotated: Some(4),
    other_biases: Presence::Never,
    ..DENSE
};
