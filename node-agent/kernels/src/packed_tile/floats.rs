//! Packed tiles of float weights: F32, F16 and BF16, widened to F32 and multiplied in F32.

use std::ops::Range;

use super::super::lanes::{Lanes, Rows, Words};
use super::super::matrix::Matrix;
use super::super::product::{Product, TILE_ROWS};
use super::super::scalar::FLOAT_GROUP;
use super::{Next, TilePlace, tiles};

/// Columns of a packed tile: 12 KiB, as for quantized weights.
const COLUMNS: usize = 192;

/// Part of 16 rows: `[columns][16 rows]`.
#[repr(C, align(64))]
struct FloatTile([f32; TILE_ROWS * COLUMNS]);

/// A format of float weights.
pub(in super::super) trait FloatFormat {
    const BYTES: usize;

    /// Writes 8 columns of 16 rows as `[8][16 rows]`.
    ///
    /// # Safety
    /// The processor has the instructions of `W`; 8 weights of the first 16 rows are readable and 128 floats at `to`
    /// writable.
    unsafe fn widen_rows<W: Words>(rows: &Rows, to: *mut f32);
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl FloatFormat for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn widen_rows<W: Words>(rows: &Rows, to: *mut f32) {
        // SAFETY: 32 bytes of each row; 8 times 16 floats.
        unsafe {
            for (column, words) in W::load_32(rows, 0).into_iter().enumerate() {
                words.as_floats().store(to.add(column * TILE_ROWS));
            }
        }
    }
}

impl FloatFormat for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn widen_rows<W: Words>(rows: &Rows, to: *mut f32) {
        // SAFETY: 16 bytes of each row; 8 times 16 floats.
        unsafe {
            for (pair, words) in W::load_16(rows, 0).into_iter().enumerate() {
                words.halves_to_floats().store(to.add(2 * pair * TILE_ROWS));
                let second = words.shift_right(16).halves_to_floats();
                second.store(to.add((2 * pair + 1) * TILE_ROWS));
            }
        }
    }
}

impl FloatFormat for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn widen_rows<W: Words>(rows: &Rows, to: *mut f32) {
        // SAFETY: 16 bytes of each row; 8 times 16 floats.
        unsafe {
            for (pair, words) in W::load_16(rows, 0).into_iter().enumerate() {
                words
                    .shift_left(16)
                    .as_floats()
                    .store(to.add(2 * pair * TILE_ROWS));
                let second = words.and(0xffff_0000).as_floats();
                second.store(to.add((2 * pair + 1) * TILE_ROWS));
            }
        }
    }
}

/// Computes the columns `rows` of the output.
///
/// # Safety
/// The processor has the instructions of `W`, and no other thread writes these columns.
#[inline(always)]
pub(in super::super) unsafe fn multiply<W: Words, T: FloatFormat>(
    product: &Product<'_>,
    x: &[f32],
    rows: Range<usize>,
) {
    const { assert!(W::COUNT == TILE_ROWS && <W::Floats as Lanes>::COUNT == TILE_ROWS) };
    let cols = product.matrix.cols();
    let mut packed = FloatTile([0.0; TILE_ROWS * COLUMNS]);
    for (row, count) in tiles(rows, TILE_ROWS) {
        for column in (0..cols).step_by(COLUMNS) {
            let place = TilePlace {
                row,
                rows: count,
                columns: column..(column + COLUMNS).min(cols),
            };
            // SAFETY: passed on from the caller.
            unsafe {
                fill::<W, T>(&mut packed, &product.matrix, &place);
                let mut first = 0;
                while first < product.n {
                    let left = product.n - first;
                    first += match left.min(<W::Floats as Lanes>::TILE) {
                        8.. => tile::<W::Floats, 8>(&packed, &place, x, first, product),
                        4..8 => tile::<W::Floats, 4>(&packed, &place, x, first, product),
                        2..4 => tile::<W::Floats, 2>(&packed, &place, x, first, product),
                        _ => tile::<W::Floats, 1>(&packed, &place, x, first, product),
                    };
                }
            }
        }
    }
}

/// # Safety
/// The processor has the instructions of `W`.
#[inline(always)]
unsafe fn fill<W: Words, T: FloatFormat>(
    packed: &mut FloatTile,
    matrix: &Matrix<'_>,
    place: &TilePlace,
) {
    const STEP: usize = 8;
    let columns = place.columns.len();
    let mut rows = place.blocks(matrix, T::BYTES, 1);
    let mut next = Next::of(matrix, place, TILE_ROWS, STEP * T::BYTES, STEP, 1);
    let (steps, rest) = (columns / STEP, columns % STEP);
    let places = packed.0.chunks_exact_mut(STEP * TILE_ROWS).take(steps);
    for to in places {
        next.ask::<W>(0);
        next.ask::<W>(1);
        next.advance();
        // SAFETY: 8 weights of each row that were not yet passed; 8 times 16 places.
        unsafe {
            T::widen_rows::<W>(&rows, to.as_mut_ptr());
            rows.advance(STEP * T::BYTES);
        }
    }
    if rest > 0 {
        let mut padded = [[0_u8; 4 * STEP]; TILE_ROWS];
        for (lane, padded) in padded.iter_mut().enumerate() {
            let bytes = rest * T::BYTES;
            // SAFETY: as many weights of the row are left.
            let weights = unsafe { std::slice::from_raw_parts(rows.at(lane, 0), bytes) };
            padded[..bytes].copy_from_slice(weights);
        }
        let padded = Rows {
            first: padded.as_ptr().cast(),
            stride: 4 * STEP,
        };
        let to = &mut packed.0[steps * STEP * TILE_ROWS..][..STEP * TILE_ROWS];
        // SAFETY: 8 weights of each row, copied; 8 times 16 places.
        unsafe { T::widen_rows::<W>(&padded, to.as_mut_ptr()) };
    }
}

/// Adds the packed tile's products with `ROWS` rows of activations from `first` on to the output, or sets it where the
/// packed tile's columns are the first. Returns `ROWS`.
///
/// # Safety
/// The processor has the instructions of `L`; `first + ROWS` rows of activations exist; `place` is of the piece
/// that this thread computes.
#[inline(always)]
unsafe fn tile<L: Lanes, const ROWS: usize>(
    packed: &FloatTile,
    place: &TilePlace,
    x: &[f32],
    first: usize,
    product: &Product<'_>,
) -> usize {
    let cols = product.matrix.cols();
    let columns = place.columns.len();
    let x = &x[first * cols..(first + ROWS) * cols];
    let mut totals = [L::splat(0.0); ROWS];
    if place.columns.start > 0 {
        for (row, total) in totals.iter_mut().enumerate() {
            let mut lanes = [0.0; TILE_ROWS];
            // SAFETY: the columns of the output that belong to this piece.
            lanes[..place.rows]
                .copy_from_slice(unsafe { product.columns(first + row, place.row, place.rows) });
            // SAFETY: 16 floats.
            *total = unsafe { L::load(lanes.as_ptr()) };
        }
    }
    for group in (0..columns).step_by(FLOAT_GROUP) {
        let mut sums = [L::splat(0.0); ROWS];
        for column in group..(group + FLOAT_GROUP).min(columns) {
            // SAFETY: `column` is below the packed tile's columns, each of 16 floats; with what comes before the
            // packed tile it is below `cols`, and `x` holds `ROWS` rows of these.
            unsafe {
                let weights = L::load(packed.0.as_ptr().add(column * TILE_ROWS));
                let x = x.as_ptr().add(place.columns.start + column);
                for (row, sum) in sums.iter_mut().enumerate() {
                    *sum = weights.multiply_add(L::splat(*x.add(row * cols)), *sum);
                }
            }
        }
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total = total.add(sum);
        }
    }
    for (row, total) in totals.into_iter().enumerate() {
        let mut lanes = [0.0; TILE_ROWS];
        // SAFETY: 16 floats; then the columns of the output that belong to this piece.
        unsafe {
            total.store(lanes.as_mut_ptr());
            product
                .columns(first + row, place.row, place.rows)
                .copy_from_slice(&lanes[..place.rows]);
        }
    }
    ROWS
}
