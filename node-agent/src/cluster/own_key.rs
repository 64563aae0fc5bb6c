//! The key of this machine's agent: made at the first start and kept in the agent's data, published in the machine's NodeProfile, and
//! replaced when its file is. To give a machine another key, delete the file: the agent makes a new one within seconds, and the operator
//! a new plan with the same layers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prima_crds::v1alpha1::node_profile::NodeProfileStatus;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::ring::{Identity, IdentityError, OwnKey};

/// In the agent's data folder.
pub const FILE: &str = "identity.key";
const INTERVAL: Duration = Duration::from_secs(5);

/// The key in the file, and whoever wants to know it.
#[derive(Clone)]
pub struct KeyFile {
    pub path: PathBuf,
    key: Arc<watch::Sender<Arc<Identity>>>,
}

impl KeyFile {
    /// # Errors
    /// When the file cannot be read, or made.
    pub fn open(path: PathBuf) -> Result<Self, IdentityError> {
        let key = Arc::new(Identity::load_or_create(&path)?);
        Ok(Self {
            path,
            key: Arc::new(watch::channel(key).0),
        })
    }

    pub fn key(&self) -> OwnKey {
        self.key.subscribe()
    }

    /// As documents have it.
    pub fn fingerprint(&self) -> String {
        self.key.borrow().fingerprint().to_string()
    }

    /// Publishes what becomes of the file, for ever.
    pub async fn follow(self, profile: watch::Sender<NodeProfileStatus>) {
        loop {
            sleep(INTERVAL).await;
            self.look(&profile);
        }
    }

    fn look(&self, profile: &watch::Sender<NodeProfileStatus>) {
        match Identity::load_or_create(&self.path) {
            Ok(found) => self.take(found, profile),
            Err(error) => {
                let problem = prima_crds::error_chain(&error);
                tracing::warn!(problem, "the agent goes on with the key that it has");
            }
        }
    }

    fn take(&self, found: Identity, profile: &watch::Sender<NodeProfileStatus>) {
        if found.fingerprint() == self.key.borrow().fingerprint() {
            return;
        }
        tracing::info!(fingerprint = %found.fingerprint(), "the agent has another key now");
        self.key.send_replace(Arc::new(found));
        profile.send_modify(|status| {
            if let Some(agent) = &mut status.agent {
                agent.public_key_sha256 = Some(self.fingerprint());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::node_profile::NodeProfile;
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn another_key_in_the_file_is_published() {
        let folder = tempfile::tempdir().unwrap();
        let file = KeyFile::open(folder.path().join(FILE)).unwrap();
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let mut status = NodeProfile::from_yaml("node-profile.yaml", yaml)
            .unwrap()
            .status
            .unwrap();
        let agent = json!({"address": "10.0.0.1", "memory": "", "disk": ""});
        status.agent = Some(serde_json::from_value(agent).unwrap());
        let (profile, mut published) = watch::channel(status);
        file.look(&profile);
        assert!(!published.has_changed().unwrap(), "nothing is new");

        let before = file.fingerprint();
        std::fs::remove_file(&file.path).unwrap();
        file.look(&profile);
        assert!(published.has_changed().unwrap());
        let agent = published.borrow_and_update().agent.clone().unwrap();
        let key = agent.public_key_sha256.unwrap();
        assert_ne!(key, before);
        assert_eq!(key, file.fingerprint());
        assert_eq!(
            key,
            Identity::load(&file.path)
                .unwrap()
                .fingerprint()
                .to_string()
        );
    }
}
