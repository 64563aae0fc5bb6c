//! Registers of 128 bits on x86-64. The functions here are inlined into kernels that are compiled for SSE4.1 and SSSE3 and
//! only run where the processor has them. No instruction fuses a product and a sum: both are rounded.

use std::arch::x86_64::*;

use half::f16;

use super::super::numerics::{HALF_REBIAS, HALF_SUBNORMAL};
use super::{Lanes, Rows, Words};

impl Lanes for __m128 {
    const COUNT: usize = 4;
    const TILE: usize = 2;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        // SAFETY: only used where the processor has SSE4.1 and SSSE3 (the traits' contract); so everywhere below.
        unsafe { _mm_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm_cvtepu16_epi32(_mm_loadl_epi64(from.cast())).halves_to_floats() }
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const i8) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_loadu_si32(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the contract.
        unsafe { _mm_storeu_ps(to, self) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_add_ps(self, other) }
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_mul_ps(self, other) }
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_add_ps(_mm_mul_ps(self, factor), addend) }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as in `splat`.
        unsafe {
            let pair = _mm_add_ps(self, _mm_movehl_ps(self, self));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
}

impl Words for __m128i {
    type Floats = __m128;
    const COUNT: usize = 4;

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }

    #[inline(always)]
    unsafe fn load_4(rows: &Rows, offset: usize) -> Self {
        let mut words = [0_i32; 4];
        for (lane, word) in words.iter_mut().enumerate() {
            // SAFETY: readable by the contract.
            *word = unsafe { rows.at(lane, offset).cast::<i32>().read_unaligned() };
        }
        let [a, b, c, d] = words;
        // SAFETY: as in `splat`.
        unsafe { _mm_setr_epi32(a, b, c, d) }
    }

    #[inline(always)]
    unsafe fn load_16(rows: &Rows, offset: usize) -> [Self; 4] {
        // SAFETY: readable by the contract.
        unsafe {
            transpose_4([
                _mm_loadu_si128(rows.at(0, offset).cast()),
                _mm_loadu_si128(rows.at(1, offset).cast()),
                _mm_loadu_si128(rows.at(2, offset).cast()),
                _mm_loadu_si128(rows.at(3, offset).cast()),
            ])
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: writable by the contract.
        unsafe { _mm_storeu_si128(to.cast(), self) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16]) -> Self {
        // SAFETY: the table has the 16 bytes that are read; else as in `splat`.
        unsafe { _mm_shuffle_epi8(_mm_loadu_si128(table.as_ptr().cast()), self) }
    }

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_and_si128(self, _mm_set1_epi32(mask.cast_signed())) }
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_or_si128(self, other) }
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_xor_si128(self, _mm_set1_epi32(mask.cast_signed())) }
    }

    #[inline(always)]
    fn add(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_add_epi32(self, _mm_set1_epi32(number)) }
    }

    #[inline(always)]
    fn multiply(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_mullo_epi32(self, _mm_set1_epi32(number)) }
    }

    #[inline(always)]
    fn shift_left(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_sll_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn shift_right(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_srl_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn shift_right_signed(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm_sra_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn to_floats(self) -> __m128 {
        // SAFETY: as in `splat`.
        unsafe { _mm_cvtepi32_ps(self) }
    }

    #[inline(always)]
    fn as_floats(self) -> __m128 {
        // SAFETY: as in `splat`.
        unsafe { _mm_castsi128_ps(self) }
    }

    #[inline(always)]
    fn halves_to_floats(self) -> __m128 {
        // SAFETY: as in `splat`.
        unsafe {
            // As `numerics::f16_to_f32`.
            let rebias = _mm_set1_epi32(HALF_REBIAS.cast_signed());
            let magnitude = self.and(0x7fff);
            let normal = _mm_add_epi32(magnitude.shift_left(13), rebias);
            let is_special = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff));
            let normal = _mm_add_epi32(normal, _mm_and_si128(is_special, rebias));
            let subnormal = magnitude.to_floats().multiply(Lanes::splat(HALF_SUBNORMAL));
            let is_normal = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x3ff));
            let value = _mm_blendv_ps(subnormal, normal.as_floats(), is_normal.as_floats());
            _mm_or_ps(value, self.and(0x8000).shift_left(16).as_floats())
        }
    }
}

/// Four rows of four words become four columns.
///
/// # Safety
/// SSE2.
#[inline(always)]
unsafe fn transpose_4(rows: [__m128i; 4]) -> [__m128i; 4] {
    let [a, b, c, d] = rows;
    // SAFETY: register operations only.
    unsafe {
        let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
        [
            _mm_unpacklo_epi64(ab, cd),
            _mm_unpackhi_epi64(ab, cd),
            _mm_unpacklo_epi64(ab_high, cd_high),
            _mm_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}
