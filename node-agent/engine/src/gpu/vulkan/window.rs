//! What passes through a window's layers have in common, whether their weights stay on the GPU or not.

use std::collections::BTreeSet;

use prima_gguf::GgmlType;
use prima_model::{LayerSpec, ModelSpec, TensorRows};
use prima_vulkan::{Buffer, Pass, VulkanError};

use super::expert_step::{self, ExpertPlaces};
use super::latent_step::{self, LatentPlaces};
use super::open::VulkanGpu;
use super::placed::{Matrices, PlacedLayer};
use super::step::{self, Chunk, Listed, Places, Step, StepError, Widths};
use super::workspace::{Layout, Workspace, slice};
use crate::batch::Sequence;
use crate::error::EngineError;
use crate::gpu::backend::error;
use crate::kernels::RopeAngles;
use crate::ropes::Ropes;

/// Rows that go through the layers at once, for which the planner counts memory. More follow in further passes.
const MOST_ROWS: usize = 512;

pub(super) struct Window {
    hidden: usize,
    norm_epsilon: f32,
    residual_scale: f32,
    ropes: Ropes,
    widths: Widths,
    most_rows: usize,
}

/// What a pass begins with.
pub(super) struct Begun<'a> {
    pub pass: Pass<'a>,
    buffer: &'a Buffer,
}

/// The numbers of a pass, and where they lie.
pub(super) struct Rows<'a> {
    pub chunks: &'a [Chunk],
    /// The blocks of each layer and chunk, one after the other.
    blocks: &'a [u32],
    angles: Vec<RopeAngles>,
    count: usize,
    layout: Layout,
    places: Places,
}

impl Window {
    /// Makes the kernels of `layers` ready.
    ///
    /// # Errors
    /// [`EngineError::Gpu`]: no kernels for what is in the layers.
    pub fn new<'a>(
        gpu: &VulkanGpu,
        spec: &ModelSpec,
        layers: impl Iterator<Item = &'a PlacedLayer> + Clone,
        ropes: Ropes,
    ) -> Result<Window, EngineError> {
        let specs = || layers.clone().map(|layer| &layer.spec);
        let formats = formats(specs().flat_map(LayerSpec::matrices));
        let mut of_parts = self::formats(specs().flat_map(LayerSpec::expert_matrices));
        let latents = || layers.clone().filter_map(PlacedLayer::latent);
        of_parts.extend(latents().flat_map(|latent| latent.of_heads().map(|one| one.format)));
        let with_latents = latents().next().is_some();
        let ready = gpu.device.make_ready(&formats, &of_parts, with_latents);
        ready.map_err(|source| error("compile the kernels of its layers", source))?;
        let widest =
            |width: fn(&PlacedLayer) -> usize| layers.clone().map(width).max().unwrap_or(0);
        let has_row_norms = |layer: &PlacedLayer| {
            let head_dim = layer.spec.attention.head_dim;
            let direct = layer.direct();
            direct.is_some_and(|direct| direct.norms_of_rows(head_dim).is_some())
        };
        let widths = Widths {
            hidden: spec.hidden,
            queries: widest(|layer| layer.direct().map_or(0, |direct| direct.query.rows)),
            keys: widest(|layer| layer.direct().map_or(0, |direct| direct.key.rows)),
            inner: widest(|layer| layer.dense.as_ref().map_or(0, |mlp| mlp.gate.rows)),
            row_norms: layers.clone().any(has_row_norms),
        };
        // Of which the widest part is not larger than what kernels may see at once.
        let dense = spec.hidden.max(widths.queries).max(widths.inner);
        let of_parts = widest(expert_step::widest_row).max(widest(latent_step::widest_row));
        let bytes = 4 * dense.max(of_parts) as u64;
        let most_rows = (gpu.device.most_bound_bytes() / bytes).min(MOST_ROWS as u64) as usize;
        if most_rows == 0 {
            let what = "numbers of a row at once: there are too many".to_owned();
            return Err(error("take its layers", VulkanError::NoKernel { what }));
        }
        Ok(Window {
            hidden: spec.hidden,
            norm_epsilon: spec.norm_epsilon,
            residual_scale: spec.residual_scale,
            ropes,
            widths,
            most_rows,
        })
    }

    /// The rows of a batch in passes.
    pub fn passes(&self, batch: &[Sequence<'_>]) -> Vec<Vec<Chunk>> {
        chunks(batch, self.most_rows)
    }

    /// Calls `pass` with the rows of each pass and their part of `activation`, in order.
    ///
    /// # Errors
    /// The first of `pass`, which is then called no more.
    pub fn each_pass<E>(
        &self,
        activation: &mut [f32],
        batch: &mut [Sequence<'_>],
        mut pass: impl FnMut(&mut [f32], &[Chunk], &mut [Sequence<'_>]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = activation;
        for chunks in self.passes(batch) {
            let rows: usize = chunks.iter().map(|chunk| chunk.rows).sum();
            let (own, others) = rest.split_at_mut(rows * self.hidden);
            rest = others;
            pass(own, &chunks, batch)?;
        }
        Ok(())
    }

    /// Where the numbers of a pass through `layers` lie.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] for more experts than there are kernels for.
    pub fn rows<'a>(
        &self,
        gpu: &VulkanGpu,
        layers: impl Iterator<Item = &'a PlacedLayer> + Clone,
        chunks: &'a [Chunk],
        blocks: &'a [u32],
    ) -> Result<Rows<'a>, VulkanError> {
        let rows_of = |chunk: &Chunk| chunk.first_position..chunk.first_position + chunk.rows;
        let angles = self.ropes.angles(chunks.iter().flat_map(rows_of));
        let count = chunks.iter().map(|chunk| chunk.rows).sum();
        let mut layout = Layout::new(&gpu.device);
        let parts = chunks.iter().map(|chunk| {
            let bytes = layers
                .clone()
                .map(|layer| step::part_bytes(layer, chunks, chunk));
            bytes.max().unwrap_or(0)
        });
        let experts = ExpertPlaces::new(&mut layout, count, layers.clone())?;
        let latents = LatentPlaces::new(&mut layout, count, layers.clone());
        let of_parts = (experts, latents);
        let sizes = (count, &self.widths);
        let places = Places::new(&mut layout, sizes, blocks.len(), &angles, parts, of_parts);
        Ok(Rows {
            chunks,
            blocks,
            angles,
            count,
            layout,
            places,
        })
    }

    /// Begins a pass with `activation`, in the workspace.
    ///
    /// # Errors
    /// [`VulkanError::OutOfMemory`], and those of [`Device::pass`](prima_vulkan::Device::pass).
    pub fn begin<'a>(
        &self,
        gpu: &'a VulkanGpu,
        workspace: &'a mut Workspace,
        rows: &Rows<'_>,
        activation: &[f32],
    ) -> Result<Begun<'a>, VulkanError> {
        let places = &rows.places;
        let buffer = workspace.with_room(&gpu.device, &rows.layout)?;
        let mut pass = gpu.device.pass()?;
        pass.write(slice(buffer, &places.x), activation)?;
        pass.write(slice(buffer, &places.blocks), rows.blocks)?;
        let tiles = places.latents.tiles();
        pass.write(slice(buffer, &places.latents.listed), &tiles)?;
        for (place, angles) in places.angles.iter().zip(&rows.angles) {
            pass.write(slice(buffer, place), angles.turns())?;
        }
        pass.barrier();
        Ok(Begun { pass, buffer })
    }
}

impl<'a> Begun<'a> {
    /// Records a layer, whose keys and values lie in `cache`, in the blocks that are `listed` for each chunk.
    ///
    /// # Errors
    /// As the operations of [`Pass`], and of `matrices`.
    pub fn layer(
        &mut self,
        window: &Window,
        rows: &'a Rows<'a>,
        layer: &'a PlacedLayer,
        matrices: &mut dyn Matrices<'a>,
        cache: &'a Buffer,
        listed: &'a [Listed],
    ) -> Result<(), StepError> {
        let step = Step {
            layer,
            cache: cache.whole(),
            buffer: self.buffer,
            places: &rows.places,
            chunks: rows.chunks,
            listed,
            angles: &rows.angles,
            rows: rows.count,
            norm_epsilon: window.norm_epsilon,
            residual_scale: window.residual_scale,
        };
        step.attention(&mut self.pass, matrices)?;
        step.feed_forward(&mut self.pass, matrices)
    }

    /// Runs the pass, and copies what came of it to `activation`.
    ///
    /// # Errors
    /// Those of [`Pass::finish`].
    pub fn finish(self, rows: &Rows<'_>, activation: &mut [f32]) -> Result<(), VulkanError> {
        let x = slice(self.buffer, &rows.places.x);
        self.pass.finish_reading(x, activation)
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
