//! Layers on the processor: weights in the map or streamed, our own kernels, keys and values in blocks.

mod activate;
mod compute;
mod experts;
mod kv;
mod latent;
mod layers;

pub use compute::Compute;
pub(crate) use kv::KvBlocks;
pub(crate) use layers::CpuLayers;
