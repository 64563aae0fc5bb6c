//! A test program for the tests inside modules. It compiles only these modules once more; the library's own test harness would
//! compile everything, and all levels of its matrix kernels take minutes.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    dead_code,
    unused_imports,
    reason = "these are tests, of parts of a library"
)]

mod activations;
mod elementwise;
mod experts;
mod formats;
mod heads;
mod isa_level;
mod numerics;
mod per_level;
mod placement;
mod rope;
mod shared_slice;
mod thread_pool;

use isa_level::IsaLevel;
use per_level::per_level;
