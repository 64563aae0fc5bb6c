//! Weights on a device of candle, and products with them.
//!
//! Decides: that no weights are made wider for a product. What F16 and BF16 weights are multiplied by is made narrower, and what comes out is F32
//! again. Sums within a product are F32, as candle asks of cuBLAS.

use candle_core::quantized::QMatMul;
use candle_core::{D, DType, Module, Result, Tensor};

/// Added to what is divided by, so that it is never 0. F32 has it, and loses it beside any number that matters.
const ABOVE_ZERO: f64 = 1e-30;

/// A weight matrix on the device.
pub(in crate::gpu) enum Weights {
    Quantized(QMatMul),
    /// Columns x rows of the matrix, as the right side of a product has it.
    Float(Tensor),
}

impl Weights {
    /// The products of `rows` (n x columns, F32) with the matrix: n x its rows, F32.
    pub fn forward(&self, rows: &Tensor) -> Result<Tensor> {
        match self {
            Weights::Quantized(matrix) => matrix.forward(rows),
            Weights::Float(matrix) => product(rows, matrix),
        }
    }
}

/// The product of `rows` (F32) with `matrix`, computed in the type of `matrix`; F32.
///
/// F16 ends at 65,504, which activations of some models exceed. So each row is divided by its largest number before, and multiplied by it
/// afterwards. BF16 has the range of F32.
fn product(rows: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    let stored = matrix.dtype();
    let multiplied = |rows: &Tensor| rows.to_dtype(stored)?.matmul(matrix)?.to_dtype(DType::F32);
    if stored != DType::F16 {
        return multiplied(rows);
    }
    let largest = (rows.abs()?.max_keepdim(D::Minus1)? + ABOVE_ZERO)?;
    multiplied(&rows.broadcast_div(&largest)?)?.broadcast_mul(&largest)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn rows_that_f16_cannot_hold_are_multiplied_in_it() -> Result<()> {
        let matrix = [[1_f32, 1.0, 1.0, 1.0], [60_000.0, 1.0, 0.0, -1.0]];
        let rows = [[1e6_f32, 2e6, 0.0, -1e6], [1e-9, 2e-9, 0.0, 5e-9], [0.0; 4]];
        let matrix = Tensor::new(&matrix, &Device::Cpu)?.to_dtype(DType::F16)?;
        let rows = Tensor::new(&rows, &Device::Cpu)?;
        let found = product(&rows, &matrix.t()?)?.to_vec2::<f32>()?;
        let expected = [[2e6, 6.0003e10], [8e-9, 5.9997e-5], [0.0; 2]];
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            // Three times a number is rounded to the 11 bits of F16.
            let bound = 3.0 / 2048.0 * f32::abs(*expected);
            assert!((found - expected).abs() <= bound, "{found}, {expected}");
        }
        Ok(())
    }
}
