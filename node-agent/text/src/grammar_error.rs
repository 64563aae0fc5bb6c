//! Why an answer cannot be held to a form.

/// Why there is no grammar.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    #[error(
        "the vocabulary has no token that ends an answer, so no answer could be held to a grammar"
    )]
    NoEnd,

    #[error("cannot prepare the vocabulary for grammars: {problem}")]
    Vocabulary { problem: String },

    #[error("expected at most {expected} {what}, found {found}")]
    Size {
        expected: usize,
        what: &'static str,
        found: usize,
    },

    #[error("{problem}")]
    Grammar { problem: String },
}
