//! Packed tiles: 16 weight rows unpacked side by side, so that one register holds the same columns of all 16 and sums need no
//! adding across lanes. Decides how many columns a packed tile takes at a time, so that it stays in the first-level cache while
//! every row of activations is multiplied with it; and when no tile is used (`one_row.rs`). Shared by the vector levels, which
//! provide the registers and the integer products.

use std::ops::Range;

use prima_gguf::GgmlType;

use super::activations::QuantizedRows;
use super::formats::{
    BlockFormat, MAX_BLOCK, MIN_GROUP, Quants, are_signed_bytes, with_block_format,
};
use super::lanes::{Lanes, Rows, Words};
use super::matrix::Matrix;
use super::matrix::no_kernel;
use super::product::{Activations, Product, TILE_ROWS};

/// Repeats the block for each number. The numbers are constants in it, so what they index can be registers.
macro_rules! unroll {
    ($number:ident in $($value:literal)* $block:block) => {
        $({
            let $number: usize = $value;
            $block
        })*
    };
}

mod codebook;
mod floats;
mod k_quants;
mod legacy;
mod nonlinear;
mod one_row;
mod register_tile;

pub(super) use floats::{FloatFormat, multiply as multiply_floats};
pub(super) use one_row::multiply as one_row;
pub(super) use register_tile::{compiled_for, tile};

/// Columns of a packed tile of quantized weights: a multiple of every block. With the activations of a tile it
/// fills three quarters of a 32 KiB cache.
const COLUMNS: usize = 768;
const _: () = assert!(COLUMNS.is_multiple_of(MAX_BLOCK));

/// Part of 16 rows of quantized weights.
#[repr(C, align(64))]
pub(super) struct PackedTile {
    /// Four consecutive columns of each row in turn: `[columns / 4][16 rows][4]`.
    pub(super) values: [u8; TILE_ROWS * COLUMNS],
    /// `[groups][16 rows]`.
    pub(super) scales: [f32; TILE_ROWS * COLUMNS / MIN_GROUP],
    /// `[groups][16 rows]`, of formats that have minimums.
    pub(super) minimums: [f32; TILE_ROWS * COLUMNS / MIN_GROUP],
}

/// The part of a matrix that is taken at a time: for a packed tile, or for the product with one row.
pub(super) struct TilePlace {
    /// The first of the weight rows.
    pub(super) row: usize,
    /// How many: as many as are taken at a time, or one, which then takes the places of all. Only the first of its results is kept.
    pub(super) rows: usize,
    pub(super) columns: Range<usize>,
}

/// The first and the number of `rows` to take at a time: `height`, and each that is left by itself, since rows at equal distances cannot end with
/// the same one several times. That costs some whole tiles, but few matrices have such rows: some vocabularies and routers.
fn tiles(rows: Range<usize>, height: usize) -> impl Iterator<Item = (usize, usize)> {
    let left = rows.end - rows.len() % height;
    let whole = (rows.start..left).step_by(height);
    whole
        .map(move |row| (row, height))
        .chain((left..rows.end).map(|row| (row, 1)))
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl TilePlace {
    /// Each row's blocks of the columns.
    fn blocks(&self, matrix: &Matrix<'_>, block_bytes: usize, block: usize) -> Rows {
        let row_bytes = matrix.row_bytes();
        let rows = &matrix.bytes()[self.row * row_bytes..][..self.rows * row_bytes];
        Rows {
            first: rows[self.columns.start / block * block_bytes..].as_ptr(),
            stride: if self.rows == 1 { 0 } else { row_bytes },
        }
    }
}

/// A block format that can be unpacked for several rows at once, to what [`BlockFormat::unpack`] gives for each.
pub(super) trait PackedFormat: BlockFormat {
    /// In how many parts of equally many groups a block's values are unpacked, one after the other. Of a large block in one part, the compiler
    /// would load everything first, which is more than there are registers, and prefetch everything at its end: more lines at once than a
    /// core can wait for.
    const PARTS: usize = 1;
    /// The groups of a part.
    const PART_GROUPS: usize = Self::BLOCK / Self::GROUP / Self::PARTS;
    /// Whether one row of activations is multiplied with a block while it is unpacked, without a packed tile. It takes that
    /// [`values`](Self::values) names quads by constants, so that sums are registers.
    const ONE_ROW: bool = true;

    /// Unpacks the scales and minimums of a block of each row.
    ///
    /// # Safety
    /// The processor has the instructions of `W`; `BYTES` bytes of the first `W::COUNT` rows are readable; `to` takes a block of this format.
    unsafe fn scales<W: Words>(rows: &Rows, to: &mut impl Unpacked<W>);

    /// Unpacks the values of a `part` of a block of each row. Quads are numbered within it.
    ///
    /// # Safety
    /// As [`scales`](Self::scales); `part` is one of the parts, and `to` takes it.
    unsafe fn values<W: Words>(rows: &Rows, part: usize, to: &mut impl Unpacked<W>);
}

/// Receives a block of each of several rows while it is unpacked: its scales and minimums, and then each column, part after part. (Formats that are
/// not [`ONE_ROW`](PackedFormat::ONE_ROW) may give scales with the values.)
pub(super) trait Unpacked<W: Words> {
    /// Columns `4 * quad..4 * quad + 4` of the part.
    ///
    /// # Safety
    /// They are columns of the part.
    unsafe fn values(&mut self, quad: usize, words: W);

    /// # Safety
    /// `group` is one of the block's.
    unsafe fn scale(&mut self, group: usize, scales: W::Floats);

    /// # Safety
    /// `group` is one of the block's.
    unsafe fn minimum(&mut self, group: usize, minimums: W::Floats);
}

/// Where a part of a block of each of 16 rows goes in a packed tile, and the block's scales.
struct Destination {
    values: *mut u8,
    scales: *mut f32,
    minimums: *mut f32,
    next: Next,
}

impl<W: Words> Unpacked<W> for Destination {
    #[inline(always)]
    unsafe fn values(&mut self, quad: usize, words: W) {
        self.next.ask::<W>(quad);
        // SAFETY: in the place of the part.
        unsafe { words.store(self.values.add(quad * 4 * TILE_ROWS)) };
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: W::Floats) {
        // SAFETY: in the place of the block.
        unsafe { scales.store(self.scales.add(group * TILE_ROWS)) };
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: W::Floats) {
        // SAFETY: in the place of the block.
        unsafe { minimums.store(self.minimums.add(group * TILE_ROWS)) };
    }
}

/// The piece of the next rows to prefetch, as long as a part of a block of each current row. It is prefetched in memory order, as fast as the
/// current rows are unpacked: the hardware predicts one long stream, but not 16 short ones.
#[derive(Clone, Copy)]
struct Next {
    at: *const u8,
    /// Bytes of a piece.
    bytes: usize,
    /// Quads of a part.
    quads: usize,
}

impl Next {
    /// For the first part of a `block` of each row at `place`, where `height` rows are taken at a time. (Also where one row is left: the compiler
    /// has to know the lines.) May point past the last row.
    #[inline(always)]
    fn of(
        matrix: &Matrix<'_>,
        place: &TilePlace,
        height: usize,
        block_bytes: usize,
        block: usize,
        parts: usize,
    ) -> Self {
        let row = matrix.row(place.row);
        let done = place.columns.start / block * block_bytes;
        Self {
            at: row.as_ptr().wrapping_add(height * (row.len() + done)),
            bytes: height * block_bytes / parts,
            quads: block / parts / 4,
        }
    }

    /// Moves on by a part of each row.
    #[inline(always)]
    fn advance(&mut self) {
        self.at = self.at.wrapping_add(self.bytes);
    }

    /// Prefetches the share for the part's columns `4 * quad..4 * quad + 4`, each line at least once. Where `quad` is a constant, as in
    /// unrolled loops, the lines are constants, too.
    #[inline(always)]
    fn ask<W: Words>(&self, quad: usize) {
        let begin = |quad: usize| (quad * self.bytes).div_ceil(self.quads * LINE);
        for line in begin(quad)..begin(quad + 1) {
            W::prefetch(self.at.wrapping_add(line * LINE));
        }
    }
}

/// What a vector level provides for products with weights.
pub(super) trait Integers: Sized {
    /// The first level with the same registers; it needs no instructions that this one lacks. What multiplies no integers is the same at
    /// both, and is compiled for the first alone.
    type Base: Integers<Words = Self::Words>;
    type Words: Words;
    /// The totals of as many weight rows as one register holds.
    type Floats: Lanes;
    /// The most rows of activations that [`tile`](Self::tile) takes at once: 4 or 8.
    const TILE: usize;
    /// Whether products use signed bytes, for formats whose values minus the offset are signed bytes.
    const SIGNED: bool;

    /// Computes the columns `rows` of the output for float weights: [`floats::multiply()`], compiled for the level.
    ///
    /// # Safety
    /// The processor has the level's instructions, and no other thread writes these columns.
    unsafe fn multiply_floats<T: FloatFormat>(product: &Product<'_>, x: &[f32], rows: Range<usize>);

    /// Unpacks the weights at `place`: [`fill()`], compiled for the level.
    ///
    /// # Safety
    /// The processor has the level's instructions.
    unsafe fn fill<F: PackedFormat>(
        packed: &mut PackedTile,
        matrix: &Matrix<'_>,
        place: &TilePlace,
    );

    /// Computes the columns `rows` of the output for quantized weights.
    ///
    /// # Safety
    /// The processor has the level's instructions, and no other thread writes these columns.
    unsafe fn multiply<F: PackedFormat>(
        product: &Product<'_>,
        x: &QuantizedRows<'_>,
        rows: Range<usize>,
    );

    /// Adds the packed tile's products with `ROWS` rows of activations from `first` on to the output, or sets it
    /// where the packed tile's columns are the first: [`tile()`], compiled for the level.
    ///
    /// # Safety
    /// The processor has the level's instructions; `first + ROWS` rows of activations exist; `place` is of the
    /// piece that this thread computes.
    unsafe fn tile<Q: Quants, const ROWS: usize>(
        packed: &PackedTile,
        place: &TilePlace,
        x: &QuantizedRows<'_>,
        first: usize,
        product: &Product<'_>,
    );

    /// Computes the columns `rows` of the only row of the output, for a format that says so ([`PackedFormat::ONE_ROW`]): [`one_row()`],
    /// compiled for the level.
    ///
    /// # Safety
    /// The processor has the level's instructions, and no other thread writes these columns.
    unsafe fn one_row<F: PackedFormat>(
        product: &Product<'_>,
        x: &QuantizedRows<'_>,
        rows: Range<usize>,
    );

    /// Whether the format's offset is subtracted before multiplying, which makes the values signed bytes; `start` is 0 then.
    #[inline(always)]
    fn takes_offset<Q: Quants>() -> bool {
        Self::SIGNED && are_signed_bytes::<Q>()
    }

    /// `start` plus the sums of one group's products, for each row of activations and for as many weight rows as a register holds.
    ///
    /// # Safety
    /// The processor has the level's instructions. Readable are: a group of the weight rows at `weights`, in the order of
    /// [`PackedTile::values`] and aligned to the register; and a group of `ROWS` rows of activations, `x_stride` apart, at
    /// `x_quads`.
    unsafe fn sums<Q: Quants, const ROWS: usize>(
        weights: *const u8,
        x_quads: *const i8,
        x_stride: usize,
        start: [i32; ROWS],
    ) -> [Self::Floats; ROWS];

    /// The weight rows that [`one_row`] takes at a time. On x86-64, what one register holds: SSE4.1 and AVX2 have only 16, and with more rows at a
    /// time half of the sums would be on the stack. arm64 has 32, and takes four registers.
    type OneRow: Words;
    type Sums: Sums<Self::OneRow>;
}

/// Adds up a group's products of weight rows and one row of activations, as they come. As with [`Words`]: only for code that
/// runs where the processor has the level's instructions.
pub(super) trait Sums<W>: Copy {
    fn new() -> Self;

    /// Adds the products of four columns side by side: values, minus the offset if [`Integers::takes_offset`], times activations.
    fn add_quad<Q: Quants>(&mut self, four: W, x_four: i32);

    fn whole(self) -> W;
}

/// How many products, each of a value (of 8 bits: signed) and an activation of -127 to 127, fit in 16 bits.
pub(super) const fn products_without_overflow<Q: Quants>() -> usize {
    let largest = match are_signed_bytes::<Q>() {
        true => 128,
        false => (1 << Q::BITS) - 1,
    };
    i16::MAX as usize / (127 * largest)
}

/// Four activations side by side.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub(super) unsafe fn read_quad(x_four: *const i8) -> i32 {
    // SAFETY: by the contract.
    unsafe { x_four.cast::<i32>().read_unaligned() }
}

/// Computes the columns `rows` of the product's output with the kernels of `I`.
///
/// # Safety
/// The processor has the instructions of `I`, and no other thread writes these columns meanwhile.
#[inline(always)]
pub(super) unsafe fn multiply_by_format<I: Integers>(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match product.activations {
            Activations::Float(x) => match product.matrix.ggml_type() {
                GgmlType::F32 => I::Base::multiply_floats::<floats::F32>(product, x, rows),
                GgmlType::F16 => I::Base::multiply_floats::<floats::F16>(product, x, rows),
                GgmlType::BF16 => I::Base::multiply_floats::<floats::Bf16>(product, x, rows),
                other => no_kernel(other),
            },
            Activations::Quantized(x) => with_block_format!(
                product.matrix.ggml_type(),
                Format => I::multiply::<Format>(product, &x, rows),
                else no_kernel(product.matrix.ggml_type()),
            ),
        }
    }
}

/// The only body of [`Integers::multiply`]; inlined there.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn multiply<I: Integers, F: PackedFormat>(
    product: &Product<'_>,
    x: &QuantizedRows<'_>,
    rows: Range<usize>,
) {
    const { assert!(I::Words::COUNT == TILE_ROWS && TILE_ROWS.is_multiple_of(I::Floats::COUNT)) };
    if product.n == 1 && F::ONE_ROW {
        // SAFETY: passed on from the caller.
        return unsafe { I::one_row::<F>(product, x, rows) };
    }
    let mut packed = PackedTile {
        values: [0; TILE_ROWS * COLUMNS],
        scales: [0.0; TILE_ROWS * COLUMNS / MIN_GROUP],
        minimums: [0.0; TILE_ROWS * COLUMNS / MIN_GROUP],
    };
    for (row, count) in tiles(rows, TILE_ROWS) {
        for column in (0..x.cols).step_by(COLUMNS) {
            let place = TilePlace {
                row,
                rows: count,
                columns: column..(column + COLUMNS).min(x.cols),
            };
            // SAFETY: passed on from the caller.
            unsafe {
                I::Base::fill::<F>(&mut packed, &product.matrix, &place);
                let mut first = 0;
                while first < product.n {
                    let left = product.n - first;
                    // A constant of its own, so that no tiles are compiled that the level does not use.
                    if const { I::TILE >= 8 } && left >= 8 {
                        I::tile::<F::Quants, 8>(&packed, &place, x, first, product);
                        first += 8;
                    } else if left >= 4 {
                        I::tile::<F::Quants, 4>(&packed, &place, x, first, product);
                        first += 4;
                    } else if left >= 2 {
                        I::tile::<F::Quants, 2>(&packed, &place, x, first, product);
                        first += 2;
                    } else {
                        I::tile::<F::Quants, 1>(&packed, &place, x, first, product);
                        first += 1;
                    }
                }
            }
        }
    }
}

/// The only body of [`Integers::fill`]; inlined there.
///
/// # Safety
/// The processor has the instructions of `W`.
#[inline(always)]
pub(super) unsafe fn fill<W: Words, F: PackedFormat>(
    packed: &mut PackedTile,
    matrix: &Matrix<'_>,
    place: &TilePlace,
) {
    const { assert!(F::PART_GROUPS * F::PARTS * F::GROUP == F::BLOCK) };
    let mut rows = place.blocks(matrix, F::BYTES, F::BLOCK);
    let mut next = Next::of(matrix, place, TILE_ROWS, F::BYTES, F::BLOCK, F::PARTS);
    let values = packed.values.chunks_exact_mut(TILE_ROWS * F::BLOCK);
    let scales = packed
        .scales
        .chunks_exact_mut(TILE_ROWS * F::BLOCK / F::GROUP);
    let minimums = packed
        .minimums
        .chunks_exact_mut(TILE_ROWS * F::BLOCK / F::GROUP);
    let places = values.zip(scales).zip(minimums);
    let places = places.take(place.columns.len() / F::BLOCK);
    for ((values, scales), minimums) in places {
        let mut to = Destination {
            values: values.as_mut_ptr(),
            scales: scales.as_mut_ptr(),
            minimums: minimums.as_mut_ptr(),
            next,
        };
        // SAFETY: a block of each row that was not yet passed, and its place, part by part.
        unsafe {
            F::scales::<W>(&rows, &mut to);
            for part in 0..F::PARTS {
                F::values::<W>(&rows, part, &mut to);
                to.values = to.values.add(TILE_ROWS * F::BLOCK / F::PARTS);
                to.next.advance();
            }
            rows.advance(F::BYTES);
        }
        next = to.next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_fill_no_tile_are_taken_one_by_one() {
        let of = |rows, height| tiles(rows, height).collect::<Vec<_>>();
        assert_eq!(of(0..0, 8), []);
        assert_eq!(of(5..7, 8), [(5, 1), (6, 1)]);
        assert_eq!(of(16..32, 8), [(16, 8), (24, 8)]);
        assert_eq!(of(3..20, 8), [(3, 8), (11, 8), (19, 1)]);
    }
}
