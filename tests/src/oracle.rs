//! The oracle: asks llama.cpp (`tests/oracle/llama_cpp.py`) what the same file and the same tokens give.
//!
//! The script keeps its answers in the cache, so a second run costs little. Refuses to judge: the parity tests compare.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::assets::{self, AssetError};
use crate::inputs;

/// What is asked, about one model. The script's head says what each part means.
#[derive(Debug, Clone, Serialize)]
pub struct Request {
    pub model: PathBuf,
    /// With the weights written out as F32, so that no activation is rounded to eight bits.
    pub exact: bool,
    /// With keys and values cached as Q8_0 instead of F16.
    pub quantized_kv: bool,
    pub threads: usize,
    /// The longest sequence, in tokens.
    pub context: usize,
    pub greedy: Vec<GreedyJob>,
    pub next: Vec<NextJob>,
    pub text: Option<TextJob>,
}

/// Continue `prompt` by `tokens` tokens, each the most likely.
#[derive(Debug, Clone, Serialize)]
pub struct GreedyJob {
    pub prompt: String,
    pub tokens: usize,
}

/// The `top` most likely tokens after `prompt`.
#[derive(Debug, Clone, Serialize)]
pub struct NextJob {
    pub prompt: String,
    pub top: usize,
}

/// Log probabilities of a text's first `window` x `windows` tokens, each window computed on its own.
#[derive(Debug, Clone, Serialize)]
pub struct TextJob {
    pub path: PathBuf,
    pub window: usize,
    pub windows: usize,
    pub top: usize,
}

/// llama.cpp's answer, one entry for each job of the request.
#[derive(Debug, Clone, Deserialize)]
pub struct Answer {
    pub version: String,
    pub greedy: Vec<Greedy>,
    pub next: Vec<Next>,
    pub text: Option<Text>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Greedy {
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    /// The two largest logits at each step.
    pub top: Vec<[(u32, f32); 2]>,
    /// The largest difference of such a logit when all tokens are computed in one batch.
    pub batch_noise: f32,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Next {
    pub prompt: Vec<u32>,
    /// Token and natural log probability, most likely first.
    pub top: Vec<(u32, f32)>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Text {
    pub tokens: Vec<u32>,
    /// Of each window's tokens, from the second on.
    pub logprobs: Vec<f64>,
    /// The most likely tokens at the same places.
    pub top: Vec<Vec<(u32, f32)>>,
}

/// What can go wrong when the oracle is asked.
#[derive(Debug, thiserror::Error)]
pub enum OracleError {
    #[error("the oracle needs a file")]
    Asset(#[from] AssetError),
    #[error("cannot run the oracle with {}", python.display())]
    Start {
        python: PathBuf,
        source: std::io::Error,
    },
    #[error("the oracle failed on {}:\n{stderr}", model.display())]
    Failed { model: PathBuf, stderr: String },
    #[error("the oracle's answer about {} is not what the script promises", model.display())]
    Answer {
        model: PathBuf,
        source: serde_json::Error,
    },
}

/// Asks llama.cpp, or the cache. Blocks; a first answer about a model takes seconds to a minute.
///
/// # Errors
/// When the virtual environment is missing, or the script fails.
pub fn ask(request: &Request) -> Result<Answer, OracleError> {
    let python = assets::path("venv/bin/python")?;
    let model = || request.model.clone();
    let body = serde_json::to_vec(request).map_err(|source| OracleError::Answer {
        model: model(),
        source,
    })?;
    let start = |source| OracleError::Start {
        python: python.clone(),
        source,
    };
    let mut child = Command::new(&python)
        .arg(inputs::file("tests/oracle/llama_cpp.py"))
        .arg(assets::cache()?.join("oracle"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(start)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(&body).map_err(start)?;
    }
    let output = child.wait_with_output().map_err(start)?;
    if !output.status.success() {
        return Err(OracleError::Failed {
            model: model(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        });
    }
    serde_json::from_slice(&output.stdout).map_err(|source| OracleError::Answer {
        model: model(),
        source,
    })
}

/// How far `found` is from llama.cpp's log probabilities `top` at one place: root mean square of the differences.
pub fn distance(top: &[(u32, f32)], found: impl Fn(u32) -> f32) -> f64 {
    let differences = top
        .iter()
        .map(|&(token, logprob)| f64::from(found(token) - logprob));
    let squares: f64 = differences.map(|difference| difference.powi(2)).sum();
    (squares / top.len() as f64).sqrt()
}
