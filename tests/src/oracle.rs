//! The oracle: asks llama.cpp (`tests/oracle/llama_cpp.py`) what the same file and the same tokens give.
//!
//! The script keeps its answers in the cache, so a second run costs little. Refuses to judge: the parity tests compare.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

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
    pub text: Option<TextJob>,
}

/// Continue `prompt` by `tokens` tokens, each the most likely; and name the `top` most likely tokens after it.
#[derive(Debug, Clone, Serialize)]
pub struct GreedyJob {
    pub prompt: String,
    pub tokens: usize,
    pub top: usize,
}

/// Log probabilities of a text's first `window` x `windows` tokens, each window computed on its own.
#[derive(Debug, Clone, Serialize)]
pub struct TextJob {
    pub path: PathBuf,
    pub window: usize,
    pub windows: usize,
    /// How many of the most likely tokens are named at each place.
    pub top: usize,
    /// In their stead, these tokens at each place; empty: none.
    pub of: Vec<Vec<u32>>,
}

/// llama.cpp's answer, one entry for each job of the request.
#[derive(Debug, Clone, Deserialize)]
pub struct Answer {
    pub version: String,
    pub greedy: Vec<Greedy>,
    pub text: Option<Text>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Greedy {
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    /// The two largest logits at each step.
    pub best: Vec<[(u32, f32); 2]>,
    /// After the prompt: token and natural log probability, most likely first.
    pub top: Vec<(u32, f32)>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Text {
    pub tokens: Vec<u32>,
    /// Of each window's tokens, from the second on.
    pub logprobs: Vec<f64>,
    /// The tokens that were asked for at the same places, or the most likely ones.
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
    #[error("the oracle failed on {} ({status}):\n{stderr}", model.display())]
    Failed {
        model: PathBuf,
        status: String,
        stderr: String,
    },
    #[error("the oracle's answer about {} is not what the script promises", model.display())]
    Answer {
        model: PathBuf,
        source: serde_json::Error,
    },
}

thread_local! {
    /// Of this thread, from its first question on: Python takes longer to start than many questions take to answer.
    static RUNNING: RefCell<Option<Running>> = const { RefCell::new(None) };
}

/// The script. Ends on drop.
struct Running {
    process: Child,
    /// Closed first, which ends it.
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// A file, as nobody reads it meanwhile.
    stderr: File,
}

/// Asks llama.cpp, or the cache. Blocks; a first answer about a model takes seconds to a minute.
///
/// # Errors
/// When the virtual environment is missing, or the script fails.
pub fn ask(request: &Request) -> Result<Answer, OracleError> {
    RUNNING.with_borrow_mut(|running| {
        // One that failed is not asked again.
        let mut script = match running.take() {
            Some(script) => script,
            None => Running::start()?,
        };
        let answer = script.ask(request)?;
        *running = Some(script);
        Ok(answer)
    })
}

impl Running {
    fn start() -> Result<Self, OracleError> {
        let python = assets::path("venv/bin/python")?;
        let cache = assets::cache()?.join("oracle");
        let start = || {
            let stderr = tempfile::tempfile()?;
            let mut process = Command::new(&python)
                .arg(inputs::file("tests/oracle/llama_cpp.py"))
                .arg(cache)
                // NumPy multiplies no matrices here, and its threads would wait for them busily.
                .env("OPENBLAS_NUM_THREADS", "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(stderr.try_clone()?)
                .spawn()?;
            Ok(Self {
                requests: process.stdin.take(),
                answers: BufReader::new(process.stdout.take().expect("it is piped")),
                process,
                stderr,
            })
        };
        start().map_err(|source| OracleError::Start {
            python: python.clone(),
            source,
        })
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, OracleError> {
        let model = || request.model.clone();
        let answer = |source| OracleError::Answer {
            model: model(),
            source,
        };
        let mut line = serde_json::to_vec(request).map_err(answer)?;
        line.push(b'\n');
        // One that ended takes no request, and gives no answer, or the beginning of one.
        let mut given = String::new();
        let asked = self.requests.as_mut().map(|pipe| pipe.write_all(&line));
        let read = self.answers.read_line(&mut given);
        if asked.is_some_and(|asked| asked.is_ok()) && read.is_ok() && given.ends_with('\n') {
            return serde_json::from_str(&given).map_err(answer);
        }
        let status = self.end();
        let mut stderr = String::new();
        let read = self
            .stderr
            .rewind()
            .and_then(|()| self.stderr.read_to_string(&mut stderr));
        if let Err(error) = read {
            stderr = format!("what it said cannot be read: {error}");
        }
        Err(OracleError::Failed {
            model: model(),
            status: status.map_or_else(|error| error.to_string(), |status| status.to_string()),
            stderr,
        })
    }

    fn end(&mut self) -> std::io::Result<ExitStatus> {
        drop(self.requests.take());
        self.process.wait()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("the oracle does not end: {error}");
        }
    }
}

/// How far `found` is from llama.cpp's log probabilities `top` at one place: root mean square of the differences.
pub fn distance(top: &[(u32, f32)], found: impl Fn(u32) -> f32) -> f64 {
    let differences = top
        .iter()
        .map(|&(token, logprob)| f64::from(found(token) - logprob));
    let squares: f64 = differences.map(|difference| difference.powi(2)).sum();
    (squares / top.len() as f64).sqrt()
}
