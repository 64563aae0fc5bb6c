//! Counts the bytes that KV caches hold. Blocks that forks share count once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The memory of all caches that were made with it.
#[derive(Clone, Debug, Default)]
pub struct KvMemory(Arc<AtomicU64>);

impl KvMemory {
    /// Bytes held now, here and on GPUs.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts `bytes` for as long as the result lives.
    pub(crate) fn take(&self, bytes: u64) -> Taken {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Taken {
            memory: self.clone(),
            bytes,
        }
    }
}

/// Bytes that count. A copy counts, too.
pub(crate) struct Taken {
    memory: KvMemory,
    bytes: u64,
}

impl Clone for Taken {
    fn clone(&self) -> Self {
        self.memory.take(self.bytes)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.memory.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
