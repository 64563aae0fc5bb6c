//! Model: which language model a user wants to run, and how far that is.
//!
//! The user writes the spec, the operator the status. Everything but `source` has a default. This file decides what a valid
//! spec is, by rules that the API server checks, so that `kubectl apply` refuses the others. It never decides whether a model can run
//! (that is the operator's).

// A column is an attribute of its own, so their types repeat.
#![allow(clippy::duplicated_attributes)]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::document::{is_false, is_zero};
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
    doc = "A large language model that machines of the cluster run together.",
    derive = "PartialEq",
    // Its Service is named after it.
    validation = Rule::new("self.metadata.name.size() <= 50 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name names a Service, too: expected a lower-case letter first, then letters, digits and '-', 50 characters at most"),
    printcolumn(name = "Model", type_ = "string", json_path = ".status.file"),
    printcolumn(name = "Nodes", type_ = "string", json_path = ".status.readyNodes"),
    printcolumn(name = "Tok/s", type_ = "string", json_path = ".status.tokensPerSecond"),
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Status", type_ = "string", json_path = ".status.summary"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.priority", priority = 1),
    printcolumn(name = "Ring", type_ = "string", json_path = ".status.ring", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].message"#, priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    /// Where the model's GGUF file comes from. Exactly one of the fields must be set.
    pub source: ModelSource,
    /// The most tokens that a prompt and its answer may have together. Default: what the model was trained for, but at most 8192.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16777216))]
    pub context_length: Option<i32>,
    /// How many requests are answered at the same time. Each then has memory for a whole context. Default: 16, which share the memory
    /// of one whole context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_concurrent_requests: Option<i32>,
    /// Labels that a Node must have to take part.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub node_selector: BTreeMap<String, String>,
    /// The fewest machines that run the model together, each with at least one layer. Default: 1, so that a model that one machine holds
    /// stays on that machine, which is mostly faster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub min_nodes: Option<i32>,
    /// The Node that serves HTTP. It is the only one that sees prompts and answers. Default: the one with which the ring is fastest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub rank0: Option<String>,
    /// Number format of the activations that machines send to each other. Only with F32 are results the same to the bit as on one machine.
    #[serde(default, skip_serializing_if = "is_f32")]
    pub activation_dtype: ActivationDtype,
    /// Number format of the KV cache. Q8_0 takes 53 % of the memory of F16, and changes results a little.
    #[serde(default, skip_serializing_if = "KvDtype::is_f16")]
    pub kv_dtype: KvDtype,
    /// The API keys of which clients have to send one (`Authorization: Bearer ...`): the entries of a Secret in the Model's namespace, the
    /// first 64 by name. What changes there counts within seconds. Default: none is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKeyRef>,
    /// What each API key may use. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_limits: Option<ApiKeyLimits>,
    /// How tokens are guessed, so that several come for one trip round the ring. Absent: from the text so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Speculation>,
    /// The Model's Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceWishes>,
    /// Type of the Model's Service, as Models had it first: `service.type` counts more.
    #[serde(default, skip_serializing_if = "is_cluster_ip")]
    pub service_type: ServiceType,
    /// How important the Model is beside all others of the cluster. Where the machines lack the memory for another ring, those of lower
    /// priority end for it, as few as will do. A ResourceQuota may bound it (`prima.dev/priority`). Default: 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = -1000, max = 1000))]
    pub priority: i32,
    /// Stop the model, and release its machines. Its files stay in their caches.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspend: bool,
}

impl ModelSpec {
    /// Where the draft model's file comes from, if there is to be one.
    pub fn draft(&self) -> Option<&ModelSource> {
        self.speculation.as_ref()?.draft.as_ref()
    }

    /// The type of its Service.
    pub fn service_type(&self) -> ServiceType {
        let wished = self.service.as_ref().and_then(|service| service.type_);
        wished.unwrap_or(self.service_type)
    }

    /// The port of its Service.
    pub fn service_port(&self) -> i32 {
        let wished = self.service.as_ref().and_then(|service| service.port);
        wished.unwrap_or(DEFAULT_SERVICE_PORT)
    }
}

/// HTTP's.
const DEFAULT_SERVICE_PORT: i32 = 80;

/// How clients reach the Model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceWishes {
    /// Type of the Service. Default: `ClusterIP`.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub type_: Option<ServiceType>,
    /// Port of the Service. Default: 80, which a LoadBalancer may not have for itself: on k3s it is Traefik's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// Annotations of the Service, for what hands out addresses and names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Speculation {
    /// A small model of the same vocabulary, which guesses the next tokens; the Model verifies each guess. All of it runs at rank 0. This says where
    /// its GGUF file comes from; set exactly one of the fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<ModelSource>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretKeyRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The entry that has the API key. Default: every entry has one, which goes by the entry's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub key: Option<String>,
}

/// What one API key may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiKeyLimits {
    /// Tokens that the ring computes for the key in a minute, on average: those of prompts, as far as they were not kept from earlier
    /// requests, and of answers. Of a request that is cut off, the whole prompt counts. A key that has used more is refused for as long as
    /// that lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub tokens_per_minute: Option<i32>,
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

impl ServiceType {
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClusterIP => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
        }
    }
}

/// How far the Model is, as the operator sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// The `metadata.generation` that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// One of each type: `Resolved`, `Profiled`, `Planned`, `Downloaded`, `Loaded`, `Ready`, `Degraded`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// For people: `Ready`, or the reason why it is not, with percent while it is fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// Name of the model's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// What the file's header says, and which version of the file it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<ResolvedModel>,
    /// `spec.generation` of the RingPlan that answers requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_generation: Option<i64>,
    /// The ring in one line, with the layers of each machine: `pi4 [0, 6) -> desk [6, 30)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<String>,
    /// How many machines are in the ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring_nodes: Option<i32>,
    /// How many of them run their layers, and how many there are: `2/3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_nodes: Option<String>,
    /// Tokens per second of one answer: as rank 0 measured it, or, before its first answers, as predicted (with a `~`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<String>,
    /// The speed that the plan predicts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Speed>,
    /// The speed that rank 0 measured: medians of its last answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Speed>,
    /// Of a mixture whose experts are read from disk: of those that tokens would lack if they chose all alike, those that they did lack, in
    /// percent. Measured by the last ring that could; new plans count on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub expert_miss_percent: Option<i32>,
    /// Of each machine: whether it is in the ring, and why; how much of its part of the file it has.
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
    /// The source that was read. When the spec names another one, that is read.
    pub source: ModelSource,
    /// The version of the file.
    pub version: FileVersion,
    /// What the file's header says of the model.
    pub profile: ModelProfileSpec,
    /// The same of the draft model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<ResolvedFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedFile {
    pub source: ModelSource,
    pub version: FileVersion,
    pub profile: ModelProfileSpec,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeShare {
    /// Name of the Node.
    pub name: String,
    /// Whether it is in the ring.
    pub in_ring: bool,
    /// For people: which layers it has and why not more, or why it is not in the ring.
    pub why: String,
    /// Bytes of its part of the file that are on its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<i64>,
    /// Bytes of its part of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<i64>,
}

fn is_f32(value: &ActivationDtype) -> bool {
    *value == ActivationDtype::F32
}

fn is_cluster_ip(value: &ServiceType) -> bool {
    *value == ServiceType::ClusterIP
}
