//! How fast memory is read, and how fast keys and values are appended to a KV cache.

use std::hint::black_box;

use prima_engine::kernels::{BLOCK_POSITIONS, KvBlock, KvShape, ThreadPool};

use super::samples::RunTimes;

/// Bytes a second at which all threads of the pool together read `bytes`, which must exceed the caches.
pub fn read_rate(pool: &ThreadPool, bytes: &[u8]) -> f64 {
    let samples = RunTimes::take(|| read_through(pool, bytes));
    bytes.len() as f64 / samples.median()
}

/// Bytes a second (as stored, F16) at which one position after another is appended to the KV caches of many layers, as
/// the engine does it. `weights` is read before every position: in a pass, a layer's cache has left the processor's
/// caches by the time it is written again.
pub fn kv_append_rate(pool: &ThreadPool, weights: &[u8]) -> f64 {
    /// The layers of a model of 8B: 8 KV heads of 128.
    const LAYERS: usize = 32;
    const SHAPE: KvShape = KvShape {
        kv_heads: 8,
        head_dim: 128,
        values_in_keys: None,
    };
    let row = vec![0.25; SHAPE.row_len()];
    let mut blocks = vec![KvBlock::f16(SHAPE); LAYERS];
    let mut position = 0;
    let samples = RunTimes::prepared(
        || {
            read_through(pool, weights);
        },
        || {
            for layer in &mut blocks {
                layer.store(position, &row, &row);
            }
            position = (position + 1) % BLOCK_POSITIONS;
        },
    );
    let stored = LAYERS * blocks[0].bytes() / BLOCK_POSITIONS;
    stored as f64 / samples.median()
}

/// Bytes of a block that one thread reads at a time.
const PIECE: usize = 256 << 10;

fn read_through(pool: &ThreadPool, bytes: &[u8]) {
    pool.run(bytes.len().div_ceil(PIECE), &|piece| {
        let start = piece * PIECE;
        let (words, _) = bytes[start..(start + PIECE).min(bytes.len())].as_chunks::<8>();
        let (lines, _) = words.as_chunks::<8>();
        let (mut a, mut b, mut c, mut d) = (0_u64, 0_u64, 0_u64, 0_u64);
        for line in lines {
            let word = |index: usize| u64::from_le_bytes(line[index]);
            a = a.wrapping_add(word(0) ^ word(4));
            b = b.wrapping_add(word(1) ^ word(5));
            c = c.wrapping_add(word(2) ^ word(6));
            d = d.wrapping_add(word(3) ^ word(7));
        }
        black_box((a, b, c, d));
    });
}
