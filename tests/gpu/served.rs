//! What users see: a ring of one member, as `prima run` plans it from this machine's profile, over HTTP; and what was predicted of it.

use std::io::Write;
use std::process::Command;
use std::time::Instant;

use prima_tests::local_ring::LocalRing;
use prima_tests::one_process::{OneProcess, end_tokens};
use prima_tests::statistics::{Samples, error_percent};
use prima_tests::{Endpoint, http, inputs};
use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;

use crate::Finding;
use crate::error::CheckError;
use crate::machine::{self, Machine};
use crate::models::{Model, Models};

const PROMPT: &str = "Once upon a time";
/// Answers: the first is not counted.
const ANSWERS: usize = 4;

/// What the machine measured of itself.
pub struct Profile {
    file: NamedTempFile,
}

/// Tokens per second of an answer.
pub struct Served {
    pub predicted: Samples,
    pub measured: Samples,
    /// Who runs which layers, as `prima run` printed it.
    pub members: String,
}

impl Served {
    /// Of the time per token, predicted against measured.
    pub fn error_percent(&self) -> f64 {
        error_percent(&self.predicted, &self.measured)
    }
}

impl Finding for Served {
    fn told(&self) -> String {
        format!(
            "{:.1} tokens/s, predicted {:.1}: an error of {:.0} %",
            self.measured.median(),
            self.predicted.median(),
            self.error_percent()
        )
    }
}

impl Finding for Profile {
    fn told(&self) -> String {
        "measured".to_owned()
    }
}

/// Measures the machine now. A driver in software takes minutes for all formats, so then only the processor is measured.
pub fn profile(machine: &Machine, models: &Models) -> Result<Profile, CheckError> {
    let mut command = Command::new(inputs::program("prima-node-agent"));
    command.args(["profile", "--fresh", "--output", "yaml"]);
    if machine.software {
        command.env("PRIMA_GPU", "none");
    }
    // Its disk is measured by reading it.
    let largest = models.measured.iter().max_by_key(|model| model.bytes);
    if let Some(model) = largest {
        command.arg("--models").arg(&model.path);
    }
    let yaml = machine::output(&mut command)?;
    let failed = |source| CheckError::Write {
        path: std::env::temp_dir(),
        source,
    };
    let mut file = NamedTempFile::new().map_err(failed)?;
    file.write_all(yaml.as_bytes()).map_err(failed)?;
    Ok(Profile { file })
}

pub fn measure(machine: &Machine, model: &Model, profile: &Profile) -> Result<Served, CheckError> {
    let never = end_tokens(&OneProcess::open(&model.path, 1)?);
    let never: Map<String, Value> = never
        .iter()
        .map(|token| (token.to_string(), json!(-100)))
        .collect();
    let ring = LocalRing::builder()
        .model(&model.path)
        .members(1)
        // What several guessed tokens at a time bring is nobody's prediction.
        .arg("--no-speculation")
        .arg("--profile")
        .arg(profile.file.path())
        .start();
    let tokens = if machine.software { 32 } else { 128 };
    let body = json!({
        "model": ring.model(), "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "logit_bias": never, "stream": true,
    });
    let mut rates = Vec::new();
    for _ in 0..ANSWERS {
        rates.push(tokens_per_second(&ring, &body)?);
    }
    let (printed, predicted) = (ring.printed(), ring.predicted());
    ring.stop();
    let (Some(predicted), Some((members, _))) = (predicted, printed.split_once("Predicted: "))
    else {
        return Err(CheckError::NoPrediction { printed });
    };
    Ok(Served {
        predicted: Samples::from_iter([predicted]),
        measured: rates.into_iter().skip(1).collect(),
        members: members.trim().to_owned(),
    })
}

/// From the first token to the last, as a client sees them.
fn tokens_per_second(ring: &impl Endpoint, body: &Value) -> Result<f64, CheckError> {
    let failed = |source| CheckError::Http { source };
    let events = http::post_streaming(ring.address(), "/v1/completions", body).map_err(failed)?;
    let mut times = Vec::new();
    let mut last = String::new();
    for event in events {
        let event = event.map_err(failed)?;
        let json: Value = serde_json::from_str(&event).unwrap_or_default();
        let text = json.pointer("/choices/0/text").and_then(Value::as_str);
        if text.is_some_and(|text| !text.is_empty()) {
            times.push(Instant::now());
        }
        last = event;
    }
    let tokens = body["max_tokens"].as_u64().unwrap_or(0);
    match (times.first(), times.last()) {
        (Some(first), Some(end)) if end > first && last == "[DONE]" => {
            Ok((tokens - 1) as f64 / (*end - *first).as_secs_f64())
        }
        _ => Err(CheckError::Answer { answer: last }),
    }
}
