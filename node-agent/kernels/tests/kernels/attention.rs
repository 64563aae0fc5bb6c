//! Attention: the textbook formula in f64, and the same bits whatever the batch, the chunks of a prefill and
//! the pool.

use half::f16;
use prima_kernels::{
    AttentionShape, BLOCK_POSITIONS, IsaLevel, KvShape, SequenceAttention, ThreadPool, attention,
};

use crate::reference::Random;

#[derive(Clone)]
struct Case {
    shape: AttentionShape,
    /// Rows of `heads * head_dim`, for every position.
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    key_blocks: Vec<Vec<f16>>,
    value_blocks: Vec<Vec<f16>>,
}

impl Case {
    fn new(seed: u64, heads: usize, kv_heads: usize, head_dim: usize, positions: usize) -> Case {
        let mut random = Random(seed);
        let kv = KvShape { kv_heads, head_dim };
        let (row, kv_row) = (heads * head_dim, kv_heads * head_dim);
        let mut case = Case {
            shape: AttentionShape {
                heads,
                kv,
                scale: 1.0 / (head_dim as f32).sqrt(),
                window: None,
                softcap: None,
            },
            queries: random
                .units(positions * row)
                .iter()
                .map(|q| q * 6.0)
                .collect(),
            keys: random.units(positions * kv_row),
            values: random.units(positions * kv_row),
            key_blocks: Vec::new(),
            value_blocks: Vec::new(),
        };
        for position in 0..positions {
            if position % BLOCK_POSITIONS == 0 {
                // Data behind the last position must not matter, so it is the worst there can be.
                case.key_blocks.push(vec![f16::NAN; kv.block_len()]);
                case.value_blocks.push(vec![f16::NAN; kv.block_len()]);
            }
            let (block, within) = (position / BLOCK_POSITIONS, position % BLOCK_POSITIONS);
            let at = position * kv_row..(position + 1) * kv_row;
            kv.store_key(&mut case.key_blocks[block], within, &case.keys[at.clone()]);
            kv.store_value(&mut case.value_blocks[block], within, &case.values[at]);
        }
        case
    }

    fn row(&self) -> usize {
        self.shape.heads * self.shape.kv.head_dim
    }

    fn positions(&self) -> usize {
        self.queries.len() / self.row()
    }

    /// Rows `first..first + rows` in one call.
    fn run(&self, pool: &ThreadPool, first: usize, rows: usize) -> Vec<f32> {
        // Only what the first row's window reaches.
        let window = self.shape.window.unwrap_or(usize::MAX);
        let first_block = (first + 1).saturating_sub(window) / BLOCK_POSITIONS;
        let keys = self.key_blocks[first_block..].iter();
        let keys: Vec<&[f16]> = keys.map(Vec::as_slice).collect();
        let values = self.value_blocks[first_block..].iter();
        let values: Vec<&[f16]> = values.map(Vec::as_slice).collect();
        let mut out = vec![f32::NAN; rows * self.row()];
        attention(
            pool,
            &self.shape,
            &mut [SequenceAttention {
                queries: &self.queries[first * self.row()..(first + rows) * self.row()],
                first_position: first,
                first_block,
                keys: &keys,
                values: &values,
                out: &mut out,
            }],
        );
        out
    }

    /// The definition, with keys and values as F16 holds them.
    fn exact(&self, position: usize, head: usize) -> Vec<f64> {
        let KvShape { kv_heads, head_dim } = self.shape.kv;
        let kv_head = head * kv_heads / self.shape.heads;
        let stored = |numbers: &[f32], position: usize| -> Vec<f64> {
            let at = (position * kv_heads + kv_head) * head_dim;
            numbers[at..at + head_dim]
                .iter()
                .map(|x| f16::from_f32(*x).to_f64())
                .collect()
        };
        let at = (position * self.shape.heads + head) * head_dim;
        let query = &self.queries[at..at + head_dim];
        let window = self.shape.window.unwrap_or(usize::MAX);
        let seen = (position + 1).saturating_sub(window)..position + 1;
        let scores: Vec<f64> = seen
            .clone()
            .map(|p| {
                let key = stored(&self.keys, p);
                let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * k);
                let score = products.sum::<f64>() * f64::from(self.shape.scale);
                match self.shape.softcap.map(f64::from) {
                    Some(softcap) => softcap * (score / softcap).tanh(),
                    None => score,
                }
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
        let mut out = vec![0.0; head_dim];
        for (p, score) in seen.zip(&scores) {
            let weight = (score - largest).exp() / sum;
            for (out, value) in out.iter_mut().zip(stored(&self.values, p)) {
                *out += weight * value;
            }
        }
        out
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Heads, KV heads, head dimension, positions: grouped and not, odd dimensions, more than one chunk. Then windows, which begin in the
/// middle of blocks and end before some chunks, and soft caps.
fn cases(seed: u64) -> Vec<Case> {
    let plain = [
        (9, 3, 64, 140),
        (4, 4, 32, 70),
        (14, 2, 16, 65),
        (2, 1, 24, 300),
        (3, 1, 13, 33),
        (11, 1, 128, 20),
    ];
    let case = |(heads, kv_heads, head_dim, positions)| {
        Case::new(seed, heads, kv_heads, head_dim, positions)
    };
    let mut cases = plain.map(case).to_vec();
    for (window, softcap, shape) in [
        (Some(1), None, (2, 1, 16, 70)),
        (Some(8), None, (4, 2, 16, 90)),
        (Some(64), Some(2.0), (3, 1, 32, 200)),
        (Some(130), None, (2, 2, 24, 600)),
        (Some(1000), Some(50.0), (2, 1, 16, 80)),
        (None, Some(0.5), (2, 1, 16, 80)),
    ] {
        let mut case = case(shape);
        (case.shape.window, case.shape.softcap) = (window, softcap);
        cases.push(case);
    }
    cases
}

#[test]
fn attention_is_the_textbook_formula() {
    for level in IsaLevel::available() {
        for case in cases(7) {
            let positions = case.positions();
            let out = case.run(&ThreadPool::new(2, level).unwrap(), 0, positions);
            for position in (0..positions).step_by(7).chain([positions - 1]) {
                for head in 0..case.shape.heads {
                    let exact = case.exact(position, head);
                    let at = position * case.row() + head * case.shape.kv.head_dim;
                    for (got, exact) in out[at..].iter().zip(exact) {
                        assert!(
                            (f64::from(*got) - exact).abs() < 4e-6,
                            "{level} {:?} head {head} at {position}: {got} for {exact}",
                            case.shape
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_however_a_prefill_is_cut() {
    for level in IsaLevel::available() {
        for case in cases(8) {
            let positions = case.positions();
            let whole = case.run(&ThreadPool::new(1, level).unwrap(), 0, positions);
            for (threads, chunk) in [(1, 1), (2, 1), (8, 1), (2, 5), (3, 64), (40, positions)] {
                let pool = ThreadPool::new(threads, level).unwrap();
                for first in (0..positions).step_by(chunk) {
                    let rows = chunk.min(positions - first);
                    let got = case.run(&pool, first, rows);
                    let expected = &whole[first * case.row()..(first + rows) * case.row()];
                    assert_eq!(bits(&got), bits(expected), "{level} rows {first}+{rows}");
                }
            }
        }
    }
}

#[test]
fn sequences_of_a_batch_do_not_change_each_other() {
    let cases = [
        Case::new(9, 6, 2, 32, 90),
        Case::new(10, 6, 2, 32, 20),
        Case::new(11, 6, 2, 32, 400),
    ];
    for level in IsaLevel::available() {
        for threads in [1, 2, 16] {
            let pool = ThreadPool::new(threads, level).unwrap();
            let keys: Vec<Vec<&[f16]>> = cases
                .iter()
                .map(|case| case.key_blocks.iter().map(Vec::as_slice).collect())
                .collect();
            let values: Vec<Vec<&[f16]>> = cases
                .iter()
                .map(|case| case.value_blocks.iter().map(Vec::as_slice).collect())
                .collect();
            let firsts = [89, 15, 399];
            let mut outs: Vec<Vec<f32>> = Vec::new();
            for (case, first) in cases.iter().zip(firsts) {
                outs.push(vec![0.0; case.queries.len() - first * case.row()]);
            }
            let mut batch: Vec<SequenceAttention<'_>> = Vec::new();
            for (index, out) in outs.iter_mut().enumerate() {
                let case = &cases[index];
                batch.push(SequenceAttention {
                    queries: &case.queries[firsts[index] * case.row()..],
                    first_position: firsts[index],
                    first_block: 0,
                    keys: &keys[index],
                    values: &values[index],
                    out,
                });
            }
            attention(&pool, &cases[0].shape, &mut batch);
            for ((case, first), out) in cases.iter().zip(firsts).zip(&outs) {
                let alone = case.run(&pool, first, out.len() / case.row());
                assert_eq!(bits(out), bits(&alone), "{level} on {threads}");
            }
        }
    }
}

#[test]
fn numbers_beyond_half_precision_are_stored_as_its_largest() {
    let shape = KvShape {
        kv_heads: 1,
        head_dim: 4,
    };
    let mut block = vec![f16::ZERO; shape.block_len()];
    shape.store_value(&mut block, 3, &[1e9, -1e9, f32::INFINITY, f32::NAN]);
    assert_eq!(block[12..15], [f16::MAX, f16::MIN, f16::MAX]);
    assert!(block[15].is_nan());
}
