//! Models in several files, as the hub has those that are large.

use std::fs;
use std::path::{Path, PathBuf};

use prima_gguf::writer::split;
use prima_gguf::{Gguf, part_paths};

/// Writes the model at `path` into `folder` as two files, half of its tensors in each; returns the path of the first.
pub fn in_two_files(path: &Path, folder: &Path) -> PathBuf {
    let file = fs::read(path).expect("a model");
    let tensors = Gguf::open(path).expect("its header").tensors.len();
    let parts = split(&file, &[tensors / 2, tensors - tensors / 2]).expect("two files");
    let name = path.file_stem().and_then(|name| name.to_str());
    let first = format!("{}-00001-of-00002.gguf", name.expect("a name"));
    let first = folder.join(first);
    for (path, part) in part_paths(&first).iter().zip(parts) {
        fs::write(path, part).expect("a part on the disk");
    }
    first
}
