//! All of a model in this process, on the CPU or on a GPU: tokens in, logits out. For what is no ring: draft models, and tests that compare.
//!
//! Refuses to sample and to batch by itself; callers say what is computed together.

use prima_model::KvFormat;

use crate::batch::BatchEntry;
use crate::cpu::Compute;
use crate::device::{KvPositions, LayerDevices};
use crate::embedding::Embedding;
use crate::error::EngineError;
use crate::gpu::Gpu;
use crate::kv_cache::KvCache;
use crate::layer_window::LayerWindow;
use crate::model::Model;
use crate::output_head::OutputHead;
use crate::residency::Residency;

/// A model, from its embedding to its output head. Its weights are left to the page cache.
pub struct WholeModel {
    model: Model,
    embedding: Embedding,
    layers: LayerWindow,
    output_head: OutputHead,
}

impl WholeModel {
    /// On the CPU.
    ///
    /// # Errors
    /// Those of [`LayerWindow::open`], [`Embedding::open`] and [`OutputHead::open`].
    pub fn open(model: Model) -> Result<Self, EngineError> {
        let head = OutputHead::open(&model, &Residency::mapped())?;
        Self::with(model, &LayerDevices::cpu(), head)
    }

    /// With all layers and the output head on `gpu`, and memory there for `kv_positions` positions of all sequences in each layer.
    ///
    /// # Errors
    /// Those of [`LayerWindow::open`], [`Embedding::open`] and [`OutputHead::open_on`].
    pub fn open_on(gpu: &Gpu, model: Model, kv_positions: usize) -> Result<Self, EngineError> {
        let head = OutputHead::open_on(gpu, &model, &Residency::mapped())?;
        let devices = LayerDevices::last_on(usize::MAX, gpu.clone());
        let kv_positions = KvPositions {
            full: kv_positions,
            windowed: kv_positions,
        };
        Self::with(model, &devices.with_kv_positions(kv_positions), head)
    }

    /// On the CPU, but for passes of at least `rows` rows through the layers, whose weights are then copied to `gpu`.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_with_many_rows_on(
        gpu: &Gpu,
        rows: usize,
        model: Model,
    ) -> Result<Self, EngineError> {
        let head = OutputHead::open(&model, &Residency::mapped())?;
        let devices = LayerDevices::cpu().with_many_rows_on(gpu.clone(), rows);
        Self::with(model, &devices, head)
    }

    fn with(
        model: Model,
        devices: &LayerDevices,
        output_head: OutputHead,
    ) -> Result<Self, EngineError> {
        let all = 0..model.spec().layers.len();
        Ok(Self {
            embedding: Embedding::open(&model, &Residency::mapped())?,
            layers: LayerWindow::open(&model, all, devices, &Residency::mapped())?,
            output_head,
            model,
        })
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    /// An empty sequence of at most `context_length` tokens.
    pub fn sequence(&self, context_length: usize, format: KvFormat) -> KvCache {
        let all = 0..self.model.spec().layers.len();
        KvCache::new(&self.model, &[all], context_length, format)
    }

    /// Appends `tokens` to the sequences of `entries`, in their order. Returns the activation after each, tokens x hidden.
    ///
    /// # Errors
    /// Those of [`LayerWindow::forward`], and tokens outside the vocabulary.
    pub fn forward(
        &self,
        compute: &Compute,
        tokens: &[u32],
        entries: &mut [BatchEntry<'_>],
    ) -> Result<Vec<f32>, EngineError> {
        let mut activation = vec![0.0; tokens.len() * self.model.spec().hidden];
        self.embedding.embed(tokens, &mut activation)?;
        self.layers.forward(compute, &mut activation, entries)?;
        Ok(activation)
    }

    /// The logits of each row of `activation`, rows x vocabulary.
    ///
    /// # Errors
    /// Those of [`OutputHead::logits`].
    pub fn logits(&self, compute: &Compute, activation: &[f32]) -> Result<Vec<f32>, EngineError> {
        let mut logits = Vec::new();
        self.output_head.logits(compute, activation, &mut logits)?;
        Ok(logits)
    }
}
