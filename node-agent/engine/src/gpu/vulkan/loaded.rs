//! The weights of a layer on the GPU, matrices as the file has them. Large ones have buffers of their own, since drivers limit what one may have.

use std::ops::Range;

use prima_gguf::GgmlType;
use prima_model::{ActivationFunction, LayerSpec};
use prima_vulkan::{
    self as vulkan, Buffer, Device, MOST_HEAD_DIM, Matrix, Slice, VulkanError, has_kernels,
};

use super::workspace::Layout;
use crate::layer::{self, Direct, Layer};
use crate::mapped_weights::MappedTensor;

pub(super) struct LoadedLayer {
    /// The first has all that is small.
    weights: Vec<Buffer>,
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

/// Which of a layer's buffers, and where in it.
#[derive(Clone)]
struct Place(usize, Range<u64>);

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

/// What is copied to the buffer, and where.
enum Piece<'a> {
    Bytes(Place, &'a [u8]),
    Numbers(Place, &'a [f32]),
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

impl LoadedLayer {
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

    /// Copies a layer to the GPU.
    ///
    /// # Errors
    /// [`VulkanError::NoKernel`] names what the GPU does not compute; [`VulkanError::OutOfMemory`].
    pub fn new(
        device: &Device,
        layer: &Layer,
        attention: &Direct,
    ) -> Result<LoadedLayer, VulkanError> {
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
        let experts = layer.experts.as_ref().map(|experts| Experts {
            router: placing.projection(&experts.router),
            selection_bias: placing.optional(&experts.selection_bias),
            gate: placing.projection(&experts.gate),
            up: placing.projection(&experts.up),
            down: placing.projection(&experts.down),
        });
        let feed_forward_post_norm = placing.optional(&layer.feed_forward_post_norm);
        let buffers = placing.layouts.iter();
        let weights = buffers.map(|layout| device.buffer(layout.end()));
        let weights: Vec<Buffer> = weights.collect::<Result<_, _>>()?;
        let to = |Place(buffer, bytes): Place| weights[buffer].slice(bytes);
        for piece in placing.pieces {
            match piece {
                Piece::Bytes(place, bytes) => device.upload(to(place), bytes)?,
                Piece::Numbers(place, numbers) => device.upload(to(place), numbers)?,
            }
        }
        Ok(LoadedLayer {
            weights,
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
        })
    }

    pub fn vector(&self, vector: &Vector) -> Slice<'_> {
        self.slice(&vector.place)
    }

    fn slice(&self, Place(buffer, bytes): &Place) -> Slice<'_> {
        self.weights[*buffer].slice(bytes.clone())
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
        let matrix = tensor.matrix();
        let bytes = matrix.bytes().len() as u64;
        let buffer = match bytes < LARGE {
            true => 0,
            false => {
                self.layouts.push(Layout::new(self.device));
                self.layouts.len() - 1
            }
        };
        let place = Place(buffer, self.layouts[buffer].bytes(bytes));
        self.pieces
            .push(Piece::Bytes(place.clone(), matrix.bytes()));
        Projection {
            place,
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
