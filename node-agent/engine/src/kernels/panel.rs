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

/// Up to [`MAX_BLOCK`] columns of 16 rows, unpacked row by row.
#[repr(C, align(64))]
struct Unpacked {
    /// `[16 rows][MAX_BLOCK]`
    values: [u8; PANEL * MAX_BLOCK],
    /// `[16 rows][MAX_GROUPS]`
    scales: [f32; PANEL * MAX_GROUPS],
    /// `[16 rows][MAX_GROUPS]`
    minimums: [f32; PANEL * MAX_GROUPS],
}

const MAX_GROUPS: usize = MAX_BLOCK / MIN_GROUP;

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
    let mut unpacked = Unpacked {
        values: [0; PANEL * MAX_BLOCK],
        scales: [0.0; PANEL * MAX_GROUPS],
        minimums: [0.0; PANEL * MAX_GROUPS],
    };
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
        for lane in 0..PANEL {
            // Beyond the last row: the last again, whose results are not kept.
            let bytes = matrix.row(place.row + lane.min(place.rows - 1));
            let bytes = &bytes[column / F::BLOCK * F::BYTES..][..columns / F::BLOCK * F::BYTES];
            let values = &mut unpacked.values[lane * MAX_BLOCK..][..MAX_BLOCK];
            let scales = &mut unpacked.scales[lane * MAX_GROUPS..][..MAX_GROUPS];
            let minimums = &mut unpacked.minimums[lane * MAX_GROUPS..][..MAX_GROUPS];
            for (block, bytes) in bytes.chunks_exact(F::BYTES).enumerate() {
                let groups = block * groups_of_block..(block + 1) * groups_of_block;
                F::unpack::<I::Halves>(
                    bytes,
                    &mut values[block * F::BLOCK..][..F::BLOCK],
                    &mut scales[groups.clone()],
                    &mut minimums[groups],
                );
            }
        }
        let first = column - place.columns.start;
        for part in (0..columns).step_by(32) {
            let from = &unpacked.values[part..][..(PANEL - 1) * MAX_BLOCK + 32];
            let to = &mut panel.values[(first + part) * PANEL..][..32 * PANEL];
            // SAFETY: the slices are as long as the contract asks.
            unsafe { I::transpose(from.as_ptr(), MAX_BLOCK, to.as_mut_ptr()) };
        }
        // Eight floats are 32 bytes too. Where there are fewer groups, what is behind them is never read.
        for group in (0..columns / F::GROUP).step_by(8) {
            let from = group..group + (PANEL - 1) * MAX_GROUPS + 8;
            let to = (first / F::GROUP + group) * PANEL..(first / F::GROUP + group + 8) * PANEL;
            transpose_floats::<I>(
                &unpacked.scales[from.clone()],
                &mut panel.scales[to.clone()],
            );
            if F::AFFINE {
                transpose_floats::<I>(&unpacked.minimums[from], &mut panel.minimums[to]);
            }
        }
    }
}

/// Turns 8 floats of 16 rows, `MAX_GROUPS` apart, into 8 times 16.
#[inline(always)]
fn transpose_floats<I: Integers>(from: &[f32], to: &mut [f32]) {
    assert!(from.len() == (PANEL - 1) * MAX_GROUPS + 8 && to.len() == 8 * PANEL);
    // SAFETY: the slices are as long as the contract asks.
    unsafe {
        I::transpose(
            from.as_ptr().cast(),
            MAX_GROUPS * size_of::<f32>(),
            to.as_mut_ptr().cast(),
        );
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
    let mut from = [std::ptr::null(); PANEL];
    for (lane, from) in from.iter_mut().enumerate() {
        let row = matrix.row(place.row + lane.min(place.rows - 1));
        *from = row[place.columns.start * T::BYTES..place.columns.end * T::BYTES].as_ptr();
    }
    let (steps, rest) = (place.columns.len() / STEP, place.columns.len() % STEP);
    for to in panel.0.chunks_exact_mut(STEP * PANEL).take(steps) {
        // SAFETY: each of `from` points to 8 weights of its row, not yet passed; `to` has 8 times 16 places.
        unsafe {
            L::transpose(&from, to.as_mut_ptr());
            for from in &mut from {
                *from = from.add(STEP * T::BYTES);
            }
        }
    }
    if rest > 0 {
        let mut padded = [[0_u8; 4 * STEP]; PANEL];
        for (padded, from) in padded.iter_mut().zip(&mut from) {
            // SAFETY: as many weights of the row are left.
            let weights = unsafe { std::slice::from_raw_parts(*from, rest * T::BYTES) };
            padded[..weights.len()].copy_from_slice(weights);
            *from = padded.as_ptr();
        }
        let to = &mut panel.0[steps * STEP * PANEL..][..STEP * PANEL];
        // SAFETY: each of `from` points to 8 weights, copied; `to` has 8 times 16 places.
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
    let x = &x[first * cols..(first + ROWS) * cols];
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
            // SAFETY: `column` is below the panel's columns, each of 16 floats; with what comes before the
            // panel it is below `cols`, and `x` holds `ROWS` rows of these.
            unsafe {
                let weights = L::load(panel.0.as_ptr().add(column * PANEL));
                let x = x.as_ptr().add(place.columns.start + column);
                for (row, sum) in sums.iter_mut().enumerate() {
                    *sum = weights.multiply_add(L::splat(*x.add(row * cols)), *sum);
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
