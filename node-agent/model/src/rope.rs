//! Rotary position embedding (Su et al. 2021): how fast each pair of a head turns, and how that is stretched for contexts that are longer
//! than those trained with.

use std::f64::consts::PI;

use crate::tensor_rows::TensorRows;

/// How queries and keys are rotated.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub pairing: RopePairing,
    /// How many numbers of a head are rotated, the first; of a row of [`Latent`](crate::Latent) attention the last. Even.
    pub dimensions: usize,
    /// Base of the frequencies.
    pub base: f32,
    /// Positions are divided by it; 1 in most models.
    pub factor: f32,
    /// Which pairs the factor is for; `None`: all.
    pub yarn: Option<Yarn>,
    pub divisors: Option<Divisors>,
    /// What sines and cosines are multiplied by; 1 in most models.
    pub magnitude: f32,
}

/// YaRN (Peng et al. 2023): pairs that turn often in the original context keep their frequency, slow ones are divided by the factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Positions that the model was first trained for.
    pub original_context: usize,
    /// Turns in the original context: pairs with more keep their frequency.
    pub beta_fast: f32,
    /// Pairs with fewer are divided by the whole factor.
    pub beta_slow: f32,
}

/// Divisors of the frequencies, one for each pair.
#[derive(Clone, Debug, PartialEq)]
pub enum Divisors {
    Always(TensorRows),
    /// LongRoPE: by the context that there is memory for, and so the same for all requests.
    ByContext {
        short: TensorRows,
        long: TensorRows,
        /// Longer contexts take the long ones.
        original_context: usize,
    },
}

/// Which numbers of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// Neighbours: `(2i, 2i + 1)`.
    Interleaved,
    /// The halves: `(i, i + dimensions / 2)`.
    Halves,
}

impl Rope {
    /// The divisors with memory for so many positions.
    pub fn divisors(&self, context_length: usize) -> Option<&TensorRows> {
        match self.divisors.as_ref()? {
            Divisors::Always(divisors) => Some(divisors),
            Divisors::ByContext {
                short,
                long,
                original_context,
            } => Some(match context_length > *original_context {
                true => long,
                false => short,
            }),
        }
    }

    /// Radians per position of each pair. `divisors`: the numbers of [`divisors`](Self::divisors).
    pub fn frequencies(&self, divisors: Option<&[f32]>) -> Vec<f64> {
        let (dimensions, base) = (self.dimensions as f64, f64::from(self.base));
        let factor = f64::from(self.factor);
        (0..self.dimensions / 2)
            .map(|pair| {
                let divisor = divisors.map_or(1.0, |divisors| f64::from(divisors[pair]));
                let frequency = base.powf(-2.0 * pair as f64 / dimensions) / divisor;
                let kept = self.yarn.map_or(0.0, |yarn| {
                    let (low, high) = yarn.bounds(dimensions, base);
                    1.0 - ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0)
                });
                frequency * (kept + (1.0 - kept) / factor)
            })
            .collect()
    }
}

impl Yarn {
    /// The pairs between which frequencies go from kept to divided.
    fn bounds(&self, dimensions: f64, base: f64) -> (f64, f64) {
        let pair = |turns: f32| {
            let turns = f64::from(turns) * 2.0 * PI;
            dimensions * (self.original_context as f64 / turns).ln() / (2.0 * base.ln())
        };
        let low = pair(self.beta_fast).floor().max(0.0);
        let high = pair(self.beta_slow).ceil().min(dimensions - 1.0);
        (low, high)
    }

    /// What sines and cosines are multiplied by, for a factor. Some models have a multiplier of its logarithm.
    pub fn magnitude(factor: f32, multiplier: f32) -> f32 {
        1.0 + 0.1 * multiplier * factor.ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Rope {
        Rope {
            pairing: RopePairing::Halves,
            dimensions: 64,
            base: 150_000.0,
            factor: 1.0,
            yarn: None,
            divisors: None,
            magnitude: 1.0,
        }
    }

    #[test]
    fn frequencies_fall_from_one_and_are_divided() {
        let frequencies = plain().frequencies(None);
        assert_eq!((frequencies.len(), frequencies[0]), (32, 1.0));
        let last = 150_000_f64.powf(-62.0 / 64.0);
        assert!((frequencies[31] - last).abs() < 1e-12);
        let linear = Rope {
            factor: 4.0,
            ..plain()
        };
        let divisors: Vec<f32> = (1..=32).map(|pair| pair as f32).collect();
        let divided = linear.frequencies(Some(&divisors));
        for pair in 0..32 {
            let expected = frequencies[pair] / 4.0 / (pair + 1) as f64;
            assert!((divided[pair] - expected).abs() < 1e-12, "pair {pair}");
        }
    }

    /// gpt-oss: pairs up to 8 keep their frequency, those from 18 on have it divided, and sines grow by a third.
    #[test]
    fn yarn_divides_slow_pairs_only() {
        let yarn = Rope {
            factor: 32.0,
            yarn: Some(Yarn {
                original_context: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
            }),
            ..plain()
        };
        let (plain, yarn) = (plain().frequencies(None), yarn.frequencies(None));
        for pair in 0..32 {
            let kept = match pair {
                ..=8 => 1.0,
                18.. => 0.0,
                _ => 1.0 - (pair as f64 - 8.0) / 10.0,
            };
            let expected = plain[pair] * (kept + (1.0 - kept) / 32.0);
            assert!((yarn[pair] - expected).abs() < 1e-12, "pair {pair}");
        }
        assert!((Yarn::magnitude(32.0, 1.0) - 1.346_57).abs() < 1e-5);
    }
}
