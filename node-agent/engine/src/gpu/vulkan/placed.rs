//! A layer whose weights have their places in buffers of the GPU, matrices as the file has them. Large ones have buffers of their own, since
//! drivers limit what one may have.

use std::iter;
use std::ops::Range;

use prima_gguf::GgmlType;
use prima_model::{ActivationFunction, LayerSpec};
use prima_vulkan::{
    self as vulkan, Buffer, Device, MOST_HEAD_DIM, Matrix, Slice, VulkanError, has_kernels,
};

use super::workspace::Layout;
use crate::layer::{self, Direct, Layer};
use crate::mapped_weights::MappedTensor;

pub(super) struct PlacedLayer {
    pub spec: LayerSpec,
    /// The place of its rotation among the angles of a pass.
    pub rope: Option<usize>,
    pub attention_norm: Option<Vector>,
    pub query: Projection,
    pub key: Projection,
    pub value: Projection,
    pub output: Projection,
    head_norms: Option<[Vector; 2]>,
    pub sinks: Option<Vector>,
    pub attention_post_norm: Option<Vector>,
    pub feed_forward_norm: Option<Vector>,
    pub activation: vulkan::ActivationFunction,
    pub dense: Option<Mlp>,
    pub experts: Option<Experts>,
    pub feed_forward_post_norm: Option<Vector>,
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

/// A layer's buffers. The first has all that is small.
#[derive(Default)]
pub(super) struct Weights(Vec<Buffer>);

/// Which of a layer's buffers, and where in it.
#[derive(Clone)]
pub(super) struct Place(pub usize, pub Range<u64>);

/// Numbers of a layer, and how many.
pub(super) struct Vector {
    place: Place,
    pub len: usize,
}

pub(super) struct Projection {
    place: Place,
    pub format: GgmlType,
    pub rows: usize,
    pub cols: usize,
    bias: Option<Vector>,
}

/// What is copied to the buffers, and where.
pub(super) enum Piece<'a> {
    Matrix(Place, &'a MappedTensor),
    /// Gate, up and down.
    Experts([Place; 3], &'a layer::Experts),
    Numbers(Place, &'a [f32]),
}

/// What is to be copied for a layer.
pub(super) struct Copies<'a> {
    /// Bytes of each buffer.
    pub buffers: Vec<u64>,
    /// In the order in which a pass uses them.
    pub pieces: Vec<Piece<'a>>,
}

/// From so many bytes on, a matrix has a buffer of its own. Vulkan promises buffers of 1 GiB, and layers with experts have more.
const LARGE: u64 = 64 << 20;

/// Gives the parts of a layer their places.
struct Placing<'a> {
    device: &'a Device,
    /// Of each buffer.
    layouts: Vec<Layout>,
    pieces: Vec<Piece<'a>>,
}

impl PlacedLayer {
    /// The norms of queries and keys, where each head has its own.
    pub fn norms_of_heads(&self) -> Option<[&Vector; 2]> {
        let [query, key] = self.head_norms.as_ref()?;
        let head_dim = self.spec.attention.head_dim;
        (query.len == head_dim && key.len == head_dim).then_some([query, key])
    }

    /// The same, where all heads of a row have one together.
    pub fn norms_of_rows(&self) -> Option<[&Vector; 2]> {
        match self.norms_of_heads() {
            Some(_) => None,
            None => self.head_norms.as_ref().map(|norms| norms.each_ref()),
        }
    }

    /// Gives a layer's weights their places.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] names what the GPU does not compute.
    pub fn place<'a>(
        device: &'a Device,
        layer: &'a Layer,
        attention: &'a Direct,
    ) -> Result<(PlacedLayer, Copies<'a>), VulkanError> {
        check(device, &layer.spec)?;
        let mut placing = Placing {
            device,
            layouts: vec![Layout::new(device)],
            pieces: Vec::new(),
        };
        let attention_norm = placing.optional(&layer.attention_norm);
        let query = placing.projection(&attention.query);
        let key = placing.projection(&attention.key);
        let value = placing.projection(&attention.value);
        let output = placing.projection(&layer.output);
        let norms = attention.head_norms.as_ref();
        let head_norms =
            norms.map(|norms| [&norms.query, &norms.key].map(|norm| placing.vector(norm)));
        let sinks = placing.optional(&layer.sinks);
        let attention_post_norm = placing.optional(&layer.attention_post_norm);
        let feed_forward_norm = placing.optional(&layer.feed_forward_norm);
        let dense = layer.dense.as_ref().map(|mlp| Mlp {
            gate: placing.projection(&mlp.gate),
            up: placing.projection(&mlp.up),
            down: placing.projection(&mlp.down),
            output_gate: mlp.output_gate.as_ref().map(|gate| placing.matrix(gate)),
        });
        let experts = layer.experts.as_ref().map(|experts| {
            let router = placing.projection(&experts.router);
            let selection_bias = placing.optional(&experts.selection_bias);
            let [gate, up, down] = placing.experts(experts);
            Experts {
                router,
                selection_bias,
                gate,
                up,
                down,
            }
        });
        let feed_forward_post_norm = placing.optional(&layer.feed_forward_post_norm);
        let placed = PlacedLayer {
            spec: layer.spec.clone(),
            rope: layer.rope,
            attention_norm,
            query,
            key,
            value,
            output,
            head_norms,
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
        };
        let copies = Copies {
            buffers: placing.layouts.iter().map(Layout::end).collect(),
            pieces: placing.pieces,
        };
        Ok((placed, copies))
    }
}

impl Weights {
    /// Copies a layer's weights to buffers of its own.
    ///
    /// # Errors
    /// [`VulkanError::OutOfMemory`], [`VulkanError::Driver`].
    pub fn load(device: &Device, copies: Copies<'_>) -> Result<Weights, VulkanError> {
        let buffers = copies.buffers.iter().map(|bytes| device.buffer(*bytes));
        let weights = Weights(buffers.collect::<Result<_, _>>()?);
        let upload = |place: &Place, tensor: &MappedTensor| {
            device.upload(weights.slice(place), tensor.matrix().bytes())
        };
        for piece in copies.pieces {
            match piece {
                Piece::Matrix(place, tensor) => upload(&place, tensor)?,
                Piece::Experts(places, experts) => {
                    let all = [&experts.gate, &experts.up, &experts.down];
                    for (place, projection) in places.iter().zip(all) {
                        upload(place, &projection.weight)?;
                    }
                }
                Piece::Numbers(place, numbers) => device.upload(weights.slice(&place), numbers)?,
            }
        }
        Ok(weights)
    }

    /// Sees to it that there is room for a layer whose buffers have these sizes, and what others need. What is there may be lost.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn make_room(&mut self, device: &Device, bytes: &[u64]) -> Result<(), VulkanError> {
        for (place, &bytes) in bytes.iter().enumerate() {
            match self.0.get(place) {
                Some(buffer) if buffer.bytes() >= bytes => {}
                None => self.0.push(device.upload_buffer(bytes)?),
                Some(_) => {
                    // The old one, and what comes behind it, is freed before.
                    let behind: Vec<u64> = self
                        .0
                        .drain(place..)
                        .skip(1)
                        .map(|old| old.bytes())
                        .collect();
                    for bytes in iter::once(bytes).chain(behind) {
                        self.0.push(device.upload_buffer(bytes)?);
                    }
                }
            }
        }
        Ok(())
    }

    pub fn vector(&self, vector: &Vector) -> Slice<'_> {
        self.slice(&vector.place)
    }

    pub fn slice(&self, Place(buffer, bytes): &Place) -> Slice<'_> {
        self.0[*buffer].slice(bytes.clone())
    }

    pub fn matrix(&self, projection: &Projection) -> Matrix<'_> {
        Matrix {
            weights: self.slice(&projection.place),
            format: projection.format,
            rows: projection.rows,
            cols: projection.cols,
        }
    }

    pub fn bias(&self, projection: &Projection) -> Option<Slice<'_>> {
        projection.bias.as_ref().map(|bias| self.vector(bias))
    }
}

impl<'a> Placing<'a> {
    fn vector(&mut self, numbers: &'a [f32]) -> Vector {
        let place = Place(0, self.layouts[0].numbers(numbers.len()));
        self.pieces.push(Piece::Numbers(place.clone(), numbers));
        Vector {
            place,
            len: numbers.len(),
        }
    }

    fn optional(&mut self, numbers: &'a Option<Vec<f32>>) -> Option<Vector> {
        numbers.as_ref().map(|numbers| self.vector(numbers))
    }

    fn projection(&mut self, projection: &'a layer::Projection) -> Projection {
        Projection {
            bias: self.optional(&projection.bias),
            ..self.matrix(&projection.weight)
        }
    }

    fn matrix(&mut self, tensor: &'a MappedTensor) -> Projection {
        let projection = self.placed(tensor);
        self.pieces
            .push(Piece::Matrix(projection.place.clone(), tensor));
        projection
    }

    fn experts(&mut self, experts: &'a layer::Experts) -> [Projection; 3] {
        let all = [&experts.gate, &experts.up, &experts.down];
        let placed = all.map(|projection| Projection {
            bias: self.optional(&projection.bias),
            ..self.placed(&projection.weight)
        });
        let places = placed.each_ref().map(|projection| projection.place.clone());
        self.pieces.push(Piece::Experts(places, experts));
        placed
    }

    /// A place for a matrix.
    fn placed(&mut self, tensor: &MappedTensor) -> Projection {
        let matrix = tensor.matrix();
        let bytes = matrix.bytes().len() as u64;
        let buffer = match bytes < LARGE {
            true => 0,
            false => {
                self.layouts.push(Layout::new(self.device));
                self.layouts.len() - 1
            }
        };
        Projection {
            place: Place(buffer, self.layouts[buffer].bytes(bytes)),
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
    let head_dim = layer.attention.head_dim;
    if !head_dim.is_multiple_of(2) || head_dim > MOST_HEAD_DIM {
        return refused(format!(
            "heads of {head_dim} numbers (even, and at most {MOST_HEAD_DIM})"
        ));
    }
    let mut matrices = layer.matrices().chain(layer.expert_matrices());
    if let Some(matrix) = matrices.find(|matrix| !has_kernels(matrix.format)) {
        return refused(format!("weights of format {}", matrix.format));
    }
    match &layer.feed_forward.experts {
        None => Ok(()),
        Some(experts) => {
            let hidden = layer.attention.output.weight.rows;
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
