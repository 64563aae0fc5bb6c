//! Unpacking the formats with codebooks: row by row, as each row looks up other entries, then turned into a packed tile.

use super::super::formats::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, MAX_BLOCK, MIN_GROUP};
use super::super::lanes::{Lanes, Rows, Words};
use super::super::product::TILE_ROWS;
use super::{PackedFormat, Unpacked};

macro_rules! row_by_row {
    ($($format:ident),*) => {
        $(
            impl PackedFormat for $format {
                const ONE_ROW: bool = false;

                /// They come with the values.
                #[inline(always)]
                unsafe fn scales<W: Words>(_: &Rows, _: &mut impl Unpacked<W>) {}

                #[inline(always)]
                unsafe fn values<W: Words>(rows: &Rows, _: usize, to: &mut impl Unpacked<W>) {
                    // SAFETY: passed on from the caller.
                    unsafe { unpack_row_by_row::<Self, W>(rows, to) }
                }
            }
        )*
    };
}

row_by_row!(Iq1S, Iq1M, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S);

/// # Safety
/// As [`PackedFormat::values`].
#[inline(always)]
unsafe fn unpack_row_by_row<F: PackedFormat, W: Words>(rows: &Rows, to: &mut impl Unpacked<W>) {
    const { assert!(F::PARTS == 1) };
    let mut values = [[0; MAX_BLOCK]; TILE_ROWS];
    let mut scales = [[0.0; TILE_ROWS]; MAX_BLOCK / MIN_GROUP];
    for (lane, values) in values.iter_mut().enumerate().take(W::COUNT) {
        // SAFETY: a block of each of as many rows is readable by the contract.
        let block = unsafe { std::slice::from_raw_parts(rows.at(lane, 0), F::BYTES) };
        let mut row_scales = [0.0; MAX_BLOCK / MIN_GROUP];
        F::unpack(block, values, &mut row_scales, &mut []);
        for (scales, scale) in scales.iter_mut().zip(row_scales) {
            scales[lane] = scale;
        }
    }
    let rows = Rows {
        first: values.as_ptr().cast(),
        stride: MAX_BLOCK,
    };
    // SAFETY: each row holds a whole block's values and scales; the places of the only part.
    unsafe {
        for eight in 0..F::BLOCK / 32 {
            for (quad, words) in W::load_32(&rows, 32 * eight).into_iter().enumerate() {
                to.values(8 * eight + quad, words);
            }
        }
        for (group, scales) in scales[..F::BLOCK / F::GROUP].iter().enumerate() {
            to.scale(group, W::Floats::load(scales.as_ptr()));
        }
    }
}
