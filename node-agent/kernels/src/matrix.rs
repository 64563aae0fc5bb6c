//! A weight matrix as the file holds it: rows of blocks of one format, borrowed, checked once when it is
//! made so that the kernels need not check again. Refuses formats without kernels, and sizes that do not fit.

use std::ops::Range;

use prima_gguf::GgmlType;

use super::formats::{BlockFormat, MAX_BLOCK, MIN_GROUP, with_block_format};
use super::numerics::{bf16_to_f32, f16_to_f32};

/// A row-major matrix of `rows` outputs by `cols` inputs in the blocks of `ggml_type`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    ggml_type: GgmlType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

/// Why bytes are not a matrix.
#[derive(Debug, thiserror::Error)]
pub enum MatrixError {
    #[error(
        "reading weights of format {ggml_type}: the CPU has no kernels for it; it has them for F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, the IQ formats and MXFP4: convert the model to one of these"
    )]
    Unsupported { ggml_type: GgmlType },
    #[error(
        "reading {ggml_type} weights: a row has {cols} columns, which is not a positive multiple of the format's block of {block}"
    )]
    Columns {
        ggml_type: GgmlType,
        cols: usize,
        block: usize,
    },
    #[error(
        "reading {ggml_type} weights: {rows} rows of {cols} columns exceed the limit of {MAX_SIDE} a side"
    )]
    TooLarge {
        ggml_type: GgmlType,
        rows: usize,
        cols: usize,
    },
    #[error(
        "reading {ggml_type} weights: {rows} rows of {cols} columns take {expected} bytes, found {found}"
    )]
    Length {
        ggml_type: GgmlType,
        rows: usize,
        cols: usize,
        expected: usize,
        found: usize,
    },
}

/// The most rows or columns of a matrix. Far above any model; keeps every product of sizes in range.
const MAX_SIDE: usize = 1 << 26;

/// Whether the CPU has kernels for this format.
pub fn supported(ggml_type: GgmlType) -> bool {
    match ggml_type {
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => true,
        other => with_block_format!(
            other,
            Format => Format::BYTES == other.block_bytes(),
            else false,
        ),
    }
}

/// Writes row `row` of `matrix` as numbers into `out`.
///
/// # Panics
/// When the matrix has no such row, or `out` has another length than its columns.
pub fn dequantize_row(matrix: Matrix<'_>, row: usize, out: &mut [f32]) {
    assert!(row < matrix.rows, "row {row} of {}", matrix.rows);
    assert_eq!(out.len(), matrix.cols, "places for a row");
    let bytes = matrix.row(row);
    match matrix.ggml_type {
        GgmlType::F32 => convert::<4>(bytes, out, f32::from_le_bytes),
        GgmlType::F16 => convert::<2>(bytes, out, |b| f16_to_f32(u16::from_le_bytes(b))),
        GgmlType::BF16 => convert::<2>(bytes, out, |b| bf16_to_f32(u16::from_le_bytes(b))),
        other => with_block_format!(
            other,
            Format => dequantize::<Format>(bytes, out),
            else no_kernel(other),
        ),
    }
}

impl<'a> Matrix<'a> {
    /// The matrix of `rows` by `cols` weights in `bytes`, row after row.
    ///
    /// # Errors
    /// A [`MatrixError`] when the format has no kernels, `cols` is not a positive multiple of its block
    /// length, a side exceeds the limit, or `bytes` is not exactly as long as the blocks.
    pub fn new(
        ggml_type: GgmlType,
        rows: usize,
        cols: usize,
        bytes: &'a [u8],
    ) -> Result<Self, MatrixError> {
        if !supported(ggml_type) {
            return Err(MatrixError::Unsupported { ggml_type });
        }
        let block = ggml_type.block_len();
        if cols == 0 || !cols.is_multiple_of(block) {
            return Err(MatrixError::Columns {
                ggml_type,
                cols,
                block,
            });
        }
        if rows > MAX_SIDE || cols > MAX_SIDE {
            return Err(MatrixError::TooLarge {
                ggml_type,
                rows,
                cols,
            });
        }
        let row_bytes = cols / block * ggml_type.block_bytes();
        let expected = rows * row_bytes;
        if bytes.len() != expected {
            return Err(MatrixError::Length {
                ggml_type,
                rows,
                cols,
                expected,
                found: bytes.len(),
            });
        }
        Ok(Matrix {
            ggml_type,
            rows,
            cols,
            row_bytes,
            bytes,
        })
    }

    pub fn ggml_type(&self) -> GgmlType {
        self.ggml_type
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Only these rows.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn part(self, rows: Range<usize>) -> Matrix<'a> {
        Matrix {
            rows: rows.len(),
            bytes: &self.bytes[rows.start * self.row_bytes..rows.end * self.row_bytes],
            ..self
        }
    }

    /// The same rows elsewhere in memory.
    ///
    /// # Panics
    /// When `bytes` is of another length.
    pub fn at<'b>(self, bytes: &'b [u8]) -> Matrix<'b> {
        assert_eq!(bytes.len(), self.bytes.len(), "bytes of the same rows");
        Matrix { bytes, ..self }
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The blocks of all rows.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The blocks of one row.
    #[inline]
    pub(super) fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes..][..self.row_bytes]
    }
}

fn convert<const BYTES: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn([u8; BYTES]) -> f32) {
    let (numbers, _) = bytes.as_chunks::<BYTES>();
    for (out, bytes) in out.iter_mut().zip(numbers) {
        *out = number(*bytes);
    }
}

fn dequantize<F: BlockFormat>(bytes: &[u8], out: &mut [f32]) {
    let mut values = [0; MAX_BLOCK];
    let mut scales = [0.0; MAX_BLOCK / MIN_GROUP];
    let mut minimums = [0.0; MAX_BLOCK / MIN_GROUP];
    for (block, out) in bytes
        .chunks_exact(F::BYTES)
        .zip(out.chunks_exact_mut(F::BLOCK))
    {
        F::unpack(block, &mut values, &mut scales, &mut minimums);
        for (group, out) in out.chunks_exact_mut(F::GROUP).enumerate() {
            for (out, value) in out.iter_mut().zip(&values[group * F::GROUP..]) {
                let weight = scales[group] * (i32::from(*value) - F::OFFSET) as f32;
                *out = if F::AFFINE {
                    weight + minimums[group]
                } else {
                    weight
                };
            }
        }
    }
}

/// For types that `Matrix::new` does not let pass.
pub(super) fn no_kernel(ggml_type: GgmlType) -> ! {
    unreachable!("a matrix of {ggml_type} cannot be made")
}
