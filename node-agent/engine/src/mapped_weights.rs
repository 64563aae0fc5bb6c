//! The model file in memory: mapped, never loaded. Weights are read where the page cache has them, so a process that runs a model
//! owns next to none of it, and several processes on one machine share it.
//!
//! Decides: that the map is read-only and private. Refuses: to copy a matrix, and to touch a tensor's bytes before they are used
//! (a sparse file needs only the tensors that its machine runs). Whoever shortens the file while it is mapped ends this process
//! (SIGBUS): there is no way to read a map that guards against that.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Advice, Mmap};
use prima_gguf::TensorInfo;

use crate::error::EngineError;
use crate::kernels::{Matrix, MatrixError};

/// A mapped model file. Clones share the map.
#[derive(Clone)]
pub struct MappedFile {
    map: Arc<Mmap>,
}

/// A matrix (or, with one row, a vector) whose blocks lie in the map; keeps the map alive.
pub(crate) struct MappedTensor {
    /// Not `'static` in truth: borrows `_map`, and leaves this struct only with the lifetime of a borrow of it.
    matrix: Matrix<'static>,
    _map: Arc<Mmap>,
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

    /// Maps an open file; `path` is for errors.
    ///
    /// # Errors
    /// [`EngineError::Map`] when the system refuses.
    pub fn map(file: &File, path: &Path) -> Result<MappedFile, EngineError> {
        // SAFETY: the map is read-only and private, and only ever read as plain bytes, of which every value is valid. That another
        // process changes the file meanwhile cannot be excluded by anyone who maps files; it changes numbers, not types.
        let map = unsafe { Mmap::map(file) }.map_err(|source| EngineError::Map {
            path: path.to_owned(),
            source,
        })?;
        Ok(MappedFile { map: Arc::new(map) })
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Tells the system that pages will be read in no order: it then reads no more than those that are touched.
    ///
    /// # Errors
    /// [`EngineError::Advise`] when the system refuses.
    pub fn expect_random_reads(&self) -> Result<(), EngineError> {
        self.map
            .advise(Advice::Random)
            .map_err(|source| EngineError::Advise { source })
    }

    /// The tensor as rows of `shape[0]` columns. `info` comes from this file's header, whose parser saw to it that the range is
    /// inside the file.
    ///
    /// # Errors
    /// A [`MatrixError`] when the CPU has no kernels for the format.
    pub(crate) fn tensor(&self, info: &TensorInfo) -> Result<MappedTensor, MatrixError> {
        let cols = info.shape[0] as usize;
        let rows = (info.weights() / info.shape[0]) as usize;
        let bytes = &self.map[info.offset as usize..][..info.byte_len as usize];
        // SAFETY: the bytes live as long as the map, at a fixed address, and the map as long as the `Arc` beside the matrix, which
        // hands the matrix out only with the lifetime of a borrow of itself.
        let bytes: &'static [u8] =
            unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
        Ok(MappedTensor {
            matrix: Matrix::new(info.ggml_type, rows, cols, bytes)?,
            _map: Arc::clone(&self.map),
        })
    }
}

impl MappedTensor {
    /// The matrix, borrowed from the map.
    pub fn matrix(&self) -> Matrix<'_> {
        self.matrix
    }
}
