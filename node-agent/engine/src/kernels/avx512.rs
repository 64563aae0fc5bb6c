//! The matrix kernels for AVX-512 with VNNI: four 8-bit products per lane and instruction, summed in 32 bits.

use std::arch::x86_64::*;
use std::ops::Range;

use super::activations::QuantizedRows;
use super::formats::BlockFormat;
use super::lanes::{Avx512Lanes, HardwareHalves};
use super::matmul::{PANEL, Product};
use super::panel::{Floats, Integers, Panel, Place};
use super::x86::{Bf16, F16, F32, multiply_by_format};

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
    type Halves = HardwareHalves;
    const TILE: usize = 8;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn transpose(from: *const u8, stride: usize, to: *mut u8) {
        // SAFETY: rows 0 to 15 lie at multiples of the stride, 32 bytes each, and 8 times 64 bytes are
        // written, all within the contract.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 8];
            for (row, both) in rows.iter_mut().enumerate() {
                *both = pair(from.add(row * stride), from.add((row + 8) * stride));
            }
            store(to.cast(), rows);
        }
    }

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
        // relations hold for every place that `panel::quantized` makes) and within the panel's arrays.
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

impl Floats<F32> for Avx512 {
    type Lanes = Avx512Lanes;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn transpose(from: &[*const u8; PANEL], to: *mut f32) {
        // SAFETY: 8 weights of 4 bytes at each of `from`; 128 floats at `to`.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 8];
            for (row, both) in rows.iter_mut().enumerate() {
                *both = pair(from[row], from[row + 8]);
            }
            store(to, rows);
        }
    }
}

impl Floats<F16> for Avx512 {
    type Lanes = Avx512Lanes;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn transpose(from: &[*const u8; PANEL], to: *mut f32) {
        // SAFETY: 8 weights of 2 bytes at each of `from`; 128 floats at `to`.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 8];
            for (row, both) in rows.iter_mut().enumerate() {
                let wide = _mm512_cvtph_ps(half_pair(from[row], from[row + 8]));
                *both = _mm512_castps_si512(wide);
            }
            store(to, rows);
        }
    }
}

impl Floats<Bf16> for Avx512 {
    type Lanes = Avx512Lanes;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn transpose(from: &[*const u8; PANEL], to: *mut f32) {
        // SAFETY: 8 weights of 2 bytes at each of `from`; 128 floats at `to`.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 8];
            for (row, both) in rows.iter_mut().enumerate() {
                let wide = _mm512_cvtepu16_epi32(half_pair(from[row], from[row + 8]));
                *both = _mm512_slli_epi32::<16>(wide);
            }
            store(to, rows);
        }
    }
}

/// 32 bytes of each place in one register.
///
/// # Safety
/// The instructions of the level; 32 bytes are readable at both places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn pair(low: *const u8, high: *const u8) -> __m512i {
    // SAFETY: readable by the contract.
    let (low, high) = unsafe {
        (
            _mm256_loadu_si256(low.cast()),
            _mm256_loadu_si256(high.cast()),
        )
    };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

/// 16 bytes of each place in one register.
///
/// # Safety
/// The instructions of the level; 16 bytes are readable at both places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn half_pair(low: *const u8, high: *const u8) -> __m256i {
    // SAFETY: readable by the contract.
    let (low, high) = unsafe { (_mm_loadu_si128(low.cast()), _mm_loadu_si128(high.cast())) };
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
}

/// Turns 16 rows of 8 words, row `i` in the lower half of register `i` and row `i + 8` in its upper half, into
/// 8 columns of 16 rows, and writes these.
///
/// # Safety
/// The instructions of the level; 128 floats at `to` are writable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn store(to: *mut f32, rows: [__m512i; 8]) {
    let [a, b, c, d, e, f, g, h] = rows;
    // In every quarter: words of two rows, then of four rows.
    let ab = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    let ef = (_mm512_unpacklo_epi32(e, f), _mm512_unpackhi_epi32(e, f));
    let gh = (_mm512_unpacklo_epi32(g, h), _mm512_unpackhi_epi32(g, h));
    let first = [
        _mm512_unpacklo_epi64(ab.0, cd.0),
        _mm512_unpackhi_epi64(ab.0, cd.0),
        _mm512_unpacklo_epi64(ab.1, cd.1),
        _mm512_unpackhi_epi64(ab.1, cd.1),
    ];
    let second = [
        _mm512_unpacklo_epi64(ef.0, gh.0),
        _mm512_unpackhi_epi64(ef.0, gh.0),
        _mm512_unpacklo_epi64(ef.1, gh.1),
        _mm512_unpackhi_epi64(ef.1, gh.1),
    ];
    // Quarters 0 and 2 hold columns 0 to 3, quarters 1 and 3 columns 4 to 7.
    let even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    let odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for column in 0..4 {
        let low = _mm512_permutex2var_epi64(first[column], even, second[column]);
        let high = _mm512_permutex2var_epi64(first[column], odd, second[column]);
        // SAFETY: 8 times 16 floats, by the contract.
        unsafe {
            _mm512_storeu_si512(to.add(column * PANEL).cast(), low);
            _mm512_storeu_si512(to.add((column + 4) * PANEL).cast(), high);
        }
    }
}
