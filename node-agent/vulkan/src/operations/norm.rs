//! RMS norms.

use super::{Rows, grid};
use crate::buffer::Slice;
use crate::error::VulkanError;
use crate::kernels::Kernel;
use crate::pass::Pass;

/// out = x / sqrt(mean(x^2) + epsilon) * weight, row by row, or out += scale * that.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// F32, `width` numbers.
    pub weight: Slice<'a>,
    pub width: usize,
    /// F32, rows x width.
    pub x: Rows<'a>,
    /// The same. Not where `x` is.
    pub out: Slice<'a>,
    pub epsilon: f32,
    /// With a number, the result is multiplied by it and added to what is there.
    pub add: Option<f32>,
}

impl<'a> Pass<'a> {
    /// # Errors
    /// [`VulkanError::Driver`].
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn norm(&mut self, norm: Norm<'a>) -> Result<(), VulkanError> {
        let Norm {
            weight,
            width,
            x,
            out,
            epsilon,
            add,
        } = norm;
        let weight = Rows::of(weight, 1, width);
        let out = Rows::of(out, x.count, width);
        let params = [
            width as u32,
            x.count as u32,
            epsilon.to_bits(),
            u32::from(add.is_some()),
            add.unwrap_or(1.0).to_bits(),
        ];
        self.start(
            Kernel::Norm,
            &[weight, x.cut(width), out],
            &params,
            grid(x.count),
        )
    }
}
