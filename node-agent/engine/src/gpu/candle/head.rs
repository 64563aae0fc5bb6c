//! The output norm and the output head on a GPU: the last step of a pass there.

use candle_core::{Result, Tensor};
use candle_nn::ops;

use super::open::CandleGpu;
use super::products::Weights;
use crate::error::EngineError;
use crate::gpu::backend::{DeviceHead, HeadWeights, error};

pub(super) struct CandleHead {
    gpu: CandleGpu,
    norm: Tensor,
    norm_epsilon: f32,
    matrix: Weights,
    hidden: usize,
}

impl CandleHead {
    /// Copies the weights to the GPU.
    pub fn load(gpu: &CandleGpu, weights: HeadWeights<'_>) -> Result<CandleHead> {
        Ok(CandleHead {
            gpu: gpu.clone(),
            norm: gpu.vector(weights.norm)?,
            norm_epsilon: weights.norm_epsilon,
            matrix: gpu.matrix(weights.matrix)?,
            hidden: weights.matrix.cols(),
        })
    }

    fn pass(&self, hidden: &[f32]) -> Result<Vec<f32>> {
        let shape = (hidden.len() / self.hidden, self.hidden);
        let x = Tensor::from_slice(hidden, shape, &self.gpu.device)?;
        let normed = ops::rms_norm(&x, &self.norm, self.norm_epsilon)?;
        self.matrix.forward(&normed)?.flatten_all()?.to_vec1()
    }
}

impl DeviceHead for CandleHead {
    fn logits(&self, hidden: &[f32], logits: &mut [f32]) -> std::result::Result<(), EngineError> {
        let found = self.pass(hidden);
        let found = found.map_err(|source| error("compute its output head", source))?;
        logits.copy_from_slice(&found);
        Ok(())
    }
}
