//! Layers that the processor computes in passes of few rows, and a GPU in those of many. Keys and values are where the processor has them.

use std::ops::Range;

use crate::batch::Sequence;
use crate::cpu::{Compute, CpuLayers};
use crate::error::EngineError;
use crate::executor::Executor;
use crate::kv_cache::LayerKv;

pub(crate) struct ByRows {
    pub few: CpuLayers,
    pub many: Box<dyn Executor>,
    /// The fewest rows of a pass that counts as many.
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
        let rows: usize = batch.iter().map(|sequence| sequence.rows).sum();
        match rows < self.from {
            true => self.few.forward(compute, activation, batch),
            false => self.many.forward(compute, activation, batch),
        }
    }
}
