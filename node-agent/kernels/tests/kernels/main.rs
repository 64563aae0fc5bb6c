//! The kernels through their public interface: every format, at every level that this processor has, against
//! independent formulas in f64.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

mod attention;
mod formats;
mod matmul;
mod reference;
