//! The model's files, and how weights are read from them. Experts that stay are read into the page cache, single rows through it. What does
//! not stay is read past it if the file system allows that, so that it displaces nothing; else through it, and the pages are dropped
//! afterwards. If both work, the faster way is taken.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;

use super::plan::PAGE;
use crate::error::EngineError;
use crate::page_cache::{drop_pages, expect_random_reads, expect_reads};

/// The files of a model, open. Offsets are those of the model.
pub struct ModelFiles {
    /// In order.
    files: Vec<SourceFile>,
    way: OnceLock<Way>,
    /// Takes whatever is written to it, and does nothing.
    nowhere: File,
}

struct SourceFile {
    path: PathBuf,
    /// Where it begins in the model: at a multiple of a page.
    start: u64,
    cached: File,
    /// Reading from it reads no pages around those that are asked for.
    paged: File,
    /// `None`: the file system refuses.
    direct: Option<File>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Past the page cache.
    Direct,
    /// Through it, and dropped from it.
    Cached,
}

const NOWHERE: &str = "/dev/null";
/// Ranges by which the ways are compared.
const TRIALS: usize = 4;

impl ModelFiles {
    /// The files, by where each begins.
    ///
    /// # Errors
    /// [`EngineError::ReadAhead`] for a file that cannot be opened.
    pub fn open<'a>(
        files: impl IntoIterator<Item = (u64, &'a Path)>,
    ) -> Result<ModelFiles, EngineError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| EngineError::ReadAhead { path, source }
        };
        let open = |(start, path): (u64, &Path)| {
            let cached = File::open(path).map_err(failed(path))?;
            let paged = File::open(path).map_err(failed(path))?;
            // Only advice.
            let _ = expect_random_reads(&paged);
            Ok::<_, EngineError>(SourceFile {
                path: path.to_owned(),
                start,
                cached,
                paged,
                direct: open_direct(path),
            })
        };
        Ok(ModelFiles {
            files: files.into_iter().map(open).collect::<Result<_, _>>()?,
            way: OnceLock::new(),
            nowhere: OpenOptions::new()
                .write(true)
                .open(NOWHERE)
                .map_err(failed(Path::new(NOWHERE)))?,
        })
    }

    /// Where the first file was opened.
    pub fn path(&self) -> PathBuf {
        let first = self.files.first();
        first.map(|file| file.path.clone()).unwrap_or_default()
    }

    /// Before it reads for the first time, compares the ways of reading by some of `ranges`, which fit in `slot_bytes`.
    pub fn compare(&self, ranges: &[Range<u64>], slot_bytes: usize) {
        self.way.get_or_init(|| {
            let direct = self.files.iter().all(|file| file.direct.is_some());
            let (true, Ok(mut slot)) = (direct, slot(slot_bytes)) else {
                return Way::Cached;
            };
            // Each way reads other ranges: otherwise caches below the file system would favour the second way.
            let (first, second) = ranges.split_at(ranges.len() / 2);
            let mut seconds = |way, ranges: &[Range<u64>]| {
                let begun = Instant::now();
                for range in ranges.iter().take(TRIALS) {
                    if self.read_in(way, range, &mut slot).is_err() {
                        return f64::INFINITY;
                    }
                }
                begun.elapsed().as_secs_f64()
            };
            match seconds(Way::Direct, first) <= seconds(Way::Cached, second) {
                true => Way::Direct,
                false => Way::Cached,
            }
        });
    }

    /// Reads the pages that hold `range` to the start of `slot`; returns how many bytes were read.
    ///
    /// # Errors
    /// The error of the read.
    pub fn read(&self, range: &Range<u64>, slot: &mut [u8]) -> io::Result<usize> {
        self.read_in(*self.way.get().unwrap_or(&Way::Cached), range, slot)
    }

    /// Reads the pages that hold `range` into the page cache, and no others as far as the system can be told; returns how many bytes that are.
    ///
    /// # Errors
    /// The error of the read.
    pub fn cache(&self, range: &Range<u64>) -> io::Result<usize> {
        self.file_of(range).cache_pages(&self.nowhere, range)
    }

    /// Copies the bytes at `offset` to `out`, through the page cache; of what is not there, only their pages are read as far as the system can be
    /// told.
    ///
    /// # Errors
    /// The error of the read.
    pub fn copy(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + out.len() as u64;
        let file = self.file_of(&range);
        let first = file.own(&range).start;
        in_full(out.len(), |read| {
            rustix::io::pread(&file.paged, &mut out[read..], first + read as u64)
        })
        .map(drop)
    }

    /// Drops the pages of `range` from the page cache, as far as no process has them mapped.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn drop_pages(&self, range: &Range<u64>) -> io::Result<()> {
        self.file_of(range).drop_pages(range)
    }

    fn file_of(&self, range: &Range<u64>) -> &SourceFile {
        let behind = self.files.partition_point(|file| file.start <= range.start);
        // The first begins at 0.
        &self.files[behind.max(1) - 1]
    }

    fn read_in(&self, way: Way, range: &Range<u64>, slot: &mut [u8]) -> io::Result<usize> {
        let file = self.file_of(range);
        if let (Way::Direct, Some(direct)) = (way, &file.direct) {
            return file.read_pages(direct, range, slot);
        }
        // Drops them before the read, too: what is in the page cache now will not be there for the next token. Where this fails, the
        // system finds out by itself.
        let _ = file.drop_pages(range);
        let read = file.read_pages(&file.cached, range, slot)?;
        let _ = file.drop_pages(range);
        Ok(read)
    }
}

impl SourceFile {
    fn drop_pages(&self, range: &Range<u64>) -> io::Result<()> {
        drop_pages(&self.cached, self.own(range))
    }

    /// A range of the model, as one of this file.
    fn own(&self, range: &Range<u64>) -> Range<u64> {
        range.start - self.start..range.end - self.start
    }

    /// Reads whole pages, from the range's first page to its last; the file may end inside the last one.
    fn read_pages(&self, file: &File, range: &Range<u64>, slot: &mut [u8]) -> io::Result<usize> {
        let (first, needed) = self.pages(range);
        let wanted = needed.next_multiple_of(PAGE).min(slot.len());
        in_full(needed, |read| {
            rustix::io::pread(file, &mut slot[read..wanted], first + read as u64)
        })
    }

    /// The same, into the page cache. Sent to nowhere, pages are waited for and not copied; to touch them in the map would count as a page fault.
    fn cache_pages(&self, nowhere: &File, range: &Range<u64>) -> io::Result<usize> {
        let (first, needed) = self.pages(range);
        let wanted = needed.next_multiple_of(PAGE);
        // Only advice: without it, reading takes longer.
        let _ = expect_reads(&self.paged, first..first + needed as u64);
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if let Ok(read) = in_full(needed, |read| {
            let mut offset = first + read as u64;
            rustix::fs::sendfile(nowhere, &self.paged, Some(&mut offset), wanted - read)
        }) {
            return Ok(read);
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = nowhere;
        // Not every system can send from every file system; if it is the disk that fails, this says so.
        self.read_pages(&self.paged, range, &mut slot(wanted)?)
    }

    /// Where the first page of `range` begins, and how many bytes there are from there to its end.
    fn pages(&self, range: &Range<u64>) -> (u64, usize) {
        let own = self.own(range);
        let first = own.start - own.start % PAGE as u64;
        (first, (own.end - first) as usize)
    }
}

/// Calls `read` with how much was read until that is what is `needed`, or more.
fn in_full(
    needed: usize,
    mut read: impl FnMut(usize) -> rustix::io::Result<usize>,
) -> io::Result<usize> {
    let mut all = 0;
    while all < needed {
        match read(all) {
            Ok(0) => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the file is shorter than when it was opened",
                ));
            }
            Ok(bytes) => all += bytes,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(all)
}

/// A buffer to read into.
///
/// # Errors
/// A system that has no memory.
pub fn slot(bytes: usize) -> io::Result<MmapMut> {
    let mut slot = MmapMut::map_anon(bytes)?;
    // Fewer misses of the TLB while computing; where the system has no such pages, it says so, and nothing is lost.
    #[cfg(target_os = "linux")]
    let _ = slot.advise(Advice::HugePage);
    // Takes memory for its pages before the first read, which would seem slow otherwise.
    slot.fill(0);
    Ok(slot)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn open_direct(path: &Path) -> Option<File> {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .ok()
    .map(File::from)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn open_direct(_path: &Path) -> Option<File> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cached_is_there_or_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = vec![1; 5 * PAGE + 7];
        let mut files = ModelFiles::open([(0, file.path())]).unwrap();
        let page = PAGE as u64;
        for sends in [true, false] {
            std::fs::write(file.path(), &bytes).unwrap();
            if !sends {
                // Nothing can be sent there, as from some file systems.
                files.nowhere = tempfile::tempfile().unwrap();
                rustix::fs::fcntl_setfl(&files.nowhere, rustix::fs::OFlags::APPEND).unwrap();
            }
            // Whole pages, as far as there are some.
            for (range, bytes) in [
                (1..2, PAGE),
                (page - 1..page + 1, 2 * PAGE),
                (4 * page + 9..5 * page + 7, PAGE + 7),
            ] {
                assert_eq!(files.cache(&range).unwrap(), bytes, "{range:?}");
            }
            file.as_file().set_len(3 * page).unwrap();
            let error = files.cache(&(2 * page..4 * page)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        }
    }
}
