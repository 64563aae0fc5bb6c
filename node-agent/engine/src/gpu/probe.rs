//! Single operations on a GPU, for measuring it: copies, products, reads, each as the layers do it. This file reads no
//! clock, and nobody needs the numbers that it computes.

use candle_core::quantized::QMatMul;
use candle_core::{Module, Result, Tensor};

use super::{Gpu, error};
use crate::device::GpuFacts;
use crate::error::EngineError;
use crate::kernels::Matrix;

/// A weight matrix on a GPU.
pub struct DeviceMatrix(QMatMul);

/// Rows of numbers on a GPU.
pub struct DeviceRows(Tensor);

impl Gpu {
    /// # Errors
    /// [`EngineError::Gpu`] when the driver refuses, and for an emulated GPU.
    pub fn facts(&self) -> std::result::Result<GpuFacts, EngineError> {
        facts(&self.device).map_err(|source| error("tell its name and memory", source))
    }

    /// Copies a matrix to the GPU, as layers are copied.
    ///
    /// # Errors
    /// [`EngineError::Gpu`]: no memory, or no kernels for the format.
    pub fn copy_matrix(
        &self,
        matrix: Matrix<'_>,
    ) -> std::result::Result<DeviceMatrix, EngineError> {
        let copied = self.matrix(matrix);
        Ok(DeviceMatrix(
            copied.map_err(|source| error("copy a matrix", source))?,
        ))
    }

    /// Copies `rows` rows of numbers to the GPU, as activations are copied.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also when the numbers are not whole rows.
    pub fn copy_rows(
        &self,
        numbers: &[f32],
        rows: usize,
    ) -> std::result::Result<DeviceRows, EngineError> {
        let shape = (rows, numbers.len() / rows.max(1));
        let copied = Tensor::from_slice(numbers, shape, &self.device);
        Ok(DeviceRows(
            copied.map_err(|source| error("copy rows", source))?,
        ))
    }

    /// Waits until everything asked for is done.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn finish(&self) -> std::result::Result<(), EngineError> {
        let done = self.device.synchronize();
        done.map_err(|source| error("finish", source))
    }
}

impl DeviceMatrix {
    /// Begins the product with `rows`.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also when the rows have another length than the matrix.
    pub fn multiply(&self, rows: &DeviceRows) -> std::result::Result<DeviceRows, EngineError> {
        let product = self.0.forward(&rows.0);
        Ok(DeviceRows(
            product.map_err(|source| error("multiply", source))?,
        ))
    }
}

impl DeviceRows {
    /// Begins to read every number once.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn read(&self) -> std::result::Result<(), EngineError> {
        let sum = self.0.sum_all();
        sum.map(drop).map_err(|source| error("read", source))
    }

    /// Begins to overwrite the first rows with `rows` (no more than there are here), the way keys and values are appended.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn write(&self, rows: &DeviceRows) -> std::result::Result<(), EngineError> {
        let written = self.0.slice_set(&rows.0, 0, 0);
        written.map_err(|source| error("write", source))
    }

    /// Waits until the numbers are computed, and copies them back.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn copy_back(&self) -> std::result::Result<Vec<f32>, EngineError> {
        let numbers = self.0.flatten_all().and_then(|flat| flat.to_vec1());
        numbers.map_err(|source| error("copy rows back", source))
    }
}

#[cfg(feature = "cuda")]
fn facts(device: &candle_core::Device) -> Result<GpuFacts> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let context = stream.context();
    let name = context.name().map_err(candle_core::Error::wrap)?;
    let (available, total) = context.mem_get_info().map_err(candle_core::Error::wrap)?;
    Ok(GpuFacts {
        name,
        unified_memory: false,
        total_bytes: total as u64,
        available_bytes: available as u64,
    })
}

#[cfg(all(feature = "metal", not(feature = "cuda")))]
fn facts(device: &candle_core::Device) -> Result<GpuFacts> {
    let device = device.as_metal_device()?.metal_device();
    let total = device.recommended_max_working_set_size() as u64;
    let used = device.current_allocated_size() as u64;
    Ok(GpuFacts {
        name: device.architecture_name(),
        unified_memory: true,
        total_bytes: total,
        available_bytes: total.saturating_sub(used),
    })
}

#[cfg(not(any(feature = "cuda", feature = "metal")))]
fn facts(_device: &candle_core::Device) -> Result<GpuFacts> {
    Err(candle_core::Error::Msg(
        "this is the CPU, in place of a GPU".to_owned(),
    ))
}
