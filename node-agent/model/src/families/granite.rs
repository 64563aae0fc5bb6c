//! Granite 3 and 4 (dense): llama with factors for embedding, scores, results and logits.

use super::llama::DENSE;
use super::{EmbeddingScale, Family};

pub const GRANITE: Family = Family {
    architecture: "granite",
    embedding_scale: EmbeddingScale::Key,
    scale_keys: true,
    ..DENSE
};
