//! Sixteen floats side by side, as each instruction set holds them. Kernels in floats are written once over
//! this, and computed in the same order everywhere.

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2Lanes, Avx512Lanes, HardwareHalves};

use super::numerics::{LANES, f16_to_f32, multiply_add};

/// Sixteen floats. Implementations for an instruction set may only be used in code that runs where the
/// processor has it: that is part of the safety contract of every function that is generic over this.
pub(super) trait Lanes: Copy {
    /// Rows or queries whose sums the registers hold at once.
    const TILE: usize;

    fn splat(number: f32) -> Self;

    /// # Safety
    /// 16 floats at `from` are readable.
    unsafe fn load(from: *const f32) -> Self;

    /// # Safety
    /// 16 half-precision numbers at `from` are readable.
    unsafe fn load_halves(from: *const half::f16) -> Self;

    /// # Safety
    /// 16 floats at `to` are writable.
    unsafe fn store(self, to: *mut f32);

    fn add(self, other: Self) -> Self;

    fn multiply(self, other: Self) -> Self;

    /// `self * factor + addend`; fused but for plain Rust on processors without such an instruction.
    fn multiply_add(self, factor: Self, addend: Self) -> Self;
}

impl Lanes for [f32; LANES] {
    const TILE: usize = 1;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        [number; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the contract; an array of floats is aligned like a float.
        unsafe { from.cast::<Self>().read() }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const half::f16) -> Self {
        // SAFETY: as in `load`.
        let halves = unsafe { from.cast::<[half::f16; LANES]>().read() };
        halves.map(|half| f16_to_f32(half.to_bits()))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the contract; an array of floats is aligned like a float.
        unsafe { to.cast::<Self>().write(self) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] + other[lane])
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] * other[lane])
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        std::array::from_fn(|lane| multiply_add(self[lane], factor[lane], addend[lane]))
    }
}
