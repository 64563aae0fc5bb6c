//! A model file on this machine's disk, perhaps only parts of it: `name.gguf` is as long as the whole file, with holes where nothing
//! was fetched; beside it, `name.ledger` says what is there.
//!
//! Decides: who may do what at the same time. Whoever has a [`LocalFile`] holds a shared lock on it, so no process on this machine
//! removes it; one process at a time writes to it. Refuses: to open a file of another version than the one expected.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::identity::{Difference, FileIdentity};
use crate::ledger::{Ledger, LedgerWriter};
use crate::tensors::{merged, total_bytes, without};

/// The unit of `st_blocks`, whatever the file system's block size is.
pub(crate) const BLOCK_BYTES: u64 = 512;

/// A model file in use. Clones share the lock, which goes with the last of them.
#[derive(Debug, Clone)]
pub struct LocalFile {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    identity: FileIdentity,
    /// Holds the shared lock.
    data: File,
}

/// Why a file on the disk cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LocalFileError {
    #[error("{}: cannot {action}", path.display())]
    Io {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
    #[error("{}: holds another version of the file: {} is {}, expected {}", path.display(), difference.what, difference.found, difference.expected)]
    OtherVersion {
        path: PathBuf,
        difference: Difference,
    },
    #[error("{}: expected a name that ends in .gguf", path.display())]
    Name { path: PathBuf },
    #[error("{}: the file was removed meanwhile: open it again", path.display())]
    Removed { path: PathBuf },
}

impl LocalFile {
    /// Opens the file at `path`, or creates it with nothing fetched. Its folder must be there.
    ///
    /// # Errors
    /// [`LocalFileError::OtherVersion`] when it holds another version; it is left as it is.
    pub fn open(path: &Path, identity: &FileIdentity) -> Result<LocalFile, LocalFileError> {
        let failed = |action| {
            move |source| LocalFileError::Io {
                path: path.to_owned(),
                action,
                source,
            }
        };
        if path.extension().is_none_or(|extension| extension != "gguf") {
            return Err(LocalFileError::Name {
                path: path.to_owned(),
            });
        }
        let _folder = lock_folder(path).map_err(failed("lock the folder"))?;
        let data = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed("open"))?;
        data.lock_shared().map_err(failed("lock"))?;
        let length = data.metadata().map_err(failed("learn the length"))?.len();
        let ledger_path = ledger_path(path);
        let mut ledger = Ledger::read(&ledger_path).map_err(failed("read the ledger"))?;
        if let Some(found) = &ledger
            && let Err(difference) = identity.same_file(&found.identity)
        {
            return Err(LocalFileError::OtherVersion {
                path: path.to_owned(),
                difference,
            });
        }
        if length != identity.size_bytes {
            // Somebody replaced or truncated the file: the ledger belongs to another one.
            ledger = None;
        }
        if ledger.is_none() {
            remove_if_there(&ledger_path).map_err(failed("remove the ledger"))?;
            data.set_len(identity.size_bytes)
                .map_err(failed("set the length"))?;
            Ledger::create(&ledger_path, identity).map_err(failed("write the ledger"))?;
        }
        let inner = Inner {
            path: path.to_owned(),
            identity: identity.clone(),
            data,
        };
        inner.mark_used();
        Ok(LocalFile {
            inner: Arc::new(inner),
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    pub fn identity(&self) -> &FileIdentity {
        &self.inner.identity
    }

    /// The parts of `wanted` that are not there yet. If nothing is missing, no server is needed.
    ///
    /// # Errors
    /// [`LocalFileError::Io`] when the ledger cannot be read.
    pub fn missing(&self, wanted: &[Range<u64>]) -> Result<Vec<Range<u64>>, LocalFileError> {
        Ok(without(&merged(wanted.to_vec(), 0), &self.present()?))
    }

    /// What is there already.
    pub(crate) fn present(&self) -> Result<Vec<Range<u64>>, LocalFileError> {
        Ok(self
            .ledger()?
            .map_or_else(Vec::new, |ledger| ledger.present))
    }

    /// Bytes of the disk that `wanted` will take, beyond what the file takes already. On file systems without holes, such as FAT and exFAT, it
    /// takes all of its length from the beginning.
    ///
    /// # Errors
    /// [`LocalFileError::Io`] when the ledger cannot be read, or the file not be looked at.
    pub fn room_for(&self, wanted: &[Range<u64>]) -> Result<u64, LocalFileError> {
        let metadata = self.data().metadata();
        let metadata = metadata.map_err(|source| self.failed("look at the file", source))?;
        let present = self.present()?;
        let unused = (metadata.blocks() * BLOCK_BYTES).saturating_sub(total_bytes(&present));
        let missing = without(&merged(wanted.to_vec(), 0), &present);
        Ok(total_bytes(&missing).saturating_sub(unused))
    }

    /// Whether all of it is there, and was not held against its digest: a process ended in between, or could not read it. The next
    /// download, be it of nothing, makes up for that.
    ///
    /// # Errors
    /// [`LocalFileError::Io`] when the ledger cannot be read.
    pub fn is_unchecked(&self) -> Result<bool, LocalFileError> {
        let ledger = self.ledger()?;
        Ok(ledger.is_some_and(|ledger| self.digest_to_check(&ledger).is_some()))
    }

    /// The digest that the file is yet to be held against: if it has one, and is whole.
    pub(crate) fn digest_to_check(&self, ledger: &Ledger) -> Option<&str> {
        let identity = self.identity();
        let whole = without(&[0..identity.size_bytes], &ledger.present).is_empty();
        let digest = identity.sha256.as_deref();
        digest.filter(|_| whole && !ledger.verified)
    }

    /// Removes the file. Whoever has it open keeps what was there; the next [`open`](Self::open) begins anew.
    ///
    /// # Errors
    /// [`LocalFileError::Io`] when it cannot be removed.
    pub fn discard(self) -> Result<(), LocalFileError> {
        let removed = lock_folder(self.path()).and_then(|_folder| remove(self.path()));
        removed.map_err(|source| self.failed("remove", source))
    }

    /// The right to write, for whoever has the bytes from elsewhere than a server. `None` while somebody else has it.
    ///
    /// # Errors
    /// [`LocalFileError::Removed`] when the file is not in its place any more.
    pub fn writer(&self) -> Result<Option<Writer>, LocalFileError> {
        Ok(self.try_write()?.map(|(writer, _)| writer))
    }

    /// The right to write, and what is there. `None` while somebody else has it.
    pub(crate) fn try_write(&self) -> Result<Option<(Writer, Ledger)>, LocalFileError> {
        let _folder =
            lock_folder(self.path()).map_err(|source| self.failed("lock the folder", source))?;
        // A ledger begun since then belongs to another file, and must not be used for what is written to this one.
        if !self.is_in_place() {
            return Err(LocalFileError::Removed {
                path: self.path().to_owned(),
            });
        }
        let opened = LedgerWriter::try_open(&ledger_path(self.path()))
            .map_err(|source| self.failed("open the ledger", source))?;
        Ok(opened.map(|(ledger, read)| {
            let writer = Writer {
                file: self.clone(),
                ledger: Arc::new(Mutex::new(ledger)),
            };
            (writer, read)
        }))
    }

    pub(crate) fn data(&self) -> &File {
        &self.inner.data
    }

    fn ledger(&self) -> Result<Option<Ledger>, LocalFileError> {
        Ledger::read(&ledger_path(self.path()))
            .map_err(|source| self.failed("read the ledger", source))
    }

    fn is_in_place(&self) -> bool {
        match (self.data().metadata(), fs::metadata(self.path())) {
            (Ok(held), Ok(there)) => (held.dev(), held.ino()) == (there.dev(), there.ino()),
            _ => false,
        }
    }

    fn failed(&self, action: &'static str, source: io::Error) -> LocalFileError {
        LocalFileError::Io {
            path: self.path().to_owned(),
            action,
            source,
        }
    }
}

impl Inner {
    /// The ledger's time is the time of last use. If it cannot be set, the file only goes sooner.
    fn mark_used(&self) {
        let ledger = File::options().append(true).open(ledger_path(&self.path));
        if let Err(error) = ledger.and_then(|ledger| ledger.set_modified(SystemTime::now())) {
            tracing::debug!(%error, path = %self.path.display(), "cannot note the use of a file");
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.mark_used();
    }
}

/// The right to write to a file. Clones share it, and it ends with the last of them.
#[derive(Debug, Clone)]
pub struct Writer {
    file: LocalFile,
    ledger: Arc<Mutex<LedgerWriter>>,
}

impl Writer {
    /// Writes `bytes` at `offset`; they are on the disk for good before the ledger says so.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let data = self.file.data();
        data.write_all_at(bytes, offset)?;
        data.sync_data()?;
        self.ledger()
            .present(&(offset..offset + bytes.len() as u64))
    }

    /// The ledger as it is now.
    pub(crate) fn read(&self) -> io::Result<Option<Ledger>> {
        self.ledger().read()
    }

    /// Notes that the file matches its digest.
    pub(crate) fn verified(&self) -> io::Result<()> {
        self.ledger().verified()
    }

    fn ledger(&self) -> MutexGuard<'_, LedgerWriter> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `name.ledger` beside `name.gguf`.
pub(crate) fn ledger_path(path: &Path) -> PathBuf {
    path.with_extension("ledger")
}

/// Files in the folder of `path` are created and removed under this lock, which nobody holds for long.
pub(crate) fn lock_folder(path: &Path) -> io::Result<File> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or(Path::new(".")))?;
    folder.lock()?;
    Ok(folder)
}

/// Removes the file at `path` and what belongs to it. The ledger first: data without it counts as absent.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    remove_if_there(&ledger_path(path))?;
    remove_if_there(&path.with_extension("ledger.new"))?;
    remove_if_there(path)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(size_bytes: u64, etag: &str) -> FileIdentity {
        FileIdentity {
            size_bytes,
            etag: Some(etag.to_owned()),
            sha256: None,
            revision_commit: None,
        }
    }

    fn some_bytes(path: &Path) -> LocalFile {
        let file = LocalFile::open(path, &identity(1000, "1")).unwrap();
        let (writer, _) = file.try_write().unwrap().unwrap();
        writer.write(100, &[7; 200]).unwrap();
        file
    }

    /// Nothing that could be compressed.
    fn noise(bytes: u64) -> Vec<u8> {
        let mut state: u64 = 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        (0..bytes / 8).flat_map(|_| next()).collect()
    }

    #[test]
    fn what_was_written_is_not_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let file = some_bytes(&path);
        for file in [
            file.clone(),
            LocalFile::open(&path, &identity(1000, "1")).unwrap(),
        ] {
            assert_eq!(
                file.missing(&[50..150, 140..400]).unwrap(),
                [50..100, 300..400]
            );
        }
        let bytes = fs::read(&path).unwrap();
        assert_eq!((bytes.len(), &bytes[100..300]), (1000, &[7; 200][..]));
    }

    #[test]
    fn what_a_file_takes_without_content_is_room_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        const SIZE: u64 = 1 << 20;
        let file = LocalFile::open(&path, &identity(SIZE, "1")).unwrap();
        let whole = 0..SIZE;
        let room = || file.room_for(std::slice::from_ref(&whole)).unwrap();
        assert_eq!(room(), SIZE, "a hole");
        // As a file system without holes has it, but of bytes that none makes smaller, and counts when they are on the disk.
        fs::write(&path, noise(SIZE)).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        assert_eq!(room(), 0);
        let (writer, _) = file.try_write().unwrap().unwrap();
        writer.write(0, &[7; 1000]).unwrap();
        assert_eq!(room(), 0);
    }

    #[test]
    fn another_version_is_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        drop(some_bytes(&path));
        let error = LocalFile::open(&path, &identity(1000, "2")).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("version (ETag) is another, expected one"),
            "{error}"
        );
        let file = LocalFile::open(&path, &identity(1000, "1")).unwrap();
        assert_eq!(file.missing(&[0..300]).unwrap(), [0..100]);
        file.discard().unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let file = LocalFile::open(&path, &identity(1000, "2")).unwrap();
        assert_eq!(file.missing(&[0..300]).unwrap(), [0..300]);
    }

    #[test]
    fn nobody_writes_to_a_file_that_was_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let file = some_bytes(&path);
        file.clone().discard().unwrap();
        assert!(matches!(
            file.try_write(),
            Err(LocalFileError::Removed { .. })
        ));
        let _anew = LocalFile::open(&path, &identity(1000, "1")).unwrap();
        assert!(matches!(
            file.try_write(),
            Err(LocalFileError::Removed { .. })
        ));
    }

    /// A ledger must not vouch for holes.
    #[test]
    fn a_file_that_somebody_took_away_or_cut_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        for damage in [
            |path: &Path| fs::remove_file(path),
            |path: &Path| File::options().write(true).open(path)?.set_len(10),
            |path: &Path| fs::write(ledger_path(path), "nonsense"),
        ] {
            drop(some_bytes(&path));
            damage(&path).unwrap();
            let file = LocalFile::open(&path, &identity(1000, "1")).unwrap();
            assert_eq!(file.missing(&[0..1000]).unwrap(), [0..1000]);
            assert_eq!(fs::metadata(&path).unwrap().len(), 1000);
        }
    }
}
