//! The weights of one layer, as executors take them: matrices in the map, the small vectors as numbers.

use prima_model::{Attention, LayerSpec, TensorRows};

use crate::error::EngineError;
use crate::kernels::{AttentionShape, KvShape};
use crate::mapped_weights::MappedTensor;
use crate::model::Model;
use crate::ropes::Ropes;

pub(crate) struct Layer {
    pub spec: LayerSpec,
    /// The place of its rotation in the window's [`Ropes`].
    pub rope: Option<usize>,
    pub attention_norm: Option<Vec<f32>>,
    pub projections: Projections,
    pub output: Projection,
    /// A score for each query head.
    pub sinks: Option<Vec<f32>>,
    pub attention_post_norm: Option<Vec<f32>>,
    pub feed_forward_norm: Option<Vec<f32>>,
    /// What every token goes through.
    pub dense: Option<Mlp>,
    pub experts: Option<Experts>,
    pub feed_forward_post_norm: Option<Vec<f32>>,
}

/// What makes queries, keys and values.
pub(crate) enum Projections {
    Direct(Direct),
    Latent(Latent),
}

pub(crate) struct Direct {
    pub query: Projection,
    pub key: Projection,
    pub value: Projection,
    pub head_norms: Option<HeadNorms>,
}

/// The parts of [`prima_model::Latent`].
pub(crate) struct Latent {
    pub rank: usize,
    pub unrotated: usize,
    pub value_dim: usize,
    pub query_latent: Option<QueryLatent>,
    pub query: MappedTensor,
    pub row: MappedTensor,
    pub norm: Vec<f32>,
    pub into_latents: MappedTensor,
    pub out_of_latents: MappedTensor,
}

pub(crate) struct QueryLatent {
    pub down: MappedTensor,
    pub norm: Vec<f32>,
}

pub(crate) struct Mlp {
    pub gate: Projection,
    pub up: Projection,
    pub down: Projection,
    /// One row.
    pub output_gate: Option<MappedTensor>,
}

/// Gate, up and down have the rows of all experts, one after the other; and so have their biases.
pub(crate) struct Experts {
    pub router: Projection,
    pub selection_bias: Option<Vec<f32>>,
    pub gate: Projection,
    pub up: Projection,
    pub down: Projection,
}

pub(crate) struct Projection {
    pub weight: MappedTensor,
    pub bias: Option<Vec<f32>>,
}

impl Projection {
    /// Numbers of a row of its output.
    pub fn width(&self) -> usize {
        self.weight.matrix().rows()
    }
}

pub(crate) struct HeadNorms {
    pub query: Vec<f32>,
    pub key: Vec<f32>,
}

impl Layer {
    /// # Errors
    /// [`EngineError::TensorValue`] when the layer is not in the bytes of a sparse file.
    pub fn load(model: &Model, layer: usize, ropes: &mut Ropes) -> Result<Layer, EngineError> {
        let spec = model.spec().layers[layer].clone();
        let attention = &spec.attention;
        let feed_forward = &spec.feed_forward;
        let projection = |projection: &prima_model::Projection| {
            let bias = projection.bias.as_ref();
            Ok::<_, EngineError>(Projection {
                weight: model.matrix(&projection.weight)?,
                bias: bias.map(|bias| model.vector(bias)).transpose()?,
            })
        };
        let vector = |vector: &Option<TensorRows>| {
            let vector = vector.as_ref();
            vector.map(|vector| model.vector(vector)).transpose()
        };
        let norm = |norm: &Option<TensorRows>| {
            let norm = norm.as_ref();
            norm.map(|norm| model.norm(norm)).transpose()
        };
        Ok(Layer {
            rope: match &attention.rope {
                Some(rope) => Some(ropes.place(model, rope)?),
                None => None,
            },
            attention_norm: norm(&attention.norm)?,
            projections: match &attention.projections {
                prima_model::Projections::Direct(direct) => Projections::Direct(Direct {
                    query: projection(&direct.query)?,
                    key: projection(&direct.key)?,
                    value: projection(&direct.value)?,
                    head_norms: match &direct.head_norms {
                        Some(norms) => Some(HeadNorms {
                            query: model.norm(&norms.query)?,
                            key: model.norm(&norms.key)?,
                        }),
                        None => None,
                    },
                }),
                prima_model::Projections::Latent(latent) => {
                    Projections::Latent(Latent::load(model, latent)?)
                }
            },
            output: projection(&attention.output)?,
            sinks: vector(&attention.sinks)?,
            attention_post_norm: norm(&attention.post_norm)?,
            feed_forward_norm: norm(&feed_forward.norm)?,
            dense: match &feed_forward.dense {
                Some(mlp) => Some(Mlp {
                    gate: projection(&mlp.gate)?,
                    up: projection(&mlp.up)?,
                    down: projection(&mlp.down)?,
                    output_gate: match &mlp.output_gate {
                        Some(gate) => Some(model.matrix(gate)?),
                        None => None,
                    },
                }),
                None => None,
            },
            experts: match &feed_forward.experts {
                Some(experts) => Some(Experts {
                    router: projection(&experts.router)?,
                    selection_bias: vector(&experts.selection_bias)?,
                    gate: projection(&experts.gate)?,
                    up: projection(&experts.up)?,
                    down: projection(&experts.down)?,
                }),
                None => None,
            },
            feed_forward_post_norm: norm(&feed_forward.post_norm)?,
            spec,
        })
    }

    /// What the attention kernel needs to know.
    pub fn attention_shape(&self) -> AttentionShape<'_> {
        let attention = &self.spec.attention;
        AttentionShape {
            heads: attention.heads,
            kv: kv_shape(attention),
            scale: attention.scale,
            window: attention.window,
            softcap: attention.softcap,
            sinks: self.sinks.as_deref(),
        }
    }
}

impl Latent {
    fn load(model: &Model, latent: &prima_model::Latent) -> Result<Latent, EngineError> {
        Ok(Latent {
            rank: latent.rank,
            unrotated: latent.unrotated,
            value_dim: latent.value_dim,
            query_latent: match &latent.query_latent {
                Some(query) => Some(QueryLatent {
                    down: model.matrix(&query.down)?,
                    norm: model.norm(&query.norm)?,
                }),
                None => None,
            },
            query: model.matrix(&latent.query)?,
            row: model.matrix(&latent.row)?,
            norm: model.norm(&latent.norm)?,
            into_latents: model.matrix(&latent.into_latents)?,
            out_of_latents: model.matrix(&latent.out_of_latents)?,
        })
    }
}

/// What a position of the cache has.
pub(crate) fn kv_shape(attention: &Attention) -> KvShape {
    KvShape {
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
        values_in_keys: attention.values_in_keys(),
    }
}
