//! Keys and values of one layer and sequence in memory: F16, in blocks of positions. The attention kernel defines the layout inside a block.

use std::sync::Arc;

use half::f16;

use crate::kernels::{BLOCK_POSITIONS, KvShape};

/// Blocks that forks share until one of them writes.
#[derive(Clone, Default)]
pub(crate) struct KvBlocks {
    /// Blocks given back, before those that are here.
    first: usize,
    keys: Vec<Arc<[f16]>>,
    values: Vec<Arc<[f16]>>,
}

impl KvBlocks {
    pub const EMPTY: KvBlocks = KvBlocks {
        first: 0,
        keys: Vec::new(),
        values: Vec::new(),
    };

    /// Adds positions after the first `len`: `keys` and `values` are rows of `kv_heads * head_dim` numbers. Blocks of positions before
    /// `seen_from` are given back.
    pub fn append(
        &mut self,
        shape: KvShape,
        len: usize,
        seen_from: usize,
        keys: &[f32],
        values: &[f32],
    ) {
        let unseen = (seen_from / BLOCK_POSITIONS).saturating_sub(self.first);
        let unseen = unseen.min(self.keys.len());
        self.keys.drain(..unseen);
        self.values.drain(..unseen);
        self.first += unseen;
        let row = shape.row_len();
        let rows = keys.chunks_exact(row).zip(values.chunks_exact(row));
        for (at, (key, value)) in (len..).zip(rows) {
            let (block, position) = (at / BLOCK_POSITIONS - self.first, at % BLOCK_POSITIONS);
            if block == self.keys.len() {
                self.keys.push(new_block(shape));
                self.values.push(new_block(shape));
            }
            shape.store_key(Arc::make_mut(&mut self.keys[block]), position, key);
            shape.store_value(Arc::make_mut(&mut self.values[block]), position, value);
        }
    }

    /// Frees the blocks that hold only positions from the first `len` on.
    pub fn truncate(&mut self, len: usize) {
        let blocks = len.div_ceil(BLOCK_POSITIONS).saturating_sub(self.first);
        self.keys.truncate(blocks);
        self.values.truncate(blocks);
    }

    /// The first block that is here.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The blocks of keys, as the attention kernel takes them.
    pub fn keys(&self) -> Vec<&[f16]> {
        self.keys.iter().map(|block| &**block).collect()
    }

    /// The blocks of values.
    pub fn values(&self) -> Vec<&[f16]> {
        self.values.iter().map(|block| &**block).collect()
    }

    /// The first position held.
    pub fn first_position(&self) -> usize {
        self.first * BLOCK_POSITIONS
    }

    /// Bytes of memory, those shared with forks included.
    pub fn bytes(&self, shape: KvShape) -> u64 {
        let blocks = self.keys.len() + self.values.len();
        (blocks * shape.block_len() * size_of::<f16>()) as u64
    }
}

fn new_block(shape: KvShape) -> Arc<[f16]> {
    std::iter::repeat_n(f16::ZERO, shape.block_len()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape {
        kv_heads: 2,
        head_dim: 16,
    };

    fn append(blocks: &mut KvBlocks, len: usize, rows: usize) {
        let numbers = vec![1.0; rows * SHAPE.row_len()];
        blocks.append(SHAPE, len, 0, &numbers, &numbers);
    }

    #[test]
    fn a_fork_shares_every_block_but_the_one_that_is_written() {
        let mut blocks = KvBlocks::EMPTY;
        append(&mut blocks, 0, 2 * BLOCK_POSITIONS + 1);
        let mut fork = blocks.clone();
        let shared = |a: &KvBlocks, b: &KvBlocks| -> Vec<bool> {
            let blocks = a.keys.iter().zip(&b.keys);
            blocks.map(|(a, b)| Arc::ptr_eq(a, b)).collect()
        };
        assert_eq!(shared(&blocks, &fork), [true, true, true]);
        append(&mut fork, 2 * BLOCK_POSITIONS + 1, 1);
        assert_eq!(shared(&blocks, &fork), [true, true, false]);
        fork.truncate(BLOCK_POSITIONS + 3);
        append(&mut fork, BLOCK_POSITIONS + 3, 1);
        assert_eq!(shared(&blocks, &fork), [true, false]);
    }
}
