//! First step: collects all that the other steps need to know, from the watches and, for API keys, from their Secret.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::ResourceQuota;
use kube::ResourceExt;
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::RingPlan;

use super::api_keys::KnownApiKeys;
use super::reached::{self, NotReady, Unready};
use super::resolve::Resolution;
use super::standing::{SeenRoom, Standing};
use super::{Context, conditions, quota};
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
    /// All other Models.
    pub models: Vec<OtherModel>,
    /// Of the Model's namespace.
    pub quotas: Vec<Arc<ResourceQuota>>,
    pub api_keys: KnownApiKeys,
    /// Plans to whose ring no client is to be sent, whatever agents say, and why.
    pub unready: Arc<Unready>,
    /// Plans to whose rank 0 packets get lost, by their uids.
    pub lossy: BTreeSet<String>,
}

/// What the decision about one Model has to know of another.
pub struct OtherModel {
    pub model: Arc<Model>,
    /// What its priority counts as.
    pub priority: i32,
    /// `None`: this operator has not decided about it yet.
    pub standing: Option<Standing>,
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
        let now = Instant::now();
        let standing = |model: &Model| context.standings.of(&model.uid().unwrap_or_default(), now);
        // Nothing was decided here yet, so what the status says is another operator's word.
        let is_hearsay = standing(model).is_none();
        if is_hearsay && conditions::found_silent(model) {
            let said_of = model
                .status
                .as_ref()
                .and_then(|status| status.plan_generation);
            let mut plans = plans.iter();
            let silent = plans.find(|plan| Some(plan.spec.generation) == said_of);
            silent.inspect(|plan| context.reached.believe_silent(plan));
        }
        let models = context.models.state().into_iter();
        let models = models.filter(|other| {
            other.uid() != model.uid() && other.metadata.deletion_timestamp.is_none()
        });
        let models = models.map(|other| OtherModel {
            priority: quota::priority(&other, &quotas_of(&other, context)),
            standing: standing(&other),
            model: other,
        });
        Self {
            model: model.clone(),
            resolution,
            machines: context.stores.machines(),
            plans,
            others,
            models: models.collect(),
            quotas: quotas_of(model, context),
            api_keys,
            unready: context.reached.unready(),
            lossy: context.reached.lossy(),
        }
    }

    /// Why no client is to be sent to the ring of this plan, if the operator knows better than its agent.
    pub fn unready(&self, plan: &RingPlan) -> Option<&NotReady> {
        reached::of(&self.unready, plan)
    }

    /// Whether packets get lost on the way to rank 0 of this plan.
    pub fn is_lossy(&self, plan: &RingPlan) -> bool {
        let uid = plan.metadata.uid.as_ref();
        uid.is_some_and(|uid| self.lossy.contains(uid))
    }

    /// The Model's newest plan.
    pub fn current(&self) -> Option<&Arc<RingPlan>> {
        self.plans.last()
    }

    /// What the Model's priority counts as.
    pub fn priority(&self) -> i32 {
        quota::priority(&self.model, &self.quotas)
    }

    /// What there is to be planned with.
    pub fn room(&self) -> SeenRoom {
        SeenRoom::new(&self.machines, self.plans.iter().chain(&self.others))
    }

    /// The plans of another Model.
    pub fn plans_of(&self, other: &OtherModel) -> impl Iterator<Item = &Arc<RingPlan>> {
        let plans = self.others.iter();
        plans.filter(move |plan| is_of(plan, &other.model))
    }

    /// Other Models' plans, without those of these.
    pub fn others_without(&self, gone: &[&OtherModel]) -> Vec<Arc<RingPlan>> {
        let goes = |plan: &RingPlan| gone.iter().any(|other| is_of(plan, &other.model));
        let others = self.others.iter();
        others.filter(|plan| !goes(plan)).cloned().collect()
    }
}

/// Of the Model's namespace.
fn quotas_of(model: &Model, context: &Context) -> Vec<Arc<ResourceQuota>> {
    let namespace = model.namespace().unwrap_or_default();
    context.stores.quotas(&namespace)
}

/// Whether the plan was made for this Model.
pub fn is_of(plan: &RingPlan, model: &Model) -> bool {
    let uid = model.uid();
    let mut owners = plan.owner_references().iter();
    owners.any(|owner| Some(&owner.uid) == uid.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_controller::test_world::{context, no_api_server, saying, serving};

    #[tokio::test]
    async fn another_operators_word_counts_until_the_first_decision() {
        let plan = serving("m", 9400);
        let generation = plan.spec.generation;
        let is_silent = |model: Arc<Model>, context: &Context| {
            let awaited = Resolution::Awaited(String::new());
            let world = World::new(&model, awaited, context, KnownApiKeys::NotAsked);
            world.unready(&plan).is_some()
        };
        let begun = || context(no_api_server(), &plan);
        for (status, reason, generation, counts) in [
            ("False", "NotReached", generation, true),
            ("False", "MachineOut", generation, true),
            // Other reasons, or another plan, say nothing of this ring.
            ("True", "Ready", generation, false),
            ("False", "Loading", generation, false),
            ("False", "NotReached", generation + 1, false),
        ] {
            let model = saying(status, reason, generation);
            assert_eq!(
                is_silent(model, &begun()),
                counts,
                "{status} {reason} {generation}"
            );
        }
        // Then the status is this operator's own word.
        let decided = begun();
        let standings = &decided.standings;
        standings.passed("m", Standing::NoClaim, Instant::now());
        let model = saying("False", "NotReached", generation);
        assert!(!is_silent(model, &decided));
    }
}
