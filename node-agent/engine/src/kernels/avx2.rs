//! The matrix kernels for AVX2 with FMA and F16C, and for AVX-VNNI beside them. With AVX2 alone 8-bit products are summed in pairs
//! to 16 bits, as many of these as cannot overflow are added up, and then widened to 32 bits; AVX-VNNI sums four to 32 bits at
//! once.

use std::arch::x86_64::*;
use std::ops::Range;

use super::activations::QuantizedRows;
use super::formats::BlockFormat;
use super::lanes::Avx2Words;
use super::matmul::{PANEL, Product};
use super::panel::{Integers, Panel, Place};
use super::x86::multiply_by_format;

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
/// As there.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn multiply_vnni(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller; this function is compiled for, and only called with, these
    // instructions.
    unsafe { multiply_by_format::<AvxVnni>(product, rows) }
}

struct Avx2;

struct AvxVnni;

/// How many sums of two products, each of a value below `1 << bits` and one of -127 to 127, fit in 16 bits.
const fn sums_without_overflow(bits: u32) -> usize {
    let largest = 2 * 127 * ((1 << bits) - 1);
    (i16::MAX as usize) / largest
}

/// How the products of a group are summed.
trait GroupSums {
    /// Whether [`sums`](Self::sums) has taken the format's offset off the values already.
    fn takes_offset<F: BlockFormat>() -> bool;

    /// The sums of one group's products.
    ///
    /// # Safety
    /// The level's instructions; a group of 8 weight rows at `weights` and of `ROWS` rows of activations, `x_stride` apart, at
    /// `x_quads` are readable.
    unsafe fn sums<F: BlockFormat, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
    ) -> [__m256i; ROWS];
}

impl GroupSums for Avx2 {
    #[inline(always)]
    fn takes_offset<F: BlockFormat>() -> bool {
        F::BITS == 8
    }

    #[inline(always)]
    unsafe fn sums<F: BlockFormat, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
    ) -> [__m256i; ROWS] {
        // SAFETY: passed on from the caller.
        unsafe {
            match F::BITS {
                8 => signed_sums::<F, ROWS>(weights, x_quads, x_stride),
                _ => unsigned_sums::<F, ROWS>(weights, x_quads, x_stride),
            }
        }
    }
}

impl GroupSums for AvxVnni {
    #[inline(always)]
    fn takes_offset<F: BlockFormat>() -> bool {
        false
    }

    #[inline(always)]
    unsafe fn sums<F: BlockFormat, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
    ) -> [__m256i; ROWS] {
        // SAFETY: passed on from the caller.
        unsafe { sums_of_four::<F, ROWS>(weights, x_quads, x_stride) }
    }
}

impl Integers for Avx2 {
    type Words = Avx2Words;
    const TILE: usize = 4;

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn tile<F: BlockFormat, const ROWS: usize>(
        panel: &Panel,
        place: &Place,
        x: &QuantizedRows,
        first: usize,
        product: &Product<'_>,
    ) {
        for half in 0..2 {
            if half * 8 < place.rows {
                // SAFETY: passed on from the caller.
                unsafe { half_tile::<Self, F, ROWS>(panel, half, place, x, first, product) };
            }
        }
    }
}

impl Integers for AvxVnni {
    type Words = Avx2Words;
    const TILE: usize = 4;

    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    unsafe fn tile<F: BlockFormat, const ROWS: usize>(
        panel: &Panel,
        place: &Place,
        x: &QuantizedRows,
        first: usize,
        product: &Product<'_>,
    ) {
        for half in 0..2 {
            if half * 8 < place.rows {
                // SAFETY: passed on from the caller.
                unsafe { half_tile::<Self, F, ROWS>(panel, half, place, x, first, product) };
            }
        }
    }
}

/// [`Integers::tile`] for rows 0 to 7 (`half` 0) or 8 to 15 (`half` 1) of the panel.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn half_tile<S: GroupSums, F: BlockFormat, const ROWS: usize>(
    panel: &Panel,
    half: usize,
    place: &Place,
    x: &QuantizedRows,
    first: usize,
    product: &Product<'_>,
) {
    let groups = place.columns.len() / F::GROUP;
    let first_group = place.columns.start / F::GROUP;
    let x_values = &x.values[first * x.cols..][..ROWS * x.cols];
    let x_groups = first * x.groups..(first + ROWS) * x.groups;
    let x_scales = &x.scales[x_groups.clone()];
    let x_sums = &x.negated_sums[x_groups.clone()];
    let x_scaled_sums = &x.scaled_sums[x_groups];
    debug_assert!(place.columns.end <= x.cols && first_group + groups <= x.groups);
    let lanes = 8 * half..place.rows.min(8 * half + 8);
    // SAFETY: the slices above hold `ROWS` whole rows; `place` lies within the columns (the asserted
    // relations hold for every place that `panel::multiply` makes) and within the panel's arrays.
    unsafe {
        let mut totals = [_mm256_setzero_ps(); ROWS];
        if place.columns.start > 0 {
            for (row, total) in totals.iter_mut().enumerate() {
                let mut eight = [0.0; 8];
                let from = &product.columns(first + row, place)[lanes.clone()];
                eight[..from.len()].copy_from_slice(from);
                *total = _mm256_loadu_ps(eight.as_ptr());
            }
        }
        for group in 0..groups {
            let weights = panel
                .values
                .as_ptr()
                .add(group * F::GROUP * PANEL + 32 * half);
            let x_quads = x_values
                .as_ptr()
                .add(place.columns.start + group * F::GROUP);
            let mut sums = S::sums::<F, ROWS>(weights, x_quads, x.cols);
            if F::OFFSET != 0 && !S::takes_offset::<F>() {
                for (row, sum) in sums.iter_mut().enumerate() {
                    let x_sum = *x_sums.get_unchecked(row * x.groups + first_group + group);
                    *sum = _mm256_add_epi32(*sum, _mm256_set1_epi32(F::OFFSET * x_sum));
                }
            }
            let scales = _mm256_load_ps(panel.scales.as_ptr().add(group * PANEL + 8 * half));
            for row in 0..ROWS {
                let at = row * x.groups + first_group + group;
                let x_scale = _mm256_set1_ps(*x_scales.get_unchecked(at));
                let scale = _mm256_mul_ps(scales, x_scale);
                totals[row] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[row]), scale, totals[row]);
                if F::AFFINE {
                    let minimums = panel.minimums.as_ptr().add(group * PANEL + 8 * half);
                    let x_sum = _mm256_set1_ps(*x_scaled_sums.get_unchecked(at));
                    totals[row] = _mm256_fmadd_ps(_mm256_load_ps(minimums), x_sum, totals[row]);
                }
            }
        }
        for (row, total) in totals.into_iter().enumerate() {
            let mut eight = [0.0; 8];
            _mm256_storeu_ps(eight.as_mut_ptr(), total);
            let to = &mut product.columns(first + row, place)[lanes.clone()];
            to.copy_from_slice(&eight[..to.len()]);
        }
    }
}

/// The sums of one group's products, for values below 128.
///
/// # Safety
/// AVX2; a group of 8 weight rows at `weights` and of `ROWS` rows of activations, `x_stride` apart, at
/// `x_quads` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unsigned_sums<F: BlockFormat, const ROWS: usize>(
    weights: *const u8,
    x_quads: *const i8,
    x_stride: usize,
) -> [__m256i; ROWS] {
    // SAFETY: readable by the contract.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut sums = [_mm256_setzero_si256(); ROWS];
        let mut quad = 0;
        while quad < F::GROUP / 4 {
            let end = (quad + sums_without_overflow(F::BITS)).min(F::GROUP / 4);
            let mut pairs = [_mm256_setzero_si256(); ROWS];
            for quad in quad..end {
                let four = _mm256_load_si256(weights.add(quad * 4 * PANEL).cast());
                for (row, pairs) in pairs.iter_mut().enumerate() {
                    let x_four = x_quads.add(row * x_stride + 4 * quad).cast::<i32>();
                    let x_four = _mm256_set1_epi32(x_four.read_unaligned());
                    *pairs = _mm256_add_epi16(*pairs, _mm256_maddubs_epi16(four, x_four));
                }
            }
            for (sum, pairs) in sums.iter_mut().zip(pairs) {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
            quad = end;
        }
        sums
    }
}

/// The sums of one group's products, for 8-bit values with an offset of 128: multiplied as signed numbers, the
/// sign moved to the activations, so that no pair overflows (2 * 128 * 127 is below 2^15).
///
/// # Safety
/// As [`unsigned_sums`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn signed_sums<F: BlockFormat, const ROWS: usize>(
    weights: *const u8,
    x_quads: *const i8,
    x_stride: usize,
) -> [__m256i; ROWS] {
    // SAFETY: readable by the contract.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let sign_bit = _mm256_set1_epi8(i8::MIN);
        let mut sums = [_mm256_setzero_si256(); ROWS];
        for quad in 0..F::GROUP / 4 {
            let four = _mm256_load_si256(weights.add(quad * 4 * PANEL).cast());
            let four = _mm256_xor_si256(four, sign_bit);
            let magnitudes = _mm256_abs_epi8(four);
            for (row, sum) in sums.iter_mut().enumerate() {
                let x_four = x_quads.add(row * x_stride + 4 * quad).cast::<i32>();
                let x_four = _mm256_sign_epi8(_mm256_set1_epi32(x_four.read_unaligned()), four);
                let pairs = _mm256_maddubs_epi16(magnitudes, x_four);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
        }
        sums
    }
}

/// The sums of one group's products, four at a time.
///
/// # Safety
/// AVX-VNNI; else as [`unsigned_sums`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn sums_of_four<F: BlockFormat, const ROWS: usize>(
    weights: *const u8,
    x_quads: *const i8,
    x_stride: usize,
) -> [__m256i; ROWS] {
    // SAFETY: readable by the contract.
    unsafe {
        let mut sums = [_mm256_setzero_si256(); ROWS];
        for quad in 0..F::GROUP / 4 {
            let four = _mm256_load_si256(weights.add(quad * 4 * PANEL).cast());
            for (row, sum) in sums.iter_mut().enumerate() {
                let x_four = x_quads.add(row * x_stride + 4 * quad).cast::<i32>();
                let x_four = _mm256_set1_epi32(x_four.read_unaligned());
                *sum = _mm256_dpbusd_avx_epi32(*sum, four, x_four);
            }
        }
        sums
    }
}
