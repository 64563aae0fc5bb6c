//! Which of several operators acts: the holder of a Lease. Decides nothing else. An operator that loses the Lease ends, and starts again as
//! one that waits.

use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use prima_crds::error_chain;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

pub struct Election {
    client: Client,
    namespace: String,
    identity: String,
    duration: Duration,
    candidacy: Candidacy,
}

struct Candidacy {
    leads: watch::Receiver<bool>,
    task: JoinHandle<Result<LeaseManager, LeaseManagerError>>,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot take part in the election of a leader (Lease {LEASE} in namespace {namespace})")]
pub struct ElectionError {
    namespace: String,
    #[source]
    source: LeaseManagerError,
}

const LEASE: &str = "prima-operator";
/// How long giving the Lease back may take.
const RESIGNATION: Duration = Duration::from_secs(5);
/// Before standing for election again, after the manager has ended.
const PAUSE: Duration = Duration::from_secs(1);

impl Election {
    /// Stands for election until dropped. `duration`: whole seconds after which another one may take a Lease that was not renewed.
    pub async fn start(
        client: Client,
        namespace: &str,
        identity: &str,
        duration: Duration,
    ) -> Result<Self, ElectionError> {
        Ok(Self {
            candidacy: stand(&client, namespace, identity, duration).await?,
            client,
            namespace: namespace.to_owned(),
            identity: identity.to_owned(),
            duration,
        })
    }

    pub async fn won(&mut self) {
        let leases = Api::<Lease>::namespaced(self.client.clone(), &self.namespace);
        let ours = super::watching::watch().fields(&format!("metadata.name={LEASE}"));
        let changes = watcher::watcher(leases, ours).default_backoff();
        let mut changes = std::pin::pin!(changes.applied_objects());
        loop {
            tokio::select! {
                leads = self.candidacy.becomes(true) => match leads {
                    true => return,
                    false => {
                        tokio::time::sleep(PAUSE).await;
                        self.stand_again().await;
                    }
                },
                Some(Ok(lease)) = changes.next() => {
                    let holder = lease.spec.and_then(|spec| spec.holder_identity);
                    // A waiting operator sleeps until the Lease would have run out; but a Lease given back is free at once.
                    if holder.unwrap_or_default().is_empty() {
                        self.stand_again().await;
                    }
                }
            }
        }
    }

    pub async fn lost(&mut self) {
        self.candidacy.becomes(false).await;
    }

    /// Gives the Lease back, so that the next one need not wait until it runs out.
    pub async fn resign(self) {
        let Candidacy { leads, task } = self.candidacy;
        // The manager ends when nobody listens to it.
        drop(leads);
        if timeout(RESIGNATION, task).await.is_err() {
            tracing::warn!("the Lease was not given back in time");
        }
    }

    async fn stand_again(&mut self) {
        match stand(&self.client, &self.namespace, &self.identity, self.duration).await {
            Ok(candidacy) => {
                let before = std::mem::replace(&mut self.candidacy, candidacy);
                // The old task has the same name: on waking it would take the new task's Lease for its own.
                before.task.abort();
            }
            // The old task sleeps, and wakes up some time.
            Err(error) => tracing::warn!(error = error_chain(&error), "waits to lead"),
        }
    }
}

async fn stand(
    client: &Client,
    namespace: &str,
    identity: &str,
    duration: Duration,
) -> Result<Candidacy, ElectionError> {
    let failed = |source| ElectionError {
        namespace: namespace.to_owned(),
        source,
    };
    let manager = LeaseManagerBuilder::new(client.clone(), LEASE)
        .with_namespace(namespace)
        .with_identity(identity)
        .with_duration(duration.as_secs())
        // The Lease is renewed this long before its end: after a third of it.
        .with_grace(duration.as_secs() * 2 / 3)
        .build()
        .await
        .map_err(failed)?;
    let (leads, task) = manager.watch().await;
    Ok(Candidacy { leads, task })
}

impl Candidacy {
    /// False once the manager has ended, and with it the Lease.
    async fn becomes(&mut self, wanted: bool) -> bool {
        while *self.leads.borrow_and_update() != wanted {
            if self.leads.changed().await.is_err() {
                return false;
            }
        }
        true
    }
}
