//! Model: which model a user wants to be answered, and what became of it.
//!
//! The spec is the user's, the status the operator's. Six lines are enough; everything but `source` has a default. This
//! file decides what a well-formed wish is, by rules that the API server checks, so that `kubectl apply` refuses the others.

// A column is an attribute of its own, so their types repeat.
#![allow(clippy::duplicated_attributes)]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::document::is_false;
use super::model_profile::ModelProfileSpec;
use super::model_source::ModelSource;
use super::ring_plan::{ActivationDtype, FileVersion, KvDtype, Speed};

/// What the user wants.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "prima.dev",
    version = "v1alpha1",
    kind = "Model",
    namespaced,
    shortname = "pm",
    category = "prima",
    status = "ModelStatus",
    doc = "A large language model that the machines of the cluster answer together.",
    derive = "PartialEq",
    // Its Service is named after it.
    validation = Rule::new("self.metadata.name.size() <= 50 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name names a Service, too: expected a lower-case letter first, then letters, digits and '-', 50 characters at most"),
    printcolumn(name = "Model", type_ = "string", json_path = ".status.file"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.ringNodes"),
    printcolumn(name = "Tok/s", type_ = "string", json_path = ".status.tokensPerSecond"),
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Ring", type_ = "string", json_path = ".status.ring", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].message"#, priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    /// Where the model's GGUF file comes from; exactly one of the fields.
    pub source: ModelSource,
    /// Tokens that prompt and answer may have together. Absent: what the model was trained for, at most 8192.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16777216))]
    pub context_length: Option<i32>,
    /// Requests that are answered at the same time, each with memory for a whole context. Absent: 16, which share the memory of
    /// one whole context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_concurrent_requests: Option<i32>,
    /// Labels that a Node must have to take part.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub node_selector: BTreeMap<String, String>,
    /// The Node that sees prompts and answers, and serves HTTP. Absent: the fastest plan's choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub rank0: Option<String>,
    /// Number format of activations between machines. Only F32 computes to the bit what one machine would.
    #[serde(default, skip_serializing_if = "is_f32")]
    pub activation_dtype: ActivationDtype,
    /// Number format of the KV cache. Q8_0 takes 0.53 of F16's memory, and changes results a little.
    #[serde(default, skip_serializing_if = "KvDtype::is_f16")]
    pub kv_dtype: KvDtype,
    /// A key that clients have to send (`Authorization: Bearer ...`), from a Secret in the Model's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKeyRef>,
    /// How the Model's Service is reached.
    #[serde(default, skip_serializing_if = "is_cluster_ip")]
    pub service_type: ServiceType,
    /// Release the machines; the files stay in their caches.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspend: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretKeyRef {
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub enum ServiceType {
    #[default]
    ClusterIP,
    NodePort,
    LoadBalancer,
}

/// What became of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// The `metadata.generation` that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Resolved`, `Profiled`, `Planned`, `Downloaded`, `Loaded`, `Ready`, `Degraded`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// The file's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// What the file's header says, and which version of the file it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<ResolvedModel>,
    /// The generation of the RingPlan that serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_generation: Option<i64>,
    /// The ring in a line: `pi4 [0, 6) -> desk [6, 30)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<String>,
    /// Machines in the ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring_nodes: Option<i32>,
    /// Measured where rank 0 has answered, else predicted (with a `~`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<String>,
    /// What the plan promises.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Speed>,
    /// What rank 0 measured, in the middle of its last answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Speed>,
    /// Why each machine is in the ring or out of it, and what it has of its part of the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub nodes: Vec<NodeShare>,
    /// Base URL for OpenAI clients in the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedModel {
    /// The source that was read; another source in the spec is read anew.
    pub source: ModelSource,
    pub version: FileVersion,
    pub profile: ModelProfileSpec,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeShare {
    pub name: String,
    pub in_ring: bool,
    /// For people: the layers and what bounds them, or why the machine is out.
    pub why: String,
    /// Of its part of the file, what is on its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<i64>,
}

fn is_f32(value: &ActivationDtype) -> bool {
    *value == ActivationDtype::F32
}

fn is_cluster_ip(value: &ServiceType) -> bool {
    *value == ServiceType::ClusterIP
}
