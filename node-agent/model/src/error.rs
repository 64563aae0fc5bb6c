//! Why a model is refused. Messages name the file and the key or tensor at fault.

use prima_gguf::{GgmlType, GgufError};

/// A model that prima does not compute, or a header that describes none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    #[error("cannot read the model's configuration")]
    Metadata(#[from] GgufError),

    #[error("{file}: general.architecture is {found:?}, which prima does not run; it runs {known}")]
    UnknownArchitecture {
        file: String,
        found: String,
        known: String,
    },

    #[error("{file}: metadata key {key:?}: expected {expected}, found {found}")]
    Key {
        file: String,
        key: String,
        expected: String,
        found: String,
    },

    #[error("{file}: tensor {tensor:?} is missing; architecture {architecture} needs it")]
    MissingTensor {
        file: String,
        tensor: String,
        architecture: &'static str,
    },

    #[error(
        "{file}: tensor {tensor:?} is not one that architecture {architecture} computes with here; leaving it out would give wrong answers"
    )]
    UnknownTensor {
        file: String,
        tensor: String,
        architecture: &'static str,
    },

    #[error("{file}: tensor {tensor:?}: expected shape {expected:?}, found {found:?}")]
    Shape {
        file: String,
        tensor: String,
        expected: Vec<u64>,
        found: Vec<u64>,
    },

    #[error("{file}: tensor {tensor:?}: expected {expected}, found {found}")]
    Format {
        file: String,
        tensor: String,
        expected: &'static str,
        found: GgmlType,
    },
}
