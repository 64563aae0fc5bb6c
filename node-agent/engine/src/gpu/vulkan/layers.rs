//! The forward pass through a window's last layers on a GPU.
//!
//! Decides: the order of kernels, where they wait for one another, and that a pass of up to [`MOST_ROWS`] rows is waited for once, with
//! one copy of the activation each way. Refuses: layers with parts that it does not compute.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use prima_gguf::GgmlType;
use prima_model::{LayerSpec, TensorRows};
use prima_vulkan::{Buffer, KV_POSITIONS, VulkanError, kv_block_bytes};

use super::expert_step::{self, ExpertPlaces};
use super::kv::{BlockPool, DeviceBlocks, Unshared};
use super::loaded::LoadedLayer;
use super::open::VulkanGpu;
use super::step::{self, Chunk, Listed, Places, Step, Widths};
use super::workspace::{Layout, Workspace, slice};
use crate::batch::Sequence;
use crate::cpu::Compute;
use crate::error::EngineError;
use crate::executor::Executor;
use crate::gpu::backend::error;
use crate::gpu::facts::GpuApi;
use crate::gpu::parts;
use crate::kv_cache::LayerKv;
use crate::layer::Layer;
use crate::model::Model;
use crate::ropes::Ropes;

/// Rows that go through the layers at once. More follow in further submissions, since drivers end those that take seconds.
const MOST_ROWS: usize = 512;

/// Layers whose weights are on the GPU: the last ones of a window.
pub(super) struct VulkanLayers {
    gpu: VulkanGpu,
    hidden: usize,
    norm_epsilon: f32,
    residual_scale: f32,
    /// The place of the first in the window.
    first_place: usize,
    layers: Vec<DeviceLayer>,
    ropes: Ropes,
}

struct DeviceLayer {
    loaded: LoadedLayer,
    pool: Arc<BlockPool>,
}

impl VulkanLayers {
    /// Copies the layers `layers` of `model` to the GPU. The first has the place `first_place` in its window. Memory for `kv_positions`
    /// positions is set aside in each that keeps all of them; those with windows keep few, and take memory as they need it.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when a layer is not in the bytes of a sparse file, [`EngineError::Gpu`]: no memory, or no kernels for
    /// what is in a layer.
    pub fn load(
        gpu: &VulkanGpu,
        model: &Model,
        layers: Range<usize>,
        first_place: usize,
        kv_positions: usize,
    ) -> Result<VulkanLayers, EngineError> {
        let spec = model.spec();
        let mut ropes = Ropes::default();
        let layers = layers.map(|index| {
            let layer = Layer::load(model, index, &mut ropes)?;
            let direct = parts::computed(GpuApi::Vulkan, index, &layer)?;
            let attention = &layer.spec.attention;
            let block_bytes = kv_block_bytes(attention.kv_heads, attention.head_dim);
            let pool = BlockPool::new(block_bytes);
            let blocks = match attention.window {
                None => kv_positions.div_ceil(KV_POSITIONS),
                Some(_) => 0,
            };
            let loaded = LoadedLayer::new(&gpu.device, &layer, direct).and_then(|loaded| {
                pool.reserve(&gpu.device, blocks)?;
                Ok(loaded)
            });
            Ok(DeviceLayer {
                loaded: loaded.map_err(|source| error("take its layers", source))?,
                pool,
            })
        });
        let layers: Vec<DeviceLayer> = layers.collect::<Result<_, EngineError>>()?;
        let specs = || layers.iter().map(|layer| &layer.loaded.spec);
        let formats = formats(specs().flat_map(LayerSpec::matrices));
        let of_experts = self::formats(specs().flat_map(LayerSpec::expert_matrices));
        let ready = gpu.device.make_ready(&formats, &of_experts);
        ready.map_err(|source| error("compile the kernels of its layers", source))?;
        let layers = VulkanLayers {
            gpu: gpu.clone(),
            hidden: spec.hidden,
            norm_epsilon: spec.norm_epsilon,
            residual_scale: spec.residual_scale,
            first_place,
            layers,
            ropes,
        };
        match layers.most_rows() {
            0 => Err(error(
                "take its layers",
                VulkanError::NoKernel {
                    what: "numbers of a row at once: there are too many".to_owned(),
                },
            )),
            _ => Ok(layers),
        }
    }

    /// Rows of which the widest part is not larger than what kernels may see at once.
    fn most_rows(&self) -> usize {
        let Widths {
            hidden,
            queries,
            inner,
            ..
        } = self.widths();
        let layers = self.layers.iter();
        let experts = layers.map(|layer| expert_step::widest_row(&layer.loaded));
        let widest = experts.fold(hidden.max(queries).max(inner), usize::max);
        let bytes = 4 * widest as u64;
        let fit = self.gpu.device.most_bound_bytes() / bytes;
        (fit as usize).min(MOST_ROWS)
    }

    /// A pass of some rows, which are in `activation`.
    fn pass(
        &self,
        workspace: &mut Workspace,
        activation: &mut [f32],
        chunks: &[Chunk],
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), VulkanError> {
        let device = &self.gpu.device;
        self.make_room(chunks, sequences)?;
        let mut listed = Vec::new();
        let mut blocks: Vec<u32> = Vec::new();
        for (layer, place) in self.layers.iter().zip(self.first_place..) {
            for chunk in chunks {
                let kv = &mut sequences[chunk.sequence].layers[place];
                let (len, kept_from) = (kv.len(), kv.kept_from(kv.len()));
                let memory = kv.memory().clone();
                kv.grow(chunk.rows);
                let own = kv.on_device(|| DeviceBlocks::new(&layer.pool));
                own.extend(len, chunk.rows, kept_from, &memory);
                listed.push(Listed {
                    blocks_at: blocks.len(),
                    first_block: own.first(),
                });
                blocks.extend(own.places());
            }
        }
        let caches = self.layers.iter().map(|layer| layer.pool.buffer());
        let caches: Vec<Arc<Buffer>> = caches.collect::<Result<_, _>>()?;
        let rows_of = |chunk: &Chunk| chunk.first_position..chunk.first_position + chunk.rows;
        let angles = self.ropes.angles(chunks.iter().flat_map(rows_of));

        let rows = activation.len() / self.hidden;
        let mut layout = Layout::new(device);
        let parts = chunks.iter().map(|chunk| {
            let layers = self.layers.iter();
            let bytes = layers.map(|layer| step::part_bytes(&layer.loaded, chunks, chunk));
            bytes.max().unwrap_or(0)
        });
        let loaded = self.layers.iter().map(|layer| &layer.loaded);
        let experts = ExpertPlaces::new(&mut layout, rows, loaded)?;
        let sizes = (rows, &self.widths());
        let places = Places::new(&mut layout, sizes, blocks.len(), &angles, parts, experts);
        let buffer = workspace.with_room(device, &layout)?;
        let mut pass = device.pass()?;
        pass.write(slice(buffer, &places.x), activation)?;
        pass.write(slice(buffer, &places.blocks), &blocks)?;
        for (place, angles) in places.angles.iter().zip(&angles) {
            pass.write(slice(buffer, place), angles.turns())?;
        }
        pass.barrier();
        let listed = listed.chunks(chunks.len());
        for ((layer, cache), listed) in self.layers.iter().zip(&caches).zip(listed) {
            let step = Step {
                layer: &layer.loaded,
                cache: cache.whole(),
                buffer,
                places: &places,
                chunks,
                listed,
                angles: &angles,
                rows,
                norm_epsilon: self.norm_epsilon,
                residual_scale: self.residual_scale,
            };
            step.attention(&mut pass)?;
            step.feed_forward(&mut pass)?;
        }
        pass.finish_reading(slice(buffer, &places.x), activation)
    }

    /// Makes room for the keys and values of new rows. If that fails, every cache is as it was before.
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
                let len = kv.len();
                let own = kv.on_device(|| DeviceBlocks::new(&layer.pool));
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

    fn widths(&self) -> Widths {
        let widest = |width: fn(&LoadedLayer) -> usize| {
            let widths = self.layers.iter().map(|layer| width(&layer.loaded));
            widths.max().unwrap_or(0)
        };
        let mut layers = self.layers.iter();
        Widths {
            hidden: self.hidden,
            queries: widest(|layer| layer.query.rows),
            keys: widest(|layer| layer.key.rows),
            inner: widest(|layer| layer.dense.as_ref().map_or(0, |mlp| mlp.gate.rows)),
            row_norms: layers.any(|layer| layer.loaded.norms_of_rows().is_some()),
        }
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
        let mut rest = activation;
        for chunks in chunks(batch, self.most_rows()) {
            let rows: usize = chunks.iter().map(|chunk| chunk.rows).sum();
            let (own, others) = rest.split_at_mut(rows * self.hidden);
            rest = others;
            let done = self.pass(&mut workspace, own, &chunks, batch);
            compute.part_done();
            done.map_err(|source| error("compute its layers", source))?;
        }
        Ok(())
    }
}

/// Each once.
fn formats<'a>(matrices: impl Iterator<Item = &'a TensorRows>) -> Vec<GgmlType> {
    let formats: BTreeSet<GgmlType> = matrices.map(|matrix| matrix.format).collect();
    formats.into_iter().collect()
}

/// The rows of a batch in passes of at most `most`.
fn chunks(batch: &[Sequence<'_>], most: usize) -> Vec<Vec<Chunk>> {
    let mut passes: Vec<Vec<Chunk>> = Vec::new();
    let mut room = 0;
    for (sequence, entry) in batch.iter().enumerate() {
        let mut positions = entry.positions();
        while !positions.is_empty() {
            if room == 0 {
                passes.push(Vec::new());
                room = most;
            }
            let rows = positions.len().min(room);
            let chunk = Chunk {
                sequence,
                first_position: positions.start,
                rows,
            };
            if let Some(pass) = passes.last_mut() {
                pass.push(chunk);
            }
            positions.start += rows;
            room -= rows;
        }
    }
    passes
}
