//! Why a token cannot be sampled.

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    #[error("{parameter}: expected {expected}, found {found}")]
    Range {
        parameter: &'static str,
        expected: &'static str,
        found: f32,
    },

    #[error("token {token} has a bias or occurred: expected one of the vocabulary of {vocabulary}")]
    NoSuchToken { token: u32, vocabulary: usize },

    #[error(
        "the model's logit of token {token}: expected a number below infinity, found {found}: its weights are damaged or out of their range"
    )]
    Logit { token: u32, found: f32 },

    #[error("the model's logits rule out every token")]
    NothingPossible,

    #[error("the answer cannot go on by its grammar: {problem}")]
    Grammar { problem: String },
}

impl SamplingError {
    /// Whether the logits cannot be used, whatever is asked for.
    pub fn is_of_logits(&self) -> bool {
        matches!(self, Self::Logit { .. } | Self::NothingPossible)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grammar_that_allows_nothing_is_no_fault_of_logits() {
        let grammar = SamplingError::Grammar {
            problem: "too many states".to_owned(),
        };
        let logit = SamplingError::Logit {
            token: 1,
            found: f32::NAN,
        };
        assert!(!grammar.is_of_logits());
        assert!(logit.is_of_logits() && SamplingError::NothingPossible.is_of_logits());
    }
}
