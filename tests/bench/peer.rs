//! The peer: llama.cpp's own llama-bench, built once for this machine from the source in PyPI's llama-cpp-python.
//!
//! Decides nothing about what is measured. Its defaults stay (flash attention and repacking as it likes), as they are what its
//! users get.

use std::path::{Path, PathBuf};
use std::process::Command;

use prima_tests::assets;
use prima_tests::machine::Machine;

use crate::error::BenchError;

/// The path of llama-bench; builds it when it is not there, which takes some ten minutes on two cores.
pub fn build() -> Result<PathBuf, BenchError> {
    let folder = assets::cache()?.join("peers/llama.cpp-build");
    let binary = folder.join("bin/llama-bench");
    if binary.exists() {
        return Ok(binary);
    }
    let source = assets::path("peers/llama.cpp")?;
    eprintln!("building llama-bench in {} (once)", folder.display());
    let mut configure = Command::new("nice");
    configure
        .args([
            "cmake",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=OFF",
        ])
        .args([
            "-DLLAMA_BUILD_TESTS=OFF",
            "-DLLAMA_BUILD_EXAMPLES=OFF",
            "-DLLAMA_BUILD_SERVER=OFF",
        ])
        .arg("-S")
        .arg(&source)
        .arg("-B")
        .arg(&folder);
    output("cmake", &mut configure)?;
    let mut build = Command::new("nice");
    build
        .args(["cmake", "--build"])
        .arg(&folder)
        .args(["--target", "llama-bench", "--parallel"]);
    output("cmake --build", &mut build)?;
    Ok(binary)
}

/// Tokens per second of one run: a prompt of `prefill` tokens in one batch, or `decode` tokens one at a time (the other being 0).
pub fn tokens_per_second(
    binary: &Path,
    model: &Path,
    threads: usize,
    prefill: usize,
    decode: usize,
) -> Result<f64, BenchError> {
    rate(&mut command(binary, model, threads, prefill, decode))
}

/// As [`tokens_per_second`], of `decode` tokens on `machine`, with weights in its map as they are.
pub fn tokens_per_second_in(
    machine: &Machine,
    binary: &Path,
    model: &Path,
    threads: usize,
    decode: usize,
) -> Result<f64, BenchError> {
    let mut command = command(binary, model, threads, 0, decode);
    command.args(["--load-mode", "mmap", "--repack", "0"]);
    rate(&mut machine.enter(command))
}

fn command(binary: &Path, model: &Path, threads: usize, prefill: usize, decode: usize) -> Command {
    let mut command = Command::new(binary);
    command
        .arg("-m")
        .arg(model)
        .args(["-t", &threads.to_string()])
        .args(["-p", &prefill.to_string(), "-n", &decode.to_string()])
        .args(["-r", "1", "-o", "json"]);
    command
}

fn rate(command: &mut Command) -> Result<f64, BenchError> {
    let output = output("llama-bench", command)?;
    serde_json::from_str::<serde_json::Value>(&output)
        .ok()
        .and_then(|runs| runs.get(0)?.get("avg_ts")?.as_f64())
        .ok_or(BenchError::PeerOutput { output })
}

/// The standard output of a program that must succeed.
fn output(program: &str, command: &mut Command) -> Result<String, BenchError> {
    let program = program.to_owned();
    match command.output() {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => Err(BenchError::Failed {
            program,
            status: output.status,
            output: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
        Err(source) => Err(BenchError::Run { program, source }),
    }
}
