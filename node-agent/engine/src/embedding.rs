//! The first step of a pass, on rank 0: tokens to activations.

use crate::error::EngineError;
use crate::kernels;
use crate::mapped_weights::MappedTensor;
use crate::model::Model;
use crate::residency::Residency;

/// The token embedding: one row of the matrix for each token.
pub struct Embedding {
    tokens: MappedTensor,
    scale: f32,
    residency: Residency,
}

impl Embedding {
    /// Its rows are read as `residency` says.
    ///
    /// # Errors
    /// None that [`Model::open`] does not report first.
    pub fn open(model: &Model, residency: &Residency) -> Result<Embedding, EngineError> {
        Ok(Embedding {
            tokens: model.matrix(&model.spec().embedding)?,
            scale: model.spec().embedding_scale,
            residency: residency.clone(),
        })
    }

    /// Writes the embeddings of `tokens` to `out`: tokens x hidden, row-major.
    ///
    /// # Errors
    /// [`EngineError::Token`] for a token outside the vocabulary, [`EngineError::Length`] for an `out` of another size,
    /// [`EngineError::ReadWeights`] or [`EngineError::Damaged`] when the file cannot be read.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) -> Result<(), EngineError> {
        let matrix = self.tokens.matrix();
        let (vocabulary, hidden) = (matrix.rows(), matrix.cols());
        if out.len() != tokens.len() * hidden {
            return Err(EngineError::Length {
                what: "the embeddings (tokens x hidden)",
                expected: tokens.len() * hidden,
                found: out.len(),
            });
        }
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(EngineError::Token { token, vocabulary });
        }
        let rows = tokens.iter().map(|token| *token as usize);
        self.residency.each_row(&self.tokens, rows, |place, row| {
            let out = &mut out[place * hidden..][..hidden];
            kernels::dequantize_row(row, 0, out);
            if self.scale != 1.0 {
                out.iter_mut().for_each(|number| *number *= self.scale);
            }
        })
    }
}
