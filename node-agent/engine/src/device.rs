//! Which layers of a window run on which device, and the facts about a GPU. The plan chooses the layers; this
//! only carries both.

use crate::gpu::Gpu;

/// The devices of a window's layers: the last ones on a GPU, the others on the CPU.
#[derive(Debug, Clone, Default)]
pub struct LayerDevices {
    gpu: Option<(usize, Gpu)>,
}

/// What a GPU says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    pub name: String,
    /// Shares its memory with the CPU.
    pub unified_memory: bool,
    pub total_bytes: u64,
    /// CUDA: free. Metal: what is left of the recommended working set.
    pub available_bytes: u64,
}

impl LayerDevices {
    /// Every layer on the CPU.
    pub fn cpu() -> LayerDevices {
        LayerDevices { gpu: None }
    }

    /// The last `gpu_layers` layers of the window (all, if it has fewer) on `gpu`.
    pub fn last_on(gpu_layers: usize, gpu: Gpu) -> LayerDevices {
        LayerDevices {
            gpu: Some((gpu_layers, gpu)),
        }
    }

    /// How many of a window's `layers` run on a GPU, and on which.
    pub(crate) fn gpu_layers(&self, layers: usize) -> Option<(usize, &Gpu)> {
        let (gpu_layers, gpu) = self.gpu.as_ref()?;
        let gpu_layers = (*gpu_layers).min(layers);
        (gpu_layers > 0).then_some((gpu_layers, gpu))
    }
}
