//! Unpacking the 4-bit formats with unevenly spaced values for several rows at once.

use super::super::formats::{IQ4_VALUES, Iq4Nl, Iq4Xs, MXFP4_VALUES, Mxfp4};
use super::super::lanes::{Lanes, Rows, Words};
use super::{PackedFormat, Unpacked};

const NIBBLES: u32 = 0x0f0f_0f0f;

impl PackedFormat for Iq4Nl {
    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 18 bytes; a block's places.
        unsafe { to.scale(0, W::load_4(rows, 0).halves_to_floats()) }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, _: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 18 bytes; a block's places.
        unsafe { look_up(W::load_16(rows, 2), &IQ4_VALUES, 0, to) }
    }
}

impl PackedFormat for Iq4Xs {
    const PARTS: usize = 4;

    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 136 bytes; a block's places.
        unsafe {
            let both = W::load_4(rows, 0);
            let d = both.halves_to_floats();
            let lower = W::load_4(rows, 4);
            unroll!(group in 0 1 2 3 4 5 6 7 {
                let upper = both.shift_right(16 + 2 * group as i32).and(3).shift_left(4);
                let scale = lower.shift_right(4 * group as i32).and(15).or(upper);
                to.scale(group, scale.add(-32).to_floats().multiply(d));
            });
        }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, part: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 136 bytes; a part's places.
        unsafe {
            let [a, b, c, d, e, f, g, h] = W::load_32(rows, 8 + 32 * part);
            look_up([a, b, c, d], &IQ4_VALUES, 0, to);
            look_up([e, f, g, h], &IQ4_VALUES, 1, to);
        }
    }
}

impl PackedFormat for Mxfp4 {
    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 17 bytes; a block's places.
        unsafe {
            let exponent = W::load_4(rows, 0).and(0xff);
            let root = exponent.shift_right(1).add(63).shift_left(23).as_floats();
            let odd = exponent.and(1).to_floats().add(Lanes::splat(1.0));
            to.scale(0, root.multiply(root).multiply(odd));
        }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, _: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 17 bytes; a block's places.
        unsafe { look_up(W::load_16(rows, 1), &MXFP4_VALUES, 0, to) }
    }
}

/// Group `group` of a part, of 32: the first 16 from the low halves of the bytes, the others from the high ones.
///
/// # Safety
/// `to` is the part's places, and the group one of its.
#[inline(always)]
unsafe fn look_up<W: Words>(
    words: [W; 4],
    table: &[u8; 16],
    group: usize,
    to: &mut impl Unpacked<W>,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        unroll!(quad in 0 1 2 3 {
            let (low, high) = (words[quad], words[quad].shift_right(4));
            to.values(8 * group + quad, low.and(NIBBLES).look_up(table));
            to.values(8 * group + quad + 4, high.and(NIBBLES).look_up(table));
        });
    }
}
