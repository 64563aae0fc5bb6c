//! A whole model in this process, on the processor or on a GPU.

use std::path::Path;
use std::time::Instant;

use prima_engine::{
    BatchEntry, Compute, EngineError, Gpu, KvCache, KvFormat, LayerDevices, LayerWindow, Model,
    Residency, WholeModel,
};

use crate::machine::Machine;

pub struct Engine {
    whole: WholeModel,
    compute: Compute,
}

impl Engine {
    /// With layers and output head on `gpu`, if it is named.
    pub fn open(path: &Path, gpu: Option<&Gpu>) -> Result<Engine, EngineError> {
        let model = Model::open(path)?;
        Engine::of(match gpu {
            Some(gpu) => WholeModel::open_on(gpu, model, 0)?,
            None => WholeModel::open(model)?,
        })
    }

    /// On the processor, with weights that are copied to `gpu` for each prompt.
    pub fn open_copying(path: &Path, gpu: &Gpu) -> Result<Engine, EngineError> {
        let model = Model::open(path)?;
        Engine::of(WholeModel::open_with_many_rows_on(gpu, 2, model)?)
    }

    fn of(whole: WholeModel) -> Result<Engine, EngineError> {
        Ok(Engine {
            whole,
            compute: Compute::new(Machine::threads())?,
        })
    }

    /// Tokens per second of a prompt of `count` tokens in one batch, with the logits after the last.
    pub fn prefill(&self, count: usize) -> Result<f64, EngineError> {
        self.prefill_in(count, count)
    }

    /// The same in pieces, as rings send prompts.
    pub fn prefill_in(&self, piece: usize, count: usize) -> Result<f64, EngineError> {
        let tokens = self.tokens(count);
        let begun = Instant::now();
        let mut kv = self.sequence(count);
        for piece in tokens.chunks(piece) {
            self.forward(&mut kv, piece)?;
        }
        Ok(count as f64 / begun.elapsed().as_secs_f64())
    }

    /// Tokens per second of `count` tokens one by one, output head included, after one that is not counted.
    pub fn decode(&self, count: usize) -> Result<f64, EngineError> {
        let mut kv = self.sequence(count + 1);
        let mut logits = self.forward(&mut kv, &[1])?;
        let begun = Instant::now();
        for _ in 0..count {
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            logits = self.forward(&mut kv, &[best.unwrap_or(0) as u32])?;
        }
        Ok(count as f64 / begun.elapsed().as_secs_f64())
    }

    /// The logits after the last of `tokens`.
    pub fn last_logits(&self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.forward(&mut self.sequence(tokens.len()), tokens)
    }

    /// Another window of all layers.
    pub fn window(&self, devices: &LayerDevices) -> Result<LayerWindow, EngineError> {
        let model = self.whole.model();
        let all = 0..model.spec().layers.len();
        LayerWindow::open(model, all, devices, &Residency::mapped())
    }

    /// Some `count` tokens of the vocabulary.
    pub fn tokens(&self, count: usize) -> Vec<u32> {
        let vocabulary = self.whole.model().spec().vocabulary;
        let tokens = (0..count).map(|place| (place * 31 % vocabulary) as u32);
        tokens.collect()
    }

    /// Bytes of one position's keys and values in all layers.
    pub fn position_bytes(&self) -> u64 {
        let layers = self.whole.model().spec().layers.iter();
        let bytes = layers.map(|layer| layer.attention.kv_bytes(KvFormat::F16));
        bytes.sum::<usize>() as u64
    }

    pub fn layers(&self) -> u64 {
        self.whole.model().spec().layers.len() as u64
    }

    fn sequence(&self, positions: usize) -> KvCache {
        self.whole.sequence(positions, KvFormat::F16)
    }

    fn forward(&self, kv: &mut KvCache, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let rows = BatchEntry {
            first_position: kv.len(),
            kv,
            rows: tokens.len(),
        };
        let activation = self.whole.forward(&self.compute, tokens, &mut [rows])?;
        let last = activation.len() - self.whole.model().spec().hidden;
        self.whole.logits(&self.compute, &activation[last..])
    }
}
