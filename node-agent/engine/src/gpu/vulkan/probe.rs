//! Single operations on a GPU, for measuring it: copies, products, reads, with the layers' own kernels. This file reads no clock, and nobody
//! needs the numbers that it computes.

use prima_gguf::GgmlType;
use prima_vulkan::{
    Buffer, Device, Heads, KV_POSITIONS, KvShape, Matrix, Product, Rows, SequenceRows, VulkanError,
    has_kernels, input_bytes,
};

use super::workspace::{Layout, Workspace, slice};
use crate::gpu::backend::{DeviceMatrix, DeviceRows};
use crate::kernels;

/// A matrix on the GPU.
pub(super) struct Weights {
    buffer: Buffer,
    format: GgmlType,
    rows: usize,
    cols: usize,
}

/// Rows of F32 numbers on the GPU.
pub(super) struct Numbers {
    buffer: Buffer,
    rows: usize,
    width: usize,
}

pub(super) fn copy_matrix(
    device: &Device,
    matrix: kernels::Matrix<'_>,
) -> Result<DeviceMatrix, VulkanError> {
    let format = matrix.ggml_type();
    if !has_kernels(format) {
        return Err(VulkanError::NoKernel {
            what: format!("weights of format {format}"),
        });
    }
    let buffer = device.buffer(matrix.bytes().len() as u64)?;
    device.upload(buffer.whole(), matrix.bytes())?;
    Ok(DeviceMatrix(Box::new(Weights {
        buffer,
        format,
        rows: matrix.rows(),
        cols: matrix.cols(),
    })))
}

pub(super) fn copy_rows(
    device: &Device,
    numbers: &[f32],
    rows: usize,
) -> Result<DeviceRows, VulkanError> {
    let buffer = device.buffer(size_of_val(numbers) as u64)?;
    device.upload(buffer.whole(), numbers)?;
    Ok(DeviceRows(Box::new(Numbers {
        buffer,
        rows,
        width: numbers.len() / rows.max(1),
    })))
}

pub(super) fn copy_back(device: &Device, rows: &Numbers) -> Result<Vec<f32>, VulkanError> {
    let mut numbers = vec![0.0; rows.rows * rows.width];
    let pass = device.pass()?;
    pass.finish_reading(rows.buffer.whole(), &mut numbers)?;
    Ok(numbers)
}

/// Products of one row that run side by side.
const AT_ONCE: usize = 8;

/// All products in one pass. Those of one row run side by side: what layers wait for between theirs is measured with layers. Each of more rows waits for
/// the one before, as there. Room is in the workspace, as theirs is: taking memory from a driver can take longer than the product.
pub(super) fn multiply(
    device: &Device,
    workspace: &mut Workspace,
    matrices: &[&Weights],
    rows: &Numbers,
) -> Result<(), VulkanError> {
    let most = matrices.iter().map(|matrix| matrix.rows).max().unwrap_or(0);
    let mut layout = Layout::new(device);
    let outs: [_; AT_ONCE] = std::array::from_fn(|_| layout.numbers(rows.rows * most));
    let room = layout.bytes(input_bytes(rows.rows, rows.width));
    let buffer = workspace.with_room(device, &layout)?;
    let mut pass = device.pass()?;
    let input = pass.input(rows.as_rows(), rows.width, slice(buffer, &room))?;
    let at_once = if rows.rows == 1 { AT_ONCE } else { 1 };
    for some in matrices.chunks(at_once) {
        pass.barrier();
        for (matrix, out) in some.iter().zip(&outs) {
            if matrix.cols != rows.width {
                return Err(VulkanError::NoKernel {
                    what: format!("{} columns times rows of {}", matrix.cols, rows.width),
                });
            }
            let product = Product {
                x: input,
                out: slice(buffer, out),
                bias: None,
                add: None,
            };
            let weights = Matrix {
                weights: matrix.buffer.whole(),
                format: matrix.format,
                rows: matrix.rows,
                cols: matrix.cols,
            };
            pass.multiply(weights, product)?;
        }
    }
    pass.finish()
}

/// As a matrix of floats is read when it is multiplied by one row.
pub(super) fn read(
    device: &Device,
    workspace: &mut Workspace,
    rows: &Numbers,
) -> Result<(), VulkanError> {
    let mut layout = Layout::new(device);
    let x = layout.numbers(rows.width);
    let out = layout.numbers(rows.rows);
    let room = layout.bytes(input_bytes(1, rows.width));
    let buffer = workspace.with_room(device, &layout)?;
    let x = Rows {
        slice: slice(buffer, &x),
        count: 1,
    };
    let mut pass = device.pass()?;
    let input = pass.input(x, rows.width, slice(buffer, &room))?;
    let product = Product {
        x: input,
        out: slice(buffer, &out),
        bias: None,
        add: None,
    };
    let weights = Matrix {
        weights: rows.buffer.whole(),
        format: GgmlType::F32,
        rows: rows.rows,
        cols: rows.width,
    };
    pass.multiply(weights, product)?;
    pass.finish()
}

/// Both as keys and as values, in F16: as many bytes in all as the rows have. As many numbers in a row as whole heads have.
pub(super) fn append(
    device: &Device,
    workspace: &mut Workspace,
    rows: &Numbers,
    to: &Numbers,
) -> Result<(), VulkanError> {
    const HEAD_DIM: usize = 128;
    assert!(to.width >= HEAD_DIM, "rows of {}", to.width);
    let kv = KvShape {
        kv_heads: to.width / HEAD_DIM,
        head_dim: HEAD_DIM,
        values_in_keys: None,
    };
    let positions = rows.rows.min(to.rows) / KV_POSITIONS * KV_POSITIONS;
    let listed: Vec<u32> = (0..(positions / KV_POSITIONS) as u32).collect();
    let mut layout = Layout::new(device);
    let blocks = layout.numbers(listed.len());
    let blocks = slice(workspace.with_room(device, &layout)?, &blocks);
    let bytes = listed.len() as u64 * kv.block_bytes();
    let mut pass = device.pass()?;
    pass.write(blocks, &listed)?;
    pass.barrier();
    let sequence = SequenceRows {
        blocks,
        blocks_at: 0,
        first_block: 0,
        cache: to.buffer.whole().first(bytes),
        kv,
        rows: positions,
        first_row: 0,
        first_position: 0,
    };
    let rows = rows.buffer.whole();
    pass.prepare_heads(Heads {
        sequence,
        heads: 0,
        queries: rows,
        keys: rows,
        values: rows,
        norms: None,
        rotation: None,
    })?;
    pass.finish()
}

impl Numbers {
    fn as_rows(&self) -> Rows<'_> {
        Rows {
            slice: self.buffer.whole(),
            count: self.rows,
        }
    }
}
