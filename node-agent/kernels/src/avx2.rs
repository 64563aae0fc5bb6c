//! The matrix kernels for AVX2 with FMA and F16C, and for AVX-VNNI beside them, which sums four products to 32 bits at once.

use std::arch::x86_64::*;
use std::ops::Range;

use super::byte_pairs::{self, PairSums};
use super::formats::Quants;
use super::lanes::Words;
use super::packed_tile::{Integers, Sums, compiled_for, multiply_by_format, read_quad};
use super::product::{Product, TILE_ROWS};

/// Computes the columns `rows` of the product's output.
///
/// # Safety
/// No other thread writes these columns meanwhile.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn multiply(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller; this function is compiled for, and only called with, these
    // instructions.
    unsafe { multiply_by_format::<Avx2>(product, rows) }
}

/// As [`multiply`].
///
/// # Safety
/// No other thread writes these columns meanwhile.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn multiply_vnni(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller; this function is compiled for, and only called with, these
    // instructions.
    unsafe { multiply_by_format::<AvxVnni>(product, rows) }
}

struct Avx2;

struct AvxVnni;

impl Integers for Avx2 {
    type Base = Self;
    type Words = [__m256i; 2];
    type Floats = __m256;
    const TILE: usize = 4;
    const SIGNED: bool = true;

    compiled_for!("avx2,fma,f16c");

    #[inline(always)]
    unsafe fn sums<Q: Quants, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
        start: [i32; ROWS],
    ) -> [Self::Floats; ROWS] {
        // SAFETY: passed on from the caller.
        unsafe {
            byte_pairs::sums::<__m256i, Q, ROWS>(weights, x_quads, x_stride, start).to_floats()
        }
    }

    type OneRow = __m256i;
    type Sums = PairSums<__m256i>;
}

impl Integers for AvxVnni {
    type Base = Avx2;
    type Words = [__m256i; 2];
    type Floats = __m256;
    const TILE: usize = 4;
    const SIGNED: bool = false;

    compiled_for!("avx2,fma,f16c,avxvnni");

    #[inline(always)]
    unsafe fn sums<Q: Quants, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
        start: [i32; ROWS],
    ) -> [Self::Floats; ROWS] {
        // SAFETY: passed on from the caller.
        unsafe {
            let mut sums = [_mm256_setzero_si256(); ROWS];
            for (sum, start) in sums.iter_mut().zip(start) {
                *sum = _mm256_set1_epi32(start);
            }
            for quad in 0..Q::GROUP / 4 {
                let four = _mm256_load_si256(weights.add(quad * 4 * TILE_ROWS).cast());
                for (row, sum) in sums.iter_mut().enumerate() {
                    let x_four = read_quad(x_quads.add(row * x_stride + 4 * quad));
                    *sum = _mm256_dpbusd_avx_epi32(*sum, four, _mm256_set1_epi32(x_four));
                }
            }
            sums.to_floats()
        }
    }

    type OneRow = __m256i;
    type Sums = VnniSums;
}

#[derive(Clone, Copy)]
struct VnniSums(__m256i);

impl Sums<__m256i> for VnniSums {
    #[inline(always)]
    fn new() -> Self {
        // SAFETY: only used in kernels of a level that has the instructions; so below.
        Self(unsafe { _mm256_setzero_si256() })
    }

    #[inline(always)]
    fn add_quad<Q: Quants>(&mut self, four: __m256i, x_four: i32) {
        // SAFETY: as above.
        self.0 = unsafe { _mm256_dpbusd_avx_epi32(self.0, four, _mm256_set1_epi32(x_four)) };
    }

    #[inline(always)]
    fn whole(self) -> __m256i {
        self.0
    }
}
