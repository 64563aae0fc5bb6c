//! The first step of a pass, on rank 0: tokens to activations.

use crate::error::EngineError;
use crate::kernels;
use crate::mapped_weights::MappedTensor;

/// The token embedding: one row of the matrix for each token.
pub struct Embedding {
    tokens: MappedTensor,
}

impl Embedding {
    pub(crate) fn new(tokens: MappedTensor) -> Embedding {
        Embedding { tokens }
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
        }
        self.tokens.check()
    }
}
