//! What can go wrong on a GPU, in words that say what to do.

use ash::vk;

/// Why a GPU cannot be used, or not any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VulkanError {
    #[error(
        "this machine has no Vulkan loader: install it (Debian: libvulkan1) and the driver of the GPU (AMD, Intel: mesa-vulkan-drivers)"
    )]
    NoLoader { source: ash::LoadingError },

    #[error(
        "Vulkan's loader finds no driver: install the GPU's (Debian: mesa-vulkan-drivers for AMD and Intel, NVIDIA's own for NVIDIA)"
    )]
    NoDriver { source: vk::Result },

    #[error(
        "the GPU's memory is full: {bytes} bytes more were refused ({available} are said to be available)"
    )]
    OutOfMemory { bytes: u64, available: u64 },

    #[error(
        "the GPU took longer than {seconds} s for a pass, and is given up; restart this process, or run without it"
    )]
    Hung { seconds: u64 },

    #[error(
        "the GPU was lost (its driver was reset, or it was removed); restart this process, or run without it"
    )]
    Lost,

    #[error("the GPU's driver cannot {action}")]
    Driver {
        action: &'static str,
        source: vk::Result,
    },

    #[error("a GPU has no kernels for {what}")]
    NoKernel { what: String },
}

impl VulkanError {
    /// What became of `action`.
    pub(crate) fn of(action: &'static str, source: vk::Result) -> Self {
        match source {
            vk::Result::ERROR_DEVICE_LOST => VulkanError::Lost,
            source => VulkanError::Driver { action, source },
        }
    }
}
