//! One KV head's part of a block of positions, as attention reads it: a definition for each number format, written once for all levels.

use half::f16;

use super::super::lanes::Lanes;
use super::super::numerics::{LANES, f16_to_f32};
use super::{BLOCK_POSITIONS, KEY_LANES};

/// Numbers of a head that share a scale in Q8_0.
pub(super) const SCALE_DIMS: usize = 32;

/// The keys and values of one head in a block.
pub(super) trait HeadBlock: Copy {
    fn head_dim(&self) -> usize;

    fn value_dim(&self) -> usize;

    /// The products of `QUERIES` queries, rows of `head_dim` from `queries` on, with the 16 keys of a group.
    ///
    /// # Safety
    /// The processor has the instructions of `L`; so below. The queries are readable, and `group` is one of the block's.
    unsafe fn scores<L: Lanes, const QUERIES: usize>(
        &self,
        group: usize,
        queries: *const f32,
    ) -> [L; QUERIES];

    /// Makes `scaled` the weights with which [`values`](Self::values) of the dimensions from `dim` on are summed. Called for each 16
    /// dimensions in order, with `scaled` as the last call left it, and `weights` at first. Numbers without scales leave it so.
    ///
    /// # Safety
    /// `dim` is below the value's dimensions.
    #[inline(always)]
    unsafe fn scale_weights<L: Lanes, const QUERIES: usize>(
        &self,
        _dim: usize,
        _weights: &[[f32; BLOCK_POSITIONS]; QUERIES],
        _scaled: &mut [[f32; BLOCK_POSITIONS]; QUERIES],
    ) {
    }

    /// 16 numbers of the value at `position`, from `dim` on; zeros beyond it.
    ///
    /// # Safety
    /// `position` is one of the block's, `dim` below the value's dimensions and a multiple of 16.
    unsafe fn values<L: Lanes>(&self, position: usize, dim: usize) -> L;
}

#[derive(Clone, Copy)]
pub(super) struct F16Head<'a> {
    head_dim: usize,
    keys: &'a [f16],
    values: &'a [f16],
}

/// Bytes, each times the scale of its position and dimensions.
#[derive(Clone, Copy)]
pub(super) struct Q8_0Head<'a> {
    head_dim: usize,
    keys: &'a [i8],
    key_scales: &'a [f16],
    values: &'a [i8],
    value_scales: &'a [f16],
}

/// Rows of which the first numbers are values, too. They lie position after position, so that both scores and sums of values read whole
/// registers of a row.
#[derive(Clone, Copy)]
pub(super) struct LatentF16Head<'a> {
    head_dim: usize,
    value_dim: usize,
    rows: &'a [f16],
}

/// The same of bytes, each times the scale of its position and dimensions.
#[derive(Clone, Copy)]
pub(super) struct LatentQ8_0Head<'a> {
    head_dim: usize,
    value_dim: usize,
    rows: &'a [i8],
    scales: &'a [f16],
}

impl<'a> F16Head<'a> {
    pub(super) fn new(head_dim: usize, keys: &'a [f16], values: &'a [f16]) -> Self {
        let len = BLOCK_POSITIONS * head_dim;
        assert!(head_dim > 0 && keys.len() == len && values.len() == len);
        Self {
            head_dim,
            keys,
            values,
        }
    }
}

impl<'a> Q8_0Head<'a> {
    pub(super) fn new(
        head_dim: usize,
        (keys, key_scales): (&'a [i8], &'a [f16]),
        (values, value_scales): (&'a [i8], &'a [f16]),
    ) -> Self {
        let len = BLOCK_POSITIONS * head_dim;
        assert!(head_dim > 0 && head_dim.is_multiple_of(SCALE_DIMS));
        assert!(keys.len() == len && values.len() == len);
        assert!(key_scales.len() == len / SCALE_DIMS && value_scales.len() == len / SCALE_DIMS);
        Self {
            head_dim,
            keys,
            key_scales,
            values,
            value_scales,
        }
    }
}

impl<'a> LatentF16Head<'a> {
    pub(super) fn new(head_dim: usize, value_dim: usize, rows: &'a [f16]) -> Self {
        assert_are_blocks(head_dim, value_dim);
        assert!(rows.len() == BLOCK_POSITIONS * head_dim);
        Self {
            head_dim,
            value_dim,
            rows,
        }
    }
}

impl<'a> LatentQ8_0Head<'a> {
    pub(super) fn new(
        head_dim: usize,
        value_dim: usize,
        (rows, scales): (&'a [i8], &'a [f16]),
    ) -> Self {
        assert_are_blocks(head_dim, value_dim);
        let len = BLOCK_POSITIONS * head_dim;
        assert!(rows.len() == len && scales.len() == len / SCALE_DIMS);
        Self {
            head_dim,
            value_dim,
            rows,
            scales,
        }
    }
}

fn assert_are_blocks(head_dim: usize, value_dim: usize) {
    let are = [head_dim, value_dim].map(|dim| dim > 0 && dim.is_multiple_of(SCALE_DIMS));
    assert!(are == [true; 2] && value_dim <= head_dim);
}

impl HeadBlock for F16Head<'_> {
    fn head_dim(&self) -> usize {
        self.head_dim
    }

    fn value_dim(&self) -> usize {
        self.head_dim
    }

    #[inline(always)]
    unsafe fn scores<L: Lanes, const QUERIES: usize>(
        &self,
        group: usize,
        queries: *const f32,
    ) -> [L; QUERIES] {
        let mut scores = [L::splat(0.0); QUERIES];
        for dim in 0..self.head_dim {
            // SAFETY: the block has this group and dimension, the queries are readable by the contract.
            unsafe {
                let place = (group * self.head_dim + dim) * KEY_LANES;
                let keys = L::load_halves(self.keys.as_ptr().add(place));
                let query = queries.add(dim);
                for (index, score) in scores.iter_mut().enumerate() {
                    let number = L::splat(*query.add(index * self.head_dim));
                    *score = keys.multiply_add(number, *score);
                }
            }
        }
        scores
    }

    #[inline(always)]
    unsafe fn values<L: Lanes>(&self, position: usize, dim: usize) -> L {
        let from = position * self.head_dim + dim;
        // SAFETY: a whole register of the position's values, or a copy of what is left of them.
        unsafe {
            if dim + LANES <= self.head_dim {
                return L::load_halves(self.values.as_ptr().add(from));
            }
            let mut padded = [f16::ZERO; LANES];
            let rest = &self.values[from..from + self.head_dim - dim];
            padded[..rest.len()].copy_from_slice(rest);
            L::load_halves(padded.as_ptr())
        }
    }
}

impl HeadBlock for Q8_0Head<'_> {
    fn head_dim(&self) -> usize {
        self.head_dim
    }

    fn value_dim(&self) -> usize {
        self.head_dim
    }

    #[inline(always)]
    unsafe fn scores<L: Lanes, const QUERIES: usize>(
        &self,
        group: usize,
        queries: *const f32,
    ) -> [L; QUERIES] {
        let mut scores = [L::splat(0.0); QUERIES];
        for block in 0..self.head_dim / SCALE_DIMS {
            let mut products = [L::splat(0.0); QUERIES];
            for dim in block * SCALE_DIMS..(block + 1) * SCALE_DIMS {
                // SAFETY: the block has this group and dimension, the queries are readable by the contract.
                unsafe {
                    let place = (group * self.head_dim + dim) * KEY_LANES;
                    let keys = L::load_bytes(self.keys.as_ptr().add(place));
                    let query = queries.add(dim);
                    for (index, product) in products.iter_mut().enumerate() {
                        let number = L::splat(*query.add(index * self.head_dim));
                        *product = keys.multiply_add(number, *product);
                    }
                }
            }
            // SAFETY: 16 of the 64 scales of these dimensions.
            let scales = unsafe {
                let place = block * BLOCK_POSITIONS + group * KEY_LANES;
                L::load_halves(self.key_scales.as_ptr().add(place))
            };
            for (score, product) in scores.iter_mut().zip(products) {
                *score = product.multiply_add(scales, *score);
            }
        }
        scores
    }

    #[inline(always)]
    unsafe fn scale_weights<L: Lanes, const QUERIES: usize>(
        &self,
        dim: usize,
        weights: &[[f32; BLOCK_POSITIONS]; QUERIES],
        scaled: &mut [[f32; BLOCK_POSITIONS]; QUERIES],
    ) {
        // SAFETY: passed on from the caller.
        unsafe { with_scales::<L, QUERIES>(self.value_scales, dim, weights, scaled) };
    }

    #[inline(always)]
    unsafe fn values<L: Lanes>(&self, position: usize, dim: usize) -> L {
        // SAFETY: heads are of whole registers.
        unsafe { L::load_bytes(self.values.as_ptr().add(position * self.head_dim + dim)) }
    }
}

impl HeadBlock for LatentF16Head<'_> {
    fn head_dim(&self) -> usize {
        self.head_dim
    }

    fn value_dim(&self) -> usize {
        self.value_dim
    }

    #[inline(always)]
    unsafe fn scores<L: Lanes, const QUERIES: usize>(
        &self,
        group: usize,
        queries: *const f32,
    ) -> [L; QUERIES] {
        let mut scores = [[0.0; KEY_LANES]; QUERIES];
        for lane in 0..KEY_LANES {
            let row = (group * KEY_LANES + lane) * self.head_dim;
            let mut products = [L::splat(0.0); QUERIES];
            for step in 0..self.head_dim / LANES {
                let dim = step * LANES;
                // SAFETY: the block has this position and dimension, the queries are readable by the contract.
                unsafe {
                    let keys = L::load_halves(self.rows.as_ptr().add(row + dim));
                    let query = queries.add(dim);
                    for (index, product) in products.iter_mut().enumerate() {
                        let numbers = L::load(query.add(index * self.head_dim));
                        *product = keys.multiply_add(numbers, *product);
                    }
                }
            }
            for (scores, product) in scores.iter_mut().zip(&products) {
                scores[lane] = product.sum();
            }
        }
        side_by_side(&scores)
    }

    #[inline(always)]
    unsafe fn values<L: Lanes>(&self, position: usize, dim: usize) -> L {
        // SAFETY: values are of whole registers.
        unsafe { L::load_halves(self.rows.as_ptr().add(position * self.head_dim + dim)) }
    }
}

impl HeadBlock for LatentQ8_0Head<'_> {
    fn head_dim(&self) -> usize {
        self.head_dim
    }

    fn value_dim(&self) -> usize {
        self.value_dim
    }

    #[inline(always)]
    unsafe fn scores<L: Lanes, const QUERIES: usize>(
        &self,
        group: usize,
        queries: *const f32,
    ) -> [L; QUERIES] {
        let mut scores = [[0.0; KEY_LANES]; QUERIES];
        for lane in 0..KEY_LANES {
            let position = group * KEY_LANES + lane;
            let mut sums = [L::splat(0.0); QUERIES];
            for block in 0..self.head_dim / SCALE_DIMS {
                let dim = block * SCALE_DIMS;
                // SAFETY: the block has this position, its scales and dimensions; the queries are readable by the contract.
                unsafe {
                    let scale = self
                        .scales
                        .get_unchecked(block * BLOCK_POSITIONS + position);
                    let scale = L::splat(f16_to_f32(scale.to_bits()));
                    let row = self.rows.as_ptr().add(position * self.head_dim + dim);
                    let keys = [L::load_bytes(row), L::load_bytes(row.add(LANES))];
                    let keys = [keys[0].multiply(scale), keys[1].multiply(scale)];
                    let query = queries.add(dim);
                    for (index, sum) in sums.iter_mut().enumerate() {
                        let query = query.add(index * self.head_dim);
                        *sum = keys[0].multiply_add(L::load(query), *sum);
                        *sum = keys[1].multiply_add(L::load(query.add(LANES)), *sum);
                    }
                }
            }
            for (scores, sum) in scores.iter_mut().zip(&sums) {
                scores[lane] = sum.sum();
            }
        }
        side_by_side(&scores)
    }

    #[inline(always)]
    unsafe fn scale_weights<L: Lanes, const QUERIES: usize>(
        &self,
        dim: usize,
        weights: &[[f32; BLOCK_POSITIONS]; QUERIES],
        scaled: &mut [[f32; BLOCK_POSITIONS]; QUERIES],
    ) {
        // SAFETY: passed on from the caller.
        unsafe { with_scales::<L, QUERIES>(self.scales, dim, weights, scaled) };
    }

    #[inline(always)]
    unsafe fn values<L: Lanes>(&self, position: usize, dim: usize) -> L {
        // SAFETY: values are of whole registers.
        unsafe { L::load_bytes(self.rows.as_ptr().add(position * self.head_dim + dim)) }
    }
}

/// Where the dimensions from `dim` on have other scales than those before, makes `scaled` the weights times these.
///
/// # Safety
/// The processor has the instructions of `L`, and `scales` are those of 64 positions for each 32 dimensions, those at `dim` among them.
#[inline(always)]
unsafe fn with_scales<L: Lanes, const QUERIES: usize>(
    scales: &[f16],
    dim: usize,
    weights: &[[f32; BLOCK_POSITIONS]; QUERIES],
    scaled: &mut [[f32; BLOCK_POSITIONS]; QUERIES],
) {
    if !dim.is_multiple_of(SCALE_DIMS) {
        return;
    }
    let first = dim / SCALE_DIMS * BLOCK_POSITIONS;
    for position in (0..BLOCK_POSITIONS).step_by(LANES) {
        // SAFETY: 16 of the 64 scales of these dimensions, and 16 of the 64 weights of a query.
        unsafe {
            let scales = L::load_halves(scales.as_ptr().add(first + position));
            for (weights, scaled) in weights.iter().zip(scaled.iter_mut()) {
                L::load(weights.as_ptr().add(position))
                    .multiply(scales)
                    .store(scaled.as_mut_ptr().add(position));
            }
        }
    }
}

/// The scores of each query in a register.
#[inline(always)]
fn side_by_side<L: Lanes, const QUERIES: usize>(
    scores: &[[f32; KEY_LANES]; QUERIES],
) -> [L; QUERIES] {
    let mut registers = [L::splat(0.0); QUERIES];
    for (register, scores) in registers.iter_mut().zip(scores) {
        // SAFETY: sixteen numbers.
        *register = unsafe { L::load(scores.as_ptr()) };
    }
    registers
}
