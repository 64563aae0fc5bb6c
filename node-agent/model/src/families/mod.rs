//! The families of models, each described in a file of its own: what sets its layers apart from those of llama. `read` turns a description
//! and a header into a model.

mod deepseek2;
mod gemma2;
mod gemma3;
mod glm4;
mod glm4moe;
mod gpt_oss;
mod granite;
mod granitemoe;
mod llama;
mod mistral3;
mod olmo2;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen3moe;
mod smollm3;

use crate::rope::RopePairing;
use crate::spec::{ActivationFunction, Gating};

/// What a family's layers consist of. Queries, keys and values may lie in one tensor in any family, and so may gate and up.
#[derive(Debug)]
pub struct Family {
    /// The name in `general.architecture`, which is also the prefix of the family's metadata keys.
    pub architecture: &'static str,
    pub rope_pairing: RopePairing,
    /// Whether files whose positions have parts (`rope.dimension_sections`, M-RoPE) pair halves instead.
    pub sections_pair_halves: bool,
    /// Every so many layers, one is not rotated.
    pub unrotated: Option<usize>,
    /// Whether attention and feed-forward norm what they are given.
    pub pre_norms: bool,
    /// The norm before the feed-forward part, as files call it.
    pub feed_forward_norm: &'static str,
    /// Whether the results of attention and feed-forward go through norms of their own.
    pub post_norms: bool,
    /// Whether a position leaves one row behind for all heads, its latent (MLA).
    pub latent: bool,
    pub head_norms: HeadNormKind,
    /// Of queries, keys and values.
    pub attention_biases: Presence,
    /// Of attention's output, and of the feed-forward part.
    pub other_biases: Presence,
    pub activation: ActivationFunction,
    pub embedding_scale: EmbeddingScale,
    pub windows: WindowPattern,
    pub softcaps: Softcaps,
    /// Whether each query head has a score for attending to nothing.
    pub sinks: bool,
    /// With this many layers, queries are scaled as if heads had the width hidden / heads. (Gemma's largest models.)
    pub scaled_by_width: Option<usize>,
    /// Whether the file has factors of scores, of results before they are added, and of logits (`attention.scale`, `residual_scale`,
    /// `logit_scale`).
    pub scale_keys: bool,
    /// Whether the file tells the details of YaRN and how scores grow with the position (`rope.scaling.yarn_*`,
    /// `attention.temperature_scale`).
    pub long_context_keys: bool,
    /// A matrix that makes scores of the last state, where the file says that it ranks texts.
    pub classifier: Presence,
    /// What the feed-forward part has in place of one network for all tokens; `None`: files with experts are refused.
    pub experts: Option<ExpertKind>,
}

/// Experts, of which each token takes a few. The file may say otherwise how they are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertKind {
    /// Whether files of the family must have them.
    pub presence: Presence,
    pub gating: Gating,
    /// Models with so many tokens have [`Gating::Sigmoid`] where the file does not say. (GLM-4.7-Flash)
    pub sigmoid_vocabulary: Option<usize>,
    /// Whether the weights of those chosen are divided by their sum.
    pub normalized: bool,
    /// Of the router and the experts.
    pub biases: Presence,
    /// A bias for choosing alone.
    pub selection_bias: Presence,
    /// An expert that all tokens go through.
    pub shared: Presence,
    /// Whether what it makes is multiplied by a sigmoid of its own.
    pub shared_gate: bool,
}

/// Experts as most families have them.
const EXPERTS: ExpertKind = ExpertKind {
    presence: Presence::Always,
    gating: Gating::Softmax,
    sigmoid_vocabulary: None,
    normalized: true,
    biases: Presence::Never,
    selection_bias: Presence::Never,
    shared: Presence::Never,
    shared_gate: false,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Never,
    /// As the file has it.
    IfThere,
    Always,
}

/// Norms of queries and keys before RoPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadNormKind {
    None,
    /// Of each head, with the same weights.
    EachHead,
    /// The same, where the file has them.
    EachHeadIfThere,
    /// Of all heads together.
    AllHeads,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbeddingScale {
    One,
    /// The root of its width.
    RootOfWidth,
    /// As the file says, if it does.
    Key,
}

/// Layers that see only the last positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WindowPattern {
    /// None has a window. If a file gives one all the same, its context ends there: within it, such a model works like any other.
    None,
    /// None has a window, whatever the file says.
    Ignored,
    /// All but the last of every `period` layers have one.
    Some {
        period: usize,
        /// Positions, where the file does not say; `None`: then no layer has a window.
        default: Option<usize>,
        rope: WindowedRope,
    },
}

/// The rotation in layers with a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WindowedRope {
    /// As in the others, with a base of its own where the file says so.
    Same,
    /// Never scaled, with a base of its own, which is this where the file does not say.
    Base(f32),
    /// Never scaled, with the base of the others where the file does not say.
    Unscaled,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Softcaps {
    pub attention: Softcap,
    pub logits: Softcap,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Softcap {
    Never,
    /// As the file says; else this, if anything.
    Key(Option<f32>),
}

const ALL: [&Family; 18] = [
    &llama::LLAMA,
    &qwen2::QWEN2,
    &qwen3::QWEN3,
    &gemma2::GEMMA2,
    &gemma3::GEMMA3,
    &phi3::PHI3,
    &mistral3::MISTRAL3,
    &smollm3::SMOLLM3,
    &olmo2::OLMO2,
    &granite::GRANITE,
    &glm4::GLM4,
    &qwen3moe::QWEN3MOE,
    &olmoe::OLMOE,
    &qwen2moe::QWEN2MOE,
    &granitemoe::GRANITEMOE,
    &gpt_oss::GPT_OSS,
    &glm4moe::GLM4MOE,
    &deepseek2::DEEPSEEK2,
];

/// The family of this name.
pub fn by_name(architecture: &str) -> Option<&'static Family> {
    let mut all = ALL.into_iter();
    all.find(|family| family.architecture == architecture)
}

/// The architectures that prima runs.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.into_iter().map(|family| family.architecture)
}
