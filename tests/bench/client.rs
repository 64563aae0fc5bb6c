//! A client of a ring's endpoint that times the answers, as a user's program would see them.
//!
//! Answers are greedy and of exactly the length asked for: the tokens that would end one are forbidden.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::Instant;

use prima_tests::Endpoint;
use prima_tests::http;
use prima_tests::local_ring::LocalRing;
use serde_json::{Value, json};

use crate::error::BenchError;

/// What one token takes.
pub struct TokenCost {
    pub seconds: f64,
    /// Seconds that members computed.
    pub computing: f64,
}

/// A ring of agents on this machine and its client.
pub struct Client {
    ring: Box<dyn Endpoint>,
    never: BTreeMap<String, i32>,
}

impl Client {
    /// Starts a ring with `prima run` and waits until it serves.
    pub fn start(
        model: &Path,
        members: usize,
        rounds: usize,
        threads: usize,
        never: &[u32],
    ) -> Client {
        let ring = LocalRing::builder()
            .model(model)
            .members(members)
            .rounds(rounds)
            .arg("--threads")
            .arg(threads.to_string())
            .start();
        Self::of(ring, never)
    }

    /// A client of a ring that serves; `never`: tokens that no answer may hold.
    pub fn of(ring: impl Endpoint + 'static, never: &[u32]) -> Client {
        Client {
            ring: Box::new(ring),
            never: never
                .iter()
                .map(|token| (token.to_string(), -100))
                .collect(),
        }
    }

    /// Seconds from one token to the next (TPOT), on average over a greedy continuation of `prompt` by `tokens` tokens.
    pub fn seconds_per_token(&self, prompt: &str, tokens: usize) -> Result<f64, BenchError> {
        let body = self.request(prompt, tokens);
        complete(self.ring.address(), &body, tokens)
    }

    /// Seconds of one token, and for how many of them members computed, by their own clocks: `tokens` tokens after a prompt of one.
    pub fn token_cost(&self, tokens: usize) -> Result<TokenCost, BenchError> {
        const ANY_TOKEN: u32 = 1;
        let mut body = self.request("", tokens);
        body["prompt"] = json!([ANY_TOKEN]);
        let before = self.compute_seconds()?;
        let seconds = complete(self.ring.address(), &body, tokens)?;
        Ok(TokenCost {
            seconds,
            // The prompt's token is computed like any other.
            computing: (self.compute_seconds()? - before) / tokens as f64,
        })
    }

    /// What all members have computed since they started.
    fn compute_seconds(&self) -> Result<f64, BenchError> {
        http::metric(self.ring.address(), "prima_member_compute_seconds_total")
            .map_err(|source| BenchError::Http { source })
    }

    /// `requests` answers at once: tokens per second of all together, prompts included.
    pub fn tokens_per_second(&self, requests: usize, tokens: usize) -> Result<f64, BenchError> {
        let address = self.ring.address();
        let bodies: Vec<Value> = (0..requests)
            .map(|i| self.request(&format!("Story number {i}: once upon a time"), tokens))
            .collect();
        let start = Instant::now();
        thread::scope(|scope| {
            let clients: Vec<_> = bodies
                .iter()
                .map(|body| scope.spawn(move || complete(address, body, tokens)))
                .collect();
            clients.into_iter().try_for_each(|client| {
                client
                    .join()
                    .expect("a client that does not panic")
                    .map(drop)
            })
        })?;
        Ok((requests * tokens) as f64 / start.elapsed().as_secs_f64())
    }

    fn request(&self, prompt: &str, tokens: usize) -> Value {
        json!({
            "model": self.ring.model(),
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "logit_bias": self.never,
            "stream": true,
            "stream_options": {"include_usage": true},
        })
    }
}

fn complete(address: SocketAddr, body: &Value, tokens: usize) -> Result<f64, BenchError> {
    let http = |source| BenchError::Http { source };
    let events = http::post_streaming(address, "/v1/completions", body).map_err(http)?;
    if events.status != 200 {
        let answer = events
            .collect::<io::Result<Vec<_>>>()
            .map_err(http)?
            .concat();
        return Err(BenchError::Answer { answer });
    }
    let (mut first, mut last, mut found) = (None, Instant::now(), 0);
    for event in events {
        let event = event.map_err(http)?;
        if event == "[DONE]" {
            break;
        }
        let json: Value = serde_json::from_str(&event).unwrap_or(Value::Null);
        let text = json.pointer("/choices/0/text").and_then(Value::as_str);
        let usage = json
            .pointer("/usage/completion_tokens")
            .and_then(Value::as_u64);
        if text.is_none() && usage.is_none() {
            return Err(BenchError::Answer { answer: event });
        }
        if text.is_some_and(|text| !text.is_empty()) {
            last = Instant::now();
            first.get_or_insert(last);
        }
        found = usage.map_or(found, |count| count as usize);
    }
    match first {
        Some(first) if found == tokens && tokens > 1 => {
            Ok((last - first).as_secs_f64() / (tokens - 1) as f64)
        }
        _ => Err(BenchError::Tokens {
            expected: tokens,
            found,
        }),
    }
}
