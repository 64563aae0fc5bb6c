//! What kernels share in which a sequence's new rows become ready to attend (`shaders/new_rows.wgsl`).

use super::Rows;
use super::kv::SequenceRows;
use crate::buffer::Slice;

/// Rotary position embedding of the first `2 * pairs` numbers of each head; of heads of [`LatentHeads`](super::LatentHeads) the last.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// F32, for each row of the pass the cosines of its pairs, then their sines.
    pub angles: Slice<'a>,
    pub pairs: usize,
    /// Whether a pair is two neighbours; else its numbers are `pairs` apart.
    pub neighbours: bool,
}

/// What these kernels are told of the rows: their first parameters, and what they bind first.
pub(super) struct NewRows<'a> {
    pub params: [u32; 6],
    pub slices: [Slice<'a>; 3],
}

impl<'a> NewRows<'a> {
    /// Of each head, so many `numbers` may be turned.
    ///
    /// # Panics
    /// When sizes do not fit each other, or there are no kernels for such heads ([`KvShape::check`](super::KvShape::check)).
    pub fn new(
        sequence: SequenceRows<'a>,
        rotation: Option<Rotation<'a>>,
        numbers: usize,
    ) -> NewRows<'a> {
        sequence.check();
        let SequenceRows {
            blocks,
            blocks_at,
            first_block,
            cache,
            kv: _,
            rows,
            first_row,
            first_position,
        } = sequence;
        let pairs = rotation.map_or(0, |rotation| rotation.pairs);
        assert!(2 * pairs <= numbers, "{pairs} pairs of {numbers}");
        // A kernel names what it does not read.
        let end = first_row + rows;
        let angles = rotation.map_or(blocks, |rotation| Rows::of(rotation.angles, end, 2 * pairs));
        NewRows {
            params: [
                first_row as u32,
                first_position as u32,
                first_block as u32,
                blocks_at as u32,
                pairs as u32,
                u32::from(rotation.is_some_and(|rotation| rotation.neighbours)),
            ],
            slices: [blocks, cache, angles],
        }
    }
}
