//! A plain way to run a model, and to compare what comes out.

use std::path::Path;
use std::time::Duration;

use prima_engine::{
    BatchEntry, Compute, Embedding, KvCache, KvFormat, LayerDevices, LayerWindow, Model,
    OutputHead, Residency, ResidencyPart, StreamingSchedule,
};

/// A whole model, in windows that end at `ends`, with what a pass needs.
pub struct Runner {
    pub model: Model,
    pub windows: Vec<LayerWindow>,
    pub residency: Residency,
    pub compute: Compute,
    /// Of the caches that are made from now on.
    pub kv_format: KvFormat,
}

impl Runner {
    pub fn new(path: &Path, threads: usize) -> Runner {
        let model = Model::open(path).expect("a model");
        let layers = model.spec().layers.len();
        Runner::split(&model, &[layers], threads)
    }

    pub fn split(model: &Model, ends: &[usize], threads: usize) -> Runner {
        Runner::on(&LayerDevices::cpu(), model, ends, threads)
    }

    pub fn on(devices: &LayerDevices, model: &Model, ends: &[usize], threads: usize) -> Runner {
        Runner::with(Residency::mapped(), devices, model, ends, threads)
    }

    /// With memory for `percent` of the weights; the others are read when they are needed, in pieces of so many bytes (`None`: as members do).
    pub fn limited(
        path: &Path,
        ends: &[usize],
        percent: u64,
        piece_bytes: Option<usize>,
    ) -> Runner {
        Runner::limited_on(&LayerDevices::cpu(), path, ends, percent, piece_bytes)
    }

    pub fn limited_on(
        devices: &LayerDevices,
        path: &Path,
        ends: &[usize],
        percent: u64,
        piece_bytes: Option<usize>,
    ) -> Runner {
        const ALONE: StreamingSchedule = StreamingSchedule {
            rounds: 1,
            shared: false,
            ahead: 1.0,
        };
        let model = Model::open(path).expect("a model");
        let layers = model.spec().layers.len();
        let parts = [ResidencyPart::Layers(0..layers), ResidencyPart::OutputHead];
        let residency = match piece_bytes {
            None => Residency::new(&model, &parts, ALONE),
            Some(bytes) => Residency::in_pieces(&model, &parts, ALONE, bytes),
        };
        let residency = residency.expect("files to read from");
        residency.set_budget(residency.weight_bytes() * percent / 100);
        while residency.warm(Duration::from_millis(1)) {}
        Runner::with(residency, devices, &model, ends, 2)
    }

    pub fn with(
        residency: Residency,
        devices: &LayerDevices,
        model: &Model,
        ends: &[usize],
        threads: usize,
    ) -> Runner {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let windows = starts
            .zip(ends)
            .map(|(first, &end)| {
                LayerWindow::open(model, first..end, devices, &residency).expect("a window")
            })
            .collect();
        Runner {
            model: model.clone(),
            windows,
            residency,
            compute: Compute::new(threads).expect("threads"),
            kv_format: KvFormat::F16,
        }
    }

    pub fn kv_cache(&self) -> KvCache {
        let ranges: Vec<_> = self.windows.iter().map(LayerWindow::layers).collect();
        let context_length = self.model.spec().context_length;
        KvCache::new(&self.model, &ranges, context_length, self.kv_format)
    }

    /// Runs the next tokens of several sequences as one batch; the activations after the last layer, tokens x hidden.
    pub fn run(&self, sequences: &mut [(&mut KvCache, &[u32])]) -> Vec<f32> {
        let tokens: Vec<u32> = sequences
            .iter()
            .flat_map(|(_, tokens)| *tokens)
            .copied()
            .collect();
        let mut activation = vec![0.0; tokens.len() * self.model.spec().hidden];
        let embedding = Embedding::open(&self.model, &self.residency).expect("an embedding");
        embedding
            .embed(&tokens, &mut activation)
            .expect("known tokens");
        let first: Vec<usize> = sequences.iter().map(|(kv, _)| kv.len()).collect();
        for window in &self.windows {
            let mut batch: Vec<_> = sequences
                .iter_mut()
                .zip(&first)
                .map(|((kv, tokens), first)| BatchEntry {
                    kv,
                    first_position: *first,
                    rows: tokens.len(),
                })
                .collect();
            window
                .forward(&self.compute, &mut activation, &mut batch)
                .expect("a pass");
        }
        activation
    }

    /// The states after each of `tokens`, of which logits are made.
    pub fn states(&self, kv: &mut KvCache, tokens: &[u32]) -> Vec<Vec<f32>> {
        let activation = self.run(&mut [(kv, tokens)]);
        let head = OutputHead::open(&self.model, &self.residency).expect("an output head");
        let states = head.states(&self.compute, &activation).expect("states");
        let hidden = self.model.spec().hidden;
        states.chunks_exact(hidden).map(<[f32]>::to_vec).collect()
    }

    /// The scores after each of `tokens`.
    pub fn scores(&self, kv: &mut KvCache, tokens: &[u32]) -> Vec<Vec<f32>> {
        let activation = self.run(&mut [(kv, tokens)]);
        let head = OutputHead::open(&self.model, &self.residency).expect("an output head");
        let scores = head.scores(&self.compute, &activation).expect("scores");
        let each = scores.len() / tokens.len();
        scores.chunks_exact(each).map(<[f32]>::to_vec).collect()
    }

    /// The logits after each of `tokens`.
    pub fn logits(&self, kv: &mut KvCache, tokens: &[u32]) -> Vec<Vec<f32>> {
        let activation = self.run(&mut [(kv, tokens)]);
        let mut logits = Vec::new();
        let head = OutputHead::open(&self.model, &self.residency).expect("an output head");
        head.logits(&self.compute, &activation, &mut logits)
            .expect("logits");
        logits
            .chunks_exact(self.model.spec().vocabulary)
            .map(<[f32]>::to_vec)
            .collect()
    }
}

/// Largest difference of logits, in units of the spread of `expected`.
pub fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    // A maximum passes over what is not a number.
    let numbers = found.iter().chain(expected);
    assert!(numbers.copied().all(f32::is_finite), "not a number");
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let (low, high) = expected
        .iter()
        .fold((f32::MAX, f32::MIN), |(low, high), x| {
            (low.min(*x), high.max(*x))
        });
    differences.fold(0.0, f32::max) / (high - low)
}

/// The index of the largest.
pub fn greedy(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.expect("logits") as u32
}
