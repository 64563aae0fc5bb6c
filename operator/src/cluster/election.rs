//! Which of several operators acts: the holder of a Lease. Decides nothing else. An operator that loses the Lease ends, and starts again as
//! one that waits.
//!
//! No two machines' clocks are compared, since boards without a battery start in 1970. As in Kubernetes' own client-go, whoever waits
//! measures by its own clock how long it has seen nobody write the Lease. The holder gives up sooner than that after its last write. The
//! times in the Lease are for people. Two may lead only where somebody deletes the Lease just as a new operator starts, which takes it at
//! once: until the one before renews, for a third of the Lease's duration.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use prima_crds::error_chain;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

const LEASE: &str = "prima-operator";
/// Between two looks at a Lease that another one holds.
const LOOK: Duration = Duration::from_secs(2);
/// Between two looks at the clock of one that leads, and between its tries to renew.
const TICK: Duration = Duration::from_secs(1);
/// How long one request may take while another one leads.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long giving the Lease back may take.
const RESIGNATION: Duration = Duration::from_secs(5);
/// The longest that a Lease's own word for how long it counts is believed, in seconds: `--leader-lease` takes no more.
const LONGEST: i32 = 600;

/// Stands for election from its start until it is dropped or resigns.
pub struct Election {
    leads: watch::Receiver<bool>,
    resign: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Election {
    /// `duration`: after this long without a sign of the leader, another one takes over.
    pub fn start(client: Client, namespace: &str, identity: &str, duration: Duration) -> Self {
        let candidate = Candidate {
            leases: Api::namespaced(client, namespace),
            identity: identity.to_owned(),
            duration,
        };
        let (leading, leads) = watch::channel(false);
        let (resign, resigned) = oneshot::channel();
        Self {
            leads,
            resign,
            task: tokio::spawn(candidate.run(leading, resigned)),
        }
    }

    /// Waits until it leads. False: it never will, as its task has ended.
    pub async fn won(&mut self) -> bool {
        self.leads.wait_for(|leads| *leads).await.is_ok()
    }

    pub async fn lost(&mut self) {
        // An error: the candidate has ended, and renews nothing.
        let _ = self.leads.wait_for(|leads| !*leads).await;
    }

    /// Gives the Lease back if it has it, so that the next one need not wait until it runs out.
    pub async fn resign(self) {
        drop(self.resign);
        if timeout(RESIGNATION, self.task).await.is_err() {
            tracing::warn!("the Lease was not given back in time");
        }
    }
}

struct Candidate {
    leases: Api<Lease>,
    identity: String,
    duration: Duration,
}

/// A Lease as this candidate wrote it.
struct HeldLease {
    lease: Lease,
    /// When it began to write it, by [`now`].
    since: Duration,
}

impl Candidate {
    async fn run(self, leading: watch::Sender<bool>, mut resigned: oneshot::Receiver<()>) {
        tokio::select! {
            () = self.lead_once(&leading) => {}
            _ = &mut resigned => {
                if let Err(error) = self.give_back().await {
                    tracing::warn!(error = error_chain(&error), "cannot give the Lease back");
                }
            }
        }
    }

    /// Returns when it has led and does no more.
    async fn lead_once(&self, leading: &watch::Sender<bool>) {
        let held = self.stand().await;
        leading.send_replace(true);
        self.hold(held).await;
        leading.send_replace(false);
    }

    /// Waits until the Lease is free, and takes it. An API server that is away is waited for.
    async fn stand(&self) -> HeldLease {
        let mut seen = Seen::default();
        let mut away = false;
        loop {
            match timeout(PATIENCE, self.take_if_free(&mut seen)).await {
                Ok(Ok(Some(held))) => return held,
                Ok(Ok(None)) => away = false,
                // It is said once.
                Ok(Err(_)) | Err(_) if away => {}
                Ok(Err(error)) => {
                    away = true;
                    tracing::warn!(error = error_chain(&error), "waits to lead");
                }
                Err(_) => {
                    away = true;
                    tracing::warn!(error = "the API server does not answer", "waits to lead");
                }
            }
            sleep(LOOK).await;
        }
    }

    async fn take_if_free(&self, seen: &mut Seen) -> kube::Result<Option<HeldLease>> {
        let found = self.leases.get_opt(LEASE).await?;
        let spec = found
            .as_ref()
            .map(|lease| lease.spec.clone().unwrap_or_default());
        if !seen.is_free(spec, &self.identity, self.duration, now()) {
            return Ok(None);
        }
        let since = now();
        match self.write(found).await {
            Ok(lease) => Ok(Some(HeldLease { lease, since })),
            Err(error) if is_outrun(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Renews the Lease for as long as nobody else has it and it is sure that nobody may take it.
    async fn hold(&self, mut held: HeldLease) {
        loop {
            tokio::select! {
                () = until(held.since + self.duration * 2 / 3) => {
                    tracing::warn!("could not renew the leader's Lease in time");
                    return;
                }
                renewed = self.renewed(&held) => match renewed {
                    Some(renewed) => held = renewed,
                    None => {
                        tracing::warn!("another operator has the leader's Lease");
                        return;
                    }
                }
            }
        }
    }

    /// Renews the Lease when it is time, and tries until it is renewed; `None`: another one has it.
    async fn renewed(&self, held: &HeldLease) -> Option<HeldLease> {
        until(held.since + self.duration / 3).await;
        loop {
            let since = now();
            // Several tries fit before the end.
            let problem = match timeout(self.duration / 6, self.renew(&held.lease)).await {
                Ok(Ok(lease)) => return lease.map(|lease| HeldLease { lease, since }),
                Ok(Err(error)) => error_chain(&error),
                Err(_) => "the API server does not answer".to_owned(),
            };
            tracing::warn!(problem, "the leader's Lease is not renewed yet");
            sleep(TICK).await;
        }
    }

    /// The Lease as it is now; `None`: another one has it.
    async fn renew(&self, lease: &Lease) -> kube::Result<Option<Lease>> {
        match self.write(Some(lease.clone())).await {
            Err(error) if is_outrun(&error) => {}
            written => return written.map(Some),
        }
        // Somebody has changed or deleted it.
        let found = self.leases.get_opt(LEASE).await?;
        let spec = found.as_ref().and_then(|lease| lease.spec.as_ref());
        if spec
            .and_then(holder)
            .is_some_and(|holder| holder != self.identity)
        {
            return Ok(None);
        }
        self.write(found).await.map(Some)
    }

    /// Writes the Lease with this candidate as its holder, if it still is as it was found.
    async fn write(&self, found: Option<Lease>) -> kube::Result<Lease> {
        let exists = found.is_some();
        let mut lease = found.unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                name: Some(LEASE.to_owned()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        let time = MicroTime(Timestamp::now());
        let before = lease.spec.take().unwrap_or_default();
        let stays = before.holder_identity.as_ref() == Some(&self.identity);
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(self.duration.as_secs() as i32),
            acquire_time: before.acquire_time.filter(|_| stays).or(Some(time.clone())),
            renew_time: Some(time),
            lease_transitions: Some(
                before
                    .lease_transitions
                    .unwrap_or(0)
                    .saturating_add(i32::from(!stays)),
            ),
            ..before
        });
        let parameters = PostParams::default();
        match exists {
            true => self.leases.replace(LEASE, &parameters, &lease).await,
            false => self.leases.create(&parameters, &lease).await,
        }
    }

    async fn give_back(&self) -> kube::Result<()> {
        loop {
            let Some(mut lease) = self.leases.get_opt(LEASE).await? else {
                return Ok(());
            };
            match &mut lease.spec {
                Some(spec) if spec.holder_identity.as_ref() == Some(&self.identity) => {
                    spec.holder_identity = None;
                }
                _ => return Ok(()),
            }
            let parameters = PostParams::default();
            match self.leases.replace(LEASE, &parameters, &lease).await {
                // Also by a request of this candidate's own that was still under way.
                Err(error) if is_outrun(&error) => {}
                other => return other.map(drop),
            }
        }
    }
}

/// What a waiting operator has seen of the leader's Lease.
#[derive(Default)]
struct Seen(Option<Sight>);

struct Sight {
    /// `None`: it was held, and is gone. Its holder does not know yet.
    spec: Option<LeaseSpec>,
    since: Duration,
    /// How long it counts from then on.
    term: Duration,
}

impl Seen {
    /// Takes in the Lease as it is at `now`, `None` where there is none. Returns whether `identity` may take it.
    fn is_free(
        &mut self,
        spec: Option<LeaseSpec>,
        identity: &str,
        duration: Duration,
        now: Duration,
    ) -> bool {
        match (&spec, spec.as_ref().and_then(holder)) {
            // A process of before, which has ended: identities are unique.
            (_, Some(holder)) if holder == identity => return true,
            (_, Some(_)) => {}
            // It was given back.
            (Some(_), None) => return true,
            // There was never one.
            (None, None) if self.0.is_none() => return true,
            (None, None) => {}
        }
        let term = match (&spec, &self.0) {
            (Some(spec), _) => spec.lease_duration_seconds.map_or(duration, |seconds| {
                Duration::from_secs(seconds.clamp(1, LONGEST).unsigned_abs().into())
            }),
            (None, Some(sight)) => sight.term,
            (None, None) => duration,
        };
        let changed = self.0.as_ref().is_none_or(|sight| sight.spec != spec);
        if changed {
            self.0 = Some(Sight {
                spec,
                since: now,
                term,
            });
        }
        self.0
            .as_ref()
            .is_some_and(|sight| now.saturating_sub(sight.since) >= sight.term)
    }
}

fn holder(spec: &LeaseSpec) -> Option<&str> {
    spec.holder_identity
        .as_deref()
        .filter(|holder| !holder.is_empty())
}

/// Somebody else wrote, made or deleted the object first.
fn is_outrun(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status)
        if status.is_conflict() || status.is_already_exists() || status.is_not_found())
}

/// Waits until [`now`] is `time`; after the machine has slept, it is known within a second.
async fn until(time: Duration) {
    while now() < time {
        sleep(TICK).await;
    }
}

/// Since some time in the past, by a clock that nobody sets and that goes on while the machine sleeps.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const DURATION: Duration = Duration::from_secs(30);

    fn held(by: &str, renewed: i64) -> Option<LeaseSpec> {
        Some(LeaseSpec {
            holder_identity: Some(by.to_owned()),
            lease_duration_seconds: Some(10),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
            ..LeaseSpec::default()
        })
    }

    fn is_free(seen: &mut Seen, spec: Option<LeaseSpec>, seconds: u64) -> bool {
        seen.is_free(spec, "me", DURATION, Duration::from_secs(seconds))
    }

    #[test]
    fn a_lease_counts_from_when_it_was_seen_whatever_its_times_say() {
        for times in [[0, 1, 2], [4_102_444_800, 0, 7]] {
            let mut seen = Seen::default();
            assert!(!is_free(&mut seen, held("it", times[0]), 100));
            assert!(!is_free(&mut seen, held("it", times[0]), 109));
            // Renewed: it counts anew.
            assert!(!is_free(&mut seen, held("it", times[1]), 110));
            assert!(!is_free(&mut seen, held("it", times[1]), 119));
            assert!(is_free(&mut seen, held("it", times[1]), 120));
            assert!(!is_free(&mut seen, held("it", times[2]), 121));
        }
    }

    #[test]
    fn a_deleted_lease_counts_as_held_and_a_missing_one_is_free() {
        let mut seen = Seen::default();
        assert!(is_free(&mut seen, None, 100));
        assert!(!is_free(&mut seen, held("it", 0), 100));
        assert!(!is_free(&mut seen, None, 105));
        assert!(!is_free(&mut seen, None, 114));
        // Its holder has made it again.
        assert!(!is_free(&mut seen, held("it", 1), 114));
        assert!(!is_free(&mut seen, None, 120));
        assert!(is_free(&mut seen, None, 130));
    }

    #[test]
    fn ones_own_and_what_was_given_back_is_free_at_once() {
        let mut seen = Seen::default();
        assert!(!is_free(&mut seen, held("it", 0), 100));
        assert!(is_free(&mut seen, held("me", 0), 100));
        assert!(is_free(&mut seen, Some(LeaseSpec::default()), 100));
        assert!(is_free(&mut seen, held("", 0), 100));
    }

    #[test]
    fn an_absurd_duration_is_not_believed_for_ever() {
        let forever = Some(LeaseSpec {
            lease_duration_seconds: Some(i32::MAX),
            ..held("it", 0).unwrap()
        });
        let mut seen = Seen::default();
        assert!(!is_free(&mut seen, forever.clone(), 100));
        assert!(!is_free(&mut seen, forever.clone(), 699));
        assert!(is_free(&mut seen, forever, 700));
    }
}
