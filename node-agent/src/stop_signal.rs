//! SIGTERM or SIGINT: both ask a process to finish what runs, and to end.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

pub struct StopSignal {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignal {
    /// # Errors
    /// Whatever keeps the process from hearing signals.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next one.
    pub async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
