//! What layers of a model need of a GPU, through Vulkan: memory on it, the kernels, and passes of them that the host waits for once.
//!
//! Decides: how weights are unpacked and products are tiled, how tensors larger than a binding are split, when the host waits. Refuses: to
//! know models, sequences or clocks; to link against Vulkan. The loader is opened at run time, so one program runs with and without.
//!
//! [`Gpus`] finds what there is, [`Device`] opens one, [`Buffer`] is memory there, a [`Pass`] records kernels (`operations/`) and runs
//! them.

mod allocation;
mod buffer;
mod device;
mod error;
mod gpus;
mod kernels;
mod operations;
mod pass;
mod plain;
mod raw_device;
mod recorder;
mod timeline;
mod uploads;

pub use buffer::{Buffer, Slice};
pub use device::{Device, PATIENCE};
pub use error::VulkanError;
pub use gpus::{Abilities, Facts, GpuKind, Gpus};
pub use kernels::{FEW_ROWS, LATENT_QUERIES, has_kernels};
pub use operations::{
    ActivationFunction, Attention, ExpertProduct, ExpertRows, ExpertTiles, Gating, HeadNorms,
    HeadProduct, HeadTiles, Heads, Input, KV_POSITIONS, KvShape, LatentHeads, Matrix, Mixture,
    Norm, Product, Rotation, Routing, Rows, SequenceRows, SharedExpert, attention_groups,
    attention_part_bytes, input_bytes, pack_position, unpack_position,
};
pub use pass::Pass;
pub use plain::Plain;
pub use timeline::Timeline;
pub use uploads::{UPLOAD_BYTES, Uploading, Uploads};
