//! Keys and values of one layer and sequence in memory: F16, in blocks of positions. The attention kernel defines the layout inside a block.

use std::sync::Arc;

use half::f16;

use crate::kernels::{BLOCK_POSITIONS, KvShape};
use crate::kv_memory::{KvMemory, Taken};

/// Blocks that forks share until one of them writes.
#[derive(Clone, Default)]
pub(crate) struct KvBlocks {
    /// Blocks given back, before those that are here.
    first: usize,
    keys: Vec<Arc<Block>>,
    values: Vec<Arc<Block>>,
}

/// The numbers of one block, and their memory.
#[derive(Clone)]
struct Block {
    numbers: Box<[f16]>,
    _taken: Taken,
}

impl KvBlocks {
    pub const EMPTY: KvBlocks = KvBlocks {
        first: 0,
        keys: Vec::new(),
        values: Vec::new(),
    };

    /// Adds positions after the first `len`: `keys` and `values` are rows of `kv_heads * head_dim` numbers. Blocks of positions before
    /// `kept_from` are given back.
    pub fn append(
        &mut self,
        shape: KvShape,
        len: usize,
        kept_from: usize,
        (keys, values): (&[f32], &[f32]),
        memory: &KvMemory,
    ) {
        let gone = (kept_from / BLOCK_POSITIONS).saturating_sub(self.first);
        let gone = gone.min(self.keys.len());
        self.keys.drain(..gone);
        self.values.drain(..gone);
        self.first += gone;
        let row = shape.row_len();
        let rows = keys.chunks_exact(row).zip(values.chunks_exact(row));
        for (at, (key, value)) in (len..).zip(rows) {
            let (block, position) = (at / BLOCK_POSITIONS - self.first, at % BLOCK_POSITIONS);
            if block == self.keys.len() {
                self.keys.push(Arc::new(Block::new(shape, memory)));
                self.values.push(Arc::new(Block::new(shape, memory)));
            }
            let own = Arc::make_mut(&mut self.keys[block]);
            shape.store_key(&mut own.numbers, position, key);
            let own = Arc::make_mut(&mut self.values[block]);
            shape.store_value(&mut own.numbers, position, value);
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
        self.keys.iter().map(|block| &*block.numbers).collect()
    }

    /// The blocks of values.
    pub fn values(&self) -> Vec<&[f16]> {
        self.values.iter().map(|block| &*block.numbers).collect()
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

impl Block {
    fn new(shape: KvShape, memory: &KvMemory) -> Self {
        let numbers = vec![f16::ZERO; shape.block_len()].into_boxed_slice();
        Self {
            _taken: memory.take(size_of_val(&*numbers) as u64),
            numbers,
        }
    }
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
        blocks.append(SHAPE, len, 0, (&numbers, &numbers), &KvMemory::default());
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
