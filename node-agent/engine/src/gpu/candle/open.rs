//! Opens a device of candle, and copies weights there.

use std::borrow::Cow;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use prima_gguf::GgmlType;

use super::products::Weights;
use crate::error::EngineError;
use crate::gpu::backend::error;
use crate::kernels::Matrix;

/// A device of candle. Clones share it.
#[derive(Debug, Clone)]
pub(in crate::gpu) struct CandleGpu {
    pub device: Device,
}

impl CandleGpu {
    /// Opens the first GPU of the kind that the engine was built for.
    ///
    /// # Errors
    /// [`EngineError::Gpu`] when there is no such device or its driver refuses.
    #[cfg(any(feature = "cuda", feature = "metal"))]
    pub fn open() -> Result<CandleGpu, EngineError> {
        let device = match cfg!(feature = "cuda") {
            true => Device::new_cuda(0),
            false => Device::new_metal(0),
        };
        let device = device.map_err(|source| error("be opened", source))?;
        Ok(CandleGpu { device })
    }

    /// The same computation on the CPU. Slower than the CPU's own layers, and copies the weights.
    pub fn on_cpu() -> CandleGpu {
        CandleGpu {
            device: Device::Cpu,
        }
    }

    /// Waits until everything asked for is done.
    pub fn finish(&self) -> Result<(), EngineError> {
        let done = self.device.synchronize();
        done.map_err(|source| error("finish", source))
    }

    /// A vector of numbers on the device.
    pub fn vector(&self, numbers: &[f32]) -> candle_core::Result<Tensor> {
        Tensor::from_slice(numbers, numbers.len(), &self.device)
    }

    /// Copies a matrix to the device, where it stays in the format of the file.
    pub fn matrix(&self, matrix: Matrix<'_>) -> candle_core::Result<Weights> {
        let shape = (matrix.rows(), matrix.cols());
        let float = |dtype| {
            let stored = match dtype {
                // candle's CPU has no products of it; its GPUs have.
                DType::BF16 => self.device.bf16_default_to_f32(),
                other => other,
            };
            Tensor::from_raw_buffer(matrix.bytes(), dtype, &[shape.0, shape.1], &self.device)?
                .to_dtype(stored)?
                .t()
                .map(Weights::Float)
        };
        let quantized = |dtype| {
            let storage = QStorage::from_data(Cow::Borrowed(matrix.bytes()), &self.device, dtype)?;
            QMatMul::from_qtensor(QTensor::new(storage, shape)?).map(Weights::Quantized)
        };
        match matrix.ggml_type() {
            GgmlType::F32 => float(DType::F32),
            GgmlType::F16 => float(DType::F16),
            GgmlType::BF16 => float(DType::BF16),
            GgmlType::Q4_0 => quantized(GgmlDType::Q4_0),
            GgmlType::Q4_1 => quantized(GgmlDType::Q4_1),
            GgmlType::Q5_0 => quantized(GgmlDType::Q5_0),
            GgmlType::Q5_1 => quantized(GgmlDType::Q5_1),
            GgmlType::Q8_0 => quantized(GgmlDType::Q8_0),
            GgmlType::Q2K => quantized(GgmlDType::Q2K),
            GgmlType::Q3K => quantized(GgmlDType::Q3K),
            GgmlType::Q4K => quantized(GgmlDType::Q4K),
            GgmlType::Q5K => quantized(GgmlDType::Q5K),
            GgmlType::Q6K => quantized(GgmlDType::Q6K),
            other => Err(candle_core::Error::Msg(format!(
                "no GPU kernels for weights of format {other}"
            ))),
        }
    }
}
