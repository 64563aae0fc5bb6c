//! What the operator knows of the cluster without asking: watched NodeProfiles, RingPlans, Nodes and the agents' Leases and claims. Decides
//! when an agent counts as gone. Reconciling reads from here and never lists.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::stream::{BoxStream, StreamExt};
use futures::{FutureExt, Stream, future};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, ResourceQuota, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ApiResource, DynamicObject, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt};
use prima_crds::v1alpha1::node_profile::{AgentProfile, NodeProfile, NodeProfileSpec};
use prima_crds::v1alpha1::ring_plan::{MemberStatus, RingPlan, RingPlanStatus};
use prima_crds::{AGENT_LEASE_PREFIX, AGENT_LEASE_SECONDS, LEAVING, error_chain};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{IntervalStream, ReceiverStream};

/// What there is to react to.
pub struct Changes {
    /// Something happened that any Model may depend on.
    pub any: BoxStream<'static, ()>,
    /// What belongs to a Model changed.
    pub plans: BoxStream<'static, RingPlan>,
    pub services: BoxStream<'static, Service>,
    pub slices: BoxStream<'static, EndpointSlice>,
}

pub struct Stores {
    profiles: Store<NodeProfile>,
    /// NodeProfiles that this version cannot read in full: name, and why.
    unreadable: Arc<Mutex<HashMap<String, String>>>,
    plans: Store<RingPlan>,
    pub services: Store<Service>,
    pub slices: Store<EndpointSlice>,
    nodes: Store<PartialObjectMeta<Node>>,
    /// Those of them that are to get no new work.
    cordoned: Store<PartialObjectMeta<Node>>,
    agents: Arc<Mutex<Agents>>,
    leases: Store<Lease>,
    quotas: Store<ResourceQuota>,
    agent_namespace: String,
    /// Names of those that agents mount.
    agent_claims: Vec<String>,
    /// Of their namespace; empty where they mount none.
    claims: Store<PersistentVolumeClaim>,
    /// Plans that were written a moment ago, which the watch may not have shown yet.
    written: Mutex<Vec<(Instant, Arc<RingPlan>)>>,
}

/// One machine as far as it is known.
#[derive(Clone)]
pub struct Machine {
    pub name: String,
    /// Absent while its agent measures it.
    pub profile: Option<Arc<NodeProfile>>,
    /// Why the profile lacks what its agent wrote: its version is one that this operator cannot read.
    pub unreadable: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// `kubectl cordon`, and so `kubectl drain`: its Node is to get no new work.
    pub cordoned: bool,
    /// Its agent was asked to end, and runs its members until rings do without them, or for a while.
    pub leaving: bool,
    pub agent: AgentState,
    /// When this operator saw its agent renew the Lease last.
    pub heard: Option<Instant>,
}

impl Machine {
    pub fn is_alive(&self) -> bool {
        matches!(self.agent, AgentState::Alive { .. })
    }

    /// Where its agent is reached, as it said last.
    pub fn address(&self) -> Option<&str> {
        Some(&self.agent_profile()?.address)
    }

    /// By which its agent is known, as it said last.
    pub fn public_key(&self) -> Option<&str> {
        self.agent_profile()?.public_key_sha256.as_deref()
    }

    fn agent_profile(&self) -> Option<&AgentProfile> {
        self.profile.as_ref()?.status.as_ref()?.agent.as_ref()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentState {
    /// Renews its Lease. `known_for`: how long it has been known.
    Alive { known_for: Duration },
    /// No longer renews it.
    Silent,
    /// Was never heard of.
    Unknown,
}

/// An agent that was not heard of for this long is gone, unless its Lease says another duration.
const EXPIRY: Duration = Duration::from_secs(AGENT_LEASE_SECONDS as u64);
/// Seconds that an agent's Lease may say: less runs out before a busy API server answers, more leaves a ring broken for too long.
const EXPIRIES: RangeInclusive<i32> = 5..=600;
/// How often to look whether an agent has gone.
const LOOK: Duration = Duration::from_secs(1);
/// From one time that any Model may be concerned to the next. A Model is looked at when nothing of it has changed for a moment: where many machines
/// write all the time, it never would be.
const CALM: Duration = Duration::from_secs(1);

/// How long a plan counts that was written here but not yet seen: longer than a watch takes to come back.
const WATCH_DELAY: Duration = Duration::from_secs(300);
/// An API server that is being started or upgraded answers within that.
const READY_LIMIT: Duration = Duration::from_secs(120);

/// When each agent's Lease was last seen to change, by this process's clock: machines' clocks differ.
struct Agents {
    heard: HashMap<String, Heard>,
    since: Instant,
    /// Leases cannot be watched now: then no agent is known to be gone.
    blind: bool,
}

struct Heard {
    renewed: Option<MicroTime>,
    /// When that was seen.
    seen: Instant,
    /// From when on its silence counts.
    at: Instant,
    first: Instant,
    alive: bool,
    expiry: Duration,
}

impl Agents {
    fn new(now: Instant) -> Self {
        Self {
            heard: HashMap::new(),
            since: now,
            blind: false,
        }
    }

    /// Notes whether Leases can be watched. After a gap, living agents get time to be heard of again.
    fn see(&mut self, sees: bool, now: Instant) {
        if sees && self.blind {
            for heard in self.heard.values_mut() {
                heard.at = now;
            }
        }
        self.blind = !sees;
    }

    /// Takes in a Lease. Returns whether an agent came back or is new.
    fn hear(&mut self, lease: &Lease, now: Instant) -> bool {
        let name = lease.name_any();
        let Some(node) = name.strip_prefix(AGENT_LEASE_PREFIX) else {
            return false;
        };
        let spec = lease.spec.as_ref();
        let renewed = spec.and_then(|spec| spec.renew_time.clone());
        let expiry = spec.and_then(|spec| spec.lease_duration_seconds);
        let heard = self.heard.entry(node.to_owned()).or_insert(Heard {
            renewed: None,
            seen: now,
            at: now,
            first: now,
            alive: false,
            expiry: EXPIRY,
        });
        heard.expiry = expiry.map_or(EXPIRY, |seconds| {
            let seconds = seconds.clamp(*EXPIRIES.start(), *EXPIRIES.end());
            Duration::from_secs(seconds.unsigned_abs().into())
        });
        if heard.renewed == renewed {
            return false;
        }
        // Of the first one its time says nothing: many boards have no clock. So an agent that had gone before this process began counts as
        // living once more, until its Lease has run out.
        heard.renewed = renewed;
        heard.seen = now;
        heard.at = now;
        if !heard.alive {
            heard.first = now;
        }
        !std::mem::replace(&mut heard.alive, true)
    }

    /// Whether an agent has gone since the last look.
    fn look(&mut self, now: Instant) -> bool {
        let mut gone = false;
        for heard in self.heard.values_mut().filter(|_| !self.blind) {
            if heard.alive && now.duration_since(heard.at) > heard.expiry {
                heard.alive = false;
                gone = true;
            }
        }
        gone
    }

    /// When it was seen last to renew its Lease.
    fn heard(&self, node: &str) -> Option<Instant> {
        self.heard.get(node).map(|heard| heard.seen)
    }

    fn state(&self, node: &str, now: Instant) -> AgentState {
        match self.heard.get(node) {
            // An operator that has just begun to listen must not take agents for gone.
            None if now.duration_since(self.since) <= EXPIRY => AgentState::Alive {
                known_for: now.duration_since(self.since),
            },
            None => AgentState::Unknown,
            Some(heard) if heard.alive => AgentState::Alive {
                known_for: now.duration_since(heard.first),
            },
            Some(_) => AgentState::Silent,
        }
    }
}

/// Which changes of machines' profiles may concern Models. What an operator says there itself concerns none: it says something of each machine, and
/// all Models would be looked at as often.
#[derive(Default)]
struct ProfileNews {
    /// By name, a hash of all else.
    known: HashMap<String, u64>,
}

impl ProfileNews {
    /// Takes in what a watch shows; returns whether it may concern Models. `problem`: why a profile cannot be read in full.
    fn take_in(
        &mut self,
        event: &Event<NodeProfile>,
        problem: impl Fn(&str) -> Option<String>,
    ) -> bool {
        match event {
            Event::Apply(profile) | Event::InitApply(profile) => {
                let name = profile.name_any();
                let mut status = profile.status.clone();
                if let Some(status) = &mut status {
                    status.conditions.clear();
                }
                let mut hasher = DefaultHasher::new();
                let all_else = format!("{:?} {status:?} {:?}", profile.spec, problem(&name));
                all_else.hash(&mut hasher);
                let now = hasher.finish();
                self.known.insert(name, now) != Some(now)
            }
            Event::Delete(profile) => {
                self.known.remove(&profile.name_any());
                true
            }
            Event::Init => {
                self.known.clear();
                false
            }
            // A list that comes anew names what is there, and not what has gone.
            Event::InitDone => true,
        }
    }
}

impl Stores {
    /// Starts to watch. The agents' namespace, and the claims there that they mount. `ours`: the label selector of what the operator makes.
    pub fn watch(
        client: &Client,
        (agent_namespace, agent_claims): (&str, &[String]),
        ours: &str,
    ) -> (Self, Changes) {
        let all = super::watching::watch;
        let ours = || all().labels(ours);
        let (sender, any) = mpsc::channel(1);
        let unreadable: Arc<Mutex<HashMap<String, String>>> = Arc::default();
        let problems = unreadable.clone();
        let profiles = read_each(untyped::<NodeProfile>(client), move |object| {
            let name = object.name_any();
            let (profile, problem) = read_profile(object);
            let mut problems = lock(&problems);
            match problem {
                Some(problem) => problems.insert(name, problem),
                None => problems.remove(&name),
            };
            Some(profile)
        });
        let told = sender.clone();
        let (problems, mut news) = (unreadable.clone(), ProfileNews::default());
        let profiles = profiles.inspect(move |event| {
            let problem = |name: &str| lock(&problems).get(name).cloned();
            if event
                .as_ref()
                .is_ok_and(|event| news.take_in(event, problem))
            {
                let _ = told.try_send(());
            }
        });
        let (profiles, profile_changes) = watched(profiles);
        let (nodes, node_changes) = watched(watcher::watcher(
            Api::<PartialObjectMeta<Node>>::all(client.clone()),
            all(),
        ));
        let (cordoned, cordon_changes) = watched(watcher::watcher(
            Api::<PartialObjectMeta<Node>>::all(client.clone()),
            all().fields("spec.unschedulable=true"),
        ));
        // Looked at once in a while: a list that comes anew names what is there, and not what has gone.
        let cordons = cordoned.clone();
        let cordons = looked_at(move || names(&cordons));
        let leases = Api::<Lease>::namespaced(client.clone(), agent_namespace);
        let agents = Arc::new(Mutex::new(Agents::new(Instant::now())));
        let seeing = agents.clone();
        let left = sender.clone();
        let leases = watcher::watcher(leases, all()).inspect(move |event| {
            lock(&seeing).see(event.is_ok(), Instant::now());
            if matches!(event, Ok(Event::Delete(_))) {
                let _ = left.try_send(());
            }
        });
        let (leases, lease_changes) = watched(leases);
        let left_soon = leases.clone();
        let left_soon = looked_at(move || leaving(&left_soon));
        let quotas = Api::<ResourceQuota>::all(client.clone());
        let (quotas, quota_changes) = watched(watcher::watcher(quotas, all()));
        // The API server writes into them all the time what it counts.
        let allowed = quotas.clone();
        let allowed = looked_at(move || allowances(&allowed));
        let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), agent_namespace);
        // Where agents mount none, the chart gives no right to watch them.
        let claims = match agent_claims.is_empty() {
            false => watcher::watcher(claims, all()).boxed(),
            true => futures::stream::pending().boxed(),
        };
        let (claims, claim_changes) = watched(claims);
        let (services, service_changes) =
            watched(watcher::watcher(Api::all(client.clone()), ours()));
        let (slices, slice_changes) = watched(watcher::watcher(Api::all(client.clone()), ours()));
        // A plan's own Model hears of it by ownership. Other Models hear when it goes, as they may use what it frees.
        let freed = sender.clone();
        let plans = read_each(untyped::<RingPlan>(client), read_plan).inspect(move |event| {
            if matches!(event, Ok(Event::Delete(_))) {
                let _ = freed.try_send(());
            }
        });
        let (plans, plan_changes) = watched(plans);

        let heard = agents.clone();
        let heard = lease_changes.filter_map(move |lease| {
            let came = lock(&heard).hear(&lease, Instant::now());
            future::ready(came.then_some(()))
        });
        let looked = agents.clone();
        let looked = IntervalStream::new(tokio::time::interval(LOOK))
            .filter_map(move |_| future::ready(lock(&looked).look(Instant::now()).then_some(())));
        // A kubelet touches its Node all the time; only labels matter here.
        let mut labels: HashMap<String, BTreeMap<String, String>> = HashMap::new();
        let relabelled = node_changes.filter_map(move |node| {
            let now = node.labels().clone();
            let before = labels.insert(node.name_any(), now.clone());
            future::ready((before.as_ref() != Some(&now)).then_some(()))
        });
        let mut changes = futures::stream::select_all([
            profile_changes.filter_map(|_| future::ready(None)).boxed(),
            relabelled.boxed(),
            cordon_changes.filter_map(|_| future::ready(None)).boxed(),
            cordons.boxed(),
            left_soon.boxed(),
            quota_changes.filter_map(|_| future::ready(None)).boxed(),
            allowed.boxed(),
            // A Model that may be concerned is looked at again every few seconds anyway.
            claim_changes.filter_map(|_| future::ready(None)).boxed(),
            heard.boxed(),
            looked.boxed(),
        ]);
        // Read on its own, so that the stores fill before the controller asks for the first change.
        tokio::spawn(async move {
            while changes.next().await.is_some() {
                // One waiting message says as much as many.
                if let Err(mpsc::error::TrySendError::Closed(())) = sender.try_send(()) {
                    return;
                }
            }
        });
        let stores = Self {
            profiles,
            unreadable,
            plans,
            services,
            slices,
            nodes,
            cordoned,
            agents,
            leases,
            quotas,
            agent_namespace: agent_namespace.to_owned(),
            agent_claims: agent_claims.to_vec(),
            claims,
            written: Mutex::default(),
        };
        let changes = Changes {
            any: calm(any),
            plans: plan_changes,
            services: service_changes,
            slices: slice_changes,
        };
        (stores, changes)
    }

    /// Waits until all that no controller reads, and that decisions depend on, was listed once. The error names what was not.
    pub async fn ready(&self) -> Result<(), &'static str> {
        let deadline = tokio::time::Instant::now() + READY_LIMIT;
        listed("NodeProfiles", &self.profiles, deadline).await?;
        listed("Nodes", &self.nodes, deadline).await?;
        listed("Nodes", &self.cordoned, deadline).await?;
        listed("ResourceQuotas", &self.quotas, deadline).await?;
        listed("Leases", &self.leases, deadline).await
    }

    /// Waits until all plans were listed once. Only of use while something reads the watch of plans, as the controller does.
    pub async fn plans_ready(&self) {
        // It only fails when the watch has ended, and the process with it.
        let _ = self.plans.wait_until_ready().await;
    }

    /// What agents measured, and owners allow.
    pub fn profiles(&self) -> Store<NodeProfile> {
        self.profiles.clone()
    }

    /// All machines that run an agent or did, by name.
    pub fn machines(&self) -> Vec<Machine> {
        let now = Instant::now();
        let mut machines: BTreeMap<String, Option<Arc<NodeProfile>>> = self
            .profiles
            .state()
            .into_iter()
            .map(|profile| (profile.name_any(), Some(profile)))
            .collect();
        let labels: HashMap<String, BTreeMap<String, String>> = self
            .nodes
            .state()
            .into_iter()
            .map(|node| (node.name_any(), node.labels().clone()))
            .collect();
        // Only Leases that exist: when a machine leaves the cluster, its Lease goes with it.
        for lease in self.leases.state() {
            if let Some(node) = lease.name_any().strip_prefix(AGENT_LEASE_PREFIX) {
                machines.entry(node.to_owned()).or_default();
            }
        }
        let cordoned = names(&self.cordoned);
        let leaving = leaving(&self.leases);
        let agents = lock(&self.agents);
        let unreadable = lock(&self.unreadable);
        machines
            .into_iter()
            .map(|(name, profile)| Machine {
                unreadable: unreadable.get(&name).cloned(),
                labels: labels.get(&name).cloned().unwrap_or_default(),
                cordoned: cordoned.contains(&name),
                leaving: leaving.contains(&name),
                agent: agents.state(&name, now),
                heard: agents.heard(&name),
                profile,
                name,
            })
            .collect()
    }

    /// What a namespace may take.
    pub fn quotas(&self, namespace: &str) -> Vec<Arc<ResourceQuota>> {
        let mut quotas = self.quotas.state();
        quotas.retain(|quota| quota.metadata.namespace.as_deref() == Some(namespace));
        quotas
    }

    /// What keeps agents from starting, as far as the claims say that they mount: all of them, whichever a Model has its file in.
    pub fn claim_problem(&self) -> Option<String> {
        // Until they were listed, none is known to be missing.
        self.claims.wait_until_ready().now_or_never()?.ok()?;
        let namespace = &self.agent_namespace;
        let problem = |name: &String| {
            let claim = self.claims.get(&ObjectRef::new(name).within(namespace));
            let state = unbound(claim.as_deref())?;
            Some(format!("claim {name} in {namespace} {state}"))
        };
        let problems: Vec<String> = self.agent_claims.iter().filter_map(problem).collect();
        (!problems.is_empty()).then(|| problems.join("; "))
    }

    /// All plans that are not being deleted, as far as they are known or were written here.
    pub fn plans(&self) -> Vec<Arc<RingPlan>> {
        let mut plans = self.plans.state();
        let mut written = lock(&self.written);
        written.retain(|(at, plan)| {
            at.elapsed() < WATCH_DELAY && plans.iter().all(|known| known.uid() != plan.uid())
        });
        plans.extend(written.iter().map(|(_, plan)| plan.clone()));
        plans.retain(|plan| plan.metadata.deletion_timestamp.is_none());
        plans
    }

    /// Adds a plan that was written just now: later decisions count with it.
    pub fn add_plan(&self, plan: Arc<RingPlan>) {
        let mut written = lock(&self.written);
        written.push((Instant::now(), plan));
    }

    /// Takes out a plan that was deleted just now.
    pub fn forget_plan(&self, plan: &RingPlan) {
        let mut written = lock(&self.written);
        written.retain(|(_, one)| one.uid() != plan.uid());
    }
}

/// What comes together, or within [`CALM`], comes once.
fn calm(changes: mpsc::Receiver<()>) -> BoxStream<'static, ()> {
    tokio_stream::StreamExt::throttle(ReceiverStream::new(changes), CALM).boxed()
}

async fn listed<K>(
    what: &'static str,
    store: &Store<K>,
    deadline: tokio::time::Instant,
) -> Result<(), &'static str>
where
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
{
    match tokio::time::timeout_at(deadline, store.wait_until_ready()).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(what),
    }
}

/// Tells whenever a look shows other names than the look before.
fn looked_at(look: impl Fn() -> HashSet<String>) -> impl Stream<Item = ()> {
    let mut known = HashSet::new();
    IntervalStream::new(tokio::time::interval(LOOK)).filter_map(move |_| {
        let now = look();
        let changed = known != now;
        known = now;
        future::ready(changed.then_some(()))
    })
}

/// Nodes whose agents were asked to end.
fn leaving(leases: &Store<Lease>) -> HashSet<String> {
    let leases = leases.state();
    let leaving = leases
        .iter()
        .filter(|lease| lease.annotations().contains_key(LEAVING));
    leaving
        .filter_map(|lease| {
            lease
                .name_any()
                .strip_prefix(AGENT_LEASE_PREFIX)
                .map(str::to_owned)
        })
        .collect()
}

/// What quotas say, in words.
fn allowances(quotas: &Store<ResourceQuota>) -> HashSet<String> {
    let quotas = quotas.state();
    let said = |quota: &Arc<ResourceQuota>| {
        let hard = quota.spec.as_ref().map(|spec| &spec.hard);
        format!("{:?} {} {hard:?}", quota.namespace(), quota.name_any())
    };
    quotas.iter().map(said).collect()
}

/// What is to be said of a claim that has no volume.
fn unbound(claim: Option<&PersistentVolumeClaim>) -> Option<String> {
    let Some(claim) = claim else {
        return Some("does not exist".to_owned());
    };
    let status = claim.status.as_ref();
    match status.and_then(|status| status.phase.as_deref()) {
        Some("Bound") => None,
        phase => Some(format!("is {}", phase.unwrap_or("Pending"))),
    }
}

fn names(nodes: &Store<PartialObjectMeta<Node>>) -> HashSet<String> {
    let nodes = nodes.state();
    nodes.iter().map(|node| node.name_any()).collect()
}

/// A store, and the objects that are put into it or removed.
pub fn watched<K>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
) -> (Store<K>, BoxStream<'static, K>)
where
    K: Resource<DynamicType = ()>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug
        + Send
        + Sync
        + 'static,
{
    let (store, writer) = reflector::store();
    let changes = events
        .default_backoff()
        .reflect(writer)
        .filter_map(|event| {
            future::ready(match event {
                Ok(Event::Apply(object) | Event::InitApply(object) | Event::Delete(object)) => {
                    Some(object)
                }
                Ok(Event::Init | Event::InitDone) => None,
                Err(error) => {
                    let kind = K::kind(&());
                    tracing::warn!(%kind, %error, "a watch failed, and is tried again");
                    None
                }
            })
        })
        .boxed();
    (store, changes)
}

/// All objects of a kind, not yet parsed: one that this version cannot read must not end the watch of the others.
pub(super) fn untyped<K: Resource<DynamicType = ()>>(
    client: &Client,
) -> impl Stream<Item = watcher::Result<Event<DynamicObject>>> + Send + 'static {
    let objects = Api::all_with(client.clone(), &ApiResource::erase::<K>(&()));
    watcher::watcher(objects, super::watching::watch())
}

/// Reads the objects of a watch. What cannot be read at all is as if it were not there.
fn read_each<K: Send + 'static>(
    events: impl Stream<Item = watcher::Result<Event<DynamicObject>>> + Send + 'static,
    read: impl Fn(DynamicObject) -> Option<K> + Send + 'static,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static {
    events.filter_map(move |event| {
        let read = match event {
            Ok(Event::Apply(object)) => read(object).map(|object| Ok(Event::Apply(object))),
            Ok(Event::InitApply(object)) => read(object).map(|object| Ok(Event::InitApply(object))),
            Ok(Event::Delete(object)) => read(object).map(|object| Ok(Event::Delete(object))),
            Ok(Event::Init) => Some(Ok(Event::Init)),
            Ok(Event::InitDone) => Some(Ok(Event::InitDone)),
            Err(error) => Some(Err(error)),
        };
        future::ready(read)
    })
}

/// Reads a machine's profile. If this version cannot read it all, it comes without the agent's part, and says why.
fn read_profile(object: DynamicObject) -> (NodeProfile, Option<String>) {
    match object.clone().try_parse() {
        Ok(profile) => (profile, None),
        Err(error) => {
            let spec = object.data.get("spec").cloned();
            let spec = spec.and_then(|spec| serde_json::from_value::<NodeProfileSpec>(spec).ok());
            let profile = NodeProfile {
                metadata: object.metadata,
                spec: spec.unwrap_or_default(),
                status: None,
            };
            (profile, Some(error_chain(&error)))
        }
    }
}

/// Reads a plan. It comes without what this version cannot read of what the members' agents wrote; if it cannot read the plan itself, there
/// is nothing.
fn read_plan(mut object: DynamicObject) -> Option<RingPlan> {
    match object.clone().try_parse() {
        Ok(plan) => Some(plan),
        Err(error) => {
            tracing::warn!(
                plan = object.name_any(),
                problem = error_chain(&error),
                "a RingPlan is of another version than this operator; update both"
            );
            let status = object.data.as_object_mut()?.remove("status");
            let members = status.as_ref().and_then(|status| status.get("members"));
            let members = members.and_then(Value::as_array).into_iter().flatten();
            let members = members.filter_map(|member| MemberStatus::deserialize(member).ok());
            let members = members.collect();
            let mut plan: RingPlan = object.try_parse().ok()?;
            plan.status = Some(RingPlanStatus { members });
            Some(plan)
        }
    }
}

pub(crate) fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing in there can be half changed.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
