//! Which layers of a window run on which device, and when. The plan chooses; this only carries what it chose.

use crate::gpu::Gpu;

/// The devices of a window's layers: the last ones on GPUs, one after the other, the others on the CPU, or for passes of many rows on a GPU, too.
#[derive(Debug, Clone, Default)]
pub struct LayerDevices {
    /// In the order of their layers.
    gpus: Vec<OnGpu>,
    many_rows: Option<ManyRows>,
    /// Of a pass, where that is said.
    most_rows: usize,
}

/// Rows of a pass at most, where nobody says that there may be more.
const USUAL_ROWS: usize = 256;

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
    pub kv_positions: KvPositions,
}

/// Positions of all sequences, for which memory is set aside.
#[derive(Debug, Clone, Copy, Default)]
pub struct KvPositions {
    /// In each layer that sees all positions.
    pub full: usize,
    /// In each layer with a window.
    pub windowed: usize,
}

impl KvPositions {
    /// Those of a layer with this window, if it has one.
    pub(crate) fn of(self, window: Option<usize>) -> usize {
        match window {
            Some(_) => self.windowed,
            None => self.full,
        }
    }
}

impl LayerDevices {
    /// Every layer on the CPU.
    pub fn cpu() -> LayerDevices {
        LayerDevices::default()
    }

    /// The last `gpu_layers` layers of the window (all, if it has fewer) on `gpu`.
    pub fn last_on(gpu_layers: usize, gpu: Gpu) -> LayerDevices {
        Self::last_on_each([(gpu, gpu_layers)])
    }

    /// The last layers of the window on GPUs: so many on each, in the order of the layers. Where the window has fewer, the first GPUs have fewer.
    pub fn last_on_each(gpus: impl IntoIterator<Item = (Gpu, usize)>) -> LayerDevices {
        let gpus = gpus.into_iter().map(|(gpu, layers)| OnGpu {
            gpu,
            layers,
            kv_positions: KvPositions::default(),
        });
        LayerDevices {
            gpus: gpus.collect(),
            ..LayerDevices::default()
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

    /// With memory on the GPUs for so many positions, taken at once rather than as sequences grow.
    #[must_use]
    pub fn with_kv_positions(mut self, kv_positions: KvPositions) -> LayerDevices {
        for on_gpu in &mut self.gpus {
            on_gpu.kv_positions = kv_positions;
        }
        self
    }

    /// With passes of `rows` rows at most. More than 256 may need kernels that no smaller pass does: these are compared with the processor, too.
    #[must_use]
    pub fn with_passes_of(self, rows: usize) -> LayerDevices {
        LayerDevices {
            most_rows: rows,
            ..self
        }
    }

    pub(crate) fn most_rows(&self) -> usize {
        self.most_rows.max(USUAL_ROWS)
    }

    pub(crate) fn many_rows(&self) -> Option<&ManyRows> {
        self.many_rows.as_ref()
    }

    /// What of a window's `layers` runs on GPUs, in the order of the layers.
    pub(crate) fn on_gpus(&self, layers: usize) -> Vec<OnGpu> {
        let mut left = layers;
        let from_behind = self.gpus.iter().rev().map(|on_gpu| {
            let layers = on_gpu.layers.min(left);
            left -= layers;
            OnGpu {
                layers,
                ..on_gpu.clone()
            }
        });
        let mut on_gpus: Vec<OnGpu> = from_behind.filter(|on_gpu| on_gpu.layers > 0).collect();
        on_gpus.reverse();
        on_gpus
    }
}
