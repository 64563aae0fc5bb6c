//! Turns one Model into a ring, in named steps: dereference (what is known), resolve (which file), plan (who runs what), apply
//! (RingPlan, Service, EndpointSlice) and update_status. Only the first and the last two speak to the API server, resolving
//! also to the file's server; planning is pure.
//!
//! There is no finalizer: all that is made for a Model belongs to it and goes with it, and agents end what a plan that is gone
//! had started, also those that come back later. So nothing has to wait for a machine that may never return.

mod apply;
mod candidates;
mod dereference;
mod plan;
pub mod resolve;
mod update_status;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::runtime::controller::Action;
use kube::runtime::events::{EventType, Recorder};
use kube::runtime::reflector::Store;
use kube::{Client, Resource, ResourceExt};
use prima_crds::v1alpha1::model::Model;
use prima_weights::Hub;

use crate::cluster::metrics::Metrics;
use crate::cluster::world::Stores;
use crate::error_chain::error_chain;
pub use apply::OURS;
use plan::Memory;

/// What all reconciles share.
pub struct Context {
    pub client: Client,
    pub stores: Stores,
    /// All Models.
    pub models: Store<Model>,
    pub recorder: Recorder,
    pub metrics: Arc<Metrics>,
    pub cluster_domain: String,
    pub hub: Hub,
    /// For model files.
    pub fetching: prima_weights::Client,
    pub memories: Memories,
    /// Held while a Model gets its plan.
    pub planning: tokio::sync::Mutex<()>,
}

/// What is remembered of each Model between reconciles, by uid. All of it can be found out again.
#[derive(Default)]
pub struct Memories(Mutex<HashMap<String, Memory>>);

impl Memories {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Memory>> {
        // Every entry is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a Model is looked at again later.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    #[error("the Model has no {0}, which every object in a cluster has")]
    Metadata(&'static str),
    #[error("cannot read the Secret {name}")]
    Secret {
        name: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("cannot read {what}")]
    Read {
        what: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error(
        "there is a Service {namespace}/{name} of somebody else; a Model's Service has the Model's name, so rename one of them"
    )]
    NameTaken { namespace: String, name: String },
    #[error("cannot write {what}")]
    Write {
        what: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("planning ended without an answer")]
    Planning(#[source] tokio::task::JoinError),
}

/// Nothing that matters goes unheard, but a missed event must not matter for ever.
const SAFETY: Duration = Duration::from_secs(480);
/// While something is awaited that comes with time: measurements, machines that settle.
const AWAITING: Duration = Duration::from_secs(5);
/// While nobody is answered: a member that failed is not waited for for ever.
const UNSERVED: Duration = Duration::from_secs(30);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(300);

/// One look at one Model.
#[tracing::instrument(skip_all, fields(model = %model.name_any(), namespace = model.namespace()))]
pub async fn reconcile(
    model: Arc<Model>,
    context: Arc<Context>,
) -> Result<Action, ControllerError> {
    let begun = Instant::now();
    context.metrics.reconciles.inc();
    let uid = model
        .uid()
        .ok_or(ControllerError::Metadata("metadata.uid"))?;
    if model.meta().deletion_timestamp.is_some() {
        context.memories.lock().remove(&uid);
        return Ok(Action::await_change());
    }
    // Without them the first plan would be made again.
    context.stores.plans_ready().await;
    let mut memory = context.memories.lock().remove(&uid).unwrap_or_default();
    let outcome = steps(&model, &context, &mut memory).await;
    match &outcome {
        Ok(_) => memory.failures = 0,
        Err(error) => {
            memory.failures += 1;
            context.metrics.failures.inc();
            let type_ = EventType::Warning;
            update_status::event(
                &model,
                &context,
                type_,
                "ReconcileFailed",
                &error_chain(error),
            )
            .await;
        }
    }
    let there: Vec<_> = context.models.state();
    let there: HashSet<String> = there.iter().filter_map(|model| model.uid()).collect();
    let mut memories = context.memories.lock();
    memories.insert(uid, memory);
    memories.retain(|uid, _| there.contains(uid));
    let ready = memories.values().filter(|memory| memory.ready).count();
    context.metrics.models.set(memories.len() as i64);
    context.metrics.ready_models.set(ready as i64);
    context
        .metrics
        .reconcile_seconds
        .observe(begun.elapsed().as_secs_f64());
    outcome
}

async fn steps(
    model: &Model,
    context: &Context,
    memory: &mut Memory,
) -> Result<Action, ControllerError> {
    let api_key = dereference::api_key(model, context).await?;
    let resolution = resolve::resolve(model, context, memory).await;
    // One Model at a time from here on: memory and ports that one plan takes, the next must not.
    let (decision, ring) = {
        let _alone = context.planning.lock().await;
        let world = dereference::dereference(model, context, api_key);
        let decision = plan::decide(model, &world, &resolution, memory, &context.metrics).await?;
        let ring = apply::apply(model, &world, &decision, context, memory).await?;
        (decision, ring)
    };
    update_status::update_status(model, &resolution, &decision, &ring, context, memory).await?;
    Ok(Action::requeue(
        match (decision.awaits() || resolution.awaits(), &ring.serving) {
            (true, _) => AWAITING,
            (false, None) if !model.spec.suspend => UNSERVED,
            (false, _) => SAFETY,
        },
    ))
}

/// When a Model that failed is tried again.
pub fn after_failure(model: Arc<Model>, error: &ControllerError, context: Arc<Context>) -> Action {
    let failures = model
        .uid()
        .and_then(|uid| Some(context.memories.lock().get(&uid)?.failures))
        .unwrap_or(1);
    let delay = FIRST_RETRY.saturating_mul(1 << failures.saturating_sub(1).min(16));
    let error = error_chain(error);
    tracing::warn!(model = %model.name_any(), error, "could not reconcile");
    Action::requeue(delay.min(LONGEST_RETRY))
}
