//! llama.cpp's llama-bench, or what behaves like it, where the variable `LLAMA_BENCH` names it: a build for this GPU is nothing that a
//! bundle can carry.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::error::CheckError;
use crate::machine;
use crate::speed::{Rates, TURNS, Tokens};

pub const VARIABLE: &str = "LLAMA_BENCH";

pub fn program() -> Option<OsString> {
    std::env::var_os(VARIABLE).filter(|program| !program.is_empty())
}

/// Tokens per second with all layers on the GPU, the mean of as many turns as the engine has.
pub fn measure(program: &OsStr, model: &Path, tokens: Tokens) -> Result<Rates, CheckError> {
    let mut command = Command::new(program);
    command
        .arg("-m")
        .arg(model)
        .args(["-p", &tokens.prefill.to_string()])
        .args(["-n", &tokens.decode.to_string()])
        .args(["-ngl", "99", "-r", &TURNS.to_string(), "-o", "json"]);
    let output = machine::output(&mut command)?;
    let runs: Vec<Value> = serde_json::from_str(&output).unwrap_or_default();
    let rate = |prompt: usize, generated: usize| {
        let count = |run: &Value, name: &str| run[name].as_u64().map(|count| count as usize);
        let of_this = |run: &&Value| {
            (count(run, "n_prompt"), count(run, "n_gen")) == (Some(prompt), Some(generated))
        };
        runs.iter().find(of_this)?["avg_ts"].as_f64()
    };
    match (rate(tokens.prefill, 0), rate(0, tokens.decode)) {
        (Some(prefill), Some(decode)) => Ok(Rates { prefill, decode }),
        _ => Err(CheckError::PeerOutput { output }),
    }
}
