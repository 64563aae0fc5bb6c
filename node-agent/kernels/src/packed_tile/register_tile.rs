//! The product of a packed tile with a few rows of activations, as every vector level computes it: integer sums of a group's
//! products, then one multiplication by the scales and one addition to the totals.

use std::ops::Range;

use super::super::activations::QuantizedRows;
use super::super::formats::Quants;
use super::super::lanes::Lanes;
use super::super::product::{Product, TILE_ROWS};
use super::{Integers, PackedTile, TilePlace};

/// The only body of [`Integers::tile`]; inlined there, so that it is compiled for the level's instructions.
///
/// # Safety
/// As there.
#[inline(always)]
pub(in super::super) unsafe fn tile<I: Integers, Q: Quants, const ROWS: usize>(
    packed: &PackedTile,
    place: &TilePlace,
    x: &QuantizedRows<'_>,
    first: usize,
    product: &Product<'_>,
) {
    let lanes = I::Floats::COUNT;
    for lane in (0..place.rows).step_by(lanes) {
        let rows = lanes.min(place.rows - lane);
        // Where one row is left, a register does not fit in the output.
        let mut padded = [[0.0; TILE_ROWS]; ROWS];
        let mut totals = [std::ptr::null_mut(); ROWS];
        // SAFETY: passed on from the caller; the places are those of this part, or as many of `padded`.
        unsafe {
            for (row, (total, padded)) in totals.iter_mut().zip(&mut padded).enumerate() {
                let output = product.columns(first + row, place.row + lane, rows);
                *total = match rows == lanes {
                    true => output.as_mut_ptr(),
                    false => {
                        padded[..rows].copy_from_slice(output);
                        padded.as_mut_ptr()
                    }
                };
            }
            register::<I, Q, ROWS>(packed, lane, &place.columns, x, first, totals);
            if rows < lanes {
                for (row, padded) in padded.iter().enumerate() {
                    let output = product.columns(first + row, place.row + lane, rows);
                    output.copy_from_slice(&padded[..rows]);
                }
            }
        }
    }
}

/// Defines the functions of [`Integers`] whose bodies are in `packed_tile` for a level: compiled for its features, once for each format,
/// and `tile` once for each kind of quants. Never inlined into one another: with all formats in one function the compiler takes twice as long.
macro_rules! compiled_for {
    ($features:literal) => {
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn multiply_floats<T: $crate::packed_tile::FloatFormat>(
            product: &$crate::product::Product<'_>,
            x: &[f32],
            rows: std::ops::Range<usize>,
        ) {
            // SAFETY: passed on from the caller.
            unsafe { $crate::packed_tile::multiply_floats::<Self::Words, T>(product, x, rows) }
        }

        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn fill<F: $crate::packed_tile::PackedFormat>(
            packed: &mut $crate::packed_tile::PackedTile,
            matrix: &$crate::matrix::Matrix<'_>,
            place: &$crate::packed_tile::TilePlace,
        ) {
            // SAFETY: passed on from the caller.
            unsafe { $crate::packed_tile::fill::<Self::Words, F>(packed, matrix, place) }
        }

        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn multiply<F: $crate::packed_tile::PackedFormat>(
            product: &$crate::product::Product<'_>,
            x: &$crate::activations::QuantizedRows<'_>,
            rows: std::ops::Range<usize>,
        ) {
            // SAFETY: passed on from the caller.
            unsafe { $crate::packed_tile::multiply::<Self, F>(product, x, rows) }
        }

        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn tile<Q: $crate::formats::Quants, const ROWS: usize>(
            packed: &$crate::packed_tile::PackedTile,
            place: &$crate::packed_tile::TilePlace,
            x: &$crate::activations::QuantizedRows<'_>,
            first: usize,
            product: &$crate::product::Product<'_>,
        ) {
            // SAFETY: passed on from the caller.
            unsafe { $crate::packed_tile::tile::<Self, Q, ROWS>(packed, place, x, first, product) }
        }

        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn one_row<F: $crate::packed_tile::PackedFormat>(
            product: &$crate::product::Product<'_>,
            x: &$crate::activations::QuantizedRows<'_>,
            rows: std::ops::Range<usize>,
        ) {
            // SAFETY: passed on from the caller.
            unsafe { $crate::packed_tile::one_row::<Self, F>(product, x, rows) }
        }
    };
}
pub(in super::super) use compiled_for;

/// The part of the packed tile's weight rows that begins at `lane` and fits in a register. Each of `totals_at` is added to, or set where
/// the packed tile's `columns` are the first.
///
/// # Safety
/// As [`Integers::tile`]; a register can be read and written at each of `totals_at`.
#[inline(always)]
unsafe fn register<I: Integers, Q: Quants, const ROWS: usize>(
    packed: &PackedTile,
    lane: usize,
    columns: &Range<usize>,
    x: &QuantizedRows<'_>,
    first: usize,
    totals_at: [*mut f32; ROWS],
) {
    let groups = columns.len() / Q::GROUP;
    let first_group = columns.start / Q::GROUP;
    let x_values = &x.values[first * x.cols..][..ROWS * x.cols];
    let x_groups = first * x.groups..(first + ROWS) * x.groups;
    let x_scales = &x.scales[x_groups.clone()];
    let x_sums = &x.negated_sums[x_groups.clone()];
    let x_scaled_sums = &x.scaled_sums[x_groups];
    debug_assert!(columns.end <= x.cols && first_group + groups <= x.groups);
    // SAFETY: the slices above hold `ROWS` whole rows; the columns lie within them (the asserted relations hold
    // for every place that `packed_tile::multiply` makes) and within the packed tile's arrays.
    unsafe {
        let mut totals = [I::Floats::splat(0.0); ROWS];
        if columns.start > 0 {
            for (total, at) in totals.iter_mut().zip(totals_at) {
                *total = I::Floats::load(at);
            }
        }
        for group in 0..groups {
            let weights = packed.values.as_ptr();
            let weights = weights.add(group * Q::GROUP * TILE_ROWS + 4 * lane);
            let x_quads = x_values.as_ptr().add(columns.start + group * Q::GROUP);
            let mut start = [0; ROWS];
            if Q::OFFSET != 0 && !I::takes_offset::<Q>() {
                for (row, start) in start.iter_mut().enumerate() {
                    *start =
                        Q::OFFSET * *x_sums.get_unchecked(row * x.groups + first_group + group);
                }
            }
            let sums = I::sums::<Q, ROWS>(weights, x_quads, x.cols, start);
            let scales = I::Floats::load(packed.scales.as_ptr().add(group * TILE_ROWS + lane));
            for row in 0..ROWS {
                let at = row * x.groups + first_group + group;
                let scale = scales.multiply(I::Floats::splat(*x_scales.get_unchecked(at)));
                totals[row] = sums[row].multiply_add(scale, totals[row]);
                if Q::AFFINE {
                    let minimums = packed.minimums.as_ptr().add(group * TILE_ROWS + lane);
                    let x_sum = I::Floats::splat(*x_scaled_sums.get_unchecked(at));
                    totals[row] = I::Floats::load(minimums).multiply_add(x_sum, totals[row]);
                }
            }
        }
        for (total, at) in totals.into_iter().zip(totals_at) {
            total.store(at);
        }
    }
}
