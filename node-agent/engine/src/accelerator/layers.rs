//! The forward pass through a window's last layers on an accelerator.
//!
//! Decides: the order of tensor operations; one copy of the activation each way. KV heads are not repeated: the query heads that share
//! a KV head are rows of one product. Keys and values are stored as F16 but computed with as F32 (scores of some models exceed F16).

use candle_core::quantized::QMatMul;
use candle_core::{D, Module, Result, Tensor};
use candle_nn::{ops, rotary_emb};

use super::{Accelerator, error};
use crate::config::ModelConfig;
use crate::error::EngineError;
use crate::kernels::{RopeAngles, RopePairing};
use crate::layer_window::{Layer, Sequence};

/// Layers whose weights are on the accelerator.
pub(crate) struct AcceleratedLayers {
    accelerator: Accelerator,
    config: ModelConfig,
    layers: Vec<DeviceLayer>,
}

struct DeviceLayer {
    attention_norm: Tensor,
    query: Projection,
    key: Projection,
    value: Projection,
    attention_output: QMatMul,
    feed_forward_norm: Tensor,
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
}

struct Projection {
    weight: QMatMul,
    bias: Option<Tensor>,
}

/// What all layers of a pass share: the data of the batch that is copied to the device.
struct Pass {
    /// Rows x pairs.
    cosines: Tensor,
    sines: Tensor,
    /// For each sequence, rows x positions: 0 where a row sees a position, else minus infinity. None where a single row sees all.
    masks: Vec<Option<Tensor>>,
}

impl AcceleratedLayers {
    /// Copies `layers` to the accelerator.
    ///
    /// # Errors
    /// [`EngineError::Accelerator`], mostly because memory is short.
    pub fn load(
        accelerator: &Accelerator,
        config: &ModelConfig,
        layers: &[Layer],
    ) -> std::result::Result<AcceleratedLayers, EngineError> {
        let layers = layers
            .iter()
            .map(|layer| DeviceLayer::load(accelerator, layer))
            .collect::<Result<_>>()
            .map_err(|source| error("copy the weights of its layers", source))?;
        Ok(AcceleratedLayers {
            accelerator: accelerator.clone(),
            config: config.clone(),
            layers,
        })
    }

    /// How many layers these are.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// As [`LayerWindow::forward`](crate::LayerWindow::forward), for these layers. Their caches are the last ones of each sequence.
    pub fn forward(
        &self,
        angles: &RopeAngles,
        activation: &mut [f32],
        sequences: &mut [Sequence<'_>],
    ) -> std::result::Result<(), EngineError> {
        if activation.is_empty() {
            return Ok(());
        }
        self.run(angles, activation, sequences)
            .map_err(|source| error("compute its layers", source))
    }

    fn run(
        &self,
        angles: &RopeAngles,
        activation: &mut [f32],
        sequences: &mut [Sequence<'_>],
    ) -> Result<()> {
        let device = &self.accelerator.device;
        let hidden = self.config.hidden;
        let mut x = Tensor::from_slice(activation, (activation.len() / hidden, hidden), device)?;
        let pass = self.pass(angles, sequences)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let attended = self.attention(layer, index, &x, &pass, sequences)?;
            x = (x + attended)?;
            let normed = self.norm(&x, &layer.feed_forward_norm)?;
            let gate = layer.gate.forward(&normed)?.silu()?;
            let inner = (gate * layer.up.forward(&normed)?)?;
            x = (x + layer.down.forward(&inner)?)?;
        }
        activation.copy_from_slice(&x.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }

    fn pass(&self, angles: &RopeAngles, sequences: &[Sequence<'_>]) -> Result<Pass> {
        let device = &self.accelerator.device;
        let pairs = angles.pairs();
        let table = Tensor::from_slice(angles.turns(), (angles.rows(), 2, pairs), device)?;
        let part = |index| table.narrow(1, index, 1)?.squeeze(1)?.contiguous();
        Ok(Pass {
            cosines: part(0)?,
            sines: part(1)?,
            masks: sequences
                .iter()
                .map(|sequence| self.mask(sequence))
                .collect::<Result<_>>()?,
        })
    }

    fn mask(&self, sequence: &Sequence<'_>) -> Result<Option<Tensor>> {
        if sequence.rows <= 1 {
            return Ok(None);
        }
        let positions = sequence.first_position + sequence.rows;
        let mask: Vec<f32> = sequence
            .positions()
            .flat_map(|row| {
                (0..positions).map(move |position| match position <= row {
                    true => 0.0,
                    false => f32::NEG_INFINITY,
                })
            })
            .collect();
        let shape = (sequence.rows, positions);
        Tensor::from_vec(mask, shape, &self.accelerator.device).map(Some)
    }

    fn attention(
        &self,
        layer: &DeviceLayer,
        index: usize,
        x: &Tensor,
        pass: &Pass,
        sequences: &mut [Sequence<'_>],
    ) -> Result<Tensor> {
        let config = &self.config;
        let normed = self.norm(x, &layer.attention_norm)?;
        let queries = self.split_heads(&layer.query.forward(&normed)?, config.heads)?;
        let keys = self.split_heads(&layer.key.forward(&normed)?, config.kv_heads)?;
        let values = self.split_heads(&layer.value.forward(&normed)?, config.kv_heads)?;
        let queries = (self.rotate(&queries, pass)? * f64::from(config.attention_shape().scale))?;
        let keys = self.rotate(&keys, pass)?;

        let mut attended = Vec::with_capacity(sequences.len());
        let mut first_row = 0;
        for (sequence, mask) in sequences.iter_mut().zip(&pass.masks) {
            if sequence.rows == 0 {
                continue;
            }
            let own = |rows: &Tensor| rows.narrow(1, first_row, sequence.rows);
            let (queries, keys, values) = (own(&queries)?, own(&keys)?, own(&values)?);
            first_row += sequence.rows;
            let layer = sequence.layers.len() - self.layers.len() + index;
            let kv = &mut sequence.layers[layer];
            kv.append_on_device(&keys, &values, sequence.context_length)?;
            let Some((keys, values)) = kv.read_on_device()? else {
                continue;
            };
            attended.push(self.attend(&queries, &keys, &values, mask.as_ref())?);
        }
        layer.attention_output.forward(&Tensor::cat(&attended, 0)?)
    }

    /// Attention of one sequence: `queries` heads x rows x head_dim, scaled; `keys` and `values` kv_heads x positions x head_dim.
    /// The result is rows x (heads * head_dim).
    fn attend(
        &self,
        queries: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (heads, rows, head_dim) = queries.dims3()?;
        let (kv_heads, positions, _) = keys.dims3()?;
        let group_rows = heads / kv_heads * rows;
        let queries = queries.reshape((kv_heads, group_rows, head_dim))?;
        let mut scores = queries
            .matmul(&keys.t()?)?
            .reshape((heads, rows, positions))?;
        if let Some(mask) = mask {
            scores = scores.broadcast_add(mask)?;
        }
        ops::softmax_last_dim(&scores)?
            .reshape((kv_heads, group_rows, positions))?
            .matmul(values)?
            .reshape((heads, rows, head_dim))?
            .transpose(0, 1)?
            .reshape((rows, heads * head_dim))
    }

    /// Rows x (heads * head_dim) to heads x rows x head_dim.
    fn split_heads(&self, rows: &Tensor, heads: usize) -> Result<Tensor> {
        rows.reshape((rows.dim(0)?, heads, self.config.head_dim))?
            .transpose(0, 1)?
            .contiguous()
    }

    fn rotate(&self, heads: &Tensor, pass: &Pass) -> Result<Tensor> {
        let rotated = 2 * pass.cosines.dim(D::Minus1)?;
        let head_dim = self.config.head_dim;
        let turn = match self.config.architecture.rope_pairing {
            RopePairing::Interleaved => rotary_emb::rope_i,
            RopePairing::Halves => rotary_emb::rope,
        };
        let part = heads.narrow(D::Minus1, 0, rotated)?.contiguous()?;
        let turned = turn(&part.unsqueeze(0)?, &pass.cosines, &pass.sines)?.squeeze(0)?;
        if rotated == head_dim {
            return Ok(turned);
        }
        let rest = heads.narrow(D::Minus1, rotated, head_dim - rotated)?;
        Tensor::cat(&[&turned, &rest], D::Minus1)
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, weight, self.config.norm_epsilon)
    }
}

impl DeviceLayer {
    fn load(accelerator: &Accelerator, layer: &Layer) -> Result<DeviceLayer> {
        let biases = layer.biases.as_ref();
        let projection = |weight: &crate::mapped_weights::MappedTensor, bias: Option<&Vec<f32>>| {
            Ok::<_, candle_core::Error>(Projection {
                weight: accelerator.matrix(weight.matrix())?,
                bias: bias.map(|bias| accelerator.vector(bias)).transpose()?,
            })
        };
        Ok(DeviceLayer {
            attention_norm: accelerator.vector(&layer.attention_norm)?,
            query: projection(&layer.query, biases.map(|biases| &biases.query))?,
            key: projection(&layer.key, biases.map(|biases| &biases.key))?,
            value: projection(&layer.value, biases.map(|biases| &biases.value))?,
            attention_output: accelerator.matrix(layer.attention_output.matrix())?,
            feed_forward_norm: accelerator.vector(&layer.feed_forward_norm)?,
            gate: accelerator.matrix(layer.gate.matrix())?,
            up: accelerator.matrix(layer.up.matrix())?,
            down: accelerator.matrix(layer.down.matrix())?,
        })
    }
}

impl Projection {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let projected = self.weight.forward(x)?;
        match &self.bias {
            Some(bias) => projected.broadcast_add(bias),
            None => Ok(projected),
        }
    }
}
