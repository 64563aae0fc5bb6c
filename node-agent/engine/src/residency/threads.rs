//! Threads that read weights until their owner tells them to stop.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::thread::{Builder, JoinHandle};

use crate::error::EngineError;

/// Adds `count` threads called `name`, which do `work`, to those of an owner that ends them when it is dropped, also if not all could be
/// started. `path` is the file that they read.
///
/// # Errors
/// [`EngineError::ReadAhead`] when the system refuses one.
pub fn start(
    threads: &mut Vec<JoinHandle<()>>,
    count: usize,
    name: &str,
    path: &Path,
    work: impl Fn() + Clone + Send + 'static,
) -> Result<(), EngineError> {
    for _ in 0..count {
        let started = Builder::new().name(name.to_owned()).spawn(work.clone());
        threads.push(started.map_err(|source| EngineError::ReadAhead {
            path: path.to_owned(),
            source,
        })?);
    }
    Ok(())
}

/// What `read` returns, and an error if it panics: the thread goes on, and whoever waits for the read is told.
///
/// # Errors
/// The error of the read.
pub fn caught<T>(read: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    // A buffer that was being filled is dropped with the error.
    let result = catch_unwind(AssertUnwindSafe(read));
    result.unwrap_or_else(|_| Err(io::Error::other("the thread that reads panicked")))
}

/// Waits until all have ended.
pub fn join(threads: &mut Vec<JoinHandle<()>>) {
    for thread in threads.drain(..) {
        // A panic in it has been printed.
        let _ = thread.join();
    }
}
