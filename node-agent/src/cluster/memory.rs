//! How much memory the machine has for rings, as it changes. What this agent's own members hold counts as available:
//! otherwise a running ring would make its machine look smaller, and be planned again because of that.
//!
//! Decides which change is worth a write to the API server: more than a twentieth of all memory.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prima_crds::v1alpha1::node_profile::{MemoryProfile, NodeProfileStatus, Os};
use tokio::sync::watch;
use tokio::time::sleep;

use super::backoff::jittered;
use super::publish_profile::memory_text;
use crate::available_memory::{self, MemoryNow};

const INTERVAL: Duration = Duration::from_secs(60);
const WORTH_TELLING: i64 = 20;

/// The processes of this agent's members. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Children(Arc<Mutex<BTreeSet<u32>>>);

/// A process that is counted until this is dropped.
#[derive(Debug)]
pub struct Counted {
    children: Children,
    pid: u32,
}

impl Children {
    pub fn add(&self, pid: u32) -> Counted {
        self.lock().insert(pid);
        Counted {
            children: self.clone(),
            pid,
        }
    }

    /// Memory that only they use, and that is free again when they end. Mapped weights belong to the page cache.
    fn anonymous_bytes(&self) -> u64 {
        let pids = self.lock().clone();
        pids.iter()
            .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/status")).ok())
            .filter_map(|status| anonymous_bytes(&status))
            .sum()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.children.lock().remove(&self.pid);
    }
}

/// Looks every minute, for ever.
pub async fn follow(profile: watch::Sender<NodeProfileStatus>, children: Children) {
    let os = profile.borrow().system.os;
    loop {
        sleep(jittered(INTERVAL)).await;
        match now(os, &children) {
            Ok(now) => {
                profile.send_if_modified(|status| update(status, now));
            }
            Err(error) => {
                tracing::warn!(
                    problem = prima_crds::error_chain(&error),
                    "cannot look at the memory"
                );
            }
        }
    }
}

fn now(os: Os, children: &Children) -> Result<MemoryNow, available_memory::MemoryError> {
    let mut now = available_memory::read(Path::new("/"), os)?;
    now.available = (now.available + children.anonymous_bytes()).min(now.total);
    Ok(now)
}

/// Whether the change was worth telling.
fn update(status: &mut NodeProfileStatus, now: MemoryNow) -> bool {
    if !changed_much(&status.memory, now) {
        return false;
    }
    status.memory.total_bytes = now.total as i64;
    status.memory.available_bytes = now.available as i64;
    status.memory.swappable_bytes = now.swappable as i64;
    if let Some(agent) = &mut status.agent {
        agent.memory = memory_text(&status.memory);
    }
    true
}

fn changed_much(told: &MemoryProfile, now: MemoryNow) -> bool {
    let by = |told: i64, now: u64| (now as i64).abs_diff(told) as i64;
    let changes = [
        by(told.available_bytes, now.available),
        by(told.total_bytes, now.total),
        by(told.swappable_bytes, now.swappable),
    ];
    changes
        .iter()
        .any(|change| *change > told.total_bytes / WORTH_TELLING)
}

/// `RssAnon` of /proc/PID/status (proc_pid_status(5)).
fn anonymous_bytes(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_twentieth_of_all_memory_is_worth_telling() {
        let told = MemoryProfile {
            total_bytes: 1000,
            available_bytes: 500,
            swappable_bytes: 0,
            read_bytes_per_second: 1,
            kv_append_bytes_per_second: 1,
        };
        let now = |total, available, swappable| MemoryNow {
            total,
            available,
            swappable,
        };
        for (now, worth) in [
            (now(1000, 500, 0), false),
            (now(1000, 550, 0), false),
            (now(1000, 450, 0), false),
            (now(1000, 551, 0), true),
            (now(1000, 449, 0), true),
            (now(900, 500, 0), true),
            (now(1000, 500, 60), true),
        ] {
            assert_eq!(changed_much(&told, now), worth, "{now:?}");
        }
    }

    #[test]
    fn a_process_is_asked_for_what_is_its_own() {
        let status = "VmRSS:\t  9000 kB\nRssAnon:\t    2048 kB\nRssFile:\t 100 kB\n";
        assert_eq!(anonymous_bytes(status), Some(2 << 20));
        // Of a kernel thread.
        assert_eq!(anonymous_bytes("Name:\tkthreadd\n"), None);

        let children = Children::default();
        let own = children.add(std::process::id());
        let held = vec![1_u8; 32 << 20];
        assert!(children.anonymous_bytes() >= 32 << 20);
        drop((held, own));
        assert_eq!(children.anonymous_bytes(), 0);
    }
}
