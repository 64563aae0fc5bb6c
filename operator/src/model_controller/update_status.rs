//! Last step: says what became of the Model, in conditions that a person understands and tools wait for. Writes only what changed.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Resource, ResourceExt};
use prima_crds::v1alpha1::model::{Model, ModelStatus, NodeShare};
use prima_crds::v1alpha1::ring_plan::{MemberState, MemberStatus, RingMember, RingPlan};
use serde_json::json;

use super::apply::{MANAGER, Ring};
use super::decide::{self, Decision, Kind};
use super::dereference::World;
use super::resolve::{Resolution, pinned, shown};
use super::{Context, ControllerError, ReconcileState};

pub async fn update_status(
    world: &World,
    decision: &Decision,
    ring: &Ring,
    context: &Context,
    state: &mut ReconcileState,
) -> Result<(), ControllerError> {
    let model = &*world.model;
    let before = model.status.clone().unwrap_or_default();
    let status = status(world, decision, ring, context, &state.decided);
    state.ready = is_true(&status, "Ready");
    if status == before {
        return Ok(());
    }
    let (namespace, name) = (model.namespace().unwrap_or_default(), model.name_any());
    let patch = json!({
        "apiVersion": Model::api_version(&()),
        "kind": Model::kind(&()),
        "metadata": {"name": name},
        "status": status,
    });
    Api::<Model>::namespaced(context.client.clone(), &namespace)
        .patch_status(
            &name,
            &PatchParams::apply(MANAGER).force(),
            &Patch::Apply(&patch),
        )
        .await
        .map_err(|source| ControllerError::Write {
            what: format!("the status of Model {namespace}/{name}"),
            source: Box::new(source),
        })?;
    for (kind, good) in [
        ("Resolved", true),
        ("Planned", true),
        ("Ready", true),
        ("Degraded", false),
    ] {
        let (was, is) = (condition(&before, kind), condition(&status, kind));
        let Some(is) = is else { continue };
        let as_wished = (is.status == "True") == good;
        let news = was.map(|was| (&was.status, &was.reason)) != Some((&is.status, &is.reason));
        // That a condition is not met yet is no event; that it is not any more is.
        let worth = match as_wished {
            true => was.is_some_and(|was| was.status != is.status) || (good && was.is_none()),
            false => {
                was.is_some_and(|was| was.status != is.status)
                    || is.reason.ends_with("Failed")
                    || is.reason == "DoesNotFit"
            }
        };
        if news && worth {
            let type_ = match as_wished {
                true => EventType::Normal,
                false => EventType::Warning,
            };
            event(model, context, type_, &is.reason, &is.message).await;
        }
    }
    Ok(())
}

/// Tells people who look at the Model. That it cannot be told is not worth failing for.
pub async fn event(model: &Model, context: &Context, type_: EventType, reason: &str, note: &str) {
    let event = Event {
        type_,
        reason: reason.to_owned(),
        // The API server takes no more.
        note: Some(note.chars().take(1000).collect()),
        action: "Reconcile".to_owned(),
        secondary: None,
    };
    if let Err(error) = context
        .recorder
        .publish(&event, &model.object_ref(&()))
        .await
    {
        tracing::warn!(%error, reason, "could not write an event");
    }
}

fn status(
    world: &World,
    decision: &Decision,
    ring: &Ring,
    context: &Context,
    decided: &decide::State,
) -> ModelStatus {
    let (model, resolution) = (&*world.model, &world.resolution);
    let before = model.status.as_ref();
    let shown_plan = ring.serving.as_deref().or(ring.newest.as_deref());
    let measured = ring.serving.as_deref().and_then(|plan| {
        let rank0 = plan.spec.members.first()?;
        member_status(plan, rank0)?.measured
    });
    let predicted = shown_plan.and_then(|plan| plan.spec.predicted);
    let per_second = |microseconds: i64| 1e6 / microseconds.max(1) as f64;
    let tokens_per_second = match (&measured, &predicted) {
        (Some(speed), _) => Some(number(per_second(speed.token_microseconds))),
        (None, Some(speed)) => Some(format!("~{}", number(per_second(speed.token_microseconds)))),
        (None, None) => None,
    };
    let mut nodes: Vec<NodeShare> = ring
        .newest
        .as_deref()
        .map(|plan| {
            plan.spec
                .members
                .iter()
                .map(|member| share(plan, member))
                .collect()
        })
        .unwrap_or_default();
    // A machine that is lost to a ring is out of it, whatever the plan says.
    nodes.retain(|node| decision.out.iter().all(|out| out.name != node.name));
    nodes.extend(decision.out.iter().cloned());
    let file = model.spec.source.file_name();
    ModelStatus {
        observed_generation: model.metadata.generation,
        conditions: conditions(world, decision, ring, decided),
        file: Some(file.strip_suffix(".gguf").unwrap_or(file).to_owned()),
        // What is pinned stays, even while it cannot be seen.
        resolved: resolution.done().or(pinned(model)).cloned(),
        plan_generation: shown_plan
            .map(|plan| plan.spec.generation)
            .or(before.and_then(|before| before.plan_generation)),
        ring: shown_plan.map(line),
        ring_nodes: shown_plan.map(|plan| plan.spec.members.len() as i32),
        tokens_per_second,
        predicted,
        measured,
        nodes,
        endpoint: Some(format!(
            "http://{}.{}.svc.{}/v1",
            model.name_any(),
            model.namespace().unwrap_or_default(),
            context.cluster_domain
        )),
    }
}

fn conditions(
    world: &World,
    decision: &Decision,
    ring: &Ring,
    decided: &decide::State,
) -> Vec<Condition> {
    let (model, resolution) = (&*world.model, &world.resolution);
    let mut conditions = Conditions {
        before: model
            .status
            .as_ref()
            .map_or(&[], |status| &status.conditions),
        generation: model.metadata.generation,
        made: Vec::new(),
    };
    let source = shown(&model.spec.source);
    match resolution {
        Resolution::Done(resolved) => {
            let bytes = resolved.profile.size_bytes;
            conditions.add(
                "Resolved",
                true,
                "Resolved",
                format!(
                    "{source}: {bytes} bytes, {} layers",
                    resolved.profile.layers
                ),
            );
        }
        Resolution::Awaited(message) => {
            conditions.add("Resolved", false, "Resolving", message.clone())
        }
        Resolution::Failed(message) => {
            conditions.add("Resolved", false, "ResolveFailed", message.clone());
        }
    }
    match decision.awaited.as_slice() {
        [] => conditions.add(
            "Profiled",
            true,
            "Profiled",
            "all machines are measured".to_owned(),
        ),
        awaited => conditions.add("Profiled", false, "AwaitingMachines", awaited.join("; ")),
    }
    let plan = ring.newest.as_deref();
    match (&decision.kind, plan) {
        (Kind::Released { reason, message } | Kind::Impossible { reason, message }, _) => {
            conditions.add("Planned", false, reason, message.clone());
        }
        (_, Some(plan)) => match &decided.ended_first {
            // Said until the new one answers.
            Some((generation, why))
                if *generation == plan.spec.generation && ring.serving.is_none() =>
            {
                let message = format!(
                    "{}; the machines lack the memory for two rings, so the old one ended first ({why})",
                    line(plan)
                );
                conditions.add("Planned", true, "OldRingEndedFirst", message);
            }
            _ => conditions.add("Planned", true, "Planned", line(plan)),
        },
        (_, None) => conditions.add("Planned", false, "Planning", "no plan yet".to_owned()),
    }
    let Some(plan) = plan else {
        let (reason, message) = match &decision.kind {
            Kind::Released { reason, message } | Kind::Impossible { reason, message } => {
                (*reason, message.clone())
            }
            _ => ("Planning", "no plan yet".to_owned()),
        };
        // A source that cannot be read is the reason behind.
        let (reason, message) = match resolution {
            Resolution::Failed(message) => ("ResolveFailed", message.clone()),
            Resolution::Awaited(message) if !matches!(decision.kind, Kind::Released { .. }) => {
                ("Resolving", message.clone())
            }
            _ => (reason, message),
        };
        for kind in ["Downloaded", "Loaded", "Ready"] {
            conditions.add(kind, false, reason, message.clone());
        }
        conditions.add("Degraded", false, "NoRing", "there is no ring".to_owned());
        return conditions.made;
    };
    let states: Vec<(&RingMember, Option<&MemberStatus>)> = plan
        .spec
        .members
        .iter()
        .map(|member| (member, member_status(plan, member)))
        .collect();
    let lacking = |least: MemberState| -> Vec<String> {
        states
            .iter()
            .filter(|(_, status)| status.is_none_or(|status| status.state < least))
            .map(|(member, status)| said(member, *status))
            .collect()
    };
    match lacking(MemberState::Loading).as_slice() {
        [] => conditions.add(
            "Downloaded",
            true,
            "Downloaded",
            "every machine has its part of the file".to_owned(),
        ),
        lacking => conditions.add("Downloaded", false, "Downloading", lacking.join("; ")),
    }
    match lacking(MemberState::Loaded).as_slice() {
        [] => conditions.add(
            "Loaded",
            true,
            "Loaded",
            "every machine runs its layers".to_owned(),
        ),
        lacking => conditions.add("Loaded", false, "Loading", lacking.join("; ")),
    }
    match &ring.serving {
        Some(serving) => conditions.add(
            "Ready",
            true,
            "Ready",
            format!("answers on {}", line(serving)),
        ),
        None => {
            let gone: Vec<_> = decision
                .out
                .iter()
                .filter(|out| {
                    plan.spec
                        .members
                        .iter()
                        .any(|member| member.name == out.name)
                })
                .map(|out| format!("{}: {}", out.name, out.why))
                .collect();
            let lacking = lacking(MemberState::Loaded);
            let message = match (gone.as_slice(), lacking.as_slice()) {
                // Rank 0 knows what the ring waits for.
                ([], []) => states
                    .first()
                    .map_or_else(String::new, |(rank0, status)| said(rank0, *status)),
                ([], lacking) => lacking.join("; "),
                (gone, _) => gone.join("; "),
            };
            conditions.add("Ready", false, "NotReady", message);
        }
    }
    match (&decision.kind, &ring.serving) {
        (Kind::Impossible { message, .. }, _) => {
            conditions.add("Degraded", true, "CannotReplan", message.clone());
        }
        (_, Some(serving)) if serving.spec.generation != plan.spec.generation => conditions.add(
            "Degraded",
            true,
            "Replacing",
            format!(
                "generation {} serves until generation {} has loaded",
                serving.spec.generation, plan.spec.generation
            ),
        ),
        _ => {
            let failed: Vec<String> = states
                .iter()
                .filter(|(_, status)| {
                    status.is_some_and(|status| status.state <= MemberState::Failed)
                })
                .map(|(member, status)| said(member, *status))
                .collect();
            match failed.as_slice() {
                [] => conditions.add(
                    "Degraded",
                    false,
                    "AsPlanned",
                    "the ring is as planned".to_owned(),
                ),
                failed => conditions.add("Degraded", true, "MemberFailed", failed.join("; ")),
            }
        }
    }
    conditions.made
}

struct Conditions<'a> {
    before: &'a [Condition],
    generation: Option<i64>,
    made: Vec<Condition>,
}

impl Conditions<'_> {
    fn add(&mut self, kind: &str, is: bool, reason: &str, message: String) {
        let status = if is { "True" } else { "False" };
        let before = self.before.iter().find(|condition| condition.type_ == kind);
        let since = before
            .filter(|before| before.status == status)
            .map(|before| before.last_transition_time.clone());
        self.made.push(Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            // As much as the API server takes.
            message: message.chars().take(8000).collect(),
            last_transition_time: since.unwrap_or_else(now),
            observed_generation: self.generation,
        });
    }
}

/// To the second, as the API server keeps it.
fn now() -> Time {
    let seconds = Timestamp::now().as_second();
    Time(Timestamp::from_second(seconds).unwrap_or_default())
}

fn condition<'a>(status: &'a ModelStatus, kind: &str) -> Option<&'a Condition> {
    status
        .conditions
        .iter()
        .find(|condition| condition.type_ == kind)
}

fn is_true(status: &ModelStatus, kind: &str) -> bool {
    condition(status, kind).is_some_and(|condition| condition.status == "True")
}

fn member_status<'a>(plan: &'a RingPlan, member: &RingMember) -> Option<&'a MemberStatus> {
    let status = plan.status.as_ref()?;
    status.members.iter().find(|one| one.name == member.name)
}

/// What a member says of itself, for people.
fn said(member: &RingMember, status: Option<&MemberStatus>) -> String {
    let name = &member.name;
    let Some(status) = status else {
        return format!("{name}: its agent has not taken up the plan yet");
    };
    let state = format!("{:?}", status.state).to_lowercase();
    match (status.fetched_bytes, status.total_bytes) {
        (Some(done), Some(total)) if status.state == MemberState::Fetching => {
            let percent = done.saturating_mul(100) / total.max(1);
            format!("{name}: fetching, {done} of {total} bytes ({percent} %)")
        }
        _ => {
            let message = match status.message.is_empty() {
                true => String::new(),
                false => format!(": {}", status.message),
            };
            let retry = status
                .retry_after_seconds
                .map_or_else(String::new, |seconds| {
                    format!(" (tried again in {seconds} s)")
                });
            format!("{name}: {state}{message}{retry}")
        }
    }
}

fn share(plan: &RingPlan, member: &RingMember) -> NodeShare {
    let status = member_status(plan, member);
    NodeShare {
        name: member.name.clone(),
        in_ring: true,
        why: member.why.clone().unwrap_or_default(),
        fetched_bytes: status.and_then(|status| status.fetched_bytes),
        total_bytes: status.and_then(|status| status.total_bytes),
    }
}

/// `pi4 [0, 6) -> desk [6, 30)`, with several rounds `pi4 [0, 3) [15, 18) -> ...`.
fn line(plan: &RingPlan) -> String {
    let members = plan.spec.members.iter().map(|member| {
        let windows: Vec<String> = member
            .windows
            .iter()
            .map(|window| format!("[{}, {})", window.first, window.last))
            .collect();
        format!("{} {}", member.name, windows.join(" "))
    });
    members.collect::<Vec<_>>().join(" -> ")
}

/// Three digits, as far as people care.
fn number(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}
