//! `--routing-trace`: a file of the experts that the passes of a member need, to compare ways of keeping them (`tests/src/expert_replay.rs`).
//!
//! A line for each layer of each pass: the layer's number, and the experts that its rows chose, each once.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread;

use prima_engine::{ExpertUse, Residency};

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot write {}: make the folder that --routing-trace names, writable for this user", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot start the thread that writes the trace of experts")]
    Thread(#[source] io::Error),
}

/// Adds to the file until this process ends, or the disk is full.
///
/// # Errors
/// The file cannot be opened or made, or the system refuses a thread.
pub fn start(path: &Path, residency: &Residency) -> Result<(), TraceError> {
    let Some(uses) = residency.watch_experts() else {
        tracing::warn!(
            "nothing to trace: no layer here has experts on the processor, or --no-streaming leaves them to the system"
        );
        return Ok(());
    };
    let file = File::options().create(true).append(true).open(path);
    let file = file.map_err(|source| TraceError::File {
        path: path.to_owned(),
        source,
    })?;
    let name = path.display().to_string();
    let write = move || {
        if let Err(error) = write(BufWriter::new(file), &uses) {
            tracing::warn!("the trace of experts {name} is not complete: {error}");
        }
    };
    let thread = thread::Builder::new().name("routing-trace".into());
    thread.spawn(write).map(drop).map_err(TraceError::Thread)
}

fn write(mut file: BufWriter<File>, uses: &Receiver<ExpertUse>) -> io::Result<()> {
    loop {
        let next = match uses.try_recv() {
            // Nothing is computed now: whoever reads the file finds it whole.
            Err(TryRecvError::Empty) => {
                file.flush()?;
                uses.recv().ok()
            }
            next => next.ok(),
        };
        match next {
            Some(used) => writeln!(file, "{used}")?,
            None => return file.flush(),
        }
    }
}
