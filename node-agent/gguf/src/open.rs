//! Reads the header of a file on disk with plain reads that grow until the whole header is there.
//!
//! Refuses: to map the file, to read much more of it than its header (at most twice as much, or the first piece), and what is no file.

use std::fs::{File, OpenOptions, metadata};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

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
    let mut file = open_regular(path).map_err(cannot_open)?;
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

/// Opens a file to read it, which anybody may have put there. A pipe would be waited for until somebody writes to it, and a device may do
/// something when it is opened.
///
/// # Errors
/// What cannot be opened, or is no regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    match metadata(path)?.is_file() {
        true => open_at_once(path),
        false => Err(irregular()),
    }
}

/// The same of what is there by now: it is opened whatever it is, but not waited for.
fn open_at_once(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    // Of a regular file this changes nothing.
    options.custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.read(true).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(irregular()),
    }
}

fn irregular() -> io::Error {
    io::Error::other("expected a regular file, found a folder, pipe, socket or device")
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("x.gguf");
        mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        let (tell, told) = mpsc::channel();
        let path = pipe.clone();
        thread::spawn(move || {
            let refused = Gguf::open(&path).unwrap_err();
            // It took the file's place in the last moment.
            let too_late = open_at_once(&path).unwrap_err();
            tell.send((refused, too_late)).unwrap();
        });
        let told = told.recv_timeout(Duration::from_secs(60));
        let (refused, too_late) = told.expect("it waits for somebody who writes");
        let GgufError::Open { path, source } = refused else {
            panic!("{refused}");
        };
        assert_eq!(path, pipe);
        for error in [source, too_late] {
            assert_eq!(error.to_string(), irregular().to_string());
        }
    }

    #[test]
    fn a_folder_is_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let error = open_regular(folder.path()).unwrap_err();
        assert_eq!(error.to_string(), irregular().to_string());
    }
}
