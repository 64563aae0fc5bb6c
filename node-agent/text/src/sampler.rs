//! The next token from the model's logits.
//!
//! Decides, in this order: logit bias, penalties, and what a grammar allows. Then comes the token that a bound on reasoning makes due,
//! if there is one. Else it is the most likely token (temperature 0), or a seeded draw after top-k, top-p, min-p and temperature; the
//! order of these filters is llama.cpp's default. Refuses: logits that are not numbers, parameters outside their range.
//!
//! The penalties: `repetition_penalty` is that of the CTRL paper (Keskar et al. 2019, section 4.1), over prompt and answer; frequency
//! and presence penalties are OpenAI's, over the answer only, as vLLM has them too. There is no window: all tokens count.
//!
//! The same parameters, seed, tokens and logits give the same tokens on every machine; with min-p, where `ln` is computed the
//! same.

use std::cmp::Ordering;
use std::collections::HashMap;

use crate::grammar::Constraint;
use crate::random::Random;
use crate::reasoning_limit::ReasoningLimit;
use crate::sampling_error::SamplingError;
use crate::sampling_params::SamplingParams;
use crate::softmax::{BLOCK, draw, log_sum_exp, sum_of_weights, weight};

/// A token, and how likely the model itself found it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub token: u32,
    /// Natural logarithm of the token's probability by the model, before bias, penalties and temperature; 0 if nobody asked for it.
    pub logprob: f32,
    /// The tokens that the model finds most likely with their logprobs, the most likely first.
    pub top: Vec<(u32, f32)>,
}

/// Chooses the tokens of one answer.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    /// What the answer has to look like.
    constraint: Option<Constraint>,
    /// How long it may reason.
    reasoning: Option<ReasoningLimit>,
    random: Random,
    /// What has occurred, where penalties need it.
    occurred: HashMap<u32, Occurred>,
    /// Room for logits that bias and penalties change, and for tokens to choose from with their logits; kept from token to token.
    adjusted: Vec<f32>,
    candidates: Vec<Candidate>,
    kept: Vec<f32>,
}

impl Sampler {
    /// Begins an answer. The error names the parameter that is out of range.
    pub fn new(params: SamplingParams) -> Result<Self, SamplingError> {
        params.validate()?;
        Ok(Self {
            random: Random::from_seed(params.seed),
            params,
            constraint: None,
            reasoning: None,
            occurred: HashMap::new(),
            adjusted: Vec::new(),
            candidates: Vec::new(),
            kept: Vec::new(),
        })
    }

    /// Holds the answer to a grammar.
    pub fn constrain(&mut self, constraint: Option<Constraint>) {
        self.constraint = constraint;
    }

    /// Bounds the tokens of reasoning.
    pub fn limit_reasoning(&mut self, limit: Option<ReasoningLimit>) {
        self.reasoning = limit;
    }

    /// Tells what the prompt is, for the repetition penalty.
    pub fn accept_prompt(&mut self, tokens: &[u32]) {
        if self.params.penalizes() {
            for token in tokens {
                self.occurred.entry(*token).or_default();
            }
        }
    }

    /// Tells that `token` is part of the answer, for all penalties and for its grammar. [`Sampler::sample`] does not do so itself.
    pub fn accept(&mut self, token: u32) -> Result<(), SamplingError> {
        if self.params.penalizes() {
            self.occurred.entry(token).or_default().generated += 1;
        }
        if let Some(limit) = &mut self.reasoning {
            limit.accept(token);
        }
        match &mut self.constraint {
            Some(constraint) => constraint
                .accept(token)
                .map_err(|problem| SamplingError::Grammar { problem }),
            None => Ok(()),
        }
    }

    /// The only tokens that the grammar lets follow, in order: none where it leaves a choice. They are chosen whatever the logits are, but for a
    /// bound on reasoning.
    pub fn forced(&mut self) -> Vec<u32> {
        let constraint = self.constraint.as_mut();
        constraint.map_or_else(Vec::new, Constraint::forced)
    }

    /// Chooses the next token. `logits`: one for each token of the vocabulary, natural logarithms up to a constant; minus infinity
    /// rules a token out. `top_logprobs`: `Some(n)` also answers how likely the token and the n most likely ones are.
    pub fn sample(
        &mut self,
        logits: &[f32],
        top_logprobs: Option<usize>,
    ) -> Result<Sample, SamplingError> {
        check(logits)?;
        let as_they_are = self.params.logit_bias.is_empty()
            && self.occurred.is_empty()
            && self.constraint.is_none();
        let due = self.reasoning.as_ref().and_then(ReasoningLimit::due);
        let token = if as_they_are {
            self.choose_or(due, logits)?
        } else {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.adjust(&mut adjusted)?;
            if let Some(constraint) = &mut self.constraint {
                constraint
                    .restrict(&mut adjusted)
                    .map_err(|problem| SamplingError::Grammar { problem })?;
            }
            let token = self.choose_or(due, &adjusted)?;
            self.adjusted = adjusted;
            token
        };
        Ok(match top_logprobs {
            None => Sample {
                token,
                logprob: 0.0,
                top: Vec::new(),
            },
            Some(count) => with_logprobs(token, logits, count),
        })
    }

    fn adjust(&self, logits: &mut [f32]) -> Result<(), SamplingError> {
        let vocabulary = logits.len();
        for (token, bias) in &self.params.logit_bias {
            let logit = logits
                .get_mut(*token as usize)
                .ok_or(SamplingError::NoSuchToken {
                    token: *token,
                    vocabulary,
                })?;
            *logit += bias;
        }
        for (token, Occurred { generated }) in &self.occurred {
            let logit = logits
                .get_mut(*token as usize)
                .ok_or(SamplingError::NoSuchToken {
                    token: *token,
                    vocabulary,
                })?;
            if *logit > 0.0 {
                *logit /= self.params.repetition_penalty;
            } else {
                *logit *= self.params.repetition_penalty;
            }
            if *generated > 0 {
                *logit -= *generated as f32 * self.params.frequency_penalty
                    + self.params.presence_penalty;
            }
        }
        Ok(())
    }

    /// The token that is due, unless it is ruled out; else one by chance.
    fn choose_or(&mut self, due: Option<u32>, logits: &[f32]) -> Result<u32, SamplingError> {
        let possible = |token: &u32| {
            let logit = logits.get(*token as usize);
            logit.is_some_and(|logit| *logit > f32::NEG_INFINITY)
        };
        match due.filter(possible) {
            Some(token) => Ok(token),
            None => self.choose(logits),
        }
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32, SamplingError> {
        let Some(best) = best(logits) else {
            return Err(SamplingError::NothingPossible);
        };
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            ..
        } = self.params;
        if temperature == 0.0 || top_k == 1 {
            return Ok(best.token);
        }
        let at = self.random.unit();
        // What most clients ask for. The whole vocabulary is drawn from where it lies.
        if top_k == 0 && top_p >= 1.0 && min_p == 0.0 {
            let drawn = draw(logits, best.logit, temperature, at);
            return Ok(drawn.map_or(best.token, |place| place as u32));
        }
        let candidates = &mut self.candidates;
        let least = best.logit + min_p.ln();
        if top_k > 0 {
            take(candidates, logits, f32::NEG_INFINITY);
            keep_top_k(candidates, top_k);
            if top_p < 1.0 {
                let whole: f64 = candidates
                    .iter()
                    .map(|candidate| candidate.weight(best.logit))
                    .sum();
                keep_top_p(candidates, f64::from(top_p) * whole, best.logit);
            }
        } else if top_p < 1.0 {
            let mut room = [0.0; BLOCK];
            let whole: f64 = logits
                .chunks(BLOCK)
                .map(|block| sum_of_weights(block, best.logit, 1.0, &mut room))
                .sum();
            let wanted = f64::from(top_p) * whole;
            take(candidates, logits, best.logit - NEAR);
            if !keep_top_p(candidates, wanted, best.logit) {
                take(candidates, logits, f32::NEG_INFINITY);
                keep_top_p(candidates, wanted, best.logit);
            }
        } else {
            take(candidates, logits, least);
        }
        candidates.retain(|candidate| candidate.logit >= least);
        self.kept.clear();
        self.kept
            .extend(candidates.iter().map(|candidate| candidate.logit));
        let drawn = draw(&self.kept, best.logit, temperature, at);
        Ok(drawn.map_or(best.token, |place| candidates[place].token))
    }
}

/// In most distributions, tokens with logits within this of the largest have nearly all of the probability.
const NEAR: f32 = 10.0;

#[derive(Debug, Clone, Copy, Default)]
struct Occurred {
    /// How often in the answer; a token that is only in the prompt has 0.
    generated: u32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    token: u32,
    logit: f32,
}

impl Candidate {
    /// The more likely first, the lower id among equals. No logit is NaN.
    fn order(&self, other: &Self) -> Ordering {
        let by_logit = other.logit.partial_cmp(&self.logit);
        by_logit
            .unwrap_or(Ordering::Equal)
            .then(self.token.cmp(&other.token))
    }

    /// How likely it is beside a token with the logit `most`.
    fn weight(&self, most: f32) -> f64 {
        f64::from(weight(self.logit, most, 1.0))
    }
}

fn candidates_of(logits: &[f32]) -> impl Iterator<Item = Candidate> {
    (0..)
        .zip(logits)
        .map(|(token, &logit)| Candidate { token, logit })
}

fn check(logits: &[f32]) -> Result<(), SamplingError> {
    // One comparison for both: NaN compares as false.
    let is_usable = |logit: &f32| *logit < f32::INFINITY;
    // By blocks without an early end, which vectors can do.
    let mut blocks = logits.chunks(BLOCK);
    if blocks.all(|block| block.iter().fold(true, |all, one| all & is_usable(one))) {
        return Ok(());
    }
    match candidates_of(logits).find(|candidate| !is_usable(&candidate.logit)) {
        Some(Candidate {
            token,
            logit: found,
        }) => Err(SamplingError::Logit { token, found }),
        None => Ok(()),
    }
}

/// The most likely token, the lowest id among equals, unless none is possible.
fn best(logits: &[f32]) -> Option<Candidate> {
    // Several maxima, which vectors can do.
    let mut largest = [f32::NEG_INFINITY; 16];
    let (blocks, rest) = logits.as_chunks::<16>();
    for block in blocks.iter().map(|block| &block[..]).chain([rest]) {
        for (largest, logit) in largest.iter_mut().zip(block) {
            *largest = if *logit > *largest { *logit } else { *largest };
        }
    }
    let logit = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let token = logits
        .iter()
        .position(|other| *other == logit && logit > f32::NEG_INFINITY)?;
    Some(Candidate {
        token: token as u32,
        logit,
    })
}

/// Takes the tokens that are possible and have at least this logit.
fn take(candidates: &mut Vec<Candidate>, logits: &[f32], least: f32) {
    candidates.clear();
    candidates.extend(
        candidates_of(logits)
            .filter(|candidate| candidate.logit >= least && candidate.logit > f32::NEG_INFINITY),
    );
}

fn keep_top_k(candidates: &mut Vec<Candidate>, count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count - 1, Candidate::order);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(Candidate::order);
}

/// Keeps the most likely candidates until their weights beside `most` together are `wanted`; whether they are.
fn keep_top_p(candidates: &mut Vec<Candidate>, wanted: f64, most: f32) -> bool {
    let mut sum = 0.0;
    // In most distributions, a few of the vocabulary's tokens are enough: only as many as needed are sorted.
    let mut sorted = 0;
    let mut next = 256;
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        let count = next.min(rest.len());
        if count < rest.len() {
            rest.select_nth_unstable_by(count - 1, Candidate::order);
        }
        rest[..count].sort_unstable_by(Candidate::order);
        for at in sorted..sorted + count {
            sum += candidates[at].weight(most);
            if sum >= wanted {
                candidates.truncate(at + 1);
                return true;
            }
        }
        sorted += count;
        next *= 4;
    }
    false
}

/// The token with the largest logit, the lowest id among equals; 0 if none is possible.
pub fn most_likely(logits: &[f32]) -> u32 {
    best(logits).map_or(0, |best| best.token)
}

fn with_logprobs(token: u32, logits: &[f32], count: usize) -> Sample {
    let whole = log_sum_exp(logits);
    let logprob = |logit: f32| (f64::from(logit) - whole) as f32;

    let mut top: Vec<Candidate> = Vec::with_capacity(count.min(logits.len()) + 1);
    for candidate in candidates_of(logits) {
        let place = top.partition_point(|other| other.order(&candidate).is_lt());
        if place < count {
            top.insert(place, candidate);
            top.truncate(count);
        }
    }
    Sample {
        token,
        logprob: logits
            .get(token as usize)
            .map_or(f32::NEG_INFINITY, |logit| logprob(*logit)),
        top: top
            .iter()
            .map(|candidate| (candidate.token, logprob(candidate.logit)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(params).unwrap()
    }

    fn greedy() -> SamplingParams {
        SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        }
    }

    /// Logits like a model's: a few likely tokens, a long tail; ties included.
    fn logits(vocabulary: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::from_seed(seed);
        (0..vocabulary)
            .map(|_| {
                ((random.unit() + random.unit() + random.unit()).powi(3) * 8.0).round() as f32 / 8.0
            })
            .collect()
    }

    /// What the module's documentation says, written as plainly as can be: the tokens that may be drawn with their probabilities.
    fn distribution(params: &SamplingParams, logits: &[f32]) -> Vec<(u32, f64)> {
        fn softmax(tokens: &[(u32, f64)]) -> Vec<f64> {
            let most = tokens
                .iter()
                .map(|token| token.1)
                .fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = tokens.iter().map(|token| (token.1 - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            weights.iter().map(|weight| weight / sum).collect()
        }
        let mut tokens: Vec<(u32, f64)> = (0..)
            .zip(logits.iter().map(|logit| f64::from(*logit)))
            .collect();
        tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if params.top_k > 0 {
            tokens.truncate(params.top_k);
        }
        let mut sum = 0.0;
        let mut kept = 0;
        for probability in softmax(&tokens) {
            kept += 1;
            sum += probability;
            if sum >= f64::from(params.top_p) {
                break;
            }
        }
        tokens.truncate(kept);
        let probabilities = softmax(&tokens);
        let least = probabilities[0] * f64::from(params.min_p);
        let kept = probabilities
            .iter()
            .filter(|probability| **probability >= least * (1.0 - 1e-6))
            .count();
        tokens.truncate(kept);
        for token in &mut tokens {
            token.1 /= f64::from(params.temperature);
        }
        let probabilities = softmax(&tokens);
        tokens
            .iter()
            .zip(probabilities)
            .map(|(token, probability)| (token.0, probability))
            .collect()
    }

    #[test]
    fn greedy_takes_the_largest_and_the_lowest_id_among_equals() {
        let mut sampler = sampler(greedy());
        assert_eq!(
            sampler.sample(&[1.0, 3.0, 3.0, 2.0], None).unwrap().token,
            1
        );
        assert_eq!(
            sampler
                .sample(&[-5.0, f32::NEG_INFINITY, -4.0], None)
                .unwrap()
                .token,
            2
        );
        let logits = logits(150_000, 7);
        let most = logits.iter().copied().fold(f32::MIN, f32::max);
        let first = logits.iter().position(|logit| *logit == most).unwrap();
        assert_eq!(sampler.sample(&logits, None).unwrap().token as usize, first);
    }

    #[test]
    fn drawn_tokens_follow_the_distribution() {
        let logits = logits(1000, 1);
        let default = SamplingParams {
            seed: 42,
            ..SamplingParams::default()
        };
        for params in [
            default.clone(),
            SamplingParams {
                temperature: 0.5,
                ..default.clone()
            },
            SamplingParams {
                top_k: 12,
                temperature: 2.0,
                ..default.clone()
            },
            SamplingParams {
                top_p: 0.8,
                ..default.clone()
            },
            SamplingParams {
                min_p: 0.2,
                temperature: 1.5,
                ..default.clone()
            },
            SamplingParams {
                top_k: 40,
                top_p: 0.9,
                min_p: 0.05,
                temperature: 0.7,
                ..default
            },
        ] {
            let expected = distribution(&params, &logits);
            let mut sampler = sampler(params.clone());
            let draws = 20_000;
            let mut counts = HashMap::<u32, u32>::new();
            for _ in 0..draws {
                *counts
                    .entry(sampler.sample(&logits, None).unwrap().token)
                    .or_default() += 1;
            }
            assert!(
                counts
                    .keys()
                    .all(|token| expected.iter().any(|(known, _)| known == token)),
                "{params:?}"
            );
            // Pearson's chi-square over the tokens that are expected at least ten times, the others as one.
            let mut statistic = 0.0;
            let mut classes = 0;
            let (mut other_expected, mut other_found) = (0.0, f64::from(draws));
            for (token, probability) in &expected {
                let expected = probability * f64::from(draws);
                if expected < 10.0 {
                    other_expected += expected;
                    continue;
                }
                let found = f64::from(counts.get(token).copied().unwrap_or(0));
                other_found -= found;
                statistic += (found - expected).powi(2) / expected;
                classes += 1;
            }
            if other_expected >= 10.0 {
                statistic += (other_found - other_expected).powi(2) / other_expected;
                classes += 1;
            }
            // Four standard deviations above the mean of the chi-square distribution: about one seed in 10,000 would fail.
            let freedom = f64::from(classes - 1);
            assert!(
                statistic < freedom + 4.0 * (2.0 * freedom).sqrt() + 4.0,
                "{params:?}: {statistic} of {freedom}"
            );
        }
    }

    #[test]
    fn a_seed_gives_the_same_tokens_again_and_another_gives_others() {
        let logits = logits(500, 3);
        let tokens = |seed| {
            let mut sampler = sampler(SamplingParams {
                seed,
                ..SamplingParams::default()
            });
            (0..32)
                .map(|_| sampler.sample(&logits, None).unwrap().token)
                .collect::<Vec<_>>()
        };
        assert_eq!(tokens(1), tokens(1));
        assert_ne!(tokens(1), tokens(2));
    }

    #[test]
    fn penalties_and_bias_change_the_logits_they_are_for() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            logit_bias: vec![(4, 1.5)],
            ..greedy()
        };
        let mut sampler = sampler(params);
        sampler.accept_prompt(&[0, 0, 1]);
        sampler.accept(1).unwrap();
        sampler.accept(2).unwrap();
        sampler.accept(2).unwrap();
        let mut logits = [4.0, 4.0, -4.0, 1.0, 1.0];
        sampler.adjust(&mut logits).unwrap();
        assert_eq!(logits, [2.0, 1.25, -9.25, 1.0, 2.5]);
        assert_eq!(
            sampler
                .sample(&[4.0, 4.0, -4.0, 1.0, 1.0], None)
                .unwrap()
                .token,
            4
        );
    }

    #[test]
    fn logprobs_are_of_the_models_own_distribution() {
        let params = SamplingParams {
            logit_bias: vec![(0, 100.0)],
            ..greedy()
        };
        let logits = [1.0_f32, 3.0, 2.0, 3.0];
        let sample = sampler(params).sample(&logits, Some(3)).unwrap();
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        let logprob = |logit: f64| (logit - sum.ln()) as f32;
        assert_eq!(sample.token, 0);
        assert!((sample.logprob - logprob(1.0)).abs() < 1e-6);
        assert_eq!(
            sample.top,
            [(1, logprob(3.0)), (3, logprob(3.0)), (2, logprob(2.0))]
        );
        let none = sampler(greedy()).sample(&logits, Some(0)).unwrap();
        assert!(none.top.is_empty() && none.logprob < 0.0);
        let all = sampler(greedy()).sample(&logits, Some(20)).unwrap().top;
        let whole: f32 = all.iter().map(|(_, logprob)| logprob.exp()).sum();
        assert!(all.len() == 4 && (whole - 1.0).abs() < 1e-6);
    }

    #[test]
    fn logits_that_are_no_numbers_are_an_error() {
        let mut sampler = sampler(SamplingParams::default());
        let message = |result: Result<Sample, SamplingError>| result.unwrap_err().to_string();
        assert!(message(sampler.sample(&[0.0, f32::NAN], None)).contains("token 1"));
        assert!(message(sampler.sample(&[f32::INFINITY, 0.0], None)).contains("found inf"));
        assert_eq!(
            sampler.sample(&[], None),
            Err(SamplingError::NothingPossible)
        );
        assert_eq!(
            sampler.sample(&[f32::NEG_INFINITY; 3], None),
            Err(SamplingError::NothingPossible)
        );
        // Minus infinity only rules out.
        assert_eq!(
            sampler
                .sample(&[f32::NEG_INFINITY, 0.0], None)
                .unwrap()
                .token,
            1
        );
        let mut biased = self::sampler(SamplingParams {
            logit_bias: vec![(9, 1.0)],
            ..greedy()
        });
        assert!(message(biased.sample(&[0.0; 9], None)).contains("token 9"));
    }

    proptest! {
        #[test]
        fn filters_keep_what_the_plain_reference_keeps(
            seed: u64, vocabulary in 1..3000usize, top_k in 0..600usize, top_p in 0.0..1.0f32, min_p in 0.0..0.5f32,
        ) {
            let logits = logits(vocabulary, seed);
            let params = SamplingParams { top_k, top_p, min_p, ..SamplingParams::default() };
            let expected = distribution(&params, &logits);
            let mut sampler = sampler(params);
            sampler.sample(&logits, None).unwrap();
            if top_k != 1 {
                let kept: Vec<u32> = sampler.candidates.iter().map(|candidate| candidate.token).collect();
                // Sums in another order may fall to the other side of the bound, by one token.
                let (longer, shorter) = if kept.len() > expected.len() { (kept.len(), expected.len()) } else { (expected.len(), kept.len()) };
                prop_assert!(longer - shorter <= 1);
                for (kept, expected) in kept.iter().zip(&expected) {
                    prop_assert_eq!(*kept, expected.0);
                }
            }
        }
    }
}
