//! The model's files, and how weights that do not stay are read from them: past the page cache if the file system allows it (so that they
//! displace nothing that stays), else through it, dropping the pages afterwards; if both work, the faster way.

use std::fs::File;
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
use crate::page_cache::drop_pages;

/// The files of a model, open. Offsets are those of the model.
pub struct ModelFiles {
    /// In order.
    files: Vec<SourceFile>,
    way: OnceLock<Way>,
}

struct SourceFile {
    path: PathBuf,
    /// Where it begins in the model: at a multiple of a page.
    start: u64,
    cached: File,
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
        let open = |(start, path): (u64, &Path)| {
            let cached = File::open(path).map_err(|source| EngineError::ReadAhead {
                path: path.to_owned(),
                source,
            })?;
            Ok::<_, EngineError>(SourceFile {
                path: path.to_owned(),
                start,
                cached,
                direct: open_direct(path),
            })
        };
        Ok(ModelFiles {
            files: files.into_iter().map(open).collect::<Result<_, _>>()?,
            way: OnceLock::new(),
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
        drop_pages(
            &self.cached,
            range.start - self.start..range.end - self.start,
        )
    }

    /// Reads whole pages, from the range's first page to its last; the file may end inside the last one.
    fn read_pages(&self, file: &File, range: &Range<u64>, slot: &mut [u8]) -> io::Result<usize> {
        let offset = range.start - self.start;
        let first = offset - offset % PAGE as u64;
        let needed = (range.end - self.start - first) as usize;
        let wanted = needed.next_multiple_of(PAGE).min(slot.len());
        let mut read = 0;
        while read < needed {
            match rustix::io::pread(file, &mut slot[read..wanted], first + read as u64) {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the file is shorter than when it was opened",
                    ));
                }
                Ok(bytes) => read += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(read)
    }
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
