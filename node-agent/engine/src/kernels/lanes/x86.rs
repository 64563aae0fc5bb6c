//! Sixteen floats in one AVX-512 register or two AVX2 registers. The functions here are inlined into
//! kernels that are compiled for these instruction sets and only run where the processor has them.

use std::arch::x86_64::*;

use half::f16;

use super::super::numerics::Halves;
use super::Lanes;

/// One 512-bit register.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512Lanes(__m512);

impl Lanes for Avx512Lanes {
    const TILE: usize = 8;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        // SAFETY: only used where the processor has AVX-512 (the trait's contract); so below.
        unsafe { Self(_mm512_set1_ps(number)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the contract.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        // SAFETY: readable by the contract.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the contract.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
    }
}

/// Two 256-bit registers.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2Lanes(__m256, __m256);

impl Lanes for Avx2Lanes {
    const TILE: usize = 4;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        // SAFETY: only used where the processor has AVX2, FMA and F16C (the trait's contract); so below.
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

/// Conversion by the F16C instructions, for code that only runs where the processor has them.
pub(in super::super) struct HardwareHalves;

impl Halves for HardwareHalves {
    #[inline(always)]
    fn to_f32(half: u16) -> f32 {
        // SAFETY: only used in the kernels of levels that include F16C.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(half)))) }
    }
}
