//! Tells the operator that this agent is alive: a Lease, renewed every ten seconds with one request. It is deleted with its Node, so that a
//! machine that has left for good is forgotten. It decides nothing: the operator decides whether a machine counts as lost.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, OwnerReference};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use prima_crds::{AGENT_LEASE_PREFIX, AGENT_LEASE_SECONDS, LEAVING};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::api::{self, FIELD_MANAGER};
use super::backoff::jittered;
use super::publish_profile::owned_by_node;

const INTERVAL: Duration = Duration::from_secs(10);
/// After a failure: three tries before the Lease expires.
const RETRY: Duration = Duration::from_secs(5);

/// Renews the Lease of `node` in `namespace` for ever. `holder` is the pod's name. `leaving` becomes true when the agent was asked to end, which
/// is written at once.
pub async fn keep(
    client: Client,
    namespace: &str,
    node: &str,
    holder: &str,
    mut leaving: watch::Receiver<bool>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let name = name(node);
    // Nobody else writes it, except the agent's own predecessor on this node.
    let params = PatchParams::apply(FIELD_MANAGER).force();
    let acquired = MicroTime(Timestamp::now());
    let mut failing = false;
    let mut owner = None;
    let mut may_be_owned = true;
    let mut written = None;
    loop {
        if owner.is_none() && may_be_owned {
            owner = owned_by_node(&client, node).await.ok();
        }
        let now = MicroTime(Timestamp::now());
        let leaves = *leaving.borrow_and_update();
        let patch = lease(&name, holder, owner.as_ref(), leaves, &acquired, &now);
        let patch = Patch::Apply(patch);
        let problem = match timeout(api::DEADLINE, leases.patch(&name, &params, &patch)).await {
            Ok(Ok(lease)) => {
                // It was deleted, perhaps along with a Node that has another identity now.
                if written.is_some() && written != lease.uid() {
                    owner = None;
                }
                written = lease.uid();
                None
            }
            Ok(Err(error)) => {
                // In some clusters, changing owners needs the right to delete.
                if owner.is_some() && api::is_status(&error, 403) {
                    owner = None;
                    may_be_owned = false;
                }
                Some(api::reason(&error))
            }
            Err(_) => Some("no answer from the API server".to_owned()),
        };
        let pause = match problem {
            None if failing => {
                tracing::info!(lease = name, "the Lease is renewed again");
                failing = false;
                INTERVAL
            }
            None => INTERVAL,
            Some(problem) => {
                if !failing {
                    tracing::warn!(
                        lease = name,
                        problem,
                        "cannot renew the Lease; trying again"
                    );
                }
                failing = true;
                RETRY
            }
        };
        tokio::select! {
            () = sleep(jittered(pause)) => {}
            Ok(()) = leaving.changed() => {}
        }
    }
}

/// The Lease of the agent on `node`.
fn name(node: &str) -> String {
    format!("{AGENT_LEASE_PREFIX}{node}")
}

fn lease(
    name: &str,
    holder: &str,
    owner: Option<&OwnerReference>,
    leaves: bool,
    acquired: &MicroTime,
    renewed: &MicroTime,
) -> Value {
    let mut metadata = json!({"name": name});
    if let Some(owner) = owner {
        metadata["ownerReferences"] = json!([owner]);
    }
    // The next agent writes none, and so removes it.
    if leaves {
        metadata["annotations"] = json!({LEAVING: "true"});
    }
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": AGENT_LEASE_SECONDS,
            "acquireTime": acquired,
            "renewTime": renewed,
        },
    })
}
