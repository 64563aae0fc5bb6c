//! Unpacking the K-quants for several rows at once.

use std::sync::atomic::{Ordering, compiler_fence};

use super::super::formats::{Q2K, Q3K, Q4K, Q5K, Q6K};
use super::super::lanes::{Lanes, Rows, Words};
use super::{PackedFormat, Unpacked};

const NIBBLES: u32 = 0x0f0f_0f0f;
const TWO_BITS: u32 = 0x0303_0303;
const ONE_BIT: u32 = 0x0101_0101;

impl PackedFormat for Q2K {
    const PARTS: usize = 2;

    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 84 bytes; a block's places.
        unsafe {
            let both = W::load_4(rows, 80);
            let d = both.halves_to_floats();
            let minus_dmin = both.shift_right(16).xor(0x8000).halves_to_floats();
            for (word, packed) in W::load_16(rows, 0).into_iter().enumerate() {
                let (scales, minimums) = (packed.and(NIBBLES), packed.shift_right(4).and(NIBBLES));
                for byte in 0..4 {
                    to.scale(4 * word + byte, byte_of(scales, byte).multiply(d));
                    to.minimum(
                        4 * word + byte,
                        byte_of(minimums, byte).multiply(minus_dmin),
                    );
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, part: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 84 bytes; a part's places.
        unsafe {
            let words = W::load_32(rows, 16 + 32 * part);
            unroll!(row in 0 1 2 3 {
                unroll!(quad in 0 1 2 3 4 5 6 7 {
                    let low = words[quad].shift_right(2 * row as i32).and(TWO_BITS);
                    to.values(8 * row + quad, low);
                });
            });
        }
    }
}

impl PackedFormat for Q3K {
    const PARTS: usize = 2;

    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 110 bytes; a block's places.
        unsafe {
            let d = W::load_4(rows, 106).shift_right(16).halves_to_floats();
            let low = [W::load_4(rows, 96), W::load_4(rows, 100)];
            let high = W::load_4(rows, 104);
            for word in 0..4 {
                let low = low[word % 2]
                    .shift_right(4 * (word as i32 / 2))
                    .and(NIBBLES);
                let high = high
                    .shift_right(2 * word as i32)
                    .and(TWO_BITS)
                    .shift_left(4);
                let scales = low.or(high);
                for byte in 0..4 {
                    let scale = scales.shift_right(8 * byte).and(0xff).add(-32);
                    to.scale(4 * word + byte as usize, scale.to_floats().multiply(d));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, part: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 110 bytes; a part's places.
        unsafe {
            let third = of_part(W::load_32(rows, 0), 4 * part);
            let words = W::load_32(rows, 32 + 32 * part);
            unroll!(row in 0 1 2 3 {
                unroll!(quad in 0 1 2 3 4 5 6 7 {
                    let low = words[quad].shift_right(2 * row as i32).and(TWO_BITS);
                    to.values(8 * row + quad, low.or(bit(third[quad], row, 2)));
                });
            });
        }
    }
}

impl PackedFormat for Q4K {
    const PARTS: usize = 4;

    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 144 bytes; a block's places.
        unsafe { six_bit_scales::<W>(rows, to) }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, part: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 144 bytes; a part's places.
        unsafe {
            let words = W::load_32(rows, 16 + 32 * part);
            unroll!(quad in 0 1 2 3 4 5 6 7 {
                let (low, high) = (words[quad], words[quad].shift_right(4));
                to.values(quad, low.and(NIBBLES));
                to.values(8 + quad, high.and(NIBBLES));
            });
        }
    }
}

impl PackedFormat for Q5K {
    const PARTS: usize = 4;

    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 176 bytes; a block's places.
        unsafe { six_bit_scales::<W>(rows, to) }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, part: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 176 bytes; a part's places.
        unsafe {
            let fifth = of_part(W::load_32(rows, 16), 2 * part);
            let words = W::load_32(rows, 48 + 32 * part);
            unroll!(quad in 0 1 2 3 4 5 6 7 {
                let (low, high) = (words[quad].and(NIBBLES), words[quad].shift_right(4).and(NIBBLES));
                to.values(quad, low.or(bit(fifth[quad], 0, 4)));
                to.values(8 + quad, high.or(bit(fifth[quad], 1, 4)));
            });
        }
    }
}

impl PackedFormat for Q6K {
    const PARTS: usize = 2;

    #[inline(always)]
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 210 bytes; a block's places.
        unsafe {
            let d = W::load_4(rows, 206).shift_right(16).halves_to_floats();
            for (word, scales) in W::load_16(rows, 192).into_iter().enumerate() {
                for byte in 0..4 {
                    let scale = scales.shift_left(24 - 8 * byte).shift_right_signed(24);
                    to.scale(4 * word + byte as usize, scale.to_floats().multiply(d));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn values<W: Words>(rows: &Rows, part: usize, to: &mut impl Unpacked<W>) {
        // SAFETY: the block's 210 bytes; a part's places.
        unsafe {
            // By halves: more does not fit in 16 registers.
            unroll!(half in 0 1 {
                // Else the compiler prefetches all lines of a part at its end: 27 where 16 rows are taken at a time, more than some cores can wait for.
                compiler_fence(Ordering::SeqCst);
                let high = W::load_16(rows, 128 + 32 * part + 16 * half);
                unroll!(row in 0 1 {
                    let low = W::load_16(rows, 64 * part + 32 * row + 16 * half);
                    unroll!(quad in 0 1 2 3 {
                        let (low, high) = (low[quad], high[quad].shift_right(2 * row as i32));
                        let first = high.and(TWO_BITS).shift_left(4);
                        let third = high.and(TWO_BITS << 4);
                        let at = 8 * row + 4 * half + quad;
                        to.values(at, low.and(NIBBLES).or(first));
                        to.values(at + 16, low.shift_right(4).and(NIBBLES).or(third));
                    });
                });
            });
        }
    }
}

/// Bits whose places in their bytes depend on the part, moved to where those of the first are.
#[inline(always)]
fn of_part<W: Words>(mut words: [W; 8], by: usize) -> [W; 8] {
    for word in &mut words {
        *word = word.shift_right(by as i32);
    }
    words
}

/// Byte `byte` of each word.
#[inline(always)]
fn byte_of<W: Words>(words: W, byte: usize) -> W::Floats {
    words.shift_right(8 * byte as i32).and(0xff).to_floats()
}

/// Bit `row` of each byte, moved to bit `place`.
#[inline(always)]
fn bit<W: Words>(words: W, row: usize, place: i32) -> W {
    words.shift_right(row as i32).and(ONE_BIT).shift_left(place)
}

/// The scales and minimums of Q4_K and Q5_K (see `formats`).
///
/// # Safety
/// 16 bytes of each row are readable; `to` is a block's places.
#[inline(always)]
unsafe fn six_bit_scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
    // SAFETY: passed on from the caller.
    unsafe {
        let [both, first, second, third] = W::load_16(rows, 0);
        let d = both.halves_to_floats();
        let minus_dmin = both.shift_right(16).xor(0x8000).halves_to_floats();
        let (sixes, top_bits) = (0x3f3f_3f3f, 0x3030_3030);
        let scales = [
            first.and(sixes),
            third.and(NIBBLES).or(first.shift_right(2).and(top_bits)),
        ];
        let minimums = [
            second.and(sixes),
            third
                .shift_right(4)
                .and(NIBBLES)
                .or(second.shift_right(2).and(top_bits)),
        ];
        for word in 0..2 {
            for byte in 0..4 {
                to.scale(4 * word + byte, byte_of(scales[word], byte).multiply(d));
                to.minimum(
                    4 * word + byte,
                    byte_of(minimums[word], byte).multiply(minus_dmin),
                );
            }
        }
    }
}
