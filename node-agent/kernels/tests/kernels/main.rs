//! The kernels through their public interface: every format, at every level that this processor has, against
//! independent formulas in f64.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

mod attention;
mod formats;
mod matmul;
mod reference;

use prima_kernels::IsaLevel;

/// The levels that are tested: all of this processor. Under emulation each takes minutes, and lower ones have processors of their own, so
/// `PRIMA_TEST_LEVELS=highest` leaves plain Rust and the highest.
fn levels() -> Vec<IsaLevel> {
    let mut levels = IsaLevel::available();
    if std::env::var_os("PRIMA_TEST_LEVELS").is_some_and(|levels| levels == "highest") {
        let lower = 1..levels.len().max(2) - 1;
        levels.drain(lower);
    }
    levels
}
