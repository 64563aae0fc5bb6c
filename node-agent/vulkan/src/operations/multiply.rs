//! Products of rows with a matrix of weights, as the file has them.

use prima_gguf::GgmlType;

use super::input::{Input, input_bytes};
use super::{Rows, UNIT};
use crate::buffer::Slice;
use crate::error::VulkanError;
use crate::kernels::{FEW_ROWS, Kernel, Shape, takes_bytes};
use crate::pass::{MOST_GROUPS, Pass};

/// A matrix on a GPU: `rows` outputs by `cols` inputs in the blocks of `format`, row after row.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub weights: Slice<'a>,
    pub format: GgmlType,
    pub rows: usize,
    pub cols: usize,
}

/// What becomes of a product, row by row of it: out = x * weights + bias, or out += scale * (x * weights + bias).
#[derive(Clone, Copy)]
pub struct Product<'a> {
    /// Rows x the matrix's columns.
    pub x: Input<'a>,
    /// F32, rows x the matrix's rows.
    pub out: Slice<'a>,
    /// F32, one for each of the matrix's rows.
    pub bias: Option<Slice<'a>>,
    /// With a number, the product is multiplied by it and added to what is there.
    pub add: Option<f32>,
}

impl<'a> Pass<'a> {
    /// Multiplies rows by a matrix. The parts of a matrix that is larger than kernels may see at once, or with more to do than a part of a pass may
    /// have, come one after another.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for a format without kernels, and for rows that are not a multiple of 16 numbers.
    ///
    /// # Panics
    /// When sizes do not fit each other.
    pub fn multiply(
        &mut self,
        matrix: Matrix<'a>,
        product: Product<'a>,
    ) -> Result<(), VulkanError> {
        let Matrix {
            weights,
            format,
            rows: matrix_rows,
            cols,
        } = matrix;
        let Product { x, out, bias, add } = product;
        let row_bytes = row_bytes(format, cols)?;
        assert_eq!(x.width, cols, "numbers of a row, and columns");
        let count = x.rows.count;
        if count == 0 {
            return Ok(());
        }
        let out = Rows::of(out, count, matrix_rows);
        let bias = bias.map(|bias| Rows::of(bias, 1, matrix_rows));
        let rows = match count <= FEW_ROWS && takes_bytes(format) {
            true => x.bytes.first(input_bytes(count, cols)),
            false => x.rows.cut(cols),
        };
        let shape = Shape::of(count, format, self.device().abilities());
        let (group_rows, group_matrix_rows) = shape.group();
        // Those of rows that only fill up a group are done, too.
        let row_flop = 2 * (count.next_multiple_of(group_rows) * cols) as u64;
        let in_part = (self.device().most_part_flop() / row_flop).max(1) as usize;
        let in_groups = MOST_GROUPS as usize * group_matrix_rows;
        let most = self.most_rows(row_bytes, in_groups.min(in_part));
        let mut first = 0;
        while first < matrix_rows {
            let part = most.min(matrix_rows - first);
            let bytes = first as u64 * row_bytes..(first + part) as u64 * row_bytes;
            let flags = u32::from(bias.is_some()) | (u32::from(add.is_some()) << 1);
            let params = [
                cols as u32,
                part as u32,
                first as u32,
                count as u32,
                matrix_rows as u32,
                flags,
                add.unwrap_or(1.0).to_bits(),
                // Of experts.
                0,
                0,
            ];
            // A kernel names its bias even where it reads none, and rows of bytes twice, by their parts.
            let slices = [weights.part(bytes), rows, out, bias.unwrap_or(rows), rows];
            let groups = [
                part.div_ceil(group_matrix_rows) as u32,
                count.div_ceil(group_rows) as u32,
            ];
            let (kernel, flop) = (Kernel::Multiply(shape, format), part as u64 * row_flop);
            self.start_long(kernel, &slices, &params, groups, flop)?;
            first += part;
        }
        Ok(())
    }

    /// How many rows of a matrix a kernel may see at once, of so many.
    fn most_rows(&self, row_bytes: u64, of: usize) -> usize {
        let device = self.device();
        let most = (device.most_bound_bytes() / row_bytes).min(of as u64);
        whole_steps(most, row_bytes, device.alignment())
    }
}

/// # Errors
/// [`VulkanError::NoKernel`] for rows that are not a multiple of 16 numbers.
pub(super) fn row_bytes(format: GgmlType, cols: usize) -> Result<u64, VulkanError> {
    if !cols.is_multiple_of(UNIT.max(format.block_len())) {
        return Err(VulkanError::NoKernel {
            what: format!("{format} weights in rows of {cols}: it takes a multiple of {UNIT}"),
        });
    }
    Ok((cols / format.block_len() * format.block_bytes()) as u64)
}

/// At most so many rows, or the fewest, so that the next ones begin where a slice may begin.
pub(super) fn whole_steps(most: u64, row_bytes: u64, alignment: u64) -> usize {
    // As many rows begin at a multiple of the alignment.
    let step = alignment / greatest_common_divisor(alignment, row_bytes);
    (most - most % step).max(step) as usize
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_matrix_begin_where_slices_may() {
        // A vocabulary of 262,208 with rows of 3,150 bytes (Gemma 3 of 12B, Q6_K): more than there are groups for.
        for (most, row_bytes, alignment) in [
            (262_140, 3150, 16),
            (262_140, 3150, 256),
            (3, 612, 64),
            (1, 34, 16),
        ] {
            let rows = whole_steps(most, row_bytes, alignment) as u64;
            assert!(rows > 0 && (rows * row_bytes).is_multiple_of(alignment));
            let step = alignment / greatest_common_divisor(alignment, row_bytes);
            assert!(rows <= most.max(step) && rows + step > most);
        }
    }
}
