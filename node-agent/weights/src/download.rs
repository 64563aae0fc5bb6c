//! Fetches what is missing of a member's share, in pieces over several connections, into the file at its place.
//!
//! Decides: the pieces; to keep what came before a connection broke; when to check the whole file against its digest. Refuses: to
//! begin without room for all of it, and to fetch what is already there.
//!
//! Dropping the future of [`Download::run`] cancels, and so does the failure of a piece: what other pieces received is lost, what the
//! ledger notes stays. Writes that have begun still finish; until then they own the file, and the next download waits.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::identity::Difference;
use crate::ledger::Ledger;
use crate::local_file::{LocalFile, LocalFileError, Writer};
use crate::remote::Remote;
use crate::remote_error::RemoteError;
use crate::tensors::{merged, total_bytes, without};

const CONNECTIONS: usize = 4;
/// What a broken process loses at most, for each connection.
const PIECE_BYTES: u64 = 8 << 20;
/// How often to look at a file that another process writes.
const WRITER_POLL: Duration = Duration::from_millis(200);
const HASHED_AT_ONCE: usize = 1 << 20;

/// What is to be fetched, from where and to where.
#[derive(Debug)]
pub struct Download<'a> {
    remote: &'a Remote,
    file: &'a LocalFile,
    wanted: Vec<Range<u64>>,
    piece_bytes: u64,
    allow_full_download: bool,
}

/// How far a download is. What was there before counts as done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    pub done_bytes: u64,
    pub total_bytes: u64,
}

impl Progress {
    /// Where what is `present` was there before; both merged.
    fn of(wanted: &[Range<u64>], present: &[Range<u64>]) -> Progress {
        let total = total_bytes(wanted);
        Progress {
            done_bytes: total - total_bytes(&without(wanted, present)),
            total_bytes: total,
        }
    }

    pub fn missing_bytes(&self) -> u64 {
        // What came twice is counted twice.
        self.total_bytes.saturating_sub(self.done_bytes)
    }
}

/// Why a share is not there. What was fetched stays, unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DownloadError {
    #[error("cannot fetch the file")]
    Fetch { source: RemoteError },
    #[error(transparent)]
    File(#[from] LocalFileError),
    #[error("the file changed on the server: {} was {}, is {}", difference.what, difference.expected, difference.found)]
    Changed { difference: Difference },
    #[error("bytes {}..{} wanted of a file of {size_bytes} bytes: plan again for this file", range.start, range.end)]
    OutOfRange { range: Range<u64>, size_bytes: u64 },
    #[error(
        "{}: {needed_bytes} bytes are still to be fetched, the disk has room for {available_bytes}: free {} bytes",
        path.display(), needed_bytes - available_bytes
    )]
    NoRoom {
        path: PathBuf,
        needed_bytes: u64,
        available_bytes: u64,
    },
    #[error("{}: the disk is full: free some room and go on", path.display())]
    DiskFull { path: PathBuf, source: io::Error },
    #[error("{}: cannot {action}", path.display())]
    Io {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
    /// The file was removed.
    #[error("{}: expected sha256 {expected}, found {found}: the file was damaged on its way, or this is not its digest; it was removed: compare the digest with its publisher's, or fetch it again", path.display())]
    Sha256 {
        path: PathBuf,
        expected: String,
        found: String,
    },
}

impl<'a> Download<'a> {
    /// Downloads the ranges `wanted` of `remote` into `file`.
    pub fn new(remote: &'a Remote, file: &'a LocalFile, wanted: &[Range<u64>]) -> Self {
        Download {
            remote,
            file,
            wanted: merged(wanted.to_vec(), 0),
            piece_bytes: PIECE_BYTES,
            allow_full_download: false,
        }
    }

    /// Whether a server that cannot send parts may send the whole file.
    pub fn allow_full_download(mut self, allow: bool) -> Self {
        self.allow_full_download = allow;
        self
    }

    /// Sets the size of pieces; a broken process loses one piece for each connection.
    pub fn piece_bytes(mut self, bytes: u64) -> Self {
        self.piece_bytes = bytes.max(1);
        self
    }

    /// How far it is before it runs.
    ///
    /// # Errors
    /// [`LocalFileError::Io`] when the ledger cannot be read.
    pub fn so_far(&self) -> Result<Progress, LocalFileError> {
        let present = self.file.present()?;
        Ok(Progress::of(&self.all_that_comes(&present), &present))
    }

    /// Bytes of the disk that it will take, beyond what its file takes already.
    ///
    /// # Errors
    /// As [`LocalFile::room_for`].
    pub fn room_bytes(&self) -> Result<u64, LocalFileError> {
        let present = self.file.present()?;
        self.file.room_for(&self.all_that_comes(&present))
    }

    /// Refuses `downloads` to one disk if together they have no room there. By itself each looks only for its own.
    ///
    /// # Errors
    /// [`DownloadError::NoRoom`], and [`DownloadError::File`] when a file cannot be looked at.
    pub fn check_room(downloads: &[Download<'_>]) -> Result<(), DownloadError> {
        let mut needed_bytes = 0;
        for download in downloads {
            needed_bytes += download.room_bytes()?;
        }
        match downloads.first() {
            Some(first) => first.has_room_for(needed_bytes),
            None => Ok(()),
        }
    }

    /// Fetches what is missing, and waits for another process that writes to the same file. If nothing is missing, it sends no
    /// request to the server. A file that is whole then is held against its digest.
    ///
    /// # Errors
    /// [`DownloadError`].
    pub async fn run(self, progress: &watch::Sender<Progress>) -> Result<(), DownloadError> {
        let size_bytes = self.file.identity().size_bytes;
        if let Some(range) = self.wanted.iter().find(|range| range.end > size_bytes) {
            return Err(DownloadError::OutOfRange {
                range: range.clone(),
                size_bytes,
            });
        }
        self.file
            .identity()
            .same_file(self.remote.identity())
            .map_err(|difference| DownloadError::Changed { difference })?;
        let (writer, ledger) = self.wait_for_the_right_to_write().await?;
        let wanted = self.all_that_comes(&ledger.present);
        let missing = without(&wanted, &ledger.present);
        if !missing.is_empty() && !self.remote.accepts_ranges() && !self.allow_full_download {
            let source = RemoteError::RangesIgnored {
                url: self.remote.shown(),
            };
            return Err(DownloadError::Fetch { source });
        }
        progress.send_replace(Progress::of(&wanted, &ledger.present));
        if !missing.is_empty() {
            self.has_room_for(self.room_bytes()?)?;
            self.fetch(&missing, &writer, progress).await?;
        }
        self.verify(&writer).await
    }

    /// What is wanted, beside what is `present`; of a server that cannot send parts the whole file, if any of it is missing.
    fn all_that_comes(&self, present: &[Range<u64>]) -> Vec<Range<u64>> {
        let whole = self.allow_full_download && !self.remote.accepts_ranges();
        match whole && !without(&self.wanted, present).is_empty() {
            true => vec![0..self.file.identity().size_bytes],
            false => self.wanted.clone(),
        }
    }

    async fn wait_for_the_right_to_write(&self) -> Result<(Writer, Ledger), DownloadError> {
        loop {
            if let Some(granted) = self.file.try_write()? {
                return Ok(granted);
            }
            tokio::time::sleep(WRITER_POLL).await;
        }
    }

    fn has_room_for(&self, needed_bytes: u64) -> Result<(), DownloadError> {
        let room = rustix::fs::fstatvfs(self.file.data())
            .map_err(|error| self.io("learn the disk's room", error.into()))?;
        let available_bytes = room.f_bavail.saturating_mul(room.f_frsize);
        if needed_bytes > available_bytes {
            return Err(DownloadError::NoRoom {
                path: self.file.path().to_owned(),
                needed_bytes,
                available_bytes,
            });
        }
        Ok(())
    }

    async fn fetch(
        &self,
        missing: &[Range<u64>],
        writer: &Writer,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), DownloadError> {
        let (pieces, connections) = match (
            self.remote.accepts_ranges(),
            missing.first(),
            missing.last(),
        ) {
            (false, Some(first), Some(last)) => (vec![first.start..last.end], 1),
            _ => (pieces(missing, self.piece_bytes), CONNECTIONS),
        };
        stream::iter(pieces)
            .map(|piece| self.fetch_piece(piece, missing, writer, progress))
            .buffer_unordered(connections)
            .try_collect()
            .await
    }

    /// Fetches `piece`; fetches again what did not come.
    async fn fetch_piece(
        &self,
        piece: Range<u64>,
        missing: &[Range<u64>],
        writer: &Writer,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), DownloadError> {
        let mut attempts = self.remote.attempts();
        let mut at = piece.start;
        loop {
            let before = at;
            let came = self
                .fetch_once(&mut at, piece.end, missing, writer, progress)
                .await;
            match came {
                Ok(()) => return Ok(()),
                Err(DownloadError::Fetch { source }) => {
                    attempts.brought(at - before);
                    attempts
                        .failed(source)
                        .await
                        .map_err(|source| DownloadError::Fetch { source })?;
                }
                Err(other) => return Err(other),
            }
        }
    }

    /// One request from `at` to `end`; `at` moves to the end of the bytes on the disk, also when the rest does not come.
    async fn fetch_once(
        &self,
        at: &mut u64,
        end: u64,
        missing: &[Range<u64>],
        writer: &Writer,
        progress: &watch::Sender<Progress>,
    ) -> Result<(), DownloadError> {
        let fetch = |source| DownloadError::Fetch { source };
        let mut body = self.remote.body(*at..end).await.map_err(fetch)?;
        let mut piece = Vec::new();
        loop {
            let came = body.chunk().await;
            if let Ok(Some(chunk)) = &came {
                let start = *at + piece.len() as u64;
                let new = new_bytes(&(start..start + chunk.len() as u64), missing);
                progress.send_modify(|progress| progress.done_bytes += new);
                piece.extend_from_slice(chunk);
                if (piece.len() as u64) < self.piece_bytes {
                    continue;
                }
            }
            let written = piece.len() as u64;
            self.write(writer, *at, std::mem::take(&mut piece)).await?;
            *at += written;
            match came {
                Ok(Some(_)) => {}
                Ok(None) => return Ok(()),
                Err(source) => return Err(fetch(source)),
            }
        }
    }

    async fn write(
        &self,
        writer: &Writer,
        offset: u64,
        bytes: Vec<u8>,
    ) -> Result<(), DownloadError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let writer = writer.clone();
        let written = tokio::task::spawn_blocking(move || writer.write(offset, &bytes)).await;
        written
            .map_err(io::Error::other)
            .flatten()
            .map_err(|source| self.io("write", source))
    }

    /// Checks the file against its digest, once it is whole and unless that was done.
    async fn verify(&self, writer: &Writer) -> Result<(), DownloadError> {
        let ledger = writer
            .read()
            .map_err(|source| self.io("read the ledger", source))?;
        let expected = ledger.and_then(|ledger| self.file.digest_to_check(&ledger));
        let Some(expected) = expected.map(str::to_owned) else {
            return Ok(());
        };
        let (file, size_bytes) = (self.file.clone(), self.file.identity().size_bytes);
        let hashed = tokio::task::spawn_blocking(move || sha256(file.data(), size_bytes)).await;
        let found = hashed
            .map_err(io::Error::other)
            .flatten()
            .map_err(|source| self.io("read", source))?;
        if found != expected {
            self.file.clone().discard()?;
            return Err(DownloadError::Sha256 {
                path: self.file.path().to_owned(),
                expected,
                found,
            });
        }
        writer
            .verified()
            .map_err(|source| self.io("write the ledger", source))
    }

    fn io(&self, action: &'static str, source: io::Error) -> DownloadError {
        let path = self.file.path().to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                DownloadError::DiskFull { path, source }
            }
            _ => DownloadError::Io {
                path,
                action,
                source,
            },
        }
    }
}

/// `missing`, in pieces of at most `piece_bytes`.
fn pieces(missing: &[Range<u64>], piece_bytes: u64) -> Vec<Range<u64>> {
    let step = usize::try_from(piece_bytes).unwrap_or(usize::MAX);
    let cut = |range: &Range<u64>| {
        let end = range.end;
        range
            .clone()
            .step_by(step)
            .map(move |start| start..end.min(start.saturating_add(piece_bytes)))
    };
    missing.iter().flat_map(cut).collect()
}

/// How many bytes of `range` are in `missing`.
fn new_bytes(range: &Range<u64>, missing: &[Range<u64>]) -> u64 {
    let range = std::slice::from_ref(range);
    total_bytes(range) - total_bytes(&without(range, missing))
}

fn sha256(file: &File, size_bytes: u64) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; HASHED_AT_ONCE];
    let mut at = 0;
    while at < size_bytes {
        let length =
            usize::try_from(size_bytes - at).map_or(buffer.len(), |left| left.min(buffer.len()));
        file.read_exact_at(&mut buffer[..length], at)?;
        hash.update(&buffer[..length]);
        at += length as u64;
    }
    Ok(format!("{:x}", hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_what_is_missing_and_nothing_else() {
        assert_eq!(
            pieces(&[0..10, 20..41], 10),
            [0..10, 20..30, 30..40, 40..41]
        );
        assert!(pieces(&[], 10).is_empty());
        assert_eq!(new_bytes(&(5..25), &[0..10, 20..41]), 10);
    }
}
