//! The signals by which people and machines ask a program to end in good order.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

pub struct StopSignals([Signal; 3]);

impl StopSignals {
    /// From here on the signals do not end the process by themselves.
    pub fn install() -> io::Result<Self> {
        Ok(Self([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ]))
    }

    pub async fn received(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
