//! Unpacking the formats of 32-weight blocks for several rows at once.

use super::super::formats::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use super::super::lanes::{Rows, Words};
use super::{PackedFormat, Unpacked};

const NIBBLES: u32 = 0x0f0f_0f0f;

impl PackedFormat for Q4_0 {
    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 18 bytes; a block's places.
        unsafe { to.scale(0, W::load_4(rows, 0).halves_to_floats()) }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, _: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 18 bytes; a block's places.
        unsafe { nibbles(W::load_16(rows, 2), to) }
    }
}

impl PackedFormat for Q4_1 {
    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 20 bytes; a block's places.
        unsafe { scale_and_minimum::<W>(rows, to) }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, _: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 20 bytes; a block's places.
        unsafe { nibbles(W::load_16(rows, 4), to) }
    }
}

impl PackedFormat for Q5_0 {
    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 22 bytes; a block's places.
        unsafe { to.scale(0, W::load_4(rows, 0).halves_to_floats()) }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, _: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 22 bytes; a block's places.
        unsafe { five_bits(W::load_16(rows, 6), W::load_4(rows, 2), to) }
    }
}

impl PackedFormat for Q5_1 {
    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 24 bytes; a block's places.
        unsafe { scale_and_minimum::<W>(rows, to) }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, _: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 24 bytes; a block's places.
        unsafe { five_bits(W::load_16(rows, 8), W::load_4(rows, 4), to) }
    }
}

impl PackedFormat for Q8_0 {
    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 34 bytes; a block's places.
        unsafe { to.scale(0, W::load_4(rows, 0).halves_to_floats()) }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, _: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 34 bytes; a block's places.
        unsafe {
            let words = W::load_32(rows, 2);
            unroll!(quad in 0 1 2 3 4 5 6 7 {
                to.values(quad, words[quad].xor(0x8080_8080));
            });
        }
    }
}

/// # Safety
/// 4 bytes of each row are readable; a block's places.
#[inline(always)]
unsafe fn scale_and_minimum<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
    // SAFETY: passed on from the caller.
    unsafe {
        let both = W::load_4(rows, 0);
        to.scale(0, both.halves_to_floats());
        to.minimum(0, both.shift_right(16).halves_to_floats());
    }
}

/// # Safety
/// `to` is a block's places.
#[inline(always)]
unsafe fn nibbles<W: Words>(words: [W; 4], to: &mut impl Unpacked<W>) {
    // SAFETY: passed on from the caller.
    unsafe {
        unroll!(quad in 0 1 2 3 {
            to.values(quad, words[quad].and(NIBBLES));
            to.values(quad + 4, words[quad].shift_right(4).and(NIBBLES));
        });
    }
}

/// Bit `i` of `fifth` is the fifth of weight `i`.
///
/// # Safety
/// `to` is a block's places.
#[inline(always)]
unsafe fn five_bits<W: Words>(words: [W; 4], fifth: W, to: &mut impl Unpacked<W>) {
    // SAFETY: passed on from the caller.
    unsafe {
        unroll!(quad in 0 1 2 3 {
            let low = words[quad].and(NIBBLES);
            to.values(quad, low.or(spread(fifth, quad)));
            let high = words[quad].shift_right(4).and(NIBBLES);
            to.values(quad + 4, high.or(spread(fifth, quad + 4)));
        });
    }
}

/// Four bits, each moved to bit 4 of a byte of its own: the product holds them at bits 4, 12, 20 and 28.
#[inline(always)]
fn spread<W: Words>(bits: W, quad: usize) -> W {
    let four = bits.shift_right(4 * quad as i32).and(15);
    four.multiply(0x0204_0810).and(0x1010_1010)
}
