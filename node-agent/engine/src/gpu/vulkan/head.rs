//! The output norm and the output head on a GPU: the last step of a pass there.

use std::ops::Range;

use prima_gguf::GgmlType;
use prima_vulkan::{Buffer, Matrix, Norm, Product, Rows, VulkanError, has_kernels, input_bytes};

use super::open::VulkanGpu;
use super::workspace::{Layout, Workspace, slice};
use crate::error::EngineError;
use crate::gpu::backend::{DeviceHead, HeadWeights, error};

/// Rows that go through the head at once: a vocabulary is wide, and their logits take memory of the GPU. The planner counts as many.
pub const GPU_HEAD_ROWS: usize = 32;

pub(super) struct VulkanHead {
    gpu: VulkanGpu,
    /// Of both, the matrix as the file has it.
    weights: Buffer,
    norm: Range<u64>,
    norm_epsilon: f32,
    matrix: Range<u64>,
    format: GgmlType,
    vocabulary: usize,
    hidden: usize,
}

impl VulkanHead {
    /// Copies the weights to the GPU.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for a format without kernels, and for more logits than kernels may see at once;
    /// [`VulkanError::OutOfMemory`].
    pub fn load(gpu: &VulkanGpu, weights: HeadWeights<'_>) -> Result<VulkanHead, VulkanError> {
        let HeadWeights {
            norm,
            norm_epsilon,
            matrix,
        } = weights;
        let device = &gpu.device;
        let (format, vocabulary) = (matrix.ggml_type(), matrix.rows());
        let refused = |what| Err(VulkanError::NoKernel { what });
        if !has_kernels(format) {
            return refused(format!("weights of format {format}"));
        }
        if row_bytes(vocabulary.max(matrix.cols())) > device.most_bound_bytes() {
            return refused(format!("{vocabulary} logits at once"));
        }
        let mut layout = Layout::new(device);
        let norm_place = layout.numbers(norm.len());
        let matrix_place = layout.bytes(matrix.bytes().len() as u64);
        let weights = device.buffer(layout.end())?;
        device.upload(weights.slice(norm_place.clone()), norm)?;
        device.upload(weights.slice(matrix_place.clone()), matrix.bytes())?;
        device.make_ready(&[format], &[], false)?;
        Ok(VulkanHead {
            gpu: gpu.clone(),
            weights,
            norm: norm_place,
            norm_epsilon,
            matrix: matrix_place,
            format,
            vocabulary,
            hidden: matrix.cols(),
        })
    }

    /// Rows whose logits are not larger than what kernels may see at once.
    fn most_rows(&self) -> usize {
        let widest = row_bytes(self.vocabulary.max(self.hidden));
        let fit = self.gpu.device.most_bound_bytes() / widest;
        (fit as usize).clamp(1, GPU_HEAD_ROWS)
    }

    fn pass(
        &self,
        workspace: &mut Workspace,
        hidden: &[f32],
        logits: &mut [f32],
    ) -> Result<(), VulkanError> {
        let device = &self.gpu.device;
        let rows = hidden.len() / self.hidden;
        let mut layout = Layout::new(device);
        let x = layout.numbers(hidden.len());
        let normed = layout.numbers(hidden.len());
        let bytes = layout.bytes(input_bytes(rows, self.hidden));
        let out = layout.numbers(logits.len());
        let buffer = workspace.with_room(device, &layout)?;
        let (x, normed) = (slice(buffer, &x), slice(buffer, &normed));
        let out = slice(buffer, &out);
        let mut pass = device.pass()?;
        pass.write(x, hidden)?;
        pass.barrier();
        let norm = Norm {
            weight: slice(&self.weights, &self.norm),
            width: self.hidden,
            x: Rows {
                slice: x,
                count: rows,
            },
            out: normed,
            epsilon: self.norm_epsilon,
            add: None,
        };
        let input = pass.norm_input(norm, slice(buffer, &bytes))?;
        pass.barrier();
        let matrix = Matrix {
            weights: slice(&self.weights, &self.matrix),
            format: self.format,
            rows: self.vocabulary,
            cols: self.hidden,
        };
        let product = Product {
            x: input,
            out,
            bias: None,
            add: None,
        };
        pass.multiply(matrix, product)?;
        pass.finish_reading(out, logits)
    }
}

impl DeviceHead for VulkanHead {
    fn logits(&self, hidden: &[f32], logits: &mut [f32]) -> Result<(), EngineError> {
        let mut workspace = self.gpu.workspace();
        let most = self.most_rows();
        let passes = hidden.chunks(most * self.hidden);
        for (hidden, logits) in passes.zip(logits.chunks_mut(most * self.vocabulary)) {
            let done = self.pass(&mut workspace, hidden, logits);
            done.map_err(|source| error("compute its output head", source))?;
        }
        Ok(())
    }
}

/// Bytes of a row of so many numbers.
fn row_bytes(numbers: usize) -> u64 {
    4 * numbers as u64
}
