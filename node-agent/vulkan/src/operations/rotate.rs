//! Rotary position embedding.

use super::{Rows, strided};
use crate::buffer::Slice;
use crate::error::VulkanError;
use crate::kernels::Kernel;
use crate::pass::Pass;

/// Turns the first `2 * pairs` numbers of each head of `x` in place.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// F32, for each row the cosines of its pairs, then their sines.
    pub angles: Slice<'a>,
    pub pairs: usize,
    /// Whether a pair is two neighbours; else its numbers are `pairs` apart.
    pub neighbours: bool,
    /// F32, rows x heads x head_dim.
    pub x: Rows<'a>,
    pub heads: usize,
    pub head_dim: usize,
}

impl<'a> Pass<'a> {
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn rotate(&mut self, rotation: Rotation<'a>) -> Result<(), VulkanError> {
        let Rotation {
            angles,
            pairs,
            neighbours,
            x,
            heads,
            head_dim,
        } = rotation;
        assert!(2 * pairs <= head_dim, "{pairs} pairs of {head_dim}");
        let angles = Rows::of(angles, x.count, 2 * pairs);
        let heads_of_x = x.cut(heads * head_dim);
        let params = [x.count, heads, head_dim, pairs, usize::from(neighbours)];
        let groups = strided(x.count * heads * pairs, 64);
        self.start(
            Kernel::Rotate,
            &[angles, heads_of_x],
            &params.map(|size| size as u32),
            groups,
        )
    }
}
