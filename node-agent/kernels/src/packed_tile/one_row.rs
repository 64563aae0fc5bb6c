//! The product with one row of activations (decoding for one sequence), for formats whose blocks are groups. Each block is multiplied
//! while it is unpacked and never stored, because nothing uses it again. (Larger blocks have more sums than there are registers: packed
//! tiles are as fast.) Additions are in the order of [`tile()`](super::tile()), so the results are the same to the bit.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::activations::QuantizedRows;
use super::super::formats::BlockFormat;
use super::super::lanes::{Lanes, Words};
use super::super::product::{Product, TILE_ROWS};
use super::{Integers, Next, PackedFormat, Sums, TilePlace, Unpacked, advance, read_quad};

type Floats<I> = <<I as Integers>::Words as Words>::Floats;

/// Computes the columns `rows` of the only row of the output for quantized weights.
///
/// # Safety
/// The processor has the instructions of `I`, and no other thread writes these columns.
#[inline(always)]
pub(in super::super) unsafe fn multiply<I: Integers, F: PackedFormat>(
    product: &Product<'_>,
    x: &QuantizedRows,
    rows: Range<usize>,
) {
    const { assert!(I::Words::COUNT == TILE_ROWS) };
    assert!(F::BLOCK == F::GROUP, "a block is a group");
    for row in rows.clone().step_by(TILE_ROWS) {
        let place = TilePlace {
            row,
            rows: TILE_ROWS.min(rows.end - row),
            columns: 0..x.cols,
        };
        let mut lanes = [0.0; TILE_ROWS];
        // SAFETY: passed on from the caller; 16 places.
        unsafe {
            totals::<I, F>(product, x, &place).store(lanes.as_mut_ptr());
            let to = product.columns(0, place.row, place.rows);
            to.copy_from_slice(&lanes[..place.rows]);
        }
    }
}

/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn totals<I: Integers, F: PackedFormat>(
    product: &Product<'_>,
    x: &QuantizedRows,
    place: &TilePlace,
) -> Floats<I> {
    let mut weights = place.rows(&product.matrix, F::BYTES, F::BLOCK);
    let mut next = Next::of(&product.matrix, place, F::BYTES, F::BLOCK);
    let mut totals = Floats::<I>::splat(0.0);
    let sums = x.negated_sums.iter().zip(&x.scaled_sums);
    let groups = x.values.chunks_exact(F::GROUP).zip(&x.scales).zip(sums);
    for ((x_values, x_scale), (x_sum, x_scaled_sum)) in groups {
        // SAFETY: a block of each row that was not yet passed; as many activations; else the caller's promise.
        unsafe {
            let mut block = Multiplied::<I, F> {
                x: x_values.as_ptr(),
                sums: I::Sums::new(),
                scales: Lanes::splat(0.0),
                minimums: Lanes::splat(0.0),
                next,
                format: PhantomData,
            };
            F::unpack_rows::<I::Words>(&weights, &mut block);
            let start = match F::OFFSET != 0 && !I::takes_offset::<F>() {
                true => F::OFFSET * x_sum,
                false => 0,
            };
            let sums = block.sums.whole().add(start).to_floats();
            let scales = block.scales.multiply(Lanes::splat(*x_scale));
            totals = sums.multiply_add(scales, totals);
            if F::AFFINE {
                totals = (block.minimums).multiply_add(Lanes::splat(*x_scaled_sum), totals);
            }
            advance(&mut weights, F::BYTES);
        }
        next.advance(F::BYTES);
    }
    totals
}

/// A block's products with the activations.
struct Multiplied<I: Integers, F> {
    x: *const i8,
    sums: I::Sums,
    scales: Floats<I>,
    minimums: Floats<I>,
    next: Next,
    format: PhantomData<F>,
}

impl<I: Integers, F: BlockFormat> Unpacked<I::Words> for Multiplied<I, F> {
    #[inline(always)]
    unsafe fn values(&mut self, quad: usize, words: I::Words) {
        self.next.ask::<I::Words>(quad);
        // SAFETY: columns of the block, of which there are as many activations.
        let x_four = unsafe { read_quad(self.x.add(4 * quad)) };
        let four = match I::takes_offset::<F>() {
            true => words.xor(0x8080_8080),
            false => words,
        };
        self.sums.add_quad::<F>(four, x_four);
    }

    #[inline(always)]
    unsafe fn scale(&mut self, _only: usize, scales: Floats<I>) {
        self.scales = scales;
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, _only: usize, minimums: Floats<I>) {
        self.minimums = minimums;
    }
}
