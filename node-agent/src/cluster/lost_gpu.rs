//! A GPU that fails leaves the machine's profile, so that rings are planned without it, and comes back with what was measured of it before.
//!
//! Decides which: the one whose place on the PCI bus, or name, is in what is told of the failure; where none is, all. And when: it stays out
//! for ten minutes, and for twice as long each time that it fails again, since with each failure a ring stands still.
//! After that it comes back as soon as it can be opened. Where it has not failed for a day, it counts as one that never did. Refuses to
//! measure it again, and to say why it failed: that, its driver knows.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::pending;
use std::pin::pin;
use std::time::Duration;

use futures::future::OptionFuture;
use prima_crds::v1alpha1::node_profile::{GpuProfile, NodeProfileStatus};
use prima_engine::{EngineError, GpuFacts};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::ask_gpu;
use super::backoff::{Backoff, jittered};
use super::memory::Children;
use super::publish_profile::gpus_text;
use crate::profile::gpu::{self, AskedGpu};

/// How long it stays out after its first failure, and between two tries to open it then.
const PAUSE: Duration = Duration::from_secs(10 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Characters that a profile says of a failure: profiles have to be small.
const MAX_REASON: usize = 600;

/// Where it is told that a GPU failed, and how. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct GpuFailures(watch::Sender<String>);

impl GpuFailures {
    /// `why`: one sentence, without a capital and a stop.
    pub fn tell(&self, why: &str) {
        self.0.send_replace(why.to_owned());
    }

    /// The same of those that cannot be opened, all at once: only what is told last is heard. If something else has all of a GPU's memory, a game or
    /// a ring that ends, it has not failed. Nor has any, if a plan names one that is not there: the profile lacks it, which has the operator plan again.
    pub fn tell_unopened<'a>(&self, errors: impl IntoIterator<Item = &'a EngineError>) {
        let mut failed = Vec::new();
        for error in errors {
            let why = prima_crds::error_chain(error);
            match error {
                EngineError::NotThere { .. } => {}
                full if full.is_full_gpu() => tracing::warn!(why, "a GPU cannot be opened now"),
                _ => failed.push(why),
            }
        }
        if !failed.is_empty() {
            self.tell(&failed.join("; "));
        }
    }

    /// Takes a GPU out of the profile whenever it is told that it failed, from now on, and puts it back; for ever. `children`: this agent's
    /// members.
    pub fn follow(
        &self,
        profile: watch::Sender<NodeProfileStatus>,
        children: Children,
    ) -> impl Future<Output = ()> + use<> {
        let (failures, lost) = (self.0.subscribe(), LostGpus::default());
        look_after(failures, lost, profile, children, ask_gpu::facts)
    }
}

/// What [`GpuFailures::follow`] does. `ask`: asks all GPUs of the machine, which may take minutes; until then, failures of others are heard.
async fn look_after<F: Future<Output = Result<Vec<AskedGpu>, EngineError>>>(
    mut failures: watch::Receiver<String>,
    mut lost: LostGpus,
    profile: watch::Sender<NodeProfileStatus>,
    children: Children,
    ask: impl Fn() -> F,
) {
    let mut asked = pin!(OptionFuture::<F>::from(None));
    let mut is_asking = false;
    loop {
        tokio::select! {
            // A ring that was planned with a GPU before that was out may tell it meanwhile. While it is out, that is no new failure.
            biased;
            told = failures.changed() => {
                if told.is_err() {
                    return;
                }
                let why = failures.borrow_and_update().clone();
                take_out(&mut lost, &profile, &why);
            }
            Some(answer) = asked.as_mut() => {
                asked.set(None.into());
                is_asking = false;
                come_back(&mut lost, &profile, &children, answer);
            }
            () = until(lost.next_due()), if !is_asking => {
                asked.set(Some(ask()).into());
                is_asking = true;
            }
        }
    }
}

/// Until then; for ever if there is no such time.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => pending().await,
    }
}

/// Takes those that failed out of the profile, also if they were measured again since they failed last.
fn take_out(lost: &mut LostGpus, profile: &watch::Sender<NodeProfileStatus>, why: &str) {
    let mut taken = Vec::new();
    profile.send_if_modified(|status| {
        taken = lost.take_out(status, why, Instant::now());
        !taken.is_empty()
    });
    if taken.is_empty() {
        tracing::warn!(
            why,
            "a failure was told of a GPU with which no ring is planned now"
        );
    }
    for (gpu, pause) in taken {
        tracing::error!(
            gpu,
            why,
            again_in_minutes = pause.as_secs() / 60,
            "the GPU failed: rings are planned without it until then"
        );
    }
}

/// Puts those that are due back, of which it was asked and said that they can be opened.
fn come_back(
    lost: &mut LostGpus,
    profile: &watch::Sender<NodeProfileStatus>,
    children: &Children,
    asked: Result<Vec<AskedGpu>, EngineError>,
) {
    let asked = asked.unwrap_or_else(|error| {
        let problem = prima_crds::error_chain(&error);
        tracing::warn!(problem, "no GPU can be opened yet");
        Vec::new()
    });
    for problem in gpu::problems(&asked) {
        let problem = prima_crds::error_chain(problem);
        tracing::warn!(problem, "a GPU cannot be opened yet");
    }
    // Else it may be a member that has some of its memory.
    let is_free = !children.use_gpu();
    let opened = gpu::opened(&asked);
    let mut back = Vec::new();
    profile.send_if_modified(|status| {
        let before = status.gpus.clone();
        back = lost.put_back(status, &opened, is_free, Instant::now());
        status.gpus != before
    });
    for gpu in back {
        tracing::info!(
            gpu,
            "the GPU can be opened again: rings may be planned with it"
        );
    }
}

/// What is remembered of the GPUs that rings are planned with.
#[derive(Default)]
struct LostGpus {
    out: Vec<LostGpu>,
    /// Of each that has failed, by its name in plans.
    histories: BTreeMap<String, History>,
}

struct LostGpu {
    /// As it was in the profile.
    kept: GpuProfile,
    /// When it is tried again.
    due: Instant,
}

struct History {
    pauses: Backoff,
    /// When it came back last.
    back_since: Option<Instant>,
}

impl Default for History {
    fn default() -> Self {
        Self {
            pauses: Backoff::new(PAUSE, DAY),
            back_since: None,
        }
    }
}

impl LostGpus {
    /// When the next one is tried again.
    fn next_due(&self) -> Option<Instant> {
        self.out.iter().map(|lost| lost.due).min()
    }

    /// Takes those that failed out of the profile. Returns their names, and for how long each is out at least; none where the profile has no
    /// such GPU that can be used.
    fn take_out(
        &mut self,
        status: &mut NodeProfileStatus,
        why: &str,
        now: Instant,
    ) -> Vec<(String, Duration)> {
        let long_ago = |since| now.duration_since(since) > DAY;
        let reason: String = why.chars().take(MAX_REASON).collect();
        let mut taken = Vec::new();
        for place in failed(&status.gpus, why) {
            let name = status.gpus[place].plan_name().to_owned();
            let is_out = |gpu: &GpuProfile| gpu.plan_name() == name && gpu.measured.is_none();
            if !status.gpus.iter().any(is_out) {
                // It was measured again since it failed last.
                self.out.retain(|lost| lost.kept.plan_name() != name);
            }
            let history = self.histories.entry(name).or_default();
            if history.back_since.is_some_and(long_ago) {
                history.pauses.reset();
            }
            let pause = history.pauses.next();
            let gpu = &mut status.gpus[place];
            self.out.push(LostGpu {
                kept: gpu.clone(),
                due: now + pause,
            });
            gpu.measured = None;
            gpu.unusable = Some(format!(
                "{reason}; rings do without it, and its agent tries it again after some time"
            ));
            taken.push((gpu.name.clone(), pause));
        }
        if !taken.is_empty() {
            show(status);
        }
        taken
    }

    /// Puts those that are due, and say this, back into the profile as they were, and so much of their memory as that says where `is_free`. The
    /// others are tried again later. Returns the names of those that are back.
    fn put_back(
        &mut self,
        status: &mut NodeProfileStatus,
        facts: &[GpuFacts],
        is_free: bool,
        now: Instant,
    ) -> Vec<String> {
        let (due, waiting): (Vec<_>, Vec<_>) = self.out.drain(..).partition(|lost| lost.due <= now);
        self.out = waiting;
        let kept: Vec<GpuProfile> = due.into_iter().map(|lost| lost.kept).collect();
        let found: Vec<usize> = gpu::places(&kept, facts).into_iter().flatten().collect();
        let mut names = Vec::new();
        for (place, kept) in kept.into_iter().enumerate() {
            if !found.contains(&place) {
                let due = now + jittered(PAUSE);
                self.out.push(LostGpu { kept, due });
                continue;
            }
            let history = self.histories.entry(kept.plan_name().to_owned());
            history.or_default().back_since = Some(now);
            names.push(kept.name.clone());
            put_in_place(status, kept);
        }
        if is_free && !names.is_empty() {
            gpu::set_available(&mut status.gpus, facts, |_, _| true);
        }
        show(status);
        names
    }
}

/// The places of the GPUs that this is about, of those that can be used.
fn failed(gpus: &[GpuProfile], why: &str) -> Vec<usize> {
    let told = told(gpus, why);
    let is_told = |gpu: &GpuProfile| told.is_empty() || told.contains(&gpu.plan_name());
    let failed = gpus.iter().enumerate();
    let failed = failed.filter(|&(_, gpu)| gpu.measured.is_some() && is_told(gpu));
    failed.map(|(place, _)| place).collect()
}

/// The GPUs that this is about, as plans name them. One's name may be a part of another's: the longest counts.
fn told<'a>(gpus: &'a [GpuProfile], why: &str) -> Vec<&'a str> {
    let mut names: Vec<&str> = gpus.iter().map(GpuProfile::plan_name).collect();
    names.retain(|name| !name.is_empty());
    names.sort_by_key(|name| Reverse(name.len()));
    let mut rest = why.to_owned();
    let mut told = Vec::new();
    for name in names {
        if rest.contains(name) {
            rest = rest.replace(name, "\n");
            told.push(name);
        }
    }
    told
}

/// Puts a GPU where it was, unless the machine was measured again meanwhile.
fn put_in_place(status: &mut NodeProfileStatus, gpu: GpuProfile) {
    let is_it = |known: &GpuProfile| known.plan_name() == gpu.plan_name();
    let is_known = status.gpus.iter().any(is_it);
    let mut known = status.gpus.iter();
    let place = known.position(|known| known.measured.is_none() && is_it(known));
    match place {
        Some(place) => status.gpus[place] = gpu,
        None if !is_known => status.gpus.insert(0, gpu),
        None => {}
    }
}

/// To people, at a glance.
fn show(status: &mut NodeProfileStatus) {
    if let Some(agent) = &mut status.agent {
        agent.gpus = gpus_text(&status.gpus);
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use futures::FutureExt;
    use prima_crds::v1alpha1::node_profile::NodeProfile;
    use prima_engine::GpuApi;
    use serde_json::json;
    use tokio::sync::mpsc;

    use super::*;

    /// Of a machine with a GPU, and another one that it does not use.
    fn status() -> NodeProfileStatus {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        let mut status = profile.status.unwrap();
        let gpu = json!({
            "name": "used", "backend": "Vulkan",
            "measured": {
                "unifiedMemory": false, "totalBytes": 12, "availableBytes": 11, "readBytesPerSecond": 1,
                "kvAppendBytesPerSecond": 1, "toGpuBytesPerSecond": 1, "fromGpuBytesPerSecond": 1,
                "copyOverheadNanoseconds": 1, "layerOverheadNanoseconds": 1, "throughput": [],
            },
        });
        status.gpus.insert(0, serde_json::from_value(gpu).unwrap());
        let agent = json!({"address": "10.0.0.1", "memory": "", "disk": ""});
        status.agent = Some(serde_json::from_value(agent).unwrap());
        status
    }

    fn says(name: &str, available_bytes: u64) -> GpuFacts {
        GpuFacts {
            api: GpuApi::Vulkan,
            name: name.to_owned(),
            pci: None,
            pci_address: None,
            unified_memory: false,
            total_bytes: 12,
            available_bytes,
            most_buffer_bytes: None,
        }
    }

    fn available(status: &NodeProfileStatus) -> i64 {
        status.gpus[0].measured.as_ref().unwrap().available_bytes
    }

    fn at_a_glance(status: &NodeProfileStatus) -> Option<&str> {
        status.agent.as_ref()?.gpus.as_deref()
    }

    const LONG: Duration = Duration::from_secs(2 * 24 * 60 * 60);

    #[test]
    fn a_gpu_that_fails_is_out_until_it_can_be_opened() {
        let (mut status, mut lost, now) = (status(), LostGpus::default(), Instant::now());
        let before = status.gpus.clone();
        assert_eq!(lost.take_out(&mut status, "it hangs", now).len(), 1);
        assert_eq!(status.gpus[0].measured, None);
        let unusable = status.gpus[0].unusable.as_deref().unwrap();
        assert!(unusable.starts_with("it hangs; rings do"), "{unusable}");
        let text = "used (unusable), Some GPU (unusable)";
        assert_eq!(at_a_glance(&status), Some(text));
        assert!(lost.take_out(&mut status, "it is gone", now).is_empty());

        // Too early, and another one.
        let used = [says("used", 5)];
        assert!(lost.put_back(&mut status, &used, true, now).is_empty());
        let later = now + LONG;
        let another = [says("another", 5)];
        assert!(lost.put_back(&mut status, &another, true, later).is_empty());
        // Nor is it tried again at once.
        assert!(lost.put_back(&mut status, &used, true, later).is_empty());
        assert_eq!(status.gpus[0].measured, None);
        let later = later + LONG;
        assert_eq!(lost.put_back(&mut status, &used, false, later), ["used"]);
        assert_eq!(status.gpus, before);
        assert_eq!(at_a_glance(&status), Some("used, Some GPU (unusable)"));
        assert!(lost.put_back(&mut status, &used, false, later).is_empty());

        // Nobody else has any of its memory.
        lost.take_out(&mut status, "it hangs", later);
        lost.put_back(&mut status, &used, true, later + LONG);
        assert_eq!(available(&status), 5);
    }

    #[test]
    fn of_several_gpus_the_one_that_failed_goes() {
        let (mut status, now) = (status(), Instant::now());
        let mut twin = status.gpus[0].clone();
        twin.pci_address = Some("0000:02:00.0".to_owned());
        status.gpus[0].pci_address = Some("0000:01:00.0".to_owned());
        status.gpus.insert(1, twin);
        let out = |status: &NodeProfileStatus| {
            [0, 1].map(|place: usize| status.gpus[place].measured.is_none())
        };
        let mut one = status.clone();
        let mut lost = LostGpus::default();
        let why = "used (0000:02:00.0): it hangs";
        assert_eq!(lost.take_out(&mut one, why, now).len(), 1);
        assert_eq!(out(&one), [false, true]);
        // It is told again by rings that were on their way.
        assert!(lost.take_out(&mut one, why, now).is_empty());
        assert_eq!(out(&one), [false, true]);
        let back = GpuFacts {
            pci_address: Some("0000:02:00.0".to_owned()),
            ..says("used", 5)
        };
        let back = lost.put_back(&mut one, &[back], false, now + LONG);
        assert_eq!(back, ["used"]);
        assert_eq!(one.gpus, status.gpus);

        // Where nobody knows which, none can be relied on.
        let mut both = status.clone();
        assert_eq!(lost.take_out(&mut both, "it hangs", now).len(), 2);
        assert_eq!(out(&both), [true, true]);
    }

    #[test]
    fn a_gpu_whose_name_is_a_part_of_anothers_stays() {
        let mut gpus = vec![status().gpus[0].clone(); 3];
        gpus[0].name = "RTX 3080".to_owned();
        gpus[1].name = "RTX 3080 Ti".to_owned();
        gpus[2].name = "RTX 3080".to_owned();
        assert_eq!(failed(&gpus, "RTX 3080 Ti: it hangs"), [1]);
        assert_eq!(failed(&gpus, "RTX 3080: it hangs"), [0, 2]);
        let both = "RTX 3080: it hangs; RTX 3080 Ti: it is gone";
        assert_eq!(failed(&gpus, both), [0, 1, 2]);
        assert_eq!(failed(&gpus, "it hangs"), [0, 1, 2]);
    }

    #[test]
    fn what_is_measured_meanwhile_counts() {
        let (mut status, mut lost, now) = (status(), LostGpus::default(), Instant::now());
        let mut before = status.gpus.clone();
        let used = [says("used", 5)];
        lost.take_out(&mut status, "it hangs", now);
        before[0].measured.as_mut().unwrap().available_bytes = 7;
        status.gpus = before;
        lost.put_back(&mut status, &used, false, now + LONG);
        assert!(lost.out.is_empty());
        assert_eq!(available(&status), 7);

        // Where it was not found then.
        lost.take_out(&mut status, "it hangs", now);
        status.gpus.remove(0);
        lost.put_back(&mut status, &used, true, now + LONG);
        assert_eq!(available(&status), 5);
        assert_eq!(status.gpus.len(), 2);

        // It can fail again before it would have come back.
        let measured = status.gpus.clone();
        lost.take_out(&mut status, "it hangs", now);
        status.gpus = measured;
        assert_eq!(lost.take_out(&mut status, "it hangs", now).len(), 1);
        assert_eq!(lost.out.len(), 1);
    }

    #[test]
    fn each_failure_keeps_it_out_for_longer() {
        let (mut status, mut lost, begun) = (status(), LostGpus::default(), Instant::now());
        let minutes = |count: u64| Duration::from_secs(60 * count);
        // When it fails, and for how long it is then out, in minutes.
        for (at, out) in [
            (0, 10),
            (60, 20),
            (120, 40),
            // A day after it came back, and more than a day.
            (1590, 80),
            (3200, 10),
        ] {
            let now = begun + minutes(at);
            let taken = lost.take_out(&mut status, "it hangs", now);
            let pause = taken[0].1;
            let off = pause.abs_diff(minutes(out));
            assert!(off <= minutes(out) / 9, "{pause:?}, expected {out} min");
            let used = [says("used", 5)];
            let back = lost.put_back(&mut status, &used, true, now + pause);
            assert_eq!(back, ["used"]);
        }
    }

    #[test]
    fn all_that_cannot_be_opened_is_told_together() {
        let failures = GpuFailures::default();
        let mut told = failures.0.subscribe();
        let gpu = "0000:03:00.0".to_owned();
        let not_there = EngineError::NotThere { gpu };
        failures.tell_unopened([]);
        failures.tell_unopened([&not_there]);
        assert!(!told.has_changed().unwrap());
        let errors = ["the first hangs", "the second is gone"].map(|reason| EngineError::NoGpu {
            reason: reason.to_owned(),
        });
        failures.tell_unopened(errors.iter().chain([&not_there]));
        let said = told.borrow_and_update().clone();
        let both = said.split_once("; ").unwrap();
        assert!(both.0.contains("the first hangs"), "{said}");
        assert!(both.1.contains("the second is gone"), "{said}");
        assert!(!said.contains("0000:03:00.0"), "{said}");
    }

    #[tokio::test]
    async fn a_gpu_that_can_be_opened_again_is_told_of() {
        let (profile, mut published) = watch::channel(status());
        let mut lost = LostGpus::default();
        take_out(&mut lost, &profile, "it hangs");
        published.mark_unchanged();
        let children = Children::default();
        let opened = || Ok(vec![(says("used", 5), None)]);
        // Whoever waits for that waits until then.
        let due = lost.next_due().unwrap();
        assert!(until(Some(due)).now_or_never().is_none());
        come_back(&mut lost, &profile, &children, opened());
        assert!(!published.has_changed().unwrap());

        let is_due = |lost: &mut LostGpus| lost.out[0].due = Instant::now();
        let hangs = EngineError::NoGpu {
            reason: "it hangs".to_owned(),
        };
        is_due(&mut lost);
        come_back(
            &mut lost,
            &profile,
            &children,
            Ok(vec![(says("used", 5), Some(hangs))]),
        );
        assert!(!published.has_changed().unwrap());

        is_due(&mut lost);
        come_back(&mut lost, &profile, &children, opened());
        assert!(published.has_changed().unwrap());
        assert_eq!(available(&published.borrow_and_update()), 5);
        // None is out any more.
        assert!(until(lost.next_due()).now_or_never().is_none());

        // A member may have the rest of its memory.
        take_out(&mut lost, &profile, "it hangs");
        is_due(&mut lost);
        let _member = children.add(1, true);
        come_back(
            &mut lost,
            &profile,
            &children,
            Ok(vec![(says("used", 3), None)]),
        );
        assert_eq!(available(&published.borrow()), 5);
    }

    #[tokio::test]
    async fn a_failure_is_told_to_the_cluster_at_once() {
        let (profile, mut published) = watch::channel(status());
        let failures = GpuFailures::default();
        let follow = failures.follow(profile, Children::default());
        failures.tell("it hangs");
        tokio::select! {
            () = follow => panic!("it follows no more"),
            changed = published.changed() => changed.unwrap(),
        }
        assert_eq!(published.borrow().gpus[0].measured, None);
    }

    /// As long as a driver takes to say that it can be opened, another GPU may fail.
    #[tokio::test]
    async fn a_failure_is_heard_while_another_gpu_is_tried_again() {
        let (mut both, mut lost) = (status(), LostGpus::default());
        let mut other = both.gpus[0].clone();
        other.name = "other".to_owned();
        both.gpus.insert(1, other);
        lost.take_out(&mut both, "used: it hangs", Instant::now());
        lost.out[0].due = Instant::now();
        let (profile, mut published) = watch::channel(both);
        let failures = GpuFailures::default();
        let (asks, mut asked) = mpsc::unbounded_channel();
        let never = || {
            let _ = asks.send(());
            pending()
        };
        let told = failures.0.subscribe();
        let follow = look_after(told, lost, profile, Children::default(), never);
        let fails = async {
            asked.recv().await.unwrap();
            failures.tell("other: it is gone");
            let is_out = |status: &NodeProfileStatus| status.gpus[1].measured.is_none();
            published.wait_for(is_out).await.unwrap();
        };
        tokio::select! {
            () = follow => panic!("it follows no more"),
            () = fails => {}
        }
    }

    /// A ring that was planned with it tells it just before it is back.
    #[tokio::test]
    async fn a_gpu_that_is_told_while_it_is_out_comes_back() {
        let (mut status, mut lost) = (status(), LostGpus::default());
        lost.take_out(&mut status, "it hangs", Instant::now());
        lost.out[0].due = Instant::now();
        let (profile, mut published) = watch::channel(status);
        let failures = GpuFailures::default();
        let opened = || {
            failures.tell("it hangs");
            ready(Ok(vec![(says("used", 5), None)]))
        };
        let told = failures.0.subscribe();
        let follow = look_after(told, lost, profile, Children::default(), opened);
        let is_back = |status: &NodeProfileStatus| status.gpus[0].measured.is_some();
        tokio::select! {
            () = follow => panic!("it follows no more"),
            back = published.wait_for(is_back) => drop(back.unwrap()),
        }
        assert_eq!(available(&published.borrow()), 5);
    }

    #[tokio::test]
    async fn a_gpu_that_was_measured_meanwhile_can_fail_again() {
        let before = status();
        let (profile, mut published) = watch::channel(before.clone());
        let failures = GpuFailures::default();
        let follow = failures.follow(profile.clone(), Children::default());
        let fails_twice = async {
            for _ in 0..2 {
                profile.send_replace(before.clone());
                failures.tell("it hangs");
                let is_out = |status: &NodeProfileStatus| status.gpus[0].measured.is_none();
                published.wait_for(is_out).await.unwrap();
            }
        };
        tokio::select! {
            () = follow => panic!("it follows no more"),
            () = fails_twice => {}
        }
    }
}
