//! Layers and the output head on a GPU, computed by candle: CUDA or Metal, as the engine was built.
//!
//! Decides: which device is used (the first one), and the format of the weights there (as in the file).

mod attention;
mod facts;
mod head;
mod kv;
mod layers;
mod open;
mod products;

use std::ops::Range;

use candle_core::Tensor;
use prima_vulkan::Timeline;

use super::backend::{Backend, DeviceHead, DeviceMatrix, DeviceRows, HeadWeights, error, own};
use super::facts::GpuFacts;
use crate::device::KvPositions;
use crate::error::EngineError;
use crate::executor::{Executor, ManyRowsExecutor};
use crate::kernels::{Matrix, ThreadPool};
use crate::model::Model;
use crate::residency::Residency;
use head::CandleHead;
use layers::CandleLayers;
pub(super) use open::CandleGpu;
use products::Weights;

impl Backend for CandleGpu {
    fn facts(&self) -> Result<GpuFacts, EngineError> {
        facts::facts(&self.device).map_err(|source| error("tell its name and memory", source))
    }

    fn allocated_bytes(&self) -> Option<u64> {
        None
    }

    fn load(
        &self,
        model: &Model,
        layers: Range<usize>,
        first_place: usize,
        // Memory is taken as sequences grow.
        _kv_positions: KvPositions,
    ) -> Result<Box<dyn Executor>, EngineError> {
        let layers = CandleLayers::load(self, model, layers, first_place)?;
        Ok(Box::new(layers))
    }

    fn stream(
        &self,
        _model: &Model,
        _layers: Range<usize>,
        _residency: &Residency,
    ) -> Result<Box<dyn ManyRowsExecutor>, EngineError> {
        Err(error(
            "take weights for each pass",
            "that is done through Vulkan only",
        ))
    }

    fn load_head(&self, weights: HeadWeights<'_>) -> Result<Box<dyn DeviceHead>, EngineError> {
        let head = CandleHead::load(self, weights);
        Ok(Box::new(
            head.map_err(|source| error("take the output head", source))?,
        ))
    }

    fn copy_matrix(&self, matrix: Matrix<'_>) -> Result<DeviceMatrix, EngineError> {
        let copied = self.matrix(matrix);
        let copied = copied.map_err(|source| error("copy a matrix", source))?;
        Ok(DeviceMatrix(Box::new(copied)))
    }

    fn copy_rows(&self, numbers: &[f32], rows: usize) -> Result<DeviceRows, EngineError> {
        let shape = (rows, numbers.len() / rows.max(1));
        let copied = Tensor::from_slice(numbers, shape, &self.device)
            .and_then(|rows| self.device.synchronize().map(|()| rows));
        let copied = copied.map_err(|source| error("copy rows", source))?;
        Ok(DeviceRows(Box::new(copied)))
    }

    fn copy_weights(&self, _pool: &ThreadPool, weights: &[u8]) -> Result<(), EngineError> {
        let copied = Tensor::from_slice(weights, weights.len(), &self.device)
            .and_then(|copied| self.device.synchronize().map(|()| drop(copied)));
        copied.map_err(|source| error("copy weights", source))
    }

    fn copy_back(&self, rows: &DeviceRows) -> Result<Vec<f32>, EngineError> {
        let rows: &Tensor = own(&*rows.0)?;
        let numbers = rows.flatten_all().and_then(|flat| flat.to_vec1());
        numbers.map_err(|source| error("copy rows back", source))
    }

    fn multiply(&self, matrices: &[&DeviceMatrix], rows: &DeviceRows) -> Result<(), EngineError> {
        let rows: &Tensor = own(&*rows.0)?;
        for matrix in matrices {
            let matrix: &Weights = own(&*matrix.0)?;
            matrix
                .forward(rows)
                .map_err(|source| error("multiply", source))?;
        }
        self.finish()
    }

    fn read(&self, rows: &DeviceRows) -> Result<(), EngineError> {
        let rows: &Tensor = own(&*rows.0)?;
        rows.sum_all().map_err(|source| error("read", source))?;
        self.finish()
    }

    fn append(&self, rows: &DeviceRows, to: &DeviceRows) -> Result<(), EngineError> {
        let (rows, to): (&Tensor, &Tensor) = (own(&*rows.0)?, own(&*to.0)?);
        to.slice_set(rows, 0, 0)
            .map_err(|source| error("write", source))?;
        self.finish()
    }

    fn start_timeline(&self) -> Result<(), EngineError> {
        Err(error(
            "tell when it computes",
            "that is known through Vulkan only",
        ))
    }

    fn end_timeline(&self) -> Result<Timeline, EngineError> {
        Ok(Timeline::default())
    }
}
