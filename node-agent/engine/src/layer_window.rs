//! The forward pass through a range of layers: on the CPU here, or handed over to the accelerator that runs them.
//!
//! Decides: the order of the steps of a layer, and what a batch must look like. Refuses: to mix rows. Each row's numbers come from its
//! own sequence only, and are the same to the bit however rows are batched and layers are split (the kernels promise this, and no step
//! here works across rows).

use std::ops::Range;

use crate::accelerator::AcceleratedLayers;
use crate::batch::{BatchEntry, Sequence};
use crate::compute::{Buffer, Compute, Scratch};
use crate::device::LayerDevices;
use crate::error::EngineError;
use prima_model::Activation;

use crate::kernels::{self, KvShape, RopeAngles, SequenceAttention, ThreadPool};
use crate::kv_cache::LayerKv;
use crate::layer::{Layer, Projection};
use crate::model::Model;
use crate::residency::Residency;
use crate::ropes::Ropes;

/// A contiguous range of a model's layers, ready to run.
pub struct LayerWindow {
    layers: Range<usize>,
    /// Width of the activation.
    hidden: usize,
    norm_epsilon: f32,
    residual_scale: f32,
    ropes: Ropes,
    cpu_layers: Vec<Layer>,
    /// The layers that follow.
    accelerated: Option<AcceleratedLayers>,
    kv_shape: KvShape,
    residency: Residency,
}

impl LayerWindow {
    /// The layers `layers` of the model, on the devices that `devices` says, with weights where `residency` has them.
    ///
    /// # Errors
    /// [`EngineError::Window`] for a range that is empty or not of this model, [`EngineError::TensorValue`] when a layer is not in the
    /// bytes of a sparse file, [`EngineError::Accelerator`] when the accelerator does not take its layers.
    pub fn open(
        model: &Model,
        layers: Range<usize>,
        devices: &LayerDevices,
        residency: &Residency,
    ) -> Result<LayerWindow, EngineError> {
        let spec = model.spec();
        if layers.is_empty() || layers.end > spec.layers.len() {
            return Err(EngineError::Window {
                window: layers,
                layers: spec.layers.len(),
            });
        }
        let mut ropes = Ropes::default();
        let mut cpu_layers = layers
            .clone()
            .map(|layer| Layer::load(model, layer, &mut ropes))
            .collect::<Result<Vec<_>, _>>()?;
        let kv_shape = cpu_layers[0].attention_shape().kv;
        let accelerated = match devices.gpu_layers(cpu_layers.len()) {
            None => None,
            Some((gpu_layers, accelerator)) => {
                let last = cpu_layers.split_off(cpu_layers.len() - gpu_layers);
                Some(AcceleratedLayers::load(accelerator, spec, &last)?)
            }
        };
        Ok(LayerWindow {
            layers,
            hidden: spec.hidden,
            norm_epsilon: spec.norm_epsilon,
            residual_scale: spec.residual_scale,
            ropes,
            cpu_layers,
            accelerated,
            kv_shape,
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
        let positions = sequences.iter().flat_map(Sequence::positions);
        let angles = self.ropes.angles(positions);
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
        angles: &[RopeAngles],
        activation: &mut [f32],
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        let mut scratch = compute.scratch();
        for (index, layer) in self.cpu_layers.iter().enumerate() {
            let step = LayerStep {
                hidden: self.hidden,
                norm_epsilon: self.norm_epsilon,
                residual_scale: self.residual_scale,
                pool: compute.pool(),
                residency: &self.residency,
                angles: layer.rope.map(|place| &angles[place]),
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
        let expected = rows.saturating_mul(self.hidden);
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
        let same_shape = kv.shape() == self.kv_shape;
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

/// One layer's part of a pass.
struct LayerStep<'a> {
    hidden: usize,
    norm_epsilon: f32,
    residual_scale: f32,
    pool: &'a ThreadPool,
    residency: &'a Residency,
    angles: Option<&'a RopeAngles>,
    layer: &'a Layer,
    /// Of the layer in the window.
    index: usize,
}

impl LayerStep<'_> {
    /// activation += post-norm(output(attention(rope(queries, keys of the norm), values of the norm)))
    fn attention(
        &self,
        scratch: &mut Scratch,
        activation: &mut [f32],
        sequences: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        let LayerStep {
            pool,
            angles,
            layer,
            ..
        } = *self;
        let shape = layer.attention_shape();
        let rows = activation.len() / self.hidden;
        let kv_row = shape.kv.row_len();

        let norm = layer.attention_norm.as_deref();
        let normed = self.normed(activation, norm, &mut scratch.normed);
        let queries = scratch.queries.take(rows * layer.query.width());
        let keys = scratch.keys.take(rows * kv_row);
        let values = scratch.values.take(rows * kv_row);
        let projections = [
            (&layer.query, &mut *queries),
            (&layer.key, &mut *keys),
            (&layer.value, &mut *values),
        ];
        self.project(normed, rows, projections)?;
        if let Some(norms) = &layer.head_norms {
            kernels::rms_norm_in_place(pool, queries, &norms.query, self.norm_epsilon);
            kernels::rms_norm_in_place(pool, keys, &norms.key, self.norm_epsilon);
        }
        if let Some(angles) = angles {
            let head_dim = shape.kv.head_dim;
            kernels::rotate(pool, angles, queries, shape.heads, head_dim);
            kernels::rotate(pool, angles, keys, shape.kv.kv_heads, head_dim);
        }
        if let Some(temperature) = &layer.spec.attention.temperature {
            let positions = sequences.iter().flat_map(Sequence::positions);
            let queries = queries.chunks_exact_mut(layer.query.width());
            for (row, position) in queries.zip(positions) {
                let factor = temperature.at(position);
                row.iter_mut().for_each(|number| *number *= factor);
            }
        }

        let attended = scratch.attended.take(queries.len());
        self.attend(sequences, queries, keys, values, attended);

        let projected = scratch.projected.take(activation.len());
        self.project(attended, rows, [(&layer.output, &mut *projected)])?;
        self.add(activation, projected, layer.attention_post_norm.as_deref());
        Ok(())
    }

    /// The norm of the activation in the buffer, or the activation itself where there is no norm.
    fn normed<'b>(
        &self,
        activation: &'b [f32],
        weights: Option<&[f32]>,
        buffer: &'b mut Buffer,
    ) -> &'b [f32] {
        let Some(weights) = weights else {
            return activation;
        };
        let normed = buffer.take(activation.len());
        kernels::rms_norm(self.pool, activation, weights, self.norm_epsilon, normed);
        normed
    }

    fn add(&self, activation: &mut [f32], part: &mut [f32], post_norm: Option<&[f32]>) {
        if let Some(weights) = post_norm {
            kernels::rms_norm_in_place(self.pool, part, weights, self.norm_epsilon);
        }
        if self.residual_scale != 1.0 {
            kernels::scale(self.pool, part, self.residual_scale);
        }
        kernels::add(self.pool, activation, part);
    }

    /// Writes each projection of the rows of `x` beside it.
    fn project<const N: usize>(
        &self,
        x: &[f32],
        rows: usize,
        mut projections: [(&Projection, &mut [f32]); N],
    ) -> Result<(), EngineError> {
        let outputs = projections
            .each_mut()
            .map(|(projection, out)| (&projection.weight, &mut **out));
        self.residency.matmul(self.pool, x, rows, outputs)?;
        for (projection, out) in projections {
            if let Some(bias) = &projection.bias {
                kernels::add_bias(self.pool, out, bias);
            }
        }
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
        let shape = self.layer.attention_shape();
        let query_row = shape.heads * shape.kv.head_dim;
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
                first_block: sequence.layers[self.index].first_block(),
                keys,
                values,
                out,
            });
        }
        kernels::attention(self.pool, &shape, &mut batch);
    }

    /// activation += post-norm(down(silu or gelu(gate(norm)) * up(norm)))
    fn feed_forward(
        &self,
        scratch: &mut Scratch,
        activation: &mut [f32],
    ) -> Result<(), EngineError> {
        let LayerStep { pool, layer, .. } = *self;
        let rows = activation.len() / self.hidden;
        let norm = layer.feed_forward_norm.as_deref();
        let normed = self.normed(activation, norm, &mut scratch.normed);
        let spec = &layer.spec.feed_forward;
        let inner_len = rows * spec.width;
        let gate = scratch.gate.take(inner_len);
        let up = scratch.up.take(inner_len);
        let inner = [(&layer.gate, &mut *gate), (&layer.up, &mut *up)];
        self.project(normed, rows, inner)?;
        match spec.activation {
            Activation::Silu => kernels::swiglu(pool, gate, up),
            Activation::Gelu => kernels::geglu(pool, gate, up),
        }
        let projected = scratch.projected.take(activation.len());
        self.project(gate, rows, [(&layer.down, &mut *projected)])?;
        let post_norm = layer.feed_forward_post_norm.as_deref();
        self.add(activation, projected, post_norm);
        Ok(())
    }
}
