//! Turns one Model into a ring, in named steps: dereference (what is known), resolve (which file), decide (who runs what), apply (RingPlan,
//! Service, EndpointSlice) and update_status. Only the first and the last two speak to the API server; decide
//! is pure. Beside them, headers are read from the files' servers for resolve, and the planner searches.
//!
//! There is no finalizer: all that is made for a Model belongs to it and is deleted with it. Agents end what a deleted plan had started,
//! also agents that come back later. So nothing has to wait for a machine that may never return.

mod api_keys;
mod apply;
mod candidates;
mod conditions;
mod decide;
mod dereference;
mod event;
pub mod planner;
mod quota;
mod reached;
pub mod resolve;
mod standing;
#[cfg(test)]
pub mod test_world;
mod update_status;
mod withdraw;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::runtime::controller::Action;
use kube::runtime::events::{EventType, Recorder};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, Resource, ResourceExt};
use prima_crds::error_chain;
use prima_crds::v1alpha1::model::{Model, ModelStatus};
use tokio::sync::mpsc;

use crate::cluster::metrics::Metrics;
use crate::cluster::world::Stores;
use api_keys::KnownApiKeys;
pub use api_keys::keep as keep_api_keys;
pub use apply::{MANAGER, OURS};
use decide::DecisionKind;
pub use decide::{Question, is_said_to_be_displaced};
use dereference::World;
use planner::{PATIENCE, Planner, Searches};
pub use reached::{Reached, keep as keep_reached};
use resolve::{HeaderReader, Looks};
use standing::Standings;
pub use withdraw::keep as keep_withdrawing;

/// What all reconciles share.
pub struct Context {
    pub client: Client,
    pub stores: Stores,
    /// All Models.
    pub models: Store<Model>,
    pub recorder: Recorder,
    pub metrics: Arc<Metrics>,
    pub cluster_domain: String,
    pub headers: Arc<HeaderReader>,
    pub states: ReconcileStates,
    pub planner: Planner,
    /// Which rings do not answer, though their agents say that they are ready.
    pub reached: Reached,
    /// How all Models stand for room.
    pub standings: Standings,
    /// Gets Models whose rings are to end for another one's.
    pub look_again: mpsc::UnboundedSender<ObjectRef<Model>>,
    /// Held while a Model gets its plan: the next plan must not take the same memory and ports.
    pub deciding: tokio::sync::Mutex<()>,
}

/// What is remembered of one Model between reconciles. All of it can be found out again.
#[derive(Default)]
struct ReconcileState {
    failures: u32,
    /// Of them the last ones, after which it was still to be said that the Model is not ready.
    unsaid: u32,
    looks: Looks,
    decided: decide::State,
    searches: Searches,
    written: apply::Written,
    led: apply::Led,
    /// The status that was written last.
    said: Option<ModelStatus>,
    /// The version of the Model that the watch showed then.
    said_beside: Option<String>,
}

/// By the Model's uid.
#[derive(Default)]
pub struct ReconcileStates(Mutex<HashMap<String, ReconcileState>>);

impl ReconcileStates {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, ReconcileState>> {
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
    #[error("the API server did not take within {} seconds that the Model is not ready", .0.as_secs())]
    NotTakenBack(Duration),
    #[error("planning ended without an answer")]
    Planning(#[source] tokio::task::JoinError),
}

/// Watches report all that matters, but a missed event must not matter for ever.
const SAFETY: Duration = Duration::from_secs(480);
/// While something is awaited that comes with time: measurements, machines that settle.
const AWAITING: Duration = Duration::from_secs(5);
/// While no client is answered: a member that failed is not waited for without end.
const UNSERVED: Duration = Duration::from_secs(30);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(300);
/// As long as it is still to be said that a Model is not ready, clients are sent to it: so many tries, a minute of them, come after [`FIRST_RETRY`]
/// each. Then the API server may refuse it for good.
const UNSAID: u32 = 50;
/// Between all further ones.
const UNSAID_RETRY: Duration = Duration::from_secs(10);

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
        context.states.lock().remove(&uid);
        return Ok(Action::await_change());
    }
    // Before plans are known, the first one would be made again.
    context.stores.plans_ready().await;
    let mut state = context.states.lock().remove(&uid).unwrap_or_default();
    let outcome = steps(&model, &uid, &context, &mut state).await;
    match &outcome {
        Ok(_) => (state.failures, state.unsaid) = (0, 0),
        Err(error) => {
            state.failures += 1;
            context.metrics.failures.inc();
            context.standings.failed(&uid, Instant::now());
            // Who does not answer would not take an event either, and the next try is not to wait for that.
            if !matches!(error, ControllerError::NotTakenBack(_)) {
                let (type_, note) = (EventType::Warning, error_chain(error));
                let recorder = &context.recorder;
                event::event(&model, recorder, type_, "ReconcileFailed", &note).await;
            }
        }
    }
    let there: Vec<_> = context.models.state();
    let there: HashSet<String> = there.iter().filter_map(|model| model.uid()).collect();
    let mut states = context.states.lock();
    states.insert(uid, state);
    states.retain(|uid, _| there.contains(uid));
    context.standings.retain(&there);
    context
        .metrics
        .reconcile_seconds
        .observe(begun.elapsed().as_secs_f64());
    outcome
}

async fn steps(
    model: &Arc<Model>,
    uid: &str,
    context: &Context,
    state: &mut ReconcileState,
) -> Result<Action, ControllerError> {
    let model = &withdraw::at_once(model, context, state).await?;
    let (api_keys, mut unread) = match api_keys::read(model, &context.client).await {
        Ok(api_keys) => (api_keys, None),
        Err(error) => (KnownApiKeys::NotAsked, Some(error)),
    };
    let resolution = resolve::resolve(model, context, &mut state.looks);
    let until = Instant::now() + PATIENCE;
    let mut patient = true;
    let (world, decision, standing, ring, look_after) = loop {
        let alone = context.deciding.lock().await;
        let world = World::new(model, resolution.clone(), context, api_keys.clone());
        let (decision, decided) = decide::decide(&world, &state.decided, Instant::now());
        // A ring that is to end needs no keys.
        let ends = matches!(decision.kind, DecisionKind::Released { .. });
        if let Some(error) = unread.take().filter(|_| !ends) {
            return Err(error);
        }
        state.decided = decided;
        let standing = decision.standing(&world);
        let now = Instant::now();
        context.standings.decided(uid, standing.clone(), now);
        match decision.kind {
            // Other Models go on meanwhile. By the time of the answer, the world may have changed.
            DecisionKind::Ask(question) if patient => {
                drop(alone);
                let searches = &mut state.searches;
                let answer =
                    context
                        .planner
                        .answer(model.as_ref().into(), *question, searches, until);
                match answer.await.map_err(ControllerError::Planning)? {
                    Some(answer) => state.decided.learn(answer),
                    None => patient = false,
                }
            }
            _ => {
                let (written, led) = (&mut state.written, &mut state.led);
                let applied = apply::apply(&world, &decision, context, written, led, alone);
                let (ring, look_after) = applied.await?;
                break (world, decision, standing, ring, look_after);
            }
        }
    };
    update_status::update_status(&world, &decision, &ring, context, state).await?;
    context.standings.passed(uid, standing, Instant::now());
    for other in decision.displaces() {
        // If nobody listens any more, nobody need know.
        let _ = context.look_again.send(other.as_ref().into());
    }
    // Nobody tells of a Secret that comes.
    let lacks_keys = matches!(world.api_keys, KnownApiKeys::Missing(_)) && !model.spec.suspend;
    let next = match (
        decision.awaits() || world.resolution.awaits() || lacks_keys,
        &ring.serving,
    ) {
        (true, _) => AWAITING,
        (false, None) if !model.spec.suspend => UNSERVED,
        (false, _) => SAFETY,
    };
    Ok(Action::requeue(next.min(look_after.unwrap_or(next))))
}

/// When a Model that failed is tried again.
pub fn after_failure(model: Arc<Model>, error: &ControllerError, context: Arc<Context>) -> Action {
    let mut states = context.states.lock();
    let state = states.get_mut(&model.uid().unwrap_or_default());
    let is_due = withdraw::is_due(&model, state.as_deref(), &context);
    let (failures, unsaid) = match state {
        Some(state) => {
            state.unsaid = match is_due {
                true => state.unsaid.saturating_add(1),
                false => 0,
            };
            (state.failures, state.unsaid)
        }
        None => (1, is_due.into()),
    };
    drop(states);
    let delay = FIRST_RETRY.saturating_mul(1 << failures.saturating_sub(1).min(16));
    let longest = match unsaid {
        0 => LONGEST_RETRY,
        1..=UNSAID => FIRST_RETRY,
        _ => UNSAID_RETRY,
    };
    let error = error_chain(error);
    tracing::warn!(model = %model.name_any(), error, "could not reconcile");
    Action::requeue(delay.min(longest))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::model_controller::conditions::{is_not_ready, ready_since};
    use crate::model_controller::test_world::{
        api_server, context, no_api_server, saying, serving,
    };

    #[tokio::test]
    async fn a_false_ready_is_not_left_for_long_after_failures() {
        let plan = serving("m", 9400);
        let context = Arc::new(context(no_api_server(), &plan));
        let after = |status: &str, said: Option<ModelStatus>, unsaid: u32| {
            let state = ReconcileState {
                failures: 900,
                unsaid,
                said,
                ..ReconcileState::default()
            };
            context.states.lock().insert("m".to_owned(), state);
            let model = saying(status, "of it", plan.spec.generation);
            after_failure(model, &ControllerError::Metadata("name"), context.clone())
        };
        let seconds = |seconds| Action::requeue(Duration::from_secs(seconds));
        // However often it has failed for other reasons.
        assert_eq!(after("True", None, 0), seconds(1));
        assert_eq!(after("True", None, UNSAID - 1), seconds(1));
        assert_eq!(after("True", None, UNSAID), seconds(10));
        assert_eq!(after("False", None, 0), seconds(300));
        // It is said already, and the watch has yet to show it.
        let said = saying("False", "of it", plan.spec.generation)
            .status
            .clone();
        assert_eq!(after("True", said, 0), seconds(300));
    }

    #[tokio::test]
    async fn ready_is_taken_back_before_what_may_fail() {
        let (client, writes) = api_server().await;
        let plan = serving("m", 9400);
        // It knows no machine, so the ring's is gone.
        let context = context(client, &plan);
        let mut model = saying("True", "Ready", plan.spec.generation);
        let keys = json!({"name": "keys"});
        Arc::get_mut(&mut model).unwrap().spec.api_key_secret_ref =
            Some(serde_json::from_value(keys).unwrap());
        let mut state = ReconcileState::default();
        // The watch may show later what was written.
        for _ in 0..2 {
            let failed = steps(&model, "m", &context, &mut state).await;
            assert!(matches!(failed, Err(ControllerError::Secret { .. })));
            let said = state.said.as_ref().unwrap();
            assert!(is_not_ready(said), "{said:?}");
            let writes = writes.lock().unwrap();
            let statuses = writes.iter().filter(|(to, _)| to.ends_with("/m/status"));
            assert_eq!(statuses.count(), 1);
        }
        // What was so before is no news. What somebody else has said since is.
        let since = state.said.as_ref().and_then(ready_since).unwrap();
        let before = Timestamp::from_second(since.as_second() - 1).unwrap();
        for (version, since, count) in [("2", before, 1), ("3", since, 2)] {
            let shown = Arc::make_mut(&mut model);
            shown.metadata.resource_version = Some(version.to_owned());
            let ready = &mut shown.status.as_mut().unwrap().conditions[0];
            ready.last_transition_time.0 = since;
            let failed = steps(&model, "m", &context, &mut state).await;
            assert!(matches!(failed, Err(ControllerError::Secret { .. })));
            let writes = writes.lock().unwrap();
            let statuses = writes.iter().filter(|(to, _)| to.ends_with("/m/status"));
            assert_eq!(statuses.count(), count, "{version}");
        }
    }
}
