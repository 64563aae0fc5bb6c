//! Runs windows of transformer layers over memory-mapped GGUF weights: token embedding, layer windows, output head.
//!
//! Decides: how a pass is computed, on the CPU or on a GPU, and where keys and values are kept. Refuses: to know of
//! requests, rings or clocks; to load weights (they stay in the map, or pass through a few buffers); to run what it does not compute exactly.
//!
//! One pass, on one machine that has all layers:
//!
//! ```no_run
//! # use prima_engine::{BatchEntry, Compute, Embedding, KvCache, KvFormat, LayerDevices, LayerWindow, Model, OutputHead, Residency};
//! # fn main() -> Result<(), prima_engine::EngineError> {
//! let model = Model::open("model.gguf".as_ref())?;
//! let layers = 0..model.spec().layers.len();
//! let residency = Residency::mapped();
//! let window = LayerWindow::open(&model, layers.clone(), &LayerDevices::cpu(), &residency)?;
//! let mut kv = KvCache::new(&model, &[layers], model.spec().context_length, KvFormat::F16);
//! let compute = Compute::new(Compute::available_threads())?;
//!
//! let tokens = [1, 2, 3];
//! let mut activation = vec![0.0; tokens.len() * model.spec().hidden];
//! Embedding::open(&model, &residency)?.embed(&tokens, &mut activation)?;
//! let rows = BatchEntry { kv: &mut kv, first_position: 0, rows: tokens.len() };
//! window.forward(&compute, &mut activation, &mut [rows])?;
//! let mut logits = Vec::new();
//! OutputHead::open(&model, &residency)?.logits(&compute, &activation, &mut logits)?;
//! # Ok(())
//! # }
//! ```

mod batch;
mod by_rows;
mod cpu;
mod damaged_map;
mod device;
mod embedding;
mod error;
mod executor;
mod gpu;
mod kv_cache;
mod kv_memory;
mod layer;
mod layer_window;
mod mapped_weights;
mod model;
mod output_head;
mod page_cache;
mod residency;
mod ropes;
mod whole_model;

pub use batch::BatchEntry;
pub use cpu::Compute;
pub use device::{KvPositions, LayerDevices};
pub use embedding::Embedding;
pub use error::EngineError;
pub use gpu::{
    DeviceMatrix, DeviceRows, GPU_HEAD_ROWS, GPU_LATENT_QUERIES, GPU_PATIENCE, Gpu, GpuApi,
    GpuFacts, OpenedGpu, Timeline, UPLOAD_BYTES, UsableGpu,
};
pub use kv_cache::KvCache;
pub use kv_memory::KvMemory;
pub use layer_window::LayerWindow;
pub use mapped_weights::MappedFile;
pub use model::Model;
pub use output_head::OutputHead;
pub use page_cache::drop_pages;
pub use residency::{
    ExpertUse, Residency, ResidencyPart, ResidencyStatus, StreamingSchedule, expert_reading_rate,
    streaming_rate,
};
pub use whole_model::WholeModel;

/// In which KV caches hold their numbers.
pub use prima_model::KvFormat;

/// The arithmetic, a package of its own.
pub use prima_kernels as kernels;
