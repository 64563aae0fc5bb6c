//! Fourth step: makes the cluster as decided. Writes RingPlans, the Model's Service and its EndpointSlice, and deletes plans that a newer
//! one has replaced. Clients are sent to the newest plan that answers, so an old ring serves until the new one has loaded, unless machines
//! lack the memory for both.

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
/// Also returns when to look again, if there are rings that are to end and to which clients may still come.
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
            writer.release(&mut plans, world, written).await?;
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
                writer.release(&mut plans, world, written).await?;
            }
            let plan = writer.plan(spec, &world.api_keys);
            let plan = Arc::new(writer.write(plan).await?);
            context.stores.add_plan(plan.clone());
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
fn may_answer(plan: &RingPlan, machines: &[Machine]) -> bool {
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

    /// Ends all rings. Clients are sent nowhere before, so that none comes to a ring that ends.
    async fn release(
        &self,
        plans: &mut Vec<Arc<RingPlan>>,
        world: &World,
        written: &mut Written,
    ) -> Result<(), ControllerError> {
        if !plans.is_empty() {
            // Said again where the Service is written next; a ring ends whatever becomes of it.
            if let Err(error) = self.endpoint(None, written).await {
                tracing::warn!(problem = error_chain(&error), "clients are not sent away");
            }
            // Some may still come.
            let mut plans = plans.iter();
            if plans.any(|plan| answers(plan, &world.machines, &world.unready)) {
                sleep(MOVING).await;
            }
        }
        self.delete(plans, |_| true).await
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

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::ring_plan::RingPlanStatus;
    use serde_json::json;

    use super::*;
    use crate::cluster::world::AgentState;
    use crate::model_controller::test_world::{self, api_server, context, machine, ring, serving};

    #[test]
    fn clients_have_a_moment_to_go_where_the_service_leads() {
        let (start, none) = (Instant::now(), Duration::ZERO);
        let mut led = Led::default();
        assert_eq!(led.moving(Some(1), start), MOVING);
        assert_eq!(led.moving(Some(1), start + MOVING / 2), MOVING / 2);
        assert_eq!(led.moving(Some(1), start + 2 * MOVING), none);
        assert_eq!(led.moving(None, start + 2 * MOVING), MOVING);
        assert_eq!(led.moving(None, start + 3 * MOVING), none);
    }

    #[tokio::test]
    async fn no_look_waits_until_clients_have_left_an_old_ring() {
        let (client, writes) = api_server().await;
        let plans = [1, 2].map(|generation| {
            let mut plan = RingPlan::clone(&serving("m", 9400));
            plan.metadata.name = Some(format!("m-{generation}"));
            plan.spec.generation = generation;
            plan.spec.members[0].address = "10.0.0.1:9200".to_owned();
            Arc::new(plan)
        });
        let context = context(client, &plans[1]);
        let mut world = test_world::world(&[machine("desk")], &plans);
        let model = Arc::get_mut(&mut world.model).unwrap();
        model.metadata.namespace = Some("home".to_owned());
        let decision = Decision {
            kind: DecisionKind::Keep(plans[1].clone()),
            out: Vec::new(),
            awaited: Vec::new(),
            fails: false,
        };
        let (mut written, mut led) = (Written::new(), Led::default());
        let long_ago = Instant::now().checked_sub(MOVING).unwrap();
        for (since, look_after) in [(None, Some(MOVING)), (Some((Some(2), long_ago)), None)] {
            led.0 = since;
            let deciding = context.deciding.lock().await;
            let applied = apply(
                &world,
                &decision,
                &context,
                &mut written,
                &mut led,
                deciding,
            );
            let (ring, after) = applied.await.unwrap();
            assert_eq!(ring.serving.unwrap().spec.generation, 2);
            assert_eq!(after, look_after);
            let writes = writes.lock().unwrap();
            let ended = writes.iter().filter(|(what, _)| what.starts_with("DELETE"));
            let ended: Vec<_> = ended.map(|(what, _)| what.ends_with("/m-1")).collect();
            let expected: &[bool] = match look_after {
                Some(_) => &[],
                None => &[true],
            };
            assert_eq!(ended, expected);
        }
    }

    #[test]
    fn members_that_run_their_layers_and_are_there_count() {
        let mut plan = RingPlan::clone(&ring(&[(0, 4)], 0, 0));
        let mut other = plan.spec.members[0].clone();
        other.name = "pi4".to_owned();
        plan.spec.members.push(other);
        let machines = [machine("desk"), machine("pi4")];
        assert_eq!(loaded(&plan, &machines), 0);
        let mut say = |states: [MemberState; 2]| {
            let members = ["desk", "pi4"].into_iter().zip(states);
            let members = members.map(|(name, state)| json!({"name": name, "state": state}));
            let status = json!({"members": members.collect::<Vec<_>>()});
            plan.status = Some(serde_json::from_value::<RingPlanStatus>(status).unwrap());
            plan.clone()
        };
        let half = say([MemberState::Loading, MemberState::Loaded]);
        assert_eq!(loaded(&half, &machines), 1);
        let all = say([MemberState::Ready, MemberState::Loaded]);
        assert_eq!(loaded(&all, &machines), 2);
        let mut silent = machines.clone();
        silent[0].agent = AgentState::Silent;
        assert_eq!(loaded(&all, &silent), 1);
        assert_eq!(loaded(&all, &machines[1..]), 1);
    }
}
