//! Sums of 8-bit products on processors that sum two products to 16 bits at once (SSSE3 and AVX2). As many of these as
//! cannot overflow are added up, and then widened to 32 bits. For registers of either size.

use std::arch::x86_64::*;

use super::formats::{Quants, are_signed_bytes};
use super::packed_tile::{Sums, products_without_overflow, read_quad};
use super::product::TILE_ROWS;

/// A register of integers; the name of an operation says which lanes it works on.
pub(super) trait ByteRegister: Copy {
    /// # Safety
    /// A register's bytes at `from`, aligned, are readable.
    unsafe fn load(from: *const u8) -> Self;
    fn splat_8(byte: i8) -> Self;
    fn splat_16(number: i16) -> Self;
    fn splat_32(number: i32) -> Self;
    fn xor(self, other: Self) -> Self;
    fn add_16(self, other: Self) -> Self;
    fn add_32(self, other: Self) -> Self;
    fn magnitudes_8(self) -> Self;
    /// Each byte, negated where the byte of `other` is negative; 0 where that byte is 0.
    fn signed_8(self, other: Self) -> Self;
    /// Sums of pairs of products of unsigned bytes with the signed ones of `other`, in 16 bits.
    fn multiply_pairs_8(self, other: Self) -> Self;
    /// Sums of pairs of products of 16-bit numbers, in 32 bits.
    fn multiply_pairs_16(self, other: Self) -> Self;
}

macro_rules! byte_register {
    ($register:ty, $load:ident $splat_8:ident $splat_16:ident $splat_32:ident $xor:ident $add_16:ident $add_32:ident $abs:ident $sign:ident $maddubs:ident $madd:ident) => {
        impl ByteRegister for $register {
            #[inline(always)]
            unsafe fn load(from: *const u8) -> Self {
                // SAFETY: readable and aligned by the contract.
                unsafe { $load(from.cast()) }
            }

            #[inline(always)]
            fn splat_8(byte: i8) -> Self {
                // SAFETY: only used in kernels of a level that has the instructions; so everywhere below.
                unsafe { $splat_8(byte) }
            }

            #[inline(always)]
            fn splat_16(number: i16) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $splat_16(number) }
            }

            #[inline(always)]
            fn splat_32(number: i32) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $splat_32(number) }
            }

            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $xor(self, other) }
            }

            #[inline(always)]
            fn add_16(self, other: Self) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $add_16(self, other) }
            }

            #[inline(always)]
            fn add_32(self, other: Self) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $add_32(self, other) }
            }

            #[inline(always)]
            fn magnitudes_8(self) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $abs(self) }
            }

            #[inline(always)]
            fn signed_8(self, other: Self) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $sign(self, other) }
            }

            #[inline(always)]
            fn multiply_pairs_8(self, other: Self) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $maddubs(self, other) }
            }

            #[inline(always)]
            fn multiply_pairs_16(self, other: Self) -> Self {
                // SAFETY: as in `splat_8`.
                unsafe { $madd(self, other) }
            }
        }
    };
}

byte_register!(__m128i, _mm_load_si128 _mm_set1_epi8 _mm_set1_epi16 _mm_set1_epi32 _mm_xor_si128 _mm_add_epi16 _mm_add_epi32
    _mm_abs_epi8 _mm_sign_epi8 _mm_maddubs_epi16 _mm_madd_epi16);
byte_register!(__m256i, _mm256_load_si256 _mm256_set1_epi8 _mm256_set1_epi16 _mm256_set1_epi32 _mm256_xor_si256 _mm256_add_epi16
    _mm256_add_epi32 _mm256_abs_epi8 _mm256_sign_epi8 _mm256_maddubs_epi16 _mm256_madd_epi16);

/// [`Integers::sums`](super::packed_tile::Integers::sums), in 32-bit lanes; minus the offset where values are signed bytes.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn sums<B: ByteRegister, Q: Quants, const ROWS: usize>(
    weights: *const u8,
    x_quads: *const i8,
    x_stride: usize,
    start: [i32; ROWS],
) -> [B; ROWS] {
    // SAFETY: readable by the contract.
    unsafe {
        let mut sums = [B::splat_32(0); ROWS];
        for (sum, start) in sums.iter_mut().zip(start) {
            *sum = B::splat_32(start);
        }
        let mut quad = 0;
        while quad < Q::GROUP / 4 {
            let end = (quad + pairs_without_overflow::<Q>()).min(Q::GROUP / 4);
            let mut pairs = [B::splat_16(0); ROWS];
            for quad in quad..end {
                let mut four = B::load(weights.add(quad * 4 * TILE_ROWS));
                if are_signed_bytes::<Q>() {
                    four = four.xor(B::splat_8(i8::MIN));
                }
                for (row, pairs) in pairs.iter_mut().enumerate() {
                    let x_four = read_quad(x_quads.add(row * x_stride + 4 * quad));
                    *pairs = pairs.add_16(products::<B, Q>(four, x_four));
                }
            }
            for (sum, pairs) in sums.iter_mut().zip(pairs) {
                *sum = widened(*sum, pairs);
            }
            quad = end;
        }
        sums
    }
}

/// How many sums of two products fit in 16 bits.
const fn pairs_without_overflow<Q: Quants>() -> usize {
    products_without_overflow::<Q>() / 2
}

/// Sums of two products each, in 16 bits. Signed bytes give their signs to the activations, so that no pair overflows
/// (2 * 128 * 127 is below 2^15).
#[inline(always)]
fn products<B: ByteRegister, Q: Quants>(four: B, x_four: i32) -> B {
    let x_four = B::splat_32(x_four);
    match are_signed_bytes::<Q>() {
        true => (four.magnitudes_8()).multiply_pairs_8(x_four.signed_8(four)),
        false => four.multiply_pairs_8(x_four),
    }
}

/// `sum` plus the sums of neighbouring `pairs`.
#[inline(always)]
fn widened<B: ByteRegister>(sum: B, pairs: B) -> B {
    sum.add_32(pairs.multiply_pairs_16(B::splat_16(1)))
}

/// The sums of products of a register of weight rows with one row of activations.
#[derive(Clone, Copy)]
pub(super) struct PairSums<B> {
    whole: B,
    /// Sums in 16 bits.
    pairs: B,
    /// How many products `pairs` holds.
    held: usize,
}

impl<B: ByteRegister> Sums<B> for PairSums<B> {
    #[inline(always)]
    fn new() -> Self {
        PairSums {
            whole: B::splat_32(0),
            pairs: B::splat_16(0),
            held: 0,
        }
    }

    #[inline(always)]
    fn add_quad<Q: Quants>(&mut self, four: B, x_four: i32) {
        self.pairs = self.pairs.add_16(products::<B, Q>(four, x_four));
        self.held += 1;
        if self.held == pairs_without_overflow::<Q>() {
            self.widen();
        }
    }

    #[inline(always)]
    fn whole(mut self) -> B {
        if self.held > 0 {
            self.widen();
        }
        self.whole
    }
}

impl<B: ByteRegister> PairSums<B> {
    #[inline(always)]
    fn widen(&mut self) {
        self.whole = widened(self.whole, self.pairs);
        self.pairs = B::splat_16(0);
        self.held = 0;
    }
}
