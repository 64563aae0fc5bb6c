//! The softmax of logits, without dividing by the whole: how likely tokens are beside the most likely one, a draw among them, and the
//! logarithm of the whole. What takes long over a whole vocabulary is written so that the compiler makes vectors of it.

/// Tokens whose weights are summed at once.
pub(crate) const BLOCK: usize = 1024;

/// The place of the token whose share of the whole contains `at`, from 0 to 1. `None`: rounding left a small rest of the whole.
pub(crate) fn draw(logits: &[f32], most: f32, temperature: f32, at: f64) -> Option<usize> {
    let mut room = [0.0; BLOCK];
    let sums: Vec<f64> = logits
        .chunks(BLOCK)
        .map(|block| sum_of_weights(block, most, temperature, &mut room))
        .collect();
    let mut left = at * sums.iter().sum::<f64>();
    for (index, (block, sum)) in logits.chunks(BLOCK).zip(sums).enumerate() {
        if left >= sum {
            left -= sum;
            continue;
        }
        for (place, logit) in block.iter().enumerate() {
            left -= f64::from(weight(*logit, most, temperature));
            if left < 0.0 {
                return Some(index * BLOCK + place);
            }
        }
    }
    None
}

/// Of up to [`BLOCK`] tokens. Each loop is one that the compiler makes vectors of.
pub(crate) fn sum_of_weights(
    logits: &[f32],
    most: f32,
    temperature: f32,
    room: &mut [f32; BLOCK],
) -> f64 {
    let weights = &mut room[..logits.len()];
    for (place, logit) in weights.iter_mut().zip(logits) {
        *place = weight(*logit, most, temperature);
    }
    let mut sums = [0.0_f64; 8];
    let (eights, rest) = weights.as_chunks::<8>();
    for eight in eights {
        for (sum, weight) in sums.iter_mut().zip(eight) {
            *sum += f64::from(*weight);
        }
    }
    sums.iter().sum::<f64>() + rest.iter().copied().map(f64::from).sum::<f64>()
}

/// How likely a token is beside one with the logit `most`: `exp((logit - most) / temperature)`, at most 1, with an error of some 1e-7 of
/// it; 0 where it is below 1e-37. The library's `exp` takes ten times as long and is not the same on every machine. The polynomial is
/// that of the Cephes library (Moshier, `expf`).
pub(crate) fn weight(logit: f32, most: f32, temperature: f32) -> f32 {
    /// Adding it rounds to a whole number, which then is in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const LEAST: f32 = -86.0;
    let exponent = (logit - most) / temperature;
    let x = exponent.max(LEAST);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let rest = x - power * LN_2[0] - power * LN_2[1];
    let polynomial = [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        5.0e-1,
    ];
    let polynomial = polynomial
        .iter()
        .fold(1.987_569_2e-4, |sum, coefficient| sum * rest + coefficient);
    let power_of_2 = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let scale = f32::from_bits(power_of_2.wrapping_add(127) << 23);
    let weight = (polynomial * rest * rest + rest + 1.0) * scale;
    if exponent < LEAST { 0.0 } else { weight }
}

/// What is subtracted from a logit to have the natural logarithm of its token's probability.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|logit| f64::from(logit - most).exp())
        .sum();
    f64::from(most) + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_the_library() {
        for step in 0..=90_000 {
            let (logit, most) = (-(step as f32) / 1000.0, 0.0);
            for temperature in [1.0, 0.7, 2.0] {
                let exact = f64::from(logit / temperature).exp();
                let weight = f64::from(weight(logit, most, temperature));
                let error = (weight - exact).abs();
                let bound = if exact < 1e-37 { exact } else { exact * 2.5e-7 };
                assert!(error <= bound, "{logit} {temperature}: {weight} {exact}");
            }
        }
        assert_eq!(weight(3.5, 3.5, 1e-30), 1.0);
        assert_eq!(weight(f32::NEG_INFINITY, 3.5, 1.0), 0.0);
        assert_eq!(weight(3.4, 3.5, 1e-30), 0.0);
    }
}
