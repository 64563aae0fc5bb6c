//! An answer in the words of OpenAI's two older routes: whole, or in chunks, one for every part of a choice, then `[DONE]`. A generation that
//! fails in mid-stream ends in one `{"error": ...}` and no `[DONE]`.

use axum::Json;
use axum::response::{IntoResponse, Response};
use prima_text::AnswerPart;
use serde_json::{Value, json};

use crate::generation::{FinishReason, TokenLogprob, Usage};

use super::Gateway;
use super::answer;
use super::auth::Caller;
use super::in_flight::{AnswerProgress, AnsweredChoice, AskedAnswers, InFlight};
use super::intake::Taken;
use super::openai_error::ApiError;
use super::stream::{self, Format, Message};

/// How one of the two routes writes its answers.
pub trait ChunkFormat: Send + 'static {
    /// The choice object that is all of choice `index`.
    fn whole(&self, index: usize, answered: AnsweredChoice) -> Value;
    /// An answer of these choices.
    fn answer(&self, choices: Vec<Value>) -> Value;
    /// The choice object that opens choice `index`, if this API opens them.
    fn opening(&self, index: usize) -> Option<Value>;
    /// The choice object that carries the next part of the answer, and a token where logprobs were asked for.
    fn delta(
        &mut self,
        index: usize,
        part: AnswerPart,
        token: Option<(u32, TokenLogprob)>,
    ) -> Value;
    /// The choice object that ends choice `index`, maybe in the middle of a call.
    fn finish(&self, index: usize, reason: FinishReason, in_call: bool) -> Value;
    /// A chunk of these choices.
    fn chunk(&self, choices: Vec<Value>) -> Value;
}

struct Chunks<F> {
    format: F,
    /// A last chunk with the token counts.
    include_usage: bool,
}

/// Has the ring answer, and says it in this format.
pub async fn respond(
    gateway: &Gateway,
    caller: Caller,
    taken: Taken<AskedAnswers>,
    format: impl ChunkFormat,
) -> Result<Response, ApiError> {
    let options = &taken.asked.options;
    let (stream, include_usage) = (options.stream, options.include_usage);
    let in_flight = InFlight::submit(gateway, caller, taken).await?;
    if stream {
        let chunks = Chunks {
            format,
            include_usage,
        };
        return Ok(stream::events(in_flight, chunks));
    }
    let (choices, usage) = in_flight.collect().await?;
    let choices = choices.into_iter().enumerate();
    let choices = choices.map(|(index, answered)| format.whole(index, answered));
    let mut body = format.answer(choices.collect());
    body["usage"] = answer::usage(&usage);
    body["timings"] = answer::timings(&usage);
    Ok(Json(body).into_response())
}

impl<F: ChunkFormat> Format for Chunks<F> {
    fn begin(&mut self, choices: usize) -> Vec<Message> {
        let opening = (0..choices).filter_map(|index| self.format.opening(index));
        opening.map(|choice| self.chunk(choice)).collect()
    }

    fn write(&mut self, progress: AnswerProgress) -> Vec<Message> {
        match progress {
            AnswerProgress::Token {
                choice,
                token,
                mut parts,
                logprob,
            } => {
                if parts.is_empty() && logprob.is_some() {
                    parts.push(AnswerPart::Content(String::new()));
                }
                let mut token = logprob.map(|logprob| (token, logprob));
                let delta = |part| self.format.delta(choice, part, token.take());
                let deltas: Vec<Value> = parts.into_iter().map(delta).collect();
                deltas.into_iter().map(|delta| self.chunk(delta)).collect()
            }
            AnswerProgress::Finished {
                choice,
                reason,
                parts,
                in_call,
            } => {
                let delta = |part| self.format.delta(choice, part, None);
                let mut choices: Vec<Value> = parts.into_iter().map(delta).collect();
                choices.push(self.format.finish(choice, reason, in_call));
                choices.into_iter().map(|one| self.chunk(one)).collect()
            }
            AnswerProgress::Done(usage) => {
                let usage = self.include_usage.then(|| self.usage(&usage));
                usage.into_iter().chain([Message::text("[DONE]")]).collect()
            }
            AnswerProgress::Failed(error) => vec![Message::json(&ApiError::from(error).body())],
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
