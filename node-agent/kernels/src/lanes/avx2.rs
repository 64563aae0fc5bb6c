//! Registers of 256 bits. The functions here are inlined into kernels that are compiled for AVX2, FMA and F16C and only
//! run where the processor has them.

use std::arch::x86_64::*;

use half::f16;

use super::{Lanes, Rows, Words};

impl Lanes for __m256 {
    const COUNT: usize = 8;
    const TILE: usize = 4;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        // SAFETY: only used where the processor has AVX2, FMA and F16C (the traits' contract); so everywhere below.
        unsafe { _mm256_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const i8) -> Self {
        // SAFETY: readable by the contract.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the contract.
        unsafe { _mm256_storeu_ps(to, self) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_add_ps(self, other) }
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_mul_ps(self, other) }
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_fmadd_ps(self, factor, addend) }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as in `splat`.
        unsafe {
            let (low, high) = (
                _mm256_castps256_ps128(self),
                _mm256_extractf128_ps::<1>(self),
            );
            _mm_add_ps(low, high).sum()
        }
    }
}

impl Words for __m256i {
    type Floats = __m256;
    const COUNT: usize = 8;

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }

    #[inline(always)]
    unsafe fn load_4(rows: &Rows, offset: usize) -> Self {
        let mut words = [0_i32; 8];
        for (lane, word) in words.iter_mut().enumerate() {
            // SAFETY: readable by the contract.
            *word = unsafe { rows.at(lane, offset).cast::<i32>().read_unaligned() };
        }
        let [a, b, c, d, e, f, g, h] = words;
        // SAFETY: as in `splat`.
        unsafe { _mm256_setr_epi32(a, b, c, d, e, f, g, h) }
    }

    #[inline(always)]
    unsafe fn load_16(rows: &Rows, offset: usize) -> [Self; 4] {
        // SAFETY: readable by the contract.
        unsafe {
            transpose_4([
                halves(rows, 0, offset),
                halves(rows, 1, offset),
                halves(rows, 2, offset),
                halves(rows, 3, offset),
            ])
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: writable by the contract.
        unsafe { _mm256_storeu_si256(to.cast(), self) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16]) -> Self {
        // SAFETY: the table has the 16 bytes that are read; else as in `splat`.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, self)
        }
    }

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_and_si256(self, _mm256_set1_epi32(mask.cast_signed())) }
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_or_si256(self, other) }
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_xor_si256(self, _mm256_set1_epi32(mask.cast_signed())) }
    }

    #[inline(always)]
    fn add(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_add_epi32(self, _mm256_set1_epi32(number)) }
    }

    #[inline(always)]
    fn multiply(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_mullo_epi32(self, _mm256_set1_epi32(number)) }
    }

    #[inline(always)]
    fn shift_left(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_sll_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn shift_right(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_srl_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn shift_right_signed(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_sra_epi32(self, _mm_cvtsi32_si128(bits)) }
    }

    #[inline(always)]
    fn to_floats(self) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_cvtepi32_ps(self) }
    }

    #[inline(always)]
    fn as_floats(self) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_castsi256_ps(self) }
    }

    #[inline(always)]
    fn halves_to_floats(self) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe {
            let low = self.and(0xffff);
            let packed = _mm256_packus_epi32(low, low);
            let packed = _mm256_permute4x64_epi64::<0b10_00>(packed);
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        }
    }
}

/// 16 bytes of rows `row` and `row + 4`.
///
/// # Safety
/// AVX2; they are readable.
#[inline(always)]
unsafe fn halves(rows: &Rows, row: usize, offset: usize) -> __m256i {
    // SAFETY: readable by the contract.
    unsafe {
        let low = _mm_loadu_si128(rows.at(row, offset).cast());
        let high = _mm_loadu_si128(rows.at(row + 4, offset).cast());
        _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
    }
}

/// In each half, four rows of four words become four columns.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn transpose_4(rows: [__m256i; 4]) -> [__m256i; 4] {
    let [a, b, c, d] = rows;
    // SAFETY: register operations only.
    unsafe {
        let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab, cd),
            _mm256_unpackhi_epi64(ab, cd),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}
