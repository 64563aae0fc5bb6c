//! Stands in for `accelerator` in builds without it: types of which there are no values, so that the rest of the engine needs no
//! conditions.

use crate::config::ModelConfig;
use crate::error::EngineError;
use crate::kernels::{KvShape, RopeAngles};
use crate::layer_window::{Layer, Sequence};

/// A GPU of this machine; this build has code for none.
#[derive(Debug, Clone)]
pub enum Accelerator {}

#[derive(Clone)]
pub(crate) enum DeviceKv {}

pub(crate) enum AcceleratedLayers {}

impl Accelerator {
    /// # Errors
    /// [`EngineError::NoAccelerator`], always.
    pub fn open() -> Result<Accelerator, EngineError> {
        Err(EngineError::NoAccelerator)
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
        _config: &ModelConfig,
        _layers: &[Layer],
    ) -> Result<AcceleratedLayers, EngineError> {
        match *accelerator {}
    }

    pub fn len(&self) -> usize {
        match *self {}
    }

    pub fn forward(
        &self,
        _angles: &RopeAngles,
        _activation: &mut [f32],
        _sequences: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        match *self {}
    }
}
