//! Keys and values of one layer and sequence in memory, in blocks of positions. The attention kernel defines the layout inside a block.

use std::sync::Arc;

use prima_model::KvFormat;

use crate::kernels::{BLOCK_POSITIONS, KvBlock, KvShape};
use crate::kv_memory::{KvMemory, Taken};

/// Blocks that forks share until one of them writes.
#[derive(Clone, Default)]
pub(crate) struct KvBlocks {
    /// Blocks given back, before those that are here.
    first: usize,
    blocks: Vec<Arc<Block>>,
}

/// A block and its memory.
#[derive(Clone)]
struct Block {
    numbers: KvBlock,
    _taken: Taken,
}

impl KvBlocks {
    pub const EMPTY: KvBlocks = KvBlocks {
        first: 0,
        blocks: Vec::new(),
    };

    /// Adds positions after the first `len`: `keys` and `values` are rows, as `shape` has them. New blocks are of `format`.
    /// Blocks of positions before `kept_from` are given back.
    pub fn append(
        &mut self,
        shape: KvShape,
        format: KvFormat,
        len: usize,
        kept_from: usize,
        (keys, values): (&[f32], &[f32]),
        memory: &KvMemory,
    ) {
        let gone = (kept_from / BLOCK_POSITIONS).saturating_sub(self.first);
        let gone = gone.min(self.blocks.len());
        self.blocks.drain(..gone);
        self.first += gone;
        let value_row = shape.value_row_len();
        for (row, key) in keys.chunks_exact(shape.row_len()).enumerate() {
            let value = &values[row * value_row..(row + 1) * value_row];
            let at = len + row;
            let (block, position) = (at / BLOCK_POSITIONS - self.first, at % BLOCK_POSITIONS);
            if block == self.blocks.len() {
                self.blocks
                    .push(Arc::new(Block::new(shape, format, memory)));
            }
            let own = Arc::make_mut(&mut self.blocks[block]);
            own.numbers.store(position, key, value);
        }
    }

    /// Frees the blocks that hold only positions from the first `len` on.
    pub fn truncate(&mut self, len: usize) {
        let blocks = len.div_ceil(BLOCK_POSITIONS).saturating_sub(self.first);
        self.blocks.truncate(blocks);
    }

    /// The first block that is here.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The blocks, as the attention kernel takes them.
    pub fn blocks(&self) -> Vec<&KvBlock> {
        self.blocks.iter().map(|block| &block.numbers).collect()
    }

    /// The first position held.
    pub fn first_position(&self) -> usize {
        self.first * BLOCK_POSITIONS
    }

    /// Bytes of memory, those shared with forks included.
    pub fn bytes(&self) -> u64 {
        let bytes = self.blocks.iter().map(|block| block.numbers.bytes());
        bytes.sum::<usize>() as u64
    }
}

impl Block {
    fn new(shape: KvShape, format: KvFormat, memory: &KvMemory) -> Self {
        let numbers = match format {
            KvFormat::F16 => KvBlock::f16(shape),
            KvFormat::Q8_0 => KvBlock::q8_0(shape),
        };
        Self {
            _taken: memory.take(numbers.bytes() as u64),
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
        values_in_keys: None,
    };

    fn append(blocks: &mut KvBlocks, len: usize, rows: usize) {
        let numbers = vec![1.0; rows * SHAPE.row_len()];
        let rows = (&numbers[..], &numbers[..]);
        blocks.append(SHAPE, KvFormat::F16, len, 0, rows, &KvMemory::default());
    }

    #[test]
    fn a_fork_shares_every_block_but_the_one_that_is_written() {
        let mut blocks = KvBlocks::EMPTY;
        append(&mut blocks, 0, 2 * BLOCK_POSITIONS + 1);
        let mut fork = blocks.clone();
        let shared = |a: &KvBlocks, b: &KvBlocks| -> Vec<bool> {
            let blocks = a.blocks.iter().zip(&b.blocks);
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
