//! The product with one row of activations (decoding for one sequence). Each part of a block is multiplied while it is unpacked and never
//! stored, because nothing uses it again. Additions are in the order of [`tile()`](super::tile()), so the results are the same to the bit.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::activations::QuantizedRows;
use super::super::lanes::{Lanes, Words};
use super::super::product::{Product, TILE_ROWS};
use super::{Integers, Next, PackedFormat, Sums, TilePlace, Unpacked, read_quad, tiles};

/// Groups of a part and of a block, at most. What a format does not have is never computed, since the compiler knows the number of each.
const MOST_PART_GROUPS: usize = 8;
const MOST_GROUPS: usize = 16;

type Floats<I> = <<I as Integers>::OneRow as Words>::Floats;

/// Computes the columns `rows` of the only row of the output for quantized weights.
///
/// # Safety
/// The processor has the instructions of `I`, and no other thread writes these columns.
#[inline(always)]
pub(in super::super) unsafe fn multiply<I: Integers, F: PackedFormat>(
    product: &Product<'_>,
    x: &QuantizedRows<'_>,
    rows: Range<usize>,
) {
    const { assert!(TILE_ROWS.is_multiple_of(I::OneRow::COUNT)) };
    // Nothing else is compiled for other formats.
    assert!(F::ONE_ROW, "a format that takes no packed tile");
    const { assert!(!F::ONE_ROW || F::PART_GROUPS <= MOST_PART_GROUPS) };
    const { assert!(!F::ONE_ROW || F::PART_GROUPS * F::PARTS <= MOST_GROUPS) };
    const { assert!(F::PART_GROUPS * F::PARTS * F::GROUP == F::BLOCK) };
    for (row, count) in tiles(rows, I::OneRow::COUNT) {
        let place = TilePlace {
            row,
            rows: count,
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
    x: &QuantizedRows<'_>,
    place: &TilePlace,
) -> Floats<I> {
    let mut weights = place.blocks(&product.matrix, F::BYTES, F::BLOCK);
    let mut totals = Floats::<I>::splat(0.0);
    debug_assert!(x.cols.is_multiple_of(F::BLOCK) && x.groups == x.cols / F::GROUP);
    let mut scales = [Lanes::splat(0.0); MOST_GROUPS];
    let mut minimums = [Lanes::splat(0.0); MOST_GROUPS];
    let mut products = Multiplied::<I, F> {
        x: x.values.as_ptr(),
        sums: [I::Sums::new(); MOST_PART_GROUPS],
        scales: &mut scales,
        minimums: &mut minimums,
        next: Next::of(
            &product.matrix,
            place,
            I::OneRow::COUNT,
            F::BYTES,
            F::BLOCK,
            F::PARTS,
        ),
        format: PhantomData,
    };
    for block in 0..x.cols / F::BLOCK {
        // SAFETY: a block of each row that was not yet passed; as many activations and groups of them; a block has no more groups than there is
        // room for, as `multiply` asserts; else the caller's promise.
        unsafe {
            F::scales::<I::OneRow>(&weights, &mut products);
            for part in 0..F::PARTS {
                products.sums = [I::Sums::new(); MOST_PART_GROUPS];
                F::values::<I::OneRow>(&weights, part, &mut products);
                // A loop would keep the sums in memory.
                const { assert!(MOST_PART_GROUPS == 8) };
                unroll!(group in 0 1 2 3 4 5 6 7 {
                    if group < F::PART_GROUPS {
                        let of_block = part * F::PART_GROUPS + group;
                        let at = block * (F::BLOCK / F::GROUP) + of_block;
                        let start = match F::OFFSET != 0 && !I::takes_offset::<F::Quants>() {
                            true => F::OFFSET * *x.negated_sums.get_unchecked(at),
                            false => 0,
                        };
                        let sums = products.sums[group].whole().add(start).to_floats();
                        let x_scale = Lanes::splat(*x.scales.get_unchecked(at));
                        let scale = products.scales.get_unchecked(of_block).multiply(x_scale);
                        totals = sums.multiply_add(scale, totals);
                        if F::AFFINE {
                            let x_sum = Lanes::splat(*x.scaled_sums.get_unchecked(at));
                            let minimum = *products.minimums.get_unchecked(of_block);
                            totals = minimum.multiply_add(x_sum, totals);
                        }
                    }
                });
                products.x = products.x.add(F::BLOCK / F::PARTS);
                products.next.advance();
            }
            weights.advance(F::BYTES);
        }
    }
    totals
}

/// A part's products with the activations, and the scales of its block.
struct Multiplied<'a, I: Integers, F> {
    x: *const i8,
    sums: [I::Sums; MOST_PART_GROUPS],
    // Behind references: what a variable indexes is in memory, and as fields they would take the sums with them.
    scales: &'a mut [Floats<I>; MOST_GROUPS],
    minimums: &'a mut [Floats<I>; MOST_GROUPS],
    next: Next,
    format: PhantomData<F>,
}

impl<I: Integers, F: PackedFormat> Unpacked<I::OneRow> for Multiplied<'_, I, F> {
    #[inline(always)]
    unsafe fn values(&mut self, quad: usize, words: I::OneRow) {
        self.next.ask::<I::OneRow>(quad);
        // SAFETY: columns of the part, of which there are as many activations.
        let x_four = unsafe { read_quad(self.x.add(4 * quad)) };
        let four = match I::takes_offset::<F::Quants>() {
            true => words.xor(0x8080_8080),
            false => words,
        };
        self.sums[4 * quad / F::GROUP].add_quad::<F::Quants>(four, x_four);
    }

    #[inline(always)]
    unsafe fn scale(&mut self, group: usize, scales: Floats<I>) {
        self.scales[group] = scales;
    }

    #[inline(always)]
    unsafe fn minimum(&mut self, group: usize, minimums: Floats<I>) {
        self.minimums[group] = minimums;
    }
}
