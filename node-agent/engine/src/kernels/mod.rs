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
mod formats;
mod lanes;
mod level;
pub mod limits;
mod matmul;
mod matrix;
#[cfg(target_arch = "aarch64")]
mod neon;
mod numerics;
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "without vector levels nothing makes panels")
)]
mod panel;
mod placement;
mod rope;
mod scalar;
mod shared_slice;
#[cfg(target_arch = "x86_64")]
mod sse41;
mod thread_pool;

pub use attention::{AttentionShape, BLOCK_POSITIONS, KvShape, SequenceAttention, attention};
pub use elementwise::{add, add_bias, rms_norm, swiglu};
pub use level::{LEVEL_VARIABLE, Level, LevelError};
pub use matmul::{PANEL, matmul};
pub use matrix::{Matrix, MatrixError, dequantize_row, supported};
pub use rope::{Rope, RopeAngles, RopePairing, rotate};
pub use thread_pool::{ThreadPool, ThreadPoolError};

/// Defines a function that runs its body compiled for the given level: `fn name(level, arguments...)`.
/// The body is plain Rust that the compiler vectorises; it must be all inlined to profit.
macro_rules! per_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident(level, $($arg:ident : $ty:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        $vis fn $name(level: $crate::kernels::Level, $($arg: $ty),*) {
            #[inline(always)]
            fn body($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "sse4.1,ssse3")]
            fn sse41($($arg: $ty),*) {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) {
                body($($arg),*)
            }

            match level.kind() {
                $crate::kernels::level::Kind::Scalar => body($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Level` of this kind exists only on processors that have these features.
                $crate::kernels::level::Kind::Sse41 => unsafe { sse41($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::kernels::level::Kind::Avx2 | $crate::kernels::level::Kind::AvxVnni => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::kernels::level::Kind::Avx512Vnni => unsafe { avx512($($arg),*) },
                // Everything on this architecture is compiled for NEON.
                #[cfg(target_arch = "aarch64")]
                $crate::kernels::level::Kind::Neon
                | $crate::kernels::level::Kind::NeonDotprod
                | $crate::kernels::level::Kind::NeonI8mm => body($($arg),*),
            }
        }
    };
}
use per_level;
