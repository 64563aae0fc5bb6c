//! Stands in for `gpu` in builds without it: types that have no values, so that the rest of the engine needs no
//! conditions.

use std::ops::Range;

use crate::batch::Sequence;
use crate::cpu::Compute;
use crate::device::GpuFacts;
use crate::error::EngineError;
use crate::executor::Executor;
use crate::kernels::{KvShape, Matrix};
use crate::kv_cache::LayerKv;
use crate::model::Model;

/// A GPU of this machine; this build has code for none.
#[derive(Debug, Clone)]
pub enum Gpu {}

/// A weight matrix on a GPU.
pub enum DeviceMatrix {}

/// Rows of numbers on a GPU.
pub enum DeviceRows {}

#[derive(Clone)]
pub(crate) enum DeviceKv {}

pub(crate) enum GpuLayers {}

impl Gpu {
    /// # Errors
    /// [`EngineError::NoGpu`], always.
    pub fn open() -> Result<Gpu, EngineError> {
        Err(EngineError::NoGpu)
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
    pub fn first_position(&self) -> usize {
        match *self {}
    }

    pub fn bytes(&self, _shape: KvShape) -> u64 {
        match *self {}
    }
}

impl GpuLayers {
    pub fn load(
        gpu: &Gpu,
        _model: &Model,
        _layers: Range<usize>,
        _first_place: usize,
    ) -> Result<GpuLayers, EngineError> {
        match *gpu {}
    }
}

impl Executor for GpuLayers {
    fn places(&self) -> Range<usize> {
        match *self {}
    }

    fn can_continue(&self, _kv: &LayerKv) -> bool {
        match *self {}
    }

    fn forward(
        &self,
        _compute: &Compute,
        _activation: &mut [f32],
        _batch: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        match *self {}
    }
}
