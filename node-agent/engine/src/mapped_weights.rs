//! The model's files in memory: mapped, never loaded. Weights are read directly from the page cache, so a process that runs a model
//! owns almost none of that memory, and several processes on one machine share it.
//!
//! Decides: that the map is read-only and private. Refuses: to copy a matrix, and to touch a tensor's bytes before they are used
//! (a sparse file needs only the tensors that its machine runs). Where the file cannot be read any more, because the disk fails or
//! somebody truncated it, reads give zeros, and the map is marked as damaged.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Advice, Mmap, UncheckedAdvice};
use prima_gguf::Gguf;
use prima_model::TensorRows;

use crate::damaged_map::Watched;
use crate::error::EngineError;
use crate::kernels::{Matrix, MatrixError};
use crate::page_cache;

/// The files of a model, mapped. Offsets are those of the model's header, and a range is in one of the files. Clones share the maps.
#[derive(Clone)]
pub(crate) struct MappedModel {
    /// In order; by where each begins.
    files: Arc<[(u64, MappedFile)]>,
}

/// A mapped file. Clones share the map.
#[derive(Clone)]
pub struct MappedFile {
    map: Arc<Map>,
}

struct Map {
    // Dropped first: it watches what the map holds.
    watched: Watched,
    bytes: Mmap,
    path: PathBuf,
    /// Whether the system tells which pages the page cache has.
    tells: bool,
}

/// A matrix (or, with one row, a vector) whose blocks lie in the map; keeps the map alive.
#[derive(Clone)]
pub(crate) struct MappedTensor {
    /// Not really `'static`: it borrows `map`, and leaves this struct only with the lifetime of a borrow of the struct.
    matrix: Matrix<'static>,
    offset: u64,
    map: Arc<Map>,
}

impl MappedModel {
    /// `files` are the parts of `gguf`, in order.
    pub(crate) fn new(gguf: &Gguf, files: Vec<MappedFile>) -> MappedModel {
        let starts = gguf.parts.iter().map(|part| part.start);
        MappedModel {
            files: starts.zip(files).collect(),
        }
    }

    /// Where the files were opened, and where each begins.
    pub(crate) fn paths(&self) -> impl Iterator<Item = (u64, &Path)> {
        let files = self.files.iter();
        files.map(|(start, file)| (*start, file.path()))
    }

    /// The file with the byte at `offset`.
    pub(crate) fn file_at(&self, offset: u64) -> &MappedFile {
        &self.at(offset).1
    }

    /// As [`MappedFile::expect_random_reads`].
    pub(crate) fn expect_random_reads(&self, range: Range<u64>) -> Result<(), EngineError> {
        let (file, range) = self.own(range);
        file.expect_random_reads(range)
    }

    /// As [`MappedFile::populate`].
    pub(crate) fn populate(&self, range: Range<u64>) -> io::Result<()> {
        let (file, range) = self.own(range);
        file.populate(range)
    }

    /// As [`MappedFile::is_cached`].
    pub(crate) fn is_cached(&self, range: Range<u64>) -> Option<bool> {
        let (file, range) = self.own(range);
        file.is_cached(range)
    }

    /// As [`MappedFile::unmap_pages`].
    pub(crate) fn unmap_pages(&self, range: Range<u64>) -> io::Result<()> {
        let (file, range) = self.own(range);
        file.unmap_pages(range)
    }

    /// The matrix of these rows, which are of this model's header: its parser checked that they are inside one of the files.
    ///
    /// # Errors
    /// A [`MatrixError`] when the CPU has no kernels for the format.
    pub(crate) fn tensor(&self, rows: &TensorRows) -> Result<MappedTensor, MatrixError> {
        let (start, file) = self.at(rows.bytes.start);
        file.tensor(rows, *start)
    }

    /// The file of `range`, and the range in it.
    fn own(&self, range: Range<u64>) -> (&MappedFile, Range<u64>) {
        let (start, file) = self.at(range.start);
        (file, range.start - start..range.end - start)
    }

    fn at(&self, offset: u64) -> &(u64, MappedFile) {
        let behind = self.files.partition_point(|(start, _)| *start <= offset);
        // The first begins at 0.
        &self.files[behind.max(1) - 1]
    }
}

impl MappedFile {
    /// Maps the whole file at `path`.
    ///
    /// # Errors
    /// [`EngineError::Open`] and [`EngineError::Map`] when the system refuses (an empty file cannot be mapped).
    pub fn open(path: &Path) -> Result<MappedFile, EngineError> {
        let file = File::open(path).map_err(|source| EngineError::Open {
            path: path.to_owned(),
            source,
        })?;
        MappedFile::map(&file, path)
    }

    /// Maps an open file; `path` is where it was opened.
    ///
    /// # Errors
    /// [`EngineError::Map`] when the system refuses.
    pub fn map(file: &File, path: &Path) -> Result<MappedFile, EngineError> {
        // SAFETY: the map is read-only and private, and only ever read as plain bytes, for which every value is valid. Nobody who
        // maps files can rule out that another process changes the file meanwhile; that changes numbers, not types.
        let bytes = unsafe { Mmap::map(file) }.map_err(|source| EngineError::Map {
            path: path.to_owned(),
            source,
        })?;
        let start = bytes.as_ptr() as usize;
        let map = Map {
            watched: Watched::new(start..start + bytes.len()),
            bytes,
            path: path.to_owned(),
            tells: page_cache::tells(file, path),
        };
        Ok(MappedFile { map: Arc::new(map) })
    }

    /// Where the file was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.map.path
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map.bytes
    }

    /// Tells the system that the pages of `range` will be read in random order: it then reads only the pages that are touched.
    ///
    /// # Errors
    /// [`EngineError::Advise`] when the system refuses.
    pub fn expect_random_reads(&self, range: Range<u64>) -> Result<(), EngineError> {
        let (offset, length) = span(range);
        self.map
            .bytes
            .advise_range(Advice::Random, offset, length)
            .map_err(|source| EngineError::Advise { source })
    }

    /// Reads the pages of `range` that are not in memory yet, and waits for them.
    ///
    /// # Errors
    /// The error of the read.
    pub(crate) fn populate(&self, range: Range<u64>) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        let (offset, length) = span(range.clone());
        #[cfg(target_os = "linux")]
        match self
            .map
            .bytes
            .advise_range(Advice::PopulateRead, offset, length)
        {
            // Older than Linux 5.14.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            result => return result,
        }
        self.expect_reads(range)
    }

    /// Whether the page cache has all pages of `range`; `None` where the system does not tell.
    pub(crate) fn is_cached(&self, range: Range<u64>) -> Option<bool> {
        let (offset, length) = span(range);
        let own = &self.map.bytes[offset..][..length];
        self.map.tells.then(|| page_cache::has_all(own))
    }

    /// Has the system begin to read the pages of `range` into the page cache.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn expect_reads(&self, range: Range<u64>) -> io::Result<()> {
        let (offset, length) = span(range);
        self.map
            .bytes
            .advise_range(Advice::WillNeed, offset, length)
    }

    /// Unmaps the pages of `range` from this process; they stay in the page cache.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn unmap_pages(&self, range: Range<u64>) -> io::Result<()> {
        let (offset, length) = span(range);
        let advice = UncheckedAdvice::DontNeed;
        // SAFETY: the map is a read-only map of a file: pages that are touched again are read from the file again.
        unsafe {
            self.map
                .bytes
                .unchecked_advise_range(advice, offset, length)
        }
    }

    /// The matrix of these rows; the file begins at `start` of the model.
    fn tensor(&self, rows: &TensorRows, start: u64) -> Result<MappedTensor, MatrixError> {
        let own = (rows.bytes.start - start) as usize..(rows.bytes.end - start) as usize;
        let bytes = &self.map.bytes[own];
        // SAFETY: the bytes live as long as the map, at a fixed address; the map lives as long as the `Arc` beside the matrix; and
        // the matrix is handed out only with the lifetime of a borrow of this struct.
        let bytes: &'static [u8] =
            unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
        Ok(MappedTensor {
            matrix: Matrix::new(rows.format, rows.rows, rows.cols, bytes)?,
            offset: rows.bytes.start,
            map: Arc::clone(&self.map),
        })
    }
}

/// Offset and length of a range of the map.
fn span(range: Range<u64>) -> (usize, usize) {
    (range.start as usize, (range.end - range.start) as usize)
}

impl MappedTensor {
    /// The matrix, borrowed from the map.
    pub fn matrix(&self) -> Matrix<'_> {
        self.matrix
    }

    /// Where it begins in the model.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether what was read from the matrix so far can be used.
    ///
    /// # Errors
    /// [`EngineError::Damaged`] when some page of the file could not be read.
    pub fn check(&self) -> Result<(), EngineError> {
        match self.map.watched.is_damaged() {
            false => Ok(()),
            true => Err(EngineError::Damaged {
                path: self.map.path.clone(),
            }),
        }
    }
}
