//! The forward pass through a window's last layers on a GPU.
//!
//! Decides: that a pass is waited for once, with one copy of the activation each way. Refuses: layers with parts that it does not compute.

use std::ops::Range;
use std::sync::Arc;

use prima_vulkan::{Buffer, KV_POSITIONS, VulkanError};

use super::kv::{BlockPool, DeviceBlocks, Unshared, device_shape};
use super::open::VulkanGpu;
use super::placed::PlacedLayer;
use super::resident::Resident;
use super::step::{Chunk, Listed, StepError};
use super::window::Window;
use super::workspace::Workspace;
use crate::batch::Sequence;
use crate::cpu::Compute;
use crate::device::KvPositions;
use crate::error::EngineError;
use crate::executor::Executor;
use crate::gpu::backend::error;
use crate::gpu::facts::GpuApi;
use crate::gpu::parts;
use crate::kv_cache::LayerKv;
use crate::layer::Layer;
use crate::model::Model;
use crate::ropes::Ropes;

/// Layers whose weights are on the GPU: the last ones of a window.
pub(super) struct VulkanLayers {
    gpu: VulkanGpu,
    window: Window,
    /// The place of the first in the window.
    first_place: usize,
    layers: Vec<DeviceLayer>,
}

struct DeviceLayer {
    placed: PlacedLayer,
    resident: Resident,
    pool: Arc<BlockPool>,
}

impl VulkanLayers {
    /// Copies the layers `layers` of `model` to the GPU. The first has the place `first_place` in its window. Memory for `kv_positions` is set
    /// aside.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when a layer is not in the bytes of a sparse file, [`EngineError::Gpu`]: no memory, or no kernels for
    /// what is in a layer.
    pub fn load(
        gpu: &VulkanGpu,
        model: &Model,
        layers: Range<usize>,
        first_place: usize,
        kv_positions: KvPositions,
    ) -> Result<VulkanLayers, EngineError> {
        let spec = model.spec();
        let mut ropes = Ropes::default();
        let layers = layers.map(|index| {
            let layer = Layer::load(model, index, &mut ropes)?;
            parts::check(GpuApi::Vulkan, index, &layer)?;
            let attention = &layer.spec.attention;
            let pool = BlockPool::new(device_shape(attention).block_bytes());
            let positions = kv_positions.of(attention.window);
            let blocks = positions.div_ceil(KV_POSITIONS);
            let placed = PlacedLayer::new(&gpu.device, &layer);
            let loaded = placed.and_then(|placed| {
                let resident = Resident::load(&gpu.device, &placed)?;
                pool.reserve(&gpu.device, blocks)?;
                Ok((placed, resident))
            });
            let (placed, resident) = loaded.map_err(|source| error("take its layers", source))?;
            Ok(DeviceLayer {
                placed,
                resident,
                pool,
            })
        });
        let layers: Vec<DeviceLayer> = layers.collect::<Result<_, EngineError>>()?;
        let placed = layers.iter().map(|layer| &layer.placed);
        Ok(VulkanLayers {
            window: Window::new(gpu, spec, placed, ropes)?,
            gpu: gpu.clone(),
            first_place,
            layers,
        })
    }

    /// A pass of some rows, which are in `activation`.
    fn pass(
        &self,
        workspace: &mut Workspace,
        activation: &mut [f32],
        chunks: &[Chunk],
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), StepError> {
        self.make_room(chunks, sequences)?;
        let mut listed = Vec::new();
        let mut blocks: Vec<u32> = Vec::new();
        for (layer, place) in self.layers.iter().zip(self.first_place..) {
            for chunk in chunks {
                let kv = &mut sequences[chunk.sequence].layers[place];
                let (len, memory) = (kv.len(), kv.memory().clone());
                kv.grow(chunk.rows);
                let own = kv.on_device(|| DeviceBlocks::new(&layer.pool));
                own.extend(len, chunk.rows, &memory);
                listed.push(Listed {
                    blocks_at: blocks.len(),
                    first_block: own.first(),
                });
                blocks.extend(own.places());
            }
        }
        let caches = self.layers.iter().map(|layer| layer.pool.buffer());
        let caches: Vec<Arc<Buffer>> = caches.collect::<Result<_, _>>()?;
        let placed = self.layers.iter().map(|layer| &layer.placed);
        let rows = self.window.rows(&self.gpu, placed, chunks, &blocks)?;
        let mut begun = self.window.begin(&self.gpu, workspace, &rows, activation)?;
        let listed = listed.chunks(chunks.len());
        for ((layer, cache), listed) in self.layers.iter().zip(&caches).zip(listed) {
            let mut matrices = &layer.resident;
            begun.layer(
                &self.window,
                &rows,
                &layer.placed,
                &mut matrices,
                cache,
                listed,
            )?;
        }
        Ok(begun.finish(&rows, activation)?)
    }

    /// Makes room for the keys and values of new rows, after all sequences have given back what their windows have passed. If there is none, every
    /// cache still has what the new rows would see.
    fn make_room(
        &self,
        chunks: &[Chunk],
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), VulkanError> {
        let device = &self.gpu.device;
        let mut copies: Vec<(usize, usize, Unshared)> = Vec::new();
        for (place, layer) in self.layers.iter().enumerate() {
            let in_window = self.first_place + place;
            let mut missing = 0;
            for chunk in chunks {
                let kv = &mut sequences[chunk.sequence].layers[in_window];
                let (len, kept_from) = (kv.len(), kv.kept_from(kv.len()));
                let own = kv.on_device(|| DeviceBlocks::new(&layer.pool));
                own.give_back(kept_from);
                missing += own.missing(len, chunk.rows);
            }
            layer.pool.reserve(device, missing)?;
            for chunk in chunks {
                let kv = &mut sequences[chunk.sequence].layers[in_window];
                let (len, memory) = (kv.len(), kv.memory().clone());
                let own = kv.on_device(|| DeviceBlocks::new(&layer.pool));
                let unshared = own.unshare(len, &memory);
                copies.extend(unshared.map(|unshared| (place, chunk.sequence, unshared)));
            }
        }
        if copies.is_empty() {
            return Ok(());
        }
        let caches = copies
            .iter()
            .map(|(place, ..)| self.layers[*place].pool.buffer());
        let caches: Vec<Arc<Buffer>> = caches.collect::<Result<_, _>>()?;
        let mut pass = device.pass()?;
        for ((place, _, unshared), cache) in copies.iter().zip(&caches) {
            let bytes = self.layers[*place].pool.block_bytes();
            let block = |place: u32| {
                let first = u64::from(place) * bytes;
                cache.slice(first..first + bytes)
            };
            let (from, to) = unshared.places();
            pass.copy(block(from), block(to));
        }
        pass.finish()?;
        for (place, sequence, unshared) in copies {
            let kv = &mut sequences[sequence].layers[self.first_place + place];
            let own = kv.on_device(|| DeviceBlocks::new(&self.layers[place].pool));
            own.put(unshared);
        }
        Ok(())
    }
}

impl Executor for VulkanLayers {
    fn places(&self) -> Range<usize> {
        self.first_place..self.first_place + self.layers.len()
    }

    fn can_continue(&self, kv: &LayerKv) -> bool {
        kv.is_empty()
            || kv.device::<DeviceBlocks>().is_some_and(|own| {
                let mut layers = self.layers.iter();
                layers.any(|layer| own.is_of(&layer.pool))
            })
    }

    fn forward(
        &self,
        compute: &Compute,
        activation: &mut [f32],
        batch: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        let mut workspace = self.gpu.workspace();
        let passes = self
            .window
            .each_pass(activation, batch, |own, chunks, batch| {
                let done = self.pass(&mut workspace, own, chunks, batch);
                compute.part_done();
                done
            });
        passes.map_err(|source| source.of("compute its layers"))
    }
}
