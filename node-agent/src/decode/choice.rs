//! One continuation of a prompt: from logits to the next token and its text. Pure except for the sampler's seed.
//! Decides when a continuation ends; knows no ring and no channel.

use prima_text::{Detokenizer, Sampler, SamplingError, Tokenizer};

use super::stop_strings::StopStrings;
use crate::generation::{FinishReason, GenerationEvent, GenerationRequest, TokenLogprob};

pub struct Choice {
    index: usize,
    sampler: Sampler,
    detokenizer: Detokenizer,
    stop: StopStrings,
    logprobs: Option<usize>,
    /// Tokens that may still come.
    remaining: usize,
    pub finished: bool,
}

impl Choice {
    /// Choice `index` of `request`; it ends at the latest after the context's last position. Errors in the sampling
    /// parameters are those of [`Sampler::new`].
    pub fn new(
        index: usize,
        request: &GenerationRequest,
        tokenizer: &Tokenizer,
        context_length: usize,
    ) -> Result<Self, SamplingError> {
        let mut sampling = request.sampling.clone();
        sampling.seed = sampling.seed.wrapping_add(index as u64);
        let mut sampler = Sampler::new(sampling)?;
        sampler.accept_prompt(&request.prompt);
        sampler.constrain(request.constraint.clone());
        sampler.limit_reasoning(request.reasoning.clone());
        // The last token needs no position: nothing is computed after it.
        let room = (context_length + 1).saturating_sub(request.prompt.len());
        Ok(Self {
            index,
            sampler,
            detokenizer: Detokenizer::new(tokenizer).showing(request.shown.clone()),
            stop: StopStrings::new(&request.stop),
            logprobs: request.logprobs,
            remaining: request.max_tokens.min(room),
            finished: false,
        })
    }

    /// Takes the logits after the last token, emits the events that follow from them, and returns the next token to
    /// compute, or `None` when this choice has finished.
    pub fn advance(
        &mut self,
        logits: &[f32],
        tokenizer: &Tokenizer,
        mut emit: impl FnMut(GenerationEvent),
    ) -> Result<Option<u32>, SamplingError> {
        let sample = self.sampler.sample(logits, self.logprobs)?;
        if tokenizer.is_end_of_generation(sample.token) {
            self.finish(FinishReason::Stop, emit);
            return Ok(None);
        }
        self.sampler.accept(sample.token)?;
        self.remaining -= 1;
        let text = self.detokenizer.push(sample.token);
        let (text, stopped) = self.stop.push(&text);
        emit(GenerationEvent::Token {
            choice: self.index,
            token: sample.token,
            text,
            logprob: self.logprobs.map(|_| TokenLogprob {
                logprob: sample.logprob,
                top: sample.top,
            }),
        });
        if let Some(stop) = stopped {
            self.finished = true;
            emit(GenerationEvent::Finished {
                choice: self.index,
                reason: FinishReason::StopString(stop),
                text: String::new(),
            });
            return Ok(None);
        }
        if self.remaining == 0 {
            self.finish(FinishReason::Length, emit);
            return Ok(None);
        }
        Ok(Some(sample.token))
    }

    /// The only tokens that can come next, as far as the form of the answer tells.
    pub fn forced(&mut self) -> Vec<u32> {
        self.sampler.forced()
    }

    /// Ends the text with what was held back.
    fn finish(&mut self, mut reason: FinishReason, mut emit: impl FnMut(GenerationEvent)) {
        self.finished = true;
        let (mut text, stopped) = self.stop.push(&self.detokenizer.clone().finish());
        match stopped {
            Some(stop) => reason = FinishReason::StopString(stop),
            None => text.push_str(&self.stop.finish()),
        }
        emit(GenerationEvent::Finished {
            choice: self.index,
            reason,
            text,
        });
    }
}
