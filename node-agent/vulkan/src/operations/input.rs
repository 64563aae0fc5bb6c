//! Rows that products multiply.

use super::norm::Norm;
use super::{Rows, UNIT, strided};
use crate::buffer::Slice;
use crate::error::VulkanError;
use crate::kernels::{FEW_ROWS, Kernel};
use crate::pass::Pass;

/// Rows to be multiplied: as they are, and, if they are few, rounded to bytes.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) width: usize,
    pub(super) bytes: Slice<'a>,
}

/// What makes the feed-forward part non-linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationFunction {
    Silu,
    /// With its usual approximation by tanh.
    Gelu,
    /// With g = min(gate, 7) and u = up within -7 and 7: g * sigmoid(1.702 g) * (u + 1). (gpt-oss)
    ClampedSwiglu,
}

/// Bytes of sixteen numbers that are rounded to bytes: these, their scale and their sum.
const PACKED: usize = 24;

/// The room in which [`Pass::input`] rounds so many rows of so many numbers.
pub fn input_bytes(rows: usize, width: usize) -> u64 {
    match rows <= FEW_ROWS {
        true => packed_bytes(rows, width),
        false => 0,
    }
}

/// Bytes of so many rows of so many numbers that are rounded.
pub(super) fn packed_bytes(rows: usize, width: usize) -> u64 {
    // Kernels read sixteen bytes at once.
    (rows * width / UNIT * PACKED).next_multiple_of(16) as u64
}

impl<'a> Pass<'a> {
    /// Makes rows of `width` numbers ready to be multiplied, in `room` of [`input_bytes`]. Products wait for it with a barrier.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] when `width` is not a multiple of 16.
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn input(
        &mut self,
        rows: Rows<'a>,
        width: usize,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        let input = Input::of(rows, width, room)?;
        self.pack(input)?;
        Ok(input)
    }

    /// Rounds what has room for it.
    pub(super) fn pack(&mut self, input: Input<'a>) -> Result<(), VulkanError> {
        if input.has_bytes() {
            let count = input.rows.count * input.width / UNIT;
            let slices = [input.rows.cut(input.width), input.bytes];
            self.start(Kernel::Pack, &slices, &[count as u32], strided(count, 64))?;
        }
        Ok(())
    }

    /// As [`norm`](Self::norm), whose result is ready to be multiplied, as by [`input`](Self::input). It adds nothing to what is there.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn norm_input(
        &mut self,
        norm: Norm<'a>,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        let Norm {
            weight,
            width,
            x,
            out,
            epsilon,
            ..
        } = norm;
        let rows = Rows {
            slice: out,
            count: x.count,
        };
        let input = Input::of(rows, width, room)?;
        if !input.has_bytes() {
            self.norm(norm)?;
            return Ok(input);
        }
        let params = [(width / UNIT) as u32, x.count as u32, epsilon.to_bits()];
        let weight = Rows::of(weight, 1, width);
        let slices = [weight, x.cut(width), rows.cut(width), input.bytes];
        self.start(Kernel::NormPack, &slices, &params, [x.count as u32, 1])?;
        Ok(input)
    }

    /// gate = activation(gate) * up, or as [`ActivationFunction`] says, rows of `width` numbers of both (F32), ready to be multiplied, as by
    /// [`input`](Self::input).
    ///
    /// # Errors
    /// As [`input`](Self::input).
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn gate_input(
        &mut self,
        activation: ActivationFunction,
        gate: Rows<'a>,
        up: Slice<'a>,
        width: usize,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        let input = Input::of(gate, width, room)?;
        self.gate(activation, input, up)?;
        Ok(input)
    }

    /// The same, of which those that have room for it are rounded.
    pub(super) fn gate(
        &mut self,
        activation: ActivationFunction,
        input: Input<'a>,
        up: Slice<'a>,
    ) -> Result<(), VulkanError> {
        let Input {
            rows: gate, width, ..
        } = input;
        let (up, numbers) = (Rows::of(up, gate.count, width), gate.count * width);
        let kind = match activation {
            ActivationFunction::Silu => 0,
            ActivationFunction::Gelu => 1,
            ActivationFunction::ClampedSwiglu => 2,
        };
        if input.has_bytes() {
            let count = numbers / UNIT;
            let slices = [up, gate.cut(width), input.bytes];
            let params = [count as u32, kind];
            self.start(Kernel::GatePack, &slices, &params, strided(count, 64))?;
        } else {
            let count = numbers / 4;
            let params = [count as u32, kind];
            let slices = [up, gate.cut(width)];
            self.start(Kernel::Gate, &slices, &params, strided(count, 256))?;
        }
        Ok(())
    }
}

impl<'a> Input<'a> {
    pub(super) fn of(
        rows: Rows<'a>,
        width: usize,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        Input::with_bytes(rows, width, room.first(input_bytes(rows.count, width)))
    }

    /// With exactly these bytes for the rounded rows; none: they are not rounded.
    pub(super) fn with_bytes(
        rows: Rows<'a>,
        width: usize,
        bytes: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        match width.is_multiple_of(UNIT) {
            true => Ok(Input { rows, width, bytes }),
            false => Err(VulkanError::NoKernel {
                what: format!("rows of {width} numbers: it takes a multiple of {UNIT}"),
            }),
        }
    }

    /// Whether there are any, and few.
    pub(super) fn has_bytes(&self) -> bool {
        self.bytes.bytes() > 0
    }
}
