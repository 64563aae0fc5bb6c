//! Last step: says what became of the Model, in conditions that a person understands and tools wait for. Writes only what changed.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::EventType;
use kube::{Api, Resource, ResourceExt};
use prima_crds::v1alpha1::model::{Model, ModelStatus, NodeShare};
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::model_source::ModelSource;
use prima_crds::v1alpha1::ring_plan::{MemberState, MemberStatus, RingMember, RingPlan};
use serde_json::json;

use super::apply::{MANAGER, Ring};
use super::decide::{self, Decision, Kind};
use super::dereference::World;
use super::event::event;
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
        // A condition that is not met yet is no event; one that is no longer met is.
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
    let model = &*world.model;
    let before = model.status.as_ref();
    let mut conditions = Conditions {
        before: before.map_or(&[], |status| &status.conditions),
        generation: model.metadata.generation,
        made: Vec::new(),
    };
    conditions.resolved(world);
    conditions.profiled(decision);
    conditions.planned(decision, ring, decided);
    match ring.newest.as_deref() {
        Some(plan) => {
            let members = Members::of(plan);
            conditions.loaded(&members);
            conditions.ready(decision, ring, &members);
            conditions.degraded(decision, ring, &members);
        }
        None => conditions.without_a_ring(world, decision),
    }
    conditions.made
}

/// A plan's members, and what each says of itself.
struct Members<'a> {
    plan: &'a RingPlan,
    states: Vec<(&'a RingMember, Option<&'a MemberStatus>)>,
}

impl<'a> Members<'a> {
    fn of(plan: &'a RingPlan) -> Self {
        let members = plan.spec.members.iter();
        Self {
            plan,
            states: members
                .map(|member| (member, member_status(plan, member)))
                .collect(),
        }
    }

    /// What members say that have not come as far as this.
    fn before(&self, least: MemberState) -> Vec<String> {
        let states = self.states.iter();
        states
            .filter(|(_, status)| status.is_none_or(|status| status.state < least))
            .map(|(member, status)| said(member, *status))
            .collect()
    }

    /// What members say that have failed or refused.
    fn failed(&self) -> Vec<String> {
        let failed = |status: &MemberStatus| status.state <= MemberState::Failed;
        let states = self.states.iter();
        states
            .filter(|(_, status)| status.is_some_and(failed))
            .map(|(member, status)| said(member, *status))
            .collect()
    }

    /// Rank 0 knows what the ring waits for.
    fn rank0_says(&self) -> String {
        let rank0 = self.states.first();
        rank0.map_or_else(String::new, |(rank0, status)| said(rank0, *status))
    }

    /// Those that cannot take part any more, and why.
    fn out(&self, decision: &Decision) -> Vec<String> {
        let is_member = |name: &str| self.states.iter().any(|(member, _)| member.name == name);
        let out = decision.out.iter().filter(|out| is_member(&out.name));
        out.map(|out| format!("{}: {}", out.name, out.why))
            .collect()
    }
}

struct Conditions<'a> {
    before: &'a [Condition],
    generation: Option<i64>,
    made: Vec<Condition>,
}

impl Conditions<'_> {
    fn resolved(&mut self, world: &World) {
        match &world.resolution {
            Resolution::Done(resolved) => {
                let said = |source: &ModelSource, profile: &ModelProfileSpec| {
                    let (bytes, layers) = (profile.size_bytes, profile.layers);
                    format!("{}: {bytes} bytes, {layers} layers", shown(source))
                };
                let mut message = said(&resolved.source, &resolved.profile);
                if let Some(draft) = &resolved.draft {
                    let draft = said(&draft.source, &draft.profile);
                    message = format!("{message}; draft model {draft}");
                }
                self.add("Resolved", true, "Resolved", message);
            }
            Resolution::Awaited(message) => {
                self.add("Resolved", false, "Resolving", message.clone());
            }
            Resolution::Failed(message) => {
                self.add("Resolved", false, "ResolveFailed", message.clone());
            }
        }
    }

    fn profiled(&mut self, decision: &Decision) {
        match decision.awaited.as_slice() {
            [] => {
                let message = "all machines are measured".to_owned();
                self.add("Profiled", true, "Profiled", message);
            }
            awaited => self.add("Profiled", false, "AwaitingMachines", awaited.join("; ")),
        }
    }

    fn planned(&mut self, decision: &Decision, ring: &Ring, decided: &decide::State) {
        if let Kind::Released { reason, message } | Kind::Impossible { reason, message } =
            &decision.kind
        {
            return self.add("Planned", false, reason, message.clone());
        }
        let Some(plan) = ring.newest.as_deref() else {
            return self.add("Planned", false, "Planning", "no plan yet".to_owned());
        };
        match &decided.ended_first {
            // Said until the new ring answers.
            Some((generation, why))
                if *generation == plan.spec.generation && ring.serving.is_none() =>
            {
                let message = format!(
                    "{}; the machines lack the memory for two rings, so the old one ended first ({why})",
                    line(plan)
                );
                self.add("Planned", true, "OldRingEndedFirst", message);
            }
            _ => self.add("Planned", true, "Planned", line(plan)),
        }
    }

    fn without_a_ring(&mut self, world: &World, decision: &Decision) {
        let released = matches!(decision.kind, Kind::Released { .. });
        // If the source cannot be read, that is the real reason.
        let (reason, message) = match (&world.resolution, &decision.kind) {
            (Resolution::Failed(message), _) => ("ResolveFailed", message.clone()),
            (Resolution::Awaited(message), _) if !released => ("Resolving", message.clone()),
            (_, Kind::Released { reason, message } | Kind::Impossible { reason, message }) => {
                (*reason, message.clone())
            }
            _ => ("Planning", "no plan yet".to_owned()),
        };
        for kind in ["Downloaded", "Loaded", "Ready"] {
            self.add(kind, false, reason, message.clone());
        }
        self.add("Degraded", false, "NoRing", "there is no ring".to_owned());
    }

    /// Downloaded, and Loaded.
    fn loaded(&mut self, members: &Members<'_>) {
        for (least, kind, reason, message) in [
            (
                MemberState::Loading,
                "Downloaded",
                "Downloading",
                "every machine has its part of the file",
            ),
            (
                MemberState::Loaded,
                "Loaded",
                "Loading",
                "every machine runs its layers",
            ),
        ] {
            match members.before(least).as_slice() {
                [] => self.add(kind, true, kind, message.to_owned()),
                lacking => self.add(kind, false, reason, lacking.join("; ")),
            }
        }
    }

    fn ready(&mut self, decision: &Decision, ring: &Ring, members: &Members<'_>) {
        if let Some(serving) = &ring.serving {
            let message = format!("answers on {}", line(serving));
            return self.add("Ready", true, "Ready", message);
        }
        let (out, lacking) = (members.out(decision), members.before(MemberState::Loaded));
        let message = match (out.as_slice(), lacking.as_slice()) {
            ([], []) => members.rank0_says(),
            ([], lacking) => lacking.join("; "),
            (out, _) => out.join("; "),
        };
        self.add("Ready", false, "NotReady", message);
    }

    fn degraded(&mut self, decision: &Decision, ring: &Ring, members: &Members<'_>) {
        if let Kind::Impossible { message, .. } = &decision.kind {
            return self.add("Degraded", true, "CannotReplan", message.clone());
        }
        let newest = members.plan.spec.generation;
        let serving = ring.serving.as_ref().map(|plan| plan.spec.generation);
        if let Some(serving) = serving.filter(|serving| *serving != newest) {
            let message =
                format!("generation {serving} serves until generation {newest} has loaded");
            return self.add("Degraded", true, "Replacing", message);
        }
        match members.failed().as_slice() {
            [] => {
                let message = "the ring is as planned".to_owned();
                self.add("Degraded", false, "AsPlanned", message);
            }
            failed => self.add("Degraded", true, "MemberFailed", failed.join("; ")),
        }
    }

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

/// Three digits, which is enough for people.
fn number(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}
