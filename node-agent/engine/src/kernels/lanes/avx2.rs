//! Sixteen floats or words in two 256-bit registers. The functions here are inlined into kernels that are compiled for
//! AVX2, FMA and F16C and only run where the processor has them.

use std::arch::x86_64::*;

use half::f16;

use super::super::numerics::LANES;
use super::{Lanes, Words};

#[derive(Clone, Copy)]
pub(in super::super) struct Avx2Lanes(__m256, __m256);

impl Lanes for Avx2Lanes {
    const TILE: usize = 4;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        // SAFETY: only used where the processor has AVX2, FMA and F16C (the traits' contract); so everywhere
        // below.
        unsafe { Self(_mm256_set1_ps(number), _mm256_set1_ps(number)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the contract.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        // SAFETY: readable by the contract.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the contract.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            Self(
                _mm256_add_ps(self.0, other.0),
                _mm256_add_ps(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            Self(
                _mm256_mul_ps(self.0, other.0),
                _mm256_mul_ps(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            Self(
                _mm256_fmadd_ps(self.0, factor.0, addend.0),
                _mm256_fmadd_ps(self.1, factor.1, addend.1),
            )
        }
    }
}

/// Rows 0 to 7, and 8 to 15.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2Words(__m256i, __m256i);

impl Words for Avx2Words {
    type Floats = Avx2Lanes;

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }

    #[inline(always)]
    unsafe fn load_4(rows: &[*const u8; LANES], offset: usize) -> Self {
        let mut words = [0_i32; LANES];
        for lane in 0..LANES {
            // SAFETY: readable by the contract.
            words[lane] = unsafe { rows[lane].add(offset).cast::<i32>().read_unaligned() };
        }
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = words;
        // SAFETY: as in `splat`.
        unsafe {
            Self(
                _mm256_setr_epi32(a, b, c, d, e, f, g, h),
                _mm256_setr_epi32(i, j, k, l, m, n, o, p),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_16(rows: &[*const u8; LANES], offset: usize) -> [Self; 4] {
        // SAFETY: readable by the contract.
        unsafe {
            let [a, b, c, d] = transpose_4([
                halves(rows, 0, offset),
                halves(rows, 1, offset),
                halves(rows, 2, offset),
                halves(rows, 3, offset),
            ]);
            let [e, f, g, h] = transpose_4([
                halves(rows, 8, offset),
                halves(rows, 9, offset),
                halves(rows, 10, offset),
                halves(rows, 11, offset),
            ]);
            [Self(a, e), Self(b, f), Self(c, g), Self(d, h)]
        }
    }

    #[inline(always)]
    unsafe fn load_32(rows: &[*const u8; LANES], offset: usize) -> [Self; 8] {
        // SAFETY: readable by the contract.
        unsafe {
            let [a, b, c, d] = Self::load_16(rows, offset);
            let [e, f, g, h] = Self::load_16(rows, offset + 16);
            [a, b, c, d, e, f, g, h]
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: writable by the contract.
        unsafe {
            _mm256_storeu_si256(to.cast(), self.0);
            _mm256_storeu_si256(to.add(32).cast(), self.1);
        }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16]) -> Self {
        // SAFETY: the table has the 16 bytes that are read; else as in `splat`.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            Self(
                _mm256_shuffle_epi8(table, self.0),
                _mm256_shuffle_epi8(table, self.1),
            )
        }
    }

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            let other = _mm256_set1_epi32(mask.cast_signed());
            Self(
                _mm256_and_si256(self.0, other),
                _mm256_and_si256(self.1, other),
            )
        }
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            Self(
                _mm256_or_si256(self.0, other.0),
                _mm256_or_si256(self.1, other.1),
            )
        }
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            let other = _mm256_set1_epi32(mask.cast_signed());
            Self(
                _mm256_xor_si256(self.0, other),
                _mm256_xor_si256(self.1, other),
            )
        }
    }

    #[inline(always)]
    fn add(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            let other = _mm256_set1_epi32(number);
            Self(
                _mm256_add_epi32(self.0, other),
                _mm256_add_epi32(self.1, other),
            )
        }
    }

    #[inline(always)]
    fn multiply(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            let other = _mm256_set1_epi32(number);
            Self(
                _mm256_mullo_epi32(self.0, other),
                _mm256_mullo_epi32(self.1, other),
            )
        }
    }

    #[inline(always)]
    fn shift_left(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            let other = _mm_cvtsi32_si128(bits);
            Self(
                _mm256_sll_epi32(self.0, other),
                _mm256_sll_epi32(self.1, other),
            )
        }
    }

    #[inline(always)]
    fn shift_right(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            let other = _mm_cvtsi32_si128(bits);
            Self(
                _mm256_srl_epi32(self.0, other),
                _mm256_srl_epi32(self.1, other),
            )
        }
    }

    #[inline(always)]
    fn shift_right_signed(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            let other = _mm_cvtsi32_si128(bits);
            Self(
                _mm256_sra_epi32(self.0, other),
                _mm256_sra_epi32(self.1, other),
            )
        }
    }

    #[inline(always)]
    fn to_floats(self) -> Avx2Lanes {
        // SAFETY: as in `splat`.
        unsafe { Avx2Lanes(_mm256_cvtepi32_ps(self.0), _mm256_cvtepi32_ps(self.1)) }
    }

    #[inline(always)]
    fn as_floats(self) -> Avx2Lanes {
        // SAFETY: as in `splat`.
        unsafe { Avx2Lanes(_mm256_castsi256_ps(self.0), _mm256_castsi256_ps(self.1)) }
    }

    #[inline(always)]
    fn halves_to_floats(self) -> Avx2Lanes {
        let low = self.and(0xffff);
        // SAFETY: as in `splat`.
        unsafe {
            // Per half, four of rows 0 to 7 and four of rows 8 to 15; then in order.
            let packed = _mm256_packus_epi32(low.0, low.1);
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            Avx2Lanes(
                _mm256_cvtph_ps(_mm256_castsi256_si128(packed)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(packed)),
            )
        }
    }
}

/// 16 bytes of rows `row` and `row + 4`.
///
/// # Safety
/// AVX2; they are readable.
#[inline(always)]
unsafe fn halves(rows: &[*const u8; LANES], row: usize, offset: usize) -> __m256i {
    // SAFETY: readable by the contract.
    unsafe {
        let low = _mm_loadu_si128(rows[row].add(offset).cast());
        let high = _mm_loadu_si128(rows[row + 4].add(offset).cast());
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
