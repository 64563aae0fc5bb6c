//! The steps between the matrix products that treat each row, or each number, by itself: RMS norm, the
//! SwiGLU gate, additions. Shares rows among threads where there are enough of them to pay.

use super::numerics::{LANES, capped, exp, sum_lanes};
use super::per_level;
use super::shared_slice::SharedSlice;
use super::thread_pool::ThreadPool;

/// RMS norm (Zhang and Sennrich 2019): each row of `x` (rows of `weight.len()`) divided by the root of its
/// mean square plus `eps`, times `weight`, into `out`.
///
/// # Panics
/// When `x` is not whole rows, or `out` has another length.
pub fn rms_norm(pool: &ThreadPool, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let cols = weight.len();
    assert!(
        cols > 0 && x.len().is_multiple_of(cols),
        "whole rows of {cols}"
    );
    assert_eq!(out.len(), x.len(), "outputs for the inputs");
    by_rows(pool, out, cols, &|first, out| {
        let x = &x[first * cols..][..out.len()];
        normalize(pool.level(), x, weight, eps, out);
    });
}

/// As [`rms_norm`], in place.
///
/// # Panics
/// When `x` is not whole rows.
pub fn rms_norm_in_place(pool: &ThreadPool, x: &mut [f32], weight: &[f32], eps: f32) {
    let cols = weight.len();
    assert!(
        cols > 0 && x.len().is_multiple_of(cols),
        "whole rows of {cols}"
    );
    by_rows(pool, x, cols, &|_, x| {
        normalize_in_place(pool.level(), x, weight, eps);
    });
}

/// As [`rms_norm_in_place`], of the first `weight.len()` numbers of each row of `x` (rows of `cols`). The others stay.
///
/// # Panics
/// When `x` is not whole rows, or these are shorter than `weight`.
pub fn rms_norm_first(pool: &ThreadPool, x: &mut [f32], cols: usize, weight: &[f32], eps: f32) {
    assert!(
        cols > 0 && x.len().is_multiple_of(cols),
        "whole rows of {cols}"
    );
    by_rows(pool, x, cols, &|_, x| {
        for row in x.chunks_exact_mut(cols) {
            normalize_in_place(pool.level(), &mut row[..weight.len()], weight, eps);
        }
    });
}

/// `x += y`, number by number.
///
/// # Panics
/// When the lengths differ.
pub fn add(pool: &ThreadPool, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "two addends");
    by_rows(pool, x, 1, &|first, x| {
        add_in_place(pool.level(), x, &y[first..][..x.len()]);
    });
}

/// Adds `bias` to each row of `x` (rows of `bias.len()`).
///
/// # Panics
/// When `x` is not whole rows.
pub fn add_bias(pool: &ThreadPool, x: &mut [f32], bias: &[f32]) {
    let cols = bias.len();
    assert!(
        cols > 0 && x.len().is_multiple_of(cols),
        "whole rows of {cols}"
    );
    by_rows(pool, x, cols, &|_, x| {
        for x in x.chunks_exact_mut(cols) {
            add_in_place(pool.level(), x, bias);
        }
    });
}

/// The SwiGLU gate (Shazeer 2020): `gate = gate * sigmoid(gate) * up`, number by number.
///
/// # Panics
/// When the lengths differ.
pub fn swiglu(pool: &ThreadPool, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up projections");
    by_rows(pool, gate, 1, &|first, gate| {
        gate_in_place(pool.level(), gate, &up[first..][..gate.len()]);
    });
}

/// The GeGLU gate (Shazeer 2020): `gate = gelu(gate) * up`, number by number, with gelu's usual approximation by tanh.
///
/// # Panics
/// When the lengths differ.
pub fn geglu(pool: &ThreadPool, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up projections");
    by_rows(pool, gate, 1, &|first, gate| {
        gelu_gate_in_place(pool.level(), gate, &up[first..][..gate.len()]);
    });
}

/// The gate of gpt-oss: with g = min(gate, 7) and u = up within -7 and 7, `gate = g * sigmoid(1.702 g) * (u + 1)`, number by number.
///
/// # Panics
/// When the lengths differ.
pub fn clamped_swiglu(pool: &ThreadPool, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up projections");
    by_rows(pool, gate, 1, &|first, gate| {
        clamped_gate_in_place(pool.level(), gate, &up[first..][..gate.len()]);
    });
}

/// `x *= factor`, number by number.
pub fn scale(pool: &ThreadPool, x: &mut [f32], factor: f32) {
    by_rows(pool, x, 1, &|_, x| scale_in_place(pool.level(), x, factor));
}

/// `x = softcap * tanh(x / softcap)`, number by number.
pub fn softcap(pool: &ThreadPool, x: &mut [f32], softcap: f32) {
    by_rows(pool, x, 1, &|_, x| cap_in_place(pool.level(), x, softcap));
}

/// With fewer numbers than this, the caller does a step alone: waking the others costs more.
const PIECE: usize = 8192;

/// Runs `work(first row, rows)` over pieces of whole rows of `out`.
fn by_rows(
    pool: &ThreadPool,
    out: &mut [f32],
    cols: usize,
    work: &(dyn Fn(usize, &mut [f32]) + Sync),
) {
    let rows = out.len() / cols;
    let piece_rows = PIECE.div_ceil(cols);
    let out = SharedSlice::new(out);
    pool.run(rows.div_ceil(piece_rows), &|piece| {
        let (first, last) = (piece * piece_rows, ((piece + 1) * piece_rows).min(rows));
        // SAFETY: pieces are disjoint ranges of rows.
        work(first, unsafe { out.part(first * cols..last * cols) });
    });
}

per_level! {
    fn normalize(level, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let cols = weight.len();
        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
            let scale = rms_scale(x, eps);
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * scale * weight;
            }
        }
    }
}

per_level! {
    fn normalize_in_place(level, x: &mut [f32], weight: &[f32], eps: f32) {
        for x in x.chunks_exact_mut(weight.len()) {
            let scale = rms_scale(x, eps);
            for (x, weight) in x.iter_mut().zip(weight) {
                *x = *x * scale * weight;
            }
        }
    }
}

/// One over the root of the mean square of `x` plus `eps`.
#[inline(always)]
fn rms_scale(x: &[f32], eps: f32) -> f32 {
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for x in whole {
        for lane in 0..LANES {
            lanes[lane] += x[lane] * x[lane];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += x * x;
    }
    let mean = sum_lanes(lanes) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

per_level! {
    fn add_in_place(level, x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

per_level! {
    fn gate_in_place(level, gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            let sigmoid = 1.0 / (1.0 + exp((-*gate).min(88.0)));
            // Below -88, what the sigmoid is clamped to would grow with the gate.
            let silu = if *gate < -88.0 { -0.0 } else { *gate * sigmoid };
            *gate = silu * up;
        }
    }
}

per_level! {
    fn clamped_gate_in_place(level, gate: &mut [f32], up: &[f32]) {
        const LIMIT: f32 = 7.0;
        const SLOPE: f32 = 1.702;
        for (gate, up) in gate.iter_mut().zip(up) {
            let x = (*gate).min(LIMIT);
            let sigmoid = 1.0 / (1.0 + exp((-SLOPE * x).min(88.0)));
            // Below, what the sigmoid is clamped to would grow with the gate.
            let gated = if x < -88.0 / SLOPE { -0.0 } else { x * sigmoid };
            *gate = gated * (up.clamp(-LIMIT, LIMIT) + 1.0);
        }
    }
}

per_level! {
    fn scale_in_place(level, x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}

per_level! {
    fn cap_in_place(level, x: &mut [f32], softcap: f32) {
        for x in x {
            *x = capped(*x, softcap);
        }
    }
}

per_level! {
    fn gelu_gate_in_place(level, gate: &mut [f32], up: &[f32]) {
        // 2 sqrt(2 / pi): (1 + tanh z) / 2 is the sigmoid of 2 z.
        const FACTOR: f32 = 1.595_769;
        for (gate, up) in gate.iter_mut().zip(up) {
            let x = *gate;
            let z = FACTOR * (x + 0.044_715 * x * x * x);
            let sigmoid = 1.0 / (1.0 + exp((-z).min(88.0)));
            // Below, the sigmoid is clamped, and would grow with the gate.
            let gelu = if x < -10.0 { -0.0 } else { x * sigmoid };
            *gate = gelu * up;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa_level::IsaLevel;
    use super::*;

    fn pools() -> Vec<ThreadPool> {
        IsaLevel::available()
            .into_iter()
            .flat_map(|level| [1, 3].map(|threads| ThreadPool::new(threads, level).unwrap()))
            .collect()
    }

    fn wave(n: usize, step: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * step).sin() * 5.0).collect()
    }

    #[test]
    fn rms_norm_is_the_formula_with_equal_bits_at_every_level() {
        for (rows, cols) in [(1, 64), (3, 577), (40, 1000)] {
            let (x, weight) = (wave(rows * cols, 0.7), wave(cols, 0.3));
            let mut first: Option<Vec<f32>> = None;
            for pool in pools() {
                let mut out = vec![0.0; rows * cols];
                rms_norm(&pool, &x, &weight, 1e-5, &mut out);
                for (row, out) in out.chunks(cols).enumerate() {
                    let x = &x[row * cols..][..cols];
                    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / cols as f64;
                    for ((out, x), weight) in out.iter().zip(x).zip(&weight) {
                        let exact = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*weight);
                        assert!((f64::from(*out) - exact).abs() <= 1e-6 * exact.abs() + 1e-9);
                    }
                }
                assert_eq!(*first.get_or_insert_with(|| out.clone()), out);
            }
        }
    }

    #[test]
    fn swiglu_is_the_textbook_formula_from_end_to_end_of_the_range() {
        let mut gate = wave(20_000, 0.01);
        gate[..6].copy_from_slice(&[0.0, 88.0, -88.0, 500.0, -500.0, -1e30]);
        let up = wave(20_000, 0.13);
        for pool in pools() {
            let mut out = gate.clone();
            swiglu(&pool, &mut out, &up);
            for ((out, gate), up) in out.iter().zip(&gate).zip(&up) {
                let (gate, up) = (f64::from(*gate), f64::from(*up));
                let exact = gate / (1.0 + (-gate).exp()) * up;
                assert!(
                    (f64::from(*out) - exact).abs() <= 5e-7 * exact.abs() + 1e-30,
                    "{gate} {up}: {out} for {exact}"
                );
            }
        }
    }

    #[test]
    fn the_clamped_gate_is_its_formula_from_end_to_end() {
        let mut gate = wave(20_000, 0.01);
        gate[..6].copy_from_slice(&[0.0, 7.0, -7.0, 500.0, -500.0, -1e30]);
        let up: Vec<f32> = wave(20_000, 0.13).iter().map(|up| 2.0 * up).collect();
        for pool in pools() {
            let mut out = gate.clone();
            clamped_swiglu(&pool, &mut out, &up);
            for ((out, gate), up) in out.iter().zip(&gate).zip(&up) {
                let (gate, up) = (f64::from(*gate).min(7.0), f64::from(*up).clamp(-7.0, 7.0));
                let exact = gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0);
                assert!(
                    (f64::from(*out) - exact).abs() <= 1e-6 * exact.abs() + 1e-6,
                    "{gate} {up}: {out} for {exact}"
                );
            }
        }
    }

    #[test]
    fn geglu_is_the_textbook_formula_from_end_to_end_of_the_range() {
        let mut gate = wave(20_000, 0.01);
        gate[..6].copy_from_slice(&[0.0, 10.0, -10.0, 500.0, -500.0, -1e30]);
        let up = wave(20_000, 0.13);
        let factor = (2.0 / std::f64::consts::PI).sqrt();
        for pool in pools() {
            let mut out = gate.clone();
            geglu(&pool, &mut out, &up);
            for ((out, gate), up) in out.iter().zip(&gate).zip(&up) {
                let (x, up) = (f64::from(*gate), f64::from(*up));
                let exact = 0.5 * x * (1.0 + (factor * (x + 0.044_715 * x.powi(3))).tanh()) * up;
                assert!(
                    (f64::from(*out) - exact).abs() <= 3e-6 * exact.abs() + 1e-12,
                    "{x} {up}: {out} for {exact}"
                );
            }
        }
    }

    #[test]
    fn a_soft_cap_is_a_tanh() {
        let x = wave(20_000, 0.01);
        for (pool, cap) in pools()
            .iter()
            .zip([0.5, 2.0, 30.0, 1e4].into_iter().cycle())
        {
            let mut out = x.clone();
            softcap(pool, &mut out, cap);
            for (out, x) in out.iter().zip(&x) {
                let (x, cap) = (f64::from(*x), f64::from(cap));
                let exact = cap * (x / cap).tanh();
                assert!(
                    (f64::from(*out) - exact).abs() <= 2e-7 * cap,
                    "{x}: {out} for {exact}"
                );
            }
        }
    }

    #[test]
    fn additions_reach_every_number_once() {
        let (x, bias) = (wave(30 * 700, 0.1), wave(700, 0.2));
        for pool in pools() {
            let mut sum = x.clone();
            add(&pool, &mut sum, &x);
            assert!(sum.iter().zip(&x).all(|(sum, x)| *sum == x + x));
            let mut double = x.clone();
            scale(&pool, &mut double, 2.0);
            assert_eq!(double, sum);
            let mut sum = x.clone();
            add_bias(&pool, &mut sum, &bias);
            for (i, sum) in sum.iter().enumerate() {
                assert_eq!(*sum, x[i] + bias[i % 700]);
            }
        }
    }
}
