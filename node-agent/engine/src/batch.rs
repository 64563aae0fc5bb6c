//! What a pass is given: rows of several sequences, each with its KV cache.

use std::ops::Range;

use crate::error::EngineError;
use crate::kv_cache::{KvCache, LayerKv};

/// The rows of one sequence in a batch.
pub struct BatchEntry<'a> {
    /// The sequence's cache; it must cover the window's layers.
    pub kv: &'a mut KvCache,
    /// Position of the first row: what the cache already holds in the window's layers.
    pub first_position: usize,
    /// Consecutive positions.
    pub rows: usize,
}

/// A checked batch entry.
pub(crate) struct Sequence<'a> {
    /// The caches of the window's layers.
    pub layers: &'a mut [LayerKv],
    pub context_length: usize,
    pub first_position: usize,
    pub rows: usize,
}

impl Sequence<'_> {
    pub fn check(&self, entry: usize) -> Result<(), EngineError> {
        let first_position = self.first_position;
        let end = first_position.saturating_add(self.rows);
        if end > self.context_length {
            return Err(EngineError::ContextFull {
                entry,
                first_position,
                end,
                context_length: self.context_length,
            });
        }
        match self.layers.iter().find(|kv| kv.len() != first_position) {
            None => Ok(()),
            Some(kv) => Err(EngineError::Position {
                entry,
                layer: kv.layer(),
                first_position,
                held: kv.len(),
            }),
        }
    }

    /// Takes back what a failed pass has stored.
    pub fn undo(&mut self) {
        for layer in &mut *self.layers {
            layer.truncate(self.first_position);
        }
    }

    pub fn positions(&self) -> Range<usize> {
        self.first_position..self.first_position + self.rows
    }
}
