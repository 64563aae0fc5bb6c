//! One product of activations with a weight matrix, as the kernels get it: what is multiplied, and where the result goes.

use super::activations::QuantizedRows;
use super::matrix::Matrix;
use super::shared_slice::SharedSlice;

/// Weight rows that kernels take together at most; pieces are multiples of it.
pub const TILE_ROWS: usize = 16;

/// One matrix with what it multiplies and where the result goes.
pub(super) struct Product<'a> {
    pub(super) matrix: Matrix<'a>,
    pub(super) activations: Activations<'a>,
    /// Rows of activations.
    pub(super) n: usize,
    /// `n` rows of `matrix.rows()`. A piece writes the columns of its weight rows and no others.
    pub(super) out: SharedSlice<'a, f32>,
}

#[derive(Clone, Copy)]
pub(super) enum Activations<'a> {
    Float(&'a [f32]),
    Quantized(QuantizedRows<'a>),
}

impl Product<'_> {
    /// `rows` places in row `i` of the output, from that of weight row `first` on.
    ///
    /// # Safety
    /// They are of the piece that this thread computes, and no other slice of these places is in use.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub(super) unsafe fn columns(&self, i: usize, first: usize, rows: usize) -> &mut [f32] {
        let first = i * self.matrix.rows() + first;
        // SAFETY: passed on to the caller.
        unsafe { self.out.part(first..first + rows) }
    }
}
