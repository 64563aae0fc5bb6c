//! First step: collects all that the other steps need to know, from the watches and, for API keys, from their Secret.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ResourceQuota;
use kube::ResourceExt;
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::RingPlan;

use super::Context;
use super::api_keys::KnownApiKeys;
use super::reached::{NotReady, Unready};
use super::resolve::Resolution;
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
    /// Of the Model's namespace.
    pub quotas: Vec<Arc<ResourceQuota>>,
    pub api_keys: KnownApiKeys,
    /// Plans to whose ring no client is to be sent, whatever agents say, and why.
    pub unready: Arc<Unready>,
}

impl World {
    /// As the watches show it now.
    pub fn new(
        model: &Arc<Model>,
        resolution: Resolution,
        context: &Context,
        api_keys: KnownApiKeys,
    ) -> Self {
        let plans = context.stores.plans().into_iter();
        let (mut plans, others): (Vec<_>, Vec<_>) = plans.partition(|plan| is_of(plan, model));
        plans.sort_by_key(|plan| plan.spec.generation);
        Self {
            model: model.clone(),
            resolution,
            machines: context.stores.machines(),
            plans,
            others,
            quotas: context
                .stores
                .quotas(&model.namespace().unwrap_or_default()),
            api_keys,
            unready: context.reached.unready(),
        }
    }

    /// Why no client is to be sent to the ring of this plan, if the operator knows better than its agent.
    pub fn unready(&self, plan: &RingPlan) -> Option<&NotReady> {
        self.unready.get(&plan.uid()?)
    }

    /// The Model's newest plan.
    pub fn current(&self) -> Option<&Arc<RingPlan>> {
        self.plans.last()
    }
}

/// Whether the plan was made for this Model.
pub fn is_of(plan: &RingPlan, model: &Model) -> bool {
    let uid = model.uid();
    let mut owners = plan.owner_references().iter();
    owners.any(|owner| Some(&owner.uid) == uid.as_ref())
}
