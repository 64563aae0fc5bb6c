//! Every kernel, and copies, on a driver of Vulkan that computes on the processor (lavapipe), or with `PRIMA_TEST_GPU=1` on the first GPU, compared
//! with the same computed plainly. Buffers are exactly as large as what is in them, and what kernels must not read is poisoned.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod attention;
mod experts;
mod hanging;
mod heads;
mod latent;
mod new_rows;
mod products;
mod rows;
mod support;
mod uploads;
