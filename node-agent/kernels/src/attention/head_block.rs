//! One KV head's part of a block of positions, as attention reads it: a definition for each number format, written once for all levels.

use half::f16;

use super::super::lanes::Lanes;
use super::super::numerics::LANES;
use super::{BLOCK_POSITIONS, KEY_LANES};

/// Numbers of a head that share a scale in Q8_0.
pub(super) const SCALE_DIMS: usize = 32;

/// The keys and values of one head in a block.
pub(super) trait HeadBlock: Copy {
    fn head_dim(&self) -> usize;

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
    /// dimensions in order, with `scaled` as the last call left it, and `weights` at first.
    ///
    /// # Safety
    /// `dim` is below the head's dimensions.
    unsafe fn scale_weights<L: Lanes, const QUERIES: usize>(
        &self,
        dim: usize,
        weights: &[[f32; BLOCK_POSITIONS]; QUERIES],
        scaled: &mut [[f32; BLOCK_POSITIONS]; QUERIES],
    );

    /// 16 numbers of the value at `position`, from `dim` on; zeros beyond the head.
    ///
    /// # Safety
    /// `position` is one of the block's, `dim` below the head's dimensions and a multiple of 16.
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

impl HeadBlock for F16Head<'_> {
    fn head_dim(&self) -> usize {
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
    unsafe fn scale_weights<L: Lanes, const QUERIES: usize>(
        &self,
        _dim: usize,
        _weights: &[[f32; BLOCK_POSITIONS]; QUERIES],
        _scaled: &mut [[f32; BLOCK_POSITIONS]; QUERIES],
    ) {
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
        if !dim.is_multiple_of(SCALE_DIMS) {
            return;
        }
        let first = dim / SCALE_DIMS * BLOCK_POSITIONS;
        for position in (0..BLOCK_POSITIONS).step_by(LANES) {
            // SAFETY: 16 of the 64 scales of these dimensions, and 16 of the 64 weights of a query.
            unsafe {
                let scales = L::load_halves(self.value_scales.as_ptr().add(first + position));
                for (weights, scaled) in weights.iter().zip(scaled.iter_mut()) {
                    L::load(weights.as_ptr().add(position))
                        .multiply(scales)
                        .store(scaled.as_mut_ptr().add(position));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn values<L: Lanes>(&self, position: usize, dim: usize) -> L {
        // SAFETY: heads are of whole registers.
        unsafe { L::load_bytes(self.values.as_ptr().add(position * self.head_dim + dim)) }
    }
}
