//! One plan on this machine, from the moment it is seen until it is gone: checked, its weights fetched, its process started,
//! watched, started again when it ends, and ended.
//!
//! Decides the order of these steps, and when one is tried again. Each step's own module decides how it is done.

use std::convert::Infallible;
use std::future::pending;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io, iter};

use kube::Client;
use prima_crds::v1alpha1::api_keys::ApiKeys;
use prima_crds::v1alpha1::ring_plan::{MemberStatus, RingPlan, RingPlanSpec};
use prima_member_process::{HEALTH_DEADLINE, Health, health};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::api;
use super::ask_gpu;
use super::backoff::Backoff;
use super::lost_gpu::GpuFailures;
use super::member_process::{ProcessError, Running, Start};
use super::member_status::{self, Observed, Writer};
use super::memory::Children;
use super::metrics::Metrics;
use super::own_key::KeyFile;
use super::owner::{self, Allowance, OwnerError};
use super::plan_checks::{self, PlanRefused};
use super::plan_key::PlanKey;
use super::weights::{HeldFile, Share, WantedWeights, Weights, WeightsError};

/// What all members on this machine have in common.
pub struct Agent {
    pub client: Client,
    pub node: String,
    pub address: std::net::IpAddr,
    pub key_file: KeyFile,
    pub threads: Option<u16>,
    /// For the plans that the processes read.
    pub plans_folder: PathBuf,
    pub weights: Weights,
    pub children: Children,
    pub gpu_failures: GpuFailures,
    pub metrics: Metrics,
}

/// A plan that names this machine.
pub struct PlanOnMachine {
    pub key: PlanKey,
    /// Or why it cannot be understood.
    pub spec: Result<RingPlanSpec, String>,
    /// Whether an earlier plan of the same Model names this machine, too.
    pub replaces: bool,
    /// What its annotation says of API keys, which changes.
    pub api_keys: watch::Receiver<ApiKeys>,
}

/// Why a member is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    PlanGone,
    /// The plan stays, so it must no longer say that the member is ready.
    AgentEnds,
}

/// Why an attempt ended.
#[derive(Debug, thiserror::Error)]
enum MemberError {
    #[error("RingPlan: {0}")]
    Unreadable(String),
    #[error(transparent)]
    Refused(#[from] PlanRefused),
    #[error(
        "cannot listen on {address}, which the plan gives this machine; another program may use the port"
    )]
    Port {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("cannot get the draft model")]
    Draft(#[source] WeightsError),
    #[error("cannot write the plan to {} for the member's process", path.display())]
    PlanFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write the API keys to {} for the member's process", path.display())]
    ApiKeys {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write the plan as YAML")]
    Yaml(#[source] serde_saphyr::SerializeError),
    #[error(transparent)]
    Owner(#[from] OwnerError),
    #[error("cannot start the member's process")]
    Process(#[from] ProcessError),
    #[error("{0}")]
    Ended(String),
}

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
/// After a download that was too slow for those who wait for its room: each of them tries meanwhile.
const OTHERS_PAUSE: Duration = Duration::from_secs(240);
/// A member whose process ran this long starts again with a short backoff.
const STEADY: Duration = Duration::from_secs(600);
/// After an agent has said that it ends, operator and nodes take a moment to send clients elsewhere: until then a ring takes what comes.
const MOVING: Duration = Duration::from_secs(2);
/// Clients are sent to a rank 0 that said last that it is ready, so it is asked often.
const HEALTH_INTERVAL: Duration = Duration::from_millis(500);
/// A rank 0 whose HTTP endpoint has not answered for so long is started anew.
const SILENT_FOR: Duration = Duration::from_secs(40);

/// Runs the member until it is told to end, and then until it has ended.
pub async fn run(machine: Arc<Agent>, plan: PlanOnMachine, end: oneshot::Receiver<End>) {
    let (tell, told) = watch::channel(None);
    let mut writer = Writer::new(
        machine.client.clone(),
        plan.key.clone(),
        &machine.node,
        machine.metrics.member(),
    );
    let mut api_keys = plan.api_keys.clone();
    let mut member = Member {
        tell,
        share: None,
        process: None,
        held: Vec::new(),
        allowance: None,
        starts: 0,
        gave_way: 0,
        machine,
        plan,
    };
    let api_key_file = member.api_key_file();
    let follow_keys = async {
        while api_keys.changed().await.is_ok() {
            let Some(file) = &api_key_file else {
                continue;
            };
            // A key that was revoked must not open because a disk was full for a moment.
            loop {
                let written = write_api_keys(file, &api_keys.borrow_and_update());
                let Err(error) = written else {
                    break;
                };
                let problem = prima_crds::error_chain(&error);
                tracing::error!(
                    problem,
                    "the ring's API keys stay as they were; trying again"
                );
                sleep(FIRST_PAUSE).await;
            }
        }
        pending().await
    };
    let end = tokio::select! {
        // If the sender was dropped, the member is no longer wanted.
        end = end => end.unwrap_or(End::AgentEnds),
        never = member.keep_up() => match never {},
        never = follow_keys => match never {},
        () = writer.follow(told) => End::AgentEnds,
    };
    tracing::info!(plan = %member.plan.key, ?end, "the member ends");
    if end == End::AgentEnds {
        let status = member.status(&Observed::Ending);
        if let Ok(Err(problem)) = timeout(api::DEADLINE, writer.write(status)).await {
            tracing::warn!(plan = %member.plan.key, problem, "cannot write the member's status");
        }
        if member.process.is_some() {
            sleep(MOVING).await;
        }
    }
    member.end().await;
}

struct Member {
    machine: Arc<Agent>,
    plan: PlanOnMachine,
    tell: watch::Sender<Option<MemberStatus>>,
    share: Option<Share>,
    process: Option<Running>,
    /// Keeps the files from being removed.
    held: Vec<HeldFile>,
    /// As it was read last.
    allowance: Option<Allowance>,
    starts: u32,
    /// How often in a row its download gave way to others.
    gave_way: u32,
}

impl Member {
    /// Tries for ever, with backoff.
    async fn keep_up(&mut self) -> Infallible {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let before = self.share;
            let error = match self.attempt().await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            let ran_for = self.process.as_ref().map(Running::age);
            // What is refused at last may have been fetched for hours.
            if went_well(before, self.share, ran_for) && !is_refusal(&error) {
                backoff.reset();
            }
            if let MemberError::Refused(PlanRefused::NoGpu { source, .. }) = &error {
                self.machine.gpu_failures.tell_unopened([&**source]);
            }
            // The part of the model that it holds stays in use for the next attempt.
            if let Some(process) = self.process.take() {
                process.kill().await;
            }
            let pause = match gives_way(&error) {
                true => {
                    self.gave_way = self.gave_way.saturating_add(1);
                    OTHERS_PAUSE
                }
                false => backoff.next(),
            };
            let observed = observed(&error, pause);
            tracing::warn!(
                plan = %self.plan.key,
                problem = prima_crds::error_chain(&error),
                again_in_seconds = pause.as_secs(),
                "the member does not run"
            );
            self.observe(&observed);
            sleep(pause).await;
        }
    }

    async fn attempt(&mut self) -> Result<Infallible, MemberError> {
        let machine = self.machine.clone();
        let spec = self.plan.spec.clone().map_err(MemberError::Unreadable)?;
        let key = machine.key_file.fingerprint();
        let mut members = spec.members.iter();
        let own = members.find(|member| member.name == machine.node);
        let gpu = match own.filter(|own| own.uses_gpu()) {
            Some(own) => ask_gpu::opens(&own.gpus).await,
            None => Ok(()),
        };
        let launch = plan_checks::check(&spec, &machine.node, machine.address, &key, || gpu)?;
        for address in [Some(launch.listen), launch.http].into_iter().flatten() {
            TcpListener::bind(address).map_err(|source| MemberError::Port { address, source })?;
        }

        let held = self.obtain(&spec, launch.rank).await?;
        let drain_limit = spec.drain_limit();
        let planned_bytes = spec.members[launch.rank].memory_bytes;
        let identity = spec.is_encrypted().then_some(&*machine.key_file.path);
        let plan_file = self.plan_file();
        write_plan(&plan_file, &self.plan.key, spec, &held)?;
        self.held = held;
        let api_key_file = self.api_key_file();
        if let Some(file) = &api_key_file {
            write_api_keys(file, &self.plan.api_keys.borrow())?;
        }

        let allowance = match owner::allowance(&machine.client, &machine.node).await {
            Ok(allowance) => *self.allowance.insert(allowance),
            // A process that has died can restart without the API server.
            Err(error) => self.allowance.ok_or(error)?,
        };
        let start = Start {
            reserved_bytes: allowance.reserved_bytes,
            // A plan without streaming promises less than the whole cap.
            weights_bytes: allowance.cap_bytes.map(|cap| {
                let planned = planned_bytes.and_then(|bytes| u64::try_from(bytes).ok());
                planned.unwrap_or(cap).min(cap)
            }),
            plan: self.plan.key.to_string(),
            drain_limit,
            plan_file: &plan_file,
            member: &machine.node,
            launch,
            identity,
            api_key_file: api_key_file.as_deref(),
            threads: machine.threads,
            cut_answers: machine.metrics.cut_answers.clone(),
            gpu_failures: machine.gpu_failures.clone(),
        };
        let process = self
            .process
            .insert(Running::start(start, &machine.children)?);
        if self.starts > 0 {
            machine.metrics.restarts.inc();
        }
        self.starts += 1;
        let (tell, share) = (&self.tell, self.share);
        let observe = |observed: &Observed| {
            tell.send_replace(Some(member_status::status(&machine.node, observed, share)));
        };
        observe(&Observed::Started);
        let joined = process.joined();
        tokio::select! {
            why = process.ended() => return Err(MemberError::Ended(why)),
            () = joined => {}
        }
        let Some(http) = launch.http else {
            observe(&Observed::Joined(None));
            return Err(MemberError::Ended(process.ended().await));
        };
        let follow = async {
            let mut ticks = interval(HEALTH_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            // Each answer that did not come counts for its deadline at most: this process may itself have been stopped for longer.
            let mut silence = Duration::ZERO;
            loop {
                ticks.tick().await;
                let asked = Instant::now();
                let health = health(http).await;
                match &health {
                    Health::NoAnswer(_) => {
                        silence += asked.elapsed().clamp(HEALTH_INTERVAL, HEALTH_DEADLINE);
                    }
                    Health::Ready { .. } | Health::NotReady { .. } => silence = Duration::ZERO,
                }
                if let Health::NoAnswer(why) = &health
                    && silence > SILENT_FOR
                {
                    let seconds = silence.as_secs();
                    return format!("its process does not answer for {seconds} s: {why}");
                }
                observe(&Observed::Joined(Some(health)));
            }
        };
        tokio::select! {
            why = process.ended() => Err(MemberError::Ended(why)),
            why = follow => Err(MemberError::Ended(why)),
        }
    }

    /// Its part of the model; at rank 0 then also the draft model.
    async fn obtain(
        &mut self,
        spec: &RingPlanSpec,
        rank: usize,
    ) -> Result<Vec<HeldFile>, MemberError> {
        let weights = self.machine.weights.clone();
        let namespace = self.plan.key.namespace.clone();
        let draft = spec.draft.as_ref().filter(|_| rank == 0);
        let draft = draft.map(|draft| &draft.model);
        let fetched_draft = draft.filter(|draft| plan_checks::is_fetched(draft));
        if fetched_draft.is_some() || plan_checks::is_fetched(&spec.model) {
            self.observe(&Observed::Fetching);
        }
        let to_come = fetched_draft.map(|draft| Share {
            fetched_bytes: 0,
            total_bytes: draft.size_bytes as u64,
        });
        let (replaces, gave_way) = (self.plan.replaces, self.gave_way);
        let progress = |share| self.fetches([Some(share), to_come]);
        let part = WantedWeights {
            replaces,
            gave_way,
            then: fetched_draft,
            ..WantedWeights::of_member(spec, rank)
        };
        let mut held = vec![weights.obtain(&namespace, part, progress).await?];
        if let Some(draft) = draft {
            let part = held[0].share;
            let progress = |share| self.fetches([part, Some(share)]);
            let whole = WantedWeights {
                replaces,
                gave_way,
                ..WantedWeights::whole(draft)
            };
            let whole = weights.obtain(&namespace, whole, progress).await;
            held.push(whole.map_err(MemberError::Draft)?);
        }
        self.share = Share::of_all(held.iter().map(|file| file.share));
        self.gave_way = 0;
        Ok(held)
    }

    fn fetches(&mut self, files: [Option<Share>; 2]) {
        self.share = Share::of_all(files);
        self.observe(&Observed::Fetching);
    }

    fn observe(&self, observed: &Observed) {
        self.tell.send_replace(Some(self.status(observed)));
    }

    fn status(&self, observed: &Observed) -> MemberStatus {
        member_status::status(&self.machine.node, observed, self.share)
    }

    /// Named by the plan's uid, so that another plan of the same name never reads it.
    fn plan_file(&self) -> PathBuf {
        let file = format!("{}.yaml", self.plan.key.uid);
        self.machine.plans_folder.join(file)
    }

    /// Where this machine's process finds the API keys that clients have to send, if it is asked to.
    fn api_key_file(&self) -> Option<PathBuf> {
        let spec = self.plan.spec.as_ref().ok()?;
        let serves = spec.members.first()?.name == self.machine.node;
        let file = format!("{}.api-keys.json", self.plan.key.uid);
        (serves && spec.api_key_required).then(|| self.machine.plans_folder.join(file))
    }

    async fn end(self) {
        let files = [Some(self.plan_file()), self.api_key_file()];
        if let Some(process) = self.process {
            process.end().await;
        }
        // There is none where the member never started.
        for file in files.into_iter().flatten() {
            let _ = fs::remove_file(file);
        }
    }
}

/// Whether an attempt got so far that its failure counts as the first: its process ran for long, or more of the model is on the disk than
/// `before`.
fn went_well(before: Option<Share>, now: Option<Share>, ran_for: Option<Duration>) -> bool {
    let fetched = |share: Option<Share>| share.map(|share| share.fetched_bytes);
    ran_for.is_some_and(|ran_for| ran_for > STEADY) || fetched(now) > fetched(before)
}

/// Whether others are to have the room on the disk first.
fn gives_way(error: &MemberError) -> bool {
    match error {
        MemberError::Weights(error) | MemberError::Draft(error) => error.gives_way(),
        _ => false,
    }
}

/// How a failed attempt is reported.
fn observed(error: &MemberError, again_in: Duration) -> Observed {
    let why = prima_crds::error_chain(error);
    match is_refusal(error) {
        true => Observed::Refused(why),
        false => Observed::Failed { why, again_in },
    }
}

/// Whether planners leave this machine out for a while: it must be the fault of the machine or the plan, not a passing problem.
fn is_refusal(error: &MemberError) -> bool {
    match error {
        // The pod was created again, or the agent has a new key; the machine is as good as before. That it lacks its GPU, its profile says.
        MemberError::Refused(
            PlanRefused::OtherAddress { .. }
            | PlanRefused::OtherKey { .. }
            | PlanRefused::NoGpu { .. },
        ) => false,
        MemberError::Unreadable(_) | MemberError::Refused(_) => true,
        MemberError::Port { source, .. } => source.kind() != io::ErrorKind::AddrInUse,
        MemberError::Weights(error) | MemberError::Draft(error) => error.is_refusal(),
        MemberError::PlanFile { .. }
        | MemberError::ApiKeys { .. }
        | MemberError::Yaml(_)
        | MemberError::Owner(_)
        | MemberError::Process(_)
        | MemberError::Ended(_) => false,
    }
}

/// Writes the plan for the process, with the paths of the model's file, and of the draft model's, on this machine.
fn write_plan(
    path: &PathBuf,
    key: &PlanKey,
    mut spec: RingPlanSpec,
    held: &[HeldFile],
) -> Result<(), MemberError> {
    let draft = spec.draft.as_mut().map(|draft| &mut draft.model);
    for (model, held) in iter::once(&mut spec.model).chain(draft).zip(held) {
        model.file = held.path.display().to_string();
    }
    let mut plan = RingPlan::new(&key.name, spec);
    plan.metadata.uid = Some(key.uid.clone());
    let yaml = serde_saphyr::to_string(&plan).map_err(MemberError::Yaml)?;
    fs::write(path, yaml).map_err(|source| MemberError::PlanFile {
        path: path.clone(),
        source,
    })
}

/// Whoever reads the file sees the old keys or the new ones.
fn write_api_keys(path: &Path, keys: &ApiKeys) -> Result<(), MemberError> {
    let new = path.with_extension("new");
    let written = fs::write(&new, keys.to_json()).and_then(|()| fs::rename(&new, path));
    written.map_err(|source| MemberError::ApiKeys {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use prima_engine::EngineError;
    use prima_weights::DownloadError;

    use super::*;

    #[test]
    fn who_ran_for_long_or_fetched_some_is_tried_again_soon() {
        let share = |fetched_bytes| {
            Some(Share {
                fetched_bytes,
                total_bytes: 9,
            })
        };
        let second = Duration::from_secs(1);
        assert!(went_well(None, None, Some(STEADY + second)));
        assert!(!went_well(None, None, Some(STEADY)));
        assert!(went_well(share(3), share(4), None));
        // It was there, or was of no use and is fetched again.
        assert!(!went_well(share(9), share(9), Some(second)));
        assert!(!went_well(share(9), share(4), None));
    }

    #[test]
    fn only_what_another_machine_would_do_better_is_a_refusal() {
        let address: SocketAddr = "10.0.0.7:9200".parse().unwrap();
        let port = |kind: io::ErrorKind| MemberError::Port {
            address,
            source: kind.into(),
        };
        let other_address = PlanRefused::OtherAddress {
            rank: 1,
            own: IpAddr::from([10, 0, 0, 8]),
            planned: address.ip(),
        };
        let no_gpu = PlanRefused::NoGpu {
            rank: 1,
            wanted: "outputHeadOnGpu: the output head".to_owned(),
            source: Box::new(EngineError::NoGpu {
                reason: "it was lost".to_owned(),
            }),
        };
        let digest = || "ab".repeat(32);
        let damaged = DownloadError::Sha256 {
            path: "m.gguf".into(),
            expected: digest(),
            found: digest(),
        };
        let other_digest = WeightsError::OtherDigest {
            file: "m.gguf".into(),
            expected: digest(),
            found: digest(),
        };
        let cases = [
            (MemberError::Unreadable("of another version".into()), true),
            (PlanRefused::NoHttpPort.into(), true),
            (WeightsError::NoVersion.into(), true),
            (WeightsError::Download(damaged).into(), false),
            (other_digest.into(), true),
            (MemberError::Draft(WeightsError::NoVersion), true),
            (port(io::ErrorKind::PermissionDenied), true),
            (port(io::ErrorKind::AddrInUse), false),
            (other_address.into(), false),
            (PlanRefused::OtherKey { rank: 1 }.into(), false),
            (no_gpu.into(), false),
            (MemberError::Ended("its process ended".into()), false),
        ];
        for (error, refused) in cases {
            let seen = observed(&error, Duration::from_secs(4));
            assert_eq!(matches!(seen, Observed::Refused(_)), refused, "{seen:?}");
        }
    }
}
