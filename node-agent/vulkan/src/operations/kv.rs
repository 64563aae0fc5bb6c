//! Keys and values in blocks of positions (`shaders/kv.wgsl`).

use half::f16;

use crate::buffer::Slice;

/// Positions of a block of keys and values.
pub const KV_POSITIONS: usize = 64;
/// Numbers of the largest head.
pub const MOST_HEAD_DIM: usize = 256;

/// Bytes of a block: keys and values of a layer, F16.
pub fn kv_block_bytes(kv_heads: usize, head_dim: usize) -> u64 {
    (2 * KV_POSITIONS * kv_heads * head_dim * 2) as u64
}

/// Writes a position's keys and values to its place in a block.
///
/// # Panics
/// When sizes do not fit each other.
pub fn pack_position(block: &mut [u32], position: usize, keys: &[f16], values: &[f16]) {
    let width = width(block, position, keys.len(), values.len());
    let pair =
        |[low, high]: &[f16; 2]| u32::from(low.to_bits()) | (u32::from(high.to_bits()) << 16);
    let (own_keys, own_values) = block.split_at_mut(KV_POSITIONS * width);
    let keys = keys.as_chunks().0.iter().map(pair);
    for (column, pair) in own_keys.chunks_exact_mut(KV_POSITIONS).zip(keys) {
        column[position] = pair;
    }
    let row = &mut own_values[position * width..][..width];
    for (word, pair) in row.iter_mut().zip(values.as_chunks().0.iter().map(pair)) {
        *word = pair;
    }
}

/// Reads what [`pack_position`] writes.
///
/// # Panics
/// When sizes do not fit each other.
pub fn unpack_position(block: &[u32], position: usize, keys: &mut [f16], values: &mut [f16]) {
    let width = width(block, position, keys.len(), values.len());
    let pair = |word: u32| [word as u16, (word >> 16) as u16].map(f16::from_bits);
    let (own_keys, own_values) = block.split_at(KV_POSITIONS * width);
    let columns = own_keys.chunks_exact(KV_POSITIONS);
    for (numbers, column) in keys.as_chunks_mut().0.iter_mut().zip(columns) {
        *numbers = pair(column[position]);
    }
    let row = &own_values[position * width..][..width];
    for (numbers, word) in values.as_chunks_mut().0.iter_mut().zip(row) {
        *numbers = pair(*word);
    }
}

/// Pairs of numbers in a row of keys, and of values.
fn width(block: &[u32], position: usize, keys: usize, values: usize) -> usize {
    let width = block.len() / (2 * KV_POSITIONS);
    assert!(
        position < KV_POSITIONS && (keys, values) == (2 * width, 2 * width),
        "position {position} of {keys} and {values} numbers in a block of {} words",
        block.len()
    );
    width
}

/// The rows of a sequence among those of a pass, and its blocks of keys and values in a layer.
#[derive(Clone, Copy)]
pub struct SequenceRows<'a> {
    /// Places of blocks in `cache`, of all sequences.
    pub blocks: Slice<'a>,
    /// Where those of this sequence begin among them.
    pub blocks_at: usize,
    /// Which block of the sequence is the first there.
    pub first_block: usize,
    /// Blocks of [`kv_block_bytes`] each.
    pub cache: Slice<'a>,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rows: usize,
    pub first_row: usize,
    pub first_position: usize,
}

impl SequenceRows<'_> {
    pub(super) fn check(&self) {
        let head_dim = self.head_dim;
        assert!(
            head_dim.is_multiple_of(2) && head_dim <= MOST_HEAD_DIM,
            "a head of {head_dim}"
        );
        let end = self.first_position + self.rows;
        let blocks = end.div_ceil(KV_POSITIONS) - self.first_block;
        let listed = (self.blocks.bytes() / 4) as usize;
        assert!(
            self.blocks_at + blocks <= listed,
            "{blocks} blocks of {listed}"
        );
    }
}
