//! Models in several files, as the hub has those that are large.

use std::fs;
use std::path::{Path, PathBuf};

use prima_gguf::writer::split;
use prima_gguf::{Gguf, part_paths};

/// Writes the model at `path` into `folder` as three files, of which the first has no tensors, as llama.cpp can make them; returns the path of
/// the first.
pub fn in_three_files(path: &Path, folder: &Path) -> PathBuf {
    let file = fs::read(path).expect("a model");
    let tensors = Gguf::open(path).expect("its header").tensors.len();
    let parts = split(&file, &[0, tensors / 2, tensors - tensors / 2]).expect("three files");
    let name = path.file_stem().and_then(|name| name.to_str());
    let first = format!("{}-00001-of-00003.gguf", name.expect("a name"));
    let first = folder.join(first);
    for (path, part) in part_paths(&first).iter().zip(parts) {
        fs::write(path, part).expect("a part on the disk");
    }
    first
}
