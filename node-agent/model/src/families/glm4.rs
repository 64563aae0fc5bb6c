//! GLM 4 (dense): norms before and behind attention and feed-forward, half of each head rotated.

use super::llama::LLAMA;
use super::{Family, Presence};

pub const GLM4: Family = Family {
    architecture: "glm4",
    post_norms: true,
    other_biases: Presence::Never,
    ..LLAMA
};
