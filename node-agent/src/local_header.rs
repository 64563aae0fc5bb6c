//! The header of a model file on this machine, and its checksum, by which members of a ring know that they have the same
//! file.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use prima_gguf::{Gguf, GgufError, open_regular, part_paths};
use sha2::{Digest as _, Sha256};

pub struct LocalHeader {
    pub gguf: Gguf,
    /// In hexadecimal, of the bytes from the file's start to where tensor data begins; of a model in several files, of those of all.
    pub sha256: String,
}

#[derive(Debug, thiserror::Error)]
pub enum LocalHeaderError {
    #[error(transparent)]
    Header(#[from] GgufError),
    #[error("{}: cannot read the header", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// # Errors
/// A file that cannot be read, or is no GGUF file.
pub fn read(path: &Path) -> Result<LocalHeader, LocalHeaderError> {
    let gguf = Gguf::open(path)?;
    let mut digest = Sha256::new();
    for (path, part) in part_paths(path).iter().zip(&gguf.parts) {
        open_regular(path)
            .and_then(|file| io::copy(&mut file.take(part.header_len), &mut digest))
            .map_err(|source| LocalHeaderError::Read {
                path: path.to_owned(),
                source,
            })?;
    }
    Ok(LocalHeader {
        sha256: format!("{:x}", digest.finalize()),
        gguf,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use prima_gguf::GgmlType;
    use prima_gguf::writer::{GgufWriter, split};

    use super::*;

    #[test]
    fn the_headers_of_all_files_count() {
        // Of a model in two files, the first of which has only metadata.
        let header = |tensor: &str| {
            let mut writer = GgufWriter::new();
            writer.metadata("general.architecture", "llama");
            writer.tensor(tensor, GgmlType::F32, &[1]);
            let mut data = writer.write_header(Vec::new()).unwrap();
            data.tensor(&[0; 4]).unwrap();
            let parts = split(&data.finish().unwrap(), &[0, 1]).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let first = folder.path().join("m-00001-of-00002.gguf");
            for (path, part) in part_paths(&first).iter().zip(&parts) {
                fs::write(path, part).unwrap();
            }
            (parts[0].clone(), read(&first).unwrap().sha256)
        };
        let [one, other] = ["a", "b"].map(header);
        assert_eq!(one.0, other.0, "the first files are the same");
        assert_ne!(one.1, other.1);
    }
}
