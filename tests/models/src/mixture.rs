//! A mixture of which memory need not hold all: 14 MB, nine tenths of which are experts.

use std::path::{Path, PathBuf};

use prima_gguf::GgmlType;

use super::MadeUpModel;

pub const LAYERS: usize = 3;
pub const EXPERTS: usize = 24;
pub const VOCABULARY: usize = 512;
/// Gate, up and down of one expert.
pub const EXPERT_BYTES: u64 = 3 * 256 * 128 * 2;

/// Writes it into `folder`.
pub fn write(folder: &Path) -> PathBuf {
    let model = MadeUpModel {
        vocabulary: VOCABULARY,
        ..made_up()
    };
    model.write(folder)
}

/// Writes one to `path` that a ring can serve: its vocabulary is characters.
pub fn write_for_ring(path: &Path) {
    made_up().write_for_ring(path);
}

fn made_up() -> MadeUpModel {
    MadeUpModel {
        layers: LAYERS,
        experts: EXPERTS,
        feed_forward: 128,
        formats: vec![GgmlType::F16],
        ..MadeUpModel::of("qwen3moe")
    }
}
