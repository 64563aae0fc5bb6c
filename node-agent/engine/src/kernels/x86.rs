//! What the levels of x86-64 share: from a weight format to its kernel.

use std::ops::Range;

use prima_gguf::GgmlType;

use super::formats::with_block_format;
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
            Activations::Quantized(x) => with_block_format!(
                product.matrix.ggml_type(),
                Format => panel::multiply::<I, Format>(product, x, rows),
                else no_kernel(product.matrix.ggml_type()),
            ),
        }
    }
}
