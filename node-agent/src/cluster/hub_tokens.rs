//! Which token the hub gets for a plan's files: that of the Secret in the plan's namespace, or else the one that all namespaces share. The Secret
//! is asked for by name whenever something is to be fetched: a token that was changed counts from the next attempt on.
//!
//! Refuses to take the shared token where the Secret cannot be read or used: whoever put it there may not be meant to have that one.

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::{HUB_SECRET, NoHubToken, hub_token};
use prima_weights::{Hub, Source, SourceError};
use tokio::time::timeout;

use super::api;

pub struct HubTokens {
    client: Client,
    /// With the token of namespaces that have none of their own.
    shared: Hub,
}

/// Why it is not known which token a namespace has.
#[derive(Debug, thiserror::Error)]
pub enum HubTokenError {
    #[error("cannot read the Secret {namespace}/{HUB_SECRET}: {reason}")]
    Read { namespace: String, reason: String },
    #[error("the Secret {namespace}/{HUB_SECRET}")]
    Nothing {
        namespace: String,
        source: NoHubToken,
    },
    #[error("the Secret {namespace}/{HUB_SECRET}")]
    NoToken {
        namespace: String,
        source: SourceError,
    },
}

impl HubTokens {
    pub fn new(client: Client, shared: Hub) -> Self {
        Self { client, shared }
    }

    /// The hub with the token that all namespaces share.
    pub fn shared(&self) -> &Hub {
        &self.shared
    }

    /// Where `source` is fetched from for a plan of `namespace`, at this commit of its revision; `None` for what is not fetched.
    ///
    /// # Errors
    /// [`HubTokenError`] for a file of the hub, if the namespace's Secret cannot be read or used.
    pub async fn source(
        &self,
        namespace: &str,
        source: &ModelSource,
        commit: Option<&str>,
    ) -> Result<Option<Source>, HubTokenError> {
        // Other servers get no token.
        if !self.shared.has(source) {
            return Ok(self.shared.source(source, commit));
        }
        let own = self.own(namespace).await?;
        let hub = self.shared.with_own_token(own.as_deref());
        let hub = hub.map_err(|source| HubTokenError::NoToken {
            namespace: namespace.to_owned(),
            source,
        })?;
        Ok(hub.source(source, commit))
    }

    /// The token of the namespace, if it has one of its own.
    async fn own(&self, namespace: &str) -> Result<Option<String>, HubTokenError> {
        let unread = |reason| HubTokenError::Read {
            namespace: namespace.to_owned(),
            reason,
        };
        let secrets = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let secret = timeout(api::DEADLINE, secrets.get_opt(HUB_SECRET)).await;
        let secret = secret
            .map_err(|_| unread("no answer from the API server".to_owned()))?
            .map_err(|error| unread(api::reason(&error)))?;
        let token = secret.as_ref().map(hub_token).transpose();
        token.map_err(|source| HubTokenError::Nothing {
            namespace: namespace.to_owned(),
            source,
        })
    }
}
