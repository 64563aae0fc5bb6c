//! What becomes of new queries, keys and values before they attend.

use super::Rows;
use super::kv::SequenceRows;
use crate::buffer::Slice;
use crate::error::VulkanError;
use crate::kernels::Kernel;
use crate::pass::Pass;

/// The new rows of a sequence, as a layer's products made them.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    pub sequence: SequenceRows<'a>,
    pub heads: usize,
    /// F32, rows of the pass x heads x head_dim.
    pub queries: Slice<'a>,
    /// F32, rows of the pass x kv_heads x head_dim.
    pub keys: Slice<'a>,
    pub values: Slice<'a>,
    pub norms: Option<HeadNorms<'a>>,
    pub rotation: Option<Rotation<'a>>,
}

/// RMS norms of each head of queries and keys.
#[derive(Clone, Copy)]
pub struct HeadNorms<'a> {
    /// F32, `head_dim` numbers.
    pub query: Slice<'a>,
    pub key: Slice<'a>,
    pub epsilon: f32,
}

/// Rotary position embedding of the first `2 * pairs` numbers of each head.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// F32, for each row of the pass the cosines of its pairs, then their sines.
    pub angles: Slice<'a>,
    pub pairs: usize,
    /// Whether a pair is two neighbours; else its numbers are `pairs` apart.
    pub neighbours: bool,
}

impl<'a> Pass<'a> {
    /// Gives queries (in place) and keys their norms and turns them, then writes keys and values into the sequence's blocks.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other, or heads are larger than [`MOST_HEAD_DIM`](super::MOST_HEAD_DIM).
    pub fn prepare_heads(&mut self, new: Heads<'a>) -> Result<(), VulkanError> {
        let Heads {
            sequence,
            heads,
            queries,
            keys,
            values,
            norms,
            rotation,
        } = new;
        sequence.check();
        let SequenceRows {
            blocks,
            cache,
            kv_heads,
            head_dim,
            rows,
            first_row,
            ..
        } = sequence;
        let end = first_row + rows;
        // A kernel names what it does not read.
        let queries = match heads {
            0 => cache,
            _ => Rows::of(queries, end, heads * head_dim),
        };
        let [keys, values] = [keys, values].map(|new| Rows::of(new, end, kv_heads * head_dim));
        let pairs = rotation.map_or(0, |rotation| rotation.pairs);
        assert!(2 * pairs <= head_dim, "{pairs} pairs of {head_dim}");
        let angles = rotation.map_or(blocks, |rotation| Rows::of(rotation.angles, end, 2 * pairs));
        let [query_norm, key_norm] = match norms {
            Some(norms) => [norms.query, norms.key].map(|norm| Rows::of(norm, 1, head_dim)),
            None => [blocks, blocks],
        };
        let params = [
            heads as u32,
            kv_heads as u32,
            head_dim as u32,
            first_row as u32,
            sequence.first_position as u32,
            sequence.first_block as u32,
            sequence.blocks_at as u32,
            pairs as u32,
            u32::from(rotation.is_some_and(|rotation| rotation.neighbours)),
            u32::from(norms.is_some()),
            norms.map_or(0.0, |norms| norms.epsilon).to_bits(),
        ];
        let slices = [
            blocks, queries, keys, values, cache, angles, query_norm, key_norm,
        ];
        let groups = [(heads + 2 * kv_heads) as u32, rows as u32];
        self.start(Kernel::Heads, &slices, &params, groups)
    }
}
