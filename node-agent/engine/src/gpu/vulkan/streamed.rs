//! The forward pass through layers whose matrices are not on the GPU: they are copied there one by one, the next while one computes. That pays
//! where a pass has many rows, since each weight that crosses is used for all of them. Keys and values stay in memory, where the processor goes on
//! with them: a layer's earlier ones are copied there, and the new ones back.
//!
//! Decides: that two matrices have room at a time, or those of all experts of two layers, whose gate, up and down have a buffer each, since drivers
//! limit what one may have. While the first is computed with, the second is filled; the third waits for the first. Vectors stay on the GPU.

use std::ops::Range;

use half::f16;
use prima_vulkan::{
    Buffer, Device, KV_POSITIONS, Matrix, Pass, Slice, Uploading, Uploads, VulkanError,
    pack_position, unpack_position,
};

use super::kv::device_shape;
use super::open::VulkanGpu;
use super::placed::{Experts, Matrices, PlacedLayer, Projection};
use super::step::{Chunk, Listed, StepError};
use super::window::{Begun, Rows, Window};
use super::workspace::Workspace;
use crate::batch::Sequence;
use crate::cpu::Compute;
use crate::error::EngineError;
use crate::executor::{Executor, ManyRowsExecutor};
use crate::gpu::backend::error;
use crate::gpu::facts::GpuApi;
use crate::gpu::parts;
use crate::kernels::{self, KvBlock, KvShape, ThreadPool};
use crate::kv_cache::LayerKv;
use crate::layer::{self, Layer, kv_shape};
use crate::model::Model;
use crate::residency::Residency;
use crate::ropes::Ropes;

/// Matrices, and keys and values of layers, that have room at a time.
const SLOTS: usize = 2;
/// The fewest bytes that a thread copies at once.
const COPIED: usize = 64 << 10;
/// Room for keys and values grows by so many blocks.
const KV_GROWTH: usize = 16;
/// Blocks of keys and values that are made ready at once.
const PACKED: usize = 16;

/// The first layers of a window.
pub(super) struct StreamedLayers {
    gpu: VulkanGpu,
    window: Window,
    layers: Vec<StreamedLayer>,
    block_bytes: u64,
    /// Of all its layers.
    weight_bytes: u64,
    residency: Residency,
}

struct StreamedLayer {
    placed: PlacedLayer,
    /// In memory.
    experts: Option<layer::Experts>,
}

/// Room on a GPU for what passes copy there. All windows share it, and it grows to what they need.
#[derive(Default)]
pub(super) struct StreamRoom {
    uploads: Option<Uploads>,
    matrices: [Slot; SLOTS],
    kv: [KvRoom; SLOTS],
}

/// For a matrix, which is in the first; or for gate, up and down of all experts of a layer.
type Slot = [Option<Buffer>; 3];

/// For keys and values of a layer.
#[derive(Default)]
struct KvRoom {
    /// Where kernels use them, and where new ones come back.
    blocks: Option<Buffer>,
    back: Option<Buffer>,
}

/// Keys and values of a layer and a chunk in its slot.
struct ChunkBlocks {
    /// Which of the sequence's is the first, and how many are there.
    first: usize,
    count: usize,
    /// Which of these is the first in the slot, and which of those that come back.
    at: usize,
    back_at: usize,
}

impl StreamedLayers {
    /// Makes room for the matrices of the layers `layers` of `model`, two at a time.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when a layer is not in the bytes of a sparse file, [`EngineError::Gpu`]: no memory, or no kernels for
    /// what is in a layer.
    pub fn new(
        gpu: &VulkanGpu,
        model: &Model,
        layers: Range<usize>,
        residency: &Residency,
    ) -> Result<StreamedLayers, EngineError> {
        let refused = |source| error("take weights for each pass", source);
        let device = &gpu.device;
        let mut ropes = Ropes::default();
        let layers = layers.map(|index| {
            let layer = Layer::load(model, index, &mut ropes)?;
            parts::check(GpuApi::Vulkan, index, &layer)?;
            Ok(StreamedLayer {
                placed: PlacedLayer::new(device, &layer).map_err(refused)?,
                experts: layer.experts,
            })
        });
        let layers: Vec<StreamedLayer> = layers.collect::<Result<_, EngineError>>()?;
        let mut largest = [0; 3];
        for layer in &layers {
            for (most, own) in largest.iter_mut().zip(layer.largest()) {
                *most = own.max(*most);
            }
        }
        let mut room = gpu.room();
        let StreamRoom {
            uploads, matrices, ..
        } = &mut *room;
        if uploads.is_none() {
            *uploads = Some(device.uploads().map_err(refused)?);
        }
        for slot in matrices {
            for (buffer, bytes) in slot.iter_mut().zip(largest) {
                let grown = grow(buffer, bytes, |bytes| device.upload_buffer(bytes));
                grown.map_err(refused)?;
            }
        }
        drop(room);
        let attention = &model.spec().layers[0].attention;
        let placed = layers.iter().map(|layer| &layer.placed);
        Ok(StreamedLayers {
            window: Window::new(gpu, model.spec(), placed, ropes)?,
            block_bytes: device_shape(attention).block_bytes(),
            weight_bytes: layers.iter().map(StreamedLayer::bytes).sum(),
            residency: residency.clone(),
            gpu: gpu.clone(),
            layers,
        })
    }

    /// A pass of some rows, which are in `activation`.
    fn pass(
        &self,
        compute: &Compute,
        workspace: &mut Workspace,
        activation: &mut [f32],
        chunks: &[Chunk],
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        let failed = |source| error("compute layers with copied weights", source);
        let of_layers = self.blocks(chunks, sequences);
        let mut blocks: Vec<u32> = Vec::new();
        let mut listed = Vec::new();
        for chunk in of_layers.iter().flatten() {
            listed.push(Listed {
                blocks_at: blocks.len(),
                first_block: chunk.first,
            });
            blocks.extend((chunk.at..chunk.at + chunk.count).map(|block| block as u32));
        }
        let mut room = self.gpu.room();
        let StreamRoom {
            uploads,
            matrices,
            kv,
        } = &mut *room;
        self.make_room(kv, &of_layers, chunks).map_err(failed)?;
        let slots = matrices.each_ref().map(buffers);
        let (Some(uploads), [Some(first), Some(second)]) = (uploads, slots) else {
            // Another window wanted more room for matrices than there is.
            return Err(failed(VulkanError::OutOfMemory {
                bytes: 0,
                available: self.gpu.device.available_bytes(),
            }));
        };
        let kv: &[KvRoom; SLOTS] = kv;
        let placed = self.layers.iter().map(|layer| &layer.placed);
        let rows = self.window.rows(&self.gpu, placed, chunks, &blocks);
        let rows = rows.map_err(failed)?;
        let begun = self.window.begin(&self.gpu, workspace, &rows, activation);
        let mut begun = begun.map_err(failed)?;
        let mut copies = Copies {
            compute,
            residency: &self.residency,
            slots: [first, second],
            asked: 0,
            uploading: uploads.begin(),
            layer: None,
        };
        let parts = self.layers.iter().zip(&of_layers).zip(kv.iter().cycle());
        let parts: Vec<_> = parts
            .zip(listed.chunks(chunks.len()))
            .map(|(((layer, blocks), kv), listed)| Part {
                layer,
                blocks,
                kv,
                listed,
                block_bytes: self.block_bytes,
            })
            .collect();
        for (place, part) in parts.iter().enumerate() {
            // The layer between has asked for more than one matrix, so all that was recorded before it has run.
            if let Some(before) = place.checked_sub(SLOTS) {
                parts[before].take_back(before, chunks, sequences);
            }
            part.send_past(&mut copies, place, chunks, sequences)
                .map_err(failed)?;
            let done = part.record(&mut begun, &mut copies, &self.window, &rows);
            done.map_err(|source| source.of("compute layers with copied weights"))?;
        }
        compute.copied(copies.uploading.bytes());
        drop(copies);
        begun.finish(&rows, activation).map_err(failed)?;
        let last = parts.iter().enumerate();
        for (place, part) in last.skip(parts.len().saturating_sub(SLOTS)) {
            part.take_back(place, chunks, sequences);
        }
        Ok(())
    }

    /// Of each layer.
    fn blocks(&self, chunks: &[Chunk], sequences: &[Sequence<'_>]) -> Vec<Vec<ChunkBlocks>> {
        let places = 0..self.layers.len();
        places
            .map(|place| blocks_of(place, chunks, sequences))
            .collect()
    }

    /// Makes room for keys and values of any of the layers in both slots.
    fn make_room(
        &self,
        kv: &mut [KvRoom; SLOTS],
        of_layers: &[Vec<ChunkBlocks>],
        chunks: &[Chunk],
    ) -> Result<(), VulkanError> {
        let device = &self.gpu.device;
        let ends = of_layers
            .iter()
            .filter_map(|own| own.last().zip(chunks.last()));
        let (mut blocks, mut back) = (0, 0);
        for (last, chunk) in ends {
            blocks = blocks.max(last.at + last.count);
            back = back.max(last.back_at + last.count - last.first_written(chunk));
        }
        // Some more, so that a prompt's next chunk finds room.
        let bytes = |blocks: usize| blocks.next_multiple_of(KV_GROWTH) as u64 * self.block_bytes;
        let most = device.most_buffer_bytes();
        if bytes(blocks) > most {
            return Err(VulkanError::OutOfMemory {
                bytes: bytes(blocks),
                available: most,
            });
        }
        kv.iter_mut().try_for_each(|room| {
            grow(&mut room.blocks, bytes(blocks), |bytes| {
                device.upload_buffer(bytes)
            })?;
            grow(&mut room.back, bytes(back), |bytes| {
                device.host_buffer(bytes)
            })?;
            Ok(())
        })
    }
}

impl ManyRowsExecutor for StreamedLayers {
    fn takes(&self, batch: &[Sequence<'_>], rows: usize) -> bool {
        let passes = self.window.passes(batch);
        let blocks: Vec<_> = passes
            .iter()
            .map(|chunks| self.blocks(chunks, batch))
            .collect();
        // Weights cross once for each pass, and so do keys and values that were there before.
        let weights = (self.weight_bytes * passes.len() as u64) as f64;
        let past = passes.iter().zip(&blocks).map(|(chunks, of_layers)| {
            let chunks = of_layers.iter().flat_map(|own| own.iter().zip(chunks));
            chunks.map(|(own, chunk)| own.past(chunk)).sum::<usize>()
        });
        let past = past.sum::<usize>() as f64 * self.block_bytes as f64;
        let own: usize = batch.iter().map(|sequence| sequence.rows).sum();
        if (own as f64) < rows as f64 * (1.0 + past / weights) {
            return false;
        }
        let mut room = self.gpu.room();
        let StreamRoom {
            uploads,
            matrices,
            kv,
        } = &mut *room;
        let mut passes = passes.iter().zip(&blocks);
        let has_room = uploads.is_some()
            && matrices.iter().all(|slot| buffers(slot).is_some())
            && passes.all(|(chunks, of_layers)| self.make_room(kv, of_layers, chunks).is_ok());
        if !has_room {
            // Others need what is of no use here.
            *kv = Default::default();
        }
        has_room
    }
}

impl StreamedLayer {
    /// Of its matrices.
    fn bytes(&self) -> u64 {
        let tensors = self.placed.tensors().iter();
        let bytes: usize = tensors.map(|tensor| tensor.matrix().bytes().len()).sum();
        bytes as u64
    }

    /// Bytes that it takes in each buffer of a slot.
    fn largest(&self) -> [u64; 3] {
        let experts = self.placed.experts.as_ref().map(Experts::of_experts);
        let mut largest = experts.map_or([0; 3], |own| own.map(|one| self.bytes_of(one)));
        let numbers = experts.map(|own| own.map(|one| one.number));
        for (number, tensor) in self.placed.tensors().iter().enumerate() {
            if numbers.is_none_or(|own| !own.contains(&number)) {
                largest[0] = largest[0].max(tensor.matrix().bytes().len() as u64);
            }
        }
        largest
    }

    fn bytes_of(&self, projection: &Projection) -> u64 {
        self.placed.tensor(projection).matrix().bytes().len() as u64
    }
}

/// Those of a slot, if all are there.
fn buffers(slot: &Slot) -> Option<[&Buffer; 3]> {
    match slot {
        [Some(first), Some(second), Some(third)] => Some([first, second, third]),
        _ => None,
    }
}

impl StreamRoom {
    /// Copies weights to a slot, as for a pass, which needs them no longer.
    pub fn copy(
        &mut self,
        device: &Device,
        pool: &ThreadPool,
        weights: &[u8],
    ) -> Result<(), VulkanError> {
        let [[buffer, ..], _] = &mut self.matrices;
        let buffer = grow(buffer, weights.len() as u64, |bytes| {
            device.upload_buffer(bytes)
        })?;
        let uploads = match &mut self.uploads {
            Some(uploads) => uploads,
            none => none.insert(device.uploads()?),
        };
        let mut uploading = uploads.begin();
        write(pool, &mut uploading, buffer.whole(), 0, weights)?;
        uploading.wait()
    }
}

/// The buffer, with so many bytes at least. What is there may be lost.
fn grow(
    buffer: &mut Option<Buffer>,
    bytes: u64,
    new: impl FnOnce(u64) -> Result<Buffer, VulkanError>,
) -> Result<&mut Buffer, VulkanError> {
    // One that is too small is freed before.
    let large = buffer.take().filter(|own| own.bytes() >= bytes);
    let own = match large {
        Some(own) => own,
        None => new(bytes)?,
    };
    Ok(buffer.insert(own))
}

/// Copies bytes of weights to their place, `first` bytes behind where it begins, by all threads.
fn write<'a>(
    pool: &ThreadPool,
    uploading: &mut Uploading<'a>,
    to: Slice<'a>,
    first: usize,
    weights: &[u8],
) -> Result<(), VulkanError> {
    let place = first as u64..(first + weights.len()) as u64;
    uploading.write(to, place, |done, out| {
        let from = &weights[done..][..out.len()];
        let len = out.len().div_ceil(pool.threads()).max(COPIED);
        pool.fill(out, len, |part, out| {
            out.copy_from_slice(&from[part * len..][..out.len()]);
        });
    })
}

/// The blocks of each chunk in the layer at `place`: those that its rows see, and new ones.
fn blocks_of(place: usize, chunks: &[Chunk], sequences: &[Sequence<'_>]) -> Vec<ChunkBlocks> {
    let (mut at, mut back_at) = (0, 0);
    let blocks = chunks.iter().map(|chunk| {
        let kv = &sequences[chunk.sequence].layers[place];
        let first = kv.seen_from(chunk.first_position) / KV_POSITIONS;
        let end = (chunk.first_position + chunk.rows).div_ceil(KV_POSITIONS);
        let own = ChunkBlocks {
            first,
            count: end - first,
            at,
            back_at,
        };
        at += own.count;
        back_at += own.count - own.first_written(chunk);
        own
    });
    blocks.collect()
}

impl ChunkBlocks {
    /// How many of these blocks have positions from before.
    fn past(&self, chunk: &Chunk) -> usize {
        chunk.first_position.div_ceil(KV_POSITIONS) - self.first
    }

    /// Which of these blocks is the first that the chunk writes.
    fn first_written(&self, chunk: &Chunk) -> usize {
        chunk.first_position / KV_POSITIONS - self.first
    }
}

/// Copies to the GPU what a pass asks for.
struct Copies<'a> {
    compute: &'a Compute,
    residency: &'a Residency,
    slots: [[&'a Buffer; 3]; SLOTS],
    /// How often a slot was filled.
    asked: usize,
    uploading: Uploading<'a>,
    /// Which layer asks.
    layer: Option<&'a StreamedLayer>,
}

impl<'a> Copies<'a> {
    /// The slot that is filled next. What was recorded with the one before is handed to the GPU, and what was recorded with this one has run.
    fn slot(&mut self, pass: &mut Pass<'a>) -> Result<[&'a Buffer; 3], VulkanError> {
        if let Some(before) = self.asked.checked_sub(1) {
            pass.mark(before % SLOTS)?;
        }
        let own = self.asked % SLOTS;
        if self.asked >= SLOTS {
            pass.wait(own)?;
        }
        self.asked += 1;
        Ok(self.slots[own])
    }

    /// Waits for what was copied. What is recorded from now on sees it.
    fn arrive(&mut self, pass: &mut Pass<'a>) -> Result<(), VulkanError> {
        self.uploading.wait()?;
        pass.barrier();
        Ok(())
    }

    /// Copies rows of a matrix to their place, `first` bytes behind where it begins.
    fn rows(
        &mut self,
        to: Slice<'a>,
        first: usize,
        rows: kernels::Matrix<'_>,
    ) -> Result<(), VulkanError> {
        let pool = self.compute.pool();
        write(pool, &mut self.uploading, to, first, rows.bytes())
    }

    fn layer(&self) -> &'a StreamedLayer {
        self.layer
            .unwrap_or_else(|| unreachable!("a layer asks while it is recorded"))
    }
}

impl<'a> Matrices<'a> for Copies<'a> {
    fn matrix(
        &mut self,
        pass: &mut Pass<'a>,
        projection: &'a Projection,
    ) -> Result<Matrix<'a>, StepError> {
        let layer = self.layer();
        let tensor = layer.placed.tensor(projection);
        let [slot, ..] = self.slot(pass)?;
        let to = slot.slice(0..layer.bytes_of(projection));
        let (residency, mut written) = (self.residency, Ok(()));
        let read = residency.each_run(tensor, |first, rows| {
            if written.is_ok() {
                written = self.rows(to, first * rows.row_bytes(), rows);
            }
        });
        read.map_err(StepError::Weights)?;
        written?;
        self.arrive(pass)?;
        Ok(projection.with(to))
    }

    /// The rows of a pass need nearly all.
    fn experts(
        &mut self,
        pass: &mut Pass<'a>,
        experts: &'a Experts,
    ) -> Result<[Matrix<'a>; 3], StepError> {
        let layer = self.layer();
        let (slot, [gate, up, down]) = (self.slot(pass)?, experts.of_experts());
        let bytes = [gate, up, down].map(|one| layer.bytes_of(one));
        let to: [Slice<'a>; 3] = std::array::from_fn(|place| slot[place].slice(0..bytes[place]));
        let (residency, mut written) = (self.residency, Ok(()));
        if let Some(in_memory) = &layer.experts {
            let read = residency.all_experts(in_memory, |ready| {
                for expert in ready {
                    for (to, rows) in to.into_iter().zip([expert.gate, expert.up, expert.down]) {
                        let first = expert.number as usize * rows.bytes().len();
                        if written.is_ok() {
                            written = self.rows(to, first, rows);
                        }
                    }
                }
            });
            read.map_err(StepError::Weights)?;
        }
        written?;
        self.arrive(pass)?;
        Ok([gate.with(to[0]), up.with(to[1]), down.with(to[2])])
    }
}

/// A layer in a pass.
struct Part<'a> {
    layer: &'a StreamedLayer,
    /// For each chunk.
    blocks: &'a [ChunkBlocks],
    kv: &'a KvRoom,
    listed: &'a [Listed],
    block_bytes: u64,
}

impl<'a> Part<'a> {
    /// Copies to the GPU the keys and values that there are already and that the rows see.
    fn send_past(
        &self,
        copies: &mut Copies<'a>,
        place: usize,
        chunks: &[Chunk],
        sequences: &[Sequence<'_>],
    ) -> Result<(), VulkanError> {
        let Some(to) = &self.kv.blocks else {
            return Ok(());
        };
        let pool = copies.compute.pool();
        let shape = self.kv_shape();
        let words = self.block_bytes as usize / 4;
        let mut packed = Vec::new();
        for (chunk, own) in chunks.iter().zip(self.blocks) {
            let kv = &sequences[chunk.sequence].layers[place];
            if kv.is_empty() {
                continue;
            }
            let held = kv.blocks();
            let seen = held.blocks().split_off(own.first - held.first());
            for (blocks, group) in seen.chunks(PACKED).zip(0..) {
                packed.resize(blocks.len() * words, 0);
                pool.fill(&mut packed, words, |block, out| {
                    pack(blocks[block], shape, out);
                });
                let first = (own.at + group * PACKED) as u64 * self.block_bytes;
                let to = to.slice(first..first + blocks.len() as u64 * self.block_bytes);
                copies.uploading.write_all(to, &packed)?;
            }
        }
        Ok(())
    }

    /// Records the layer, and that its new keys and values come back.
    fn record(
        &self,
        begun: &mut Begun<'a>,
        copies: &mut Copies<'a>,
        window: &Window,
        rows: &'a Rows<'a>,
    ) -> Result<(), StepError> {
        let KvRoom {
            blocks: Some(cache),
            back: Some(back),
        } = self.kv
        else {
            // Without rows there is nothing to compute.
            return Ok(());
        };
        let compute = copies.compute;
        copies.layer = Some(self.layer);
        begun.layer(window, rows, &self.layer.placed, copies, cache, self.listed)?;
        let bytes = self.block_bytes;
        for (chunk, own) in rows.chunks.iter().zip(self.blocks) {
            let new = own.first_written(chunk);
            let from = (own.at + new) as u64 * bytes..(own.at + own.count) as u64 * bytes;
            let at = own.back_at as u64 * bytes;
            begun.pass.copy_back(cache.slice(from), back, at);
        }
        // It runs while the next layer's keys and values are made ready.
        begun.pass.go_on()?;
        compute.part_done();
        Ok(())
    }

    fn kv_shape(&self) -> KvShape {
        kv_shape(&self.layer.placed.spec.attention)
    }

    /// Keeps the new keys and values of a layer that has run.
    fn take_back(&self, place: usize, chunks: &[Chunk], sequences: &mut [Sequence<'_>]) {
        let Some(back) = &self.kv.back else {
            return;
        };
        let shape = self.kv_shape();
        let mut words = vec![0_u32; self.block_bytes as usize / 4];
        let mut halves = position_of(shape);
        for (chunk, own) in chunks.iter().zip(self.blocks) {
            let first_block = own.first + own.first_written(chunk);
            let positions = chunk.first_position..chunk.first_position + chunk.rows;
            let mut numbers = [Vec::new(), Vec::new()];
            for position in positions.clone() {
                let (block, within) = (position / KV_POSITIONS, position % KV_POSITIONS);
                if within == 0 || position == positions.start {
                    let at = own.back_at + block - first_block;
                    back.read(at as u64 * self.block_bytes, &mut words);
                }
                let [keys, values] = &mut halves;
                unpack_position(&words, within, keys, values);
                for (numbers, halves) in numbers.iter_mut().zip(&halves) {
                    numbers.extend(halves.iter().map(|half| half.to_f32()));
                }
            }
            let [keys, values] = &numbers;
            sequences[chunk.sequence].layers[place].append(shape, keys, values);
        }
    }
}

/// Room for keys and values of a position.
fn position_of(shape: KvShape) -> [Vec<f16>; 2] {
    [shape.row_len(), shape.value_row_len()].map(|len| vec![f16::ZERO; len])
}

/// A block in the GPU's layout.
fn pack(block: &KvBlock, shape: KvShape, words: &mut [u32]) {
    let [mut keys, mut values] = position_of(shape);
    for position in 0..KV_POSITIONS {
        block.load(position, &mut keys, &mut values);
        pack_position(words, position, &keys, &values);
    }
}

impl Executor for StreamedLayers {
    fn places(&self) -> Range<usize> {
        0..self.layers.len()
    }

    fn can_continue(&self, kv: &LayerKv) -> bool {
        kv.is_on_cpu()
    }

    fn forward(
        &self,
        compute: &Compute,
        activation: &mut [f32],
        batch: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        let mut workspace = self.gpu.workspace();
        self.window
            .each_pass(activation, batch, |own, chunks, batch| {
                self.pass(compute, &mut workspace, own, chunks, batch)
            })
    }
}
