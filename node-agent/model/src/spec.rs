//! The description of a model: plain data, checked. Sizes are at least 1 and fit one another and the shapes of the tensors.

use prima_gguf::GgmlType;

use crate::rope::Rope;
use crate::tensor_rows::TensorRows;

/// A model as its header describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The family, as files call it in `general.architecture`.
    pub architecture: &'static str,
    /// Width of the activation between layers.
    pub hidden: usize,
    /// Number of tokens, which is the number of logits.
    pub vocabulary: usize,
    /// The most positions that the model was made for, and that prima computes as it was made for.
    pub context_length: usize,
    /// Added to the mean square in RMS norms.
    pub norm_epsilon: f32,
    /// A row for each token.
    pub embedding: TensorRows,
    /// What the embedding is multiplied by before the first layer; 1 in most models.
    pub embedding_scale: f32,
    pub layers: Vec<LayerSpec>,
    /// What the results of attention and feed-forward are multiplied by before they are added; 1 in most models.
    pub residual_scale: f32,
    pub output_norm: TensorRows,
    /// A row for each token; the embedding's rows, if the model is tied.
    pub output_head: TensorRows,
    /// What logits are multiplied by; 1 in most models.
    pub logit_scale: f32,
    /// Logits l become softcap * tanh(l / softcap).
    pub logit_softcap: Option<f32>,
    pub pooling: Pooling,
    /// Scores x hidden: from the last state to what ranks a text. Only with [`Pooling::Rank`].
    pub classifier: Option<TensorRows>,
}

/// What of a text's states, one behind each token, stands for the whole text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// Of all of them the mean.
    Mean,
    /// That of the first token, which sees all others: not in models where a token sees only those before it.
    Cls,
    /// That of the last token. Also where a file says nothing: no other state has seen the whole text. (llama.cpp's server has no vector for
    /// such a file until it is told a pooling; Ollama takes the last one, too.)
    #[default]
    Last,
    /// A score of how well two texts go together, which the classifier makes of the last token's: no vector of a text.
    Rank,
}

/// A transformer layer: x += attention(x), then x += feed_forward(x). Where a part has a post-norm, the norm of its result is added.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    pub attention: Attention,
    pub feed_forward: FeedForward,
}

/// output(attend(rope(queries), rope(keys), values)), made of norm(x).
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub norm: Option<TensorRows>,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Numbers of a query, key or value head.
    pub head_dim: usize,
    pub projections: Projections,
    /// Scores are multiplied by it.
    pub scale: f32,
    /// `None`: the layer does not know positions.
    pub rope: Option<Rope>,
    pub temperature: Option<Temperature>,
    pub output: Projection,
    /// A position sees this many positions at most, its own among them; `None`: all before it.
    pub window: Option<usize>,
    /// Scores s become softcap * tanh(s / softcap), after the scale.
    pub softcap: Option<f32>,
    /// For each query head a score, without a value, that takes part in the softmax.
    pub sinks: Option<TensorRows>,
    pub post_norm: Option<TensorRows>,
}

/// What makes queries, keys and values of norm(x).
#[derive(Clone, Debug, PartialEq)]
pub enum Projections {
    Direct(Direct),
    Latent(Latent),
}

/// A projection for each.
#[derive(Clone, Debug, PartialEq)]
pub struct Direct {
    pub query: Projection,
    pub key: Projection,
    pub value: Projection,
    /// Of queries and keys, before RoPE.
    pub head_norms: Option<HeadNorms>,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a position leaves one row behind, which serves all heads.
///
/// The row is the latent, norm(its first `rank` numbers), and a rotated key behind it: `head_dim` numbers together. The row is the only key,
/// and its latent the only value (`kv_heads` is 1). The matrices that would make each head's keys and values of the latent (equations 10 and
/// 11, W^UK and W^UV) are absorbed: a head's query goes into the space of latents before attention, and what attention makes of latents goes
/// out of it behind.
#[derive(Clone, Debug, PartialEq)]
pub struct Latent {
    /// Numbers of the latent: d_c in the paper.
    pub rank: usize,
    /// Numbers of a head's query that go into the space of latents; those behind them are rotated.
    pub unrotated: usize,
    /// Numbers of a head's result: what `output` takes of each.
    pub value_dim: usize,
    /// What queries are made of in place of norm(x).
    pub query_latent: Option<QueryLatent>,
    /// To `unrotated` numbers of each head, and those that are rotated.
    pub query: TensorRows,
    /// hidden to `head_dim`.
    pub row: TensorRows,
    /// Weights of the RMS norm of the latent.
    pub norm: TensorRows,
    /// For each head, one after the other, `unrotated` to `rank`: W^UK, transposed.
    pub into_latents: TensorRows,
    /// For each head, one after the other, `rank` to `value_dim`: W^UV.
    pub out_of_latents: TensorRows,
}

/// norm(x * down): c^Q in the paper, which is not cached.
#[derive(Clone, Debug, PartialEq)]
pub struct QueryLatent {
    pub down: TensorRows,
    pub norm: TensorRows,
}

/// Number format of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvFormat {
    #[default]
    F16,
    /// Bytes, and an F16 scale for each 32 numbers of a head.
    Q8_0,
}

/// Weights of RMS norms: as long as one head, for each head by itself; or as long as all heads, for all together.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadNorms {
    pub query: TensorRows,
    pub key: TensorRows,
}

/// Scores grow with the position: the query at position p is multiplied by 1 + scale * ln(floor(p / positions) + 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    pub scale: f32,
    pub positions: usize,
}

/// x * weight + bias
#[derive(Clone, Debug, PartialEq)]
pub struct Projection {
    pub weight: TensorRows,
    pub bias: Option<TensorRows>,
}

/// The sum of what `dense` and `experts` make of norm(x), as far as they are there.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    pub norm: Option<TensorRows>,
    pub activation: ActivationFunction,
    /// What every token goes through: alone, or beside experts.
    pub dense: Option<Mlp>,
    /// What each token goes through a few of.
    pub experts: Option<Experts>,
    pub post_norm: Option<TensorRows>,
}

/// down(activation(gate(x)) * up(x)), times sigmoid(x * output_gate) where there is such a gate.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// Inner width.
    pub width: usize,
    pub gate: Projection,
    pub up: Projection,
    pub down: Projection,
    /// One row of floats.
    pub output_gate: Option<TensorRows>,
}

/// The sum over the chosen experts of weight * down(activation(gate(x)) * up(x)), where each expert has matrices of its own.
///
/// The router makes a logit of x for each expert, logits become scores, and the best are chosen; of equal ones that with the lower number.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// How many there are.
    pub count: usize,
    /// How many a token goes through, at most `count`.
    pub used: usize,
    /// `None`: a token chooses among all.
    pub groups: Option<ExpertGroups>,
    /// Inner width of each.
    pub width: usize,
    pub router: Projection,
    pub gating: Gating,
    /// Added to scores where experts are chosen, and not to their weights.
    pub selection_bias: Option<TensorRows>,
    /// Whether the weights of a token are divided by their sum.
    pub normalized: bool,
    /// What weights are multiplied by.
    pub scale: f32,
    /// Of all experts, one after the other: each has `rows / count` rows. Of biases, each has one row.
    pub gate: Projection,
    pub up: Projection,
    pub down: Projection,
}

/// Experts, split into groups of equal size in the order of their numbers. A token chooses groups first, by the sum of the two best scores of
/// each, and experts of these groups then. (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    pub count: usize,
    /// How many a token chooses.
    pub used: usize,
}

/// How the router's logits become scores, and scores become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Scores are the softmax over all experts.
    Softmax,
    /// Scores are the sigmoid of each logit.
    Sigmoid,
    /// Scores are the logits; weights are the softmax over those that were chosen.
    SoftmaxOfChosen,
}

/// What makes the feed-forward part non-linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationFunction {
    Silu,
    /// With its usual approximation by tanh.
    Gelu,
    /// With g = min(gate, 7) and u = up within -7 and 7: g * sigmoid(1.702 g) * (u + 1), in place of activation(gate) * up. (gpt-oss)
    ClampedSwiglu,
}

impl ModelSpec {
    /// Whether the output head is the embedding.
    pub fn is_tied(&self) -> bool {
        self.output_head.bytes == self.embedding.bytes
    }

    /// Positions that rows see in layers with a sliding window, their own included; `None` where no layer has one. What has room in the widest
    /// window has room in all.
    pub fn attention_window(&self) -> Option<usize> {
        let layers = self.layers.iter();
        layers.filter_map(|layer| layer.attention.window).max()
    }
}

impl LayerSpec {
    /// The matrices that every token is multiplied with, in the order in which a pass uses them.
    pub fn matrices(&self) -> impl Iterator<Item = &TensorRows> {
        let Attention {
            projections,
            output,
            ..
        } = &self.attention;
        let FeedForward { dense, experts, .. } = &self.feed_forward;
        let dense = dense.iter().flat_map(|mlp| [&mlp.gate, &mlp.up, &mlp.down]);
        let router = experts.iter().map(|experts| &experts.router);
        let behind = [output].into_iter().chain(dense).chain(router);
        let attention = projections.matrices().into_iter();
        attention.chain(behind.map(|each| &each.weight))
    }

    /// The matrices of all experts, of which a token is multiplied with a few rows: gate, up and down.
    pub fn expert_matrices(&self) -> impl Iterator<Item = &TensorRows> {
        let experts = self.feed_forward.experts.iter();
        experts.flat_map(|experts| experts.matrices())
    }
}

impl Projections {
    /// In the order in which a pass uses them.
    fn matrices(&self) -> Vec<&TensorRows> {
        match self {
            Projections::Direct(direct) => {
                let all = [&direct.query, &direct.key, &direct.value];
                all.map(|each| &each.weight).to_vec()
            }
            Projections::Latent(latent) => {
                let down = latent.query_latent.iter().map(|query| &query.down);
                let then = [&latent.query, &latent.into_latents, &latent.out_of_latents];
                [&latent.row].into_iter().chain(down).chain(then).collect()
            }
        }
    }
}

impl Experts {
    /// Gate, up and down of all experts.
    pub fn matrices(&self) -> [&TensorRows; 3] {
        [&self.gate.weight, &self.up.weight, &self.down.weight]
    }
}

impl KvFormat {
    fn ggml_type(self) -> GgmlType {
        match self {
            KvFormat::F16 => GgmlType::F16,
            KvFormat::Q8_0 => GgmlType::Q8_0,
        }
    }
}

impl Attention {
    /// How many of a key's numbers are its value, too, where keys and values are one row; `None`: both are of `head_dim` numbers.
    pub fn values_in_keys(&self) -> Option<usize> {
        match &self.projections {
            Projections::Direct(_) => None,
            Projections::Latent(latent) => Some(latent.rank),
        }
    }

    /// The format of this layer's cache where `wanted` is asked for. A head is of whole blocks: others than of 32, 64, ... numbers stay F16.
    pub fn kv_format(&self, wanted: KvFormat) -> KvFormat {
        match self.head_dim.is_multiple_of(wanted.ggml_type().block_len()) {
            true => wanted,
            false => KvFormat::F16,
        }
    }

    /// Bytes of keys and values that a position adds to the KV cache where `wanted` is asked for.
    pub fn kv_bytes(&self, wanted: KvFormat) -> usize {
        let format = self.kv_format(wanted).ggml_type();
        let rows = match self.values_in_keys() {
            Some(_) => 1,
            None => 2,
        };
        rows * self.kv_heads * self.head_dim / format.block_len() * format.block_bytes()
    }
}

impl Temperature {
    /// What the query at this position is multiplied by.
    pub fn at(&self, position: usize) -> f32 {
        let steps = (position / self.positions) as f32;
        1.0 + self.scale * (steps + 1.0).ln()
    }
}
