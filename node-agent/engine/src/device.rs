//! Which layers of a window run on which device. The plan chooses; this only carries what it chose.

use crate::gpu::Gpu;

/// The devices of a window's layers: the last ones on a GPU, the others on the CPU.
#[derive(Debug, Clone, Default)]
pub struct LayerDevices {
    gpu: Option<OnGpu>,
}

#[derive(Debug, Clone)]
pub(crate) struct OnGpu {
    pub gpu: Gpu,
    pub layers: usize,
    /// Positions of all sequences, for which memory is set aside.
    pub kv_positions: usize,
}

impl LayerDevices {
    /// Every layer on the CPU.
    pub fn cpu() -> LayerDevices {
        LayerDevices { gpu: None }
    }

    /// The last `gpu_layers` layers of the window (all, if it has fewer) on `gpu`.
    pub fn last_on(gpu_layers: usize, gpu: Gpu) -> LayerDevices {
        let on_gpu = OnGpu {
            gpu,
            layers: gpu_layers,
            kv_positions: 0,
        };
        LayerDevices { gpu: Some(on_gpu) }
    }

    /// With memory on the GPU for so many positions of all sequences, taken at once rather than as they grow.
    #[must_use]
    pub fn with_kv_positions(self, kv_positions: usize) -> LayerDevices {
        let gpu = self.gpu.map(|on_gpu| OnGpu {
            kv_positions,
            ..on_gpu
        });
        LayerDevices { gpu }
    }

    /// What of a window's `layers` runs on a GPU, if anything.
    pub(crate) fn on_gpu(&self, layers: usize) -> Option<OnGpu> {
        let on_gpu = self.gpu.as_ref()?;
        let layers = on_gpu.layers.min(layers);
        (layers > 0).then(|| OnGpu {
            layers,
            ..on_gpu.clone()
        })
    }
}
