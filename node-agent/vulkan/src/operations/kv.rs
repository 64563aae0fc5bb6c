//! Keys and values in blocks of positions (`shaders/kv.wgsl`, and `shaders/kv_latent.wgsl` where keys are values, too).

use half::f16;

use super::UNIT;
use crate::buffer::Slice;
use crate::error::VulkanError;

/// Positions of a block of keys and values.
pub const KV_POSITIONS: usize = 64;
/// Numbers of the largest head (`shaders/heads.wgsl`).
const MOST_HEAD_DIM: usize = 256;
/// The same where keys are latents, and of the largest latent (`shaders/latent_heads.wgsl`).
const MOST_LATENT_DIM: usize = 576;
const MOST_LATENT: usize = 512;

/// What a position leaves behind in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub kv_heads: usize,
    /// Numbers of a key, and of a query.
    pub head_dim: usize,
    /// The first so many numbers of a key, a latent, are its value, and there are no others; then there is one head. `None`: values are apart, and of
    /// `head_dim` numbers.
    pub values_in_keys: Option<usize>,
}

impl KvShape {
    /// Numbers of a value.
    pub fn value_dim(self) -> usize {
        self.values_in_keys.unwrap_or(self.head_dim)
    }

    /// Bytes of a block of positions, F16.
    pub fn block_bytes(self) -> u64 {
        let rows = match self.values_in_keys {
            Some(_) => 1,
            None => 2,
        };
        (rows * KV_POSITIONS * self.kv_heads * self.head_dim * 2) as u64
    }

    /// Whether there are kernels for it.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] says why not.
    pub fn check(self) -> Result<(), VulkanError> {
        let refused = |what| Err(VulkanError::NoKernel { what });
        let head_dim = self.head_dim;
        let most = match self.values_in_keys {
            None => MOST_HEAD_DIM,
            Some(_) => MOST_LATENT_DIM,
        };
        if !head_dim.is_multiple_of(2) || head_dim > most {
            return refused(format!(
                "heads of {head_dim} numbers (even, and at most {most})"
            ));
        }
        match self.values_in_keys {
            Some(rank)
                if !rank.is_multiple_of(UNIT)
                    || rank > head_dim.min(MOST_LATENT)
                    || self.kv_heads != 1 =>
            {
                refused(format!(
                    "latents of {rank} numbers (a multiple of {UNIT}, and at most {MOST_LATENT})"
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Writes a position's keys and values to its place in a block. Where keys are values, too, there are no others.
///
/// # Panics
/// When sizes do not fit each other.
pub fn pack_position(block: &mut [u32], position: usize, keys: &[f16], values: &[f16]) {
    let [width, value_width] = widths(block, position, keys.len(), values.len());
    let pair =
        |[low, high]: &[f16; 2]| u32::from(low.to_bits()) | (u32::from(high.to_bits()) << 16);
    let (own_keys, own_values) = block.split_at_mut(KV_POSITIONS * width);
    let keys = keys.as_chunks().0.iter().map(pair);
    for (column, pair) in own_keys.chunks_exact_mut(KV_POSITIONS).zip(keys) {
        column[position] = pair;
    }
    let row = &mut own_values[position * value_width..][..value_width];
    for (word, pair) in row.iter_mut().zip(values.as_chunks().0.iter().map(pair)) {
        *word = pair;
    }
}

/// Reads what [`pack_position`] writes.
///
/// # Panics
/// When sizes do not fit each other.
pub fn unpack_position(block: &[u32], position: usize, keys: &mut [f16], values: &mut [f16]) {
    let [width, value_width] = widths(block, position, keys.len(), values.len());
    let pair = |word: u32| [word as u16, (word >> 16) as u16].map(f16::from_bits);
    let (own_keys, own_values) = block.split_at(KV_POSITIONS * width);
    let columns = own_keys.chunks_exact(KV_POSITIONS);
    for (numbers, column) in keys.as_chunks_mut().0.iter_mut().zip(columns) {
        *numbers = pair(column[position]);
    }
    let row = &own_values[position * value_width..][..value_width];
    for (numbers, word) in values.as_chunks_mut().0.iter_mut().zip(row) {
        *numbers = pair(*word);
    }
}

/// Pairs of numbers in a row of keys, and of values.
fn widths(block: &[u32], position: usize, keys: usize, values: usize) -> [usize; 2] {
    let [width, value_width] = [keys, values].map(|numbers| numbers / 2);
    assert!(
        position < KV_POSITIONS
            && [2 * width, 2 * value_width] == [keys, values]
            && block.len() == KV_POSITIONS * (width + value_width),
        "position {position} of {keys} and {values} numbers in a block of {} words",
        block.len()
    );
    [width, value_width]
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
    /// Blocks of [`KvShape::block_bytes`] each.
    pub cache: Slice<'a>,
    pub kv: KvShape,
    pub rows: usize,
    pub first_row: usize,
    pub first_position: usize,
}

impl SequenceRows<'_> {
    pub(super) fn check(&self) {
        assert!(self.kv.check().is_ok(), "{:?}", self.kv);
        let end = self.first_position + self.rows;
        let blocks = end.div_ceil(KV_POSITIONS) - self.first_block;
        let listed = (self.blocks.bytes() / 4) as usize;
        assert!(
            self.blocks_at + blocks <= listed,
            "{blocks} blocks of {listed}"
        );
    }
}
