//! Which layers of a window run where. The plan decides; this only carries the decision.

/// The devices of a window's layers.
#[derive(Debug, Clone, Default)]
pub struct LayerDevices {}

impl LayerDevices {
    /// Every layer on the CPU.
    pub fn cpu() -> LayerDevices {
        LayerDevices::default()
    }
}
