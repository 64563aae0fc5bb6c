//! Records what of a file is safely on the disk: the file's identity, and a line for each range, written after its bytes were
//! synchronized.
//!
//! Decides: the format, and that damaged content proves nothing: a line cut off by a crash does not count, nor does anything that
//! follows it. Refuses: to know whether the bytes are right.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::identity::FileIdentity;
use crate::tensors::merged;

/// The largest ledger that is read: a file of 64 TiB in pieces of 8 MiB takes half as much.
const MAX_LEDGER_BYTES: u64 = 512 << 20;
const FORMAT: u32 = 1;
const VERIFIED: &str = "verified";

/// A ledger as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ledger {
    pub identity: FileIdentity,
    /// Merged.
    pub present: Vec<Range<u64>>,
    /// Whether the whole file was checked against its digest.
    pub verified: bool,
    /// Bytes of the ledger that could be read.
    sound_bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct FirstLine {
    format: u32,
    identity: FileIdentity,
}

impl Ledger {
    /// Reads the ledger at `path`; `None` where there is none, or none that can be read.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Ledger>> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.len() <= MAX_LEDGER_BYTES => {
                Ok(Ledger::parse(&fs::read(path)?))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn parse(bytes: &[u8]) -> Option<Ledger> {
        let mut lines = bytes.split_inclusive(|byte| *byte == b'\n');
        let line = lines.next()?;
        let first: FirstLine = serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?;
        if first.format != FORMAT {
            return None;
        }
        let mut ledger = Ledger {
            identity: first.identity,
            present: Vec::new(),
            verified: false,
            sound_bytes: line.len() as u64,
        };
        for line in lines {
            match entry(line, ledger.identity.size_bytes) {
                Some(Entry::Present(range)) => ledger.present.push(range),
                Some(Entry::Verified) => ledger.verified = true,
                None => break,
            }
            ledger.sound_bytes += line.len() as u64;
        }
        ledger.present = merged(ledger.present, 0);
        Some(ledger)
    }

    /// Puts an empty ledger for `identity` at `path`, whole or not at all.
    pub(crate) fn create(path: &Path, identity: &FileIdentity) -> io::Result<()> {
        let first = FirstLine {
            format: FORMAT,
            identity: identity.clone(),
        };
        let mut line = serde_json::to_vec(&first)?;
        line.push(b'\n');
        let new = path.with_extension("ledger.new");
        let mut file = File::create(&new)?;
        file.write_all(&line)?;
        file.sync_all()?;
        fs::rename(new, path)
    }
}

enum Entry {
    Present(Range<u64>),
    Verified,
}

/// Parses a line, if it is exactly as this file writes it.
fn entry(line: &[u8], size_bytes: u64) -> Option<Entry> {
    let line = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?;
    if line == VERIFIED {
        return Some(Entry::Verified);
    }
    let (start, end) = line.split_once('-')?;
    let range = start.parse().ok()?..end.parse().ok()?;
    let sound = range.start < range.end && range.end <= size_bytes;
    (sound && line == format!("{}-{}", range.start, range.end)).then_some(Entry::Present(range))
}

/// The one writer of a ledger: holds an exclusive lock on it.
#[derive(Debug)]
pub(crate) struct LedgerWriter {
    file: File,
    /// Where the next line goes: after the last that was written in whole.
    end: u64,
}

impl LedgerWriter {
    /// Locks the ledger at `path` for writing and reads it; `None` while somebody else writes it, or when there is none.
    pub(crate) fn try_open(path: &Path) -> io::Result<Option<(LedgerWriter, Ledger)>> {
        let file = File::options().read(true).write(true).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
        let unreadable = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "the ledger was damaged since it was opened",
            )
        };
        let ledger = Ledger::read(path)?.ok_or_else(unreadable)?;
        file.set_len(ledger.sound_bytes)?;
        let end = ledger.sound_bytes;
        Ok(Some((LedgerWriter { file, end }, ledger)))
    }

    /// The ledger as it is now.
    pub(crate) fn read(&self) -> io::Result<Option<Ledger>> {
        let mut bytes = vec![0; usize::try_from(self.end).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut bytes, 0)?;
        Ok(Ledger::parse(&bytes))
    }

    /// Notes that `range` is on the disk for good, which the caller has ensured.
    pub(crate) fn present(&mut self, range: &Range<u64>) -> io::Result<()> {
        self.append(&format!("{}-{}\n", range.start, range.end))
    }

    /// Notes that the whole file matches its digest.
    pub(crate) fn verified(&mut self) -> io::Result<()> {
        self.append(&format!("{VERIFIED}\n"))
    }

    /// A line that was written in part is overwritten by the next; its line break comes last, so it never counts.
    fn append(&mut self, line: &str) -> io::Result<()> {
        self.file.write_all_at(line.as_bytes(), self.end)?;
        self.end += line.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> FileIdentity {
        FileIdentity {
            size_bytes: 1000,
            etag: Some("e".to_owned()),
            sha256: None,
            revision_commit: None,
        }
    }

    #[test]
    fn what_was_noted_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.ledger");
        assert_eq!(Ledger::read(&path).unwrap(), None);
        Ledger::create(&path, &identity()).unwrap();
        let (mut writer, empty) = LedgerWriter::try_open(&path).unwrap().unwrap();
        assert_eq!(
            (empty.identity, empty.present, empty.verified),
            (identity(), vec![], false)
        );
        assert!(
            LedgerWriter::try_open(&path).unwrap().is_none(),
            "there is one writer"
        );
        writer.present(&(100..200)).unwrap();
        writer.present(&(0..100)).unwrap();
        writer.present(&(500..1000)).unwrap();
        writer.verified().unwrap();
        let read = Ledger::read(&path).unwrap().unwrap();
        assert_eq!(
            (read.present, read.verified),
            (vec![0..200, 500..1000], true)
        );
    }

    /// However much of the ledger a crash leaves, what is read is a beginning of what was written, and writing goes on from there.
    #[test]
    fn a_ledger_cut_anywhere_vouches_for_whole_lines_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.ledger");
        Ledger::create(&path, &identity()).unwrap();
        let (mut writer, _) = LedgerWriter::try_open(&path).unwrap().unwrap();
        writer.present(&(0..10)).unwrap();
        writer.present(&(20..300)).unwrap();
        drop(writer);
        let whole = fs::read(&path).unwrap();
        let first = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        for length in 0..=whole.len() {
            let mut torn = whole[..length].to_vec();
            // What a file system may leave behind a cut.
            torn.extend([0, 0, 0]);
            fs::write(&path, torn).unwrap();
            let read = Ledger::read(&path).unwrap();
            let expected = match length {
                length if length < first => None,
                length if length < first + 5 => Some(vec![]),
                length if length < whole.len() => Some(vec![0..10]),
                _ => Some(vec![0..10, 20..300]),
            };
            assert_eq!(read.map(|ledger| ledger.present), expected, "{length}");
            if let Some(mut present) = expected {
                let (mut writer, _) = LedgerWriter::try_open(&path).unwrap().unwrap();
                writer.present(&(400..500)).unwrap();
                present.push(400..500);
                assert_eq!(Ledger::read(&path).unwrap().unwrap().present, present);
            }
        }
    }

    #[test]
    fn lines_that_nobody_wrote_do_not_count() {
        for bad in [
            "5-5",
            "9-3",
            "0-1001",
            "00-5",
            "+0-5",
            "0-5 ",
            "0--5",
            "verified!",
            "",
        ] {
            assert!(
                entry(format!("{bad}\n").as_bytes(), 1000).is_none(),
                "{bad:?}"
            );
        }
        assert!(entry(b"0-5", 1000).is_none());
        assert!(entry(b"0-5\n", 1000).is_some());
    }
}
