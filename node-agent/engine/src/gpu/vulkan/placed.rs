//! A layer on the GPU: its vectors, and which matrices it has. These are as the file has them, and come from whoever has them there
//! ([`Matrices`]).

use std::ops::Range;

use prima_gguf::GgmlType;
use prima_model::{ActivationFunction, LayerSpec};
use prima_vulkan::{self as vulkan, Buffer, Device, Matrix, Pass, Slice, VulkanError, has_kernels};

use super::kv::device_shape;
use super::step::StepError;
use super::workspace::Layout;
use crate::layer::{self, Layer};
use crate::mapped_weights::MappedTensor;

pub(super) struct PlacedLayer {
    pub spec: LayerSpec,
    /// The place of its rotation among the angles of a pass.
    pub rope: Option<usize>,
    pub attention_norm: Option<Vector>,
    pub projections: Projections,
    pub output: Projection,
    pub sinks: Option<Vector>,
    pub attention_post_norm: Option<Vector>,
    pub feed_forward_norm: Option<Vector>,
    pub activation: vulkan::ActivationFunction,
    pub dense: Option<Mlp>,
    pub experts: Option<Experts>,
    pub feed_forward_post_norm: Option<Vector>,
    vectors: Buffer,
    tensors: Vec<MappedTensor>,
}

/// Who has a layer's matrices on the GPU while a pass goes through it.
pub(super) trait Matrices<'a> {
    /// A matrix, for the kernels that are recorded until the next is asked for.
    ///
    /// # Errors
    /// What keeps it from being there.
    fn matrix(
        &mut self,
        pass: &mut Pass<'a>,
        projection: &'a Projection,
    ) -> Result<Matrix<'a>, StepError>;

    /// Those of all experts: gate, up and down.
    ///
    /// # Errors
    /// What keeps them from being there.
    fn experts(
        &mut self,
        pass: &mut Pass<'a>,
        experts: &'a Experts,
    ) -> Result<[Matrix<'a>; 3], StepError>;
}

/// What makes queries, keys and values.
pub(super) enum Projections {
    Direct(Direct),
    Latent(Latent),
}

pub(super) struct Direct {
    pub query: Projection,
    pub key: Projection,
    pub value: Projection,
    head_norms: Option<[Vector; 2]>,
}

/// The parts of [`prima_model::Latent`].
pub(super) struct Latent {
    pub rank: usize,
    pub unrotated: usize,
    pub value_dim: usize,
    pub query_latent: Option<QueryLatent>,
    pub query: Projection,
    pub row: Projection,
    pub norm: Vector,
    /// These have the rows of all heads.
    pub into_latents: Projection,
    pub out_of_latents: Projection,
}

pub(super) struct QueryLatent {
    pub down: Projection,
    pub norm: Vector,
}

/// What all rows go through.
pub(super) struct Mlp {
    pub gate: Projection,
    pub up: Projection,
    pub down: Projection,
    /// Of one row.
    pub output_gate: Option<Projection>,
}

/// Gate, up and down have the rows of all experts.
pub(super) struct Experts {
    pub router: Projection,
    pub selection_bias: Option<Vector>,
    pub gate: Projection,
    pub up: Projection,
    pub down: Projection,
}

/// Numbers of a layer, and how many.
pub(super) struct Vector {
    place: Range<u64>,
    pub len: usize,
}

pub(super) struct Projection {
    /// Its place among the layer's matrices.
    pub number: usize,
    pub format: GgmlType,
    pub rows: usize,
    pub cols: usize,
    bias: Option<Vector>,
}

/// Gives the parts of a layer their places.
struct Placing<'a> {
    layout: Layout,
    vectors: Vec<(Range<u64>, &'a [f32])>,
    tensors: Vec<MappedTensor>,
}

impl Direct {
    /// The norms of queries and keys, where each head of `head_dim` numbers has its own.
    pub fn norms_of_heads(&self, head_dim: usize) -> Option<[&Vector; 2]> {
        let [query, key] = self.head_norms.as_ref()?;
        (query.len == head_dim && key.len == head_dim).then_some([query, key])
    }

    /// The same, where all heads of a row have one together.
    pub fn norms_of_rows(&self, head_dim: usize) -> Option<[&Vector; 2]> {
        match self.norms_of_heads(head_dim) {
            Some(_) => None,
            None => self.head_norms.as_ref().map(|norms| norms.each_ref()),
        }
    }
}

impl PlacedLayer {
    pub fn direct(&self) -> Option<&Direct> {
        match &self.projections {
            Projections::Direct(direct) => Some(direct),
            Projections::Latent(_) => None,
        }
    }

    pub fn latent(&self) -> Option<&Latent> {
        match &self.projections {
            Projections::Direct(_) => None,
            Projections::Latent(latent) => Some(latent),
        }
    }

    /// Copies a layer's vectors to the GPU.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] names what the GPU does not compute; [`VulkanError::OutOfMemory`].
    pub fn new(device: &Device, layer: &Layer) -> Result<PlacedLayer, VulkanError> {
        check(device, &layer.spec)?;
        let mut placing = Placing {
            layout: Layout::new(device),
            vectors: Vec::new(),
            tensors: Vec::new(),
        };
        let attention_norm = placing.optional(&layer.attention_norm);
        let projections = match &layer.projections {
            layer::Projections::Direct(direct) => Projections::Direct(placing.direct(direct)),
            layer::Projections::Latent(latent) => Projections::Latent(placing.latent(latent)),
        };
        let output = placing.projection(&layer.output);
        let sinks = placing.optional(&layer.sinks);
        let attention_post_norm = placing.optional(&layer.attention_post_norm);
        let feed_forward_norm = placing.optional(&layer.feed_forward_norm);
        let dense = layer.dense.as_ref().map(|mlp| Mlp {
            gate: placing.projection(&mlp.gate),
            up: placing.projection(&mlp.up),
            down: placing.projection(&mlp.down),
            output_gate: mlp.output_gate.as_ref().map(|gate| placing.matrix(gate)),
        });
        let experts = layer.experts.as_ref().map(|experts| Experts {
            router: placing.projection(&experts.router),
            selection_bias: placing.optional(&experts.selection_bias),
            gate: placing.projection(&experts.gate),
            up: placing.projection(&experts.up),
            down: placing.projection(&experts.down),
        });
        let feed_forward_post_norm = placing.optional(&layer.feed_forward_post_norm);
        let vectors = device.buffer(placing.layout.end())?;
        for (place, numbers) in placing.vectors {
            device.upload(vectors.slice(place), numbers)?;
        }
        Ok(PlacedLayer {
            spec: layer.spec.clone(),
            rope: layer.rope,
            attention_norm,
            projections,
            output,
            sinks,
            attention_post_norm,
            feed_forward_norm,
            activation: match layer.spec.feed_forward.activation {
                ActivationFunction::Silu => vulkan::ActivationFunction::Silu,
                ActivationFunction::Gelu => vulkan::ActivationFunction::Gelu,
                ActivationFunction::ClampedSwiglu => vulkan::ActivationFunction::ClampedSwiglu,
            },
            dense,
            experts,
            feed_forward_post_norm,
            vectors,
            tensors: placing.tensors,
        })
    }

    pub fn vector(&self, vector: &Vector) -> Slice<'_> {
        self.vectors.slice(vector.place.clone())
    }

    pub fn bias(&self, projection: &Projection) -> Option<Slice<'_>> {
        projection.bias.as_ref().map(|bias| self.vector(bias))
    }

    /// A matrix in memory.
    pub fn tensor(&self, projection: &Projection) -> &MappedTensor {
        &self.tensors[projection.number]
    }

    /// All, by their numbers.
    pub fn tensors(&self) -> &[MappedTensor] {
        &self.tensors
    }
}

impl Latent {
    pub fn of_heads(&self) -> [&Projection; 2] {
        [&self.into_latents, &self.out_of_latents]
    }
}

impl Experts {
    pub fn of_experts(&self) -> [&Projection; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

impl Projection {
    /// With its weights there.
    pub fn with<'a>(&self, weights: Slice<'a>) -> Matrix<'a> {
        Matrix {
            weights,
            format: self.format,
            rows: self.rows,
            cols: self.cols,
        }
    }
}

impl<'a> Placing<'a> {
    fn vector(&mut self, numbers: &'a [f32]) -> Vector {
        let place = self.layout.numbers(numbers.len());
        self.vectors.push((place.clone(), numbers));
        Vector {
            place,
            len: numbers.len(),
        }
    }

    fn optional(&mut self, numbers: &'a Option<Vec<f32>>) -> Option<Vector> {
        numbers.as_ref().map(|numbers| self.vector(numbers))
    }

    fn direct(&mut self, direct: &'a layer::Direct) -> Direct {
        let norms = direct.head_norms.as_ref();
        Direct {
            query: self.projection(&direct.query),
            key: self.projection(&direct.key),
            value: self.projection(&direct.value),
            head_norms: norms.map(|norms| [&norms.query, &norms.key].map(|norm| self.vector(norm))),
        }
    }

    fn latent(&mut self, latent: &'a layer::Latent) -> Latent {
        let query_latent = latent.query_latent.as_ref();
        Latent {
            rank: latent.rank,
            unrotated: latent.unrotated,
            value_dim: latent.value_dim,
            query_latent: query_latent.map(|query| QueryLatent {
                down: self.matrix(&query.down),
                norm: self.vector(&query.norm),
            }),
            query: self.matrix(&latent.query),
            row: self.matrix(&latent.row),
            norm: self.vector(&latent.norm),
            into_latents: self.matrix(&latent.into_latents),
            out_of_latents: self.matrix(&latent.out_of_latents),
        }
    }

    fn projection(&mut self, projection: &'a layer::Projection) -> Projection {
        Projection {
            bias: self.optional(&projection.bias),
            ..self.matrix(&projection.weight)
        }
    }

    fn matrix(&mut self, tensor: &MappedTensor) -> Projection {
        let number = self.tensors.len();
        self.tensors.push(tensor.clone());
        let matrix = tensor.matrix();
        Projection {
            number,
            format: matrix.ggml_type(),
            rows: matrix.rows(),
            cols: matrix.cols(),
            bias: None,
        }
    }
}

/// That there are kernels for the sizes and formats of a layer.
fn check(device: &Device, layer: &LayerSpec) -> Result<(), VulkanError> {
    let refused = |what| Err(VulkanError::NoKernel { what });
    let attention = &layer.attention;
    device_shape(attention).check()?;
    let mut matrices = layer.matrices().chain(layer.expert_matrices());
    if let Some(matrix) = matrices.find(|matrix| !has_kernels(matrix.format)) {
        return refused(format!("weights of format {}", matrix.format));
    }
    if let prima_model::Projections::Latent(latent) = &attention.projections {
        let query = latent.unrotated + attention.head_dim - latent.rank;
        let [into, out_of] = [&latent.into_latents, &latent.out_of_latents].map(|one| one.format);
        let matrices = [
            (into, latent.rank, latent.unrotated),
            (out_of, latent.value_dim, latent.rank),
        ];
        device.check_latents(query, attention.heads, matrices)?;
    }
    match &layer.feed_forward.experts {
        None => Ok(()),
        Some(experts) => {
            let hidden = attention.output.weight.rows;
            let [gate, up, down] = experts.matrices().map(|matrix| matrix.format);
            let width = experts.width;
            let matrices = [
                (gate, width, hidden),
                (up, width, hidden),
                (down, hidden, width),
            ];
            device.check_experts((experts.used, experts.count), matrices)
        }
    }
}
