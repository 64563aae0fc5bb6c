//! Keys and values in blocks of positions (`shaders/kv.wgsl`).

use crate::buffer::Slice;

/// Positions of a block of keys and values.
pub const KV_POSITIONS: usize = 64;
/// Numbers of the largest head.
pub const MOST_HEAD_DIM: usize = 256;

/// Bytes of a block: keys and values of a layer, F16.
pub fn kv_block_bytes(kv_heads: usize, head_dim: usize) -> u64 {
    (2 * KV_POSITIONS * kv_heads * head_dim * 2) as u64
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
