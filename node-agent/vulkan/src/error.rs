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

    #[error("the GPU's driver cannot {action}: its memory, or the machine's, is full")]
    Full {
        action: &'static str,
        source: vk::Result,
    },

    #[error(
        "the GPU took longer than {seconds} s for a part of a pass, and is given up: only a new process can try it again; the system's log (dmesg) \
         may say why"
    )]
    Hung { seconds: u64 },

    #[error(
        "the GPU was lost (its driver was reset, or it was removed): only a new process can try it again; the system's log (dmesg) may say why"
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
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
                VulkanError::Full { action, source }
            }
            source => VulkanError::Driver { action, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_full_is_no_refusal() {
        let of = |result| VulkanError::of("open the GPU", result);
        for full in [
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY,
            vk::Result::ERROR_OUT_OF_HOST_MEMORY,
        ] {
            assert!(matches!(of(full), VulkanError::Full { .. }), "{full:?}");
        }
        let refused = of(vk::Result::ERROR_INITIALIZATION_FAILED);
        assert!(matches!(refused, VulkanError::Driver { .. }));
    }
}
