//! What this machine's agent said last of its members. If it was killed, or the machine lost power, plans still say that they run. That must not
//! count again while the next agent has yet to measure the machine, so it is taken back before the Lease is renewed.

use std::time::Duration;

use futures::future::join_all;
use kube::api::{Api, ApiResource, DynamicObject, ListParams};
use prima_crds::v1alpha1::ring_plan::{MemberState, MemberStatus, RingPlan};
use serde::Deserialize as _;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::api;
use super::backoff::Backoff;
use super::member::Agent;
use super::member_status::{self, Observed, Writer};
use super::plan_key::PlanKey;

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// For one entry. A plan whose status the API server does not take must not keep the machine out of all others.
const TRIES: usize = 3;

/// Returns when no plan says any more that a member runs here.
pub async fn take_back(agent: &Agent) {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let plans = loop {
        match all_plans(agent).await {
            Ok(plans) => break plans,
            Err(problem) => {
                tracing::warn!(
                    problem,
                    "cannot read what plans say of this machine; trying again before the Lease is renewed"
                );
                sleep(backoff.next()).await;
            }
        }
    };
    let mut writes = Vec::new();
    for plan in &plans {
        if let Some(status) = taken_back(&plan.data, &agent.node) {
            writes.push(write(agent, PlanKey::of(plan), status));
        }
    }
    join_all(writes).await;
}

async fn all_plans(agent: &Agent) -> Result<Vec<DynamicObject>, String> {
    let resource = ApiResource::erase::<RingPlan>(&());
    let plans: Api<DynamicObject> = Api::all_with(agent.client.clone(), &resource);
    match timeout(api::DEADLINE, plans.list(&ListParams::default())).await {
        Ok(Ok(plans)) => Ok(plans.items),
        Ok(Err(error)) => Err(api::reason(&error)),
        Err(_) => Err("no answer from the API server".to_owned()),
    }
}

/// What the entry of `node` is to say instead, if it says that the member runs its layers.
fn taken_back(plan: &Value, node: &str) -> Option<MemberStatus> {
    let members = plan.get("status")?.get("members")?.as_array()?;
    let mut members = members.iter();
    let said = members.find(|member| member.get("name").and_then(Value::as_str) == Some(node))?;
    let said = MemberStatus::deserialize(said).ok()?;
    (said.state >= MemberState::Loaded).then(|| MemberStatus {
        fetched_bytes: said.fetched_bytes,
        total_bytes: said.total_bytes,
        ..member_status::status(node, &Observed::Beginning, None)
    })
}

async fn write(agent: &Agent, plan: PlanKey, status: MemberStatus) {
    let (client, counted) = (agent.client.clone(), agent.metrics.member());
    let mut writer = Writer::new(client, plan.clone(), &agent.node, counted);
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut tries = 0;
    while let Err(problem) = writer.write(status.clone()).await {
        tracing::warn!(%plan, problem, "cannot take back that its member runs here");
        tries += 1;
        if tries == TRIES {
            return;
        }
        sleep(backoff.next()).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_that_a_member_runs_is_taken_back() {
        let plan = |state: &str| {
            json!({"status": {"members": [
                {"name": "desk", "state": "Loaded"},
                {"name": "pi", "state": state, "failsAt": "desk", "fetchedBytes": 5, "totalBytes": 9},
            ]}})
        };
        for (state, runs) in [
            ("Refused", false),
            ("Failed", false),
            ("Fetching", false),
            ("Loading", false),
            ("Loaded", true),
            ("Ready", true),
            ("OfAnotherVersion", false),
        ] {
            let back = taken_back(&plan(state), "pi");
            assert_eq!(back.is_some(), runs, "{state}");
        }
        let back = taken_back(&plan("Ready"), "pi").unwrap();
        assert_eq!(
            (&*back.name, back.state, back.fails_at),
            ("pi", MemberState::Failed, None)
        );
        assert_eq!((back.fetched_bytes, back.total_bytes), (Some(5), Some(9)));
        assert!(taken_back(&plan("Ready"), "laptop").is_none());
        for other in [json!({}), json!({"status": {"members": 3}})] {
            assert!(taken_back(&other, "pi").is_none(), "{other}");
        }
    }
}
