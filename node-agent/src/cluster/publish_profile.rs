//! The machine's NodeProfile in the cluster: created where it is absent, owned by its Node, its status written when the measurements have
//! changed.
//!
//! Decides when to write: everything that changes together goes into one write. Refuses to write the spec, which
//! belongs to the machine's owner, and to decide which change matters (whoever changes the status has decided that).

use std::mem;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource as _, ResourceExt as _};
use prima_crds::v1alpha1::node_profile::{
    AgentProfile, GpuProfile, LinkProfile, LocalModel, MemoryProfile, NodeProfile, NodeProfileSpec,
    NodeProfileStatus,
};
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::time::{error::Elapsed, sleep, timeout};

use super::api::{self, FIELD_MANAGER};
use super::backoff::Backoff;
use super::metrics::{Established, Step};
use crate::profile::links::LOOPBACK;

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("cannot read Node {node}, which owns what this agent writes: {reason}")]
    Node { node: String, reason: String },
    #[error(
        "there is no Node {node}: --node (NODE_NAME) must be the name of the Node that this agent runs on"
    )]
    NoNode { node: String },
    #[error("cannot read NodeProfile {node}: {reason}")]
    Read { node: String, reason: String },
    #[error("cannot create NodeProfile {node}: {reason}")]
    Create { node: String, reason: String },
    #[error("cannot write the status of NodeProfile {node}: {reason}")]
    Write { node: String, reason: String },
    #[error("NodeProfile {node} is gone")]
    Gone { node: String },
    #[error("no answer from the API server")]
    Deadline(#[from] Elapsed),
}

/// What changes within this time is written together.
const SETTLING: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Writes `profile` whenever it changed, for ever. `deleted` tells that somebody deleted the NodeProfile.
pub async fn publish(
    client: Client,
    node: &str,
    mut profile: watch::Receiver<NodeProfileStatus>,
    deleted: Arc<Notify>,
    established: Established,
) {
    let profiles: Api<NodeProfile> = Api::all(client.clone());
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut exists = false;
    loop {
        let status = profile.borrow_and_update().clone();
        let written = async {
            if !exists {
                create(&client, &profiles, node).await?;
            }
            write(&profiles, node, &status).await
        };
        match written.await {
            Ok(()) => {
                exists = true;
                backoff.reset();
                established.done(Step::Profile);
            }
            Err(error) => {
                exists &= !matches!(error, PublishError::Gone { .. });
                tracing::warn!(problem = prima_crds::error_chain(&error), "trying again");
                sleep(backoff.next()).await;
                continue;
            }
        }
        tokio::select! {
            changed = profile.changed() => if changed.is_err() {
                return;
            },
            () = deleted.notified() => exists = false,
        }
        sleep(SETTLING).await;
    }
}

/// The links and the machine's model files that its NodeProfile has from before. A new agent must not make the planner forget them: it
/// would plan around this machine until the agent has looked again.
pub async fn published_before(
    client: Client,
    node: &str,
) -> Result<(Vec<LinkProfile>, Vec<LocalModel>), PublishError> {
    let profiles: Api<NodeProfile> = Api::all(client);
    let known = match timeout(api::DEADLINE, profiles.get_opt(node)).await? {
        Ok(known) => known,
        // It has another version or cannot be read now: they are measured again.
        Err(error) => {
            return Err(PublishError::Read {
                node: node.to_owned(),
                reason: api::reason(&error),
            });
        }
    };
    let Some(status) = known.and_then(|profile| profile.status) else {
        return Ok(Default::default());
    };
    let mut links = status.links;
    links.retain(|link| link.to != LOOPBACK);
    let models = status.agent.map(|agent| agent.local_models);
    Ok((links, models.unwrap_or_default()))
}

/// What others must know of this agent to reach it, and what people see of the machine at a glance.
pub fn agent_profile(address: IpAddr, status: &NodeProfileStatus) -> AgentProfile {
    AgentProfile {
        address: address.to_string(),
        public_key_sha256: None,
        memory: memory_text(&status.memory),
        disk: disk_text(status.disk.sequential_read_bytes_per_second),
        gpus: gpus_text(&status.gpus),
        local_models: Vec::new(),
    }
}

/// Puts what was measured anew in the place of what was before. What others have found out stays: the links, and what the agent tells of itself.
pub fn replace_measured(status: &mut NodeProfileStatus, measured: NodeProfileStatus) {
    let before = mem::replace(status, measured);
    let mut links = before.links;
    links.retain(|link| link.to != LOOPBACK);
    status.links.extend(links);
    status.agent = before.agent.map(|agent| AgentProfile {
        memory: memory_text(&status.memory),
        disk: disk_text(status.disk.sequential_read_bytes_per_second),
        gpus: gpus_text(&status.gpus),
        ..agent
    });
}

/// `14.2 of 15.5 GiB`.
pub fn memory_text(memory: &MemoryProfile) -> String {
    let gibibytes = |bytes: i64| bytes as f64 / f64::from(1 << 30);
    format!(
        "{:.1} of {:.1} GiB",
        gibibytes(memory.available_bytes),
        gibibytes(memory.total_bytes)
    )
}

/// `3.1 GB/s`.
fn disk_text(bytes_per_second: i64) -> String {
    match bytes_per_second {
        1_000_000_000.. => format!("{:.1} GB/s", bytes_per_second as f64 / 1e9),
        _ => format!("{:.0} MB/s", bytes_per_second as f64 / 1e6),
    }
}

/// `RTX 4090, Radeon 780M (unusable)`.
pub fn gpus_text(gpus: &[GpuProfile]) -> Option<String> {
    let text = gpus.iter().map(|gpu| match gpu.unusable {
        Some(_) => format!("{} (unusable)", gpu.name),
        None => gpu.name.clone(),
    });
    (!gpus.is_empty()).then(|| text.collect::<Vec<_>>().join(", "))
}

/// The reference that deletes an object with its Node. The Node does not control it, and no deletion waits for it.
pub async fn owned_by_node(client: &Client, node: &str) -> Result<OwnerReference, PublishError> {
    let nodes: Api<Node> = Api::all(client.clone());
    match timeout(api::DEADLINE, nodes.get_opt(node)).await? {
        Ok(Some(owner)) => Ok(OwnerReference {
            api_version: Node::api_version(&()).into_owned(),
            kind: Node::kind(&()).into_owned(),
            name: node.to_owned(),
            uid: owner.uid().unwrap_or_default(),
            controller: None,
            block_owner_deletion: None,
        }),
        Ok(None) => Err(PublishError::NoNode {
            node: node.to_owned(),
        }),
        Err(error) => Err(PublishError::Node {
            node: node.to_owned(),
            reason: api::reason(&error),
        }),
    }
}

async fn create(
    client: &Client,
    profiles: &Api<NodeProfile>,
    node: &str,
) -> Result<(), PublishError> {
    let mut profile = NodeProfile::new(node, NodeProfileSpec::default());
    // Never owned by a pod: what the owner of the machine wrote into the spec must outlive all pods.
    profile.metadata.owner_references = Some(vec![owned_by_node(client, node).await?]);
    let params = PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    };
    match timeout(api::DEADLINE, profiles.create(&params, &profile)).await? {
        Ok(_) => Ok(()),
        // There is one already.
        Err(error) if api::is_status(&error, 409) => Ok(()),
        Err(error) => Err(PublishError::Create {
            node: node.to_owned(),
            reason: api::reason(&error),
        }),
    }
}

async fn write(
    profiles: &Api<NodeProfile>,
    node: &str,
    status: &NodeProfileStatus,
) -> Result<(), PublishError> {
    let patch = Patch::Apply(json!({
        "apiVersion": NodeProfile::api_version(&()),
        "kind": NodeProfile::kind(&()),
        "metadata": {"name": node},
        "status": status,
    }));
    let params = PatchParams::apply(FIELD_MANAGER).force();
    match timeout(api::DEADLINE, profiles.patch_status(node, &params, &patch)).await? {
        Ok(_) => Ok(()),
        Err(error) if api::is_status(&error, 404) => Err(PublishError::Gone {
            node: node.to_owned(),
        }),
        Err(error) => Err(PublishError::Write {
            node: node.to_owned(),
            reason: api::reason(&error),
        }),
    }
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfileSpec};
    use prima_crds::v1alpha1::node_profile::LocalModel;
    use prima_crds::v1alpha1::ring_plan::FileVersion;
    use prima_model::ModelPart;

    use super::*;

    fn status() -> NodeProfileStatus {
        let yaml = include_str!("../../../crds/tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
        profile.status.unwrap()
    }

    #[test]
    fn people_read_memory_and_disk_at_a_glance() {
        let mut status = status();
        status.memory.total_bytes = 16_643_100_000;
        status.memory.available_bytes = 15_247_133_000;
        status.disk.sequential_read_bytes_per_second = 3_140_000_000;
        let agent = agent_profile(IpAddr::from([10, 0, 0, 7]), &status);
        assert_eq!(
            (&*agent.memory, &*agent.disk, &*agent.address),
            ("14.2 of 15.5 GiB", "3.1 GB/s", "10.0.0.7")
        );
        assert_eq!(disk_text(87_400_000), "87 MB/s");
        // That one cannot be used; beside it there is another.
        assert_eq!(agent.gpus.as_deref(), Some("Some GPU (unusable)"));
        let mut usable = status.gpus[0].clone();
        usable.unusable = None;
        usable.name = "RTX 3060".into();
        status.gpus.insert(0, usable);
        let all = gpus_text(&status.gpus);
        assert_eq!(all.as_deref(), Some("RTX 3060, Some GPU (unusable)"));
        assert_eq!(gpus_text(&[]), None);
    }

    #[test]
    fn a_profile_among_ten_machines_is_under_8_kib() {
        let mut status = status();
        let throughput = status.cpu.throughput[0].clone();
        status.cpu.throughput = vec![throughput; crate::profile::formats()];
        let parts: Vec<String> = ModelPart::ALL.iter().map(ToString::to_string).collect();
        status.parts = parts.clone();
        status.links = (0..10)
            .map(|machine| LinkProfile {
                to: format!("machine-{machine}.home.example"),
                latency_nanoseconds: 123_456,
                bytes_per_second: 117_123_456,
            })
            .collect();
        let weights = FormatWeights {
            format: "Q4_K".into(),
            weights: 12_345_678_901,
            bytes: 6_944_444_381,
        };
        let profile = ModelProfileSpec {
            architecture: "qwen2".into(),
            parts: parts[..16].to_vec(),
            size_bytes: 8_988_110_976,
            layers: 48,
            hidden_size: 5120,
            vocabulary_size: 152_064,
            vocabulary_marks: (144..149)
                .map(|k| format!("{}:01234567", 1024 * k))
                .collect(),
            trained_context_length: 131_072,
            kv_bytes_per_position_and_layer: 4096,
            quantized_kv_bytes_per_position_and_layer: 2176,
            latent_heads: 0,
            windowed_layers: 40,
            attention_window: 1024,
            full_attention_layers: (1..=8).map(|n| 6 * n - 1).collect(),
            layer_weights: vec![weights.clone(); 3],
            expert_weights: vec![weights.clone(); 2],
            largest_part_bytes: 1 << 28,
            experts: 128,
            experts_per_token: 8,
            output_weights: vec![weights],
            embedding_bytes: 437_944_320,
        };
        let mut agent = agent_profile(IpAddr::from([192, 168, 178, 200]), &status);
        agent.public_key_sha256 = Some("0".repeat(64));
        agent.local_models = (0..2)
            .map(|number| LocalModel {
                path: format!("/srv/models/qwen2.5-14b-instruct-q4_k_m-{number}.gguf"),
                profile: Some(profile.clone()),
                version: Some(FileVersion {
                    header_sha256: "0".repeat(64),
                    ..FileVersion::default()
                }),
                problem: None,
            })
            .collect();
        status.agent = Some(agent);
        let bytes = serde_json::to_string(&json!({"status": status}))
            .unwrap()
            .len();
        assert!(bytes < 8 << 10, "{bytes} bytes");
    }
}
