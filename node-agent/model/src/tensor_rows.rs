//! Where a matrix or a vector lies in a model file.

use std::ops::Range;

use prima_gguf::GgmlType;

/// Consecutive rows of a tensor: all of it, or a part where a file has several matrices in one. A vector is one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRows {
    /// The tensor, for messages.
    pub tensor: String,
    pub format: GgmlType,
    pub rows: usize,
    pub cols: usize,
    /// Where the rows lie in the file.
    pub bytes: Range<u64>,
}

impl TensorRows {
    /// Consecutive matrices of so many rows each, which together are this one. Of a vector: consecutive vectors.
    pub(crate) fn split<const N: usize>(self, parts: [usize; N]) -> [TensorRows; N] {
        let length = self.bytes.end - self.bytes.start;
        let is_vector = self.rows == 1;
        let whole = if is_vector { self.cols } else { self.rows } as u64;
        let mut first = 0;
        parts.map(|part| {
            let last = first + part as u64;
            let bytes = [first, last].map(|row| self.bytes.start + length / whole * row);
            first = last;
            TensorRows {
                tensor: self.tensor.clone(),
                format: self.format,
                rows: if is_vector { 1 } else { part },
                cols: if is_vector { part } else { self.cols },
                bytes: bytes[0]..bytes[1],
            }
        })
    }
}
