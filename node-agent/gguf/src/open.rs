//! Reads the header of a file on disk with plain reads that grow until the whole header is there.
//!
//! Refuses: to map the file, and to read much more of it than its header (at most twice as much, or the first piece).

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::{Gguf, GgufError, MAX_HEADER_LEN, part_names, part_paths};

/// The first piece read: holds the whole header of models with a vocabulary of up to about 50,000 tokens.
const FIRST_READ: u64 = 2 << 20;

impl Gguf {
    /// Opens the file at `path` and parses its header; if it is the first of a model in several files, then theirs, too.
    ///
    /// # Errors
    /// As [`Gguf::parse`] and [`Gguf::join`], with the paths as the files' names.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let first = open_one(path)?;
        let names = part_names(&path.display().to_string(), &first)?;
        let mut header_len = first.data_offset;
        let mut headers = vec![first];
        for part in part_paths(path).iter().skip(1) {
            let header = open_one(part)?;
            header_len += header.data_offset;
            if header_len > MAX_HEADER_LEN {
                return Err(GgufError::HeaderTooLarge {
                    file: part.display().to_string(),
                    offset: header.data_offset,
                    expected: "the headers of the model's files to end".to_owned(),
                    limit: MAX_HEADER_LEN,
                });
            }
            headers.push(header);
        }
        Gguf::join(&names, headers)
    }
}

fn open_one(path: &Path) -> Result<Gguf, GgufError> {
    let cannot_open = |source| GgufError::Open {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(cannot_open)?;
    let file_len = file.metadata().map_err(cannot_open)?.len();
    let name = path.display().to_string();

    let mut header = Vec::new();
    let mut wanted = FIRST_READ;
    loop {
        let offset = header.len() as u64;
        let cannot_read = |source| GgufError::Read {
            path: path.to_owned(),
            offset,
            source,
        };
        let read = (&mut file)
            .take(wanted - offset)
            .read_to_end(&mut header)
            .map_err(cannot_read)?;
        match Gguf::parse(&name, &header, file_len) {
            // Nothing new was read: the file shrank meanwhile, and asking again would not end.
            Err(GgufError::NeedMoreBytes { needed, .. }) if read > 0 => {
                wanted = needed.max(2 * header.len() as u64).min(MAX_HEADER_LEN);
            }
            other => return other,
        }
    }
}
