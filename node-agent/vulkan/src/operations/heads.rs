//! What becomes of new queries, keys and values before they attend.

use super::Rows;
use super::kv::SequenceRows;
use super::new_rows::{NewRows, Rotation};
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

impl<'a> Pass<'a> {
    /// Gives queries (in place) and keys their norms and turns them, then writes keys and values into the sequence's blocks.
    ///
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other, or there are no kernels for such heads
    /// ([`KvShape::check`](super::KvShape::check)).
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
        let SequenceRows {
            blocks,
            cache,
            kv,
            rows,
            first_row,
            ..
        } = sequence;
        assert!(kv.values_in_keys.is_none(), "{kv:?}");
        let (kv_heads, head_dim) = (kv.kv_heads, kv.head_dim);
        let shared = NewRows::new(sequence, rotation, head_dim);
        let end = first_row + rows;
        // A kernel names what it does not read.
        let queries = match heads {
            0 => cache,
            _ => Rows::of(queries, end, heads * head_dim),
        };
        let [keys, values] = [keys, values].map(|new| Rows::of(new, end, kv_heads * head_dim));
        let [query_norm, key_norm] = match norms {
            Some(norms) => [norms.query, norms.key].map(|norm| Rows::of(norm, 1, head_dim)),
            None => [blocks, blocks],
        };
        let own = [
            heads as u32,
            kv_heads as u32,
            head_dim as u32,
            u32::from(norms.is_some()),
            norms.map_or(0.0, |norms| norms.epsilon).to_bits(),
        ];
        let params = [&shared.params[..], &own].concat();
        let own = [queries, keys, values, query_norm, key_norm];
        let slices = [&shared.slices[..], &own].concat();
        let groups = [(heads + 2 * kv_heads) as u32, rows as u32];
        self.start(Kernel::Heads, &slices, &params, groups)
    }
}
