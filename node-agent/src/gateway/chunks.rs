//! A streamed answer in OpenAI's chunks: one for every part of a choice, then `[DONE]`. A generation that fails in mid-stream ends in one
//! `{"error": ...}` and no `[DONE]`.

use prima_text::Part;
use serde_json::{Value, json};

use crate::generation::{FinishReason, TokenLogprob, Usage};

use super::answer;
use super::in_flight::Progress;
use super::openai_error::ApiError;
use super::stream::{Format, Message};

/// How one of the two routes writes its chunks.
pub trait ChunkFormat: Send + 'static {
    /// The choice object that opens choice `index`, if this API opens them.
    fn opening(&self, index: usize) -> Option<Value>;
    /// The choice object that carries the next part of the answer, and a token where logprobs were asked for.
    fn delta(&mut self, index: usize, part: Part, token: Option<(u32, TokenLogprob)>) -> Value;
    /// The choice object that ends choice `index`.
    fn finish(&self, index: usize, reason: FinishReason) -> Value;
    /// A chunk of these choices.
    fn chunk(&self, choices: Vec<Value>) -> Value;
}

pub struct Chunks<F> {
    pub format: F,
    /// A last chunk with the token counts.
    pub include_usage: bool,
}

impl<F: ChunkFormat> Format for Chunks<F> {
    fn begin(&mut self, choices: usize) -> Vec<Message> {
        let opening = (0..choices).filter_map(|index| self.format.opening(index));
        opening.map(|choice| self.chunk(choice)).collect()
    }

    fn write(&mut self, progress: Progress) -> Vec<Message> {
        match progress {
            Progress::Token {
                choice,
                token,
                mut parts,
                logprob,
            } => {
                if parts.is_empty() && logprob.is_some() {
                    parts.push(Part::Content(String::new()));
                }
                let mut token = logprob.map(|logprob| (token, logprob));
                let delta = |part| self.format.delta(choice, part, token.take());
                let deltas: Vec<Value> = parts.into_iter().map(delta).collect();
                deltas.into_iter().map(|delta| self.chunk(delta)).collect()
            }
            Progress::Finished {
                choice,
                reason,
                parts,
            } => {
                let delta = |part| self.format.delta(choice, part, None);
                let mut choices: Vec<Value> = parts.into_iter().map(delta).collect();
                choices.push(self.format.finish(choice, reason));
                choices.into_iter().map(|one| self.chunk(one)).collect()
            }
            Progress::Done(usage) => {
                let usage = self.include_usage.then(|| self.usage(&usage));
                usage.into_iter().chain([Message::text("[DONE]")]).collect()
            }
            Progress::Failed(error) => vec![Message::json(&ApiError::from(error).body())],
        }
    }
}

impl<F: ChunkFormat> Chunks<F> {
    fn chunk(&self, choice: Value) -> Message {
        let mut chunk = self.format.chunk(vec![choice]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        Message::json(&chunk)
    }

    fn usage(&self, usage: &Usage) -> Message {
        let mut chunk = self.format.chunk(vec![]);
        chunk["usage"] = answer::usage(usage);
        chunk["timings"] = answer::timings(usage);
        Message::json(&chunk)
    }
}

/// A choice object of either API.
pub fn choice(index: usize, content: (&str, Value), logprobs: Value, finish: Value) -> Value {
    let (name, content) = content;
    json!({"index": index, name: content, "logprobs": logprobs, "finish_reason": finish})
}
