//! GPUs of this machine, and what they do: layers of a window, the output head, and single operations for measuring them. However a
//! pass is cut, the CPU's results are the same bit for bit; a GPU's are the same up to rounding.
//!
//! Decides: which of them is used. Every build finds GPUs through Vulkan. Drivers that compute on the processor are no gain, and used only on
//! request. A build for CUDA or Metal uses that instead. Refuses: to use the CPU when a GPU was asked for.

mod backend;
#[cfg(feature = "candle")]
mod candle;
mod facts;
mod parts;
mod self_check;
mod vulkan;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use prima_model::ModelPart;
use prima_vulkan::GpuKind;

use crate::error::EngineError;
use crate::executor::{Executor, ManyRowsExecutor};
use crate::kernels::Matrix;
use crate::model::Model;
use crate::residency::Residency;
use backend::{Backend, GpuChoice};
pub(crate) use backend::{DeviceHead, HeadWeights};
pub use backend::{DeviceMatrix, DeviceRows};
pub use facts::{GpuApi, GpuFacts};
pub use vulkan::GPU_HEAD_ROWS;

/// A GPU of this machine. Clones share it.
#[derive(Clone)]
pub struct Gpu(Arc<dyn Backend>);

impl Gpu {
    /// Opens the GPU that layers run on: the first of those that `PRIMA_GPU` allows.
    ///
    /// # Errors
    /// [`EngineError::NoGpu`] when there is none, [`EngineError::Gpu`] when its driver refuses, [`EngineError::GpuChoice`].
    pub fn open() -> Result<Gpu, EngineError> {
        let choice = GpuChoice::from_environment()?;
        if choice == GpuChoice::None {
            return Err(EngineError::NoGpu {
                reason: format!("{} is `none`", GpuChoice::VARIABLE),
            });
        }
        #[cfg(any(feature = "cuda", feature = "metal"))]
        if choice == GpuChoice::Real {
            return Ok(Gpu(Arc::new(candle::CandleGpu::open()?)));
        }
        Ok(Gpu(Arc::new(vulkan::VulkanGpu::open(choice)?)))
    }

    /// What there is, the one that layers run on first, and why each other is not used.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn list() -> Result<Vec<(GpuFacts, Option<String>)>, EngineError> {
        let used = match Gpu::open().and_then(|gpu| gpu.facts()) {
            Err(error @ EngineError::GpuChoice { .. }) => return Err(error),
            used => used,
        };
        let mut listed: Vec<(GpuFacts, Option<String>)> = Vec::new();
        listed.extend(used.as_ref().ok().map(|facts| (facts.clone(), None)));
        for (facts, kind, unfit) in vulkan::list()? {
            let first = listed.first();
            if first.is_some_and(|(used, _)| (&used.name, used.pci) == (&facts.name, facts.pci)) {
                continue;
            }
            let reason = match (unfit, kind, &used) {
                (Some(unfit), ..) => unfit,
                (None, GpuKind::Software, _) => {
                    "it computes on the processor, which is no gain".to_owned()
                }
                (None, _, Ok(_)) => "one GPU is used, the first".to_owned(),
                (None, _, Err(error)) => error.to_string(),
            };
            listed.push((facts, Some(reason)));
        }
        match (listed.is_empty(), used) {
            (true, Err(error)) => Err(error),
            _ => Ok(listed),
        }
    }

    /// A driver of Vulkan that computes on the processor, such as lavapipe, as a GPU: for tests on machines without one.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn software() -> Result<Gpu, EngineError> {
        Ok(Gpu(Arc::new(vulkan::VulkanGpu::open(GpuChoice::Software)?)))
    }

    /// The same, of whose buffers kernels see at most `bytes` at once: for tests of tensors that are larger.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn software_with_most_bound_bytes(bytes: u64) -> Result<Gpu, EngineError> {
        let gpu = vulkan::VulkanGpu::open(GpuChoice::Software)?;
        Ok(Gpu(Arc::new(gpu.with_most_bound_bytes(bytes))))
    }

    /// What candle does on a GPU, done on the CPU: for tests on machines without one.
    #[cfg(feature = "candle")]
    pub fn candle_on_cpu() -> Gpu {
        Gpu(Arc::new(candle::CandleGpu::on_cpu()))
    }

    /// Parts of models of which layers may be on a GPU that is used through `api`.
    pub fn model_parts(api: GpuApi) -> impl Iterator<Item = ModelPart> {
        let all = ModelPart::ALL.iter().copied();
        all.filter(move |&part| api.computes(part))
    }

    /// # Errors
    /// [`EngineError::Gpu`] when the driver refuses.
    pub fn facts(&self) -> Result<GpuFacts, EngineError> {
        self.0.facts()
    }

    /// Copies the layers `layers` of `model` there, once the first, and the first with experts, computed the same there as on the processor. The
    /// first has the place `first_place` in its window. Memory for the keys and values of `kv_positions` positions in all sequences is set aside.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when a layer is not in the bytes of a sparse file, [`EngineError::Gpu`]: no memory, no kernels for
    /// what is in the layers, or wrong results.
    pub(crate) fn load(
        &self,
        model: &Model,
        layers: Range<usize>,
        first_place: usize,
        kv_positions: usize,
    ) -> Result<Box<dyn Executor>, EngineError> {
        Self::check(model, &layers, |layer| self.0.load(model, layer, 0, 0))?;
        self.0.load(model, layers, first_place, kv_positions)
    }

    /// Makes ready to compute the layers `layers` of `model`, the first of a window, without keeping them there: for each pass their matrices are
    /// copied from where `residency` has them, the next while one is computed with. Keys and values stay in memory. What is checked is that of
    /// [`load`](Self::load).
    ///
    /// # Errors
    /// As there.
    pub(crate) fn stream(
        &self,
        model: &Model,
        layers: Range<usize>,
        residency: &Residency,
    ) -> Result<Box<dyn ManyRowsExecutor>, EngineError> {
        Self::check(model, &layers, |layer| {
            Ok(self.0.stream(model, layer, &Residency::mapped())?)
        })?;
        self.0.stream(model, layers, residency)
    }

    /// That the first layer, and the first with experts, are computed as on the processor; `alone` makes ready a layer.
    fn check(
        model: &Model,
        layers: &Range<usize>,
        alone: impl Fn(Range<usize>) -> Result<Box<dyn Executor>, EngineError>,
    ) -> Result<(), EngineError> {
        let has_experts =
            |layer: &usize| model.spec().layers[*layer].feed_forward.experts.is_some();
        let with_experts = layers.clone().find(has_experts);
        let mut compared = vec![layers.start];
        compared.extend(with_experts.filter(|layer| *layer != layers.start));
        compared
            .into_iter()
            .try_for_each(|layer| self_check::check(&*alone(layer..layer + 1)?, model, layer))
    }

    /// Copies the output norm and the output head there, once some rows of the matrix have computed there what they compute on the processor.
    ///
    /// # Errors
    /// [`EngineError::Gpu`]: no memory, no kernels for the format, or wrong results.
    pub(crate) fn load_head(
        &self,
        weights: HeadWeights<'_>,
    ) -> Result<Box<dyn DeviceHead>, EngineError> {
        let part = self_check::part_of_head(weights);
        self_check::check_head(&*self.0.load_head(part)?, part)?;
        self.0.load_head(weights)
    }

    /// Copies a matrix there, as layers are copied.
    ///
    /// # Errors
    /// [`EngineError::Gpu`]: no memory, or no kernels for the format.
    pub fn copy_matrix(&self, matrix: Matrix<'_>) -> Result<DeviceMatrix, EngineError> {
        self.0.copy_matrix(matrix)
    }

    /// Copies `rows` rows of numbers there, as activations are copied.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also when the numbers are not whole rows.
    pub fn copy_rows(&self, numbers: &[f32], rows: usize) -> Result<DeviceRows, EngineError> {
        self.0.copy_rows(numbers, rows)
    }

    /// Copies the numbers back.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn copy_back(&self, rows: &DeviceRows) -> Result<Vec<f32>, EngineError> {
        self.0.copy_back(rows)
    }

    /// Multiplies `rows` by each matrix, with the kernels of layers. Nobody needs what comes out.
    ///
    /// # Errors
    /// [`EngineError::Gpu`], also when the rows have another length than a matrix.
    pub fn multiply(
        &self,
        matrices: &[&DeviceMatrix],
        rows: &DeviceRows,
    ) -> Result<(), EngineError> {
        self.0.multiply(matrices, rows)
    }

    /// Reads every number once.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn read(&self, rows: &DeviceRows) -> Result<(), EngineError> {
        self.0.read(rows)
    }

    /// Overwrites `to` with `rows` (as many), the way keys and values are appended.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub fn append(&self, rows: &DeviceRows, to: &DeviceRows) -> Result<(), EngineError> {
        self.0.append(rows, to)
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.facts().map(|facts| facts.name);
        f.debug_tuple("Gpu").field(&name.ok()).finish()
    }
}
