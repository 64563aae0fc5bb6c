//! Why the engine refuses a model or a call. Messages name the file and the tensor, key or argument at fault.

use std::ops::Range;
use std::path::PathBuf;

use prima_gguf::GgufError;
use prima_model::{ModelError, ModelPart};
use prima_vulkan::VulkanError;

use crate::kernels;

/// What the engine could not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    #[error("cannot open model file {path}")]
    Open {
        path: PathBuf,
        source: std::io::Error,
    },

    #[error("cannot map model file {path} into memory")]
    Map {
        path: PathBuf,
        source: std::io::Error,
    },

    #[error("cannot tell the system how the map of a file will be read")]
    Advise { source: std::io::Error },

    #[error("cannot read the header of the model file")]
    Header { source: GgufError },

    #[error(transparent)]
    Model(#[from] ModelError),

    #[error(
        "{file}: tensor {tensor:?}: expected {expected}, found {found}; in a sparse file, its bytes are not there yet"
    )]
    TensorValue {
        file: String,
        tensor: String,
        expected: &'static str,
        found: f32,
    },

    #[error("{file}: tensor {tensor:?} cannot be used")]
    Tensor {
        file: String,
        tensor: String,
        source: kernels::MatrixError,
    },

    #[error(
        "cannot make a window of layers {}..{}: the model has layers 0..{layers}, and a window is not empty",
        window.start, window.end
    )]
    Window { window: Range<usize>, layers: usize },

    #[error("cannot start reading weights ahead from {}", path.display())]
    ReadAhead {
        path: PathBuf,
        source: std::io::Error,
    },

    #[error(
        "cannot read weights from {} at byte {offset}; is the disk at fault, or has the file changed?",
        path.display()
    )]
    ReadWeights {
        path: PathBuf,
        offset: u64,
        source: std::io::Error,
    },

    #[error(
        "a part of model file {} could not be read: the disk failed, or the file was cut; restart this agent with a whole file",
        path.display()
    )]
    Damaged { path: PathBuf },

    #[error("cannot start the compute threads")]
    Threads { source: kernels::ThreadPoolError },

    #[error("cannot choose the CPU's kernels")]
    KernelLevel { source: kernels::IsaLevelError },

    #[error("no GPU can be used: {reason}")]
    NoGpu { reason: String },

    /// `gpu`: as a plan names it.
    #[error("the GPU {gpu} is not there, or cannot be used")]
    NotThere { gpu: String },

    #[error(
        "{variable} is {found:?}, expected `none`, `software` (Vulkan on the processor, for tests), or nothing for the GPUs that there are"
    )]
    GpuChoice {
        variable: &'static str,
        found: String,
    },

    #[error("the GPU cannot {action}")]
    Gpu {
        action: &'static str,
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// Of several GPUs.
    #[error("{gpu}")]
    OneGpu {
        gpu: String,
        source: Box<EngineError>,
    },

    #[error(
        "layer {layer} has {part}, which prima does not compute on GPUs: plan it for the processor"
    )]
    NotOnGpu { layer: usize, part: ModelPart },

    #[error("cannot embed token {token}: the vocabulary has {vocabulary}")]
    Token { token: u32, vocabulary: usize },

    #[error("{what}: expected {expected} numbers, found {found}")]
    Length {
        what: &'static str,
        expected: usize,
        found: usize,
    },

    #[error(
        "batch entry {entry}: its KV cache does not cover layers {}..{} of this model on the devices of this window",
        window.start, window.end
    )]
    KvLayers { entry: usize, window: Range<usize> },

    #[error(
        "batch entry {entry}: rows begin at position {first_position}, but layer {layer} holds {held} positions; truncate the cache first, or send what is missing"
    )]
    Position {
        entry: usize,
        layer: usize,
        first_position: usize,
        held: usize,
    },

    #[error(
        "batch entry {entry}: positions {first_position}..{end} exceed the context length of {context_length}"
    )]
    ContextFull {
        entry: usize,
        first_position: usize,
        end: usize,
        context_length: usize,
    },
}

impl EngineError {
    /// Whether nothing more can be computed with what was opened, the file or the GPU. A read that failed may work the next time.
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::Damaged { .. }) || self.is_without_gpu()
    }

    /// Whether there is no GPU, or no longer one that answers. One whose memory is full is there; and if one that a plan names is not, nothing is
    /// said of the others.
    pub fn is_without_gpu(&self) -> bool {
        match self {
            Self::NoGpu { .. } => true,
            Self::OneGpu { source, .. } => source.is_without_gpu(),
            _ => matches!(
                self.of_vulkan(),
                Some(VulkanError::Hung { .. } | VulkanError::Lost)
            ),
        }
    }

    /// Whether only memory was lacking for the GPU, which may come free: something else has it, such as a game or a ring that ends.
    pub fn is_full_gpu(&self) -> bool {
        matches!(
            self.of_vulkan(),
            Some(VulkanError::OutOfMemory { .. } | VulkanError::Full { .. })
        )
    }

    fn of_vulkan(&self) -> Option<&VulkanError> {
        match self {
            Self::OneGpu { source, .. } => source.of_vulkan(),
            Self::Gpu { source, .. } => source.downcast_ref(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_gpu_is_there_and_a_hung_one_is_not() {
        let of = |source: VulkanError| EngineError::Gpu {
            action: "be opened",
            source: source.into(),
        };
        let one = |error: EngineError| EngineError::OneGpu {
            gpu: "the second".to_owned(),
            source: Box::new(error),
        };
        let says = |error: EngineError| (error.is_full_gpu(), error.is_without_gpu());
        let (bytes, available) = (2, 1);
        let full = VulkanError::OutOfMemory { bytes, available };
        assert_eq!(says(of(full)), (true, false));
        assert_eq!(says(of(VulkanError::Hung { seconds: 15 })), (false, true));
        assert_eq!(says(of(VulkanError::Lost)), (false, true));
        let reason = "there is none".to_owned();
        assert_eq!(says(EngineError::NoGpu { reason }), (false, true));
        let gpu = "0000:03:00.0".to_owned();
        assert_eq!(says(EngineError::NotThere { gpu }), (false, false));
        let full = VulkanError::OutOfMemory { bytes, available };
        assert_eq!(says(one(of(full))), (true, false));
        assert_eq!(says(one(of(VulkanError::Lost))), (false, true));
    }
}
