//! The tensors of one layer, by their names.

use crate::error::ModelError;
use crate::experts::ExpertOptions;
use crate::families::{Family, HeadNormKind, Presence};
use crate::rope::Rope;
use crate::shape::{LatentShape, Shape};
use crate::spec::{
    Attention, Direct, Experts, FeedForward, HeadNorms, Latent, Mlp, Projection, Projections,
    QueryLatent, Temperature,
};
use crate::tensor_rows::TensorRows;
use crate::tensors::Tensors;

/// What all layers share.
pub struct AllLayers<'a> {
    pub family: &'static Family,
    pub shape: &'a Shape,
    pub experts: Option<ExpertOptions>,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub temperature: Option<Temperature>,
    pub rope: Option<Rope>,
    pub windowed_rope: Option<Rope>,
}

/// The tensors of one layer.
pub struct Layer<'a, 'b> {
    pub same: &'a AllLayers<'a>,
    pub index: usize,
    pub tensors: &'a mut Tensors<'b>,
}

impl Layer<'_, '_> {
    pub fn attention(&mut self, window: Option<usize>) -> Result<Attention, ModelError> {
        let &AllLayers { family, shape, .. } = self.same;
        let &Shape {
            hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = shape;
        let norm = self.pre_norm("attn_norm.weight")?;
        let (projections, results) = match &shape.latent {
            Some(latent) => {
                let latent = self.latent(latent)?;
                let results = heads * latent.value_dim;
                (Projections::Latent(latent), results)
            }
            None => (Projections::Direct(self.direct()?), heads * head_dim),
        };
        let is_rotated = family
            .unrotated
            .is_none_or(|every| !(self.index + 1).is_multiple_of(every));
        let rope = match window {
            Some(_) => &self.same.windowed_rope,
            None => &self.same.rope,
        };
        Ok(Attention {
            norm,
            heads,
            kv_heads,
            head_dim,
            projections,
            scale: self.same.scale,
            rope: rope.clone().filter(|_| is_rotated),
            temperature: self.same.temperature,
            output: self.projection("attn_output", results, hidden, family.other_biases)?,
            window,
            softcap: self.same.softcap,
            sinks: match family.sinks {
                true => Some(self.vector("attn_sinks.weight", heads)?),
                false => None,
            },
            post_norm: self.post_norm("post_attention_norm.weight")?,
        })
    }

    fn direct(&mut self) -> Result<Direct, ModelError> {
        let &Shape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.same.shape;
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let [query, key, value] = self.queries_keys_values(queries, keys)?;
        let norm_lengths = match self.same.family.head_norms {
            HeadNormKind::None => None,
            HeadNormKind::EachHead => Some((head_dim, head_dim)),
            HeadNormKind::EachHeadIfThere if !self.has("attn_q_norm.weight") => None,
            HeadNormKind::EachHeadIfThere => Some((head_dim, head_dim)),
            HeadNormKind::AllHeads => Some((queries, keys)),
        };
        Ok(Direct {
            query,
            key,
            value,
            head_norms: match norm_lengths {
                Some((query, key)) => Some(HeadNorms {
                    query: self.vector("attn_q_norm.weight", query)?,
                    key: self.vector("attn_k_norm.weight", key)?,
                }),
                None => None,
            },
        })
    }

    /// In tensors of their own, or in one.
    fn queries_keys_values(
        &mut self,
        queries: usize,
        keys: usize,
    ) -> Result<[Projection; 3], ModelError> {
        let (hidden, biases) = (self.same.shape.hidden, self.same.family.attention_biases);
        if !self.has("attn_qkv.weight") {
            return Ok([
                self.projection("attn_q", hidden, queries, biases)?,
                self.projection("attn_k", hidden, keys, biases)?,
                self.projection("attn_v", hidden, keys, biases)?,
            ]);
        }
        let parts = [queries, keys, keys];
        let all = self.projection("attn_qkv", hidden, queries + 2 * keys, biases)?;
        let weights = all.weight.split(parts);
        let biases = all.bias.map(|bias| bias.split(parts).map(Some));
        let mut biases = biases.unwrap_or_default().into_iter();
        Ok(weights.map(|weight| Projection {
            weight,
            bias: biases.next().flatten(),
        }))
    }

    /// Small models make queries of the activation itself.
    fn latent(&mut self, latent: &LatentShape) -> Result<Latent, ModelError> {
        let &Shape {
            hidden,
            heads,
            head_dim,
            ..
        } = self.same.shape;
        let &LatentShape {
            rank,
            unrotated,
            rotated,
            value_dim,
            query_rank,
        } = latent;
        let queries = heads * (unrotated + rotated);
        let (query_latent, query) = match query_rank {
            Some(rank) if !self.has("attn_q.weight") => {
                let latent = QueryLatent {
                    down: self.matrix("attn_q_a.weight", hidden, rank)?,
                    norm: self.vector("attn_q_a_norm.weight", rank)?,
                };
                let up = self.matrix("attn_q_b.weight", rank, queries)?;
                (Some(latent), up)
            }
            _ => (None, self.matrix("attn_q.weight", hidden, queries)?),
        };
        Ok(Latent {
            rank,
            unrotated,
            value_dim,
            query_latent,
            query,
            row: self.matrix("attn_kv_a_mqa.weight", hidden, head_dim)?,
            norm: self.vector("attn_kv_a_norm.weight", rank)?,
            into_latents: self.matrices("attn_k_b.weight", [unrotated, rank, heads])?,
            out_of_latents: self.matrices("attn_v_b.weight", [rank, value_dim, heads])?,
        })
    }

    pub fn feed_forward(&mut self) -> Result<FeedForward, ModelError> {
        let &AllLayers { family, shape, .. } = self.same;
        let norm = self.pre_norm(family.feed_forward_norm)?;
        let experts = self.same.experts.as_ref();
        let experts = experts.filter(|experts| self.index >= experts.dense_layers);
        let dense = match experts {
            None => Some(self.mlp(shape.feed_forward)?),
            Some(experts) => self.shared_expert(experts)?,
        };
        Ok(FeedForward {
            norm,
            activation: family.activation,
            dense,
            experts: experts.map(|options| self.experts(options)).transpose()?,
            post_norm: self.post_norm("post_ffw_norm.weight")?,
        })
    }

    fn mlp(&mut self, width: usize) -> Result<Mlp, ModelError> {
        let &AllLayers { family, shape, .. } = self.same;
        let (hidden, biases) = (shape.hidden, family.other_biases);
        let [gate, up] = match self.has("ffn_gate.weight") {
            true => [
                self.projection("ffn_gate", hidden, width, biases)?,
                self.projection("ffn_up", hidden, width, biases)?,
            ],
            false => {
                let both = self.matrix("ffn_up.weight", hidden, 2 * width)?;
                let both = both.split([width, width]);
                both.map(|weight| Projection { weight, bias: None })
            }
        };
        Ok(Mlp {
            width,
            gate,
            up,
            down: self.projection("ffn_down", width, hidden, biases)?,
            output_gate: None,
        })
    }

    fn shared_expert(&mut self, options: &ExpertOptions) -> Result<Option<Mlp>, ModelError> {
        let Some(width) = options.shared_width else {
            return Ok(None);
        };
        let hidden = self.same.shape.hidden;
        let biases = Presence::Never;
        Ok(Some(Mlp {
            width,
            gate: self.projection("ffn_gate_shexp", hidden, width, biases)?,
            up: self.projection("ffn_up_shexp", hidden, width, biases)?,
            down: self.projection("ffn_down_shexp", width, hidden, biases)?,
            output_gate: match options.shared_gate {
                true => Some(self.vector("ffn_gate_inp_shexp.weight", hidden)?),
                false => None,
            },
        }))
    }

    fn experts(&mut self, options: &ExpertOptions) -> Result<Experts, ModelError> {
        let &ExpertOptions {
            count,
            width,
            biases,
            ..
        } = options;
        let hidden = self.same.shape.hidden;
        // Some converters put gates and ups into one tensor, without which both would be missing.
        self.tensors.refuse(&self.full("ffn_gate_up_exps.weight"))?;
        let router = self.full("ffn_gate_inp.weight");
        Ok(Experts {
            count,
            used: options.used,
            groups: options.groups,
            width,
            router: Projection {
                weight: self.tensors.float_matrix(&router, hidden, count)?,
                bias: match self.has_bias("ffn_gate_inp", biases) {
                    true => Some(self.vector("ffn_gate_inp.bias", count)?),
                    false => None,
                },
            },
            gating: options.gating,
            selection_bias: match self.has_bias("exp_probs_b", options.selection_bias) {
                true => Some(self.vector("exp_probs_b.bias", count)?),
                false => None,
            },
            normalized: options.normalized,
            scale: options.scale,
            gate: self.stack("ffn_gate_exps", [hidden, width, count], biases)?,
            up: self.stack("ffn_up_exps", [hidden, width, count], biases)?,
            down: self.stack("ffn_down_exps", [width, hidden, count], biases)?,
        })
    }

    /// A projection of each expert.
    fn stack(
        &mut self,
        name: &str,
        [cols, rows, count]: [usize; 3],
        bias: Presence,
    ) -> Result<Projection, ModelError> {
        let bias_name = self.full(&format!("{name}.bias"));
        Ok(Projection {
            weight: self.matrices(&format!("{name}.weight"), [cols, rows, count])?,
            bias: match self.has_bias(name, bias) {
                true => Some(self.tensors.float_matrix(&bias_name, rows, count)?),
                false => None,
            },
        })
    }

    fn pre_norm(&mut self, name: &str) -> Result<Option<TensorRows>, ModelError> {
        self.norm(self.same.family.pre_norms, name)
    }

    fn post_norm(&mut self, name: &str) -> Result<Option<TensorRows>, ModelError> {
        self.norm(self.same.family.post_norms, name)
    }

    fn norm(&mut self, is_there: bool, name: &str) -> Result<Option<TensorRows>, ModelError> {
        match is_there {
            true => Ok(Some(self.vector(name, self.same.shape.hidden)?)),
            false => Ok(None),
        }
    }

    fn projection(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
        bias: Presence,
    ) -> Result<Projection, ModelError> {
        Ok(Projection {
            weight: self.matrix(&format!("{name}.weight"), cols, rows)?,
            bias: match self.has_bias(name, bias) {
                true => Some(self.vector(&format!("{name}.bias"), rows)?),
                false => None,
            },
        })
    }

    fn has_bias(&self, name: &str, bias: Presence) -> bool {
        match bias {
            Presence::Never => false,
            Presence::IfThere => self.has(&format!("{name}.bias")),
            Presence::Always => true,
        }
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.has(&self.full(name))
    }

    fn matrix(&mut self, name: &str, cols: usize, rows: usize) -> Result<TensorRows, ModelError> {
        let name = self.full(name);
        self.tensors.matrix(&name, cols, rows)
    }

    /// So many of them in one tensor.
    fn matrices(
        &mut self,
        name: &str,
        [cols, rows, count]: [usize; 3],
    ) -> Result<TensorRows, ModelError> {
        let name = self.full(name);
        self.tensors.stack(&name, cols, rows, count)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<TensorRows, ModelError> {
        let name = self.full(name);
        self.tensors.vector(&name, length)
    }

    fn full(&self, name: &str) -> String {
        format!("blk.{}.{name}", self.index)
    }
}
