//! Which layers of a window run on which device, and when. The plan chooses; this only carries what it chose.

use crate::gpu::Gpu;

/// The devices of a window's layers: the last ones on a GPU, the others on the CPU, or for passes of many rows on a GPU, too.
#[derive(Debug, Clone, Default)]
pub struct LayerDevices {
    gpu: Option<OnGpu>,
    many_rows: Option<ManyRows>,
}

/// Who computes passes of many rows through the layers on the CPU.
#[derive(Debug, Clone)]
pub(crate) struct ManyRows {
    pub gpu: Gpu,
    /// The fewest.
    pub rows: usize,
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
        LayerDevices::default()
    }

    /// The last `gpu_layers` layers of the window (all, if it has fewer) on `gpu`.
    pub fn last_on(gpu_layers: usize, gpu: Gpu) -> LayerDevices {
        let on_gpu = OnGpu {
            gpu,
            layers: gpu_layers,
            kv_positions: 0,
        };
        LayerDevices {
            gpu: Some(on_gpu),
            many_rows: None,
        }
    }

    /// With passes of at least `rows` rows on `gpu` in the layers on the CPU, too: their weights are copied there for the pass.
    #[must_use]
    pub fn with_many_rows_on(self, gpu: Gpu, rows: usize) -> LayerDevices {
        LayerDevices {
            many_rows: Some(ManyRows { gpu, rows }),
            ..self
        }
    }

    /// With memory on the GPU for so many positions of all sequences, taken at once rather than as they grow.
    #[must_use]
    pub fn with_kv_positions(self, kv_positions: usize) -> LayerDevices {
        let gpu = self.gpu.map(|on_gpu| OnGpu {
            kv_positions,
            ..on_gpu
        });
        LayerDevices { gpu, ..self }
    }

    pub(crate) fn many_rows(&self) -> Option<&ManyRows> {
        self.many_rows.as_ref()
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
