//! Why a benchmark could not be taken.

use std::path::PathBuf;

use prima_crds::v1alpha1::document::DocumentError;
use prima_halda::InputError;
use prima_tests::assets::AssetError;
use prima_tests::expert_replay::TraceError;
use prima_tests::one_process::OneProcessError;

#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("a model or a source is missing")]
    Asset(#[from] AssetError),
    #[error("the engine failed")]
    Engine(#[from] OneProcessError),
    #[error("the engine's threads cannot be started")]
    Threads(#[from] prima_engine::kernels::ThreadPoolError),
    #[error("cannot run {program}")]
    Run {
        program: String,
        source: std::io::Error,
    },
    #[error("{program} failed ({status}):\n{output}")]
    Failed {
        program: String,
        status: std::process::ExitStatus,
        output: String,
    },
    #[error("llama.cpp's benchmark printed something else than its JSON: {output}")]
    PeerOutput { output: String },
    #[error("llama-server did not begin to serve: {outcome}")]
    PeerServer { outcome: String },
    #[error("talking to the ring's endpoint failed")]
    Http { source: std::io::Error },
    #[error("the endpoint answered: {answer}")]
    Answer { answer: String },
    #[error("the endpoint gave {found} tokens, {expected} were asked for")]
    Tokens { expected: u64, found: u64 },
    #[error(
        "an answer of {tokens} tokens was over before the first token of the prompt beside it: this machine takes a longer one"
    )]
    Outpaced { tokens: usize },
    #[error("the answer to {what} is another one with it than without")]
    Changed { what: String },
    #[error("the raw TCP ring failed")]
    PingPong { source: std::io::Error },
    #[error("cannot limit a program's memory")]
    Cgroup { source: std::io::Error },
    #[error("cannot drop a model from the page cache")]
    PageCache { source: std::io::Error },
    #[error("cannot trace which experts a ring needs")]
    Trace { source: std::io::Error },
    #[error("{} is no trace of experts", path.display())]
    TraceFile { path: PathBuf, source: TraceError },
    #[error("--replay takes files that `prima-node-agent serve --routing-trace FOLDER` wrote")]
    NoTraces,
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot copy {}", path.display())]
    Copy {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("prima run printed no prediction")]
    NoPrediction,
    #[error("cannot read a document of operator/halda/tests/paper")]
    Fixture { source: std::io::Error },
    #[error("a document of operator/halda/tests/paper is bad")]
    Document { source: DocumentError },
    #[error("the machines cannot be planned with")]
    Planning { source: InputError },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
}
