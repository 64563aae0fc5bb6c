//! Streams an answer as server-sent events: chunks as they come, then `data: [DONE]`. A generation that fails in
//! mid-stream ends in one `data: {"error": ...}` event and no `[DONE]`. When the client hangs up, the stream is
//! dropped, and with it what is in flight.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::unfold;
use serde_json::{Value, json};

use crate::generation::{FinishReason, TokenLogprob, Usage};

use super::answer;
use super::in_flight::{InFlight, Progress};
use super::openai_error::ApiError;

/// How one API writes its chunks.
pub trait ChunkFormat: Send + 'static {
    /// The choice object that opens choice `index`, if this API opens them.
    fn opening(&self, index: usize) -> Option<Value>;
    /// The choice object that carries new text, and a token where logprobs were asked for.
    fn delta(&mut self, index: usize, text: &str, token: Option<(u32, TokenLogprob)>) -> Value;
    /// The choice object that ends choice `index`.
    fn finish(&self, index: usize, reason: FinishReason) -> Value;
    /// A chunk of these choices.
    fn chunk(&self, choices: Vec<Value>) -> Value;
}

/// A comment is sent this often, so that proxies do not close a connection while prefill computes.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

pub fn stream<F: ChunkFormat>(in_flight: InFlight, format: F, include_usage: bool) -> Response {
    let mut chunks = Chunks {
        queue: VecDeque::new(),
        include_usage,
        in_flight: Some(in_flight),
        format,
    };
    chunks.open();
    let events = unfold(chunks, |mut chunks| async move {
        let event = chunks.next().await?;
        Some((Ok::<_, Infallible>(event), chunks))
    });
    let mut response = Sse::new(events)
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
        .into_response();
    // nginx buffers a response before it passes it on, unless told not to.
    response.headers_mut().insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}

struct Chunks<F> {
    queue: VecDeque<Event>,
    include_usage: bool,
    /// `None` once the last event is in the queue.
    in_flight: Option<InFlight>,
    format: F,
}

impl<F: ChunkFormat> Chunks<F> {
    fn open(&mut self) {
        let choices = self.in_flight.as_ref().map_or(0, InFlight::choices);
        for index in 0..choices {
            if let Some(opening) = self.format.opening(index) {
                self.push_chunk(opening);
            }
        }
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            match self.in_flight.as_mut()?.next().await {
                Some(progress) => self.take(progress),
                None => self.in_flight = None,
            }
        }
    }

    fn take(&mut self, progress: Progress) {
        match progress {
            Progress::Token {
                choice,
                token,
                text,
                logprob,
            } => {
                if !text.is_empty() || logprob.is_some() {
                    let token = logprob.map(|logprob| (token, logprob));
                    let delta = self.format.delta(choice, &text, token);
                    self.push_chunk(delta);
                }
            }
            Progress::Finished {
                choice,
                reason,
                text,
            } => {
                if !text.is_empty() {
                    let delta = self.format.delta(choice, &text, None);
                    self.push_chunk(delta);
                }
                self.push_chunk(self.format.finish(choice, reason));
            }
            Progress::Done(usage) => {
                if self.include_usage {
                    self.push_usage(&usage);
                }
                self.queue.push_back(Event::default().data("[DONE]"));
                self.in_flight = None;
            }
            Progress::Failed(error) => {
                self.push(&ApiError::from(error).body());
                self.in_flight = None;
            }
        }
    }

    fn push_chunk(&mut self, choice: Value) {
        let mut chunk = self.format.chunk(vec![choice]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        self.push(&chunk);
    }

    fn push_usage(&mut self, usage: &Usage) {
        let mut chunk = self.format.chunk(vec![]);
        chunk["usage"] = answer::usage(usage);
        chunk["timings"] = answer::timings(usage);
        self.push(&chunk);
    }

    fn push(&mut self, data: &Value) {
        self.queue
            .push_back(Event::default().data(data.to_string()));
    }
}

/// A choice object of either API.
pub fn choice(index: usize, content: (&str, Value), logprobs: Value, finish: Value) -> Value {
    let (name, content) = content;
    json!({"index": index, name: content, "logprobs": logprobs, "finish_reason": finish})
}
