//! Why a step failed.

use std::path::PathBuf;
use std::process::ExitStatus;

use prima_engine::EngineError;
use prima_tests::assets::AssetError;
use prima_tests::one_process::OneProcessError;

#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error("usage: gpu_check --report FILE (the bundle's script `check` says the rest)")]
    Usage,
    #[error("there is no GPU to check; `prima-node-agent inspect --gpu` says what is missing")]
    NoGpu(#[source] EngineError),
    #[error("a file of the bundle is missing: unpack it again")]
    Asset(#[from] AssetError),
    #[error("the engine failed")]
    Engine(#[from] EngineError),
    #[error("the processor's engine failed")]
    OneProcess(#[from] OneProcessError),
    #[error("cannot run {program}")]
    Run {
        program: String,
        source: std::io::Error,
    },
    #[error("{program} failed ({status}):\n{output}")]
    Failed {
        program: String,
        status: ExitStatus,
        output: String,
    },
    #[error("{program} ended well, but told no result of its tests")]
    NoResult { program: &'static str },
    #[error("{message}")]
    Harness { message: String },
    #[error("talking to the ring failed")]
    Http { source: std::io::Error },
    #[error("the ring answered: {answer}")]
    Answer { answer: String },
    #[error(
        "token {position} is {found:?} on the GPU, {expected:?} on the processor, whose two best are {apart:.2} nats apart"
    )]
    Different {
        position: usize,
        expected: String,
        found: String,
        apart: f64,
    },
    #[error("{asked} bytes of keys and values were set aside, though the GPU has {total} bytes")]
    NotRefused { asked: u64, total: u64 },
    #[error("the refusal does not name the memory: {message}")]
    Unnamed { message: String },
    #[error("after the refusal the GPU computes something else: logits differ by {difference}")]
    Damaged { difference: f32 },
    #[error("LLAMA_BENCH printed something else than llama-bench's JSON: {output}")]
    PeerOutput { output: String },
    #[error("prima run printed no prediction:\n{printed}")]
    NoPrediction { printed: String },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
}
