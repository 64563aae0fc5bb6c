//! Qwen 1.5 and 2 with experts: beside those that are chosen, one for all tokens, with a gate of its own.

use super::qwen2::QWEN2;
use super::{EXPERTS, ExpertKind, Family, Presence};

pub const QWEN2MOE: Family = Family {
    architecture: "qwen2moe",
    experts: Some(ExpertKind {
        normalized: false,
        shared: Presence::Always,
        shared_gate: true,
        ..EXPERTS
    }),
    ..QWEN2
};
