//! What others may know of a member at work, while it works.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Written by the member's thread, read by any.
pub struct Held {
    sessions: AtomicUsize,
    started: Instant,
    /// When the last activation came, in milliseconds after `started`.
    last_activation: AtomicU64,
}

impl Held {
    pub fn new() -> Self {
        Self {
            sessions: AtomicUsize::new(0),
            started: Instant::now(),
            last_activation: AtomicU64::new(0),
        }
    }

    /// Sessions with a KV cache now.
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    pub fn set_sessions(&self, sessions: usize) {
        self.sessions.store(sessions, Ordering::Relaxed);
    }

    pub fn activation_came(&self) {
        let after = self.started.elapsed().as_millis() as u64;
        self.last_activation.store(after, Ordering::Relaxed);
    }

    pub fn idle_for(&self) -> Duration {
        let last = Duration::from_millis(self.last_activation.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(last)
    }
}
