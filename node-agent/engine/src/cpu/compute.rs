//! What computing on the CPU needs once per process: the threads, and the buffers between the steps of a layer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use prima_model::ModelPart;

use crate::error::EngineError;
use crate::kernels::{ExpertChoice, IsaLevel, ThreadPool};

/// The compute threads of a process and their scratch memory. Windows that run on the same `Compute` take turns.
pub struct Compute {
    pool: ThreadPool,
    scratch: Mutex<Scratch>,
    parts: AtomicU64,
    copied_bytes: AtomicU64,
}

/// Buffers that grow to the largest batch seen and are then reused.
#[derive(Default)]
pub(crate) struct Scratch {
    pub normed: Buffer,
    pub queries: Buffer,
    pub keys: Buffer,
    pub values: Buffer,
    pub attended: Buffer,
    pub gate: Buffer,
    pub up: Buffer,
    pub projected: Buffer,
    pub latent: LatentScratch,
    pub experts: ExpertScratch,
}

/// Of layers with latent attention.
#[derive(Default)]
pub(crate) struct LatentScratch {
    /// What queries are made of.
    pub query_latents: Buffer,
    /// Heads of rows, as they are made and as they go on.
    pub by_rows: Buffer,
    /// The same head after head.
    pub by_heads: Buffer,
}

/// Of layers with experts.
#[derive(Default)]
pub(crate) struct ExpertScratch {
    pub logits: Buffer,
    /// Of each row, the experts that it goes to.
    pub choices: Vec<ExpertChoice>,
    /// Rows of activations, expert after expert.
    pub gathered: Buffer,
    /// What experts make of them.
    pub made: Buffer,
    pub sum: Buffer,
}

/// One such buffer.
#[derive(Default)]
pub(crate) struct Buffer(Vec<f32>);

impl Compute {
    /// `threads` compute threads (at least one; the thread that calls is one of them), with the best kernels of this processor,
    /// or those that `PRIMA_CPU_LEVEL` names.
    ///
    /// # Errors
    /// [`EngineError::Threads`] when the system refuses a thread, [`EngineError::KernelLevel`] when this processor lacks the level.
    pub fn new(threads: usize) -> Result<Compute, EngineError> {
        let level =
            IsaLevel::from_environment().map_err(|source| EngineError::KernelLevel { source })?;
        Self::at_level(threads, level)
    }

    /// As [`new`](Self::new), with the kernels of `level`.
    ///
    /// # Errors
    /// [`EngineError::Threads`] when the system refuses a thread.
    pub fn at_level(threads: usize, level: IsaLevel) -> Result<Compute, EngineError> {
        let pool =
            ThreadPool::new(threads, level).map_err(|source| EngineError::Threads { source })?;
        Ok(Compute {
            pool,
            scratch: Mutex::default(),
            parts: AtomicU64::new(0),
            copied_bytes: AtomicU64::new(0),
        })
    }

    /// Parts of models that the processor computes: all that are described, since a model with another one is refused by its header.
    pub fn model_parts() -> impl Iterator<Item = ModelPart> {
        ModelPart::ALL.iter().copied()
    }

    /// How many threads this process can keep busy: its share of the processors by affinity and cgroup quota.
    pub fn available_threads() -> usize {
        thread::available_parallelism().map_or(1, |threads| threads.get())
    }

    /// The kernels' instruction set: `scalar`, `avx2`, ...
    pub fn level(&self) -> &'static str {
        self.pool.level().name()
    }

    /// How many threads compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Parts of passes computed so far (attentions, feed-forward parts, output heads): whether a long pass gets on.
    pub fn parts(&self) -> u64 {
        self.parts.load(Ordering::Relaxed)
    }

    pub(crate) fn part_done(&self) {
        self.parts.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes copied to a GPU so far, for layers whose weights do not stay there.
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn copied(&self, bytes: u64) {
        self.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    pub(crate) fn scratch(&self) -> MutexGuard<'_, Scratch> {
        // A user that panicked left numbers behind; the next one overwrites them.
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    /// The first `len` numbers; they still hold what the last user wrote.
    pub fn take(&mut self, len: usize) -> &mut [f32] {
        if self.0.len() < len {
            self.0.resize(len, 0.0);
        }
        &mut self.0[..len]
    }
}
