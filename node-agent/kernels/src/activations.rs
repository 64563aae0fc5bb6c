//! Activations as the matrix kernels take them: 8-bit integers with scales, quantized exactly as llama.cpp
//! does for each family of weight formats, so that results stay close to its own; or plain floats for
//! float weights. Decides which form a weight format needs.

use std::ops::Range;

use prima_gguf::GgmlType;

use super::formats::{BlockFormat, with_block_format};
use super::numerics::{ROUNDER, round_to_f16_precision};
use super::per_level;
use super::shared_slice::SharedSlice;
use super::thread_pool::ThreadPool;

/// What a weight format multiplies with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// F32 as given.
    Float,
    /// ggml's Q8_0 and Q8_1: a scale per 32.
    Blocks,
    /// ggml's Q8_K: a scale per 256; sums per weight group of 16 or 32.
    SuperBlocks { group: usize },
}

impl Form {
    /// The form for a supported weight format.
    pub(super) fn of(ggml_type: GgmlType) -> Form {
        match ggml_type {
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => Form::Float,
            other => with_block_format!(
                other,
                Format => match Format::BLOCK {
                    256 => Form::SuperBlocks { group: Format::GROUP },
                    _ => Form::Blocks,
                },
                else Form::Blocks,
            ),
        }
    }
}

/// Rows of activations in 8 bits. Per row: `cols` values, and a scale and sums for each of its
/// `cols / group` groups (the groups of the weight format).
#[derive(Clone, Copy)]
pub(super) struct QuantizedRows<'a> {
    pub(super) cols: usize,
    /// Groups per row.
    pub(super) groups: usize,
    /// In -127..=127.
    pub(super) values: &'a [i8],
    /// What a value of the group is worth.
    pub(super) scales: &'a [f32],
    /// Minus the sum of the group's values. Times a format's offset, it corrects for the offset.
    pub(super) negated_sums: &'a [i32],
    /// The sum of the group's values times the scale.
    pub(super) scaled_sums: &'a [f32],
}

/// What [`QuantizedRows`] are rows of.
pub(super) struct QuantizedActivations {
    cols: usize,
    groups: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
    negated_sums: Vec<i32>,
    scaled_sums: Vec<f32>,
}

/// Rows per piece of work.
const PIECE_ROWS: usize = 16;

impl QuantizedActivations {
    /// These rows.
    pub(super) fn rows(&self, rows: Range<usize>) -> QuantizedRows<'_> {
        let groups = rows.start * self.groups..rows.end * self.groups;
        QuantizedRows {
            cols: self.cols,
            groups: self.groups,
            values: &self.values[rows.start * self.cols..rows.end * self.cols],
            scales: &self.scales[groups.clone()],
            negated_sums: &self.negated_sums[groups.clone()],
            scaled_sums: &self.scaled_sums[groups],
        }
    }

    /// Quantizes `n` rows of `cols` floats. `form` is not [`Form::Float`].
    pub(super) fn new(pool: &ThreadPool, form: Form, x: &[f32], n: usize, cols: usize) -> Self {
        let group = match form {
            Form::SuperBlocks { group } => group,
            Form::Blocks | Form::Float => 32,
        };
        let groups = cols / group;
        let mut rows = QuantizedActivations {
            cols,
            groups,
            values: vec![0; n * cols],
            scales: vec![0.0; n * groups],
            negated_sums: vec![0; n * groups],
            scaled_sums: vec![0.0; n * groups],
        };
        let values = SharedSlice::new(&mut rows.values);
        let scales = SharedSlice::new(&mut rows.scales);
        let negated_sums = SharedSlice::new(&mut rows.negated_sums);
        let scaled_sums = SharedSlice::new(&mut rows.scaled_sums);
        pool.run(n.div_ceil(PIECE_ROWS), &|piece| {
            let (first, last) = (piece * PIECE_ROWS, ((piece + 1) * PIECE_ROWS).min(n));
            let x = &x[first * cols..last * cols];
            // SAFETY: each piece takes the parts of its own rows, and rows are in one piece each.
            let (values, scales, negated_sums, scaled_sums) = unsafe {
                (
                    values.part(first * cols..last * cols),
                    scales.part(first * groups..last * groups),
                    negated_sums.part(first * groups..last * groups),
                    scaled_sums.part(first * groups..last * groups),
                )
            };
            // Rows are whole numbers of blocks, so several are quantized like one long row.
            match form {
                Form::SuperBlocks { group: 16 } => {
                    super_blocks_16(pool.level(), x, values, scales, negated_sums, scaled_sums);
                }
                Form::SuperBlocks { .. } => {
                    super_blocks_32(pool.level(), x, values, scales, negated_sums, scaled_sums);
                }
                Form::Blocks | Form::Float => {
                    blocks(pool.level(), x, values, scales, negated_sums, scaled_sums);
                }
            }
        });
        rows
    }
}

per_level! {
    fn blocks(level, x: &[f32], values: &mut [i8], scales: &mut [f32], negated_sums: &mut [i32], scaled_sums: &mut [f32]) {
        for (block, x) in x.as_chunks::<32>().0.iter().enumerate() {
            let largest = largest_magnitude(x);
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let scale = largest / 127.0;
            let sum = quantize(x, inverse, &mut values[32 * block..][..32]);
            // The file formats hold these two in half precision, and llama.cpp computes with the rounded
            // numbers.
            scales[block] = round_to_f16_precision(scale);
            scaled_sums[block] = round_to_f16_precision(scale * sum as f32);
            negated_sums[block] = -sum;
        }
    }
}

per_level! {
    fn super_blocks_16(level, x: &[f32], values: &mut [i8], scales: &mut [f32], negated_sums: &mut [i32], scaled_sums: &mut [f32]) {
        super_blocks::<16>(x, values, scales, negated_sums, scaled_sums);
    }
}

per_level! {
    fn super_blocks_32(level, x: &[f32], values: &mut [i8], scales: &mut [f32], negated_sums: &mut [i32], scaled_sums: &mut [f32]) {
        super_blocks::<32>(x, values, scales, negated_sums, scaled_sums);
    }
}

#[inline(always)]
fn super_blocks<const GROUP: usize>(
    x: &[f32],
    values: &mut [i8],
    scales: &mut [f32],
    negated_sums: &mut [i32],
    scaled_sums: &mut [f32],
) {
    for (block, x) in x.as_chunks::<256>().0.iter().enumerate() {
        let largest = largest_magnitude(x);
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let scale = if largest > 0.0 { 1.0 / inverse } else { 0.0 };
        let values = &mut values[256 * block..][..256];
        for (within, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
            let group = 256 / GROUP * block + within;
            let sum = quantize(x, inverse, &mut values[GROUP * within..][..GROUP]);
            scales[group] = scale;
            negated_sums[group] = -sum;
            scaled_sums[group] = scale * sum as f32;
        }
    }
}

/// NaN does not count.
#[inline(always)]
pub(super) fn largest_magnitude(x: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    for x in x.as_chunks::<16>().0 {
        for lane in 0..16 {
            let magnitude = x[lane].abs();
            lanes[lane] = if magnitude > lanes[lane] {
                magnitude
            } else {
                lanes[lane]
            };
        }
    }
    let mut width = 8;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = lanes[lane].max(lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Writes `x * inverse` rounded to integers (ties to even); returns their sum.
#[inline(always)]
fn quantize(x: &[f32], inverse: f32, values: &mut [i8]) -> i32 {
    let mut sum = 0;
    for (value, x) in values.iter_mut().zip(x) {
        let rounded = (x * inverse + ROUNDER).to_bits() as i8;
        *value = rounded;
        sum += i32::from(rounded);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::super::isa_level::IsaLevel;
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| (i as f32 * 0.37).sin() * (1.0 + (i % 91) as f32))
            .collect()
    }

    #[test]
    fn quantized_activations_are_within_half_a_step() {
        let x = wave(3 * 512);
        for level in IsaLevel::available() {
            let pool = ThreadPool::new(2, level).unwrap();
            for form in [
                Form::Blocks,
                Form::SuperBlocks { group: 16 },
                Form::SuperBlocks { group: 32 },
            ] {
                let rows = QuantizedActivations::new(&pool, form, &x, 3, 512);
                let group = 512 / rows.groups;
                for (i, x) in x.iter().enumerate() {
                    let scale = rows.scales[i / group];
                    let error = (f32::from(rows.values[i]) * scale - x).abs();
                    // Half a step, and what rounding the scale to 11 bits adds at most.
                    assert!(error <= scale * (0.5 + 127.0 / 2048.0), "{form:?} {i}");
                }
                for (group_index, sum) in rows.negated_sums.iter().enumerate() {
                    let values = &rows.values[group_index * group..][..group];
                    assert_eq!(-*sum, values.iter().map(|v| i32::from(*v)).sum::<i32>());
                }
            }
        }
    }

    #[test]
    fn every_level_quantizes_to_the_same_bits() {
        let mut x = wave(2 * 768);
        x[..32].fill(0.0);
        x[40] = 1e20;
        x[300] = -1e-30;
        for form in [
            Form::Blocks,
            Form::SuperBlocks { group: 16 },
            Form::SuperBlocks { group: 32 },
        ] {
            let scalar = ThreadPool::new(1, IsaLevel::SCALAR).unwrap();
            let expected = QuantizedActivations::new(&scalar, form, &x, 2, 768);
            for level in IsaLevel::available() {
                let pool = ThreadPool::new(1, level).unwrap();
                let rows = QuantizedActivations::new(&pool, form, &x, 2, 768);
                assert_eq!(rows.values, expected.values);
                assert_eq!(rows.negated_sums, expected.negated_sums);
                assert_eq!(rows.scales, expected.scales);
                assert_eq!(rows.scaled_sums, expected.scaled_sums);
            }
        }
    }
}
