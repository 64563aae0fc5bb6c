//! Ministral 3 and the newer Mistral Small (dense).

use super::Family;
use super::llama::DENSE;

pub const MISTRAL3: Family = Family {
    architecture: "mistral3",
    long_context_keys: true,
    ..DENSE
};
