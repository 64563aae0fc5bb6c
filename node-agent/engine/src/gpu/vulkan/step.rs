//! One layer's part of a pass: which kernels, in which order, and where one has to wait for another.

use std::ops::Range;

use prima_model::{RopePairing, Temperature};
use prima_vulkan::{
    Attention, Buffer, HeadNorms, Heads, Input, Norm, Pass, Product, Rotation, Rows, SequenceRows,
    Slice, VulkanError, attention_groups, attention_part_bytes, input_bytes,
};

use super::expert_step::ExpertPlaces;
use super::kv::device_shape;
use super::latent_step::LatentPlaces;
use super::placed::{Direct, Matrices, Mlp, PlacedLayer, Projection, Projections, Vector};
use super::workspace::{Layout, slice};
use crate::error::EngineError;
use crate::gpu::backend::error;
use crate::kernels::RopeAngles;

/// Why a step cannot be recorded.
pub(super) enum StepError {
    Gpu(VulkanError),
    /// Weights are not there.
    Weights(EngineError),
}

impl From<VulkanError> for StepError {
    fn from(source: VulkanError) -> StepError {
        StepError::Gpu(source)
    }
}

impl StepError {
    /// As the engine tells it: the GPU could not do `action`.
    pub fn of(self, action: &'static str) -> EngineError {
        match self {
            StepError::Gpu(source) => error(action, source),
            StepError::Weights(source) => source,
        }
    }
}

pub(super) struct Step<'a> {
    pub layer: &'a PlacedLayer,
    /// The layer's keys and values.
    pub cache: Slice<'a>,
    /// The workspace.
    pub buffer: &'a Buffer,
    pub places: &'a Places,
    pub chunks: &'a [Chunk],
    /// For each chunk.
    pub listed: &'a [Listed],
    /// Of each rotation.
    pub angles: &'a [RopeAngles],
    pub rows: usize,
    pub norm_epsilon: f32,
    pub residual_scale: f32,
}

/// Rows of a sequence in a pass.
pub(super) struct Chunk {
    pub sequence: usize,
    /// Of the first of them.
    pub first_position: usize,
    pub rows: usize,
}

/// Where blocks of a layer and a chunk are listed.
pub(super) struct Listed {
    pub blocks_at: usize,
    /// Which of the sequence's is the first that is listed.
    pub first_block: usize,
}

/// Numbers of a row at most, in the layers of a pass.
pub(super) struct Widths {
    pub hidden: usize,
    pub queries: usize,
    pub keys: usize,
    pub inner: usize,
    /// Whether queries and keys have norms of all heads of a row together.
    pub row_norms: bool,
}

/// Bytes that parts of the attention of one of a pass's chunks take in a layer.
pub(super) fn part_bytes(layer: &PlacedLayer, chunks: &[Chunk], chunk: &Chunk) -> u64 {
    let attention = &layer.spec.attention;
    let pass_rows = chunks.iter().map(|chunk| chunk.rows).sum();
    let pass = (pass_rows, groups(layer, chunks));
    attention_part_bytes(chunk.rows, attention.heads, device_shape(attention), pass)
}

/// Groups that attend in a layer, for all chunks.
fn groups(layer: &PlacedLayer, chunks: &[Chunk]) -> usize {
    let attention = &layer.spec.attention;
    let kv = device_shape(attention);
    let of = |chunk: &Chunk| attention_groups(chunk.rows, attention.heads, kv);
    chunks.iter().map(of).sum()
}

/// Where the parts of a pass lie in the workspace.
pub(super) struct Places {
    pub x: Range<u64>,
    pub normed: Range<u64>,
    queries: Range<u64>,
    normed_queries: Range<u64>,
    keys: Range<u64>,
    normed_keys: Range<u64>,
    values: Range<u64>,
    attended: Range<u64>,
    gate: Range<u64>,
    up: Range<u64>,
    pub projected: Range<u64>,
    /// What is multiplied next, rounded to bytes.
    bytes: Range<u64>,
    /// For each chunk, what parts of its attention find.
    parts: Vec<Range<u64>>,
    pub blocks: Range<u64>,
    /// Of each rotation.
    pub angles: Vec<Range<u64>>,
    pub experts: ExpertPlaces,
    pub latents: LatentPlaces,
}

impl Places {
    /// For so many rows and listed blocks, the angles of those rows, the bytes of [`part_bytes`] of each chunk, experts and latents.
    pub fn new(
        layout: &mut Layout,
        (rows, widths): (usize, &Widths),
        blocks: usize,
        angles: &[RopeAngles],
        parts: impl Iterator<Item = u64>,
        (experts, latents): (ExpertPlaces, LatentPlaces),
    ) -> Places {
        let Widths {
            hidden,
            queries,
            keys,
            inner,
            row_norms,
        } = *widths;
        let normed = if row_norms { rows } else { 0 };
        Places {
            x: layout.numbers(rows * hidden),
            normed: layout.numbers(rows * hidden),
            queries: layout.numbers(rows * queries),
            normed_queries: layout.numbers(normed * queries),
            keys: layout.numbers(rows * keys),
            normed_keys: layout.numbers(normed * keys),
            values: layout.numbers(rows * keys),
            attended: layout.numbers(rows * queries),
            gate: layout.numbers(rows * inner),
            up: layout.numbers(rows * inner),
            projected: layout.numbers(rows * hidden),
            bytes: layout.bytes(input_bytes(rows, hidden.max(queries).max(inner))),
            parts: parts.map(|bytes| layout.bytes(bytes)).collect(),
            blocks: layout.numbers(blocks),
            angles: angles
                .iter()
                .map(|angles| layout.numbers(angles.turns().len()))
                .collect(),
            experts,
            latents,
        }
    }
}

impl<'a> Step<'a> {
    /// x += post-norm(output(attention(rope(queries, keys of the norm), values of the norm)))
    pub fn attention(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
    ) -> Result<(), StepError> {
        let layer = self.layer;
        let x = self.normed(pass, layer.attention_norm.as_ref())?;
        let attended = match &layer.projections {
            Projections::Direct(direct) => self.attend(pass, matrices, direct, x)?,
            Projections::Latent(latent) => self.attend_to_latents(pass, matrices, latent, x)?,
        };
        pass.barrier();
        let post_norm = layer.attention_post_norm.as_ref();
        self.add(pass, matrices, &layer.output, attended, post_norm)
    }

    /// x += post-norm(experts(norm) + down(activation(gate(norm)) * up(norm))), as far as they are there
    pub fn feed_forward(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
    ) -> Result<(), StepError> {
        let layer = self.layer;
        let x = self.normed(pass, layer.feed_forward_norm.as_ref())?;
        if let (Some(experts), Some(spec)) = (&layer.experts, &layer.spec.feed_forward.experts) {
            return self.experts(pass, matrices, x, (experts, spec));
        }
        let Some(mlp) = &layer.dense else {
            return Ok(());
        };
        self.gate_and_up(pass, matrices, mlp, x)?;
        pass.barrier();
        let gated = self.gated(pass, mlp, self.slice(&self.places.bytes))?;
        pass.barrier();
        let post_norm = layer.feed_forward_post_norm.as_ref();
        self.add(pass, matrices, &mlp.down, gated, post_norm)
    }

    pub fn gate_and_up(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
        mlp: &'a Mlp,
        x: Input<'a>,
    ) -> Result<(), StepError> {
        let (gate, up) = (self.slice(&self.places.gate), self.slice(&self.places.up));
        self.project(pass, matrices, &mlp.gate, x, gate, None)?;
        self.project(pass, matrices, &mlp.up, x, up, None)
    }

    /// activation(gate) * up, ready to be multiplied; `room` is for what is rounded.
    pub fn gated(
        &self,
        pass: &mut Pass<'a>,
        mlp: &Mlp,
        room: Slice<'a>,
    ) -> Result<Input<'a>, VulkanError> {
        let (gate, up) = (self.slice(&self.places.gate), self.slice(&self.places.up));
        let gate = self.pass_rows(gate);
        pass.gate_input(self.layer.activation, gate, up, mlp.gate.rows, room)
    }

    /// The norm of x, or x itself where there is no norm, ready to be multiplied, and a barrier behind it.
    fn normed(
        &self,
        pass: &mut Pass<'a>,
        weight: Option<&'a Vector>,
    ) -> Result<Input<'a>, VulkanError> {
        let x = self.pass_rows(self.slice(&self.places.x));
        let room = self.slice(&self.places.bytes);
        let input = match weight {
            None => pass.input(x, self.layer.output.rows, room)?,
            Some(weight) => {
                let normed = self.slice(&self.places.normed);
                pass.norm_input(self.norm(weight, x, normed, None), room)?
            }
        };
        pass.barrier();
        Ok(input)
    }

    pub fn norm(
        &self,
        weight: &'a Vector,
        x: Rows<'a>,
        out: Slice<'a>,
        add: Option<f32>,
    ) -> Norm<'a> {
        Norm {
            weight: self.layer.vector(weight),
            width: weight.len,
            x,
            out,
            epsilon: self.norm_epsilon,
            add,
        }
    }

    pub fn project(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
        projection: &'a Projection,
        x: Input<'a>,
        out: Slice<'a>,
        add: Option<f32>,
    ) -> Result<(), StepError> {
        let product = Product {
            x,
            out,
            bias: self.layer.bias(projection),
            add,
        };
        let matrix = matrices.matrix(pass, projection)?;
        Ok(pass.multiply(matrix, product)?)
    }

    /// x += post-norm(projection(from)), and a barrier behind it.
    fn add(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
        projection: &'a Projection,
        from: Input<'a>,
        post_norm: Option<&'a Vector>,
    ) -> Result<(), StepError> {
        let (x, scale) = (self.slice(&self.places.x), Some(self.residual_scale));
        match post_norm {
            None => self.project(pass, matrices, projection, from, x, scale)?,
            Some(weight) => {
                let projected = self.slice(&self.places.projected);
                self.project(pass, matrices, projection, from, projected, None)?;
                pass.barrier();
                pass.norm(self.norm(weight, self.pass_rows(projected), x, scale))?;
            }
        }
        pass.barrier();
        Ok(())
    }

    /// Projects x, appends the new keys and values, then attends to them and to all before. What is attended is ready to be multiplied.
    fn attend(
        &self,
        pass: &mut Pass<'a>,
        matrices: &mut dyn Matrices<'a>,
        direct: &'a Direct,
        x: Input<'a>,
    ) -> Result<Input<'a>, StepError> {
        let (attention, places) = (&self.layer.spec.attention, self.places);
        let [mut queries, mut keys, values] =
            [&places.queries, &places.keys, &places.values].map(|place| self.slice(place));
        self.project(pass, matrices, &direct.query, x, queries, None)?;
        self.project(pass, matrices, &direct.key, x, keys, None)?;
        self.project(pass, matrices, &direct.value, x, values, None)?;
        pass.barrier();
        if let Some([query, key]) = direct.norms_of_rows(attention.head_dim) {
            queries = self.row_norm(pass, query, queries, &places.normed_queries)?;
            keys = self.row_norm(pass, key, keys, &places.normed_keys)?;
            pass.barrier();
        }
        let norms = direct.norms_of_heads(attention.head_dim);
        let norms = norms.map(|norms| norms.map(|norm| self.layer.vector(norm)));
        let norms = norms.map(|[query, key]| HeadNorms {
            query,
            key,
            epsilon: self.norm_epsilon,
        });
        for sequence in self.sequences() {
            pass.prepare_heads(Heads {
                sequence,
                heads: attention.heads,
                queries,
                keys,
                values,
                norms,
                rotation: self.rotation(),
            })?;
        }
        pass.barrier();
        let out = self.pass_rows(self.slice(&places.attended));
        let attentions = self.attend_each(pass, queries, None, out)?;
        let room = self.slice(&places.bytes);
        Ok(pass.attended(&attentions, out, self.layer.output.cols, room)?)
    }

    /// How queries and keys are turned.
    pub fn rotation(&self) -> Option<Rotation<'a>> {
        let rope = self.layer.spec.attention.rope.as_ref();
        let rotation = self.layer.rope.zip(rope);
        rotation.map(|(place, rope)| Rotation {
            angles: self.slice(&self.places.angles[place]),
            pairs: self.angles[place].pairs(),
            neighbours: rope.pairing == RopePairing::Interleaved,
        })
    }

    /// Each chunk attends, with a barrier behind all. What is rotated of queries to latents lies apart. Gives how they attend.
    pub fn attend_each(
        &self,
        pass: &mut Pass<'a>,
        queries: Slice<'a>,
        rotated: Option<Slice<'a>>,
        out: Rows<'a>,
    ) -> Result<Vec<Attention<'a>>, VulkanError> {
        let attention = &self.layer.spec.attention;
        let groups = groups(self.layer, self.chunks);
        let sinks = self.layer.sinks.as_ref();
        let attentions = self.sequences().into_iter().zip(&self.places.parts);
        let attentions: Vec<Attention<'a>> = attentions
            .map(|(sequence, parts)| Attention {
                sequence,
                heads: attention.heads,
                queries,
                rotated,
                out,
                parts: self.slice(parts),
                groups,
                scale: attention.scale,
                window: attention.window,
                softcap: attention.softcap,
                temperature: attention
                    .temperature
                    .map(|Temperature { scale, positions }| (scale, positions)),
                sinks: sinks.map(|sinks| self.layer.vector(sinks)),
            })
            .collect();
        for attention in &attentions {
            pass.attend(*attention)?;
        }
        pass.barrier();
        Ok(attentions)
    }

    /// The norm of all heads of a row together.
    fn row_norm(
        &self,
        pass: &mut Pass<'a>,
        weight: &'a Vector,
        from: Slice<'a>,
        to: &Range<u64>,
    ) -> Result<Slice<'a>, VulkanError> {
        let to = self.slice(to);
        pass.norm(self.norm(weight, self.pass_rows(from), to, None))?;
        Ok(to)
    }

    /// Of each chunk.
    pub fn sequences(&self) -> Vec<SequenceRows<'a>> {
        let kv = device_shape(&self.layer.spec.attention);
        let mut first_row = 0;
        let chunks = self.chunks.iter().zip(self.listed);
        let sequences = chunks.map(|(chunk, listed)| {
            let sequence = SequenceRows {
                blocks: self.slice(&self.places.blocks),
                blocks_at: listed.blocks_at,
                first_block: listed.first_block,
                cache: self.cache,
                kv,
                rows: chunk.rows,
                first_row,
                first_position: chunk.first_position,
            };
            first_row += chunk.rows;
            sequence
        });
        sequences.collect()
    }

    pub fn slice(&self, place: &Range<u64>) -> Slice<'a> {
        slice(self.buffer, place)
    }

    /// The rows of the pass.
    pub fn pass_rows(&self, slice: Slice<'a>) -> Rows<'a> {
        Rows {
            slice,
            count: self.rows,
        }
    }
}
