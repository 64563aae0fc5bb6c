//! Layers and the output head on a GPU through Vulkan (`prima-vulkan`), which every build has.

mod expert_step;
mod head;
mod kv;
mod latent_step;
mod layers;
mod open;
mod placed;
mod probe;
mod resident;
mod step;
mod streamed;
mod turns;
mod window;
mod workspace;

use std::ops::Range;

use prima_vulkan::{Facts, GpuKind, Timeline};

use super::backend::{Backend, DeviceHead, DeviceMatrix, DeviceRows, HeadWeights, error, own};
use super::facts::{GpuApi, GpuFacts};
use crate::device::KvPositions;
use crate::error::EngineError;
use crate::executor::{Executor, ManyRowsExecutor};
use crate::kernels::{Matrix, ThreadPool};
use crate::model::Model;
use crate::residency::Residency;
pub use head::GPU_HEAD_ROWS;
use head::VulkanHead;
use layers::VulkanLayers;
pub(super) use open::VulkanGpu;
use streamed::StreamedLayers;

/// All that Vulkan's drivers list, with the kind and why it cannot be used, if so; what is free of their memory is not asked, nor are limits.
pub(super) fn list() -> Result<Vec<(GpuFacts, GpuKind, Option<String>)>, EngineError> {
    let gpus = open::find()?;
    let listed = gpus.facts().map(|facts| {
        let described = described(facts, facts.total_bytes);
        (described, facts.kind, facts.unfit.clone())
    });
    Ok(listed.collect())
}

fn described(facts: &Facts, available_bytes: u64) -> GpuFacts {
    GpuFacts {
        api: GpuApi::Vulkan,
        name: facts.name.clone(),
        pci: Some(facts.pci),
        pci_address: facts.pci_address.clone(),
        unified_memory: matches!(facts.kind, GpuKind::Integrated | GpuKind::Software),
        total_bytes: facts.total_bytes,
        available_bytes,
        most_buffer_bytes: None,
    }
}

impl Backend for VulkanGpu {
    fn facts(&self) -> Result<GpuFacts, EngineError> {
        let device = &self.device;
        Ok(GpuFacts {
            most_buffer_bytes: Some(device.most_buffer_bytes()),
            ..described(device.facts(), device.available_bytes())
        })
    }

    fn allocated_bytes(&self) -> Option<u64> {
        Some(self.device.allocated_bytes())
    }

    fn load(
        &self,
        model: &Model,
        layers: Range<usize>,
        first_place: usize,
        kv_positions: KvPositions,
    ) -> Result<Box<dyn Executor>, EngineError> {
        let layers = VulkanLayers::load(self, model, layers, first_place, kv_positions)?;
        Ok(Box::new(layers))
    }

    fn stream(
        &self,
        model: &Model,
        layers: Range<usize>,
        residency: &Residency,
    ) -> Result<Box<dyn ManyRowsExecutor>, EngineError> {
        Ok(Box::new(StreamedLayers::new(
            self, model, layers, residency,
        )?))
    }

    fn load_head(&self, weights: HeadWeights<'_>) -> Result<Box<dyn DeviceHead>, EngineError> {
        let head = VulkanHead::load(self, weights);
        Ok(Box::new(
            head.map_err(|source| error("take the output head", source))?,
        ))
    }

    fn copy_matrix(&self, matrix: Matrix<'_>) -> Result<DeviceMatrix, EngineError> {
        let copied = probe::copy_matrix(&self.device, matrix);
        copied.map_err(|source| error("copy a matrix", source))
    }

    fn copy_rows(&self, numbers: &[f32], rows: usize) -> Result<DeviceRows, EngineError> {
        let copied = probe::copy_rows(&self.device, numbers, rows);
        copied.map_err(|source| error("copy rows", source))
    }

    fn copy_weights(&self, pool: &ThreadPool, weights: &[u8]) -> Result<(), EngineError> {
        let copied = self.room().copy(&self.device, pool, weights);
        copied.map_err(|source| error("copy weights", source))
    }

    fn copy_back(&self, rows: &DeviceRows) -> Result<Vec<f32>, EngineError> {
        let copied = probe::copy_back(&self.device, own(&*rows.0)?);
        copied.map_err(|source| error("copy rows back", source))
    }

    fn multiply(&self, matrices: &[&DeviceMatrix], rows: &DeviceRows) -> Result<(), EngineError> {
        let matrices = matrices.iter().map(|matrix| own(&*matrix.0));
        let matrices = matrices.collect::<Result<Vec<_>, _>>()?;
        let multiplied = probe::multiply(
            &self.device,
            &mut self.workspace(),
            &matrices,
            own(&*rows.0)?,
        );
        multiplied.map_err(|source| error("multiply", source))
    }

    fn read(&self, rows: &DeviceRows) -> Result<(), EngineError> {
        let read = probe::read(&self.device, &mut self.workspace(), own(&*rows.0)?);
        read.map_err(|source| error("read", source))
    }

    fn append(&self, rows: &DeviceRows, to: &DeviceRows) -> Result<(), EngineError> {
        let (rows, to) = (own(&*rows.0)?, own(&*to.0)?);
        let appended = probe::append(&self.device, &mut self.workspace(), rows, to);
        appended.map_err(|source| error("write", source))
    }

    fn start_timeline(&self) -> Result<(), EngineError> {
        let started = self.device.start_timeline();
        started.map_err(|source| error("tell when it computes", source))
    }

    fn end_timeline(&self) -> Result<Timeline, EngineError> {
        let told = self.device.end_timeline();
        told.map_err(|source| error("tell when it computed", source))
    }
}
