//! Layers that the processor computes in passes of few rows, and a GPU in those of many. Keys and values are where the processor has them.

use std::ops::Range;

use crate::batch::Sequence;
use crate::cpu::{Compute, CpuLayers};
use crate::error::EngineError;
use crate::executor::{Executor, ManyRowsExecutor};
use crate::kv_cache::LayerKv;

pub(crate) struct ByRows {
    pub few: CpuLayers,
    pub many: Box<dyn ManyRowsExecutor>,
    /// The fewest rows of a pass that count as many.
    pub from: usize,
}

impl Executor for ByRows {
    fn places(&self) -> Range<usize> {
        self.few.places()
    }

    fn can_continue(&self, kv: &LayerKv) -> bool {
        self.few.can_continue(kv)
    }

    fn forward(
        &self,
        compute: &Compute,
        activation: &mut [f32],
        batch: &mut [Sequence<'_>],
    ) -> Result<(), EngineError> {
        match self.many.takes(batch, self.from) {
            true => self.many.forward(compute, activation, batch),
            false => self.few.forward(compute, activation, batch),
        }
    }
}
