//! Qwen 3 with experts, Qwen3 Coder 30B among them.

use super::qwen3::QWEN3;
use super::{EXPERTS, Family, Presence};

pub const QWEN3MOE: Family = Family {
    architecture: "qwen3moe",
    classifier: Presence::Never,
    experts: Some(EXPERTS),
    ..QWEN3
};
