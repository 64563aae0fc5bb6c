//! What a client may ask of the sampler.
//!
//! Decides: the parameters, their ranges and their defaults. Refuses: to move a value that is out of range back into it.

use crate::sampling_error::SamplingError;

/// How to choose tokens. The default draws from the model's own distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 to 2; divides the logits. 0: always the most likely token, the lowest id among equals.
    pub temperature: f32,
    /// Only this many of the most likely tokens; 0: all.
    pub top_k: usize,
    /// 0 to 1; only the most likely tokens that together have at least this probability. 1: all; at least one is always kept.
    pub top_p: f32,
    /// 0 to 1; only tokens that have at least this share of the most likely token's probability. 0: all.
    pub min_p: f32,
    /// Above 0 to 10; divides the logits of tokens that occurred, or multiplies them where they are negative. 1: off.
    pub repetition_penalty: f32,
    /// -2 to 2; taken from a token's logit for every time it was generated.
    pub frequency_penalty: f32,
    /// -2 to 2; taken from a token's logit once if it was generated at all.
    pub presence_penalty: f32,
    /// -100 to 100 each; added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Of the draw.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Whether all are in range; the error names the one that is not.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let Self {
            temperature,
            top_k: _,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            seed: _,
        } = self;
        let check = |parameter, found: f32, inside: bool, expected| {
            if inside {
                Ok(())
            } else {
                Err(SamplingError::Range {
                    parameter,
                    expected,
                    found,
                })
            }
        };
        let unit = 0.0..=1.0;
        let penalty = -2.0..=2.0;
        check(
            "temperature",
            *temperature,
            (0.0..=2.0).contains(temperature),
            "0 to 2",
        )?;
        check("top_p", *top_p, unit.contains(top_p), "0 to 1")?;
        check("min_p", *min_p, unit.contains(min_p), "0 to 1")?;
        let repetition = *repetition_penalty;
        check(
            "repetition_penalty",
            repetition,
            repetition > 0.0 && repetition <= 10.0,
            "above 0, at most 10",
        )?;
        check(
            "frequency_penalty",
            *frequency_penalty,
            penalty.contains(frequency_penalty),
            "-2 to 2",
        )?;
        check(
            "presence_penalty",
            *presence_penalty,
            penalty.contains(presence_penalty),
            "-2 to 2",
        )?;
        for (_, bias) in logit_bias {
            check(
                "logit_bias",
                *bias,
                (-100.0..=100.0).contains(bias),
                "-100 to 100",
            )?;
        }
        Ok(())
    }

    /// Whether any penalty is on.
    pub(crate) fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_out_of_range_are_named() {
        let default = SamplingParams::default;
        for (params, parameter) in [
            (
                SamplingParams {
                    temperature: -0.1,
                    ..default()
                },
                "temperature: expected 0 to 2, found -0.1",
            ),
            (
                SamplingParams {
                    temperature: f32::NAN,
                    ..default()
                },
                "temperature",
            ),
            (
                SamplingParams {
                    top_p: 1.1,
                    ..default()
                },
                "top_p",
            ),
            (
                SamplingParams {
                    min_p: -1.0,
                    ..default()
                },
                "min_p",
            ),
            (
                SamplingParams {
                    repetition_penalty: 0.0,
                    ..default()
                },
                "repetition_penalty",
            ),
            (
                SamplingParams {
                    frequency_penalty: 2.5,
                    ..default()
                },
                "frequency_penalty",
            ),
            (
                SamplingParams {
                    presence_penalty: f32::INFINITY,
                    ..default()
                },
                "presence_penalty",
            ),
            (
                SamplingParams {
                    logit_bias: vec![(0, 101.0)],
                    ..default()
                },
                "logit_bias",
            ),
        ] {
            let message = params.validate().unwrap_err().to_string();
            assert!(message.starts_with(parameter), "{message}");
        }
        assert_eq!(default().validate(), Ok(()));
    }
}
