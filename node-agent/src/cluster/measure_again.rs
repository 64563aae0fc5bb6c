//! Measures the machine again where other programs were busy when it was measured, as on a node that unpacks images because it has just
//! started: plans would give it too little until its agent starts anew.
//!
//! Decides when: after some minutes, then after pauses that double, until other programs left it alone. Of several measurements the one that
//! was disturbed least counts, and is kept for the agent's next start. Refuses to measure beside members, which it would disturb, as they would
//! disturb it.

use std::future::pending;
use std::path::PathBuf;
use std::time::Duration;

use prima_crds::v1alpha1::node_profile::NodeProfileStatus;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::ClusterError;
use super::backoff::Backoff;
use super::metrics::Metrics;
use super::publish_profile::replace_measured;
use crate::profile::{BUSY_PERCENT, Measured};

/// Measures the machine by `measure`.
pub struct MeasureAgain<M> {
    /// Of the processors' time, while what is published was measured.
    pub others_percent: u8,
    /// Knows of members.
    pub metrics: Metrics,
    pub measure: M,
    /// Where what counts is kept.
    pub file: PathBuf,
}

const FIRST_PAUSE: Duration = Duration::from_secs(10 * 60);
const LONGEST_PAUSE: Duration = Duration::from_secs(24 * 60 * 60);

impl<M> MeasureAgain<M>
where
    M: Fn() -> Result<Measured, ClusterError> + Clone + Send + 'static,
{
    /// Never ends, also when there is no more to do.
    pub async fn follow(mut self, profile: watch::Sender<NodeProfileStatus>) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut pause = backoff.next();
        while self.others_percent > BUSY_PERCENT {
            sleep(pause).await;
            if self.look(&profile).await {
                pause = backoff.next();
            }
        }
        pending().await
    }

    /// Returns whether it has measured.
    async fn look(&mut self, profile: &watch::Sender<NodeProfileStatus>) -> bool {
        if self.metrics.has_members() {
            return false;
        }
        // A panic has been printed.
        if let Ok(measured) = spawn_blocking(self.measure.clone()).await {
            self.take(measured, profile);
        }
        true
    }

    fn take(
        &mut self,
        measured: Result<Measured, ClusterError>,
        profile: &watch::Sender<NodeProfileStatus>,
    ) {
        match measured {
            // One that came meanwhile may have been fetching weights, which is this program's work, too.
            Ok(_) if self.metrics.has_members() => {}
            Ok(measured) if measured.others_percent < self.others_percent => {
                let others_percent = measured.others_percent;
                tracing::info!(others_percent, "the machine was measured again");
                self.others_percent = others_percent;
                measured.keep(&self.file);
                profile.send_modify(|status| replace_measured(status, measured.status));
            }
            Ok(_) => {}
            Err(error) => {
                let problem = prima_crds::error_chain(&error);
                tracing::warn!(problem, "what was measured before counts on");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::{fs, io};

    use prima_crds::v1alpha1::node_profile::NodeProfile;
    use serde_json::json;

    use super::*;
    use crate::profile::CacheKey;

    /// As a layer's overhead it has the percentage, by which it is known.
    fn measured(others_percent: u8) -> Measured {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        let mut status = profile.status.unwrap();
        status.cpu.layer_overhead_nanoseconds = i64::from(others_percent);
        Measured {
            status,
            others_percent,
            key: CacheKey::default(),
        }
    }

    #[tokio::test]
    async fn a_machine_that_was_busy_is_measured_until_it_is_left_alone() {
        let mut status = measured(50).status;
        let agent = json!({"address": "10.0.0.1", "memory": "", "disk": ""});
        status.agent = Some(serde_json::from_value(agent).unwrap());
        let (profile, mut published) = watch::channel(status);
        let metrics = Metrics::default();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("profile.json");
        // What the next measurement finds, and who comes while it is made.
        let next = Arc::new(Mutex::new(None));
        let came = Arc::new(Mutex::new(None));
        let mut again = MeasureAgain {
            others_percent: 50,
            metrics: metrics.clone(),
            measure: {
                let (next, came, metrics) = (next.clone(), came.clone(), metrics.clone());
                move || match next.lock().unwrap().take() {
                    Some((others_percent, true)) => {
                        *came.lock().unwrap() = Some(metrics.member());
                        Ok(measured(others_percent))
                    }
                    Some((others_percent, false)) => Ok(measured(others_percent)),
                    None => Err(ClusterError::Start(io::Error::other("a disk is full"))),
                }
            },
            file: file.clone(),
        };
        let find = |found: Option<(u8, bool)>| *next.lock().unwrap() = found;

        let member = metrics.member();
        find(Some((5, false)));
        assert!(!again.look(&profile).await, "beside a member");
        drop(member);
        for found in [None, Some((50, false)), Some((5, true))] {
            find(found);
            assert!(again.look(&profile).await, "{found:?}");
            assert!(!published.has_changed().unwrap(), "{found:?}");
            assert!(!file.exists(), "{found:?}");
        }
        drop(came.lock().unwrap().take());
        for others_percent in [30, 5] {
            find(Some((others_percent, false)));
            assert!(again.look(&profile).await);
            assert!(published.has_changed().unwrap());
            let status = published.borrow_and_update().clone();
            let overhead = status.cpu.layer_overhead_nanoseconds;
            assert_eq!(overhead, i64::from(others_percent));
            assert_eq!(again.others_percent, others_percent);
            let kept = fs::read_to_string(&file).unwrap();
            let percent = format!("\"others_percent\": {others_percent},");
            assert!(kept.contains(&percent), "{kept}");
            assert_eq!(status.agent.unwrap().address, "10.0.0.1");
        }
    }
}
