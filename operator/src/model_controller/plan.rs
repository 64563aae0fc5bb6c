//! Third step: whether the ring that runs is still right, and which one should be there if not. Planning itself is prima-halda's
//! and `crate::plan`'s; here is decided when to plan, when a better plan is worth an interruption, and how plans get their ports.
//!
//! A working ring is only replaced by one that is predicted to be a fifth faster, and not within ten minutes of the last
//! change; a ring that cannot work any more is replaced at once. If all that changed is where its agents are reached, as in an
//! upgrade, each machine keeps its layers: what it has fetched and holds in memory stays of use, and nothing is planned.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use prima_crds::v1alpha1::model::{Model, NodeShare, ResolvedModel};
use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::{NodeProfile, NodeProfileStatus};
use prima_crds::v1alpha1::ring_plan::{
    MemberState, PlannedModel, RingMember, RingPlan, RingPlanSpec, Speed,
};
use prima_halda::{Options, Plan};

use super::ControllerError;
use super::candidates::Candidates;
use super::dereference::{ApiKey, World};
use super::resolve::{FailedLook, Resolution};
use crate::cluster::metrics::Metrics;
use crate::error_chain::error_chain;
use crate::plan::{self, DEFAULT_CONTEXT};

/// What is remembered of one Model.
#[derive(Default)]
pub struct Memory {
    pub failures: u32,
    pub ready: bool,
    /// What was written of each object: its content's hash, and the version that came of it.
    pub written: BTreeMap<String, (u64, Option<String>)>,
    pub failed_look: Option<FailedLook>,
    /// The newest generation that could not begin before the old ring had ended, and why there is a new one.
    pub ended_first: Option<(i64, String)>,
    fresh: Option<Fresh>,
    refused: BTreeMap<String, (String, Instant)>,
    /// Members of a plan's generation that fail, and since when.
    failing: BTreeMap<(i64, String), Instant>,
}

/// The best plan for a state of the world.
#[derive(Clone)]
struct Fresh {
    fingerprint: String,
    plan: Result<Arc<Plan>, String>,
}

/// What should be.
pub struct Decision {
    pub kind: Kind,
    /// Machines that are not in the ring, and why.
    pub out: Vec<NodeShare>,
    /// What is waited for, in words; empty if nothing.
    pub awaited: Vec<String>,
}

pub enum Kind {
    /// No ring may run: machines are released.
    Released {
        reason: &'static str,
        message: String,
    },
    /// No ring can be planned, now or at all.
    Impossible {
        reason: &'static str,
        message: String,
    },
    /// This plan goes on.
    Keep(Arc<RingPlan>),
    /// A new plan. If it does not fit beside the one that runs, that one has to end before.
    New {
        spec: Box<RingPlanSpec>,
        retire_first: bool,
        why: String,
    },
}

/// Who runs which layers, before anybody's address is known.
struct Windows {
    rounds: i32,
    members: Vec<RingMember>,
    predicted: Option<Speed>,
}

impl Windows {
    fn planned(plan: &Plan) -> Self {
        Self {
            rounds: plan.rounds as i32,
            members: plan::members(plan, |_| String::new()),
            predicted: Some(plan::speed(&plan.report)),
        }
    }

    fn kept(plan: &RingPlan) -> Self {
        Self {
            rounds: plan.spec.rounds,
            members: plan.spec.members.clone(),
            predicted: plan.spec.predicted,
        }
    }
}

/// Why a ring cannot go on, for people.
enum Broken {
    /// Agents are reached elsewhere, and could do there what they did.
    Moved(String),
    Changed(String),
}

impl Broken {
    fn why(&self) -> &str {
        match self {
            Self::Moved(why) | Self::Changed(why) => why,
        }
    }
}

impl Decision {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            out: Vec::new(),
            awaited: Vec::new(),
        }
    }

    pub fn awaits(&self) -> bool {
        !self.awaited.is_empty()
    }
}

/// Requests that share the memory of one context, unless the Model says how many have one each.
const CONCURRENT_REQUESTS: i32 = 16;
/// A new plan must be predicted to take at most this share of the time per token, in percent.
const WORTH_PERCENT: i64 = 80;
const SETTLE: SignedDuration = SignedDuration::from_mins(10);
/// A machine that fails for so long, while nobody is answered, is taken as one that refused.
const FAILS_FOR: Duration = Duration::from_secs(120);
/// How long a machine that refused a plan is not asked again.
const REFUSED_FOR: Duration = Duration::from_secs(600);
/// Ports of members and of rank 0's HTTP; the chart opens as many.
const RING_PORTS: i32 = 9200;
const HTTP_PORTS: i32 = 9400;
const SLOTS: i32 = 200;

pub async fn decide(
    model: &Model,
    world: &World,
    resolution: &Resolution,
    memory: &mut Memory,
    metrics: &Metrics,
) -> Result<Decision, ControllerError> {
    let current = world.plans.last();
    if model.spec.suspend {
        return Ok(Decision::new(Kind::Released {
            reason: "Suspended",
            message: "spec.suspend is true; set it to false to load the model again".to_owned(),
        }));
    }
    let key = match &world.api_key {
        ApiKey::None => Vec::new(),
        ApiKey::Digest(digest) => vec![digest.clone()],
        ApiKey::Missing(message) => {
            return Ok(Decision::new(Kind::Released {
                reason: "NoApiKey",
                message: message.clone(),
            }));
        }
    };
    let Some(resolved) = resolution.done() else {
        // What runs does not end because its source cannot be seen; an edited source is another model.
        return Ok(Decision::new(match current {
            Some(plan) if same_file(plan, model) => Kind::Keep(plan.clone()),
            _ => Kind::Impossible {
                reason: "NotResolved",
                message: "the model file is not known yet".to_owned(),
            },
        }));
    };
    let refused = memory.note_refusals(current, Instant::now());
    let members = current.map_or(&[][..], |plan| &plan.spec.members);
    let candidates = Candidates::new(model, resolved, world, &refused, members);
    let skeleton = skeleton(model, resolved, &key);
    let works = current
        .map(|plan| still_right(plan, model, &skeleton, &candidates))
        .transpose();
    let mut decision = match (current, works) {
        (_, _) if candidates.profiles.is_empty() => Decision::new(Kind::Impossible {
            reason: "NoMachines",
            message: no_machines(&candidates),
        }),
        // A first plan can wait for a machine that is being measured; a broken ring cannot.
        (None, _) if !candidates.awaited.is_empty() => Decision::new(Kind::Impossible {
            reason: "AwaitingMachines",
            message: format!("waiting for {}", candidates.awaited.join("; ")),
        }),
        (current, works) => {
            let best = match (current, &works) {
                (Some(current), Err(Broken::Moved(_))) => Ok(Windows::kept(current)),
                _ => {
                    let fresh = fresh(model, resolved, &candidates, memory, metrics).await?;
                    fresh.map(|plan| Windows::planned(&plan))
                }
            };
            let before = model
                .status
                .as_ref()
                .and_then(|status| status.plan_generation);
            let weights: i64 = resolved
                .profile
                .layer_weights
                .iter()
                .map(|one| one.bytes)
                .sum();
            let layer_bytes = weights / i64::from(resolved.profile.layers).max(1);
            let mut decision = choose(current, &works, best, skeleton, &candidates, world);
            if let Kind::New {
                spec,
                retire_first,
                why,
            } = &mut decision.kind
            {
                spec.generation = spec.generation.max(before.unwrap_or(0) + 1);
                let fits = fits_beside(spec, &world.plans, &candidates, layer_bytes);
                match (fits, current, &works) {
                    (true, ..) | (false, None, _) => {}
                    // For a faster ring a working one does not end before its time.
                    (false, Some(current), Ok(_)) => decision.kind = Kind::Keep(current.clone()),
                    (false, Some(_), Err(_)) => {
                        *retire_first = true;
                        memory.ended_first = Some((spec.generation, why.clone()));
                    }
                }
            }
            decision
        }
    };
    decision.out = out_of_ring(&decision.kind, &candidates, memory);
    decision.awaited = candidates.awaited;
    Ok(decision)
}

/// Between the plan that is there and the best one.
fn choose(
    current: Option<&Arc<RingPlan>>,
    works: &Result<Option<()>, Broken>,
    best: Result<Windows, String>,
    skeleton: RingPlanSpec,
    candidates: &Candidates,
    world: &World,
) -> Decision {
    let why = match (current, works) {
        (Some(current), Ok(_)) => {
            let kept = || Decision::new(Kind::Keep(current.clone()));
            let now = best.as_ref().ok().and_then(|best| best.predicted);
            let (Some(now), Some(then)) = (now, current.spec.predicted) else {
                return kept();
            };
            let now = now.token_microseconds;
            let faster = now * 100 < then.token_microseconds * WORTH_PERCENT;
            let settled = age(current) > SETTLE;
            if !faster || !settled {
                return kept();
            }
            format!(
                "a token would take {} instead of {} microseconds",
                now, then.token_microseconds
            )
        }
        (Some(_), Err(broken)) => broken.why().to_owned(),
        (None, _) => "the first plan".to_owned(),
    };
    let Windows {
        rounds,
        mut members,
        predicted,
    } = match best {
        Ok(best) => best,
        Err(message) => {
            return Decision::new(Kind::Impossible {
                reason: "DoesNotFit",
                message,
            });
        }
    };
    let Some(slot) = free_slot(world) else {
        return Decision::new(Kind::Impossible {
            reason: "NoPorts",
            message: format!("all {SLOTS} ring ports are in use; delete or suspend other Models"),
        });
    };
    let address = |name: &str| {
        let host = candidates.address(name).unwrap_or_default();
        match host.contains(':') {
            true => format!("[{host}]:{}", RING_PORTS + slot),
            false => format!("{host}:{}", RING_PORTS + slot),
        }
    };
    for member in &mut members {
        member.address = address(&member.name);
    }
    let generation = world.plans.last().map_or(0, |plan| plan.spec.generation);
    Decision::new(Kind::New {
        spec: Box::new(RingPlanSpec {
            generation: generation + 1,
            rounds,
            members,
            predicted,
            http_port: Some(HTTP_PORTS + slot),
            ..skeleton
        }),
        retire_first: false,
        why,
    })
}

/// What the Model alone says of a plan.
fn skeleton(model: &Model, resolved: &ResolvedModel, keys: &[String]) -> RingPlanSpec {
    let source = &model.spec.source;
    let local = source.local_path();
    let fetched = local.is_none().then(|| source.clone());
    RingPlanSpec {
        generation: 1,
        model: PlannedModel {
            name: model.name_any(),
            file: local.unwrap_or_else(|| source.file_name().to_owned()),
            size_bytes: resolved.profile.size_bytes,
            layers: resolved.profile.layers,
            source: fetched,
            version: Some(resolved.version.clone()),
        },
        context_length: context_length(model, resolved),
        max_concurrent_requests: model
            .spec
            .max_concurrent_requests
            .unwrap_or(CONCURRENT_REQUESTS),
        activation_dtype: model.spec.activation_dtype,
        rounds: 1,
        members: Vec::new(),
        predicted: None,
        http_port: None,
        api_key_sha256: keys.to_vec(),
    }
}

fn context_length(model: &Model, resolved: &ResolvedModel) -> i32 {
    let trained = resolved.profile.trained_context_length;
    model
        .spec
        .context_length
        .unwrap_or(trained.min(DEFAULT_CONTEXT as i32))
}

/// Whether `plan` still can work and is what the Model asks for; else why not.
fn still_right(
    plan: &RingPlan,
    model: &Model,
    skeleton: &RingPlanSpec,
    candidates: &Candidates,
) -> Result<(), Broken> {
    let asked = RingPlanSpec {
        generation: plan.spec.generation,
        rounds: plan.spec.rounds,
        members: plan.spec.members.clone(),
        predicted: plan.spec.predicted,
        http_port: plan.spec.http_port,
        ..skeleton.clone()
    };
    if asked != plan.spec {
        return Err(Broken::Changed("the Model was changed".to_owned()));
    }
    let rank0 = plan.spec.members.first().map(|member| &member.name);
    if let Some(wanted) = &model.spec.rank0
        && Some(wanted) != rank0
    {
        return Err(Broken::Changed(format!("spec.rank0 is {wanted} now")));
    }
    let mut moved = Vec::new();
    for member in &plan.spec.members {
        let name = &member.name;
        let Some(address) = candidates.address(name) else {
            let out = candidates.out.iter().find(|(out, _)| out == name);
            let why = out.map_or("it has no NodeProfile", |(_, why)| why);
            return Err(Broken::Changed(format!("{name} is out: {why}")));
        };
        if member.host() != Some(address) {
            moved.push(name.as_str());
        }
    }
    let why = match moved.as_slice() {
        [] => return Ok(()),
        [one] => format!("{one} has another address now"),
        several => format!("{} have other addresses now", several.join(", ")),
    };
    Err(match could_go_on(plan, candidates) {
        true => Broken::Moved(why),
        false => Broken::Changed(why),
    })
}

/// Whether the plan's machines can do, and their owners want, what it asks of them. A machine whose agent begins anew may have lost a
/// GPU or its memory to others meanwhile.
fn could_go_on(plan: &RingPlan, candidates: &Candidates) -> bool {
    plan.spec.members.iter().all(|member| {
        let profile = candidates.profile(&member.name);
        profile.is_some_and(|profile| could_do(profile, member))
    })
}

fn could_do(profile: &NodeProfile, member: &RingMember) -> bool {
    let Some(status) = &profile.status else {
        return false;
    };
    let owner = &profile.spec;
    let memory = (status.memory.available_bytes - owner.reserved_memory_bytes.unwrap_or(0))
        .min(owner.memory_cap_bytes.unwrap_or(i64::MAX));
    // What is read for every token does not stay.
    let read = member.read_bytes_per_token.unwrap_or(0);
    member.memory_bytes.unwrap_or(0) - read <= memory
        && member.gpu_memory_bytes.unwrap_or(0) <= gpu_memory(status)
        && (read == 0 || owner.disk_allowed != Some(false))
}

fn same_file(plan: &RingPlan, model: &Model) -> bool {
    let planned = &plan.spec.model;
    let source = &model.spec.source;
    match source.local_path() {
        Some(path) => planned.source.is_none() && planned.file == path,
        None => planned.source.as_ref() == Some(source),
    }
}

/// The best plan now; planned anew only when something changed that a plan depends on.
async fn fresh(
    model: &Model,
    resolved: &ResolvedModel,
    candidates: &Candidates,
    memory: &mut Memory,
    metrics: &Metrics,
) -> Result<Result<Arc<Plan>, String>, ControllerError> {
    let fingerprint = fingerprint(model, resolved, candidates);
    if let Some(known) = &memory.fresh
        && known.fingerprint == fingerprint
    {
        return Ok(known.plan.clone());
    }
    if let Some(name) = &model.spec.rank0
        && candidates.profile(name).is_none()
    {
        let out = candidates.out.iter().find(|(out, _)| out == name);
        let why = out.map_or("there is no NodeProfile of that name", |(_, why)| why);
        return Ok(Err(format!("spec.rank0 is {name}, but {why}")));
    }
    let profile = ModelProfile::new(&model.name_any(), resolved.profile.clone());
    let options = Options {
        context_tokens: context_length(model, resolved) as usize,
        concurrent_requests: model.spec.max_concurrent_requests.unwrap_or(1) as usize,
        rank0: model.spec.rank0.clone(),
        ..Options::default()
    };
    let profiles = candidates.profiles.clone();
    let begun = Instant::now();
    let planned = tokio::task::spawn_blocking(move || plan::checked(&profile, &profiles, &options))
        .await
        .map_err(ControllerError::Planning)?;
    metrics
        .planning_seconds
        .observe(begun.elapsed().as_secs_f64());
    let plan = planned.map(Arc::new).map_err(|error| error_chain(&error));
    memory.fresh = Some(Fresh {
        fingerprint,
        plan: plan.clone(),
    });
    Ok(plan)
}

/// Equal as long as a plan would hardly change. Memory counts in steps of a twentieth, links in steps of a quarter.
fn fingerprint(model: &Model, resolved: &ResolvedModel, candidates: &Candidates) -> String {
    let steps = |value: i64| (value.max(1) as f64).log(1.25).round() as i64;
    let machines = candidates.profiles.iter().map(|profile| {
        let status = profile.status.as_ref();
        let memory = status
            .map(|status| status.memory.available_bytes * 20 / status.memory.total_bytes.max(1));
        let links: Vec<_> = status
            .into_iter()
            .flat_map(|status| &status.links)
            .map(|link| {
                (
                    &link.to,
                    steps(link.latency_nanoseconds),
                    steps(link.bytes_per_second),
                )
            })
            .collect();
        let measured = status.map(|status| (&status.measured_at, &status.gpus));
        format!(
            "{} {:?} {memory:?} {measured:?} {links:?}",
            profile.name_any(),
            profile.spec
        )
    });
    let machines: Vec<String> = machines.collect();
    format!(
        "{:?} {} {machines:?}",
        model.spec, resolved.version.header_sha256
    )
}

/// Whether the machines have memory for the new ring while the old ones still run. Weights of layers that a machine has in both
/// are in its page cache once; a GPU has everything twice.
fn fits_beside(
    spec: &RingPlanSpec,
    old: &[Arc<RingPlan>],
    candidates: &Candidates,
    layer_bytes: i64,
) -> bool {
    let layers = |member: &RingMember| -> HashSet<i32> {
        let windows = member.windows.iter();
        windows
            .flat_map(|window| window.first..window.last)
            .collect()
    };
    spec.members.iter().all(|member| {
        let status = candidates
            .profile(&member.name)
            .and_then(|profile| profile.status.as_ref());
        let Some(status) = status else {
            return true;
        };
        let before = || {
            let members = old.iter().flat_map(|plan| &plan.spec.members);
            members.filter(|before| before.name == member.name)
        };
        let ours = layers(member);
        let held: i64 = before()
            .map(|before| {
                let shared = layers(before).intersection(&ours).count() as i64;
                (before.memory_bytes.unwrap_or(0) - shared * layer_bytes).max(0)
            })
            .sum();
        let gpu_held: i64 = before().filter_map(|before| before.gpu_memory_bytes).sum();
        let on_gpu = member.gpu_memory_bytes.unwrap_or(0);
        member.memory_bytes.unwrap_or(0) + held <= status.memory.available_bytes
            && (on_gpu == 0 || on_gpu + gpu_held <= gpu_memory(status))
    })
}

/// What all GPUs of a machine have left, in bytes.
fn gpu_memory(status: &NodeProfileStatus) -> i64 {
    let gpus = status.gpus.iter().filter_map(|gpu| gpu.measured.as_ref());
    gpus.map(|gpu| gpu.available_bytes).sum()
}

/// A pair of ports that no plan uses.
fn free_slot(world: &World) -> Option<i32> {
    let used: HashSet<i32> = world
        .plans
        .iter()
        .chain(&world.others)
        .filter_map(|plan| Some(plan.spec.http_port? - HTTP_PORTS))
        .collect();
    (0..SLOTS).find(|slot| !used.contains(slot))
}

fn no_machines(candidates: &Candidates) -> String {
    match candidates.out.as_slice() {
        [] => "no agent has been heard of; is the DaemonSet of agents running (kubectl get pods -A -l app.kubernetes.io/component=agent)?".to_owned(),
        out => {
            let out: Vec<_> = out.iter().map(|(name, why)| format!("{name}: {why}")).collect();
            format!("no machine can take part: {}", out.join("; "))
        }
    }
}

fn out_of_ring(kind: &Kind, candidates: &Candidates, memory: &Memory) -> Vec<NodeShare> {
    let members: &[RingMember] = match kind {
        Kind::Keep(plan) => &plan.spec.members,
        Kind::New { spec, .. } => &spec.members,
        Kind::Released { .. } | Kind::Impossible { .. } => &[],
    };
    let report = memory
        .fresh
        .as_ref()
        .and_then(|fresh| fresh.plan.as_ref().ok());
    let idle = candidates.profiles.iter().map(|profile| {
        let name = profile.name_any();
        let left_out = report
            .and_then(|plan| plan.report.left_out.iter().find(|out| out.name == name))
            .map(|out| out.why.clone());
        let why = left_out.unwrap_or_else(|| match kind {
            Kind::Keep(_) => {
                "a ring with it would not be so much faster that it is worth an interruption"
                    .to_owned()
            }
            _ => "it could take part".to_owned(),
        });
        (name, why)
    });
    candidates
        .out
        .iter()
        .cloned()
        .chain(idle)
        .filter(|(name, _)| members.iter().all(|member| member.name != *name))
        .map(|(name, why)| NodeShare {
            name,
            in_ring: false,
            why,
            fetched_bytes: None,
            total_bytes: None,
        })
        .collect()
}

impl Memory {
    /// Machines that refused a plan a short while ago or could not follow it in a good while, and why.
    fn note_refusals(
        &mut self,
        current: Option<&Arc<RingPlan>>,
        now: Instant,
    ) -> BTreeMap<String, String> {
        let mut failing = BTreeMap::new();
        if let Some(plan) = current {
            for member in plan.status.iter().flat_map(|status| &status.members) {
                let name = &member.name;
                let fails_for = match member.state {
                    MemberState::Failed => {
                        let key = (plan.spec.generation, name.clone());
                        let since = self.failing.get(&key).copied().unwrap_or(now);
                        failing.insert(key, since);
                        now.duration_since(since)
                    }
                    _ => Duration::ZERO,
                };
                if member.state == MemberState::Refused || fails_for > FAILS_FOR {
                    // When it is tried again is told in brackets, and always another time.
                    let why = member.message.split(" (tried again").next();
                    let refusal = (why.unwrap_or_default().to_owned(), now);
                    self.refused.insert(name.clone(), refusal);
                } else if member.state >= MemberState::Loaded {
                    self.refused.remove(name);
                }
            }
        }
        self.failing = failing;
        self.refused
            .retain(|_, (_, at)| now.duration_since(*at) < REFUSED_FOR);
        let refused = self.refused.iter();
        refused
            .map(|(name, (why, _))| (name.clone(), why.clone()))
            .collect()
    }
}

fn age(plan: &RingPlan) -> SignedDuration {
    plan.creation_timestamp()
        .map_or(SignedDuration::MAX, |made| {
            Timestamp::now().duration_since(made.0)
        })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::json;

    use super::*;
    use crate::cluster::world::{AgentState, Machine};

    const GIB: i64 = 1 << 30;

    fn speed(token_microseconds: i64) -> Option<Speed> {
        Some(Speed {
            token_microseconds,
            first_token_microseconds: 1,
        })
    }

    fn member() -> RingMember {
        serde_json::from_value(json!({
            "name": "desk",
            "address": "10.0.0.1:9200",
            "windows": [{"first": 0, "last": 8}],
            "memoryBytes": 4 * GIB,
        }))
        .unwrap()
    }

    /// A model of 8 layers, and its file.
    fn model() -> (Model, ResolvedModel) {
        let source = json!({"source": {"hostPath": {"path": "/models/m.gguf"}}});
        let model = Model::new("m", serde_json::from_value(source.clone()).unwrap());
        let resolved = serde_json::from_value(json!({
            "source": source["source"],
            "profile": {
                "sizeBytes": 8 * GIB, "layers": 8, "hiddenSize": 64, "vocabularySize": 256, "trainedContextLength": 512,
                "kvBytesPerPositionAndLayer": 256, "embeddingBytes": 4096,
                "layerWeights": [{"format": "Q4_K", "weights": 8 * GIB / 9 * 16, "bytes": 8 * GIB}],
                "outputWeights": [{"format": "Q4_K", "weights": 256, "bytes": 144}],
            },
            "version": {"headerSha256": "0"},
        }));
        (model, resolved.unwrap())
    }

    /// A plan in which one member has these layers and so much memory.
    fn ring(windows: &[(i32, i32)], memory_bytes: i64, gpu_memory_bytes: i64) -> Arc<RingPlan> {
        let (model, resolved) = model();
        let windows: Vec<_> = windows
            .iter()
            .map(|(first, last)| json!({"first": first, "last": last}))
            .collect();
        let member = json!({
            "name": "desk", "address": "10.0.0.1:9200", "windows": windows,
            "memoryBytes": memory_bytes, "gpuMemoryBytes": gpu_memory_bytes,
        });
        let mut spec = skeleton(&model, &resolved, &[]);
        spec.members = vec![serde_json::from_value(member).unwrap()];
        Arc::new(RingPlan::new("m-1", spec))
    }

    /// A ring whose only member is in this state.
    fn reported(state: MemberState, message: &str) -> Arc<RingPlan> {
        let mut plan = RingPlan::clone(&ring(&[(0, 8)], GIB, 0));
        let status = json!({"members": [{"name": "desk", "state": state, "message": message}]});
        plan.status = Some(serde_json::from_value(status).unwrap());
        Arc::new(plan)
    }

    fn machine(name: &str, profile: bool, known_for: u64) -> Machine {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let mut found = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        found.metadata.name = Some(name.to_owned());
        let status = found.status.as_mut().unwrap();
        status.links[0].to = if name == "desk" { "pi4" } else { "desk" }.to_owned();
        let agent = json!({
            "address": "10.0.0.1", "memory": "", "disk": "",
            "localModels": [{"path": "/models/m.gguf", "version": {"headerSha256": "0"}}],
        });
        status.agent = Some(serde_json::from_value(agent).unwrap());
        Machine {
            name: name.to_owned(),
            profile: profile.then(|| Arc::new(found)),
            labels: BTreeMap::new(),
            agent: AgentState::Alive {
                known_for: Duration::from_secs(known_for),
            },
        }
    }

    fn world(machines: &[Machine], plans: &[Arc<RingPlan>]) -> World {
        World {
            machines: machines.to_vec(),
            plans: plans.to_vec(),
            others: Vec::new(),
            api_key: ApiKey::None,
        }
    }

    async fn decided(world: &World) -> Decision {
        let (model, resolved) = model();
        let resolution = Resolution::Done(Box::new(resolved));
        let (memory, metrics) = (&mut Memory::default(), Metrics::new());
        let decision = decide(&model, world, &resolution, memory, &metrics).await;
        decision.unwrap()
    }

    #[tokio::test]
    async fn a_first_plan_waits_for_who_is_measured_and_not_for_ever() {
        let desk = machine("desk", true, 1000);
        let there = world(&[desk.clone(), machine("pi4", false, 179)], &[]);
        let decision = decided(&there).await;
        let Kind::Impossible { reason, message } = &decision.kind else {
            panic!("it does not wait");
        };
        assert_eq!(*reason, "AwaitingMachines");
        assert_eq!(message, "waiting for pi4: its agent measures it");
        assert!(decision.awaits());

        let there = world(&[desk, machine("pi4", false, 180)], &[]);
        let decision = decided(&there).await;
        let Kind::New { spec, .. } = &decision.kind else {
            panic!("it waits for ever");
        };
        assert_eq!(spec.members.len(), 1);
        assert_eq!(spec.members[0].address, "10.0.0.1:9200");
        assert!(!decision.awaits());
        let out: Vec<_> = decision
            .out
            .iter()
            .map(|out| (&out.name[..], &out.why[..]))
            .collect();
        assert_eq!(out, [("pi4", "its agent measures it")]);
    }

    #[tokio::test]
    async fn a_machine_that_its_owner_excludes_is_out() {
        let mut desk = machine("desk", true, 1000);
        let mut profile = NodeProfile::clone(desk.profile.as_ref().unwrap());
        profile.spec.exclude = true;
        desk.profile = Some(Arc::new(profile));
        let decision = decided(&world(&[desk], &[])).await;
        let Kind::Impossible { reason, message } = &decision.kind else {
            panic!("it is used");
        };
        assert_eq!(*reason, "NoMachines");
        assert!(message.contains("desk: its owner excludes it"), "{message}");
    }

    #[test]
    fn a_ring_fits_beside_another_but_for_layers_that_both_have() {
        let desk = machine("desk", true, 1000);
        let mut profile = NodeProfile::clone(desk.profile.as_ref().unwrap());
        let status = profile.status.as_mut().unwrap();
        status.memory.available_bytes = 8 * GIB;
        let gpu = json!({
            "name": "GPU", "backend": "CUDA",
            "measured": {
                "unifiedMemory": false, "totalBytes": 6 * GIB, "availableBytes": 6 * GIB, "readBytesPerSecond": 1,
                "kvAppendBytesPerSecond": 1, "toGpuBytesPerSecond": 1, "fromGpuBytesPerSecond": 1,
                "copyOverheadNanoseconds": 1, "throughput": [], "layerOverheadNanoseconds": 1,
            },
        });
        status.gpus = vec![serde_json::from_value(gpu).unwrap()];
        let candidates = Candidates {
            profiles: vec![profile],
            ..Candidates::default()
        };
        let fits = |new: &Arc<RingPlan>, old: &Arc<RingPlan>| {
            fits_beside(&new.spec, std::slice::from_ref(old), &candidates, GIB)
        };
        let new = ring(&[(0, 4)], 4 * GIB, 0);
        assert!(fits(&new, &ring(&[(4, 8)], 4 * GIB, 0)), "just");
        assert!(
            !fits(&new, &ring(&[(4, 8)], 4 * GIB + 1, 0)),
            "a byte too much"
        );
        assert!(
            fits(&new, &ring(&[(0, 2), (2, 4)], 8 * GIB, 0)),
            "the same layers"
        );
        assert!(!fits(&new, &ring(&[(0, 2), (2, 4)], 8 * GIB + 1, 0)));
        assert!(
            !fits(&new, &ring(&[(3, 8)], 5 * GIB + 1, 0)),
            "one layer is the same"
        );
        assert!(fits(&new, &ring(&[(3, 8)], 5 * GIB, 0)));
        // A GPU has everything twice.
        let new = ring(&[(0, 4)], 0, 3 * GIB);
        assert!(fits(&new, &ring(&[(0, 4)], 0, 3 * GIB)));
        assert!(!fits(&new, &ring(&[(0, 4)], 0, 3 * GIB + 1)));
        assert!(fits(&ring(&[(0, 4)], 0, 0), &ring(&[(0, 4)], 0, 9 * GIB)));
    }

    #[test]
    fn ports_are_used_once_and_end_some_time() {
        let with_port = |slot: i32| {
            let mut plan = RingPlan::clone(&ring(&[(0, 8)], 0, 0));
            plan.spec.http_port = Some(HTTP_PORTS + slot);
            Arc::new(plan)
        };
        let mut there = world(&[], &[with_port(0)]);
        assert_eq!(free_slot(&there), Some(1));
        there.others = (1..SLOTS)
            .filter(|slot| *slot != 7)
            .map(with_port)
            .collect();
        assert_eq!(free_slot(&there), Some(7));
        there.others.push(with_port(7));
        assert_eq!(free_slot(&there), None);
        // A plan without ports takes none.
        there.plans = vec![ring(&[(0, 8)], 0, 0)];
        assert_eq!(free_slot(&there), Some(0));
    }

    #[test]
    fn a_refusal_counts_for_ten_minutes() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut memory = Memory::default();
        let refused = reported(MemberState::Refused, "no disk (tried again in 9 s)");
        let known = memory.note_refusals(Some(&refused), start);
        assert_eq!(known["desk"], "no disk", "without what changes");
        assert_eq!(memory.note_refusals(None, at(599)).len(), 1);
        assert!(memory.note_refusals(None, at(600)).is_empty());
        // Who has done what was asked is trusted again at once.
        memory.note_refusals(Some(&refused), start);
        let loading = reported(MemberState::Loading, "");
        assert_eq!(memory.note_refusals(Some(&loading), at(1)).len(), 1);
        let loaded = reported(MemberState::Loaded, "");
        assert!(memory.note_refusals(Some(&loaded), at(1)).is_empty());
    }

    #[test]
    fn who_fails_for_two_minutes_has_refused() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut memory = Memory::default();
        let failed = reported(MemberState::Failed, "it broke");
        assert!(memory.note_refusals(Some(&failed), start).is_empty());
        assert!(memory.note_refusals(Some(&failed), at(120)).is_empty());
        assert_eq!(
            memory.note_refusals(Some(&failed), at(121))["desk"],
            "it broke"
        );
        // Who recovers in between begins anew.
        let mut memory = Memory::default();
        memory.note_refusals(Some(&failed), start);
        memory.note_refusals(Some(&reported(MemberState::Loading, "")), at(60));
        assert!(memory.note_refusals(Some(&failed), at(121)).is_empty());
        assert!(memory.note_refusals(Some(&failed), at(241)).is_empty());
        assert_eq!(memory.note_refusals(Some(&failed), at(242)).len(), 1);
    }

    #[test]
    fn a_ring_that_works_gives_way_to_one_a_fifth_faster_and_not_within_ten_minutes() {
        let (model, resolved) = model();
        for (minutes, now, replaced) in [(11, 799, true), (11, 800, false), (9, 100, false)] {
            let mut spec = skeleton(&model, &resolved, &[]);
            spec.predicted = speed(1000);
            let mut ring = RingPlan::new("m-1", spec.clone());
            let made = Timestamp::now() - SignedDuration::from_mins(minutes);
            ring.metadata.creation_timestamp = Some(Time(made));
            let ring = Arc::new(ring);
            let world = world(&[], std::slice::from_ref(&ring));
            let best = Windows {
                rounds: 1,
                members: vec![member()],
                predicted: speed(now),
            };
            let candidates = Candidates::default();
            let works = Ok(Some(()));
            let decision = choose(Some(&ring), &works, Ok(best), spec, &candidates, &world);
            match decision.kind {
                Kind::New { spec, .. } => {
                    assert!(replaced, "{now} after {minutes} minutes");
                    assert_eq!((spec.generation, spec.predicted), (2, speed(now)));
                }
                _ => assert!(!replaced, "{now} after {minutes} minutes"),
            }
        }
    }

    #[test]
    fn a_machine_goes_on_elsewhere_only_with_what_it_needs() {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let mut profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        let status = profile.status.as_mut().unwrap();
        status.memory.available_bytes = 5 * GIB;
        status.gpus.clear();
        assert!(could_do(&profile, &member()));

        let mut reserved = profile.clone();
        reserved.spec.reserved_memory_bytes = Some(2 * GIB);
        assert!(!could_do(&reserved, &member()));
        let mut capped = profile.clone();
        capped.spec.memory_cap_bytes = Some(3 * GIB);
        assert!(!could_do(&capped, &member()));

        let on_gpu = RingMember {
            gpu_memory_bytes: Some(GIB),
            ..member()
        };
        assert!(!could_do(&profile, &on_gpu), "there is no GPU any more");

        let streamed = RingMember {
            memory_bytes: Some(8 * GIB),
            read_bytes_per_token: Some(4 * GIB),
            ..member()
        };
        assert!(could_do(&profile, &streamed));
        profile.spec.disk_allowed = Some(false);
        assert!(!could_do(&profile, &streamed));
    }
}
