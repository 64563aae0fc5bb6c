//! How much memory the machine has for rings, as it changes. What this agent's own members hold counts as available, also on a GPU that shares it:
//! otherwise a running ring would make its machine look smaller, and be planned again because of that. What they hold of a GPU's own memory
//! is not known, so the GPU is asked only while none of them uses it.
//!
//! Decides which change is worth a write to the API server: more than a twentieth of all memory. Plans leave nothing of a GPU's memory free,
//! so of that a hundredth less is told already.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::slice::from_ref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prima_crds::v1alpha1::node_profile::{
    GpuMeasurements, GpuProfile, MemoryProfile, NodeProfileStatus, Os,
};
use prima_engine::GpuFacts;
use tokio::sync::watch;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::sleep;

use super::backoff::jittered;
use super::lost_gpu::GpuFailures;
use super::publish_profile::memory_text;
use super::{ask_gpu, gpu_clients};
use crate::available_memory::{self, MemoryError, MemoryNow};
use crate::profile::gpu::{self, AskedGpu};
use crate::profile::gpu_power;

const INTERVAL: Duration = Duration::from_secs(60);
/// A machine that failed because its GPU was full is left out for twice as long.
const GPU_INTERVAL: Duration = Duration::from_secs(300);
const WORTH_TELLING: i64 = 20;
const LESS_WORTH_TELLING: i64 = 100;

/// The processes of this agent's members, and whether they use the GPU. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Children(Arc<Mutex<BTreeMap<u32, bool>>>);

/// A process that is counted until this is dropped.
#[derive(Debug)]
pub struct Counted {
    children: Children,
    pid: u32,
}

impl Children {
    pub fn add(&self, pid: u32, on_gpu: bool) -> Counted {
        self.lock().insert(pid, on_gpu);
        Counted {
            children: self.clone(),
            pid,
        }
    }

    /// Memory that only they use, and that is free again when they end. Mapped weights belong to the page cache. By the files below `root` (`/`,
    /// except in tests).
    fn held_bytes(&self, root: &Path) -> u64 {
        let children = self.lock().clone();
        let held = children.into_iter().map(|(pid, on_gpu)| {
            let status = fs::read_to_string(root.join(format!("proc/{pid}/status")));
            let own = status.ok().and_then(|status| anonymous_bytes(&status));
            let by_drivers = match on_gpu {
                true => gpu_clients::held_bytes(root, pid),
                false => 0,
            };
            own.unwrap_or(0).saturating_add(by_drivers)
        });
        held.fold(0, u64::saturating_add)
    }

    pub fn use_gpu(&self) -> bool {
        self.lock().values().any(|on_gpu| *on_gpu)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, bool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.children.lock().remove(&self.pid);
    }
}

/// Why a look at the memory failed.
#[derive(Debug, thiserror::Error)]
enum LookError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("it was cut short")]
    Panicked(#[from] JoinError),
}

/// Looks every minute, for ever; a look that hangs is waited for, and followed by no other.
pub async fn follow(profile: watch::Sender<NodeProfileStatus>, children: Children) {
    let os = profile.borrow().system.os;
    loop {
        sleep(jittered(INTERVAL)).await;
        match look(PathBuf::from("/"), os, children.clone()).await {
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

/// The same for GPUs' own memory, every five minutes. Asking wakes a GPU that sleeps, so while it does it is asked once: nobody takes any of its
/// memory until it is awake. One that does not answer has failed. Those that cannot be used anyway are not asked: of them the profile says so.
pub async fn follow_gpu(
    profile: watch::Sender<NodeProfileStatus>,
    children: Children,
    failures: GpuFailures,
) {
    let mut last = AskedLast::default();
    loop {
        sleep(jittered(GPU_INTERVAL)).await;
        if children.use_gpu() || !has_own_gpu_memory(&profile.borrow()) {
            continue;
        }
        let measured = measured(&profile.borrow());
        let asleep = last.asleep(|gpu| gpu_power::sleeps(Path::new("/"), gpu));
        // Before they are listed: a build for CUDA or Metal opens its GPU for that.
        if last.all_rest(&measured, &asleep) {
            continue;
        }
        let is_due = |gpu: &GpuFacts| is_one_of(&measured, gpu) && !rests(&asleep, gpu);
        match ask_gpu::facts_of(is_due).await {
            // A member that has begun meanwhile may hold some of it already, or be why it is full.
            _ if children.use_gpu() => {}
            Ok(asked) => {
                let free = gpu::free(&asked);
                profile.send_if_modified(|status| {
                    gpu::set_available(&mut status.gpus, &free, gpu_changed_much)
                });
                last.learn(&asked, &asleep);
                failures.tell_unopened(gpu::problems(&asked));
            }
            Err(error) => failures.tell_unopened([&error]),
        }
    }
}

/// What each GPU said when it was asked last, and whether it slept before that, by its label.
#[derive(Default)]
struct AskedLast(BTreeMap<String, (GpuFacts, bool)>);

/// Labels of GPUs that sleep, and whether each slept when it was asked last, too.
type Asleep = BTreeMap<String, bool>;

impl AskedLast {
    fn asleep(&self, sleeps: impl Fn(&GpuFacts) -> bool) -> Asleep {
        let asleep = self.0.iter().filter(|(_, (gpu, _))| sleeps(gpu));
        let asleep = asleep.map(|(label, (_, slept))| (label.clone(), *slept));
        asleep.collect()
    }

    /// Whether none of these is to be asked. One that was never asked is, such as one that could not be used until now.
    fn all_rest(&self, measured: &[GpuProfile], asleep: &Asleep) -> bool {
        measured.iter().all(|gpu| {
            let mut asked = self.0.values();
            asked.any(|(facts, _)| is_one_of(from_ref(gpu), facts) && rests(asleep, facts))
        })
    }

    /// `asleep`: those that slept before these were asked.
    fn learn(&mut self, asked: &[AskedGpu], asleep: &Asleep) {
        for (gpu, _) in asked {
            let label = gpu.label();
            let slept = asleep.contains_key(&label);
            self.0.insert(label, (gpu.clone(), slept));
        }
    }
}

/// Whether the GPU sleeps, and was asked since it does.
fn rests(asleep: &Asleep, gpu: &GpuFacts) -> bool {
    asleep.get(&gpu.label()).is_some_and(|slept| *slept)
}

/// The GPUs that can be used.
fn measured(status: &NodeProfileStatus) -> Vec<GpuProfile> {
    let gpus = status.gpus.iter();
    gpus.filter(|gpu| gpu.measured.is_some()).cloned().collect()
}

fn is_one_of(gpus: &[GpuProfile], facts: &GpuFacts) -> bool {
    let places = gpu::places(gpus, from_ref(facts));
    places.iter().any(Option::is_some)
}

fn has_own_gpu_memory(status: &NodeProfileStatus) -> bool {
    let mut measured = status.gpus.iter().filter_map(|gpu| gpu.measured.as_ref());
    measured.any(|gpu| gpu.own_available_bytes().is_some())
}

fn gpu_changed_much(told: &GpuMeasurements, now: i64) -> bool {
    let less = told.available_bytes.saturating_sub(now);
    less > told.total_bytes / LESS_WORTH_TELLING || -less > told.total_bytes / WORTH_TELLING
}

/// By the files below `root`. The drivers of GPUs, which answer some of it, may wait for a GPU that hangs: nothing else is to wait with them.
async fn look(root: PathBuf, os: Os, children: Children) -> Result<MemoryNow, LookError> {
    let looking = spawn_blocking(move || {
        let mut now = available_memory::read(&root, os)?;
        let held = children.held_bytes(&root);
        now.available = now.available.saturating_add(held).min(now.total);
        Ok::<_, LookError>(now)
    });
    looking.await?
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
    use prima_crds::v1alpha1::node_profile::{GpuBackend, NodeProfile};
    use prima_engine::GpuApi;

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
        let own = children.add(std::process::id(), false);
        let held = vec![1_u8; 32 << 20];
        let root = Path::new("/");
        assert!(children.held_bytes(root) >= 32 << 20);
        drop((held, own));
        assert_eq!(children.held_bytes(root), 0);
    }

    #[test]
    fn members_hold_what_lies_there_for_their_gpus_too() {
        let root = tempfile::tempdir().unwrap();
        for pid in [7, 8] {
            let folder = root.path().join(format!("proc/{pid}"));
            fs::create_dir_all(folder.join("fdinfo")).unwrap();
            fs::write(folder.join("status"), "RssAnon:\t    2048 kB\n").unwrap();
            let told = "drm-client-id:\t1\ndrm-resident-gtt:\t5 MiB\n";
            fs::write(folder.join("fdinfo/9"), told).unwrap();
        }
        let children = Children::default();
        let _on_gpu = children.add(7, true);
        assert_eq!(children.held_bytes(root.path()), 7 << 20);
        let _without = children.add(8, false);
        assert_eq!(children.held_bytes(root.path()), 9 << 20);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn nothing_else_waits_for_a_driver_that_hangs() {
        use futures::FutureExt as _;
        use rustix::fs::{CWD, Mode, mkfifoat};

        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("proc/7/fdinfo");
        fs::create_dir_all(&folder).unwrap();
        let meminfo = "MemTotal: 9000 kB\nMemAvailable: 100 kB\n";
        fs::write(root.path().join("proc/meminfo"), meminfo).unwrap();
        // Nothing comes from there until somebody writes.
        let hangs = folder.join("9");
        mkfifoat(CWD, &hangs, Mode::RUSR | Mode::WUSR).unwrap();
        let children = Children::default();
        let _on_gpu = children.add(7, true);
        let look = super::look(root.path().to_owned(), Os::Linux, children.clone());
        let mut look = std::pin::pin!(look);
        assert!(look.as_mut().now_or_never().is_none());
        fs::write(&hangs, "drm-client-id:\t1\ndrm-resident-gtt:\t5 MiB\n").unwrap();
        assert_eq!(look.await.unwrap().available, (5 << 20) + (100 << 10));
    }

    #[test]
    fn a_gpu_is_in_use_while_a_member_that_uses_it_runs() {
        let children = Children::default();
        let _without = children.add(1, false);
        assert!(!children.use_gpu());
        let with = children.add(2, true);
        assert!(children.use_gpu());
        drop(with);
        assert!(!children.use_gpu());
    }

    fn twin(address: &str) -> GpuFacts {
        GpuFacts {
            api: GpuApi::Vulkan,
            name: "twin".to_owned(),
            pci: None,
            pci_address: Some(address.to_owned()),
            unified_memory: false,
            total_bytes: 2,
            available_bytes: 1,
            most_buffer_bytes: None,
        }
    }

    fn twins() -> [GpuFacts; 2] {
        ["0000:01:00.0", "0000:02:00.0"].map(twin)
    }

    fn profile_of(facts: &GpuFacts) -> GpuProfile {
        GpuProfile {
            name: facts.name.clone(),
            pci_address: facts.pci_address.clone(),
            backend: GpuBackend::Vulkan,
            unusable: None,
            measured: Some(measured_gpu(false)),
        }
    }

    /// Which of the twins are asked at a look, where these can be used, and these sleep; none where all rest.
    fn look(last: &mut AskedLast, usable: &[&GpuFacts], sleeping: &[&GpuFacts]) -> [bool; 2] {
        let usable: Vec<GpuProfile> = usable.iter().map(|facts| profile_of(facts)).collect();
        let asleep = last.asleep(|gpu| sleeping.contains(&gpu));
        let twins = twins();
        let due = [0, 1].map(|i| is_one_of(&usable, &twins[i]) && !rests(&asleep, &twins[i]));
        let asked = twins.into_iter().zip(due).filter(|(_, is_due)| *is_due);
        let asked: Vec<AskedGpu> = asked.map(|(gpu, _)| (gpu, None)).collect();
        assert_eq!(last.all_rest(&usable, &asleep), asked.is_empty());
        last.learn(&asked, &asleep);
        due
    }

    #[test]
    fn a_gpu_that_sleeps_is_asked_once_whatever_another_does() {
        let [first, second] = &twins();
        let mut last = AskedLast::default();
        let mut look = |sleeping: &[&GpuFacts]| look(&mut last, &[first, second], sleeping);
        assert_eq!(look(&[first]), [true, true]);
        for _ in 0..3 {
            assert_eq!(look(&[]), [true, true]);
            assert_eq!(look(&[first]), [true, true]);
            assert_eq!(look(&[first]), [false, true]);
            assert_eq!(look(&[first]), [false, true]);
            assert_eq!(look(&[first, second]), [false, true]);
            assert_eq!(look(&[first, second]), [false, false]);
            // One is awake again.
            assert_eq!(look(&[second]), [true, false]);
        }
    }

    #[test]
    fn a_gpu_that_comes_back_is_asked_while_another_sleeps() {
        let [first, second] = &twins();
        let mut last = AskedLast::default();
        // The second has failed before the first look.
        for asked in [true, true, false] {
            assert_eq!(look(&mut last, &[first], &[first]), [asked, false]);
        }
        assert_eq!(look(&mut last, &[first, second], &[first]), [false, true]);
        // It fails again, and was awake: nobody looks because of that.
        assert_eq!(look(&mut last, &[first], &[first]), [false, false]);
    }

    #[test]
    fn only_gpus_that_can_be_used_are_asked() {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        let mut status = profile.status.unwrap();
        let twins = twins();
        status.gpus = twins.each_ref().map(profile_of).to_vec();
        let asked = |status: &NodeProfileStatus| {
            let measured = measured(status);
            twins.each_ref().map(|facts| is_one_of(&measured, facts))
        };
        assert_eq!(asked(&status), [true, true]);
        // It has failed.
        status.gpus[0].measured = None;
        assert_eq!(asked(&status), [false, true]);
    }

    fn measured_gpu(unified: bool) -> GpuMeasurements {
        serde_json::from_value(serde_json::json!({
            "unifiedMemory": unified, "totalBytes": 1000, "availableBytes": 500, "readBytesPerSecond": 1,
            "kvAppendBytesPerSecond": 1, "toGpuBytesPerSecond": 1, "fromGpuBytesPerSecond": 1,
            "copyOverheadNanoseconds": 1, "layerOverheadNanoseconds": 1, "throughput": [],
        }))
        .unwrap()
    }

    #[test]
    fn less_of_a_gpus_memory_is_told_sooner_than_more() {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        let mut status = profile.status.unwrap();
        assert!(!has_own_gpu_memory(&status));
        for (unified, own) in [(true, false), (false, true)] {
            status.gpus[0].measured = Some(measured_gpu(unified));
            assert_eq!(has_own_gpu_memory(&status), own);
        }
        for (now, worth) in [
            (500, false),
            (490, false),
            (489, true),
            (550, false),
            (551, true),
        ] {
            assert_eq!(gpu_changed_much(&measured_gpu(false), now), worth, "{now}");
        }
    }
}
