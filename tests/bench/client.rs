//! A client of a ring's endpoint, or of llama.cpp's, that times the answers, as a user's program would see them.
//!
//! Answers are greedy and of exactly the length asked for: the tokens that would end one are forbidden.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use prima_tests::Endpoint;
use prima_tests::http;
use prima_tests::local_ring::LocalRing;
use serde_json::{Value, json};

use crate::error::BenchError;
use prima_tests::statistics::Samples;

/// For a long prompt on a slow machine: llama-server writes nothing, not even a head, before the first token.
const PATIENCE: Duration = Duration::from_secs(600);
/// At which nearly all tokens of random weights are alike.
const TEMPERATURE: f64 = 2.0;
/// How many tokens there are where they come back.
pub const WORDS: u32 = 256;

/// A piece of an answer, as a rule a token, or what is said behind it.
pub struct Event {
    pub came: Instant,
    said: Value,
}

/// An answer, as it came.
pub struct Answer {
    pub text: String,
    /// From the request to the first token (TTFT).
    pub first_token_seconds: f64,
    /// From one token to the next, on average (TPOT).
    pub seconds_per_token: f64,
    /// When each event came: as a rule, a token.
    pub times: Vec<Instant>,
    /// Tokens of the prompt that were not computed again.
    pub cached_tokens: u64,
    /// Tokens of drafts, and those of them that were right.
    pub drafted: usize,
    pub accepted: usize,
}

/// Several answers that came together.
pub struct AtOnce {
    /// Of all together, prompts included.
    pub tokens_per_second: f64,
    /// Seconds from one token of an answer to its next, of all answers.
    pub gaps: Samples,
}

/// What one token takes.
pub struct TokenCost {
    pub seconds: f64,
    /// Seconds that members computed.
    pub computing: f64,
}

/// A ring of agents on this machine and its client.
pub struct Client {
    ring: Box<dyn Endpoint + Sync>,
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
    pub fn of(ring: impl Endpoint + Sync + 'static, never: &[u32]) -> Client {
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
        Ok(self
            .answer(&self.request(prompt, tokens))?
            .seconds_per_token)
    }

    /// The same of tokens that are drawn from nearly all alike, as llama-bench does it. (The most likely one of random weights is the same again
    /// and again, and so are its experts.)
    pub fn seconds_per_random_token(&self, seed: u32, tokens: usize) -> Result<f64, BenchError> {
        let body = self.drawn(seed, tokens);
        Ok(self.answer(&body)?.seconds_per_token)
    }

    /// The same of tokens that come back as words of a text do, nearly by Zipf's law: of [`WORDS`], the second is half as likely as the first, the
    /// third a third. (Nearly, since the model's own logits count, too.)
    pub fn seconds_per_recurring_token(&self, seed: u32, tokens: usize) -> Result<f64, BenchError> {
        let mut body = self.drawn(seed, tokens);
        let words = (1000..).filter(|token: &u32| !self.never.contains_key(&token.to_string()));
        for (rank, token) in (1..=WORDS).zip(words) {
            let bias = 100.0 - TEMPERATURE * f64::from(rank).ln();
            body["logit_bias"][token.to_string()] = json!(bias);
        }
        Ok(self.answer(&body)?.seconds_per_token)
    }

    /// A request for tokens that are drawn, each from nearly all alike.
    fn drawn(&self, seed: u32, tokens: usize) -> Value {
        let mut body = self.request("Once upon a time", tokens);
        body["temperature"] = json!(TEMPERATURE);
        body["seed"] = json!(seed);
        // By default, llama.cpp draws from few.
        body["top_k"] = json!(0);
        body["top_p"] = json!(1);
        body["min_p"] = json!(0);
        body
    }

    /// Seconds of one token, and for how many of them members computed, by their own clocks: `tokens` tokens after a prompt of one.
    pub fn token_cost(&self, tokens: usize) -> Result<TokenCost, BenchError> {
        const ANY_TOKEN: u32 = 1;
        let body = self.request(vec![ANY_TOKEN], tokens);
        let before = self.compute_seconds()?;
        Ok(TokenCost {
            seconds: self.answer(&body)?.seconds_per_token,
            // The prompt's token is computed like any other.
            computing: (self.compute_seconds()? - before) / tokens as f64,
        })
    }

    /// What all members have computed since they started.
    fn compute_seconds(&self) -> Result<f64, BenchError> {
        http::metric(self.ring.address(), "prima_member_compute_seconds_total")
            .map_err(|source| BenchError::Http { source })
    }

    /// `requests` answers at once, of `tokens` tokens each.
    pub fn at_once(&self, requests: usize, tokens: usize) -> Result<AtOnce, BenchError> {
        let bodies: Vec<Value> = (0..requests)
            .map(|i| self.request(format!("Story number {i}: once upon a time"), tokens))
            .collect();
        let start = Instant::now();
        let answers = thread::scope(|scope| {
            let clients: Vec<_> = bodies
                .iter()
                .map(|body| scope.spawn(|| self.answer(body)))
                .collect();
            let answers = clients
                .into_iter()
                .map(|client| client.join().expect("a client that does not panic"));
            answers.collect::<Result<Vec<Answer>, BenchError>>()
        })?;
        Ok(AtOnce {
            tokens_per_second: (requests * tokens) as f64 / start.elapsed().as_secs_f64(),
            gaps: answers.iter().flat_map(Answer::gaps).collect(),
        })
    }

    /// The body of a request for exactly `tokens` tokens after `prompt`, a text or tokens, each the most likely.
    pub fn request(&self, prompt: impl Into<Value>, tokens: usize) -> Value {
        json!({
            "model": self.ring.model(),
            "prompt": prompt.into(),
            "max_tokens": tokens,
            "temperature": 0,
            "logit_bias": self.never,
            "stream": true,
            "stream_options": {"include_usage": true},
        })
    }

    /// What comes of such a request, as it comes. Who drops it hangs up.
    pub fn events(
        &self,
        body: &Value,
    ) -> Result<impl Iterator<Item = Result<Event, BenchError>> + use<>, BenchError> {
        let http = |source| BenchError::Http { source };
        let address = self.ring.address();
        let events = http::post_streaming_within(PATIENCE, address, "/v1/completions", body);
        let events = events.map_err(http)?;
        if events.status != 200 {
            let answer = events
                .collect::<io::Result<Vec<_>>>()
                .map_err(http)?
                .concat();
            return Err(BenchError::Answer { answer });
        }
        let event = move |event: io::Result<String>| -> Result<Event, BenchError> {
            let event = event.map_err(http)?;
            let came = Instant::now();
            let said: Value = serde_json::from_str(&event).unwrap_or(Value::Null);
            let piece = said.pointer("/choices/0/text").and_then(Value::as_str);
            match piece.is_some() || said.get("usage").is_some() {
                true => Ok(Event { came, said }),
                false => Err(BenchError::Answer { answer: event }),
            }
        };
        let goes_on = |event: &io::Result<String>| {
            let done = event.as_ref().is_ok_and(|event| event == "[DONE]");
            !done
        };
        Ok(events.take_while(goes_on).map(event))
    }

    /// The answer to such a request.
    pub fn answer(&self, body: &Value) -> Result<Answer, BenchError> {
        let begun = Instant::now();
        let (mut text, mut times, mut usage) = (String::new(), Vec::new(), Value::Null);
        let mut drafts = [0; 2];
        for event in self.events(body)? {
            let mut event = event?;
            if let Some(piece) = event.text() {
                text += piece;
                times.push(event.came);
            }
            // llama.cpp has the same names for it.
            if let Some(timings) = event.said.get("timings") {
                let number = |name: &str| timings[name].as_u64().unwrap_or(0) as usize;
                drafts = ["draft_n", "draft_n_accepted"].map(number);
            }
            if event.said["usage"].is_object() {
                usage = event.said["usage"].take();
            }
        }
        let expected = body["max_tokens"].as_u64().unwrap_or(0);
        let found = usage["completion_tokens"].as_u64().unwrap_or(0);
        let [drafted, accepted] = drafts;
        match (times.first(), times.last()) {
            (Some(first), Some(last)) if found == expected && expected > 1 => Ok(Answer {
                text,
                first_token_seconds: (*first - begun).as_secs_f64(),
                seconds_per_token: (*last - *first).as_secs_f64() / (expected - 1) as f64,
                times,
                cached_tokens: usage
                    .pointer("/prompt_tokens_details/cached_tokens")
                    .and_then(Value::as_u64)
                    .unwrap_or(0),
                drafted,
                accepted,
            }),
            _ => Err(BenchError::Tokens { expected, found }),
        }
    }
}

impl Answer {
    /// Seconds from each event to the next.
    pub fn gaps(&self) -> impl Iterator<Item = f64> {
        let pairs = self.times.windows(2);
        pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64())
    }
}

impl Event {
    /// The text that came; what is said behind an answer has none.
    pub fn text(&self) -> Option<&str> {
        let text = self.said.pointer("/choices/0/text")?.as_str()?;
        (!text.is_empty()).then_some(text)
    }
}
