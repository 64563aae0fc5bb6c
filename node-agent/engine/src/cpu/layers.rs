//! The forward pass through layers on the processor.
//!
//! Decides: the order of the steps of a layer. Refuses: to mix rows. Each row's numbers come from its own sequence only, and are the same to
//! the bit however rows are batched and layers are split (the kernels promise this, and no step here works across rows).

use std::ops::Range;

use super::activate::activate;
use super::compute::{Buffer, Compute, Scratch};
use super::experts::ExpertStep;
use super::latent::LatentStep;
use crate::batch::Sequence;
use crate::error::EngineError;
use crate::executor::Executor;
use crate::kernels::{self, RopeAngles, SequenceAttention, ThreadPool};
use crate::kv_cache::LayerKv;
use crate::layer::{Direct, Latent, Layer, Mlp, Projection, Projections};
use crate::model::Model;
use crate::residency::Residency;
use crate::ropes::Ropes;

/// The first layers of a window.
pub(crate) struct CpuLayers {
    layers: Vec<Layer>,
    ropes: Ropes,
    norm_epsilon: f32,
    residual_scale: f32,
    hidden: usize,
    residency: Residency,
}

impl CpuLayers {
    /// The layers `layers` of `model`, with weights where `residency` has them.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when a layer is not in the bytes of a sparse file.
    pub fn load(
        model: &Model,
        layers: Range<usize>,
        residency: &Residency,
    ) -> Result<CpuLayers, EngineError> {
        let spec = model.spec();
        let mut ropes = Ropes::default();
        let layers = layers.map(|layer| Layer::load(model, layer, &mut ropes));
        Ok(CpuLayers {
            layers: layers.collect::<Result<_, _>>()?,
            ropes,
            norm_epsilon: spec.norm_epsilon,
            residual_scale: spec.residual_scale,
            hidden: spec.hidden,
            residency: residency.clone(),
        })
    }
}

impl Executor for CpuLayers {
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
        let positions = batch.iter().flat_map(Sequence::positions);
        let angles = self.ropes.angles(positions);
        let mut scratch = compute.scratch();
        for (place, layer) in self.layers.iter().enumerate() {
            let step = LayerStep {
                hidden: self.hidden,
                norm_epsilon: self.norm_epsilon,
                residual_scale: self.residual_scale,
                pool: compute.pool(),
                residency: &self.residency,
                angles: layer.rope.map(|rope| &angles[rope]),
                layer,
                place,
            };
            step.attention(&mut scratch, activation, batch)?;
            compute.part_done();
            step.feed_forward(&mut scratch, activation)?;
            compute.part_done();
        }
        Ok(())
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
    place: usize,
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
        let (rows, head_dim) = (activation.len() / self.hidden, shape.kv.head_dim);

        let norm = layer.attention_norm.as_deref();
        let normed = self.normed(activation, norm, &mut scratch.normed);
        let queries = scratch.queries.take(rows * shape.heads * head_dim);
        let keys = scratch.keys.take(rows * shape.kv.row_len());
        let values = scratch.values.take(rows * shape.kv.value_row_len());
        let attended = rows * shape.heads * shape.kv.value_dim();
        let attended = scratch.attended.take(attended);
        let rotate = match &layer.projections {
            Projections::Direct(direct) => {
                self.direct(
                    direct,
                    normed,
                    rows,
                    [&mut *queries, &mut *keys, &mut *values],
                )?;
                kernels::rotate
            }
            Projections::Latent(latent) => {
                let step = self.latent(latent);
                let made = [&mut *queries, &mut *keys];
                step.before(&mut scratch.latent, normed, rows, made, attended)?;
                kernels::rotate_last
            }
        };
        if let Some(angles) = angles {
            rotate(pool, angles, queries, shape.heads, head_dim);
            rotate(pool, angles, keys, shape.kv.kv_heads, head_dim);
        }
        if let Some(temperature) = &layer.spec.attention.temperature {
            let positions = sequences.iter().flat_map(Sequence::positions);
            let queries = queries.chunks_exact_mut(shape.heads * head_dim);
            for (row, position) in queries.zip(positions) {
                let factor = temperature.at(position);
                row.iter_mut().for_each(|number| *number *= factor);
            }
        }

        self.attend(sequences, queries, keys, values, attended);
        let results = match &layer.projections {
            Projections::Direct(_) => &*attended,
            Projections::Latent(latent) => {
                let step = self.latent(latent);
                step.behind(&mut scratch.latent, attended, rows, queries)?
            }
        };

        let projected = scratch.projected.take(activation.len());
        self.project(results, rows, [(&layer.output, &mut *projected)])?;
        self.add(activation, projected, layer.attention_post_norm.as_deref());
        Ok(())
    }

    /// Writes queries, keys and values of the rows of `x`, with their norms.
    fn direct(
        &self,
        direct: &Direct,
        x: &[f32],
        rows: usize,
        [queries, keys, values]: [&mut [f32]; 3],
    ) -> Result<(), EngineError> {
        let projections = [
            (&direct.query, &mut *queries),
            (&direct.key, &mut *keys),
            (&direct.value, values),
        ];
        self.project(x, rows, projections)?;
        if let Some(norms) = &direct.head_norms {
            kernels::rms_norm_in_place(self.pool, queries, &norms.query, self.norm_epsilon);
            kernels::rms_norm_in_place(self.pool, keys, &norms.key, self.norm_epsilon);
        }
        Ok(())
    }

    fn latent<'a>(&'a self, latent: &'a Latent) -> LatentStep<'a> {
        let attention = &self.layer.spec.attention;
        LatentStep {
            pool: self.pool,
            residency: self.residency,
            norm_epsilon: self.norm_epsilon,
            layer: latent,
            heads: attention.heads,
            head_dim: attention.head_dim,
        }
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
        let out_row = shape.heads * shape.kv.value_dim();
        let mut row = 0;
        for sequence in sequences.iter_mut() {
            let rows = row..row + sequence.rows;
            let of = |width: usize| rows.start * width..rows.end * width;
            let keys = &keys[of(shape.kv.row_len())];
            let values = &values[of(shape.kv.value_row_len())];
            sequence.layers[self.place].append(shape.kv, keys, values);
            row = rows.end;
        }
        let blocks: Vec<_> = sequences
            .iter()
            .map(|sequence| sequence.layers[self.place].blocks().blocks())
            .collect();
        let (mut queries, mut attended) = (queries, attended);
        let mut batch = Vec::with_capacity(sequences.len());
        for (sequence, blocks) in sequences.iter().zip(&blocks) {
            let (own, rest) = queries.split_at(sequence.rows * query_row);
            let (out, rest_out) = attended.split_at_mut(sequence.rows * out_row);
            (queries, attended) = (rest, rest_out);
            batch.push(SequenceAttention {
                queries: own,
                first_position: sequence.first_position,
                first_block: sequence.layers[self.place].blocks().first(),
                blocks,
                out,
            });
        }
        kernels::attention(self.pool, &shape, &mut batch);
    }

    /// activation += post-norm(experts(norm) + dense(norm)), as far as they are there
    fn feed_forward(
        &self,
        scratch: &mut Scratch,
        activation: &mut [f32],
    ) -> Result<(), EngineError> {
        let layer = self.layer;
        let rows = activation.len() / self.hidden;
        let norm = layer.feed_forward_norm.as_deref();
        let normed = self.normed(activation, norm, &mut scratch.normed);
        let projected = scratch.projected.take(activation.len());
        let mut inner = [&mut scratch.gate, &mut scratch.up];
        if let Some(mlp) = &layer.dense {
            self.mlp(mlp, normed, rows, &mut inner, projected)?;
        }
        if let Some(experts) = &layer.experts {
            let step = ExpertStep {
                pool: self.pool,
                residency: self.residency,
                spec: &layer.spec.feed_forward,
                experts,
            };
            match layer.dense {
                None => step.run(&mut scratch.experts, &mut inner, normed, rows, projected)?,
                Some(_) => {
                    let mut sum = std::mem::take(&mut scratch.experts.sum);
                    let out = sum.take(projected.len());
                    step.run(&mut scratch.experts, &mut inner, normed, rows, out)?;
                    kernels::add(self.pool, projected, out);
                    scratch.experts.sum = sum;
                }
            }
        }
        let post_norm = layer.feed_forward_post_norm.as_deref();
        self.add(activation, projected, post_norm);
        Ok(())
    }

    /// out = down(activation(gate(x)) * up(x)), times sigmoid(x * output_gate)
    fn mlp(
        &self,
        mlp: &Mlp,
        x: &[f32],
        rows: usize,
        [gate, up]: &mut [&mut Buffer; 2],
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let inner_len = rows * mlp.gate.width();
        let (gate, up) = (gate.take(inner_len), up.take(inner_len));
        self.project(x, rows, [(&mlp.gate, &mut *gate), (&mlp.up, &mut *up)])?;
        activate(self.pool, self.layer.spec.feed_forward.activation, gate, up);
        self.project(gate, rows, [(&mlp.down, &mut *out)])?;
        if let Some(gate) = &mlp.output_gate {
            let mut logits = vec![0.0; rows];
            self.residency
                .matmul(self.pool, x, rows, [(gate, &mut logits)])?;
            kernels::scale_rows(self.pool, out, self.hidden, &logits);
        }
        Ok(())
    }
}
