//! What makes GPUs compute, as [`Gpu`](super::Gpu) uses it, and which of them may be used.

use std::any::Any;
use std::ops::Range;

use prima_vulkan::Timeline;

use super::facts::GpuFacts;
use crate::device::KvPositions;
use crate::error::EngineError;
use crate::executor::{Executor, ManyRowsExecutor};
use crate::kernels::{Matrix, ThreadPool};
use crate::model::Model;
use crate::residency::Residency;

/// A weight matrix on a GPU.
pub struct DeviceMatrix(pub(super) Box<dyn Any>);

/// Rows of numbers on a GPU.
pub struct DeviceRows(pub(super) Box<dyn Any>);

/// The weights of the output norm and the output head.
#[derive(Clone, Copy)]
pub(crate) struct HeadWeights<'a> {
    pub norm: &'a [f32],
    pub norm_epsilon: f32,
    pub matrix: Matrix<'a>,
}

/// The output norm and the output head on a GPU.
pub(crate) trait DeviceHead: Send + Sync {
    /// Writes the products of the norms of `hidden` (n x hidden) with the matrix to `logits` (n x its rows).
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    fn logits(&self, hidden: &[f32], logits: &mut [f32]) -> Result<(), EngineError>;
}

/// What makes GPUs compute. Operations have ended when they return.
pub(super) trait Backend: Send + Sync {
    fn facts(&self) -> Result<GpuFacts, EngineError>;

    /// As [`Gpu::allocated_bytes`](super::Gpu::allocated_bytes).
    fn allocated_bytes(&self) -> Option<u64>;

    /// Copies layers there, the first of which has the place `first_place` in its window, and sets memory aside for the keys and values of
    /// `kv_positions`.
    fn load(
        &self,
        model: &Model,
        layers: Range<usize>,
        first_place: usize,
        kv_positions: KvPositions,
    ) -> Result<Box<dyn Executor>, EngineError>;

    /// Makes room for two matrices at a time of the first layers of a window, whose weights `residency` has: they are copied there for each pass.
    fn stream(
        &self,
        model: &Model,
        layers: Range<usize>,
        residency: &Residency,
    ) -> Result<Box<dyn ManyRowsExecutor>, EngineError>;

    fn load_head(&self, weights: HeadWeights<'_>) -> Result<Box<dyn DeviceHead>, EngineError>;

    fn copy_matrix(&self, matrix: Matrix<'_>) -> Result<DeviceMatrix, EngineError>;

    fn copy_rows(&self, numbers: &[f32], rows: usize) -> Result<DeviceRows, EngineError>;

    /// As [`Gpu::copy_weights`](super::Gpu::copy_weights).
    fn copy_weights(&self, pool: &ThreadPool, weights: &[u8]) -> Result<(), EngineError>;

    fn copy_back(&self, rows: &DeviceRows) -> Result<Vec<f32>, EngineError>;

    fn multiply(&self, matrices: &[&DeviceMatrix], rows: &DeviceRows) -> Result<(), EngineError>;

    fn read(&self, rows: &DeviceRows) -> Result<(), EngineError>;

    fn append(&self, rows: &DeviceRows, to: &DeviceRows) -> Result<(), EngineError>;

    /// As [`Gpu::start_timeline`](super::Gpu::start_timeline).
    fn start_timeline(&self) -> Result<(), EngineError>;

    /// As [`Gpu::end_timeline`](super::Gpu::end_timeline).
    fn end_timeline(&self) -> Result<Timeline, EngineError>;
}

/// Which GPUs may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GpuChoice {
    /// All but drivers that compute on the processor.
    Real,
    /// Only these.
    Software,
    None,
}

impl GpuChoice {
    pub const VARIABLE: &str = "PRIMA_GPU";

    /// What the environment says, if anything.
    pub fn from_environment() -> Result<GpuChoice, EngineError> {
        match std::env::var_os(Self::VARIABLE) {
            None => Ok(GpuChoice::Real),
            Some(value) if value == "software" => Ok(GpuChoice::Software),
            Some(value) if value == "none" => Ok(GpuChoice::None),
            Some(value) => Err(EngineError::GpuChoice {
                variable: Self::VARIABLE,
                found: value.to_string_lossy().into_owned(),
            }),
        }
    }
}

pub(super) fn error(
    action: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> EngineError {
    EngineError::Gpu {
        action,
        source: source.into(),
    }
}

/// What is there, as a backend has it; an error if another has made it.
pub(super) fn own<T: Any>(made: &dyn Any) -> Result<&T, EngineError> {
    made.downcast_ref()
        .ok_or_else(|| error("take what is on another GPU", "it was copied there"))
}
