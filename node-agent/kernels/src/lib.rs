//! The arithmetic of a transformer layer on the CPU, as safe functions over slices: matrix products with
//! weights in the file's own block formats, attention over the KV cache, norms and rotations. Chooses the
//! instruction set once at run time and shares the work among the threads of a pool. Knows nothing of
//! models, files or sessions.
//!
//! What every level keeps: an element of a result depends only on its own row of activations, in an order
//! of operations that neither the number of rows, nor the number of threads, nor the tile sizes change.

mod activations;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod byte_pairs;
mod elementwise;
mod experts;
mod formats;
mod heads;
mod isa_level;
mod lanes;
pub mod limits;
mod matmul;
mod matrix;
#[cfg(target_arch = "aarch64")]
mod neon;
mod numerics;
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "without vector levels nothing makes tiles")
)]
mod packed_tile;
mod per_level;
mod placement;
mod product;
mod rope;
mod scalar;
mod shared_slice;
#[cfg(target_arch = "x86_64")]
mod sse41;
mod thread_pool;

use per_level::per_level;

pub use attention::{
    AttentionShape, BLOCK_POSITIONS, KvBlock, KvShape, SequenceAttention, attention,
};
pub use elementwise::{
    add, add_bias, clamped_swiglu, geglu, rms_norm, rms_norm_first, rms_norm_in_place, scale,
    softcap, swiglu,
};
pub use experts::{
    ExpertChoice, ExpertGroups, Gating, Routing, gather, route, scale_rows, weighted_sum,
};
pub use heads::{HeadPlaces, copy_heads};
pub use isa_level::{IsaLevel, IsaLevelError, LEVEL_VARIABLE};
pub use matmul::{RowsProduct, matmul, matmul_rows};
pub use matrix::{Matrix, MatrixError, dequantize_row, supported};
pub use product::TILE_ROWS;
pub use rope::{Rope, RopeAngles, RopePairing, rotate, rotate_last};
pub use thread_pool::{ThreadPool, ThreadPoolError};
