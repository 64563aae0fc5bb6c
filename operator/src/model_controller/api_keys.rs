//! The API keys of Models: read from their Secrets, and told to their rings, which hear of each change within seconds.
//!
//! Secrets are asked for by name, again and again, and not watched: to watch some, the operator would have to be allowed to list all.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use prima_crds::error_chain;
use prima_crds::v1alpha1::api_keys::{API_KEYS, ApiKeys, MAX_API_KEYS};
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::RingPlan;
use serde_json::json;
use tokio::time::sleep;

use super::{Context, ControllerError, dereference};

/// What is known of a Model's keys.
#[derive(Clone)]
pub enum KnownApiKeys {
    /// Clients need none.
    NotAsked,
    Known(ApiKeys),
    /// A ring that should ask for a key must not run while there is none.
    Missing(String),
}

/// From one look at the Secrets to the next. A change is to count within five seconds; rank 0 looks at its agent's file every second, and all between
/// is told at once.
const LOOK: Duration = Duration::from_secs(2);
/// Secrets that are read at the same time.
const CONCURRENCY: usize = 8;

/// The keys in the Secret that the Model names.
///
/// # Errors
/// If the API server does not answer.
pub async fn read(model: &Model, client: &Client) -> Result<KnownApiKeys, ControllerError> {
    let Some(reference) = &model.spec.api_key_secret_ref else {
        return Ok(KnownApiKeys::NotAsked);
    };
    let missing = |problem: String| {
        let message = format!("spec.apiKeySecretRef: {problem}");
        Ok(KnownApiKeys::Missing(message))
    };
    let namespace = model
        .namespace()
        .ok_or(ControllerError::Metadata("metadata.namespace"))?;
    let uid = model
        .uid()
        .ok_or(ControllerError::Metadata("metadata.uid"))?;
    let name = format!("{namespace}/{}", reference.name);
    let secret = Api::<Secret>::namespaced(client.clone(), &namespace)
        .get_opt(&reference.name)
        .await;
    let mut entries = match secret {
        Ok(Some(secret)) => secret.data.unwrap_or_default(),
        Ok(None) => return missing(format!("there is no Secret {name}")),
        Err(kube::Error::Api(status)) if status.is_forbidden() => {
            return missing(format!(
                "the operator may not read the Secret {name}; install the chart with operator.secretAccess=true"
            ));
        }
        Err(source) => {
            return Err(ControllerError::Secret {
                name,
                source: Box::new(source),
            });
        }
    };
    if let Some(key) = &reference.key {
        entries.retain(|entry, _| entry == key);
    }
    let sha256 = digests(&uid, &entries);
    match (sha256.len(), &reference.key) {
        (0, Some(key)) => missing(format!("the Secret {name} has nothing at key {key}")),
        (0, None) => missing(format!("the Secret {name} has no entry with an API key")),
        _ => Ok(KnownApiKeys::Known(ApiKeys {
            // Others count for nothing, whatever comes and goes among them.
            sha256: sha256.into_iter().take(MAX_API_KEYS).collect(),
            ..empty_list(model)
        })),
    }
}

/// By the entries' names. White space around a key is an editor's.
fn digests(salt: &str, entries: &BTreeMap<String, ByteString>) -> BTreeMap<String, String> {
    let keys = entries
        .iter()
        .map(|(name, value)| (name, value.0.trim_ascii()));
    keys.filter(|(_, key)| !key.is_empty())
        .map(|(name, key)| (name.clone(), ApiKeys::digest(salt, key)))
        .collect()
}

/// The Model's list of keys, with none on it.
fn empty_list(model: &Model) -> ApiKeys {
    ApiKeys {
        salt: model.uid().unwrap_or_default(),
        limits: model.spec.api_key_limits.unwrap_or_default(),
        ..ApiKeys::default()
    }
}

/// Has every ring know the keys that its Model's Secret has now. For ever.
pub async fn keep(context: &Context) {
    loop {
        let models = context.models.state();
        let asking = models
            .iter()
            .filter(|model| model.spec.api_key_secret_ref.is_some());
        stream::iter(asking)
            .for_each_concurrent(CONCURRENCY, |model| async move {
                if let Err(error) = refresh(model, context).await {
                    let problem = error_chain(&error);
                    tracing::warn!(
                        model = model.name_any(),
                        namespace = model.namespace(),
                        problem,
                        "API keys stay as they were"
                    );
                }
            })
            .await;
        sleep(LOOK).await;
    }
}

async fn refresh(model: &Model, context: &Context) -> Result<(), ControllerError> {
    let mut plans = context.stores.plans();
    plans.retain(|plan| plan.spec.api_key_required && dereference::is_of(plan, model));
    if plans.is_empty() {
        return Ok(());
    }
    let keys = match read(model, &context.client).await? {
        KnownApiKeys::NotAsked => return Ok(()),
        KnownApiKeys::Known(keys) => keys,
        // Nobody is let in, and the change of the plan has the Model looked at.
        KnownApiKeys::Missing(_) => empty_list(model),
    };
    let keys = keys.to_json();
    for plan in plans {
        if plan.annotations().get(API_KEYS) != Some(&keys) {
            write(&plan, &keys, &context.client).await?;
        }
    }
    Ok(())
}

async fn write(plan: &RingPlan, keys: &str, client: &Client) -> Result<(), ControllerError> {
    let name = plan.name_any();
    let namespace = plan
        .namespace()
        .ok_or(ControllerError::Metadata("metadata.namespace"))?;
    let patch = json!({"metadata": {"annotations": {API_KEYS: keys}}});
    let written = Api::<RingPlan>::namespaced(client.clone(), &namespace)
        .patch_metadata(&name, &PatchParams::default(), &Patch::Merge(&patch))
        .await;
    match written {
        Ok(_) => Ok(()),
        // It was deleted meanwhile.
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(source) => Err(ControllerError::Write {
            what: format!("the API keys of RingPlan {namespace}/{name}"),
            source: Box::new(source),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_entries_are_no_keys_and_white_space_is_an_editors() {
        let entry = |text: &str| ByteString(text.as_bytes().to_vec());
        let entries = [("alice", " abc\n"), ("bob", ""), ("carol", " \n")];
        let entries = entries.map(|(name, text)| (name.to_owned(), entry(text)));
        let found = digests("salt", &entries.into());
        let alice = ("alice".to_owned(), ApiKeys::digest("salt", b"abc"));
        assert_eq!(found, [alice].into());
    }
}
