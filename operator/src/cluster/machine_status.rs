//! Says of every machine whether its agent is heard of, in the condition `Ready` of its NodeProfile. An agent that is gone cannot say so
//! itself, and what it measured stays.
//!
//! Looks at what is watched anyway, and writes only what changed.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource};
use prima_crds::error_chain;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use serde_json::json;
use tokio::time::sleep;

use super::world::{AgentState, Machine, Stores};
use crate::condition::{ConditionUpdate, condition, find};
use crate::model_controller::MANAGER;

const INTERVAL: Duration = Duration::from_secs(2);
/// After a write that failed: the operator may not write there, or the API server does not answer.
const PAUSE: Duration = Duration::from_secs(30);
const READY: &str = "Ready";

/// For ever.
pub async fn keep(client: Client, stores: &Stores) {
    let profiles: Api<NodeProfile> = Api::all(client);
    loop {
        let mut pause = INTERVAL;
        for machine in stores.machines() {
            let Some(condition) = due(&machine) else {
                continue;
            };
            if let Err(error) = write(&profiles, &machine.name, &condition).await {
                let problem = error_chain(&error);
                tracing::warn!(
                    machine = machine.name,
                    problem,
                    "cannot write the condition Ready of a NodeProfile"
                );
                pause = PAUSE;
            }
        }
        sleep(pause).await;
    }
}

/// The condition that the machine's profile should have, if it has another. Before a machine is measured there is no status to add to.
fn due(machine: &Machine) -> Option<Condition> {
    let profile = machine.profile.as_deref()?;
    let before = &profile.status.as_ref()?.conditions;
    let (is, reason, message) = match machine.agent {
        AgentState::Alive { .. } if profile.spec.exclude => (
            true,
            "Excluded",
            "its agent runs, and its owner leaves it out of all rings (spec.exclude)",
        ),
        AgentState::Alive { .. } if machine.cordoned => (
            true,
            "Cordoned",
            "its agent runs, and its Node is cordoned, so it is left out of all rings",
        ),
        AgentState::Alive { .. } if machine.leaving => (
            true,
            "AgentEnds",
            "its agent was asked to end, so rings are made without it where that is possible",
        ),
        AgentState::Alive { .. } => (true, "AgentRuns", "its agent runs"),
        AgentState::Silent => (
            false,
            "AgentSilent",
            "its agent is not heard of any more: the machine is off, asleep or away from the network, or the agent's pod does not run",
        ),
        AgentState::Unknown => (
            false,
            "NoAgent",
            "no agent runs there: its pod is missing, or has not been heard of since this operator started",
        ),
    };
    let said = ConditionUpdate {
        kind: READY,
        is: Some(is),
        reason,
        message: message.to_owned(),
    };
    let now = condition(before, profile.metadata.generation, said);
    let known = find(before, READY);
    let same = |known: &Condition| known.status == now.status && known.reason == now.reason;
    (!known.is_some_and(same)).then_some(now)
}

async fn write(
    profiles: &Api<NodeProfile>,
    name: &str,
    condition: &Condition,
) -> Result<(), kube::Error> {
    let patch = Patch::Apply(json!({
        "apiVersion": NodeProfile::api_version(&()),
        "kind": NodeProfile::kind(&()),
        "metadata": {"name": name},
        "status": {"conditions": [condition]},
    }));
    let params = PatchParams::apply(MANAGER).force();
    match profiles.patch_status(name, &params, &patch).await {
        // Its Node has left the cluster.
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        result => result.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_controller::test_world::{machine, profile};

    /// What is due after `change`, as `status reason`.
    fn due_after(change: impl FnOnce(&mut Machine)) -> Option<String> {
        let mut desk = machine("desk");
        change(&mut desk);
        due(&desk).map(|due| format!("{} {}", due.status, due.reason))
    }

    fn knows(desk: &mut Machine) {
        let now = due(desk).unwrap();
        profile(desk).status.as_mut().unwrap().conditions = vec![now];
    }

    #[test]
    fn what_is_known_of_an_agent_is_said_once() {
        assert_eq!(due_after(|_| {}).as_deref(), Some("True AgentRuns"));
        assert_eq!(due_after(knows), None);
        let gone = |agent: AgentState| {
            due_after(|desk| {
                knows(desk);
                desk.agent = agent;
            })
        };
        assert_eq!(
            gone(AgentState::Silent).as_deref(),
            Some("False AgentSilent")
        );
        assert_eq!(gone(AgentState::Unknown).as_deref(), Some("False NoAgent"));
        let excluded = due_after(|desk| {
            knows(desk);
            profile(desk).spec.exclude = true;
        });
        assert_eq!(excluded.as_deref(), Some("True Excluded"));
        let cordoned = due_after(|desk| {
            knows(desk);
            desk.cordoned = true;
        });
        assert_eq!(cordoned.as_deref(), Some("True Cordoned"));
    }

    #[test]
    fn a_machine_that_is_not_measured_has_no_condition() {
        let none = |change: fn(&mut Machine)| assert_eq!(due_after(change), None);
        none(|desk| desk.profile = None);
        none(|desk| profile(desk).status = None);
    }
}
