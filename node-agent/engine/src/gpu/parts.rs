//! Which parts of models GPUs compute, and which they leave to the processor. A NodeProfile says the same, so that nobody plans layers for a
//! GPU that will refuse them.

use prima_model::ModelPart;

use super::facts::GpuApi;
use crate::error::EngineError;
use crate::layer::Layer;

impl GpuApi {
    /// Whether layers of models with this part may be on such a GPU. Every part is named here, so that a new one is not forgotten.
    pub fn computes(self, part: ModelPart) -> bool {
        match part {
            // (candle's GPUs leave these to the processor.)
            ModelPart::LatentAttention
            | ModelPart::LatentQueries
            | ModelPart::AttentionSinks
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
            | ModelPart::ExpertGroups => self == GpuApi::Vulkan,
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
}

/// Whether GPUs of this kind compute all parts of the layer `index`.
///
/// # Errors
/// [`EngineError::NotOnGpu`] names one that they do not.
pub(super) fn check(api: GpuApi, index: usize, layer: &Layer) -> Result<(), EngineError> {
    let parts = layer.spec.parts();
    match parts.into_iter().find(|&part| !api.computes(part)) {
        None => Ok(()),
        Some(part) => Err(EngineError::NotOnGpu { layer: index, part }),
    }
}
