//! Panels: 16 weight rows unpacked side by side, so that one register holds the same columns of all 16 and sums
//! need no adding across lanes. Decides how a panel is filled from the file's blocks and how much of the
//! columns it takes at a time; a panel stays in the first-level cache while every row of activations is
//! multiplied with it. Shared by the vector levels, which bring the transposition and the products.

use std::ops::Range;

use super::activations::QuantizedRows;
use super::formats::{BlockFormat, MAX_BLOCK, MIN_GROUP};
use super::lanes::Lanes;
use super::matmul::{PANEL, Product};
use super::matrix::Matrix;
use super::numerics::Halves;
use super::scalar::FLOAT_GROUP;

/// Columns of a panel of quantized weights: a multiple of every block. With the activations of a tile it
/// fills three quarters of a 32 KiB cache.
const COLUMNS: usize = 768;

/// Columns of a panel of float weights: as many bytes.
const FLOAT_COLUMNS: usize = 192;

/// Part of 16 rows of quantized weights.
#[repr(C, align(64))]
pub(super) struct Panel {
    /// Four consecutive columns of each row in turn: `[columns / 4][16 rows][4]`.
    pub(super) values: [u8; PANEL * COLUMNS],
    /// `[groups][16 rows]`.
    pub(super) scales: [f32; PANEL * COLUMNS / MIN_GROUP],
    /// `[groups][16 rows]`, of formats that have minimums.
    pub(super) minimums: [f32; PANEL * COLUMNS / MIN_GROUP],
}

/// Part of 16 rows of float weights: `[columns][16 rows]`.
#[repr(C, align(64))]
pub(super) struct FloatPanel([f32; PANEL * FLOAT_COLUMNS]);

/// Blocks of up to [`MAX_BLOCK`] columns of each row, unpacked: `[16 rows][MAX_BLOCK]`.
#[repr(C, align(64))]
pub(super) struct Unpacked([u8; PANEL * MAX_BLOCK]);

/// The part of a product for which one panel is responsible.
pub(super) struct Place {
    /// The first of the panel's weight rows.
    pub(super) row: usize,
    /// How many of its 16 rows there are.
    pub(super) rows: usize,
    /// The panel's columns.
    pub(super) columns: Range<usize>,
}

/// What a vector level brings for quantized weights.
pub(super) trait Integers {
    /// How halves are converted.
    type Halves: Halves;
    /// The most rows of activations that [`tile`](Self::tile) takes at once.
    const TILE: usize;

    /// Turns 32 columns of 16 rows, `[16 rows][stride]`, into `[8][16 rows][4]`.
    ///
    /// # Safety
    /// The processor has the level's instructions; `15 * stride + 32` bytes at `from` are readable and 512 at
    /// `to` writable.
    unsafe fn transpose(from: *const u8, stride: usize, to: *mut u8);

    /// Adds the panel's products with `ROWS` rows of activations from `first` on to the output, or sets it
    /// where the panel's columns are the first.
    ///
    /// # Safety
    /// The processor has the level's instructions; `first + ROWS` rows of activations exist; `place` is of the
    /// piece that this thread computes.
    unsafe fn tile<F: BlockFormat, const ROWS: usize>(
        panel: &Panel,
        place: &Place,
        x: &QuantizedRows,
        first: usize,
        product: &Product<'_>,
    );
}

/// Computes the columns `rows` of the output for quantized weights.
///
/// # Safety
/// The processor has the instructions of `I`, and no other thread writes these columns.
#[inline(always)]
pub(super) unsafe fn quantized<I: Integers, F: BlockFormat>(
    product: &Product<'_>,
    x: &QuantizedRows,
    rows: Range<usize>,
) {
    let mut panel = Panel {
        values: [0; PANEL * COLUMNS],
        scales: [0.0; PANEL * COLUMNS / MIN_GROUP],
        minimums: [0.0; PANEL * COLUMNS / MIN_GROUP],
    };
    let mut unpacked = Unpacked([0; PANEL * MAX_BLOCK]);
    for row in rows.clone().step_by(PANEL) {
        for column in (0..x.cols).step_by(COLUMNS) {
            let place = Place {
                row,
                rows: PANEL.min(rows.end - row),
                columns: column..(column + COLUMNS).min(x.cols),
            };
            // SAFETY: passed on from the caller.
            unsafe {
                fill::<I, F>(&mut panel, &mut unpacked, &product.matrix, &place);
                let mut first = 0;
                while first < product.n {
                    let left = product.n - first;
                    first += match left.min(I::TILE) {
                        8.. => tile::<I, F, 8>(&panel, &place, x, first, product),
                        4..8 => tile::<I, F, 4>(&panel, &place, x, first, product),
                        2..4 => tile::<I, F, 2>(&panel, &place, x, first, product),
                        _ => tile::<I, F, 1>(&panel, &place, x, first, product),
                    };
                }
            }
        }
    }
}

/// # Safety
/// As [`Integers::tile`]. Returns the rows done.
#[inline(always)]
unsafe fn tile<I: Integers, F: BlockFormat, const ROWS: usize>(
    panel: &Panel,
    place: &Place,
    x: &QuantizedRows,
    first: usize,
    product: &Product<'_>,
) -> usize {
    // SAFETY: passed on from the caller.
    unsafe { I::tile::<F, ROWS>(panel, place, x, first, product) };
    ROWS
}

/// # Safety
/// The processor has the instructions of `I`.
#[inline(always)]
unsafe fn fill<I: Integers, F: BlockFormat>(
    panel: &mut Panel,
    unpacked: &mut Unpacked,
    matrix: &Matrix<'_>,
    place: &Place,
) {
    let groups_of_block = F::BLOCK / F::GROUP;
    for column in place.columns.clone().step_by(MAX_BLOCK) {
        let columns = MAX_BLOCK.min(place.columns.end - column);
        let first_group = (column - place.columns.start) / F::GROUP;
        for lane in 0..PANEL {
            // Beyond the last row: the last again, whose results are not kept.
            let bytes = matrix.row(place.row + lane.min(place.rows - 1));
            let bytes = &bytes[column / F::BLOCK * F::BYTES..][..columns / F::BLOCK * F::BYTES];
            let values = &mut unpacked.0[lane * MAX_BLOCK..][..columns];
            let blocks = bytes
                .chunks_exact(F::BYTES)
                .zip(values.chunks_exact_mut(F::BLOCK));
            for (block, (bytes, values)) in blocks.enumerate() {
                let mut scales = [0.0; MAX_BLOCK / MIN_GROUP];
                let mut minimums = [0.0; MAX_BLOCK / MIN_GROUP];
                F::unpack::<I::Halves>(bytes, values, &mut scales, &mut minimums);
                for group in 0..groups_of_block {
                    let at = (first_group + block * groups_of_block + group) * PANEL + lane;
                    panel.scales[at] = scales[group];
                    if F::AFFINE {
                        panel.minimums[at] = minimums[group];
                    }
                }
            }
        }
        for part in (0..columns).step_by(32) {
            let from = &unpacked.0[part..][..(PANEL - 1) * MAX_BLOCK + 32];
            let to =
                &mut panel.values[(column - place.columns.start + part) * PANEL..][..32 * PANEL];
            // SAFETY: the slices are as long as the contract asks.
            unsafe { I::transpose(from.as_ptr(), MAX_BLOCK, to.as_mut_ptr()) };
        }
    }
}

/// A format of float weights.
pub(super) trait FloatFormat {
    const BYTES: usize;
}

/// What a vector level brings for float weights: the sums are those of its [`Lanes`].
pub(super) trait Floats<T: FloatFormat> {
    type Lanes: Lanes;

    /// Turns 8 columns of 16 rows of weights into `[8][16 rows]` floats. Row `i` begins at `from[i]`.
    ///
    /// # Safety
    /// The processor has the level's instructions; 8 weights at each of `from` are readable and 128 floats at
    /// `to` writable.
    unsafe fn transpose(from: &[*const u8; PANEL], to: *mut f32);
}

/// Computes the columns `rows` of the output for float weights.
///
/// # Safety
/// The processor has the instructions of `L`, and no other thread writes these columns.
#[inline(always)]
pub(super) unsafe fn float<L: Floats<T>, T: FloatFormat>(
    product: &Product<'_>,
    x: &[f32],
    rows: Range<usize>,
) {
    let cols = product.matrix.cols();
    let mut panel = FloatPanel([0.0; PANEL * FLOAT_COLUMNS]);
    for row in rows.clone().step_by(PANEL) {
        for column in (0..cols).step_by(FLOAT_COLUMNS) {
            let place = Place {
                row,
                rows: PANEL.min(rows.end - row),
                columns: column..(column + FLOAT_COLUMNS).min(cols),
            };
            // SAFETY: passed on from the caller.
            unsafe {
                fill_floats::<L, T>(&mut panel, &product.matrix, &place);
                let mut first = 0;
                while first < product.n {
                    let left = product.n - first;
                    first += match left.min(<L::Lanes as Lanes>::TILE) {
                        8.. => float_tile::<L::Lanes, 8>(&panel, &place, x, first, product),
                        4..8 => float_tile::<L::Lanes, 4>(&panel, &place, x, first, product),
                        2..4 => float_tile::<L::Lanes, 2>(&panel, &place, x, first, product),
                        _ => float_tile::<L::Lanes, 1>(&panel, &place, x, first, product),
                    };
                }
            }
        }
    }
}

/// # Safety
/// The processor has the instructions of `L`.
#[inline(always)]
unsafe fn fill_floats<L: Floats<T>, T: FloatFormat>(
    panel: &mut FloatPanel,
    matrix: &Matrix<'_>,
    place: &Place,
) {
    const STEP: usize = 8;
    let mut rest = [[0_u8; 4 * STEP]; PANEL];
    for column in place.columns.clone().step_by(STEP) {
        let bytes = STEP.min(place.columns.end - column) * T::BYTES;
        let mut from = [std::ptr::null(); PANEL];
        for lane in 0..PANEL {
            let row = matrix.row(place.row + lane.min(place.rows - 1));
            let row = &row[column * T::BYTES..][..bytes];
            from[lane] = row.as_ptr();
            if bytes < STEP * T::BYTES {
                rest[lane][..bytes].copy_from_slice(row);
                from[lane] = rest[lane].as_ptr();
            }
        }
        let to = &mut panel.0[(column - place.columns.start) * PANEL..][..STEP * PANEL];
        // SAFETY: each of `from` points to 8 weights, of the row or of its copy; `to` has 8 times 16 places.
        unsafe { L::transpose(&from, to.as_mut_ptr()) };
    }
}

/// As [`Integers::tile`], for floats. Returns the rows done.
///
/// # Safety
/// The processor has the instructions of `L`; `first + ROWS` rows of activations exist; `place` is of the piece
/// that this thread computes.
#[inline(always)]
unsafe fn float_tile<L: Lanes, const ROWS: usize>(
    panel: &FloatPanel,
    place: &Place,
    x: &[f32],
    first: usize,
    product: &Product<'_>,
) -> usize {
    let cols = product.matrix.cols();
    let columns = place.columns.len();
    let x: [&[f32]; ROWS] =
        std::array::from_fn(|row| &x[(first + row) * cols + place.columns.start..][..columns]);
    let mut totals = [L::splat(0.0); ROWS];
    if place.columns.start > 0 {
        for (row, total) in totals.iter_mut().enumerate() {
            let mut lanes = [0.0; PANEL];
            // SAFETY: the columns of the output that belong to this piece.
            lanes[..place.rows].copy_from_slice(unsafe { product.columns(first + row, place) });
            // SAFETY: 16 floats.
            *total = unsafe { L::load(lanes.as_ptr()) };
        }
    }
    for group in (0..columns).step_by(FLOAT_GROUP) {
        let mut sums = [L::splat(0.0); ROWS];
        for column in group..(group + FLOAT_GROUP).min(columns) {
            // SAFETY: `column` is below the panel's columns, each of 16 floats, and below the length that
            // the rows of activations were cut to.
            unsafe {
                let weights = L::load(panel.0.as_ptr().add(column * PANEL));
                for row in 0..ROWS {
                    let x = L::splat(*x[row].get_unchecked(column));
                    sums[row] = weights.multiply_add(x, sums[row]);
                }
            }
        }
        for row in 0..ROWS {
            totals[row] = totals[row].add(sums[row]);
        }
    }
    for (row, total) in totals.iter().enumerate() {
        let mut lanes = [0.0; PANEL];
        // SAFETY: 16 floats; then the columns of the output that belong to this piece.
        unsafe {
            total.store(lanes.as_mut_ptr());
            product
                .columns(first + row, place)
                .copy_from_slice(&lanes[..place.rows]);
        }
    }
    ROWS
}
