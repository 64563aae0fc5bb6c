//! The matrix kernels for SSE4.1 with SSSE3 (processors from 2008 on).

use std::arch::x86_64::*;
use std::ops::Range;

use super::byte_pairs::{self, PairSums};
use super::formats::Quants;
use super::lanes::Words;
use super::packed_tile::{Integers, compiled_for, multiply_by_format};
use super::product::Product;

/// Computes the columns `rows` of the product's output.
///
/// # Safety
/// No other thread writes these columns meanwhile.
#[target_feature(enable = "sse4.1,ssse3")]
pub(super) unsafe fn multiply(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller; this function is compiled for, and only called with, these
    // instructions.
    unsafe { multiply_by_format::<Sse41>(product, rows) }
}

struct Sse41;

impl Integers for Sse41 {
    type Base = Self;
    type Words = [__m128i; 4];
    type Floats = __m128;
    const TILE: usize = 4;
    const SIGNED: bool = true;

    compiled_for!("sse4.1,ssse3");

    #[inline(always)]
    unsafe fn sums<Q: Quants, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
        start: [i32; ROWS],
    ) -> [Self::Floats; ROWS] {
        // SAFETY: passed on from the caller.
        unsafe {
            byte_pairs::sums::<__m128i, Q, ROWS>(weights, x_quads, x_stride, start).to_floats()
        }
    }

    type OneRow = __m128i;
    type Sums = PairSums<__m128i>;
}
