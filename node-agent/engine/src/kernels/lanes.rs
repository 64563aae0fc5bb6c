//! Sixteen floats, or sixteen 32-bit words, side by side, as each instruction set holds them. What works on them is
//! written once, and computed in the same order everywhere.
//!
//! The implementations for an instruction set may only be used in code that runs where the processor has it:
//! that is part of the safety contract of every function that is generic over these traits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::{Avx2Lanes, Avx2Words};
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{Avx512Lanes, Avx512Words};

use super::numerics::{LANES, f16_to_f32, multiply_add};

/// Sixteen floats.
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

    #[cfg(target_arch = "x86_64")]
    fn add(self, other: Self) -> Self;

    fn multiply(self, other: Self) -> Self;

    /// `self * factor + addend`; fused but for plain Rust on processors without such an instruction.
    fn multiply_add(self, factor: Self, addend: Self) -> Self;
}

/// A 32-bit word of each of sixteen rows of a matrix. Blocks unpack without a word ever leaving its row's lane.
#[cfg(target_arch = "x86_64")]
pub(super) trait Words: Copy {
    type Floats: Lanes;

    /// Asks for the cache line at `address`, which need not be valid, into the second-level cache (whose queue
    /// is the longer one).
    fn prefetch(address: *const u8);

    /// The 4 bytes at `offset` behind each of `rows`.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_4(rows: &[*const u8; LANES], offset: usize) -> Self;

    /// The 16 bytes at `offset` behind each of `rows`, a word at a time.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_16(rows: &[*const u8; LANES], offset: usize) -> [Self; 4];

    /// The 32 bytes at `offset` behind each of `rows`, a word at a time.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_32(rows: &[*const u8; LANES], offset: usize) -> [Self; 8];

    /// # Safety
    /// 64 bytes at `to` are writable.
    unsafe fn store(self, to: *mut u8);

    /// For each byte, which is below 16, the byte of the table in its place.
    fn look_up(self, table: &[u8; 16]) -> Self;

    fn and(self, mask: u32) -> Self;

    fn or(self, other: Self) -> Self;

    fn xor(self, mask: u32) -> Self;

    fn add(self, number: i32) -> Self;

    fn multiply(self, number: i32) -> Self;

    fn shift_left(self, bits: i32) -> Self;

    fn shift_right(self, bits: i32) -> Self;

    /// With copies of the sign bit.
    fn shift_right_signed(self, bits: i32) -> Self;

    /// The words as signed integers.
    fn to_floats(self) -> Self::Floats;

    /// The words as bits of floats.
    fn as_floats(self) -> Self::Floats;

    /// The lower halves of the words as half-precision numbers.
    fn halves_to_floats(self) -> Self::Floats;
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

    #[cfg(target_arch = "x86_64")]
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
