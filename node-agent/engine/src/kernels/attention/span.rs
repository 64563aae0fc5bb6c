//! The arithmetic of attention over one block of positions for a few queries of one KV head, and how such partial
//! results are folded together. One body, compiled for every level.

use half::f16;

use super::super::level::{Kind, Level};
use super::super::numerics::{LANES, exp, f16_to_f32, multiply_add, sum_lanes};
use super::{BLOCK_POSITIONS, KEY_LANES};

/// The most queries taken together.
pub(super) const MAX_QUERIES: usize = 8;

/// The attention of some queries over some positions, before it is divided by the sum of the weights.
pub(super) struct Partial {
    head_dim: usize,
    /// Per query: the largest score so far, the sum of `e^(score - largest)`.
    largest: [f32; MAX_QUERIES],
    sum: [f32; MAX_QUERIES],
    /// Per query: the values weighted with `e^(score - largest)`.
    values: Vec<f32>,
}

impl Partial {
    pub(super) fn new(queries: usize, head_dim: usize) -> Self {
        Partial {
            head_dim,
            largest: [f32::NEG_INFINITY; MAX_QUERIES],
            sum: [0.0; MAX_QUERIES],
            values: vec![0.0; queries * head_dim],
        }
    }

    pub(super) fn clear(&mut self) {
        self.largest = [f32::NEG_INFINITY; MAX_QUERIES];
        self.sum = [0.0; MAX_QUERIES];
        self.values.fill(0.0);
    }

    /// Adds the later positions of `next`.
    pub(super) fn fold(&mut self, _level: Level, next: &Partial) {
        for (query, values) in self.values.chunks_exact_mut(self.head_dim).enumerate() {
            if next.largest[query] == f32::NEG_INFINITY {
                continue;
            }
            let next_values = &next.values[query * self.head_dim..][..self.head_dim];
            let largest = self.largest[query].max(next.largest[query]);
            let keep = exp(self.largest[query] - largest);
            let take = exp(next.largest[query] - largest);
            self.largest[query] = largest;
            self.sum[query] = self.sum[query] * keep + next.sum[query] * take;
            for (value, next) in values.iter_mut().zip(next_values) {
                *value = *value * keep + next * take;
            }
        }
    }

    /// Writes the finished attention of one query.
    pub(super) fn write(&self, query: usize, out: &mut [f32]) {
        let values = &self.values[query * self.head_dim..][..self.head_dim];
        let inverse = 1.0 / self.sum[query];
        for (out, value) in out.iter_mut().zip(values) {
            *out = value * inverse;
        }
    }
}

/// Folds one block of positions into `chunk`: `queries` are rows of `head_dim`, scaled; `keys` and `values` are
/// one KV head's part of a block; of the block's positions, query `i` sees the first `visible[i]`.
pub(super) fn add_block(
    level: Level,
    queries: &[f32],
    keys: &[f16],
    values: &[f16],
    visible: &[usize; MAX_QUERIES],
    chunk: &mut Partial,
) {
    match level.kind() {
        Kind::Scalar => body(queries, keys, values, visible, chunk),
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => body(queries, keys, values, visible, chunk),
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512Vnni => body(queries, keys, values, visible, chunk),
    }
}

#[inline(always)]
fn body(
    queries: &[f32],
    keys: &[f16],
    values: &[f16],
    visible: &[usize; MAX_QUERIES],
    chunk: &mut Partial,
) {
    let head_dim = chunk.head_dim;
    let mut weighted = vec![0.0; head_dim];
    for (query, q) in queries.chunks_exact(head_dim).enumerate() {
        let visible = visible[query];
        if visible == 0 {
            continue;
        }
        let mut scores = [0.0_f32; BLOCK_POSITIONS];
        let groups = keys.chunks_exact(KEY_LANES * head_dim);
        for (scores, keys) in scores.chunks_exact_mut(KEY_LANES).zip(groups) {
            for (q, keys) in q.iter().zip(keys.chunks_exact(KEY_LANES)) {
                for (score, key) in scores.iter_mut().zip(keys) {
                    *score = multiply_add(*q, f16_to_f32(key.to_bits()), *score);
                }
            }
        }
        scores[visible..].fill(f32::NEG_INFINITY);
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut lanes = [0.0; LANES];
        for scores in scores.chunks_exact_mut(LANES) {
            for (score, lane) in scores.iter_mut().zip(&mut lanes) {
                *score = exp(*score - largest);
                *lane += *score;
            }
        }
        let sum = sum_lanes(lanes);
        weighted.fill(0.0);
        for (weight, values) in scores[..visible].iter().zip(values.chunks_exact(head_dim)) {
            for (weighted, value) in weighted.iter_mut().zip(values) {
                *weighted = multiply_add(*weight, f16_to_f32(value.to_bits()), *weighted);
            }
        }

        let total = chunk.largest[query].max(largest);
        let keep = exp(chunk.largest[query] - total);
        let take = exp(largest - total);
        chunk.largest[query] = total;
        chunk.sum[query] = chunk.sum[query] * keep + sum * take;
        let so_far = &mut chunk.values[query * head_dim..][..head_dim];
        for (so_far, weighted) in so_far.iter_mut().zip(&weighted) {
            *so_far = *so_far * keep + weighted * take;
        }
    }
}
