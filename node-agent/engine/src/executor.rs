//! What the two kinds of executors, `cpu` and `gpu`, have in common. Each loads the layers that a window gives it, computes them in its own
//! way, and keeps their keys and values where it computes.

use std::ops::Range;

use crate::batch::Sequence;
use crate::cpu::Compute;
use crate::error::EngineError;
use crate::kv_cache::LayerKv;

/// An executor of layers that the processor has, too: it takes passes of many rows.
pub(crate) trait ManyRowsExecutor: Executor {
    /// Whether it gains by taking a batch rather than leaving it to the processor, which it does from `rows` rows of sequences that begin on; and
    /// whether it has room for keys and values.
    fn takes(&self, batch: &[Sequence<'_>], rows: usize) -> bool;
}

/// Runs some consecutive layers of a window.
pub(crate) trait Executor: Send + Sync {
    /// The places of its layers in the window.
    fn places(&self) -> Range<usize>;

    /// Whether it can go on with what this cache of a layer holds.
    fn can_continue(&self, kv: &LayerKv) -> bool;

    /// Runs the rows of `batch` through its layers and adds their keys and values to the caches. `activation` is rows x hidden,
    /// row-major, sequence after sequence; it is updated in place. After a failure some layers may hold the new rows.
    ///
    /// # Errors
    /// Weights that cannot be read any more; a failure of the device.
    fn forward(
        &self,
        compute: &Compute,
        activation: &mut [f32],
        batch: &mut [Sequence<'_>],
    ) -> Result<(), EngineError>;
}
