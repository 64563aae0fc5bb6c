//! The matrix kernels for AVX-512 with VNNI: four 8-bit products per lane and instruction, summed in 32 bits.

use std::arch::x86_64::*;
use std::ops::Range;

use super::activations::QuantizedRows;
use super::formats::BlockFormat;
use super::lanes::Avx512Words;
use super::matmul::{PANEL, Product};
use super::panel::{Integers, Panel, Place};
use super::x86::multiply_by_format;

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

pub(super) struct Avx512;

impl Integers for Avx512 {
    type Words = Avx512Words;
    const TILE: usize = 8;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn tile<F: BlockFormat, const ROWS: usize>(
        panel: &Panel,
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
        // SAFETY: the slices above hold `ROWS` whole rows; `place` lies within the columns (the asserted
        // relations hold for every place that `panel::multiply` makes) and within the panel's arrays.
        unsafe {
            let present = ((1_u32 << place.rows) - 1) as __mmask16;
            let mut totals = [_mm512_setzero_ps(); ROWS];
            if place.columns.start > 0 {
                for (row, total) in totals.iter_mut().enumerate() {
                    let from = product.columns(first + row, place);
                    *total = _mm512_maskz_loadu_ps(present, from.as_ptr());
                }
            }
            let offset_shift = _mm_cvtsi32_si128(F::OFFSET.trailing_zeros().cast_signed());
            for group in 0..groups {
                let mut sums = [_mm512_setzero_si512(); ROWS];
                if F::OFFSET != 0 {
                    for (row, sum) in sums.iter_mut().enumerate() {
                        let x_sum = *x_sums.get_unchecked(row * x.groups + first_group + group);
                        *sum = _mm512_sll_epi32(_mm512_set1_epi32(x_sum), offset_shift);
                    }
                }
                let mut weights = panel.values.as_ptr().add(group * F::GROUP * PANEL);
                let mut x_quad = x_values
                    .as_ptr()
                    .add(place.columns.start + group * F::GROUP);
                for _ in 0..F::GROUP / 4 {
                    let four = _mm512_load_si512(weights.cast());
                    for (row, sum) in sums.iter_mut().enumerate() {
                        let x_four = x_quad.add(row * x.cols).cast::<i32>().read_unaligned();
                        *sum = _mm512_dpbusd_epi32(*sum, four, _mm512_set1_epi32(x_four));
                    }
                    weights = weights.add(4 * PANEL);
                    x_quad = x_quad.add(4);
                }
                let scales = _mm512_load_ps(panel.scales.as_ptr().add(group * PANEL));
                for row in 0..ROWS {
                    let at = row * x.groups + first_group + group;
                    let x_scale = _mm512_set1_ps(*x_scales.get_unchecked(at));
                    let scale = _mm512_mul_ps(scales, x_scale);
                    let sum = _mm512_cvtepi32_ps(sums[row]);
                    totals[row] = _mm512_fmadd_ps(sum, scale, totals[row]);
                    if F::AFFINE {
                        let minimums = _mm512_load_ps(panel.minimums.as_ptr().add(group * PANEL));
                        let x_sum = _mm512_set1_ps(*x_scaled_sums.get_unchecked(at));
                        totals[row] = _mm512_fmadd_ps(minimums, x_sum, totals[row]);
                    }
                }
            }
            for (row, total) in totals.into_iter().enumerate() {
                let to = product.columns(first + row, place);
                _mm512_mask_storeu_ps(to.as_mut_ptr(), present, total);
            }
        }
    }
}
