//! Granite 3 with experts, in some files with one for all tokens beside them.

use super::granite::GRANITE;
use super::{EXPERTS, ExpertKind, Family, Presence};

pub const GRANITEMOE: Family = Family {
    architecture: "granitemoe",
    other_biases: Presence::Never,
    experts: Some(ExpertKind {
        shared: Presence::IfThere,
        ..EXPERTS
    }),
    ..GRANITE
};
