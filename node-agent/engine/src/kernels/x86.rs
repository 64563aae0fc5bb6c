//! What the levels of x86-64 share: from a weight format to its kernel.

use std::ops::Range;

use prima_gguf::GgmlType;

use super::formats;
use super::matmul::{Activations, Product, no_kernel};
use super::panel::floats::{self, Bf16, F16, F32};
use super::panel::{self, Integers};

/// Computes the columns `rows` of the product's output with the kernels of `I`.
///
/// # Safety
/// The processor has the instructions of `I`, and no other thread writes these columns meanwhile.
#[inline(always)]
pub(super) unsafe fn multiply_by_format<I: Integers>(product: &Product<'_>, rows: Range<usize>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match product.activations {
            Activations::Float(x) => match product.matrix.ggml_type() {
                GgmlType::F32 => floats::multiply::<I::Words, F32>(product, x, rows),
                GgmlType::F16 => floats::multiply::<I::Words, F16>(product, x, rows),
                GgmlType::BF16 => floats::multiply::<I::Words, Bf16>(product, x, rows),
                other => no_kernel(other),
            },
            Activations::Quantized(x) => match product.matrix.ggml_type() {
                GgmlType::Q4_0 => panel::multiply::<I, formats::Q4_0>(product, x, rows),
                GgmlType::Q4_1 => panel::multiply::<I, formats::Q4_1>(product, x, rows),
                GgmlType::Q5_0 => panel::multiply::<I, formats::Q5_0>(product, x, rows),
                GgmlType::Q5_1 => panel::multiply::<I, formats::Q5_1>(product, x, rows),
                GgmlType::Q8_0 => panel::multiply::<I, formats::Q8_0>(product, x, rows),
                GgmlType::Q2K => panel::multiply::<I, formats::Q2K>(product, x, rows),
                GgmlType::Q3K => panel::multiply::<I, formats::Q3K>(product, x, rows),
                GgmlType::Q4K => panel::multiply::<I, formats::Q4K>(product, x, rows),
                GgmlType::Q5K => panel::multiply::<I, formats::Q5K>(product, x, rows),
                GgmlType::Q6K => panel::multiply::<I, formats::Q6K>(product, x, rows),
                GgmlType::Iq1S => panel::multiply::<I, formats::Iq1S>(product, x, rows),
                GgmlType::Iq1M => panel::multiply::<I, formats::Iq1M>(product, x, rows),
                GgmlType::Iq2Xxs => panel::multiply::<I, formats::Iq2Xxs>(product, x, rows),
                GgmlType::Iq2Xs => panel::multiply::<I, formats::Iq2Xs>(product, x, rows),
                GgmlType::Iq2S => panel::multiply::<I, formats::Iq2S>(product, x, rows),
                GgmlType::Iq3Xxs => panel::multiply::<I, formats::Iq3Xxs>(product, x, rows),
                GgmlType::Iq3S => panel::multiply::<I, formats::Iq3S>(product, x, rows),
                GgmlType::Iq4Nl => panel::multiply::<I, formats::Iq4Nl>(product, x, rows),
                GgmlType::Iq4Xs => panel::multiply::<I, formats::Iq4Xs>(product, x, rows),
                GgmlType::Mxfp4 => panel::multiply::<I, formats::Mxfp4>(product, x, rows),
                other => no_kernel(other),
            },
        }
    }
}
