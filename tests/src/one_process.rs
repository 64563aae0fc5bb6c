//! A whole model in this process, by the engine and the tokenizer alone. Rings are compared with it, and the parity tests compare it with
//! llama.cpp.
//!
//! Refuses to sample or to batch requests; it only turns tokens into logits.

use std::path::Path;

use prima_engine::kernels::IsaLevel;
use prima_engine::{BatchEntry, Compute, EngineError, KvCache, KvFormat, Model, WholeModel};
use prima_text::{Tokenizer, TokenizerError, log_sum_exp};

/// What can go wrong when a model is opened or run.
#[derive(Debug, thiserror::Error)]
pub enum OneProcessError {
    #[error("the engine cannot run the model")]
    Engine(#[from] EngineError),
    #[error("the model's vocabulary cannot be used")]
    Tokenizer(#[from] TokenizerError),
}

/// All layers of one model on the CPU.
pub struct OneProcess {
    pub model: Model,
    pub tokenizer: Tokenizer,
    /// Of the sequences that are made from now on.
    pub kv_format: KvFormat,
    /// Its threads, and the level of its kernels. Another one may take its place at any time, which costs less than to open a model again.
    pub compute: Compute,
    whole: WholeModel,
}

impl OneProcess {
    /// Opens the model file at `path`, to be computed by `threads` threads.
    pub fn open(path: &Path, threads: usize) -> Result<Self, OneProcessError> {
        Self::with(Model::open(path)?, Compute::new(threads)?)
    }

    /// As [`open`](Self::open), as if memory were planned for so many positions.
    pub fn open_for_context(
        path: &Path,
        threads: usize,
        context_length: usize,
    ) -> Result<Self, OneProcessError> {
        let model = Model::open(path)?.with_context_length(context_length);
        Self::with(model, Compute::new(threads)?)
    }

    /// As [`open`](Self::open), with the kernels of `level`.
    pub fn open_at_level(
        path: &Path,
        threads: usize,
        level: IsaLevel,
    ) -> Result<Self, OneProcessError> {
        Self::with(Model::open(path)?, Compute::at_level(threads, level)?)
    }

    fn with(model: Model, compute: Compute) -> Result<Self, OneProcessError> {
        Ok(OneProcess {
            tokenizer: Tokenizer::from_gguf(&model.gguf().metadata)?,
            kv_format: KvFormat::F16,
            compute,
            whole: WholeModel::open(model.clone())?,
            model,
        })
    }

    /// An empty sequence of at most `context_length` tokens.
    pub fn sequence(&self, context_length: usize) -> KvCache {
        self.whole.sequence(context_length, self.kv_format)
    }

    /// Appends `tokens` to the sequence, in one batch. Returns the logits after each of them, tokens x vocabulary.
    pub fn logits(&self, tokens: &[u32], kv: &mut KvCache) -> Result<Vec<f32>, OneProcessError> {
        let activation = self.forward(tokens, &mut [entry(kv, tokens.len())])?;
        self.head(&activation)
    }

    /// As [`logits`](Self::logits), but only those after the tokens at these `places`, places x vocabulary.
    pub fn logits_after(
        &self,
        tokens: &[u32],
        places: impl IntoIterator<Item = usize>,
        kv: &mut KvCache,
    ) -> Result<Vec<f32>, OneProcessError> {
        let activation = self.forward(tokens, &mut [entry(kv, tokens.len())])?;
        let hidden = self.model.spec().hidden;
        let mut wanted = Vec::new();
        for place in places {
            wanted.extend_from_slice(&activation[place * hidden..][..hidden]);
        }
        self.head(&wanted)
    }

    /// As [`logits`](Self::logits), but only those after the last token, as a decode step needs them.
    pub fn last_logits(
        &self,
        tokens: &[u32],
        kv: &mut KvCache,
    ) -> Result<Vec<f32>, OneProcessError> {
        let activation = self.forward(tokens, &mut [entry(kv, tokens.len())])?;
        self.head(&activation[activation.len() - self.model.spec().hidden..])
    }

    /// Appends one token to each sequence, in one batch. Returns the logits after each, sequences x vocabulary.
    pub fn step(
        &self,
        tokens: &[u32],
        sequences: &mut [KvCache],
    ) -> Result<Vec<f32>, OneProcessError> {
        let entries = sequences.iter_mut().map(|kv| entry(kv, 1));
        let activation = self.forward(tokens, &mut entries.collect::<Vec<_>>())?;
        self.head(&activation)
    }

    fn forward(
        &self,
        tokens: &[u32],
        entries: &mut [BatchEntry<'_>],
    ) -> Result<Vec<f32>, OneProcessError> {
        Ok(self.whole.forward(&self.compute, tokens, entries)?)
    }

    fn head(&self, activation: &[f32]) -> Result<Vec<f32>, OneProcessError> {
        Ok(self.whole.logits(&self.compute, activation)?)
    }
}

/// The next `rows` tokens of a sequence.
fn entry(kv: &mut KvCache, rows: usize) -> BatchEntry<'_> {
    BatchEntry {
        first_position: kv.len(),
        kv,
        rows,
    }
}

/// The levels that this processor has, but for its best.
pub fn lower_levels() -> impl Iterator<Item = IsaLevel> {
    let levels = IsaLevel::available().into_iter();
    levels.filter(|level| *level != IsaLevel::detect())
}

/// The tokens that would end an answer early.
pub fn end_tokens(engine: &OneProcess) -> Vec<u32> {
    (0..engine.tokenizer.vocab_size() as u32)
        .filter(|&token| engine.tokenizer.is_end_of_generation(token))
        .collect()
}

/// Natural log probabilities of one row of logits. Each is computed when it is asked for: a vocabulary is large, and few of its tokens are.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    logits: Vec<f32>,
    whole: f64,
}

impl Logprobs {
    pub fn of(logits: &[f32]) -> Self {
        Self {
            logits: logits.to_vec(),
            whole: log_sum_exp(logits),
        }
    }

    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    pub fn token(&self, token: u32) -> f32 {
        (f64::from(self.logits[token as usize]) - self.whole) as f32
    }
}
