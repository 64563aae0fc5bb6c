//! Registers of 512 bits. The functions here are inlined into kernels that are compiled for AVX-512 and only run
//! where the processor has it.

use std::arch::x86_64::*;

use half::f16;

use super::{Lanes, Rows, Words};

impl Lanes for __m512 {
    const COUNT: usize = 16;
    const TILE: usize = 8;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        // SAFETY: only used where the processor has AVX-512 (the traits' contract); so everywhere below.
        unsafe { _mm512_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const i8) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the contract.
        unsafe { _mm512_storeu_ps(to, self) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_add_ps(self, other) }
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_mul_ps(self, other) }
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_fmadd_ps(self, factor, addend) }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as in `splat`.
        unsafe {
            let (low, high) = (
                _mm512_castps512_ps256(self),
                _mm512_extractf32x8_ps::<1>(self),
            );
            _mm256_add_ps(low, high).sum()
        }
    }
}

impl Words for __m512i {
    type Floats = __m512;
    const COUNT: usize = 16;

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }

    #[inline(always)]
    unsafe fn load_4(rows: &Rows, offset: usize) -> Self {
        let mut words = [0_i32; 16];
        for (lane, word) in words.iter_mut().enumerate() {
            // SAFETY: readable by the contract.
            *word = unsafe { rows.at(lane, offset).cast::<i32>().read_unaligned() };
        }
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = words;
        // SAFETY: as in `splat`.
        unsafe { _mm512_setr_epi32(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) }
    }

    #[inline(always)]
    unsafe fn load_16(rows: &Rows, offset: usize) -> [Self; 4] {
        // SAFETY: readable by the contract.
        unsafe {
            transpose_4([
                quarters(rows, 0, offset),
                quarters(rows, 1, offset),
                quarters(rows, 2, offset),
                quarters(rows, 3, offset),
            ])
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: writable by the contract.
        unsafe { _mm512_storeu_si512(to.cast(), self) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16]) -> Self {
        // SAFETY: the table has the 16 bytes that are read; else as in `splat`.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, self)
        }
    }

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_and_si512(self, _mm512_set1_epi32(mask.cast_signed())) }
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_or_si512(self, other) }
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_xor_si512(self, _mm512_set1_epi32(mask.cast_signed())) }
    }

    #[inline(always)]
    fn add(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_add_epi32(self, _mm512_set1_epi32(number)) }
    }

    #[inline(always)]
    fn multiply(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_mullo_epi32(self, _mm512_set1_epi32(number)) }
    }

    #[inline(always)]
    fn shift_left(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_sll_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn shift_right(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_srl_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn shift_right_signed(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_sra_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn to_floats(self) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_cvtepi32_ps(self) }
    }

    #[inline(always)]
    fn as_floats(self) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_castsi512_ps(self) }
    }

    #[inline(always)]
    fn halves_to_floats(self) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(self)) }
    }
}

/// 16 bytes of rows `row`, `row + 4`, `row + 8` and `row + 12`.
///
/// # Safety
/// AVX-512; they are readable.
#[inline(always)]
unsafe fn quarters(rows: &Rows, row: usize, offset: usize) -> __m512i {
    // SAFETY: readable by the contract.
    unsafe {
        let first = _mm_loadu_si128(rows.at(row, offset).cast());
        let second = _mm_loadu_si128(rows.at(row + 4, offset).cast());
        let third = _mm_loadu_si128(rows.at(row + 8, offset).cast());
        let fourth = _mm_loadu_si128(rows.at(row + 12, offset).cast());
        let all = _mm512_castsi128_si512(first);
        let all = _mm512_inserti32x4::<1>(all, second);
        let all = _mm512_inserti32x4::<2>(all, third);
        _mm512_inserti32x4::<3>(all, fourth)
    }
}

/// In each quarter, four rows of four words become four columns.
///
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn transpose_4(rows: [__m512i; 4]) -> [__m512i; 4] {
    let [a, b, c, d] = rows;
    // SAFETY: register operations only.
    unsafe {
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}
