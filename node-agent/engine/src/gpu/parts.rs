//! Which parts of models GPUs compute, whatever makes them compute, and which they leave to the processor. A NodeProfile says the same, so
//! that nobody plans layers for a GPU that will refuse them.

use prima_model::{ActivationFunction, ModelPart};

use crate::error::EngineError;
use crate::layer::{Direct, Layer, Mlp, Projections};

/// What GPUs compute, and not every layer has.
pub(super) struct Parts<'a> {
    pub attention: &'a Direct,
    pub mlp: &'a Mlp,
    pub gate: Gate,
}

/// What a gate's numbers go through.
#[derive(Clone, Copy)]
pub(super) enum Gate {
    Silu,
    Gelu,
}

/// Whether layers of models with this part may be on a GPU. Every part is named here, so that a new one is not forgotten.
pub(super) fn is_computed(part: ModelPart) -> bool {
    match part {
        ModelPart::AttentionSinks
        | ModelPart::ClampedSwiglu
        | ModelPart::Experts
        | ModelPart::ExpertBiases
        | ModelPart::SoftmaxGating
        | ModelPart::SigmoidGating
        | ModelPart::SoftmaxOfChosenGating
        | ModelPart::SelectionBias
        | ModelPart::NormalizedExperts
        | ModelPart::ExpertScale
        | ModelPart::SharedExperts
        | ModelPart::SharedExpertGate
        | ModelPart::ExpertGroups
        | ModelPart::LatentAttention
        | ModelPart::LatentQueries => false,
        // Before the first layer and behind the last, where the processor computes.
        ModelPart::EmbeddingScale
        | ModelPart::LogitScale
        | ModelPart::LogitSoftcap
        | ModelPart::MeanPooling
        | ModelPart::ClsPooling
        | ModelPart::RankPooling => true,
        ModelPart::ResidualScale
        | ModelPart::InterleavedRope
        | ModelPart::HalvesRope
        | ModelPart::PartialRope
        | ModelPart::LinearRope
        | ModelPart::Yarn
        | ModelPart::RopeDivisors
        | ModelPart::LongRope
        | ModelPart::RopeMagnitude
        | ModelPart::NoRope
        | ModelPart::AttentionTemperature
        | ModelPart::AttentionScale
        | ModelPart::AttentionBiases
        | ModelPart::AttentionOutputBias
        | ModelPart::HeadNorms
        | ModelPart::JointHeadNorms
        | ModelPart::SlidingWindows
        | ModelPart::AttentionSoftcap
        | ModelPart::NoPreNorms
        | ModelPart::PostNorms
        | ModelPart::Silu
        | ModelPart::Gelu
        | ModelPart::FeedForwardBiases => true,
    }
}

/// The parts of the layer `index`, if GPUs compute all of them.
///
/// # Errors
/// [`EngineError::NotOnGpu`] names one that they do not.
pub(super) fn computed(index: usize, layer: &Layer) -> Result<Parts<'_>, EngineError> {
    let refused = |part| EngineError::NotOnGpu { layer: index, part };
    let parts = layer.spec.parts();
    if let Some(part) = parts.into_iter().find(|&part| !is_computed(part)) {
        return Err(refused(part));
    }
    let gate = match layer.spec.feed_forward.activation {
        ActivationFunction::Silu => Gate::Silu,
        ActivationFunction::Gelu => Gate::Gelu,
        ActivationFunction::ClampedSwiglu => return Err(refused(ModelPart::ClampedSwiglu)),
    };
    let attention = match &layer.projections {
        Projections::Direct(direct) => direct,
        Projections::Latent(_) => return Err(refused(ModelPart::LatentAttention)),
    };
    match &layer.dense {
        Some(mlp) => Ok(Parts {
            attention,
            mlp,
            gate,
        }),
        None => Err(refused(ModelPart::Experts)),
    }
}
