//! The forward pass through a window's last layers on a GPU.
//!
//! Decides: the order of tensor operations; one copy of the activation each way.

use std::ops::Range;

use candle_core::{D, Result, Tensor};
use candle_nn::{ops, rotary_emb};
use prima_model::{ActivationFunction, Attention, ModelPart, RopePairing};

use super::attention::attend;
use super::kv::{CandleKv, Reach};
use super::open::CandleGpu;
use super::products::Weights;
use crate::batch::Sequence;
use crate::cpu::Compute;
use crate::error::EngineError;
use crate::executor::Executor;
use crate::gpu::backend::error;
use crate::gpu::facts::GpuApi;
use crate::gpu::parts;
use crate::kernels::RopeAngles;
use crate::kv_cache::LayerKv;
use crate::layer::{self, Direct, Layer, Mlp, Projections};
use crate::model::Model;
use crate::ropes::Ropes;

/// Layers whose weights are on the GPU: the last ones of a window.
pub(super) struct CandleLayers {
    gpu: CandleGpu,
    hidden: usize,
    norm_epsilon: f32,
    residual_scale: f32,
    /// The place of the first in the window.
    first_place: usize,
    layers: Vec<DeviceLayer>,
    ropes: Ropes,
}

struct DeviceLayer {
    attention: Attention,
    /// The place of its rotation among the angles of a pass.
    rope: Option<usize>,
    attention_norm: Option<Tensor>,
    query: Projection,
    key: Projection,
    value: Projection,
    output: Projection,
    head_norms: Option<HeadNorms>,
    attention_post_norm: Option<Tensor>,
    feed_forward_norm: Option<Tensor>,
    activation: ActivationFunction,
    gate: Projection,
    up: Projection,
    down: Projection,
    feed_forward_post_norm: Option<Tensor>,
}

struct Projection {
    weight: Weights,
    bias: Option<Tensor>,
}

struct HeadNorms {
    query: Tensor,
    key: Tensor,
}

/// What layers of a pass share: the data of the batch that is copied to the device.
struct Pass {
    /// Of each rotation.
    turns: Vec<Turns>,
    /// For each window that a layer has: for each sequence, rows x positions: 0 where a row sees a position, else minus infinity. None
    /// for a single row, which sees all that is there.
    masks: Vec<(Option<usize>, Vec<Option<Tensor>>)>,
}

/// Each rows x pairs.
struct Turns {
    cosines: Tensor,
    sines: Tensor,
}

impl CandleLayers {
    /// Copies the layers `layers` of `model` to the GPU. The first has the place `first_place` in its window.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when a layer is not in the bytes of a sparse file, [`EngineError::Gpu`], mostly because memory is short.
    pub fn load(
        gpu: &CandleGpu,
        model: &Model,
        layers: Range<usize>,
        first_place: usize,
    ) -> std::result::Result<CandleLayers, EngineError> {
        let spec = model.spec();
        let mut ropes = Ropes::default();
        let layers = layers.map(|index| {
            let layer = Layer::load(model, index, &mut ropes)?;
            // What candle computes is the same on all GPUs.
            parts::check(GpuApi::Cuda, index, &layer)?;
            let refused = |part| EngineError::NotOnGpu { layer: index, part };
            let Projections::Direct(direct) = &layer.projections else {
                return Err(refused(ModelPart::LatentAttention));
            };
            let mlp = layer.dense.as_ref();
            let mlp = mlp.ok_or_else(|| refused(ModelPart::Experts))?;
            DeviceLayer::load(gpu, &layer, direct, mlp)
                .map_err(|source| error("copy the weights of its layers", source))
        });
        Ok(CandleLayers {
            gpu: gpu.clone(),
            hidden: spec.hidden,
            norm_epsilon: spec.norm_epsilon,
            residual_scale: spec.residual_scale,
            first_place,
            layers: layers.collect::<std::result::Result<_, _>>()?,
            ropes,
        })
    }

    fn run(&self, activation: &mut [f32], sequences: &mut [Sequence<'_>]) -> Result<()> {
        let device = &self.gpu.device;
        let hidden = self.hidden;
        let mut x = Tensor::from_slice(activation, (activation.len() / hidden, hidden), device)?;
        let pass = self.pass(sequences)?;
        for (place, layer) in (self.first_place..).zip(&self.layers) {
            let attended = self.attention(layer, place, &x, &pass, sequences)?;
            x = (x + attended)?;
            let normed = self.normed(&x, layer.feed_forward_norm.as_ref())?;
            let gate = layer.gate.forward(&normed)?;
            let gate = match layer.activation {
                ActivationFunction::Silu => gate.silu()?,
                ActivationFunction::Gelu => gate.gelu()?,
                ActivationFunction::ClampedSwiglu => {
                    candle_core::bail!("candle has no {}", ModelPart::ClampedSwiglu)
                }
            };
            let inner = (gate * layer.up.forward(&normed)?)?;
            let part = layer.down.forward(&inner)?;
            x = (x + self.addend(part, layer.feed_forward_post_norm.as_ref())?)?;
        }
        activation.copy_from_slice(&x.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }

    fn pass(&self, sequences: &[Sequence<'_>]) -> Result<Pass> {
        let positions = sequences.iter().flat_map(Sequence::positions);
        let angles = self.ropes.angles(positions);
        let turns = angles.iter().map(|angles| self.turns(angles));
        let mut windows: Vec<Option<usize>> = Vec::new();
        for layer in &self.layers {
            if !windows.contains(&layer.attention.window) {
                windows.push(layer.attention.window);
            }
        }
        let masks = windows.into_iter().map(|window| {
            let masks = sequences.iter().map(|sequence| self.mask(sequence, window));
            Ok((window, masks.collect::<Result<_>>()?))
        });
        Ok(Pass {
            turns: turns.collect::<Result<_>>()?,
            masks: masks.collect::<Result<_>>()?,
        })
    }

    fn turns(&self, angles: &RopeAngles) -> Result<Turns> {
        let shape = (angles.rows(), 2, angles.pairs());
        let table = Tensor::from_slice(angles.turns(), shape, &self.gpu.device)?;
        let part = |index| table.narrow(1, index, 1)?.squeeze(1)?.contiguous();
        Ok(Turns {
            cosines: part(0)?,
            sines: part(1)?,
        })
    }

    /// Of the positions that the first row or a later one sees.
    fn mask(&self, sequence: &Sequence<'_>, window: Option<usize>) -> Result<Option<Tensor>> {
        if sequence.rows <= 1 {
            return Ok(None);
        }
        let window = window.unwrap_or(usize::MAX);
        let seen_from = |row: usize| (row + 1).saturating_sub(window);
        let rows = sequence.positions();
        let positions = seen_from(rows.start)..rows.end;
        let mask: Vec<f32> = rows
            .flat_map(|row| {
                let seen = seen_from(row)..row + 1;
                let number = move |position: usize| match seen.contains(&position) {
                    true => 0.0,
                    false => f32::NEG_INFINITY,
                };
                positions.clone().map(number)
            })
            .collect();
        let shape = (sequence.rows, positions.len());
        Tensor::from_vec(mask, shape, &self.gpu.device).map(Some)
    }

    fn attention(
        &self,
        layer: &DeviceLayer,
        place: usize,
        x: &Tensor,
        pass: &Pass,
        sequences: &mut [Sequence<'_>],
    ) -> Result<Tensor> {
        let attention = &layer.attention;
        let normed = self.normed(x, layer.attention_norm.as_ref())?;
        let norms = layer.head_norms.as_ref();
        let query_norm = norms.map(|norms| &norms.query);
        let key_norm = norms.map(|norms| &norms.key);
        let queries = layer.query.forward(&normed)?;
        let mut queries = self.split_heads(&queries, attention.heads, query_norm)?;
        let keys = layer.key.forward(&normed)?;
        let mut keys = self.split_heads(&keys, attention.kv_heads, key_norm)?;
        let values = layer.value.forward(&normed)?;
        let values = self.split_heads(&values, attention.kv_heads, None)?;
        if let (Some(place), Some(rope)) = (layer.rope, &attention.rope) {
            let turns = &pass.turns[place];
            queries = rotate(&queries, turns, rope.pairing)?;
            keys = rotate(&keys, turns, rope.pairing)?;
        }
        if let Some(temperature) = &attention.temperature {
            let positions = sequences.iter().flat_map(Sequence::positions);
            let factors: Vec<f32> = positions.map(|position| temperature.at(position)).collect();
            let rows = factors.len();
            let factors = Tensor::from_vec(factors, (1, rows, 1), &self.gpu.device)?;
            queries = queries.broadcast_mul(&factors)?;
        }
        let queries = (queries * f64::from(attention.scale))?;
        let mut masks = pass.masks.iter();
        let masks = masks.find(|(window, _)| *window == attention.window);
        let masks = masks.map_or(&[][..], |(_, masks)| masks);

        let mut attended = Vec::with_capacity(sequences.len());
        let mut first_row = 0;
        for (sequence, mask) in sequences.iter_mut().zip(masks) {
            if sequence.rows == 0 {
                continue;
            }
            let own = |rows: &Tensor| rows.narrow(1, first_row, sequence.rows);
            let (queries, keys, values) = (own(&queries)?, own(&keys)?, own(&values)?);
            first_row += sequence.rows;
            let kv = &mut sequence.layers[place];
            let reach = Reach {
                seen_from: kv.seen_from(kv.len()),
                kept_from: kv.kept_from(kv.len()),
                context_length: sequence.context_length,
            };
            let (len, memory) = (kv.len(), kv.memory().clone());
            let own = kv.on_device(CandleKv::default);
            let (keys, values) = own.append(len, &reach, (&keys, &values), &memory)?;
            kv.grow(sequence.rows);
            attended.push(attend(
                &queries,
                &keys,
                &values,
                mask.as_ref(),
                attention.softcap,
            )?);
        }
        let part = layer.output.forward(&Tensor::cat(&attended, 0)?)?;
        self.addend(part, layer.attention_post_norm.as_ref())
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, weight, self.norm_epsilon)
    }

    /// Rows x (heads * head_dim) to heads x rows x head_dim, through a norm of each head or of all together.
    fn split_heads(&self, rows: &Tensor, heads: usize, norm: Option<&Tensor>) -> Result<Tensor> {
        let (count, width) = rows.dims2()?;
        let of_all = norm.filter(|norm| norm.elem_count() == width);
        let of_each = norm.filter(|_| of_all.is_none());
        let rows = self.normed(rows, of_all)?;
        let heads = rows
            .reshape((count, heads, width / heads))?
            .transpose(0, 1)?
            .contiguous()?;
        self.normed(&heads, of_each)
    }

    fn normed(&self, x: &Tensor, weight: Option<&Tensor>) -> Result<Tensor> {
        match weight {
            Some(weight) => self.norm(x, weight),
            None => Ok(x.clone()),
        }
    }

    fn addend(&self, part: Tensor, weight: Option<&Tensor>) -> Result<Tensor> {
        let part = self.normed(&part, weight)?;
        match self.residual_scale {
            1.0 => Ok(part),
            scale => part * f64::from(scale),
        }
    }
}

impl Executor for CandleLayers {
    fn places(&self) -> Range<usize> {
        self.first_place..self.first_place + self.layers.len()
    }

    fn can_continue(&self, kv: &LayerKv) -> bool {
        kv.is_empty() || kv.device::<CandleKv>().is_some()
    }

    fn forward(
        &self,
        compute: &Compute,
        activation: &mut [f32],
        batch: &mut [Sequence<'_>],
    ) -> std::result::Result<(), EngineError> {
        if activation.is_empty() {
            return Ok(());
        }
        let done = self.run(activation, batch);
        compute.part_done();
        done.map_err(|source| error("compute its layers", source))
    }
}

fn rotate(heads: &Tensor, turns: &Turns, pairing: RopePairing) -> Result<Tensor> {
    let rotated = 2 * turns.cosines.dim(D::Minus1)?;
    let head_dim = heads.dim(D::Minus1)?;
    let turn = match pairing {
        RopePairing::Interleaved => rotary_emb::rope_i,
        RopePairing::Halves => rotary_emb::rope,
    };
    let part = heads.narrow(D::Minus1, 0, rotated)?.contiguous()?;
    let turned = turn(&part.unsqueeze(0)?, &turns.cosines, &turns.sines)?.squeeze(0)?;
    if rotated == head_dim {
        return Ok(turned);
    }
    let rest = heads.narrow(D::Minus1, rotated, head_dim - rotated)?;
    Tensor::cat(&[&turned, &rest], D::Minus1)
}

impl DeviceLayer {
    fn load(gpu: &CandleGpu, layer: &Layer, attention: &Direct, mlp: &Mlp) -> Result<DeviceLayer> {
        let projection = |projection: &layer::Projection| {
            let bias = projection.bias.as_ref();
            Ok::<_, candle_core::Error>(Projection {
                weight: gpu.matrix(projection.weight.matrix())?,
                bias: bias.map(|bias| gpu.vector(bias)).transpose()?,
            })
        };
        let norm = |norm: &Option<Vec<f32>>| {
            let norm = norm.as_ref();
            norm.map(|norm| gpu.vector(norm)).transpose()
        };
        Ok(DeviceLayer {
            rope: layer.rope,
            attention: layer.spec.attention.clone(),
            attention_norm: norm(&layer.attention_norm)?,
            query: projection(&attention.query)?,
            key: projection(&attention.key)?,
            value: projection(&attention.value)?,
            output: projection(&layer.output)?,
            head_norms: match &attention.head_norms {
                Some(norms) => Some(HeadNorms {
                    query: gpu.vector(&norms.query)?,
                    key: gpu.vector(&norms.key)?,
                }),
                None => None,
            },
            attention_post_norm: norm(&layer.attention_post_norm)?,
            feed_forward_norm: norm(&layer.feed_forward_norm)?,
            activation: layer.spec.feed_forward.activation,
            gate: projection(&mlp.gate)?,
            up: projection(&mlp.up)?,
            down: projection(&mlp.down)?,
            feed_forward_post_norm: norm(&layer.feed_forward_post_norm)?,
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
