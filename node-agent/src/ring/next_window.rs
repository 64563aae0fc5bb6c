//! The page cache is asked for a member's next window when one is computed, beside computing: the paper's prefetch, which knows no
//! budget. Where a window is larger than memory, what it reads first is gone again when it is used (prefetch-release). Here to be
//! compared with.

use std::io;
use std::ops::Range;
use std::sync::mpsc;
use std::thread;

use prima_engine::Model;

use super::schedule::Schedule;

/// Its thread ends when this is dropped and what was asked for is read.
pub struct NextWindow(mpsc::Sender<usize>);

impl NextWindow {
    /// # Errors
    /// A system that refuses a thread.
    pub fn start(model: &Model, schedule: &Schedule) -> io::Result<NextWindow> {
        let windows: Vec<Range<usize>> = schedule
            .windows
            .iter()
            .map(|window| window.layers())
            .collect();
        let (computed, rounds) = mpsc::channel::<usize>();
        let model = model.clone();
        thread::Builder::new()
            .name("prefetch".into())
            .spawn(move || {
                while let Ok(round) = rounds.recv() {
                    let next = windows[(round + 1) % windows.len()].clone();
                    // What is not read now is read when it is used.
                    let _ = model.expect_reads(next);
                }
            })?;
        Ok(NextWindow(computed))
    }

    /// The window of `round` was computed.
    pub fn after(&self, round: usize) {
        // Fails only when the thread has panicked, which it printed.
        let _ = self.0.send(round);
    }
}
