//! The matrix kernels for arm64: NEON, which sums products of bytes in 16 bits; its dot products, which sum four in 32 bits; and
//! its matrix products (i8mm), which multiply two rows of weights with two of activations, eight columns at a time.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use super::formats::{Quants, are_signed_bytes};
use super::lanes::Lanes;
use super::packed_tile::{
    Integers, Sums, compiled_for, multiply_by_format, products_without_overflow, read_quad,
};
use super::product::{Product, TILE_ROWS};

/// Computes the columns `rows` of the product's output.
///
/// # Safety
/// No other thread writes these columns meanwhile.
#[target_feature(enable = "neon")]
pub(super) unsafe fn multiply(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller; this function is compiled for, and only called with, these
    // instructions.
    unsafe { multiply_by_format::<Neon>(product, rows) }
}

/// As [`multiply`].
///
/// # Safety
/// No other thread writes these columns meanwhile.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn multiply_dotprod(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller; this function is compiled for, and only called with, these
    // instructions.
    unsafe { multiply_by_format::<NeonDotprod>(product, rows) }
}

/// As [`multiply`].
///
/// # Safety
/// No other thread writes these columns meanwhile.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(super) unsafe fn multiply_i8mm(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller; this function is compiled for, and only called with, these
    // instructions.
    unsafe { multiply_by_format::<NeonI8mm>(product, rows) }
}

struct Neon;

struct NeonDotprod;

struct NeonI8mm;

/// Four consecutive columns of four weight rows, as signed bytes: minus the offset where that makes them signed.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn signed_quad<Q: Quants>(weights: *const u8, quad: usize) -> int8x16_t {
    // SAFETY: by the contract; every processor of this architecture has NEON.
    unsafe {
        let four = vld1q_u8(weights.add(quad * 4 * TILE_ROWS));
        vreinterpretq_s8_u8(match are_signed_bytes::<Q>() {
            true => veorq_u8(four, vdupq_n_u8(0x80)),
            false => four,
        })
    }
}

#[inline(always)]
fn to_floats<const ROWS: usize>(sums: [int32x4_t; ROWS]) -> [float32x4_t; ROWS] {
    let mut floats = [<float32x4_t as Lanes>::splat(0.0); ROWS];
    for (float, sum) in floats.iter_mut().zip(sums) {
        // SAFETY: as in `signed_quad`.
        *float = unsafe { vcvtq_f32_s32(sum) };
    }
    floats
}

#[inline(always)]
fn splat<const ROWS: usize>(start: [i32; ROWS]) -> [int32x4_t; ROWS] {
    // SAFETY: as in `signed_quad`; so below.
    let mut sums = [unsafe { vdupq_n_s32(0) }; ROWS];
    for (sum, start) in sums.iter_mut().zip(start) {
        // SAFETY: as above.
        *sum = unsafe { vdupq_n_s32(start) };
    }
    sums
}

/// Adds the products of four columns to those of rows 0 and 1, and of rows 2 and 3.
#[inline(always)]
fn add_products(products: &mut [int16x8_t; 2], four: int8x16_t, x_four: i32) {
    // SAFETY: as in `signed_quad`.
    unsafe {
        let x_four = vreinterpret_s8_s32(vdup_n_s32(x_four));
        products[0] = vmlal_s8(products[0], vget_low_s8(four), x_four);
        products[1] = vmlal_s8(products[1], vget_high_s8(four), x_four);
    }
}

/// Adds each two of `products` to `sums`.
#[inline(always)]
fn widen(sums: &mut [int32x4_t; 2], products: [int16x8_t; 2]) {
    for (sum, products) in sums.iter_mut().zip(products) {
        // SAFETY: as in `signed_quad`.
        *sum = unsafe { vpadalq_s16(*sum, products) };
    }
}

/// The sums of products of 16 weight rows, in four registers, with one row of activations. Columns 0 and 1 of every four are kept
/// apart from columns 2 and 3, and rows 0 and 1 from rows 2 and 3.
#[derive(Clone, Copy)]
struct NeonSums {
    whole: [[int32x4_t; 2]; 4],
    products: [[int16x8_t; 2]; 4],
    /// How many products each of `products` holds.
    held: usize,
}

impl Sums<[uint32x4_t; 4]> for NeonSums {
    #[inline(always)]
    fn new() -> Self {
        // SAFETY: as in `signed_quad`.
        unsafe {
            NeonSums {
                whole: [[vdupq_n_s32(0); 2]; 4],
                products: [[vdupq_n_s16(0); 2]; 4],
                held: 0,
            }
        }
    }

    #[inline(always)]
    fn add_quad<Q: Quants>(&mut self, four: [uint32x4_t; 4], x_four: i32) {
        for (products, four) in self.products.iter_mut().zip(four) {
            // SAFETY: as in `signed_quad`.
            add_products(products, unsafe { vreinterpretq_s8_u32(four) }, x_four);
        }
        self.held += 1;
        if self.held == products_without_overflow::<Q>() {
            self.widen();
        }
    }

    #[inline(always)]
    fn whole(mut self) -> [uint32x4_t; 4] {
        if self.held > 0 {
            self.widen();
        }
        // SAFETY: as in `signed_quad`; so below.
        let mut sums = [unsafe { vdupq_n_u32(0) }; 4];
        for (sum, [first, second]) in sums.iter_mut().zip(self.whole) {
            // SAFETY: as above.
            *sum = unsafe { vreinterpretq_u32_s32(vpaddq_s32(first, second)) };
        }
        sums
    }
}

impl NeonSums {
    #[inline(always)]
    fn widen(&mut self) {
        for (whole, products) in self.whole.iter_mut().zip(&mut self.products) {
            widen(whole, *products);
            // SAFETY: as in `signed_quad`.
            *products = [unsafe { vdupq_n_s16(0) }; 2];
        }
        self.held = 0;
    }
}

impl Integers for Neon {
    type Base = Self;
    type Words = [uint32x4_t; 4];
    type Floats = float32x4_t;
    const TILE: usize = 4;
    const SIGNED: bool = true;

    compiled_for!("neon");

    #[inline(always)]
    unsafe fn sums<Q: Quants, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
        start: [i32; ROWS],
    ) -> [Self::Floats; ROWS] {
        // SAFETY: readable by the contract.
        unsafe {
            // For each row, sums of columns 0 and 1, and of 2 and 3, of every four; rows 0 and 1, then rows 2 and 3.
            let mut sums = [[vdupq_n_s32(0); 2]; ROWS];
            let mut quad = 0;
            while quad < Q::GROUP / 4 {
                let end = (quad + products_without_overflow::<Q>()).min(Q::GROUP / 4);
                let mut products = [[vdupq_n_s16(0); 2]; ROWS];
                for quad in quad..end {
                    let four = signed_quad::<Q>(weights, quad);
                    for (row, products) in products.iter_mut().enumerate() {
                        let x_four = read_quad(x_quads.add(row * x_stride + 4 * quad));
                        add_products(products, four, x_four);
                    }
                }
                for (sums, products) in sums.iter_mut().zip(products) {
                    widen(sums, products);
                }
                quad = end;
            }
            let mut whole = splat(start);
            for (whole, [first, second]) in whole.iter_mut().zip(sums) {
                *whole = vaddq_s32(*whole, vpaddq_s32(first, second));
            }
            to_floats(whole)
        }
    }

    type OneRow = Self::Words;
    type Sums = NeonSums;
}

impl Integers for NeonDotprod {
    type Base = Neon;
    type Words = [uint32x4_t; 4];
    type Floats = float32x4_t;
    const TILE: usize = 8;
    const SIGNED: bool = true;

    compiled_for!("neon,dotprod");

    #[inline(always)]
    unsafe fn sums<Q: Quants, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
        start: [i32; ROWS],
    ) -> [Self::Floats; ROWS] {
        // SAFETY: readable by the contract.
        unsafe {
            let mut sums = splat(start);
            for sixteen in 0..Q::GROUP / 16 {
                let a = signed_quad::<Q>(weights, 4 * sixteen);
                let b = signed_quad::<Q>(weights, 4 * sixteen + 1);
                let c = signed_quad::<Q>(weights, 4 * sixteen + 2);
                let d = signed_quad::<Q>(weights, 4 * sixteen + 3);
                for (row, sum) in sums.iter_mut().enumerate() {
                    let x = vld1q_s8(x_quads.add(row * x_stride + 16 * sixteen));
                    *sum = sdot(*sum, [a, b, c, d], x);
                }
            }
            to_floats(sums)
        }
    }

    type OneRow = Self::Words;
    type Sums = SdotSums;
}

impl Integers for NeonI8mm {
    type Base = Neon;
    type Words = [uint32x4_t; 4];
    type Floats = float32x4_t;
    const TILE: usize = 8;
    const SIGNED: bool = false;

    compiled_for!("neon,dotprod,i8mm");

    #[inline(always)]
    unsafe fn sums<Q: Quants, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
        start: [i32; ROWS],
    ) -> [Self::Floats; ROWS] {
        // SAFETY: readable by the contract.
        unsafe {
            let quad = |quad: usize| weights.add(quad * 4 * TILE_ROWS);
            let mut sums = splat(start);
            if ROWS == 1 {
                for sixteen in 0..Q::GROUP / 16 {
                    let a = vld1q_u8(quad(4 * sixteen));
                    let b = vld1q_u8(quad(4 * sixteen + 1));
                    let c = vld1q_u8(quad(4 * sixteen + 2));
                    let d = vld1q_u8(quad(4 * sixteen + 3));
                    let x = vld1q_s8(x_quads.add(16 * sixteen));
                    sums[0] = usdot(sums[0], [a, b, c, d], x);
                }
                return to_floats(sums);
            }
            // For each pair of rows of activations: weight rows 0 and 1, weight rows 2 and 3.
            let mut squares = [[vdupq_n_s32(0); 2]; ROWS];
            for sixteen in 0..Q::GROUP / 16 {
                let a = vreinterpretq_u32_u8(vld1q_u8(quad(4 * sixteen)));
                let b = vreinterpretq_u32_u8(vld1q_u8(quad(4 * sixteen + 1)));
                let c = vreinterpretq_u32_u8(vld1q_u8(quad(4 * sixteen + 2)));
                let d = vreinterpretq_u32_u8(vld1q_u8(quad(4 * sixteen + 3)));
                let first = [vzip1q_u32(a, b), vzip2q_u32(a, b)];
                let second = [vzip1q_u32(c, d), vzip2q_u32(c, d)];
                for pair in 0..ROWS / 2 {
                    let x = x_quads.add(2 * pair * x_stride + 16 * sixteen);
                    let one = vreinterpretq_s64_s8(vld1q_s8(x));
                    let other = vreinterpretq_s64_s8(vld1q_s8(x.add(x_stride)));
                    let (x_first, x_second) = (vzip1q_s64(one, other), vzip2q_s64(one, other));
                    for rows in 0..2 {
                        let square = usmmla(squares[pair][rows], first[rows], x_first);
                        squares[pair][rows] = usmmla(square, second[rows], x_second);
                    }
                }
            }
            for pair in 0..ROWS / 2 {
                let [upper, lower] = squares[pair];
                sums[2 * pair] = vaddq_s32(sums[2 * pair], vuzp1q_s32(upper, lower));
                sums[2 * pair + 1] = vaddq_s32(sums[2 * pair + 1], vuzp2q_s32(upper, lower));
            }
            to_floats(sums)
        }
    }

    type OneRow = Self::Words;
    type Sums = UsdotSums;
}

// Rust's own functions for the following instructions are not stable.

macro_rules! dot_products {
    ($name:ident, $weights:ty, $sums:ident) => {
        /// Adds the products of 16 columns of four weight rows, four columns at a time, with a row of activations.
        ///
        /// # Safety
        /// The processor has the instruction.
        #[inline(always)]
        pub(super) unsafe fn $name(sum: int32x4_t, weights: [$weights; 4], x: int8x16_t) -> int32x4_t {
            let [a, b, c, d] = weights;
            let mut sum = sum;
            // SAFETY: by the contract; registers only.
            unsafe {
                asm!(
                    concat!(stringify!($name), " {sum:v}.4s, {a:v}.16b, {x:v}.4b[0]"),
                    concat!(stringify!($name), " {sum:v}.4s, {b:v}.16b, {x:v}.4b[1]"),
                    concat!(stringify!($name), " {sum:v}.4s, {c:v}.16b, {x:v}.4b[2]"),
                    concat!(stringify!($name), " {sum:v}.4s, {d:v}.16b, {x:v}.4b[3]"),
                    sum = inout(vreg) sum,
                    a = in(vreg) a, b = in(vreg) b, c = in(vreg) c, d = in(vreg) d, x = in(vreg) x,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            sum
        }

        /// The sums of products of 16 weight rows, in four registers, with one row of activations.
        #[derive(Clone, Copy)]
        struct $sums([uint32x4_t; 4]);

        impl Sums<[uint32x4_t; 4]> for $sums {
            #[inline(always)]
            fn new() -> Self {
                // SAFETY: as in `signed_quad`.
                Self([unsafe { vdupq_n_u32(0) }; 4])
            }

            #[inline(always)]
            fn add_quad<Q: Quants>(&mut self, four: [uint32x4_t; 4], x_four: i32) {
                // SAFETY: only used in kernels of a level that has the instruction; registers only.
                unsafe {
                    let x_four = vdupq_n_s32(x_four);
                    for (sum, four) in self.0.iter_mut().zip(four) {
                        asm!(
                            concat!(stringify!($name), " {sum:v}.4s, {four:v}.16b, {x_four:v}.16b"),
                            sum = inout(vreg) *sum, four = in(vreg) four, x_four = in(vreg) x_four,
                            options(pure, nomem, nostack, preserves_flags),
                        );
                    }
                }
            }

            #[inline(always)]
            fn whole(self) -> [uint32x4_t; 4] {
                self.0
            }
        }
    };
}

dot_products!(sdot, int8x16_t, SdotSums);
dot_products!(usdot, uint8x16_t, UsdotSums);

/// Adds the products of eight columns of two weight rows with two rows of activations.
///
/// # Safety
/// The processor has i8mm.
#[inline(always)]
pub(super) unsafe fn usmmla(sums: int32x4_t, weights: uint32x4_t, x: int64x2_t) -> int32x4_t {
    let mut sums = sums;
    // SAFETY: by the contract; registers only.
    unsafe {
        asm!(
            "usmmla {sums:v}.4s, {weights:v}.16b, {x:v}.16b",
            sums = inout(vreg) sums, weights = in(vreg) weights, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}
