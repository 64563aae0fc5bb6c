//! The first step of a pass, on rank 0: tokens to activations.

use crate::error::EngineError;
use crate::kernels;
use crate::mapped_weights::MappedTensor;
use crate::model::Model;

/// The token embedding: one row of the matrix for each token.
pub struct Embedding {
    tokens: MappedTensor,
    scale: f32,
}

impl Embedding {
    /// # Errors
    /// None that [`Model::open`] does not report first.
    pub fn open(model: &Model) -> Result<Embedding, EngineError> {
        Ok(Embedding {
            tokens: model.matrix(&model.spec().embedding)?,
            scale: model.spec().embedding_scale,
        })
    }

    /// Writes the embeddings of `tokens` to `out`: tokens x hidden, row-major.
    ///
    /// # Errors
    /// [`EngineError::Token`] for a token outside the vocabulary, [`EngineError::Length`] for an `out` of another size,
    /// [`EngineError::Damaged`] when the file cannot be read any more.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) -> Result<(), EngineError> {
        let matrix = self.tokens.matrix();
        if out.len() != tokens.len() * matrix.cols() {
            return Err(EngineError::Length {
                what: "the embeddings (tokens x hidden)",
                expected: tokens.len() * matrix.cols(),
                found: out.len(),
            });
        }
        for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(matrix.cols())) {
            if token as usize >= matrix.rows() {
                return Err(EngineError::Token {
                    token,
                    vocabulary: matrix.rows(),
                });
            }
            kernels::dequantize_row(matrix, token as usize, out);
            if self.scale != 1.0 {
                out.iter_mut().for_each(|number| *number *= self.scale);
            }
        }
        self.tokens.check()
    }
}
