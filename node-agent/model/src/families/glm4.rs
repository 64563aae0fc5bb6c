//! GLM 4 (dense): norms before and behind attention and feed-forward, half of each head rotated.

use super::llama::DENSE;
use super::{Family, Presence};

pub const GLM4: Family = Family {
    architecture: "glm4",
    sections_pair_halves: true,
    post_norms: true,
    other_biases: Presence::Never,
    ..DENSE
};
