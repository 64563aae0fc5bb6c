//! The parts of models: what one model has and another has not, each with a name. Programs of different versions so tell each other what a
//! model needs, and what a machine computes.
//!
//! Decides which options of a description are parts. Their names are in documents of a cluster, so none is ever changed. Every field of the
//! description is named here, without `..`: a new one does not compile until it is decided which part it is. What only has a size (heads,
//! widths, bases, ...) is none.

use std::collections::BTreeSet;
use std::fmt;

use crate::rope::{Divisors, Rope, RopePairing, Yarn};
use crate::spec::{
    ActivationFunction, Attention, Direct, ExpertGroups, Experts, FeedForward, Gating, HeadNorms,
    Latent, LayerSpec, Mlp, ModelSpec, Pooling, Projection, Projections, QueryLatent, Temperature,
};

macro_rules! model_parts {
    ($($(#[$doc:meta])* $part:ident = $name:literal,)*) => {
        /// What a model may have, and a program may not compute.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum ModelPart {
            $($(#[$doc])* $part,)*
        }

        impl ModelPart {
            pub const ALL: &[ModelPart] = &[$(ModelPart::$part,)*];

            /// As documents have it.
            pub fn name(self) -> &'static str {
                match self {
                    $(ModelPart::$part => $name,)*
                }
            }
        }
    };
}

model_parts! {
    /// The embedding is multiplied by a number.
    EmbeddingScale = "embedding-scale",
    /// What attention and feed-forward add is multiplied by a number.
    ResidualScale = "residual-scale",
    LogitScale = "logit-scale",
    LogitSoftcap = "logit-softcap",
    /// The mean of a text's states stands for it.
    MeanPooling = "mean-pooling",
    /// The state of the first token stands for a text.
    ClsPooling = "cls-pooling",
    /// A classifier makes a score of a text.
    RankPooling = "rank-pooling",
    /// Neighbours are rotated together.
    InterleavedRope = "interleaved-rope",
    /// Halves of a head are rotated together.
    HalvesRope = "halves-rope",
    /// Only the first numbers of a head are rotated.
    PartialRope = "partial-rope",
    LinearRope = "linear-rope",
    Yarn = "yarn",
    /// Frequencies have divisors of their own. (Llama 3.1)
    RopeDivisors = "rope-divisors",
    LongRope = "longrope",
    /// Sines and cosines are multiplied by a number.
    RopeMagnitude = "rope-magnitude",
    /// Layers that know no positions.
    NoRope = "no-rope",
    AttentionTemperature = "attention-temperature",
    /// Scores are not divided by the root of a head's length, but by another number.
    AttentionScale = "attention-scale",
    /// Of queries, keys or values.
    AttentionBiases = "attention-biases",
    AttentionOutputBias = "attention-output-bias",
    /// Of each head by itself.
    HeadNorms = "head-norms",
    /// Of all heads together.
    JointHeadNorms = "joint-head-norms",
    SlidingWindows = "sliding-windows",
    AttentionSoftcap = "attention-softcap",
    AttentionSinks = "attention-sinks",
    /// Attention or feed-forward takes what it is given without a norm.
    NoPreNorms = "no-pre-norms",
    PostNorms = "post-norms",
    Silu = "silu",
    Gelu = "gelu",
    ClampedSwiglu = "clamped-swiglu",
    FeedForwardBiases = "feed-forward-biases",
    Experts = "experts",
    /// Of the router, or of experts.
    ExpertBiases = "expert-biases",
    SoftmaxGating = "softmax-gating",
    SigmoidGating = "sigmoid-gating",
    SoftmaxOfChosenGating = "softmax-of-chosen-gating",
    /// A bias that counts where experts are chosen, and not in their weights.
    SelectionBias = "selection-bias",
    /// The weights of a token's experts are divided by their sum.
    NormalizedExperts = "normalized-experts",
    /// The weights of experts are multiplied by a number.
    ExpertScale = "expert-scale",
    /// What every token goes through beside its experts.
    SharedExperts = "shared-experts",
    /// A gate of what every token goes through.
    SharedExpertGate = "shared-expert-gate",
    /// Experts are chosen among those of a few groups.
    ExpertGroups = "expert-groups",
    /// Keys and values of all heads are one row of a position.
    LatentAttention = "latent-attention",
    /// Queries are made of a short row, which has a norm.
    LatentQueries = "latent-queries",
}

impl fmt::Display for ModelPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl ModelSpec {
    /// All that it has, in its layers and around them.
    pub fn parts(&self) -> BTreeSet<ModelPart> {
        let ModelSpec {
            architecture: _,
            hidden: _,
            vocabulary: _,
            context_length: _,
            norm_epsilon: _,
            embedding: _,
            embedding_scale,
            layers,
            residual_scale,
            output_norm: _,
            output_head: _,
            logit_scale,
            logit_softcap,
            pooling,
            // What it is for says `pooling`.
            classifier: _,
        } = self;
        let around = [
            (*embedding_scale != 1.0).then_some(ModelPart::EmbeddingScale),
            (*residual_scale != 1.0).then_some(ModelPart::ResidualScale),
            (*logit_scale != 1.0).then_some(ModelPart::LogitScale),
            logit_softcap.map(|_| ModelPart::LogitSoftcap),
            match pooling {
                Pooling::Mean => Some(ModelPart::MeanPooling),
                Pooling::Cls => Some(ModelPart::ClsPooling),
                Pooling::Last => None,
                Pooling::Rank => Some(ModelPart::RankPooling),
            },
        ];
        let in_layers = layers.iter().flat_map(LayerSpec::parts);
        around.into_iter().flatten().chain(in_layers).collect()
    }
}

impl LayerSpec {
    /// What this layer has.
    pub fn parts(&self) -> BTreeSet<ModelPart> {
        let LayerSpec {
            attention,
            feed_forward,
        } = self;
        let parts = of_attention(attention)
            .into_iter()
            .chain(of_feed_forward(feed_forward));
        parts.collect()
    }
}

fn of_attention(attention: &Attention) -> Vec<ModelPart> {
    let Attention {
        norm,
        heads: _,
        kv_heads: _,
        head_dim,
        projections,
        scale,
        rope,
        temperature,
        output,
        window,
        softcap,
        sinks,
        post_norm,
    } = attention;
    // Of a head's numbers, those that scores are made of, and those that may be rotated.
    let (scored, rotatable, projections) = match projections {
        Projections::Direct(direct) => (*head_dim, *head_dim, of_direct(direct, *head_dim)),
        Projections::Latent(latent) => {
            let rotatable = head_dim - latent.rank;
            (latent.unrotated + rotatable, rotatable, of_latent(latent))
        }
    };
    let usual_scale = 1.0 / (scored as f32).sqrt();
    let parts = [
        norm.is_none().then_some(ModelPart::NoPreNorms),
        (*scale != usual_scale).then_some(ModelPart::AttentionScale),
        temperature.map(
            |Temperature {
                 scale: _,
                 positions: _,
             }| ModelPart::AttentionTemperature,
        ),
        has_bias([output]).then_some(ModelPart::AttentionOutputBias),
        window.map(|_| ModelPart::SlidingWindows),
        softcap.map(|_| ModelPart::AttentionSoftcap),
        sinks.as_ref().map(|_| ModelPart::AttentionSinks),
        post_norm.as_ref().map(|_| ModelPart::PostNorms),
    ];
    let rope = match rope {
        Some(rope) => of_rope(rope, rotatable),
        None => vec![ModelPart::NoRope],
    };
    let parts = parts.into_iter().flatten();
    parts.chain(projections).chain(rope).collect()
}

fn of_direct(direct: &Direct, head_dim: usize) -> Vec<ModelPart> {
    let Direct {
        query,
        key,
        value,
        head_norms,
    } = direct;
    let norms = head_norms.as_ref();
    let parts = [
        has_bias([query, key, value]).then_some(ModelPart::AttentionBiases),
        norms.map(|norms| of_head_norms(norms, head_dim)),
    ];
    parts.into_iter().flatten().collect()
}

fn of_latent(latent: &Latent) -> Vec<ModelPart> {
    let Latent {
        rank: _,
        unrotated: _,
        value_dim: _,
        query_latent,
        query: _,
        row: _,
        norm: _,
        into_latents: _,
        out_of_latents: _,
    } = latent;
    let of_queries = query_latent
        .as_ref()
        .map(|QueryLatent { down: _, norm: _ }| ModelPart::LatentQueries);
    [Some(ModelPart::LatentAttention), of_queries]
        .into_iter()
        .flatten()
        .collect()
}

fn of_head_norms(norms: &HeadNorms, head_dim: usize) -> ModelPart {
    let HeadNorms { query, key } = norms;
    match query.cols == head_dim && key.cols == head_dim {
        true => ModelPart::HeadNorms,
        false => ModelPart::JointHeadNorms,
    }
}

fn of_rope(rope: &Rope, rotatable: usize) -> Vec<ModelPart> {
    let Rope {
        pairing,
        dimensions,
        base: _,
        factor,
        yarn,
        divisors,
        magnitude,
    } = rope;
    let parts = [
        Some(match pairing {
            RopePairing::Interleaved => ModelPart::InterleavedRope,
            RopePairing::Halves => ModelPart::HalvesRope,
        }),
        (*dimensions < rotatable).then_some(ModelPart::PartialRope),
        match yarn {
            Some(Yarn {
                original_context: _,
                beta_fast: _,
                beta_slow: _,
            }) => Some(ModelPart::Yarn),
            None => (*factor != 1.0).then_some(ModelPart::LinearRope),
        },
        divisors.as_ref().map(|divisors| match divisors {
            Divisors::Always(_) => ModelPart::RopeDivisors,
            Divisors::ByContext {
                short: _,
                long: _,
                original_context: _,
            } => ModelPart::LongRope,
        }),
        (*magnitude != 1.0).then_some(ModelPart::RopeMagnitude),
    ];
    parts.into_iter().flatten().collect()
}

fn of_feed_forward(feed_forward: &FeedForward) -> Vec<ModelPart> {
    let FeedForward {
        norm,
        activation,
        dense,
        experts,
        post_norm,
    } = feed_forward;
    let is_shared = dense.is_some() && experts.is_some();
    let parts = [
        norm.is_none().then_some(ModelPart::NoPreNorms),
        Some(match activation {
            ActivationFunction::Silu => ModelPart::Silu,
            ActivationFunction::Gelu => ModelPart::Gelu,
            ActivationFunction::ClampedSwiglu => ModelPart::ClampedSwiglu,
        }),
        is_shared.then_some(ModelPart::SharedExperts),
        post_norm.as_ref().map(|_| ModelPart::PostNorms),
    ];
    let dense = dense.iter().flat_map(of_dense);
    let experts = experts.iter().flat_map(of_experts);
    let parts = parts.into_iter().flatten();
    parts.chain(dense).chain(experts).collect()
}

fn of_dense(mlp: &Mlp) -> Vec<ModelPart> {
    let Mlp {
        width: _,
        gate,
        up,
        down,
        output_gate,
    } = mlp;
    let parts = [
        has_bias([gate, up, down]).then_some(ModelPart::FeedForwardBiases),
        output_gate.as_ref().map(|_| ModelPart::SharedExpertGate),
    ];
    parts.into_iter().flatten().collect()
}

fn of_experts(experts: &Experts) -> Vec<ModelPart> {
    let Experts {
        count: _,
        used: _,
        groups,
        width: _,
        router,
        gating,
        selection_bias,
        normalized,
        scale,
        gate,
        up,
        down,
    } = experts;
    let parts = [
        Some(ModelPart::Experts),
        groups.map(|ExpertGroups { count: _, used: _ }| ModelPart::ExpertGroups),
        has_bias([router, gate, up, down]).then_some(ModelPart::ExpertBiases),
        Some(match gating {
            Gating::Softmax => ModelPart::SoftmaxGating,
            Gating::Sigmoid => ModelPart::SigmoidGating,
            Gating::SoftmaxOfChosen => ModelPart::SoftmaxOfChosenGating,
        }),
        selection_bias.as_ref().map(|_| ModelPart::SelectionBias),
        normalized.then_some(ModelPart::NormalizedExperts),
        (*scale != 1.0).then_some(ModelPart::ExpertScale),
    ];
    parts.into_iter().flatten().collect()
}

fn has_bias<const N: usize>(projections: [&Projection; N]) -> bool {
    projections
        .into_iter()
        .any(|Projection { weight: _, bias }| bias.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_words_and_differ() {
        let names: BTreeSet<&str> = ModelPart::ALL.iter().map(|part| part.name()).collect();
        assert_eq!(names.len(), ModelPart::ALL.len());
        let is_word = |name: &&str| {
            let mut letters = name.chars();
            letters.all(|letter| letter.is_ascii_lowercase() || letter == '-') && name.len() <= 64
        };
        assert!(names.iter().all(is_word), "{names:?}");
    }
}
