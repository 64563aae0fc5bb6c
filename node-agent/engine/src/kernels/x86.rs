//! What the levels of x86-64 share: from a weight format to its kernel.

use std::ops::Range;

use prima_gguf::GgmlType;

use super::formats;
use super::matmul::{Activations, Product, no_kernel};
use super::panel::{self, FloatFormat, Floats, Integers};

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

impl FloatFormat for F32 {
    const BYTES: usize = 4;
}

impl FloatFormat for F16 {
    const BYTES: usize = 2;
}

impl FloatFormat for Bf16 {
    const BYTES: usize = 2;
}

/// Computes the columns `rows` of the product's output with the kernels of `K`.
///
/// # Safety
/// The processor has the instructions of `K`, and no other thread writes these columns meanwhile.
#[inline(always)]
pub(super) unsafe fn multiply_by_format<K>(product: &Product<'_>, rows: Range<usize>)
where
    K: Integers + Floats<F32> + Floats<F16> + Floats<Bf16>,
{
    // SAFETY: passed on from the caller.
    unsafe {
        match product.activations {
            Activations::Float(x) => match product.matrix.ggml_type() {
                GgmlType::F32 => panel::float::<K, F32>(product, x, rows),
                GgmlType::F16 => panel::float::<K, F16>(product, x, rows),
                GgmlType::BF16 => panel::float::<K, Bf16>(product, x, rows),
                other => no_kernel(other),
            },
            Activations::Quantized(x) => match product.matrix.ggml_type() {
                GgmlType::Q4_0 => panel::quantized::<K, formats::Q4_0>(product, x, rows),
                GgmlType::Q4_1 => panel::quantized::<K, formats::Q4_1>(product, x, rows),
                GgmlType::Q5_0 => panel::quantized::<K, formats::Q5_0>(product, x, rows),
                GgmlType::Q5_1 => panel::quantized::<K, formats::Q5_1>(product, x, rows),
                GgmlType::Q8_0 => panel::quantized::<K, formats::Q8_0>(product, x, rows),
                GgmlType::Q2K => panel::quantized::<K, formats::Q2K>(product, x, rows),
                GgmlType::Q3K => panel::quantized::<K, formats::Q3K>(product, x, rows),
                GgmlType::Q4K => panel::quantized::<K, formats::Q4K>(product, x, rows),
                GgmlType::Q5K => panel::quantized::<K, formats::Q5K>(product, x, rows),
                GgmlType::Q6K => panel::quantized::<K, formats::Q6K>(product, x, rows),
                other => no_kernel(other),
            },
        }
    }
}
