//! Which layers of a window run where. The plan decides; this only carries the decision.

use crate::accelerator::Accelerator;

/// The devices of a window's layers: the last ones on an accelerator, the others on the CPU.
#[derive(Debug, Clone, Default)]
pub struct LayerDevices {
    gpu: Option<(usize, Accelerator)>,
}

impl LayerDevices {
    /// Every layer on the CPU.
    pub fn cpu() -> LayerDevices {
        LayerDevices { gpu: None }
    }

    /// The last `gpu_layers` layers of the window (all, where it has no more) on `accelerator`.
    pub fn last_on(gpu_layers: usize, accelerator: Accelerator) -> LayerDevices {
        LayerDevices {
            gpu: Some((gpu_layers, accelerator)),
        }
    }

    /// How many of a window's `layers` run on an accelerator, and on which.
    pub(crate) fn gpu_layers(&self, layers: usize) -> Option<(usize, &Accelerator)> {
        let (gpu_layers, accelerator) = self.gpu.as_ref()?;
        let gpu_layers = (*gpu_layers).min(layers);
        (gpu_layers > 0).then_some((gpu_layers, accelerator))
    }
}
