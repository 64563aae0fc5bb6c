//! Fourth step: makes the cluster as decided. Writes RingPlans, the Model's Service and its EndpointSlice, and deletes plans that a newer
//! one has replaced. Clients are sent to the newest plan that answers, so an old ring serves until the new one has loaded, unless machines
//! lack the memory for both.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams};
use kube::runtime::events::EventType;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Resource, ResourceExt};
use prima_crds::error_chain;
use prima_crds::v1alpha1::api_keys::API_KEYS;
use prima_crds::v1alpha1::model::Model;
use prima_crds::v1alpha1::ring_plan::{MemberState, RingMember, RingPlan, RingPlanSpec};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::MutexGuard;
use tokio::time::sleep;

use super::api_keys::KnownApiKeys;
use super::conditions::member_status;
use super::decide::{AwaitedRoom, Decision, DecisionKind};
use super::dereference::World;
use super::reached::{self, Unready};
use super::{Context, ControllerError, event};
use crate::cluster::world::Machine;

/// Label selector of our own objects.
pub const OURS: &str = "app.kubernetes.io/managed-by=prima-operator";
pub const MANAGER: &str = "prima-operator";
const MODEL_LABEL: &str = "prima.dev/model";
/// Which Service an EndpointSlice is of.
pub const SERVICE_LABEL: &str = "kubernetes.io/service-name";
const PORT_NAME: &str = "http";
/// After a Service leads elsewhere, the cluster's nodes take a moment to know it: until then a ring takes what comes.
const MOVING: Duration = Duration::from_secs(2);

/// The Model's rings as they are.
pub struct Ring {
    /// The plan that should serve.
    pub newest: Option<Arc<RingPlan>>,
    /// The plan that clients are sent to.
    pub serving: Option<Arc<RingPlan>>,
}

/// What was written last for each object: its content's hash, and the version that it then had.
pub type Written = BTreeMap<String, (u64, Option<String>)>;

/// To which generation the Service leads, or that it leads nowhere, and since when.
#[derive(Default)]
pub struct Led(Option<(Option<i64>, Instant)>);

impl Led {
    /// It leads there now. For how long clients may still come to where it led before.
    fn moving(&mut self, to: Option<i64>, now: Instant) -> Duration {
        let since = match self.0 {
            Some((known, since)) if known == to => since,
            _ => now,
        };
        self.0 = Some((to, since));
        MOVING.saturating_sub(now.duration_since(since))
    }
}

/// `deciding`: held until the next plan is written, if there is one. What follows takes nothing from other Models, which need not wait for it.
/// Also returns when to look again, if there are rings that are to end and to which clients may still come. If the next plan has to wait for their end,
/// it is not written yet.
pub async fn apply(
    world: &World,
    decision: &Decision,
    context: &Context,
    written: &mut Written,
    led: &mut Led,
    deciding: MutexGuard<'_, ()>,
) -> Result<(Ring, Option<Duration>), ControllerError> {
    let mut deciding = Some(deciding);
    let model = &*world.model;
    let writer = Writer::new(model, context)?;
    let mut plans = world.plans.clone();
    match &decision.kind {
        DecisionKind::Released { .. } => {
            deciding = None;
            if let Some(moving) = writer.send_away(&plans, world, written, led).await {
                sleep(moving).await;
            }
            writer.delete(&mut plans, |_| true).await?;
        }
        DecisionKind::Impossible { .. }
        | DecisionKind::NoPlace { .. }
        | DecisionKind::Keep(_)
        | DecisionKind::Ask(_) => {}
        DecisionKind::New {
            spec,
            retire_first,
            why,
        } => {
            if *retire_first {
                // Other Models are not to wait for that. By then, it may be decided otherwise.
                if let Some(moving) = writer.send_away(&plans, world, written, led).await {
                    let (newest, serving) = (plans.last().cloned(), None);
                    return Ok((Ring { newest, serving }, Some(moving)));
                }
                writer.delete(&mut plans, |_| true).await?;
            }
            let plan = writer.plan(spec, &world.api_keys);
            let plan = Arc::new(writer.write(plan).await?);
            context.stores.add_plan(plan.clone());
            deciding = None;
            let members: Vec<&str> = spec.members.iter().map(|m| m.name.as_str()).collect();
            let note = format!("{} on {}: {why}", plan.name_any(), members.join(", "));
            let recorder = &context.recorder;
            event::event(model, recorder, EventType::Normal, "RingPlanned", &note).await;
            plans.push(plan);
        }
    }
    drop(deciding);
    let serving = plans
        .iter()
        .rev()
        .find(|plan| answers(plan, &world.machines, &world.unready))
        .cloned();
    let newest = plans.last().cloned();
    writer.endpoint(serving.as_deref(), written).await?;
    let leads_to = serving.as_ref().map(|plan| plan.spec.generation);
    let moving = led.moving(leads_to, Instant::now());
    let mut look_after = None;
    // An older ring stays while it answers, or may soon answer again; and while clients may come to it. That is not waited for here: the status is
    // written after this.
    if let Some(newest) = newest.as_ref().map(|plan| plan.spec.generation) {
        let spare = match &serving {
            Some(serving) => Some(serving.spec.generation),
            None => {
                let mut older = plans.iter().rev().skip(1);
                let spare = older.find(|plan| may_answer(plan, &world.machines));
                spare.map(|plan| plan.spec.generation)
            }
        };
        let gone = |plan: &RingPlan| {
            let generation = plan.spec.generation;
            generation < newest && Some(generation) != spare
        };
        let is_left =
            |plan: &RingPlan| moving.is_zero() || !answers(plan, &world.machines, &world.unready);
        let ends = |plan: &RingPlan| gone(plan) && is_left(plan);
        writer.delete(&mut plans, ends).await?;
        look_after = plans.iter().any(|plan| gone(plan)).then_some(moving);
    }
    // Nobody ends for a plan that the API server does not take. If so, this fails, and what was decided counts for nothing.
    if let DecisionKind::NoPlace {
        awaits: AwaitedRoom::Of { ring, .. },
        ..
    } = &decision.kind
    {
        writer.try_out(writer.plan(ring, &world.api_keys)).await?;
    }
    Ok((Ring { newest, serving }, look_after))
}

/// Has the Model's Service lead nowhere.
pub async fn lead_nowhere(
    model: &Model,
    context: &Context,
    written: &mut Written,
) -> Result<(), ControllerError> {
    Writer::new(model, context)?.endpoint(None, written).await
}

/// Whether a token went round this ring, and all its machines are still there and have the addresses that the ring uses. The state alone
/// does not tell: after an agent is killed, its last word stands until its successor takes it back, which may take a while.
pub fn answers(plan: &RingPlan, machines: &[Machine], unready: &Unready) -> bool {
    let have_come = members_at(plan, machines, |rank| match rank {
        0 => MemberState::Ready,
        _ => MemberState::Loaded,
    });
    have_come == plan.spec.members.len() && reached::of(unready, plan).is_none()
}

/// Whether this ring has loaded, and no part of it is known to be lost.
pub fn may_answer(plan: &RingPlan, machines: &[Machine]) -> bool {
    loaded(plan, machines) == plan.spec.members.len()
}

/// How many members of this ring run their layers.
pub fn loaded(plan: &RingPlan, machines: &[Machine]) -> usize {
    members_at(plan, machines, |_| MemberState::Loaded)
}

/// How many members have come as far as this, by their rank, and are still there.
fn members_at(plan: &RingPlan, machines: &[Machine], least: fn(usize) -> MemberState) -> usize {
    let members = plan.spec.members.iter().enumerate();
    let have_come = members.filter(|(rank, member)| {
        let state = member_status(plan, member);
        is_there(member, machines) && state.is_some_and(|state| state.state >= least(*rank))
    });
    have_come.count()
}

/// Members whose machines are gone, or have other addresses than the ring uses.
pub fn gone<'a>(plan: &'a RingPlan, machines: &[Machine]) -> Vec<&'a str> {
    let members = plan.spec.members.iter();
    members
        .filter(|member| !is_there(member, machines))
        .map(|member| member.name.as_str())
        .collect()
}

fn is_there(member: &RingMember, machines: &[Machine]) -> bool {
    let mut machines = machines.iter();
    machines.any(|machine| {
        let is_same = machine.name == member.name && machine.is_alive();
        let address = machine.address();
        is_same && address.is_none_or(|address| Some(address) == member.host())
    })
}

/// Writes what belongs to one Model.
struct Writer<'a> {
    context: &'a Context,
    model: &'a Model,
    namespace: String,
}

impl<'a> Writer<'a> {
    fn new(model: &'a Model, context: &'a Context) -> Result<Self, ControllerError> {
        let namespace = model
            .namespace()
            .ok_or(ControllerError::Metadata("metadata.namespace"))?;
        Ok(Self {
            context,
            model,
            namespace,
        })
    }

    fn metadata(&self, name: &str) -> ObjectMeta {
        let labels = [
            ("app.kubernetes.io/managed-by", MANAGER.to_owned()),
            ("app.kubernetes.io/part-of", "prima".to_owned()),
            (MODEL_LABEL, self.model.name_any()),
        ];
        ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(self.namespace.clone()),
            labels: Some(
                labels
                    .map(|(key, value)| (key.to_owned(), value))
                    .into_iter()
                    .collect(),
            ),
            owner_references: Some(self.model.controller_owner_ref(&()).into_iter().collect()),
            ..ObjectMeta::default()
        }
    }

    /// The RingPlan that says this.
    fn plan(&self, spec: &RingPlanSpec, api_keys: &KnownApiKeys) -> RingPlan {
        let name = format!("{}-{}", self.model.name_any(), spec.generation);
        let mut plan = RingPlan::new(&name, spec.clone());
        plan.metadata = self.metadata(&name);
        if let KnownApiKeys::Known(keys) = api_keys {
            let keys = (API_KEYS.to_owned(), keys.to_json());
            plan.metadata.annotations = Some([keys].into());
        }
        plan
    }

    /// Asks the API server to take this plan, without keeping it.
    async fn try_out(&self, plan: RingPlan) -> Result<(), ControllerError> {
        self.apply(plan, PatchParams::apply(MANAGER).dry_run())
            .await?;
        Ok(())
    }

    /// Writes what the object says. Returns it as it is then.
    async fn write<K>(&self, object: K) -> Result<K, ControllerError>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + Serialize
            + DeserializeOwned
            + std::fmt::Debug,
    {
        self.apply(object, PatchParams::apply(MANAGER)).await
    }

    /// Server-side apply; our fields stay ours, whoever wrote them last.
    async fn apply<K>(&self, object: K, params: PatchParams) -> Result<K, ControllerError>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + Serialize
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let name = object.name_any();
        Api::<K>::namespaced(self.context.client.clone(), &self.namespace)
            .patch(&name, &params.force(), &Patch::Apply(&object))
            .await
            .map_err(|source| ControllerError::Write {
                what: format!("{} {}/{name}", K::kind(&()), self.namespace),
                source: Box::new(source),
            })
    }

    /// Sends clients nowhere, before all rings end. Returns for how long some may still come, if so.
    async fn send_away(
        &self,
        plans: &[Arc<RingPlan>],
        world: &World,
        written: &mut Written,
        led: &mut Led,
    ) -> Option<Duration> {
        if plans.is_empty() {
            return None;
        }
        // Said again where the Service is written next; a ring ends whatever becomes of it.
        if let Err(error) = self.endpoint(None, written).await {
            tracing::warn!(problem = error_chain(&error), "clients are not sent away");
        }
        let moving = led.moving(None, Instant::now());
        let mut plans = plans.iter();
        let some_answer = plans.any(|plan| answers(plan, &world.machines, &world.unready));
        (some_answer && !moving.is_zero()).then_some(moving)
    }

    /// Deletes the plans that `gone` picks, and takes them out of the list.
    async fn delete(
        &self,
        plans: &mut Vec<Arc<RingPlan>>,
        gone: impl Fn(&RingPlan) -> bool,
    ) -> Result<(), ControllerError> {
        let api = Api::<RingPlan>::namespaced(self.context.client.clone(), &self.namespace);
        for plan in plans.iter().filter(|plan| gone(plan)) {
            let name = plan.name_any();
            match api.delete(&name, &DeleteParams::background()).await {
                Ok(_) => self.context.stores.forget_plan(plan),
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                Err(source) => {
                    return Err(ControllerError::Write {
                        what: format!("the end of RingPlan {}/{name}", self.namespace),
                        source: Box::new(source),
                    });
                }
            }
        }
        plans.retain(|plan| !gone(plan));
        Ok(())
    }

    /// The Service, and where it leads: rank 0 of the plan that serves, or nowhere.
    async fn endpoint(
        &self,
        serving: Option<&RingPlan>,
        written: &mut Written,
    ) -> Result<(), ControllerError> {
        let name = self.model.name_any();
        let mut metadata = self.metadata(&name);
        let wishes = &self.model.spec;
        let annotations = wishes.service.as_ref().map(|service| &service.annotations);
        metadata.annotations = annotations.cloned();
        let service = Service {
            metadata,
            spec: Some(ServiceSpec {
                type_: Some(wishes.service_type().name().to_owned()),
                ports: Some(vec![ServicePort {
                    name: Some(PORT_NAME.to_owned()),
                    // Rank 0's own port is in the plan.
                    port: wishes.service_port(),
                    protocol: Some("TCP".to_owned()),
                    target_port: Some(IntOrString::String(PORT_NAME.to_owned())),
                    app_protocol: Some("http".to_owned()),
                    ..ServicePort::default()
                }]),
                ..ServiceSpec::default()
            }),
            ..Service::default()
        };
        let target = serving.and_then(|plan| {
            let rank0 = plan.spec.members.first()?;
            let host: IpAddr = rank0.host()?.parse().ok()?;
            Some((host, plan.spec.http_port?, rank0.name.clone()))
        });
        let stores = &self.context.stores;
        self.own(&service, &stores.services).await?;
        self.write_once(service, &stores.services, written).await?;
        // The family of an EndpointSlice cannot change, so each has its own.
        for family in ["IPv4", "IPv6"] {
            let ours = target
                .as_ref()
                .filter(|(host, ..)| host.is_ipv4() == (family == "IPv4"));
            let slice = self.slice(family, ours);
            if ours.is_some() || stores.slices.get(&self.reference(&slice)).is_some() {
                self.write_once(slice, &stores.slices, written).await?;
            }
        }
        Ok(())
    }

    /// Where the Service leads for one family of addresses: to this port of this Node, or nowhere.
    fn slice(&self, family: &str, target: Option<&(IpAddr, i32, String)>) -> EndpointSlice {
        let name = self.model.name_any();
        let mut slice = EndpointSlice {
            metadata: self.metadata(&format!("{name}-{}", family.to_lowercase())),
            address_type: family.to_owned(),
            endpoints: target
                .iter()
                .map(|(host, _, node)| Endpoint {
                    addresses: vec![host.to_string()],
                    conditions: Some(EndpointConditions {
                        ready: Some(true),
                        ..EndpointConditions::default()
                    }),
                    node_name: Some(node.clone()),
                    ..Endpoint::default()
                })
                .collect(),
            ports: target.map(|(_, port, _)| {
                vec![EndpointPort {
                    name: Some(PORT_NAME.to_owned()),
                    port: Some(*port),
                    protocol: Some("TCP".to_owned()),
                    app_protocol: Some("http".to_owned()),
                }]
            }),
        };
        let labels = slice.metadata.labels.get_or_insert_default();
        for (key, value) in [
            (SERVICE_LABEL, name.as_str()),
            ("endpointslice.kubernetes.io/managed-by", MANAGER),
        ] {
            labels.insert(key.to_owned(), value.to_owned());
        }
        slice
    }

    /// Refuses to take over a Service of this name that somebody else made.
    async fn own(&self, service: &Service, store: &Store<Service>) -> Result<(), ControllerError> {
        if store.get(&self.reference(service)).is_some() {
            return Ok(());
        }
        let name = service.name_any();
        let there = Api::<Service>::namespaced(self.context.client.clone(), &self.namespace)
            .get_opt(&name)
            .await
            .map_err(|source| ControllerError::Read {
                what: format!("Service {}/{name}", self.namespace),
                source: Box::new(source),
            })?;
        let uid = self.model.uid().unwrap_or_default();
        let ours = |service: &Service| {
            let mut owners = service.owner_references().iter();
            owners.any(|owner| owner.uid == uid)
        };
        match there {
            Some(there) if !ours(&there) => Err(ControllerError::NameTaken {
                namespace: self.namespace.clone(),
                name,
            }),
            _ => Ok(()),
        }
    }

    fn reference<K: Resource<DynamicType = ()>>(&self, object: &K) -> ObjectRef<K> {
        ObjectRef::new(&object.name_any()).within(&self.namespace)
    }

    /// Writes what differs from what was written last, or was changed by somebody else since.
    async fn write_once<K>(
        &self,
        object: K,
        store: &Store<K>,
        written: &mut Written,
    ) -> Result<(), ControllerError>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + Serialize
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let name = object.name_any();
        let key = format!("{}/{name}", K::kind(&()));
        let mut hasher = DefaultHasher::new();
        // A value that cannot be serialized cannot be written either; that error says so.
        serde_json::to_string(&object)
            .unwrap_or_default()
            .hash(&mut hasher);
        let hash = hasher.finish();
        let there = store.get(&self.reference(&object));
        let version = there.and_then(|there| there.resource_version());
        if version.is_none() || written.get(&key) != Some(&(hash, version)) {
            let object = self.write(object).await?;
            written.insert(key, (hash, object.resource_version()));
        }
        Ok(())
    }
}
