//! The scalar arithmetic that every level shares: half and brain floats, the exponential, rounding.
//! Written without branches so that the compiler vectorises the loops that use it.

/// From the exponent's bias in half precision, 15, to that of f32, 127.
pub(super) const HALF_REBIAS: u32 = (127 - 15) << 23;

/// What the last place of a subnormal half-precision number is worth.
pub(super) const HALF_SUBNORMAL: f32 = 1.0 / (1 << 24) as f32;

/// The value of a half-precision number, subnormals, infinities and NaN included. Avoids subnormal f32 numbers, with which
/// many processors take a hundred times as long.
#[inline(always)]
pub(super) fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff);
    let normal = (magnitude << 13) + HALF_REBIAS;
    // Infinity and NaN have the largest exponent in f32, too.
    let special = if magnitude >= 0x7c00 { HALF_REBIAS } else { 0 };
    let subnormal = (magnitude.cast_signed() as f32 * HALF_SUBNORMAL).to_bits();
    let value = if magnitude < 0x400 {
        subnormal
    } else {
        normal + special
    };
    f32::from_bits(value | (u32::from(half & 0x8000) << 16))
}

/// The value of a brain-float number.
#[inline(always)]
pub(super) fn bf16_to_f32(brain: u16) -> f32 {
    f32::from_bits(u32::from(brain) << 16)
}

/// `value` rounded to the 11 significant bits that half precision keeps, with the exponent range of
/// f32: what storing it as F16 does to it, without overflow and underflow.
#[inline(always)]
pub(super) fn round_to_f16_precision(value: f32) -> f32 {
    let bits = value.to_bits();
    let half_to_even = 0x0fff + ((bits >> 13) & 1);
    f32::from_bits((bits + half_to_even) & !0x1fff)
}

/// Added to a number below 2^22 in magnitude, this rounds the number to an integer (ties to even); the integer is then in
/// the low bits of the sum.
pub(super) const ROUNDER: f32 = 12_582_912.0;

/// `e^x` for `x <= 88`, to within 2 units in the last place; 0 below about -87.3 and for -infinity;
/// exactly 1 for 0. NaN for NaN; the value at 88 beyond.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // x = k ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, so that k times the first is exact.
    let clamped = x.clamp(-87.336_54, 88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUNDER;
    let k = shifted - ROUNDER;
    let r = (clamped - k * (355.0 / 512.0)) - k * -2.121_944_4e-4;
    // Minimax polynomial of degree 6 (Cephes expf).
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 0.166_666_65;
    p = p * r + 0.5;
    let e = p * (r * r) + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x < -87.336_54 { 0.0 } else { e * power }
}

/// `softcap * tanh(x / softcap)`, to within 2e-7 of `softcap`.
#[inline(always)]
pub(super) fn capped(x: f32, softcap: f32) -> f32 {
    // tanh x = 1 - 2 / (e^2x + 1); beyond 40, e^2x is as good as infinite.
    let power = exp((2.0 / softcap * x).clamp(-80.0, 80.0));
    softcap * (1.0 - 2.0 / (power + 1.0))
}

/// `a * b + c`, fused if all processors that this build is for have such an instruction; otherwise fusing would cost a call
/// into the C library for every product.
#[inline(always)]
pub(super) fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// Lanes in which sums over a row are kept, at every level: the order of additions is part of the result.
pub(super) const LANES: usize = 16;

/// The sum of the lanes, in a fixed order.
#[inline(always)]
pub(super) fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_convert_as_the_half_crate_converts_them() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{bits:#x}: {ours} {theirs}"
            );
        }
    }

    #[test]
    fn rounding_to_half_precision_is_what_f16_does() {
        let mut value = 6.2e-5_f32;
        while value < 65_000.0 {
            for value in [value, -value] {
                assert_eq!(
                    round_to_f16_precision(value),
                    half::f16::from_f32(value).to_f32()
                );
            }
            value *= 1.000_37;
        }
        assert_eq!(round_to_f16_precision(0.0), 0.0);
        assert!(round_to_f16_precision(1e30).is_finite());
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut x = -87.3_f32;
        while x < 88.0 {
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * exact;
            let error = (f64::from(exp(x)) - exact).abs() / unit;
            assert!(error < 2.0, "exp({x}) is off by {error} units");
            x += 0.001_3;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1000.0), 0.0);
    }
}
