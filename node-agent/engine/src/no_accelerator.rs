//! Stands in for `accelerator` in builds without it: types that have no values, so that the rest of the engine needs no
//! conditions.

use prima_model::ModelSpec;

use crate::batch::Sequence;
use crate::device::GpuFacts;
use crate::error::EngineError;
use crate::kernels::{KvShape, Matrix, RopeAngles};
use crate::layer::Layer;

/// A GPU of this machine; this build has code for none.
#[derive(Debug, Clone)]
pub enum Accelerator {}

/// A weight matrix on a GPU.
pub enum DeviceMatrix {}

/// Rows of numbers on a GPU.
pub enum DeviceRows {}

#[derive(Clone)]
pub(crate) enum DeviceKv {}

pub(crate) enum AcceleratedLayers {}

impl Accelerator {
    /// # Errors
    /// [`EngineError::NoAccelerator`], always.
    pub fn open() -> Result<Accelerator, EngineError> {
        Err(EngineError::NoAccelerator)
    }

    pub fn facts(&self) -> Result<GpuFacts, EngineError> {
        match *self {}
    }

    pub fn copy_matrix(&self, _matrix: Matrix<'_>) -> Result<DeviceMatrix, EngineError> {
        match *self {}
    }

    pub fn copy_rows(&self, _numbers: &[f32], _rows: usize) -> Result<DeviceRows, EngineError> {
        match *self {}
    }

    pub fn finish(&self) -> Result<(), EngineError> {
        match *self {}
    }
}

impl DeviceMatrix {
    pub fn multiply(&self, _rows: &DeviceRows) -> Result<DeviceRows, EngineError> {
        match *self {}
    }
}

impl DeviceRows {
    pub fn read(&self) -> Result<(), EngineError> {
        match *self {}
    }

    pub fn write(&self, _rows: &DeviceRows) -> Result<(), EngineError> {
        match *self {}
    }

    pub fn copy_back(&self) -> Result<Vec<f32>, EngineError> {
        match *self {}
    }
}

impl DeviceKv {
    pub fn bytes(&self, _shape: KvShape) -> u64 {
        match *self {}
    }
}

impl AcceleratedLayers {
    pub fn load(
        accelerator: &Accelerator,
        _model: &ModelSpec,
        _layers: &[Layer],
    ) -> Result<AcceleratedLayers, EngineError> {
        match *accelerator {}
    }

    pub fn len(&self) -> usize {
        match *self {}
    }

    pub fn forward(
        &self,
        _angles: &[RopeAngles],
        _activation: &mut [f32],
        _sequences: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        match *self {}
    }
}
