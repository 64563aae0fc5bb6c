//! What others may know of a member at work, while it works.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Written by the member's thread, read by any.
pub struct Held {
    sessions: AtomicUsize,
    started: Instant,
    computes: AtomicBool,
    /// When the last pass ended, in milliseconds after `started`.
    last_pass: AtomicU64,
}

impl Held {
    pub fn new() -> Self {
        Self {
            sessions: AtomicUsize::new(0),
            started: Instant::now(),
            computes: AtomicBool::new(false),
            last_pass: AtomicU64::new(0),
        }
    }

    /// Sessions with a KV cache now.
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    pub fn set_sessions(&self, sessions: usize) {
        self.sessions.store(sessions, Ordering::Relaxed);
    }

    pub fn pass_begins(&self) {
        self.computes.store(true, Ordering::Relaxed);
    }

    pub fn pass_ended(&self) {
        let after = self.started.elapsed().as_millis() as u64;
        self.last_pass.store(after, Ordering::Relaxed);
        self.computes.store(false, Ordering::Relaxed);
    }

    /// Since the last pass; nothing during one.
    pub fn idle_for(&self) -> Duration {
        if self.computes.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        let last = Duration::from_millis(self.last_pass.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(last)
    }
}
