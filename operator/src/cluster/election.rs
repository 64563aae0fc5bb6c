//! Which of several operators acts: the holder of a Lease. It decides nothing but that; who loses the Lease ends, and starts
//! again as one who waits.

use std::time::Duration;

use kube::Client;
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

pub struct Election {
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
/// Seconds after which another one may take a Lease that was not renewed.
const DURATION_SECONDS: u64 = 30;
/// Seconds before the end when it is renewed.
const GRACE_SECONDS: u64 = 20;
/// How long giving the Lease back may take.
const RESIGNATION: Duration = Duration::from_secs(5);
/// Before a lost watch is noticed by asking.
const PAUSE: Duration = Duration::from_secs(1);

impl Election {
    /// Stands for election until dropped.
    pub async fn start(
        client: Client,
        namespace: &str,
        identity: &str,
    ) -> Result<Self, ElectionError> {
        let failed = |source| ElectionError {
            namespace: namespace.to_owned(),
            source,
        };
        let manager = LeaseManagerBuilder::new(client, LEASE)
            .with_namespace(namespace)
            .with_identity(identity)
            .with_duration(DURATION_SECONDS)
            .with_grace(GRACE_SECONDS)
            .build()
            .await
            .map_err(failed)?;
        let (leads, task) = manager.watch().await;
        Ok(Self { leads, task })
    }

    pub async fn won(&mut self) {
        self.becomes(true).await;
    }

    pub async fn lost(&mut self) {
        self.becomes(false).await;
    }

    /// Gives the Lease back, so that the next one need not wait until it runs out.
    pub async fn resign(self) {
        let Self { leads, task } = self;
        // The manager ends when nobody listens to it.
        drop(leads);
        if timeout(RESIGNATION, task).await.is_err() {
            tracing::warn!("the Lease was not given back in time");
        }
    }

    async fn becomes(&mut self, wanted: bool) {
        while *self.leads.borrow_and_update() != wanted {
            if self.leads.changed().await.is_err() {
                // The manager has ended, and with it the Lease.
                match wanted {
                    false => return,
                    true => tokio::time::sleep(PAUSE).await,
                }
            }
        }
    }
}
