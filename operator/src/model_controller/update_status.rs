//! Last step: says what became of the Model, in conditions that a person understands and tools wait for. Writes only what changed.

use kube::api::{Patch, PatchParams};
use kube::runtime::events::EventType;
use kube::{Api, Resource, ResourceExt};
use prima_crds::v1alpha1::model::{Model, ModelStatus, NodeShare, ResolvedModel};
use prima_crds::v1alpha1::ring_plan::{RingMember, RingPlan};
use serde_json::json;

use super::apply::{self, MANAGER, Ring};
use super::conditions::{self, line, member_status};
use super::decide::Decision;
use super::dereference::World;
use super::event::event;
use super::resolve::{Resolution, pinned};
use super::{Context, ControllerError, ReconcileState};
use crate::condition::find;

pub async fn update_status(
    world: &World,
    decision: &Decision,
    ring: &Ring,
    context: &Context,
    state: &mut ReconcileState,
) -> Result<(), ControllerError> {
    let model = &*world.model;
    let before = model.status.clone().unwrap_or_default();
    let status = status(world, decision, ring, context, state);
    let version = model.resource_version();
    let is_known = match &state.said {
        None => status == before,
        // A watch that lags behind still shows what was so before; what it has shown since may be somebody else's.
        Some(said) => *said == status && (status == before || version == state.said_beside),
    };
    if is_known {
        return Ok(());
    }
    write(model, &status, context, &mut state.said).await?;
    state.said_beside = version;
    for (kind, good) in [
        ("Resolved", true),
        ("Planned", true),
        ("Ready", true),
        ("Degraded", false),
    ] {
        let (was, is) = (
            find(&before.conditions, kind),
            find(&status.conditions, kind),
        );
        let Some(is) = is else { continue };
        // While a file is looked at, nothing is known that would be an event.
        let looked_at = matches!(world.resolution, Resolution::Awaited(_));
        if looked_at && matches!(kind, "Resolved" | "Planned") {
            continue;
        }
        let as_wished = (is.status == "True") == good;
        let changed = was.map(|was| (&was.status, &was.reason)) != Some((&is.status, &is.reason));
        // A condition that is not met yet is no event; one that is no longer met is.
        let worth = match as_wished {
            true => was.is_some_and(|was| was.status != is.status) || (good && was.is_none()),
            false => {
                // `Ready` has its reason from another condition, which tells it.
                let serious = is.reason.ends_with("Failed")
                    || matches!(is.reason.as_str(), "DoesNotFit" | "OverQuota");
                was.is_some_and(|was| was.status != is.status) || (kind != "Ready" && serious)
            }
        };
        if changed && worth {
            let type_ = match as_wished {
                true => EventType::Normal,
                false => EventType::Warning,
            };
            event(model, &context.recorder, type_, &is.reason, &is.message).await;
        }
    }
    Ok(())
}

/// Writes all of a Model's status. `said`: what was written last.
pub async fn write(
    model: &Model,
    status: &ModelStatus,
    context: &Context,
    said: &mut Option<ModelStatus>,
) -> Result<(), ControllerError> {
    let (namespace, name) = (model.namespace().unwrap_or_default(), model.name_any());
    let patch = json!({
        "apiVersion": Model::api_version(&()),
        "kind": Model::kind(&()),
        "metadata": {"name": name},
        "status": status,
    });
    // If this fails, it may have been written all the same, and nothing is the same as this.
    *said = Some(ModelStatus::default());
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
    *said = Some(status.clone());
    Ok(())
}

fn status(
    world: &World,
    decision: &Decision,
    ring: &Ring,
    context: &Context,
    state: &ReconcileState,
) -> ModelStatus {
    let (model, resolution) = (&*world.model, &world.resolution);
    let before = model.status.as_ref();
    let shown_plan = ring.serving.as_deref().or(ring.newest.as_deref());
    let rank0 = ring.serving.as_deref().and_then(|plan| {
        let rank0 = plan.spec.members.first()?;
        member_status(plan, rank0)
    });
    let measured = rank0.and_then(|rank0| rank0.measured);
    // What is pinned stays, even while it cannot be seen.
    let resolved = resolution.done().or(pinned(model));
    let expert_miss_percent = resolved.and_then(|resolved| {
        let serving = ring.serving.as_deref().filter(|plan| {
            let served = plan.spec.model.version.as_ref();
            served == Some(&resolved.version)
        });
        let now = serving
            .and(rank0)
            .and_then(|rank0| rank0.expert_miss_percent);
        // What an earlier ring of the same file measured still counts.
        now.or_else(|| missed_before(model, resolved))
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
    let said = state.said.as_ref();
    let said = said.map_or(&[][..], |said| &said.conditions);
    let conditions = conditions::of(world, decision, ring, &state.decided, said);
    ModelStatus {
        observed_generation: model.metadata.generation,
        summary: conditions::summary(&conditions, ring.newest.as_deref()),
        conditions,
        file: Some(file.strip_suffix(".gguf").unwrap_or(file).to_owned()),
        resolved: resolved.cloned(),
        plan_generation: shown_plan
            .map(|plan| plan.spec.generation)
            .or(before.and_then(|before| before.plan_generation)),
        ring: shown_plan.map(line),
        ring_nodes: shown_plan.map(|plan| plan.spec.members.len() as i32),
        ready_nodes: shown_plan.map(|plan| {
            let loaded = apply::loaded(plan, &world.machines);
            format!("{loaded}/{}", plan.spec.members.len())
        }),
        tokens_per_second,
        predicted,
        measured,
        expert_miss_percent,
        nodes,
        endpoint: Some(endpoint(model, &context.cluster_domain)),
    }
}

/// How often experts of this file are missed, as rings measured it.
pub fn missed_before(model: &Model, file: &ResolvedModel) -> Option<i32> {
    let status = model.status.as_ref()?;
    let of = status.resolved.as_ref()?;
    status
        .expert_miss_percent
        .filter(|_| of.version == file.version)
}

/// Base URL for OpenAI clients in the cluster.
fn endpoint(model: &Model, domain: &str) -> String {
    let (name, namespace) = (model.name_any(), model.namespace().unwrap_or_default());
    let port = match model.spec.service_port() {
        80 => String::new(),
        port => format!(":{port}"),
    };
    format!("http://{name}.{namespace}.svc.{domain}{port}/v1")
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

/// Three digits, which is enough for people.
fn number(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model_controller::decide::DecisionKind;
    use crate::model_controller::test_world::{self, api_server, serving};

    #[tokio::test]
    async fn what_was_said_last_counts_though_no_watch_shows_it() {
        let (client, writes) = api_server().await;
        let plan = serving("m", 9400);
        let context = test_world::context(client, &plan);
        let mut world = test_world::world(&[], std::slice::from_ref(&plan));
        let model = Arc::get_mut(&mut world.model).unwrap();
        model.metadata.namespace = Some("home".to_owned());
        let decision = test_world::decision(DecisionKind::Keep(plan.clone()));
        let not_ready = Ring {
            newest: Some(plan.clone()),
            serving: None,
        };
        let ready = Ring {
            newest: Some(plan.clone()),
            serving: Some(plan),
        };
        let mut state = ReconcileState::default();
        for (ring, status) in [
            (&not_ready, "False"),
            (&ready, "True"),
            (&not_ready, "False"),
            (&not_ready, "False"),
        ] {
            let said = update_status(&world, &decision, ring, &context, &mut state).await;
            said.unwrap();
            let said = state.said.clone().unwrap();
            assert_eq!(find(&said.conditions, "Ready").unwrap().status, status);
            // This is all that the watch shows.
            let model = Arc::get_mut(&mut world.model).unwrap();
            model.status.get_or_insert(said);
        }
        let writes = writes.lock().unwrap();
        let statuses = writes.iter().filter(|(to, _)| to.ends_with("/m/status"));
        let said = statuses.map(|(_, body)| {
            let conditions = body["status"]["conditions"].as_array().unwrap();
            let mut ready = conditions.iter().filter(|one| one["type"] == "Ready");
            ready.next().unwrap()["status"].clone()
        });
        // And what was said already is not written again.
        assert_eq!(said.collect::<Vec<_>>(), ["False", "True", "False"]);
    }

    #[test]
    fn an_endpoint_names_a_port_other_than_80() {
        let model = |service: serde_json::Value| {
            let source = json!({"hostPath": {"path": "/m.gguf"}});
            let spec = json!({"source": source, "service": service});
            let mut model = Model::new("m", serde_json::from_value(spec).unwrap());
            model.metadata.namespace = Some("home".to_owned());
            endpoint(&model, "cluster.local")
        };
        assert_eq!(model(json!({})), "http://m.home.svc.cluster.local/v1");
        let other = model(json!({"port": 8081}));
        assert_eq!(other, "http://m.home.svc.cluster.local:8081/v1");
    }
}
