//! The product of a packed tile with a few rows of activations, as every vector level computes it: integer sums of a group's
//! products, then one multiplication by the scales and one addition to the totals.

use super::super::activations::QuantizedRows;
use super::super::formats::BlockFormat;
use super::super::lanes::Lanes;
use super::super::product::{Product, TILE_ROWS};
use super::{Integers, PackedTile, TilePlace};

/// The only body of [`Integers::tile`]; inlined there, so that it is compiled for the level's instructions.
///
/// # Safety
/// As there.
#[inline(always)]
pub(in super::super) unsafe fn tile<I: Integers, F: BlockFormat, const ROWS: usize>(
    packed: &PackedTile,
    place: &TilePlace,
    x: &QuantizedRows,
    first: usize,
    product: &Product<'_>,
) {
    let lanes = I::Floats::COUNT;
    for lane in (0..place.rows).step_by(lanes) {
        // SAFETY: passed on from the caller.
        unsafe {
            if lane + lanes <= place.rows {
                register::<I, F, ROWS, true>(packed, lane, place, x, first, product);
            } else {
                register::<I, F, ROWS, false>(packed, lane, place, x, first, product);
            }
        }
    }
}

/// Defines [`Integers::multiply`], [`Integers::tile`] and [`Integers::one_row`] for a level: compiled for its features, once for
/// each format. (As functions of their own: with all formats in one the compiler takes twice as long.)
macro_rules! compiled_for {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn multiply<F: $crate::packed_tile::PackedFormat>(
            product: &$crate::product::Product<'_>,
            x: &$crate::activations::QuantizedRows,
            rows: std::ops::Range<usize>,
        ) {
            // SAFETY: passed on from the caller.
            unsafe { $crate::packed_tile::multiply::<Self, F>(product, x, rows) }
        }

        #[target_feature(enable = $features)]
        unsafe fn tile<F: $crate::formats::BlockFormat, const ROWS: usize>(
            packed: &$crate::packed_tile::PackedTile,
            place: &$crate::packed_tile::TilePlace,
            x: &$crate::activations::QuantizedRows,
            first: usize,
            product: &$crate::product::Product<'_>,
        ) {
            // SAFETY: passed on from the caller.
            unsafe { $crate::packed_tile::tile::<Self, F, ROWS>(packed, place, x, first, product) }
        }

        #[target_feature(enable = $features)]
        unsafe fn one_row<F: $crate::packed_tile::PackedFormat>(
            product: &$crate::product::Product<'_>,
            x: &$crate::activations::QuantizedRows,
            rows: std::ops::Range<usize>,
        ) {
            // SAFETY: passed on from the caller.
            unsafe { $crate::packed_tile::one_row::<Self, F>(product, x, rows) }
        }
    };
}
pub(in super::super) use compiled_for;

/// The part of the packed tile's weight rows that begins at `lane` and fits in a register; all of them exist if `WHOLE`.
///
/// # Safety
/// As [`Integers::tile`].
#[inline(always)]
unsafe fn register<I: Integers, F: BlockFormat, const ROWS: usize, const WHOLE: bool>(
    packed: &PackedTile,
    lane: usize,
    place: &TilePlace,
    x: &QuantizedRows,
    first: usize,
    product: &Product<'_>,
) {
    let groups = place.columns.len() / F::GROUP;
    let first_group = place.columns.start / F::GROUP;
    let x_values = &x.values[first * x.cols..][..ROWS * x.cols];
    let x_groups = first * x.groups..(first + ROWS) * x.groups;
    let x_scales = &x.scales[x_groups.clone()];
    let x_sums = &x.negated_sums[x_groups.clone()];
    let x_scaled_sums = &x.scaled_sums[x_groups];
    debug_assert!(place.columns.end <= x.cols && first_group + groups <= x.groups);
    let outputs = lane..place.rows.min(lane + I::Floats::COUNT);
    // SAFETY: the slices above hold `ROWS` whole rows; `place` lies within the columns (the asserted
    // relations hold for every place that `packed_tile::multiply` makes) and within the packed tile's arrays.
    unsafe {
        let mut totals = [I::Floats::splat(0.0); ROWS];
        if place.columns.start > 0 {
            for (row, total) in totals.iter_mut().enumerate() {
                let from = &product.columns(first + row, place.row, place.rows)[outputs.clone()];
                *total = match WHOLE {
                    true => I::Floats::load(from.as_ptr()),
                    false => {
                        let mut padded = [0.0; TILE_ROWS];
                        padded[..from.len()].copy_from_slice(from);
                        I::Floats::load(padded.as_ptr())
                    }
                };
            }
        }
        for group in 0..groups {
            let weights = packed.values.as_ptr();
            let weights = weights.add(group * F::GROUP * TILE_ROWS + 4 * lane);
            let x_quads = x_values
                .as_ptr()
                .add(place.columns.start + group * F::GROUP);
            let mut start = [0; ROWS];
            if F::OFFSET != 0 && !I::takes_offset::<F>() {
                for (row, start) in start.iter_mut().enumerate() {
                    *start =
                        F::OFFSET * *x_sums.get_unchecked(row * x.groups + first_group + group);
                }
            }
            let sums = I::sums::<F, ROWS>(weights, x_quads, x.cols, start);
            let scales = I::Floats::load(packed.scales.as_ptr().add(group * TILE_ROWS + lane));
            for row in 0..ROWS {
                let at = row * x.groups + first_group + group;
                let scale = scales.multiply(I::Floats::splat(*x_scales.get_unchecked(at)));
                totals[row] = sums[row].multiply_add(scale, totals[row]);
                if F::AFFINE {
                    let minimums = packed.minimums.as_ptr().add(group * TILE_ROWS + lane);
                    let x_sum = I::Floats::splat(*x_scaled_sums.get_unchecked(at));
                    totals[row] = I::Floats::load(minimums).multiply_add(x_sum, totals[row]);
                }
            }
        }
        for (row, total) in totals.into_iter().enumerate() {
            let to = &mut product.columns(first + row, place.row, place.rows)[outputs.clone()];
            match WHOLE {
                true => total.store(to.as_mut_ptr()),
                false => {
                    let mut padded = [0.0; TILE_ROWS];
                    total.store(padded.as_mut_ptr());
                    to.copy_from_slice(&padded[..to.len()]);
                }
            }
        }
    }
}
