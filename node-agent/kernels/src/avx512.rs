//! The matrix kernels for AVX-512 with VNNI: four 8-bit products per lane and instruction, summed in 32 bits.

use std::arch::x86_64::*;
use std::ops::Range;

use super::formats::Quants;
use super::lanes::Words;
use super::packed_tile::{Integers, Sums, compiled_for, multiply_by_format, read_quad};
use super::product::{Product, TILE_ROWS};

/// Computes the columns `rows` of the product's output.
///
/// # Safety
/// No other thread writes these columns meanwhile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn multiply(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller; this function is compiled for, and only called with, these
    // instructions.
    unsafe { multiply_by_format::<Avx512>(product, rows) }
}

struct Avx512;

impl Integers for Avx512 {
    type Base = Self;
    type Words = [__m512i; 1];
    type Floats = __m512;
    const TILE: usize = 8;
    const SIGNED: bool = false;

    compiled_for!("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c");

    #[inline(always)]
    unsafe fn sums<Q: Quants, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
        start: [i32; ROWS],
    ) -> [Self::Floats; ROWS] {
        // SAFETY: passed on from the caller.
        unsafe {
            let mut sums = [_mm512_setzero_si512(); ROWS];
            for (sum, start) in sums.iter_mut().zip(start) {
                *sum = _mm512_set1_epi32(start);
            }
            for quad in 0..Q::GROUP / 4 {
                let four = _mm512_load_si512(weights.add(quad * 4 * TILE_ROWS).cast());
                for (row, sum) in sums.iter_mut().enumerate() {
                    let x_four = read_quad(x_quads.add(row * x_stride + 4 * quad));
                    *sum = _mm512_dpbusd_epi32(*sum, four, _mm512_set1_epi32(x_four));
                }
            }
            sums.to_floats()
        }
    }

    type OneRow = __m512i;
    type Sums = Avx512Sums;
}

#[derive(Clone, Copy)]
struct Avx512Sums(__m512i);

impl Sums<__m512i> for Avx512Sums {
    #[inline(always)]
    fn new() -> Self {
        // SAFETY: only used in kernels of a level that has the instructions; so below.
        Self(unsafe { _mm512_setzero_si512() })
    }

    #[inline(always)]
    fn add_quad<Q: Quants>(&mut self, four: __m512i, x_four: i32) {
        // SAFETY: as above.
        self.0 = unsafe { _mm512_dpbusd_epi32(self.0, four, _mm512_set1_epi32(x_four)) };
    }

    #[inline(always)]
    fn whole(self) -> __m512i {
        self.0
    }
}
