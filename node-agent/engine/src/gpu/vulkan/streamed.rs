//! The forward pass through layers whose weights are not on the GPU: they are copied there layer by layer, the next while one computes. That pays
//! where a pass has many rows, since each weight that crosses is used for all of them. Keys and values stay in memory, where the processor goes on
//! with them: a layer's earlier ones are copied there with its weights, and the new ones back.
//!
//! Decides: that two layers have room at a time. While the first computes, the second is filled; the third waits for the first.

use std::ops::Range;

use half::f16;
use prima_vulkan::{
    Buffer, KV_POSITIONS, Slice, Uploading, Uploads, VulkanError, kv_block_bytes, pack_position,
    unpack_position,
};

use super::open::VulkanGpu;
use super::placed::{Piece, Place, PlacedLayer, Weights};
use super::step::{Chunk, Listed};
use super::window::{Begun, Rows, Window};
use super::workspace::Workspace;
use crate::batch::Sequence;
use crate::cpu::Compute;
use crate::error::EngineError;
use crate::executor::Executor;
use crate::gpu::backend::error;
use crate::gpu::facts::GpuApi;
use crate::gpu::parts;
use crate::kernels::{KvBlock, Matrix};
use crate::kv_cache::LayerKv;
use crate::layer::{Experts, Layer, Projections, kv_shape};
use crate::mapped_weights::MappedTensor;
use crate::model::Model;
use crate::residency::Residency;
use crate::ropes::Ropes;

/// Layers that have room at a time.
const SLOTS: usize = 2;
/// Bytes that a thread copies at once.
const COPIED: usize = 1 << 20;
/// Blocks of keys and values that are made ready at once.
const PACKED: usize = 16;

/// The first layers of a window.
pub(super) struct StreamedLayers {
    gpu: VulkanGpu,
    window: Window,
    layers: Vec<StreamedLayer>,
    block_bytes: u64,
    residency: Residency,
}

struct StreamedLayer {
    /// With its weights in memory.
    layer: Layer,
    /// In a slot.
    placed: PlacedLayer,
}

/// Room on a GPU for layers whose weights do not stay there. All windows share it.
#[derive(Default)]
pub(super) struct StreamRoom {
    uploads: Option<Uploads>,
    slots: [Slot; SLOTS],
}

/// Room for a layer. Grows to what layers and passes need.
#[derive(Default)]
struct Slot {
    weights: Weights,
    /// Keys and values where kernels use them, and where new ones come back.
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
    /// Makes room for the layers `layers` of `model`, two at a time.
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
        let mut room = gpu.room();
        let StreamRoom { uploads, slots } = &mut *room;
        if uploads.is_none() {
            *uploads = Some(device.uploads().map_err(refused)?);
        }
        let mut streamed = Vec::new();
        for (index, place) in layers.zip(0..) {
            let layer = Layer::load(model, index, &mut ropes)?;
            let direct = parts::computed(GpuApi::Vulkan, index, &layer)?;
            let (placed, copies) = PlacedLayer::place(device, &layer, direct).map_err(refused)?;
            let slot: &mut Slot = &mut slots[place % SLOTS];
            let made = slot.weights.make_room(device, &copies.buffers);
            made.map_err(refused)?;
            streamed.push(StreamedLayer { layer, placed });
        }
        let attention = &model.spec().layers[0].attention;
        let placed = streamed.iter().map(|layer| &layer.placed);
        Ok(StreamedLayers {
            window: Window::new(gpu, model.spec(), placed, ropes)?,
            block_bytes: kv_block_bytes(attention.kv_heads, attention.head_dim),
            residency: residency.clone(),
            gpu: gpu.clone(),
            layers: streamed,
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
        let mut blocks: Vec<u32> = Vec::new();
        let mut listed = Vec::new();
        let mut of_layers = Vec::new();
        for place in 0..self.layers.len() {
            let own = blocks_of(place, chunks, sequences);
            for chunk in &own {
                listed.push(Listed {
                    blocks_at: blocks.len(),
                    first_block: chunk.first,
                });
                blocks.extend((chunk.at..chunk.at + chunk.count).map(|block| block as u32));
            }
            of_layers.push(own);
        }
        let mut room = self.gpu.room();
        let StreamRoom { uploads, slots } = &mut *room;
        self.make_room(slots, &of_layers, chunks).map_err(failed)?;
        let slots: &[Slot; SLOTS] = slots;
        let Some(uploads) = uploads else {
            unreachable!("it was made with the window");
        };
        let placed = self.layers.iter().map(|layer| &layer.placed);
        let rows = self.window.rows(&self.gpu, placed, chunks, &blocks);
        let rows = rows.map_err(failed)?;
        let begun = self.window.begin(&self.gpu, workspace, &rows, activation);
        let mut flow = Flow {
            compute,
            layers: self,
            slots,
            rows: &rows,
            of_layers: &of_layers,
            uploading: uploads.begin(),
            begun: begun.map_err(failed)?,
        };
        for (place, listed) in listed.chunks(chunks.len()).enumerate() {
            if let Some(before) = place.checked_sub(SLOTS) {
                flow.take_back(before, sequences)?;
            }
            flow.send(place, sequences)?;
            flow.start(place, listed).map_err(failed)?;
        }
        for place in self.layers.len().saturating_sub(SLOTS)..self.layers.len() {
            flow.take_back(place, sequences)?;
        }
        let Flow {
            begun, uploading, ..
        } = flow;
        compute.copied(uploading.bytes());
        begun.finish(&rows, activation).map_err(failed)
    }

    /// Makes room for keys and values of any of the layers in both slots.
    fn make_room(
        &self,
        slots: &mut [Slot; SLOTS],
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
            back = back.max(last.back_at + last.count - last.new(chunk));
        }
        let grown = |buffer: &mut Option<Buffer>, blocks: usize, host: bool| {
            let bytes = blocks as u64 * self.block_bytes;
            if buffer.as_ref().is_some_and(|own| own.bytes() >= bytes) {
                return Ok(());
            }
            // The old one is freed before.
            *buffer = None;
            *buffer = Some(match host {
                true => device.host_buffer(bytes)?,
                false => device.upload_buffer(bytes)?,
            });
            Ok(())
        };
        slots.iter_mut().try_for_each(|slot| {
            grown(&mut slot.blocks, blocks, false)?;
            grown(&mut slot.back, back, true)
        })
    }
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
        back_at += own.count - own.new(chunk);
        own
    });
    blocks.collect()
}

impl ChunkBlocks {
    /// Which of these blocks is the first that the chunk writes.
    fn new(&self, chunk: &Chunk) -> usize {
        chunk.first_position / KV_POSITIONS - self.first
    }
}

/// A pass on its way through the layers.
struct Flow<'a> {
    compute: &'a Compute,
    layers: &'a StreamedLayers,
    slots: &'a [Slot; SLOTS],
    rows: &'a Rows<'a>,
    of_layers: &'a [Vec<ChunkBlocks>],
    uploading: Uploading<'a>,
    begun: Begun<'a>,
}

impl<'a> Flow<'a> {
    /// Copies a layer's weights to its slot, with the keys and values that its rows see.
    fn send(&mut self, place: usize, sequences: &[Sequence<'_>]) -> Result<(), EngineError> {
        let failed = |source| error("take a layer's weights", source);
        let StreamedLayer { layer, .. } = &self.layers.layers[place];
        let slot = &self.slots[place % SLOTS];
        let weights = &slot.weights;
        let Projections::Direct(direct) = &layer.projections else {
            unreachable!("checked when it was placed");
        };
        let device = &self.layers.gpu.device;
        let (_, copies) = PlacedLayer::place(device, layer, direct).map_err(failed)?;
        for piece in copies.pieces {
            match piece {
                Piece::Matrix(place, tensor) => self.matrix(weights, &place, tensor)?,
                Piece::Experts(places, experts) => self.experts(weights, &places, experts)?,
                Piece::Numbers(place, numbers) => {
                    let written = self.uploading.write_all(weights.slice(&place), numbers);
                    written.map_err(failed)?;
                }
            }
        }
        let blocks = slot.blocks.as_ref();
        for (chunk, own) in self.rows.chunks.iter().zip(&self.of_layers[place]) {
            let kv = &sequences[chunk.sequence].layers[place];
            let Some(blocks) = blocks.filter(|_| !kv.is_empty()) else {
                continue;
            };
            self.past(kv, own, blocks).map_err(failed)?;
        }
        self.uploading.wait().map_err(failed)
    }

    fn matrix(
        &mut self,
        weights: &'a Weights,
        place: &Place,
        tensor: &MappedTensor,
    ) -> Result<(), EngineError> {
        let to = weights.slice(place);
        let mut written = Ok(());
        self.layers.residency.each_run(tensor, |first, rows| {
            let first = first * rows.row_bytes();
            if written.is_ok() {
                written = self.rows(to, first, rows);
            }
        })?;
        written.map_err(|source| error("take a layer's weights", source))
    }

    /// Copies rows of a matrix to their place, `first` bytes behind where it begins, by all threads.
    fn rows(&mut self, to: Slice<'a>, first: usize, rows: Matrix<'_>) -> Result<(), VulkanError> {
        let (pool, bytes) = (self.compute.pool(), rows.bytes());
        let place = first as u64..(first + bytes.len()) as u64;
        self.uploading.write(to, place, |done, out| {
            let from = &bytes[done..][..out.len()];
            pool.fill(out, COPIED, |part, out| {
                out.copy_from_slice(&from[part * COPIED..][..out.len()]);
            });
        })
    }

    /// All experts of a layer: the rows of a pass need nearly all.
    fn experts(
        &mut self,
        weights: &'a Weights,
        places: &[Place; 3],
        experts: &Experts,
    ) -> Result<(), EngineError> {
        let to = places.each_ref().map(|place| weights.slice(place));
        let all: Vec<u32> = (0..experts.router.width() as u32).collect();
        let mut written = Ok(());
        self.layers.residency.each_expert(experts, &all, |ready| {
            for expert in ready {
                for (to, matrix) in to.into_iter().zip([expert.gate, expert.up, expert.down]) {
                    let first = expert.number as usize * matrix.bytes().len();
                    if written.is_ok() {
                        written = self.rows(to, first, matrix);
                    }
                }
            }
        })?;
        written.map_err(|source| error("take a layer's weights", source))
    }

    /// The keys and values of a sequence that are there already.
    fn past(&mut self, kv: &LayerKv, own: &ChunkBlocks, to: &'a Buffer) -> Result<(), VulkanError> {
        let block_bytes = self.layers.block_bytes;
        let words = block_bytes as usize / 4;
        let held = kv.blocks();
        let seen = held.blocks().split_off(own.first - held.first());
        let mut packed = Vec::new();
        for (blocks, group) in seen.chunks(PACKED).zip(0..) {
            packed.resize(blocks.len() * words, 0);
            self.compute.pool().fill(&mut packed, words, |block, out| {
                pack(blocks[block], out);
            });
            let first = (own.at + group * PACKED) as u64 * block_bytes;
            let to = to.slice(first..first + blocks.len() as u64 * block_bytes);
            self.uploading.write_all(to, &packed)?;
        }
        Ok(())
    }

    /// Hands the layer's kernels to the GPU.
    fn start(&mut self, place: usize, listed: &'a [Listed]) -> Result<(), VulkanError> {
        let Slot {
            weights,
            blocks: Some(blocks),
            back: Some(back),
        } = &self.slots[place % SLOTS]
        else {
            // Without rows there is nothing to compute.
            return Ok(());
        };
        let layer = (&self.layers.layers[place].placed, weights);
        let begun = &mut self.begun;
        begun.pass.barrier();
        begun.layer(&self.layers.window, self.rows, layer, blocks, listed)?;
        let bytes = self.layers.block_bytes;
        for (chunk, own) in self.rows.chunks.iter().zip(&self.of_layers[place]) {
            let new = own.new(chunk);
            let from = (own.at + new) as u64 * bytes..(own.at + own.count) as u64 * bytes;
            begun
                .pass
                .copy_back(blocks.slice(from), back, own.back_at as u64 * bytes);
        }
        begun.pass.mark(place % SLOTS)
    }

    /// Waits for a layer, and keeps its new keys and values.
    fn take_back(
        &mut self,
        place: usize,
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        let waited = self.begun.pass.wait(place % SLOTS);
        waited.map_err(|source| error("compute layers with copied weights", source))?;
        self.compute.part_done();
        let Some(back) = &self.slots[place % SLOTS].back else {
            return Ok(());
        };
        let shape = kv_shape(&self.layers.layers[place].layer.spec.attention);
        let row = shape.row_len();
        let mut words = vec![0_u32; self.layers.block_bytes as usize / 4];
        let mut halves = [vec![f16::ZERO; row], vec![f16::ZERO; row]];
        for (chunk, own) in self.rows.chunks.iter().zip(&self.of_layers[place]) {
            let kv = &mut sequences[chunk.sequence].layers[place];
            let first = (own.first + own.new(chunk)) * KV_POSITIONS;
            let positions = chunk.first_position..chunk.first_position + chunk.rows;
            let mut numbers = [Vec::new(), Vec::new()];
            for position in positions.clone() {
                let (block, position_in) =
                    ((position - first) / KV_POSITIONS, position % KV_POSITIONS);
                if position_in == 0 || position == positions.start {
                    let at = (own.back_at + block) as u64 * self.layers.block_bytes;
                    back.read(at, &mut words);
                }
                let [keys, values] = &mut halves;
                unpack_position(&words, position_in, keys, values);
                for (numbers, halves) in numbers.iter_mut().zip(&halves) {
                    numbers.extend(halves.iter().map(|half| half.to_f32()));
                }
            }
            let [keys, values] = &numbers;
            kv.append(shape, keys, values);
        }
        Ok(())
    }
}

/// A block in the GPU's layout.
fn pack(block: &KvBlock, words: &mut [u32]) {
    let row = words.len() / KV_POSITIONS;
    let (mut keys, mut values) = (vec![f16::ZERO; row], vec![f16::ZERO; row]);
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
        let mut rest = activation;
        for chunks in self.window.passes(batch) {
            let rows: usize = chunks.iter().map(|chunk| chunk.rows).sum();
            let (own, others) = rest.split_at_mut(rows * self.window.hidden);
            rest = others;
            self.pass(compute, &mut workspace, own, &chunks, batch)?;
        }
        Ok(())
    }
}
