//! First step: collects all that the other steps need to know, from the watches and, for an API key, from its Secret.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt};
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::RingPlan;
use sha2::{Digest, Sha256};

use super::resolve::Resolution;
use super::{Context, ControllerError};
use crate::cluster::world::Machine;

/// Everything that a decision depends on.
pub struct World {
    pub model: Arc<Model>,
    pub resolution: Resolution,
    pub machines: Vec<Machine>,
    /// This Model's plans, oldest generation first.
    pub plans: Vec<Arc<RingPlan>>,
    /// Other Models' plans; machines have promised memory to them.
    pub others: Vec<Arc<RingPlan>>,
    pub api_key: ApiKey,
}

#[derive(Clone)]
pub enum ApiKey {
    None,
    /// Its SHA-256, in hexadecimal.
    Digest(String),
    /// A ring that should ask for a key must not run without one.
    Missing(String),
}

impl World {
    /// As the watches show it now.
    pub fn new(
        model: &Arc<Model>,
        resolution: Resolution,
        context: &Context,
        api_key: ApiKey,
    ) -> Self {
        let uid = model.uid();
        let (mut plans, others): (Vec<_>, Vec<_>) =
            context.stores.plans().into_iter().partition(|plan| {
                let mut owners = plan.owner_references().iter();
                owners.any(|owner| Some(&owner.uid) == uid.as_ref())
            });
        plans.sort_by_key(|plan| plan.spec.generation);
        Self {
            model: model.clone(),
            resolution,
            machines: context.stores.machines(),
            plans,
            others,
            api_key,
        }
    }

    /// The Model's newest plan.
    pub fn current(&self) -> Option<&Arc<RingPlan>> {
        self.plans.last()
    }
}

pub async fn api_key(model: &Model, context: &Context) -> Result<ApiKey, ControllerError> {
    let Some(reference) = &model.spec.api_key_secret_ref else {
        return Ok(ApiKey::None);
    };
    let namespace = model
        .namespace()
        .ok_or(ControllerError::Metadata("metadata.namespace"))?;
    let name = format!("{namespace}/{}", reference.name);
    let secret = Api::<Secret>::namespaced(context.client.clone(), &namespace)
        .get_opt(&reference.name)
        .await;
    let secret = match secret {
        Ok(secret) => secret,
        Err(kube::Error::Api(status)) if status.is_forbidden() => {
            return Ok(ApiKey::Missing(format!(
                "spec.apiKeySecretRef: the operator may not read the Secret {name}; install the chart with operator.secretAccess=true"
            )));
        }
        Err(source) => {
            return Err(ControllerError::Secret {
                name,
                source: Box::new(source),
            });
        }
    };
    let Some(secret) = secret else {
        return Ok(ApiKey::Missing(format!(
            "spec.apiKeySecretRef: there is no Secret {name}"
        )));
    };
    let value = secret.data.unwrap_or_default().remove(&reference.key);
    let value = value.map(|value| value.0).unwrap_or_default();
    let key = value.trim_ascii();
    Ok(match key.is_empty() {
        true => ApiKey::Missing(format!(
            "spec.apiKeySecretRef: the Secret {name} has nothing at key {}",
            reference.key
        )),
        false => ApiKey::Digest(format!("{:x}", Sha256::digest(key))),
    })
}
