//! The last step of a pass, on rank 0: activations to logits, or to the states that stand for a text, or to its scores.

use crate::cpu::Compute;
use crate::error::EngineError;
use crate::gpu::{DeviceHead, Gpu, HeadWeights};
use crate::kernels;
use crate::mapped_weights::MappedTensor;
use crate::model::Model;
use crate::residency::Residency;

/// The output norm and the output head.
pub struct OutputHead {
    norm: Vec<f32>,
    head: MappedTensor,
    /// Both on a GPU, if logits are made there.
    on_gpu: Option<Box<dyn DeviceHead>>,
    classifier: Option<MappedTensor>,
    norm_epsilon: f32,
    scale: f32,
    softcap: Option<f32>,
    residency: Residency,
}

impl OutputHead {
    /// The head's weights are where `residency` has them.
    ///
    /// # Errors
    /// [`EngineError::TensorValue`] when the norm is not in the bytes of a sparse file.
    pub fn open(model: &Model, residency: &Residency) -> Result<OutputHead, EngineError> {
        let spec = model.spec();
        Ok(OutputHead {
            norm: model.norm(&spec.output_norm)?,
            head: model.matrix(&spec.output_head)?,
            on_gpu: None,
            classifier: match &spec.classifier {
                Some(classifier) => Some(model.matrix(classifier)?),
                None => None,
            },
            norm_epsilon: spec.norm_epsilon,
            scale: spec.logit_scale,
            softcap: spec.logit_softcap,
            residency: residency.clone(),
        })
    }

    /// Copies norm and head to `gpu`, where logits are made from then on. States and scores, which few ask for, stay the processor's.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); [`EngineError::Gpu`]: no memory, no kernels for the head's format, or wrong results.
    pub fn open_on(
        gpu: &Gpu,
        model: &Model,
        residency: &Residency,
    ) -> Result<OutputHead, EngineError> {
        let opened = OutputHead::open(model, residency)?;
        let on_gpu = gpu.load_head(HeadWeights {
            norm: &opened.norm,
            norm_epsilon: opened.norm_epsilon,
            matrix: opened.head.matrix(),
        })?;
        opened.head.check()?;
        Ok(OutputHead {
            on_gpu: Some(on_gpu),
            ..opened
        })
    }

    /// Replaces `out` with the logits of the activations `hidden` (n x hidden, row-major): n x vocabulary.
    ///
    /// # Errors
    /// [`EngineError::Length`] when `hidden` is not whole rows, [`EngineError::ReadWeights`] when streamed weights cannot be read,
    /// [`EngineError::Gpu`].
    pub fn logits(
        &self,
        compute: &Compute,
        hidden: &[f32],
        out: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        let rows = self.rows(hidden)?;
        out.resize(rows * self.head.matrix().rows(), 0.0);
        match &self.on_gpu {
            Some(on_gpu) => on_gpu.logits(hidden, out)?,
            None => {
                let mut scratch = compute.scratch();
                let normed = scratch.normed.take(hidden.len());
                kernels::rms_norm(
                    compute.pool(),
                    hidden,
                    &self.norm,
                    self.norm_epsilon,
                    normed,
                );
                self.residency
                    .matmul(compute.pool(), normed, rows, [(&self.head, &mut *out)])?;
            }
        }
        if self.scale != 1.0 {
            kernels::scale(compute.pool(), out, self.scale);
        }
        if let Some(softcap) = self.softcap {
            kernels::softcap(compute.pool(), out, softcap);
        }
        compute.part_done();
        Ok(())
    }

    /// The activations `hidden` (n x hidden, row-major) after the output norm: what the logits would be made of.
    ///
    /// # Errors
    /// [`EngineError::Length`] when `hidden` is not whole rows.
    pub fn states(&self, compute: &Compute, hidden: &[f32]) -> Result<Vec<f32>, EngineError> {
        self.rows(hidden)?;
        let mut states = vec![0.0; hidden.len()];
        kernels::rms_norm(
            compute.pool(),
            hidden,
            &self.norm,
            self.norm_epsilon,
            &mut states,
        );
        compute.part_done();
        Ok(states)
    }

    /// The scores of the activations `hidden` (n x hidden, row-major): n x scores, none where the model has no classifier.
    ///
    /// # Errors
    /// As [`OutputHead::logits`].
    pub fn scores(&self, compute: &Compute, hidden: &[f32]) -> Result<Vec<f32>, EngineError> {
        let Some(classifier) = &self.classifier else {
            return Ok(Vec::new());
        };
        let states = self.states(compute, hidden)?;
        let rows = self.rows(hidden)?;
        let mut scores = vec![0.0; rows * classifier.matrix().rows()];
        self.residency.matmul(
            compute.pool(),
            &states,
            rows,
            [(classifier, scores.as_mut_slice())],
        )?;
        Ok(scores)
    }

    fn rows(&self, hidden: &[f32]) -> Result<usize, EngineError> {
        let rows = hidden.len() / self.norm.len();
        match hidden.len() == rows * self.norm.len() {
            true => Ok(rows),
            false => Err(EngineError::Length {
                what: "the activations before the output head (rows x hidden)",
                expected: (rows + 1) * self.norm.len(),
                found: hidden.len(),
            }),
        }
    }
}
