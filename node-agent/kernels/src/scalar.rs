//! The matrix kernels in plain Rust, one weight row at a time: the specification of the arithmetic, and what
//! runs on processors without a faster level.
//!
//! Quantized: within a group the products are summed as integers, exactly; groups are added in order,
//! each with one fused multiply-add (and one more for its minimum); two roundings at levels that cannot fuse
//! (`IsaLevel::fuses`). Float: 32 products at a time are summed
//! in order, and these sums are added in order.

use std::ops::Range;

use prima_gguf::GgmlType;

use super::activations::QuantizedRows;
use super::formats::{BlockFormat, MAX_BLOCK, MIN_GROUP, with_block_format};
use super::matrix::no_kernel;
use super::numerics::{bf16_to_f32, f16_to_f32, multiply_add};
use super::product::{Activations, Product};

/// Products summed before they are added to the total, for float weights.
pub(super) const FLOAT_GROUP: usize = 32;

/// Computes the columns `rows` of the product's output.
pub(super) fn multiply(product: &Product<'_>, rows: Range<usize>) {
    match product.activations {
        Activations::Float(x) => match product.matrix.ggml_type() {
            GgmlType::F32 => float::<4>(product, x, rows, f32::from_le_bytes),
            GgmlType::F16 => float::<2>(product, x, rows, |b| f16_to_f32(u16::from_le_bytes(b))),
            GgmlType::BF16 => float::<2>(product, x, rows, |b| bf16_to_f32(u16::from_le_bytes(b))),
            other => no_kernel(other),
        },
        Activations::Quantized(x) => with_block_format!(
            product.matrix.ggml_type(),
            Format => quantized::<Format>(product, &x, rows),
            else no_kernel(product.matrix.ggml_type()),
        ),
    }
}

fn quantized<F: BlockFormat>(product: &Product<'_>, x: &QuantizedRows<'_>, rows: Range<usize>) {
    let mut values = [0; MAX_BLOCK];
    let mut scales = [0.0; MAX_BLOCK / MIN_GROUP];
    let mut minimums = [0.0; MAX_BLOCK / MIN_GROUP];
    let groups = F::BLOCK / F::GROUP;
    for row in rows {
        let weights = product.matrix.row(row);
        for (block, bytes) in weights.chunks_exact(F::BYTES).enumerate() {
            F::unpack(bytes, &mut values, &mut scales, &mut minimums);
            for i in 0..product.n {
                let mut total = if block == 0 {
                    0.0
                } else {
                    get(product, i, row)
                };
                let x_values = &x.values[i * x.cols + block * F::BLOCK..][..F::BLOCK];
                for group in 0..groups {
                    let at = i * x.groups + block * groups + group;
                    let within = group * F::GROUP..(group + 1) * F::GROUP;
                    let sum = dot(&values[within.clone()], &x_values[within]);
                    let sum = sum + F::OFFSET * x.negated_sums[at];
                    total = (sum as f32).mul_add(scales[group] * x.scales[at], total);
                    if F::AFFINE {
                        total = minimums[group].mul_add(x.scaled_sums[at], total);
                    }
                }
                set(product, i, row, total);
            }
        }
    }
}

fn float<const BYTES: usize>(
    product: &Product<'_>,
    x: &[f32],
    rows: Range<usize>,
    number: impl Fn([u8; BYTES]) -> f32,
) {
    let cols = product.matrix.cols();
    let mut weights = vec![0.0; cols];
    for row in rows {
        let (numbers, _) = product.matrix.row(row).as_chunks::<BYTES>();
        for (weight, bytes) in weights.iter_mut().zip(numbers) {
            *weight = number(*bytes);
        }
        for i in 0..product.n {
            let x = &x[i * cols..][..cols];
            let mut total = 0.0;
            for (weights, x) in weights.chunks(FLOAT_GROUP).zip(x.chunks(FLOAT_GROUP)) {
                let mut sum = 0.0;
                for (weight, x) in weights.iter().zip(x) {
                    sum = multiply_add(*weight, *x, sum);
                }
                total += sum;
            }
            set(product, i, row, total);
        }
    }
}

#[inline(always)]
fn dot(values: &[u8], x: &[i8]) -> i32 {
    let mut sum = 0;
    for (value, x) in values.iter().zip(x) {
        sum += i32::from(*value) * i32::from(*x);
    }
    sum
}

#[inline(always)]
fn get(product: &Product<'_>, i: usize, row: usize) -> f32 {
    let at = i * product.matrix.rows() + row;
    // SAFETY: `row` is of the rows of this piece, whose column of the output no other piece touches.
    unsafe { product.out.part(at..at + 1)[0] }
}

#[inline(always)]
fn set(product: &Product<'_>, i: usize, row: usize, value: f32) {
    let at = i * product.matrix.rows() + row;
    // SAFETY: `row` is of the rows of this piece, whose column of the output no other piece touches.
    unsafe { product.out.part(at..at + 1)[0] = value };
}
