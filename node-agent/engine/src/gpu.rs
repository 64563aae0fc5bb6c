//! Layers on a GPU, computed by candle: CUDA or Metal, as the engine was built. However a pass is cut, the CPU's results are the same
//! bit for bit; a GPU's are the same up to rounding.
//!
//! Decides: which device is used (the first one), and the format of the weights there (as in the file; floats as F32). Refuses: to
//! use the CPU when a GPU was asked for.

mod kv;
mod layers;
mod probe;

use std::borrow::Cow;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use prima_gguf::GgmlType;

use crate::error::EngineError;
use crate::kernels::Matrix;

pub(crate) use kv::{DeviceKv, Reach};
pub(crate) use layers::GpuLayers;
pub use probe::{DeviceMatrix, DeviceRows};

/// A GPU of this machine. Clones share it.
#[derive(Debug, Clone)]
pub struct Gpu {
    device: Device,
}

impl Gpu {
    /// Opens the first GPU of the kind that the engine was built for.
    ///
    /// # Errors
    /// [`EngineError::NoGpu`] when it was built for none, [`EngineError::Gpu`] when there is no such device or its
    /// driver refuses.
    pub fn open() -> Result<Gpu, EngineError> {
        let device = if cfg!(feature = "cuda") {
            Device::new_cuda(0)
        } else if cfg!(feature = "metal") {
            Device::new_metal(0)
        } else {
            return Err(EngineError::NoGpu);
        };
        let device = device.map_err(|source| error("open the GPU", source))?;
        Ok(Gpu { device })
    }

    /// The same computation on the CPU, for tests on machines without a GPU. Slower than the CPU's own layers, and copies the
    /// weights.
    pub fn emulated() -> Gpu {
        Gpu {
            device: Device::Cpu,
        }
    }

    /// A vector of numbers on the device.
    fn vector(&self, numbers: &[f32]) -> candle_core::Result<Tensor> {
        Tensor::from_slice(numbers, numbers.len(), &self.device)
    }

    /// Copies a matrix to the device.
    fn matrix(&self, matrix: Matrix<'_>) -> candle_core::Result<QMatMul> {
        let shape = (matrix.rows(), matrix.cols());
        let float = |dtype| {
            Tensor::from_raw_buffer(matrix.bytes(), dtype, &[shape.0, shape.1], &self.device)?
                .to_dtype(DType::F32)
                .map(QMatMul::Tensor)
        };
        let quantized = |dtype| {
            let storage = QStorage::from_data(Cow::Borrowed(matrix.bytes()), &self.device, dtype)?;
            QMatMul::from_qtensor(QTensor::new(storage, shape)?)
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

fn error(action: &'static str, source: candle_core::Error) -> EngineError {
    EngineError::Gpu {
        action,
        source: Box::new(source),
    }
}
