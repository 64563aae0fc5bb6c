//! The arithmetic of attention over one block of positions for a few queries of one KV head, and how such partial
//! results are folded together. One body, compiled for every level.

use std::ops::Range;

use super::super::isa_level::{IsaLevel, Kind};
use super::super::lanes::Lanes;
use super::super::numerics::{LANES, capped, exp, sum_lanes};
use super::head_block::HeadBlock;
use super::{BLOCK_POSITIONS, KEY_LANES};

/// The most queries taken together.
pub(super) const MAX_QUERIES: usize = 8;

/// The attention of some queries over some positions, before it is divided by the sum of the weights.
pub(super) struct Partial {
    /// The distance from one query to the next in `values`: the dimensions of a value, rounded up to whole lanes.
    stride: usize,
    /// Per query: the largest score so far, the sum of `e^(score - largest)`.
    largest: [f32; MAX_QUERIES],
    sum: [f32; MAX_QUERIES],
    /// Per query: the values weighted with `e^(score - largest)`.
    values: Vec<f32>,
}

impl Partial {
    pub(super) fn new(queries: usize, value_dim: usize) -> Self {
        let stride = value_dim.next_multiple_of(LANES);
        Partial {
            stride,
            largest: [f32::NEG_INFINITY; MAX_QUERIES],
            sum: [0.0; MAX_QUERIES],
            values: vec![0.0; queries * stride],
        }
    }

    pub(super) fn clear(&mut self) {
        self.largest = [f32::NEG_INFINITY; MAX_QUERIES];
        self.sum = [0.0; MAX_QUERIES];
        self.values.fill(0.0);
    }

    /// Adds the later positions of `next`.
    pub(super) fn fold(&mut self, next: &Partial) {
        let values = self.values.chunks_exact_mut(self.stride);
        let next_values = next.values.chunks_exact(self.stride);
        for (query, (values, next_values)) in values.zip(next_values).enumerate() {
            if next.largest[query] == f32::NEG_INFINITY {
                continue;
            }
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

    /// Adds a score that has no values.
    pub(super) fn add_sink(&mut self, query: usize, score: f32) {
        let largest = self.largest[query].max(score);
        let keep = exp(self.largest[query] - largest);
        self.largest[query] = largest;
        self.sum[query] = self.sum[query] * keep + exp(score - largest);
        let values = &mut self.values[query * self.stride..][..self.stride];
        values.iter_mut().for_each(|value| *value *= keep);
    }

    /// Writes the finished attention of one query.
    pub(super) fn write(&self, query: usize, out: &mut [f32]) {
        let values = &self.values[query * self.stride..][..out.len()];
        let inverse = 1.0 / self.sum[query];
        for (out, value) in out.iter_mut().zip(values) {
            *out = value * inverse;
        }
    }
}

/// Folds one block of positions into `chunk`. `queries` are rows of `head_dim`, scaled. Query `i` sees the positions
/// `visible[i]` of the block; neither start nor end falls from one query to the next.
pub(super) fn add_block<H: HeadBlock>(
    level: IsaLevel,
    queries: &[f32],
    block: H,
    softcap: Option<f32>,
    visible: &[Range<usize>],
    chunk: &mut Partial,
) {
    let head_dim = block.head_dim();
    assert!(queries.len() == visible.len() * head_dim);
    assert!(visible.len() <= MAX_QUERIES && visible.iter().all(|seen| seen.end <= BLOCK_POSITIONS));
    assert!(chunk.stride == block.value_dim().next_multiple_of(LANES));
    assert!(chunk.values.len() >= visible.len() * chunk.stride);
    // SAFETY: the lengths are checked above; a `IsaLevel` of a kind exists only on processors that have its
    // instructions.
    unsafe {
        match level.kind() {
            Kind::Scalar => {
                in_tiles::<[f32; LANES], H>(queries, block, softcap, visible, chunk);
            }
            #[cfg(target_arch = "x86_64")]
            Kind::Sse41 => sse41(queries, block, softcap, visible, chunk),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 | Kind::AvxVnni => avx2(queries, block, softcap, visible, chunk),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => avx512(queries, block, softcap, visible, chunk),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon | Kind::NeonDotprod | Kind::NeonI8mm => {
                in_tiles::<[std::arch::aarch64::float32x4_t; 4], H>(
                    queries, block, softcap, visible, chunk,
                );
            }
        }
    }
}

/// # Safety
/// As [`tile`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.1,ssse3")]
unsafe fn sse41<H: HeadBlock>(
    queries: &[f32],
    block: H,
    softcap: Option<f32>,
    visible: &[Range<usize>],
    chunk: &mut Partial,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        in_tiles::<[std::arch::x86_64::__m128; 4], H>(queries, block, softcap, visible, chunk)
    }
}

/// # Safety
/// As [`tile`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<H: HeadBlock>(
    queries: &[f32],
    block: H,
    softcap: Option<f32>,
    visible: &[Range<usize>],
    chunk: &mut Partial,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        in_tiles::<[std::arch::x86_64::__m256; 2], H>(queries, block, softcap, visible, chunk)
    }
}

/// # Safety
/// As [`tile`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512<H: HeadBlock>(
    queries: &[f32],
    block: H,
    softcap: Option<f32>,
    visible: &[Range<usize>],
    chunk: &mut Partial,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        in_tiles::<[std::arch::x86_64::__m512; 1], H>(queries, block, softcap, visible, chunk)
    }
}

/// # Safety
/// As [`tile`], except that `queries` and `visible` cover all queries.
#[inline(always)]
unsafe fn in_tiles<L: Lanes, H: HeadBlock>(
    queries: &[f32],
    block: H,
    softcap: Option<f32>,
    visible: &[Range<usize>],
    chunk: &mut Partial,
) {
    const { assert!(L::COUNT == LANES) };
    let mut first = 0;
    while first < visible.len() {
        let count = (visible.len() - first).min(L::TILE);
        // SAFETY: passed on from the caller.
        unsafe {
            match count {
                8.. => tile::<L, H, 8>(queries, block, softcap, visible, first, chunk),
                7 => tile::<L, H, 7>(queries, block, softcap, visible, first, chunk),
                6 => tile::<L, H, 6>(queries, block, softcap, visible, first, chunk),
                5 => tile::<L, H, 5>(queries, block, softcap, visible, first, chunk),
                4 => tile::<L, H, 4>(queries, block, softcap, visible, first, chunk),
                3 => tile::<L, H, 3>(queries, block, softcap, visible, first, chunk),
                2 => tile::<L, H, 2>(queries, block, softcap, visible, first, chunk),
                _ => tile::<L, H, 1>(queries, block, softcap, visible, first, chunk),
            }
        }
        first += count;
    }
}

/// Queries `first..first + QUERIES`.
///
/// # Safety
/// The processor has the instructions of `L`, and the lengths are those that [`add_block`] checks.
#[inline(always)]
unsafe fn tile<L: Lanes, H: HeadBlock, const QUERIES: usize>(
    queries: &[f32],
    block: H,
    softcap: Option<f32>,
    visible: &[Range<usize>],
    first: usize,
    chunk: &mut Partial,
) {
    let head_dim = block.head_dim();
    let visible = &visible[first..first + QUERIES];
    let seen = visible[0].start..visible[QUERIES - 1].end;
    if seen.is_empty() {
        return;
    }
    let mut weights = [[f32::NEG_INFINITY; BLOCK_POSITIONS]; QUERIES];

    for group in seen.start / KEY_LANES..seen.end.div_ceil(KEY_LANES) {
        // SAFETY: `group` is one of the block's, and query `first + QUERIES - 1` exists.
        let scores =
            unsafe { block.scores::<L, QUERIES>(group, queries.as_ptr().add(first * head_dim)) };
        for (weights, score) in weights.iter_mut().zip(scores) {
            // SAFETY: 16 of the 64 places.
            unsafe { score.store(weights.as_mut_ptr().add(group * KEY_LANES)) };
        }
    }

    let mut keep = [0.0; QUERIES];
    let mut take = [0.0; QUERIES];
    for (index, weights) in weights.iter_mut().enumerate() {
        let query = first + index;
        if let Some(softcap) = softcap {
            for score in weights.iter_mut() {
                *score = capped(*score, softcap);
            }
        }
        weights[..visible[index].start].fill(f32::NEG_INFINITY);
        weights[visible[index].end..].fill(f32::NEG_INFINITY);
        let (largest, sum) = softmax(weights);
        // A query that sees nothing of the block keeps what it has: e^0, and weights of 0.
        let total = chunk.largest[query].max(largest);
        (keep[index], take[index]) = if largest == f32::NEG_INFINITY {
            weights.fill(0.0);
            (1.0, 0.0)
        } else {
            (exp(chunk.largest[query] - total), exp(largest - total))
        };
        chunk.largest[query] = total;
        if largest != f32::NEG_INFINITY {
            chunk.sum[query] = chunk.sum[query] * keep[index] + sum * take[index];
        }
    }

    let mut scaled = weights;
    for dim in (0..block.value_dim()).step_by(LANES) {
        // SAFETY: `dim` is below the value's dimensions, a multiple of 16, and calls are in order; so below.
        unsafe { block.scale_weights::<L, QUERIES>(dim, &weights, &mut scaled) };
        let mut weighted = [L::splat(0.0); QUERIES];
        for position in seen.clone() {
            // SAFETY: `position` is one of the block's.
            let values = unsafe { block.values::<L>(position, dim) };
            for (weighted, weights) in weighted.iter_mut().zip(&scaled) {
                *weighted = values.multiply_add(L::splat(weights[position]), *weighted);
            }
        }
        for (index, weighted) in weighted.into_iter().enumerate() {
            // SAFETY: query `first + index` has `stride` places, a multiple of 16 and at least `dim + 16`.
            unsafe {
                let values = chunk.values.as_mut_ptr();
                let so_far = values.add((first + index) * chunk.stride + dim);
                let kept = L::load(so_far).multiply(L::splat(keep[index]));
                weighted
                    .multiply_add(L::splat(take[index]), kept)
                    .store(so_far);
            }
        }
    }
}

/// Turns scores into `e^(score - largest)`; returns the largest and the sum.
#[inline(always)]
fn softmax(scores: &mut [f32; BLOCK_POSITIONS]) -> (f32, f32) {
    let (groups, _) = scores.as_chunks_mut::<LANES>();
    let mut lanes = groups[0];
    for group in &groups[1..] {
        for lane in 0..LANES {
            lanes[lane] = if group[lane] > lanes[lane] {
                group[lane]
            } else {
                lanes[lane]
            };
        }
    }
    let largest = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0.0; LANES];
    for group in groups {
        for lane in 0..LANES {
            group[lane] = exp(group[lane] - largest);
            sums[lane] += group[lane];
        }
    }
    (largest, sum_lanes(sums))
}
