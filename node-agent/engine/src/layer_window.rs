//! The forward pass through a range of layers: on the CPU here, or handed over to the accelerator that runs them.
//!
//! Decides: the order of the steps of a layer, and what a batch must look like. Refuses: to mix rows. Each row's numbers come from its
//! own sequence only, and are the same to the bit however rows are batched and layers are split (the kernels promise this, and no step
//! here works across rows).

use std::ops::Range;

use crate::accelerator::AcceleratedLayers;
use crate::architecture as tensors;
use crate::compute::{Compute, Scratch};
use crate::config::ModelConfig;
use crate::device::LayerDevices;
use crate::error::EngineError;
use crate::kernels::{self, Rope, RopeAngles, SequenceAttention, ThreadPool};
use crate::kv_cache::{KvCache, LayerKv};
use crate::mapped_weights::MappedTensor;
use crate::model::Model;
use crate::residency::Residency;

/// A contiguous range of a model's layers, ready to run.
pub struct LayerWindow {
    layers: Range<usize>,
    config: ModelConfig,
    rope: Rope,
    cpu_layers: Vec<Layer>,
    /// The layers that follow.
    accelerated: Option<AcceleratedLayers>,
    residency: Residency,
}

/// The rows of one sequence in a batch.
pub struct BatchEntry<'a> {
    /// The sequence's cache; it must cover the window's layers.
    pub kv: &'a mut KvCache,
    /// Position of the first row: what the cache already holds in the window's layers.
    pub first_position: usize,
    /// Consecutive positions.
    pub rows: usize,
}

impl LayerWindow {
    pub(crate) fn new(
        model: &Model,
        layers: Range<usize>,
        devices: &LayerDevices,
        residency: &Residency,
    ) -> Result<LayerWindow, EngineError> {
        let mut cpu_layers = layers
            .clone()
            .map(|layer| Layer::load(model, layer))
            .collect::<Result<Vec<_>, _>>()?;
        let accelerated = match devices.gpu_layers(cpu_layers.len()) {
            None => None,
            Some((gpu_layers, accelerator)) => {
                let last = cpu_layers.split_off(cpu_layers.len() - gpu_layers);
                Some(AcceleratedLayers::load(accelerator, model.config(), &last)?)
            }
        };
        Ok(LayerWindow {
            layers,
            config: model.config().clone(),
            rope: model.config().rope(model.rope_factors()?.as_deref()),
            cpu_layers,
            accelerated,
            residency: residency.clone(),
        })
    }

    /// The layers of this window.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Runs the rows of `batch` through the window's layers and adds their keys and values to the caches. `activation` is rows x
    /// hidden, row-major, entry after entry; it is updated in place.
    ///
    /// # Errors
    /// An activation of another size than the batch; an entry whose cache does not cover the window, does not hold exactly
    /// `first_position` positions, or would exceed its context length; weights that cannot be read any more; a failure of the
    /// accelerator. The caches are then as they were before.
    pub fn forward(
        &self,
        compute: &Compute,
        activation: &mut [f32],
        batch: &mut [BatchEntry<'_>],
    ) -> Result<(), EngineError> {
        let mut sequences = self.check(activation, batch)?;
        let angles = self
            .rope
            .angles(sequences.iter().flat_map(Sequence::positions));
        let mut result = self.forward_on_cpu(compute, &angles, activation, &mut sequences);
        if let (Ok(()), Some(accelerated)) = (&result, &self.accelerated) {
            result = accelerated.forward(&angles, activation, &mut sequences);
        }
        if result.is_err() {
            sequences.iter_mut().for_each(Sequence::undo);
        }
        result
    }

    fn forward_on_cpu(
        &self,
        compute: &Compute,
        angles: &RopeAngles,
        activation: &mut [f32],
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        let mut scratch = compute.scratch();
        for (index, layer) in self.cpu_layers.iter().enumerate() {
            let step = LayerStep {
                config: &self.config,
                pool: compute.pool(),
                residency: &self.residency,
                angles,
                layer,
                index,
            };
            step.attention(&mut scratch, activation, sequences)?;
            step.feed_forward(&mut scratch, activation)?;
        }
        Ok(())
    }

    /// How many of the window's layers run on an accelerator.
    pub fn gpu_layers(&self) -> usize {
        self.accelerated.as_ref().map_or(0, AcceleratedLayers::len)
    }

    fn check<'a>(
        &self,
        activation: &[f32],
        batch: &'a mut [BatchEntry<'_>],
    ) -> Result<Vec<Sequence<'a>>, EngineError> {
        let rows = batch
            .iter()
            .try_fold(0_usize, |sum, entry| sum.checked_add(entry.rows))
            .unwrap_or(usize::MAX);
        let expected = rows.saturating_mul(self.config.hidden);
        if activation.len() != expected {
            return Err(EngineError::Length {
                what: "the activation (rows x hidden)",
                expected,
                found: activation.len(),
            });
        }
        batch
            .iter_mut()
            .enumerate()
            .map(|(index, entry)| self.check_entry(index, entry))
            .collect()
    }

    fn check_entry<'a>(
        &self,
        index: usize,
        entry: &'a mut BatchEntry<'_>,
    ) -> Result<Sequence<'a>, EngineError> {
        let BatchEntry {
            kv,
            first_position,
            rows,
        } = entry;
        let context_length = kv.context_length();
        let same_shape = kv.shape() == self.config.attention_shape().kv;
        let layers = kv
            .window(self.layers.clone())
            .filter(|layers| same_shape && self.fit_devices(layers))
            .ok_or_else(|| EngineError::KvLayers {
                entry: index,
                window: self.layers.clone(),
            })?;
        let sequence = Sequence {
            layers,
            context_length,
            first_position: *first_position,
            rows: *rows,
        };
        sequence.check(index)?;
        Ok(sequence)
    }

    /// Whether the cache of each layer lies on the device that runs the layer.
    fn fit_devices(&self, layers: &[LayerKv]) -> bool {
        let on_device = |index| index >= self.cpu_layers.len();
        let mut layers = layers.iter().enumerate();
        layers.all(|(index, layer)| layer.fits(on_device(index)))
    }
}

/// A checked batch entry.
pub(crate) struct Sequence<'a> {
    /// The caches of the window's layers.
    pub layers: &'a mut [LayerKv],
    pub context_length: usize,
    pub first_position: usize,
    pub rows: usize,
}

impl Sequence<'_> {
    fn check(&self, entry: usize) -> Result<(), EngineError> {
        let first_position = self.first_position;
        let end = first_position.saturating_add(self.rows);
        if end > self.context_length {
            return Err(EngineError::ContextFull {
                entry,
                first_position,
                end,
                context_length: self.context_length,
            });
        }
        match self.layers.iter().find(|kv| kv.len() != first_position) {
            None => Ok(()),
            Some(kv) => Err(EngineError::Position {
                entry,
                layer: kv.layer(),
                first_position,
                held: kv.len(),
            }),
        }
    }

    /// Takes back what a failed pass has stored.
    fn undo(&mut self) {
        for layer in &mut *self.layers {
            layer.truncate(self.first_position);
        }
    }

    pub fn positions(&self) -> Range<usize> {
        self.first_position..self.first_position + self.rows
    }
}

/// The weights of one layer: matrices in the map, the small vectors as numbers.
pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    pub query: MappedTensor,
    pub key: MappedTensor,
    pub value: MappedTensor,
    pub biases: Option<AttentionBiases>,
    pub attention_output: MappedTensor,
    pub feed_forward_norm: Vec<f32>,
    pub gate: MappedTensor,
    pub up: MappedTensor,
    pub down: MappedTensor,
}

pub(crate) struct AttentionBiases {
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
}

impl Layer {
    fn load(model: &Model, layer: usize) -> Result<Layer, EngineError> {
        let tensor = |spec| model.tensor(spec, Some(layer));
        let vector = |spec| model.vector(spec, Some(layer));
        let norm = |spec| model.norm(spec, Some(layer));
        let biases = match model.config().architecture.attention_biases {
            true => Some(AttentionBiases {
                query: vector(&tensors::QUERY_BIAS)?,
                key: vector(&tensors::KEY_BIAS)?,
                value: vector(&tensors::VALUE_BIAS)?,
            }),
            false => None,
        };
        Ok(Layer {
            attention_norm: norm(&tensors::ATTENTION_NORM)?,
            query: tensor(&tensors::QUERY)?,
            key: tensor(&tensors::KEY)?,
            value: tensor(&tensors::VALUE)?,
            biases,
            attention_output: tensor(&tensors::ATTENTION_OUTPUT)?,
            feed_forward_norm: norm(&tensors::FEED_FORWARD_NORM)?,
            gate: tensor(&tensors::GATE)?,
            up: tensor(&tensors::UP)?,
            down: tensor(&tensors::DOWN)?,
        })
    }
}

/// One layer's part of a pass.
struct LayerStep<'a> {
    config: &'a ModelConfig,
    pool: &'a ThreadPool,
    residency: &'a Residency,
    angles: &'a RopeAngles,
    layer: &'a Layer,
    /// Of the layer in the window.
    index: usize,
}

impl LayerStep<'_> {
    /// activation += output(attention(rope(queries, keys of the norm), values of the norm))
    fn attention(
        &self,
        scratch: &mut Scratch,
        activation: &mut [f32],
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        let LayerStep {
            config,
            pool,
            residency,
            angles,
            layer,
            ..
        } = *self;
        let shape = config.attention_shape();
        let rows = activation.len() / config.hidden;
        let query_row = config.heads * config.head_dim;
        let kv_row = shape.kv.row_len();

        let normed = scratch.normed.take(activation.len());
        kernels::rms_norm(
            pool,
            activation,
            &layer.attention_norm,
            config.norm_epsilon,
            normed,
        );
        let queries = scratch.queries.take(rows * query_row);
        let keys = scratch.keys.take(rows * kv_row);
        let values = scratch.values.take(rows * kv_row);
        residency.matmul(
            pool,
            normed,
            rows,
            [
                (&layer.query, &mut *queries),
                (&layer.key, &mut *keys),
                (&layer.value, &mut *values),
            ],
        )?;
        if let Some(biases) = &layer.biases {
            kernels::add_bias(pool, queries, &biases.query);
            kernels::add_bias(pool, keys, &biases.key);
            kernels::add_bias(pool, values, &biases.value);
        }
        kernels::rotate(pool, angles, queries, config.heads, config.head_dim);
        kernels::rotate(pool, angles, keys, config.kv_heads, config.head_dim);

        let attended = scratch.attended.take(rows * query_row);
        self.attend(sequences, queries, keys, values, attended);

        let projected = scratch.projected.take(activation.len());
        let output = (&layer.attention_output, &mut *projected);
        residency.matmul(pool, attended, rows, [output])?;
        kernels::add(pool, activation, projected);
        Ok(())
    }

    /// Stores the new keys and values, then attends to them and to all before.
    fn attend(
        &self,
        sequences: &mut [Sequence<'_>],
        queries: &[f32],
        keys: &[f32],
        values: &[f32],
        attended: &mut [f32],
    ) {
        let shape = self.config.attention_shape();
        let query_row = self.config.heads * self.config.head_dim;
        let kv_row = shape.kv.row_len();
        let mut row = 0;
        for sequence in sequences.iter_mut() {
            let rows = row * kv_row..(row + sequence.rows) * kv_row;
            sequence.layers[self.index].append(shape.kv, &keys[rows.clone()], &values[rows]);
            row += sequence.rows;
        }
        let blocks: Vec<_> = sequences
            .iter()
            .map(|sequence| {
                let kv = &sequence.layers[self.index];
                (kv.keys(), kv.values())
            })
            .collect();
        let (mut queries, mut attended) = (queries, attended);
        let mut batch = Vec::with_capacity(sequences.len());
        for (sequence, (keys, values)) in sequences.iter().zip(&blocks) {
            let (own, rest) = queries.split_at(sequence.rows * query_row);
            let (out, rest_out) = attended.split_at_mut(own.len());
            (queries, attended) = (rest, rest_out);
            batch.push(SequenceAttention {
                queries: own,
                first_position: sequence.first_position,
                keys,
                values,
                out,
            });
        }
        kernels::attention(self.pool, &shape, &mut batch);
    }

    /// activation += down(silu(gate(norm)) * up(norm))
    fn feed_forward(
        &self,
        scratch: &mut Scratch,
        activation: &mut [f32],
    ) -> Result<(), EngineError> {
        let LayerStep {
            config,
            pool,
            residency,
            layer,
            ..
        } = *self;
        let rows = activation.len() / config.hidden;
        let normed = scratch.normed.take(activation.len());
        kernels::rms_norm(
            pool,
            activation,
            &layer.feed_forward_norm,
            config.norm_epsilon,
            normed,
        );
        let gate = scratch.gate.take(rows * config.feed_forward);
        let up = scratch.up.take(rows * config.feed_forward);
        let inner = [(&layer.gate, &mut *gate), (&layer.up, &mut *up)];
        residency.matmul(pool, normed, rows, inner)?;
        kernels::swiglu(pool, gate, up);
        let projected = scratch.projected.take(activation.len());
        let output = (&layer.down, &mut *projected);
        residency.matmul(pool, gate, rows, [output])?;
        kernels::add(pool, activation, projected);
        Ok(())
    }
}
