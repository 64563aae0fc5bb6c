//! What the answers of both generation routes have in common: the envelope, token counts and timings.

use serde_json::{Value, json};

use crate::generation::{FinishReason, Usage};

use super::models::unix_seconds;
use super::request_id;

/// Identifies an answer, and every chunk of it.
pub struct Envelope {
    id: String,
    created: u64,
    model: String,
}

impl Envelope {
    pub fn new(id_prefix: &str, model: &str) -> Self {
        Self {
            id: request_id::unique(id_prefix),
            created: unix_seconds(),
            model: model.into(),
        }
    }

    pub fn around(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("prima-", env!("CARGO_PKG_VERSION")),
            "choices": choices,
        })
    }
}

/// OpenAI's `usage`.
pub fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    })
}

/// llama.cpp's `timings`: milliseconds and tokens per second of prefill and decode.
pub fn timings(usage: &Usage) -> Value {
    // The first token of a choice counts as prefill; decode's time begins after it.
    let per_second = |tokens: usize, seconds: f64| {
        if seconds > 0.0 {
            tokens as f64 / seconds
        } else {
            0.0
        }
    };
    let computed = usage.prompt_tokens - usage.cached_tokens;
    json!({
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": usage.prompt_seconds * 1e3,
        "prompt_per_second": per_second(computed, usage.prompt_seconds),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": usage.completion_seconds * 1e3,
        "predicted_per_second":
            per_second(usage.completion_tokens.saturating_sub(1), usage.completion_seconds),
        "draft_n": usage.drafts.drafted,
        "draft_n_accepted": usage.drafts.accepted,
    })
}

pub fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::StopString(_) => "stop",
        FinishReason::Length => "length",
    }
}
