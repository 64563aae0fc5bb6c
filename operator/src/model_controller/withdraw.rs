//! Takes back that a Model is ready. A leader does it before all else that it does for the Model, which may take a while, or fail.
//!
//! An operator that only waits to lead does it where it sees that a ring does not answer, and nobody says so: if the leader is gone with a machine of
//! the ring, nobody leads until its Lease has run out. The Model's Service leads nowhere then, as with a leader. Nothing else is changed.
//!
//! A leader that is there says it, too, and better. If it reaches a ring that this instance is cut off from, it says at once that the Model is ready. So
//! that both do not go on like this, a Model's word is taken back once in a minute.

use std::collections::HashMap;
use std::future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, Patch, PatchParams};
use kube::runtime::events::{EventType, Recorder};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt};
use prima_crds::error_chain;
use prima_crds::v1alpha1::model::{Model, ModelStatus};
use prima_crds::v1alpha1::ring_plan::RingPlan;
use serde_json::json;
use tokio::time::error::Elapsed;
use tokio::time::{sleep, timeout};

use super::apply::{MANAGER, OURS, SERVICE_LABEL, answers, gone, lead_nowhere};
use super::conditions::{Withdrawn, is_not_ready, ready_since};
use super::dereference::is_of;
use super::event::event;
use super::reached::{self, Reached, Unready};
use super::update_status::write;
use super::{Context, ControllerError, ReconcileState};
use crate::cluster::models;
use crate::cluster::world::{Machine, Stores, watched};

/// From one look at what is known to the next.
const LOOK: Duration = Duration::from_millis(250);
/// How long a leader has to say it itself, which is enough if nothing is to be planned again.
const GRACE: Duration = Duration::from_millis(500);
/// For what is written of one Model. An API server that is away is asked again.
const PATIENCE: Duration = Duration::from_secs(5);
/// After a Model's word was taken back.
const PAUSE: Duration = Duration::from_secs(60);
/// The same where the API server did not take it.
const RETRY: Duration = Duration::from_secs(2);
/// Models that are written at the same time.
const CONCURRENCY: usize = 16;

/// Looks that end with a withdrawal that took too long, before another goes on without it.
const MOST_TRIES: u32 = 3;

/// As the leader, if the Model says that it is ready, and is not. Returns the Model as it is then. Fails if the API server does not answer: all that
/// follows would wait for it for longer, and a later try has another connection.
pub async fn at_once(
    model: &Arc<Model>,
    context: &Context,
    state: &mut ReconcileState,
) -> Result<Arc<Model>, ControllerError> {
    at_once_within(PATIENCE, model, context, state).await
}

async fn at_once_within(
    limit: Duration,
    model: &Arc<Model>,
    context: &Context,
    state: &mut ReconcileState,
) -> Result<Arc<Model>, ControllerError> {
    if Word::of_leader(model, context).is_none() {
        return Ok(model.clone());
    }
    let status = match not_shown_yet(model, state) {
        Some(said) => said.clone(),
        None => match timeout(limit, say(model, context, state)).await {
            Ok(Ok(Some((word, status)))) => {
                word.tell(model, &context.recorder).await;
                status
            }
            Ok(Ok(None)) => return Ok(model.clone()),
            // All that follows says it again.
            Ok(Err(error)) => {
                let error = error_chain(&error);
                tracing::warn!(error, "cannot take back that a Model is ready");
                return Ok(model.clone());
            }
            Err(_) if state.unsaid < MOST_TRIES => {
                return Err(ControllerError::NotTakenBack(limit));
            }
            // The API server is slow at all that it writes, and the Model needs what follows, too.
            Err(_) => return Ok(model.clone()),
        },
    };
    let mut model = Model::clone(model);
    model.status = Some(status);
    Ok(Arc::new(model))
}

/// Whether [`at_once`] has something to say yet.
pub fn is_due(model: &Model, state: Option<&ReconcileState>, context: &Context) -> bool {
    let said = state.and_then(|state| not_shown_yet(model, state));
    said.is_none() && Word::of_leader(model, context).is_some()
}

/// What was written last, if it takes back that the Model is ready, and the watch has yet to show it. What it shows may also be what somebody else has
/// said since.
fn not_shown_yet<'a>(model: &Model, state: &'a ReconcileState) -> Option<&'a ModelStatus> {
    let said = state.said.as_ref().filter(|said| is_not_ready(said))?;
    let shown = model.status.as_ref().and_then(ready_since);
    let is_older = model.resource_version() == state.said_beside || shown < ready_since(said);
    is_older.then_some(said)
}

/// Has the Model's Service lead nowhere, and writes the Model's status. Returns what was written; `None` if by then the Model is ready after all. A
/// leader whose own link was gone hears its rings again before the API server answers it.
async fn say(
    model: &Model,
    context: &Context,
    state: &mut ReconcileState,
) -> Result<Option<(Word, ModelStatus)>, ControllerError> {
    // Said again where the Service is written next.
    if let Err(error) = lead_nowhere(model, context, &mut state.written).await {
        tracing::warn!(problem = error_chain(&error), "clients are not sent away");
    }
    let Some(word) = Word::of_leader(model, context) else {
        return Ok(None);
    };
    let Withdrawn {
        conditions,
        summary,
    } = &word.withdrawn;
    let status = ModelStatus {
        conditions: conditions.clone(),
        summary: summary.clone(),
        ..model.status.clone().unwrap_or_default()
    };
    write(model, &status, context, &mut state.said).await?;
    state.said_beside = model.resource_version();
    Ok(Some((word, status)))
}

/// For ever, on an instance that does not lead. Something else must read the watch of plans.
pub async fn keep(client: &Client, recorder: &Recorder, stores: &Stores, reached: &Reached) {
    let (models, mut changes) = watched(models::all(client));
    // Of machines that are not known yet one would say that they are gone.
    while stores.ready().await.is_err() {
        sleep(RETRY).await;
    }
    stores.plans_ready().await;
    tokio::select! {
        // So that the store of Models fills.
        () = changes.by_ref().for_each(|_| future::ready(())) => {}
        () = keep_looking(client, recorder, stores, &models, reached) => {}
    }
}

async fn keep_looking(
    client: &Client,
    recorder: &Recorder,
    stores: &Stores,
    models: &Store<Model>,
    reached: &Reached,
) {
    let mut wrong = Wrong::default();
    loop {
        sleep(LOOK).await;
        let known = Known::now(stores, reached);
        let seen = models.state().into_iter().filter_map(|model| {
            let word = Word::of(&model, &known, Role::Waits)?;
            Some((model.uid()?, (model, word)))
        });
        let seen: HashMap<String, _> = seen.collect();
        let due = wrong.due(seen.keys(), Instant::now()).into_iter();
        let due = due.filter_map(|uid| seen.get(&uid).map(|(model, word)| (uid, model, word)));
        let tries = stream::iter(due).map(async |(uid, model, word)| {
            let written = timeout(PATIENCE, word.take_back(client, recorder, model)).await;
            (uid, pause_after(written, &model.name_any()))
        });
        let tries: Vec<_> = tries.buffer_unordered(CONCURRENCY).collect().await;
        for (uid, pause) in tries {
            wrong.pause(uid, Instant::now() + pause);
        }
    }
}

/// How long a Model is left alone. `written`: whether its word was taken back.
fn pause_after(written: Result<Result<bool, kube::Error>, Elapsed>, name: &str) -> Duration {
    match written {
        Ok(Ok(true)) => PAUSE,
        // It is ready after all, or somebody else has written.
        Ok(Ok(false)) => GRACE,
        Ok(Err(kube::Error::Api(status))) if status.is_conflict() => RETRY,
        Ok(Err(error)) => {
            let error = error_chain(&error);
            tracing::warn!(name, error, "cannot take back that a Model is ready");
            RETRY
        }
        Err(_) => RETRY,
    }
}

/// Models that say that they are ready, and are not, by their uids. Pure.
#[derive(Default)]
struct Wrong {
    since: HashMap<String, Instant>,
    paused: HashMap<String, Instant>,
}

impl Wrong {
    /// Those of `seen` that have been for long enough.
    fn due<'a>(&mut self, seen: impl Iterator<Item = &'a String>, now: Instant) -> Vec<String> {
        let before = std::mem::take(&mut self.since);
        self.since = seen
            .map(|uid| (uid.clone(), before.get(uid).copied().unwrap_or(now)))
            .collect();
        self.paused.retain(|_, until| *until > now);
        let due = self.since.iter().filter(|(uid, since)| {
            now.duration_since(**since) >= GRACE && !self.paused.contains_key(*uid)
        });
        due.map(|(uid, _)| uid.clone()).collect()
    }

    fn pause(&mut self, uid: String, until: Instant) {
        self.paused.insert(uid, until);
    }
}

/// What a look finds.
struct Known {
    plans: Vec<Arc<RingPlan>>,
    machines: Vec<Machine>,
    unready: Arc<Unready>,
}

impl Known {
    fn now(stores: &Stores, reached: &Reached) -> Self {
        Self {
            plans: stores.plans(),
            machines: stores.machines(),
            unready: reached.unready(),
        }
    }
}

/// Of an instance that leads, or waits to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Leads,
    Waits,
}

/// What is to be said of a Model instead.
struct Word {
    withdrawn: Withdrawn,
    /// All that it has.
    plans: Vec<Arc<RingPlan>>,
}

impl Word {
    /// What the leader says now.
    fn of_leader(model: &Model, context: &Context) -> Option<Self> {
        let known = Known::now(&context.stores, &context.reached);
        Self::of(model, &known, Role::Leads)
    }

    /// `None`: the Model is ready, or does not say so. Who waits to lead may not know the ring yet by which it is.
    fn of(model: &Model, known: &Known, role: Role) -> Option<Self> {
        let Known {
            plans,
            machines,
            unready,
        } = known;
        let ends = model.metadata.deletion_timestamp.is_some();
        let own = plans.iter().filter(|plan| is_of(plan, model));
        if ends || own.clone().any(|plan| answers(plan, machines, unready)) {
            return None;
        }
        let said_of = model.status.as_ref()?.plan_generation?;
        let plan = own.clone().find(|plan| plan.spec.generation == said_of);
        if plan.is_none() && role == Role::Waits {
            return None;
        }
        let unready = plan.and_then(|plan| reached::of(unready, plan));
        let gone = plan.map_or_else(Vec::new, |plan| gone(plan, machines));
        let plan = plan.map(|plan| &**plan);
        Some(Self {
            withdrawn: Withdrawn::of(model, plan, &gone, unready)?,
            plans: own.cloned().collect(),
        })
    }

    /// Writes it, and tells why; unless rank 0 answers after all, or others have written.
    async fn take_back(
        &self,
        client: &Client,
        recorder: &Recorder,
        model: &Model,
    ) -> Result<bool, kube::Error> {
        let (namespace, name) = (model.namespace().unwrap_or_default(), model.name_any());
        let models = Api::<Model>::namespaced(client.clone(), &namespace);
        let service = Endpoints::of(client, &namespace, &name).await?;
        let version = models.get_metadata(&name).await?.resource_version();
        // One that was cut off from both asks rank 0 after it has reached the API server again.
        let answers = stream::iter(&self.plans).any(|plan| reached::answers_now(plan));
        if answers.await || version != model.resource_version() {
            return Ok(false);
        }
        service.lead_nowhere().await?;
        let Withdrawn {
            conditions,
            summary,
        } = &self.withdrawn;
        // What another version has written beside them stays.
        let patch = json!({
            "metadata": {"resourceVersion": version},
            "status": {"conditions": conditions, "summary": summary},
        });
        models
            .patch_status(&name, &as_ours(), &Patch::Merge(&patch))
            .await?;
        self.tell(model, recorder).await;
        Ok(true)
    }

    /// Tells people that it was taken back, and why.
    async fn tell(&self, model: &Model, recorder: &Recorder) {
        if let Some(ready) = self.withdrawn.ready() {
            let (namespace, name) = (model.namespace(), model.name_any());
            let (reason, why) = (&ready.reason, &ready.message);
            tracing::info!(namespace, name, why, "took back that a Model is ready");
            event(model, recorder, EventType::Warning, reason, why).await;
        }
    }
}

/// Where a Model's Service leads, as it was found.
struct Endpoints {
    api: Api<EndpointSlice>,
    slices: Vec<EndpointSlice>,
}

impl Endpoints {
    async fn of(client: &Client, namespace: &str, model: &str) -> Result<Self, kube::Error> {
        let api = Api::<EndpointSlice>::namespaced(client.clone(), namespace);
        let ours = ListParams::default().labels(&format!("{OURS},{SERVICE_LABEL}={model}"));
        let slices = api.list(&ours).await?.items;
        Ok(Self { api, slices })
    }

    /// Whoever leads sees it, and writes where clients are to go. Fails if somebody has written since.
    async fn lead_nowhere(&self) -> Result<(), kube::Error> {
        for slice in &self.slices {
            if !slice.endpoints.is_empty() {
                let version = slice.resource_version();
                let patch = json!({"metadata": {"resourceVersion": version}, "endpoints": []});
                let (name, patch) = (slice.name_any(), Patch::Merge(patch));
                self.api.patch(&name, &as_ours(), &patch).await?;
            }
        }
        Ok(())
    }
}

/// Of what is changed in an object, and not all of it said anew.
fn as_ours() -> PatchParams {
    PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;
    use crate::model_controller::test_world::{
        Writes, api_server, api_server_with, context, saying, serving, silent_api_server,
    };

    #[tokio::test]
    async fn a_withdrawal_without_an_answer_fails_the_look() {
        let (client, _server) = silent_api_server().await;
        let plan = serving("m", 9400);
        // It knows no machine, so the ring's is gone.
        let context = context(client, &plan);
        let model = saying("True", "Ready", plan.spec.generation);
        let mut state = ReconcileState::default();
        let taken_back = at_once_within(Duration::ZERO, &model, &context, &mut state);
        let taken_back = taken_back.await;
        assert!(matches!(taken_back, Err(ControllerError::NotTakenBack(_))));
        // So it is tried again soon.
        assert!(is_due(&model, Some(&state), &context));
        // Where all is slow, the look goes on some time.
        state.unsaid = MOST_TRIES;
        let taken_back = at_once_within(Duration::ZERO, &model, &context, &mut state);
        assert!(taken_back.await.is_ok());
    }

    #[tokio::test]
    async fn what_is_wrong_by_the_time_it_can_be_said_is_not_said() {
        let (client, writes) = api_server().await;
        let plan = serving("m", 9400);
        let context = context(client, &plan);
        let model = saying("True", "Ready", plan.spec.generation);
        // Another ring of it, of no machines, of which so none is gone: it answers.
        let mut other = RingPlan::clone(&plan);
        other.metadata.uid = Some("other".to_owned());
        other.spec.members.clear();
        let other = Arc::new(other);
        let mut state = ReconcileState::default();
        for (answers, statuses) in [(true, 0), (false, 1)] {
            match answers {
                true => context.stores.add_plan(other.clone()),
                false => context.stores.forget_plan(&other),
            }
            let said = say(&model, &context, &mut state).await.unwrap();
            assert_eq!(said.is_none(), answers);
            let writes = writes.lock().unwrap();
            let written = writes.iter().filter(|(to, _)| to.ends_with("/m/status"));
            assert_eq!(written.count(), statuses);
        }
    }

    #[test]
    fn who_waits_says_nothing_of_a_ring_it_does_not_know() {
        let plan = serving("m", 9400);
        let (own, newer) = (plan.spec.generation, plan.spec.generation + 1);
        // It knows no machine, so the ring's is gone.
        let known = Known {
            plans: vec![plan],
            machines: Vec::new(),
            unready: Arc::default(),
        };
        let speaks = |model: &Model, role| Word::of(model, &known, role).is_some();
        let ready_by = |generation| saying("True", "Ready", generation);
        assert!(speaks(&ready_by(own), Role::Leads) && speaks(&ready_by(own), Role::Waits));
        assert!(speaks(&ready_by(newer), Role::Leads));
        assert!(!speaks(&ready_by(newer), Role::Waits));
        // Nobody needs to be told of one that is being deleted.
        let mut ends = ready_by(own);
        let metadata = &mut Arc::make_mut(&mut ends).metadata;
        metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        assert!(!speaks(&ends, Role::Leads));
    }

    /// An instance that was cut off knows little of now.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_right_or_was_written_meanwhile_is_not_taken_back() {
        const MOST_LATE: usize = 20;
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ready = server.local_addr().unwrap().port();
        let says_ready = Router::new().fallback(|| async { "{}" });
        tokio::spawn(async move { axum::serve(server, says_ready).await });
        // Nobody listens there, and nobody else is given the port.
        let bound = TcpSocket::new_v4().unwrap();
        bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let silent = bound.local_addr().unwrap().port();
        for (port, version, is_taken_back) in [
            (silent, "7", true),
            (ready, "7", false),
            (silent, "8", false),
        ] {
            let mut late = 0;
            let (taken_back, writes) = loop {
                let (taken_back, took, writes) = take_back(port, version).await;
                // Who answers too late counts as silent, and on a busy machine it may be this test that is late.
                let is_late = taken_back != is_taken_back && took >= reached::AT_ONCE;
                if !is_late || late == MOST_LATE {
                    break (taken_back, writes);
                }
                late += 1;
            };
            assert_eq!(taken_back, is_taken_back, "{port} {version}");
            let writes = writes.lock().unwrap();
            let written = |end: &str| writes.iter().filter(|(to, _)| to.ends_with(end)).count();
            let once = usize::from(is_taken_back);
            assert_eq!(written("/endpointslices/m-ipv4"), once);
            assert_eq!(written("/models/m/status"), once);
            // What leads nowhere stays as it is.
            assert_eq!(written("/endpointslices/m-ipv6"), 0);
        }
    }

    /// Whether it is taken back that a Model is ready, which the leader has seen with the version 7, and which has this one by now; how long that took,
    /// and what was written. Rank 0 is at this port.
    async fn take_back(port: u16, version: &str) -> (bool, Duration, Writes) {
        let slice = |name: &str, endpoints: serde_json::Value| {
            json!({
                "metadata": {"name": name, "resourceVersion": "1"},
                "addressType": "IPv4", "endpoints": endpoints,
            })
        };
        let slices = [
            slice("m-ipv4", json!([{"addresses": ["127.0.0.1"]}])),
            slice("m-ipv6", json!([])),
        ];
        let (client, writes) = api_server_with(vec![
            (
                "/models/m",
                json!({"metadata": {"name": "m", "resourceVersion": version}}),
            ),
            ("/endpointslices", json!({"metadata": {}, "items": slices})),
        ])
        .await;
        let plan = serving("m", port);
        let context = context(client, &plan);
        let mut model = saying("True", "Ready", plan.spec.generation);
        Arc::make_mut(&mut model).metadata.resource_version = Some("7".to_owned());
        let word = Word::of_leader(&model, &context).unwrap();
        let begun = Instant::now();
        let taken_back = word.take_back(&context.client, &context.recorder, &model);
        let taken_back = taken_back.await.unwrap();
        (taken_back, begun.elapsed(), writes)
    }

    #[test]
    fn a_leader_has_time_and_a_word_is_taken_back_once_in_a_minute() {
        let start = Instant::now();
        let at = |tenths: u64| start + Duration::from_millis(100 * tenths);
        let mut wrong = Wrong::default();
        let names = ["a", "b"].map(str::to_owned);
        let [a, b] = &names;
        assert!(wrong.due([a].into_iter(), at(0)).is_empty());
        assert!(wrong.due([a].into_iter(), at(4)).is_empty());
        // Somebody has said it, or it answers again.
        assert!(wrong.due([].into_iter(), at(5)).is_empty());
        assert!(wrong.due([a].into_iter(), at(6)).is_empty());
        assert!(wrong.due([a].into_iter(), at(10)).is_empty());
        assert_eq!(wrong.due([a, b].into_iter(), at(11)), ["a"]);
        wrong.pause(a.clone(), at(11) + pause_after(Ok(Ok(true)), a));
        assert_eq!(wrong.due([a, b].into_iter(), at(16)), ["b"]);
        // The API server did not take it.
        let refused = Ok(Err(kube::Error::LinesCodecMaxLineLengthExceeded));
        wrong.pause(b.clone(), at(16) + pause_after(refused, b));
        assert!(wrong.due([a, b].into_iter(), at(35)).is_empty());
        assert_eq!(wrong.due([a, b].into_iter(), at(36)), ["b"]);
        assert_eq!(wrong.due([a].into_iter(), at(611)), ["a"]);
    }
}
