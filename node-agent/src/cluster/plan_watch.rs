//! Watches RingPlans that name this machine: each gets a member, which ends when the plan is gone.
//!
//! Plans are parsed one by one: one that this agent cannot read is refused with a message, and does not disturb the others. It judges plans
//! in no other way.

use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, pending};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use prima_crds::v1alpha1::api_keys::{API_KEYS, ApiKeys};
use prima_crds::v1alpha1::document;
use prima_crds::v1alpha1::ring_plan::{RingPlan, RingPlanSpec};
use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::api;
use super::member::{self, Agent, End, PlanOnMachine};
use super::metrics::{Established, Step};
use super::plan_checks;
use super::plan_key::PlanKey;

/// How long rings may take to be planned without this machine, once the agent was asked to end. Where they cannot be, its members end then.
const PLANNING_LIMIT: Duration = Duration::from_secs(30);
/// How long another ring may then take until it serves. The pod's grace period must be longer than this, with what members take to end.
const LEAVING_LIMIT: Duration = Duration::from_secs(90);

/// Keeps members of all plans until `stop`, and then until rings do without them or cannot. Returns when all of them have ended.
pub async fn follow(machine: Arc<Agent>, established: Established, stop: impl Future<Output = ()>) {
    let mut events = api::watch_all::<RingPlan>(machine.client.clone());
    let mut members = Members {
        machine,
        running: BTreeMap::new(),
        tasks: JoinSet::new(),
        leaving: None,
    };
    let mut listed = BTreeSet::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let ends = members.ends_at();
        tokio::select! {
            () = &mut stop, if members.leaving.is_none() => members.leaving = Some(Instant::now()),
            () = until(ends) => break,
            // A member that has ended needs nothing more.
            Some(_) = members.tasks.join_next() => {}
            event = events.next() => match event {
                Some(Event::Init) => listed.clear(),
                Some(Event::InitApply(plan)) => {
                    listed.insert(plan.uid().unwrap_or_default());
                    members.seen(&plan);
                }
                Some(Event::InitDone) => {
                    established.done(Step::Plans);
                    members.end(End::PlanGone, |uid| !listed.contains(uid));
                }
                Some(Event::Apply(plan)) => members.seen(&plan),
                Some(Event::Delete(plan)) => {
                    let gone = plan.uid().unwrap_or_default();
                    members.end(End::PlanGone, |uid| *uid == gone);
                }
                // Watches do not end.
                None => break,
            }
        }
    }
    members.end(End::AgentEnds, |_| true);
    while members.tasks.join_next().await.is_some() {}
}

/// Waits until then; for ever if that is never.
async fn until(then: Option<Instant>) {
    match then {
        Some(then) => sleep_until(then).await,
        None => pending().await,
    }
}

struct Members {
    machine: Arc<Agent>,
    /// By the plan's uid.
    running: BTreeMap<String, Running>,
    /// Includes members that are ending.
    tasks: JoinSet<()>,
    /// Since when, if the agent was asked to end.
    leaving: Option<Instant>,
}

/// What a member hears after its start.
struct Running {
    end: oneshot::Sender<End>,
    /// The plan's owner.
    model: Option<String>,
    generation: i64,
    /// Whether machines have the model's file or do not take part, so that others can take over at once.
    is_everywhere: bool,
    /// Whether a plan without this machine takes this one's place.
    replaced: bool,
    /// The annotation as it was read last.
    said: Option<String>,
    api_keys: watch::Sender<ApiKeys>,
}

impl Members {
    /// When an agent that was asked to end may: nothing runs here that others could take over, or nobody does in time.
    fn ends_at(&self) -> Option<Instant> {
        let since = self.leaving?;
        let movable = self
            .running
            .values()
            .filter(|running| running.is_everywhere);
        let limits = movable.map(|running| match running.replaced {
            true => LEAVING_LIMIT,
            false => PLANNING_LIMIT,
        });
        Some(since + limits.max().unwrap_or_default())
    }

    fn seen(&mut self, plan: &DynamicObject) {
        let uid = plan.uid().unwrap_or_default();
        if plan.metadata.deletion_timestamp.is_some() {
            return self.end(End::PlanGone, |running| *running == uid);
        }
        if let Some(running) = self.running.get_mut(&uid) {
            // All that may change of a plan.
            let said = plan.annotations().get(API_KEYS).cloned();
            if running.said != said {
                running.said = said;
                running.api_keys.send_replace(api_keys(plan));
            }
            return;
        }
        let spec = plan.data.get("spec").unwrap_or(&Value::Null);
        if !names(spec, &self.machine.node) {
            for running in self.running.values_mut() {
                let same_model = running.model.is_some() && running.model == model(plan);
                running.replaced |= same_model && generation(spec) > running.generation;
            }
            return;
        }
        if self.leaving.is_some() {
            tracing::info!(
                plan = plan.name_any(),
                "a plan came too late: this agent ends"
            );
            return;
        }
        let key = PlanKey::of(plan);
        tracing::info!(plan = %key, "a plan names this machine");
        let spec: Result<RingPlanSpec, _> = document::strict(spec);
        let spec = spec.map_err(|error| {
            format!(
                "this agent (version {}) cannot read it: {error}; update operator and agents to the same version",
                env!("CARGO_PKG_VERSION")
            )
        });
        let (end, ended) = oneshot::channel();
        let (tell, told) = watch::channel(api_keys(plan));
        let model = model(plan);
        let mut earlier = self.running.values();
        let replaces = model.is_some() && earlier.any(|running| running.model == model);
        let running = Running {
            end,
            model,
            generation: generation(plan.data.get("spec").unwrap_or(&Value::Null)),
            replaced: false,
            is_everywhere: spec
                .as_ref()
                .is_ok_and(|spec| !plan_checks::is_fetched(&spec.model)),
            said: plan.annotations().get(API_KEYS).cloned(),
            api_keys: tell,
        };
        self.running.insert(uid, running);
        let plan = PlanOnMachine {
            key,
            spec,
            replaces,
            api_keys: told,
        };
        self.tasks
            .spawn(member::run(self.machine.clone(), plan, ended));
    }

    fn end(&mut self, why: End, which: impl Fn(&String) -> bool) {
        for (_, running) in self.running.extract_if(.., |uid, _| which(uid)) {
            // A member that ended by itself does not need it.
            let _ = running.end.send(why);
        }
    }
}

/// The API keys that the plan's rank 0 may let in. Where nothing is said that this version can read, there is none.
fn api_keys(plan: &DynamicObject) -> ApiKeys {
    let Some(said) = plan.annotations().get(API_KEYS) else {
        return ApiKeys::default();
    };
    ApiKeys::from_json(said).unwrap_or_else(|error| {
        tracing::error!(
            plan = plan.name_any(),
            problem = prima_crds::error_chain(&error),
            "nobody is let in; update operator and agents to the same version"
        );
        ApiKeys::default()
    })
}

/// Uid of the plan's Model.
fn model(plan: &DynamicObject) -> Option<String> {
    Some(plan.owner_references().first()?.uid.clone())
}

/// Of a plan's spec, as far as a plan of any version tells.
fn generation(spec: &Value) -> i64 {
    spec.get("generation").and_then(Value::as_i64).unwrap_or(0)
}

/// Whether the plan has this machine as a member, as far as a plan of any version tells.
fn names(spec: &Value, node: &str) -> bool {
    let members = spec.get("members").and_then(Value::as_array);
    members
        .into_iter()
        .flatten()
        .any(|member| member.get("name").and_then(Value::as_str) == Some(node))
}

#[cfg(test)]
mod tests {
    use kube::api::ApiResource;
    use prima_crds::v1alpha1::ring_plan::{ActivationDtype, KvDtype};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_plan_of_the_first_operator_is_read() {
        let first = json!({
            "generation": 3,
            "model": {
                "name": "smollm2", "file": "smollm2.gguf", "sizeBytes": 144_811_360, "layers": 30,
                "source": {"huggingFace": {"repo": "o/r", "file": "smollm2.gguf"}}, "version": {"headerSha256": "0", "etag": "e"},
            },
            "contextLength": 8192, "maxConcurrentRequests": 4, "activationDtype": "BF16", "rounds": 1,
            "members": [
                {"name": "desk", "address": "10.0.0.1:9200", "windows": [{"first": 0, "last": 20, "gpuLayers": 4}], "memoryBytes": 5},
                {"name": "pi4", "address": "10.0.0.2:9200", "windows": [{"first": 20, "last": 30}]},
            ],
            "predicted": {"tokenMicroseconds": 1, "firstTokenMicroseconds": 2},
            "httpPort": 9400, "apiKeySha256": ["0".repeat(64)],
        });
        let spec: RingPlanSpec = document::strict(first).unwrap();
        spec.validate().unwrap();
        // What it did not say means what it did then.
        assert_eq!((spec.kv_contexts, spec.kv_dtype), (1, KvDtype::F16));
        assert_eq!(spec.activation_dtype, ActivationDtype::BF16);
        assert!(spec.draft.is_none() && !spec.is_encrypted());
        assert_eq!(spec.members[0].windows[0].gpu_layers, 4);
        assert_eq!(spec.members[1].members_on_machine, 1);
    }

    #[test]
    fn a_plan_that_tells_no_keys_lets_nobody_in() {
        let mut plan = DynamicObject::new("a", &ApiResource::erase::<RingPlan>(&()));
        assert!(api_keys(&plan).sha256.is_empty());
        let mut told = ApiKeys::default();
        let digest = ApiKeys::digest("", b"abc");
        told.sha256.insert("alice".to_owned(), digest);
        let mut tell = |text: String| {
            plan.annotations_mut().insert(API_KEYS.to_owned(), text);
            api_keys(&plan)
        };
        assert_eq!(tell(told.to_json()), told);
        // Of a version that says more.
        let more = told.to_json().replacen('{', "{\"more\": 1, ", 1);
        assert_eq!(tell(more), ApiKeys::default());
    }

    #[test]
    fn a_plan_of_any_version_says_whom_it_is_for() {
        let plan = json!({"members": [{"name": "pi", "wings": 2}, {"name": "desk"}], "more": 1});
        assert!(names(&plan, "desk") && names(&plan, "pi") && !names(&plan, "d"));
        for other in [
            json!({}),
            json!(null),
            json!({"members": 3}),
            json!({"members": [1]}),
        ] {
            assert!(!names(&other, "desk"), "{other}");
        }
    }
}
