//! RingPlan: who runs which layers, in which order, in how many rounds.
//!
//! A plan is immutable and complete: it leaves the agents that execute it no choices. It carries a generation,
//! by which agents refuse senders that still follow an older plan. This file decides what a well-formed plan is
//! ([`RingPlanSpec::validate`]); it never decides which plan is good (that is the planner's).

// A column is an attribute of its own, so their types repeat.
#![allow(clippy::duplicated_attributes)]

use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::document::{self, DocumentError, is_false, is_zero};
use super::model_source::ModelSource;

/// The plan of one ring for one model.
#[derive(CustomResource, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "prima.dev",
    version = "v1alpha1",
    kind = "RingPlan",
    namespaced,
    shortname = "rp",
    category = "prima",
    status = "RingPlanStatus",
    doc = "Which machine runs which layers of a model. Written by the operator, executed by the agents.",
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.model.name"),
    printcolumn(name = "Generation", type_ = "integer", json_path = ".spec.generation"),
    printcolumn(name = "Rounds", type_ = "integer", json_path = ".spec.rounds"),
    // Of a list, a column shows the first only.
    printcolumn(
        name = "Rank 0",
        type_ = "string",
        json_path = ".spec.members[0].name"
    ),
    printcolumn(name = "Port", type_ = "integer", json_path = ".spec.httpPort"),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[x_kube(validation = Rule::new("self == oldSelf")
    .message("a RingPlan does not change; a new plan is a new RingPlan"))]
#[serde(rename_all = "camelCase")]
pub struct RingPlanSpec {
    /// Each new plan of a model has a higher number. Members refuse frames of other generations.
    pub generation: i64,
    /// The model that the ring runs.
    pub model: PlannedModel,
    /// The most positions that one sequence may have, prompt and answer together.
    pub context_length: i32,
    /// The most sequences that are computed at the same time.
    pub max_concurrent_requests: i32,
    /// Memory for the KV cache, in whole contexts. All sequences share it. What they do not use holds earlier sequences, so that later
    /// requests can continue them.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub kv_contexts: i32,
    /// Number format of activations between members.
    #[serde(default)]
    pub activation_dtype: ActivationDtype,
    /// A small model with the same vocabulary, which runs at rank 0 and guesses tokens. The ring checks several guesses at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<PlannedDraft>,
    /// Number format of the KV cache.
    #[serde(default, skip_serializing_if = "KvDtype::is_f16")]
    pub kv_dtype: KvDtype,
    /// How often a token's activation goes round the ring (k). Every member has one window in each round.
    pub rounds: i32,
    /// The members in the order of the ring. The first is rank 0, and the last sends back to it.
    #[schemars(length(max = 256))]
    pub members: Vec<RingMember>,
    /// The speed that the planner expects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Speed>,
    /// Port at which rank 0 serves HTTP. Absent in a local ring: its command line says where.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub http_port: Option<i32>,
    /// HTTP clients have to send an API key. Which ones there are stands in the annotation `prima.dev/api-keys`, and may change.
    #[serde(default, skip_serializing_if = "is_false")]
    pub api_key_required: bool,
    /// SHA-256 of each API key that HTTP clients may send, in hexadecimal, as the first operators wrote them. If there is any, a key is
    /// asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 64)))]
    pub api_key_sha256: Vec<String>,
}

/// The model file and what a member must find in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannedModel {
    /// The name that clients ask for. A draft model has one for people only.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The GGUF file: its path on every member that needs it, or its name if members fetch it.
    #[schemars(length(max = 2000))]
    pub file: String,
    /// Size of the file in bytes. A file of another size is another model.
    pub size_bytes: i64,
    /// Number of transformer layers (L).
    pub layers: i32,
    /// Where the file comes from. Absent: every member has it already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ModelSource>,
    /// Which version of the file it is. A ring never mixes versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<FileVersion>,
}

impl PlannedModel {
    /// A model whose file every member has already, in whatever version.
    pub fn new(
        name: impl Into<String>,
        file: impl Into<String>,
        size_bytes: i64,
        layers: i32,
    ) -> Self {
        Self {
            name: name.into(),
            file: file.into(),
            size_bytes,
            layers,
            source: None,
            version: None,
        }
    }
}

/// The model that guesses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannedDraft {
    /// Its file.
    pub model: PlannedModel,
    /// Bytes of rank 0's `memoryBytes` that it takes: for its weights, and for as many contexts as the ring has.
    pub memory_bytes: i64,
}

/// What tells one version of a model's file from another. Fields that the file's server did not tell are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileVersion {
    /// SHA-256 of the GGUF header, in hexadecimal. All members must have the same. For a model in several files: of all their headers, one
    /// after the other.
    #[schemars(length(max = 64))]
    pub header_sha256: String,
    /// The file's ETag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 500))]
    pub etag: Option<String>,
    /// SHA-256 of the whole file, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub sha256: Option<String>,
    /// The commit that the source's `revision` meant when it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 100))]
    pub commit: Option<String>,
    /// If a model in several files is fetched: its files in order. Each has its own `etag` and `sha256`, and the model has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub parts: Vec<PartVersion>,
}

/// One file of a model in several files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PartVersion {
    /// Size in bytes.
    #[schemars(range(min = 0))]
    pub size_bytes: i64,
    /// The file's ETag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 500))]
    pub etag: Option<String>,
    /// SHA-256 of the file, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub sha256: Option<String>,
}

/// One member of the ring.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RingMember {
    /// Unique in the ring. In a cluster it is the Node's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// `host:port` where the member's ring service listens.
    #[schemars(length(max = 300))]
    pub address: String,
    /// SHA-256 of its agent's public key (DER of its SubjectPublicKeyInfo, RFC 5280), in hexadecimal. If the members have it, they talk
    /// over TLS 1.3, and each lets only its neighbours' keys in. Either all have it or none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"))]
    pub public_key_sha256: Option<String>,
    /// Its layers: one window for each of the `rounds`. A window may be empty (`first` = `last`).
    #[schemars(length(max = 1024))]
    pub windows: Vec<PlannedWindow>,
    /// Whether the output head runs on the GPU. Only rank 0 has one.
    #[serde(default, skip_serializing_if = "is_false")]
    pub output_head_on_gpu: bool,
    /// Passes of at least so many rows, such as those of long prompts, run on the GPU through the member's other layers, too: their weights are
    /// copied there for the pass. After long conversations it takes more rows, and what has no room there stays with the processor. Absent: they
    /// never run there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub gpu_from_rows: Option<i32>,
    /// How many members of this ring are on the same machine. They share its memory evenly.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub members_on_machine: i32,
    /// Bytes of weights that the planner expects the member to read from its disk for every token. It can be compared with what the member
    /// does read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_token: Option<i64>,
    /// Bytes of weights that it reads ahead in each round, while other members work. If it has more or less memory than planned, this
    /// changes in proportion to what does not fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_ahead_bytes: Option<i64>,
    /// Bytes of the machine's memory that the plan counts on: weights that stay there, KV cache, buffers. Other plans leave these to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<i64>,
    /// Bytes of the GPU's own memory that the plan counts on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory_bytes: Option<i64>,
    /// Bytes of both that its KV cache takes at most, of all requests together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bytes: Option<i64>,
    /// For people: why it has these layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2000))]
    pub why: Option<String>,
}

/// How fast answers come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Speed {
    /// From one token to the next (TPOT).
    pub token_microseconds: i64,
    /// From the request to the first token (TTFT).
    pub first_token_microseconds: i64,
}

/// The layers from `first` up to `last`, which is excluded. The last `gpuLayers` of them run on the GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannedWindow {
    /// The first layer.
    pub first: i32,
    /// The layer behind the last.
    pub last: i32,
    /// How many of them, the last ones, run on the GPU.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpu_layers: i32,
}

/// Number format of activations between members. Only with F32 does a ring compute the same bits as one machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ActivationDtype {
    #[default]
    F32,
    BF16,
    F16,
}

impl ActivationDtype {
    /// Bytes of one number on the wire.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }
}

/// Number format of keys and values in memory. On GPUs it is always F16, and so it is for heads whose size is no multiple of 32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KvDtype {
    #[default]
    F16,
    /// A byte for each number, and an F16 scale for each 32 numbers: 53 % of the memory of F16.
    Q8_0,
}

impl KvDtype {
    /// Whether it is what documents without the field mean.
    pub fn is_f16(&self) -> bool {
        *self == Self::F16
    }
}

/// The most positions of a prompt that go round the ring together: the rows of activations in one frame. Longer prompts go in chunks of
/// this size, or of less beside others' tokens, several of them in flight.
pub const CHUNK_POSITIONS: usize = 128;

/// Positions whose keys and values lie together: a cache grows and shrinks by so many.
pub const KV_BLOCK_POSITIONS: usize = 64;

/// Rows that go through the output head on a GPU at once by Vulkan, and whose logits it holds.
pub const GPU_HEAD_ROWS: usize = 32;

/// Rows of drafts on the ring at a time, of all sequences: rank 0 holds the logits of each.
pub const DRAFTED_ROWS: usize = 64;

/// Requests that share one context's memory, where nobody says how many get a context each.
pub const DEFAULT_CONCURRENT_REQUESTS: i32 = 16;

/// How far the members are with the plan. Each agent writes its own entry of `members`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RingPlanStatus {
    /// What each member's agent says of its part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub members: Vec<MemberStatus>,
}

/// How far one member is with the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberStatus {
    /// Name of the member, as in the plan.
    #[schemars(length(max = 253))]
    pub name: String,
    /// How far it is.
    pub state: MemberState,
    /// For people: what it does, or what is wrong and what would help.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1000))]
    pub message: String,
    /// Only of rank 0: the member at which the ring fails. It is not reached, or cannot compute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub fails_at: Option<String>,
    /// After a failure: how long the agent waits before it tries again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_seconds: Option<i64>,
    /// Bytes of its part of the file that are on its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<i64>,
    /// Bytes of its part of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<i64>,
    /// Only of rank 0: medians of its last answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Speed>,
    /// Only of rank 0, where experts are read from disk: of those that tokens would lack if they chose all alike, those that they did lack, in
    /// percent. Below 100 where tokens come back to the experts that they used lately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub expert_miss_percent: Option<i32>,
}

/// How far a member is: `Fetching`, `Loading`, `Loaded`; rank 0 then becomes `Ready`. `Refused`: this machine cannot run the plan.
/// `Failed`: something went wrong, and the agent tries again.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum MemberState {
    /// This machine cannot run the plan.
    Refused,
    /// Something went wrong. The agent tries again.
    Failed,
    /// The machine fetches its part of the file.
    Fetching,
    /// The weights are there, and the process starts.
    Loading,
    /// The process runs its layers and waits for its neighbours.
    Loaded,
    /// Only of rank 0: a token went round the ring.
    Ready,
}

/// Why a document is not a valid plan.
#[derive(Debug, thiserror::Error)]
pub enum RingPlanError {
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("RingPlan field {field}: {problem}")]
    Field { field: String, problem: String },
}

/// Tokens that an answer may still get when its ring is to end.
const TOKENS_AT_END: u32 = 64;
const LEAST_DRAIN: Duration = Duration::from_secs(30);
const MOST_DRAIN: Duration = Duration::from_secs(90);
/// An hour; no ring is as slow.
const MAX_TOKEN_MICROSECONDS: u64 = 3_600_000_000;

/// Bounds that keep a hostile plan from asking for absurd allocations.
const MAX_MEMBERS: usize = 256;
const MAX_ROUNDS: i32 = 1024;
const MAX_LAYERS: i32 = 4096;
const MAX_CONTEXT: i32 = 1 << 24;
const MAX_CONCURRENT_REQUESTS: i32 = 4096;

impl RingPlan {
    /// Reads a plan from YAML (or JSON) and validates it. `name` (a path) is used in errors.
    pub fn from_yaml(name: &str, text: &str) -> Result<Self, RingPlanError> {
        let plan: Self = document::read(name, "RingPlan", text)?;
        plan.spec.validate()?;
        Ok(plan)
    }
}

impl RingPlanSpec {
    /// A plan of the first generation, for one request at a time. Optional fields are absent. It is not validated.
    pub fn new(model: PlannedModel, context_length: i32, members: Vec<RingMember>) -> Self {
        Self {
            generation: 1,
            model,
            context_length,
            max_concurrent_requests: 1,
            kv_contexts: 1,
            activation_dtype: ActivationDtype::F32,
            draft: None,
            kv_dtype: KvDtype::F16,
            rounds: members.first().map_or(1, |rank0| rank0.windows.len()) as i32,
            members,
            predicted: None,
            http_port: None,
            api_key_required: false,
            api_key_sha256: Vec::new(),
        }
    }

    /// How long running answers have when the ring is to end: time for 64 tokens, but 30 s at least, and 90 s at most, as agents' pods have no
    /// more (the chart's `agent.terminationGracePeriodSeconds`).
    pub fn drain_limit(&self) -> Duration {
        (TOKENS_AT_END * self.token_time()).clamp(LEAST_DRAIN, MOST_DRAIN)
    }

    /// From one token to the next, as planned; zero if the plan does not say.
    pub fn token_time(&self) -> Duration {
        let microseconds = self.predicted.map_or(0, |speed| speed.token_microseconds);
        Duration::from_micros(microseconds.unsigned_abs().min(MAX_TOKEN_MICROSECONDS))
    }

    /// A plan for members `m0`, `m1`, ... at `addresses`. `ends` says at which layers their windows end, in the order in which a token
    /// meets them: round by round, member by member. It is not validated.
    pub fn cut(
        model: PlannedModel,
        context_length: i32,
        addresses: &[String],
        ends: &[i32],
    ) -> Self {
        let window = |index: usize| PlannedWindow {
            first: if index == 0 { 0 } else { ends[index - 1] },
            last: ends[index],
            gpu_layers: 0,
        };
        let count = addresses.len();
        let members = addresses.iter().enumerate().map(|(rank, address)| {
            let windows = (rank..ends.len()).step_by(count).map(window).collect();
            RingMember {
                members_on_machine: count as i32,
                ..RingMember::new(format!("m{rank}"), address.clone(), windows)
            }
        });
        Self::new(model, context_length, members.collect())
    }

    /// Checks everything that an executor relies on: counts within bounds, unique names, and windows that cover
    /// layers `0..layers` once, in ring order, round after round.
    pub fn validate(&self) -> Result<(), RingPlanError> {
        self.check_numbers()?;
        self.check_api_keys()?;
        self.check_models()?;
        self.check_members()?;
        self.check_public_keys()?;
        self.check_windows()
    }

    fn check_numbers(&self) -> Result<(), RingPlanError> {
        let context = self.context_length.into();
        let (requests, contexts) = (self.max_concurrent_requests.into(), self.kv_contexts.into());
        let most_requests = MAX_CONCURRENT_REQUESTS.into();
        let members = self.members.len() as i64;
        let port = self.http_port.unwrap_or(1).into();
        bounded("generation", self.generation, 1, i64::MAX)?;
        bounded("contextLength", context, 1, MAX_CONTEXT.into())?;
        bounded("maxConcurrentRequests", requests, 1, most_requests)?;
        bounded("kvContexts", contexts, 1, most_requests)?;
        bounded("rounds", self.rounds.into(), 1, MAX_ROUNDS.into())?;
        bounded("members (count)", members, 1, MAX_MEMBERS as i64)?;
        bounded("httpPort", port, 1, u16::MAX.into())
    }

    fn check_api_keys(&self) -> Result<(), RingPlanError> {
        let is_digest = |digest: &String| {
            digest.len() == 64 && digest.bytes().all(|digit| digit.is_ascii_hexdigit())
        };
        let mut digests = self.api_key_sha256.iter();
        match digests.position(|digest| !is_digest(digest)) {
            None => Ok(()),
            Some(number) => Err(field_error(
                &format!("apiKeySha256[{number}]"),
                "expected 64 hexadecimal digits, the SHA-256 of a key".into(),
            )),
        }
    }

    fn check_models(&self) -> Result<(), RingPlanError> {
        let mut models = vec![("model", &self.model)];
        if let Some(draft) = &self.draft {
            models.push(("draft.model", &draft.model));
            bounded("draft.memoryBytes", draft.memory_bytes, 0, i64::MAX)?;
        }
        for (field, model) in models {
            let of = |name| format!("{field}.{name}");
            bounded(&of("sizeBytes"), model.size_bytes, 1, i64::MAX)?;
            bounded(&of("layers"), model.layers.into(), 1, MAX_LAYERS.into())?;
            if model.file.is_empty() {
                return Err(field_error(&of("file"), "must name the GGUF file".into()));
            }
        }
        Ok(())
    }

    fn check_members(&self) -> Result<(), RingPlanError> {
        let mut names = HashSet::new();
        for (rank, member) in self.members.iter().enumerate() {
            let field = |name| format!("members[{rank}].{name}");
            if member.name.is_empty() || !names.insert(&member.name) {
                let problem = format!("{:?} must be non-empty and unique in the ring", member.name);
                return Err(field_error(&field("name"), problem));
            }
            let (sharing, most) = (member.members_on_machine, self.members.len() as i64);
            bounded(&field("membersOnMachine"), sharing.into(), 1, most)?;
            for (name, bytes) in [
                ("readBytesPerToken", member.read_bytes_per_token),
                ("readAheadBytes", member.read_ahead_bytes),
                ("kvBytes", member.kv_bytes),
            ] {
                bounded(&field(name), bytes.unwrap_or(0), 0, i64::MAX)?;
            }
            let rows = member.gpu_from_rows.unwrap_or(1).into();
            bounded(&field("gpuFromRows"), rows, 1, i32::MAX.into())?;
            let (windows, rounds) = (member.windows.len(), self.rounds);
            if windows != rounds as usize {
                let problem =
                    format!("{windows} windows, expected one for each of the {rounds} rounds");
                return Err(field_error(&field("windows"), problem));
            }
            if member.output_head_on_gpu && rank > 0 {
                let problem = "only rank 0 has an output head".to_owned();
                return Err(field_error(&field("outputHeadOnGpu"), problem));
            }
        }
        Ok(())
    }

    /// That no hop of a ring is plain where another is encrypted.
    fn check_public_keys(&self) -> Result<(), RingPlanError> {
        let encrypted = self.is_encrypted();
        for (rank, member) in self.members.iter().enumerate() {
            let problem = match &member.public_key_sha256 {
                Some(key) if !document::is_sha256(key) => {
                    "expected 64 hexadecimal digits in lower case, the SHA-256 of a public key"
                }
                key if key.is_some() != encrypted => {
                    "expected of all members or of none, found of some"
                }
                _ => continue,
            };
            let field = format!("members[{rank}].publicKeySha256");
            return Err(field_error(&field, problem.into()));
        }
        Ok(())
    }

    /// Whether its members know each other by their keys, and talk over TLS.
    pub fn is_encrypted(&self) -> bool {
        let rank0 = self.members.first();
        rank0.is_some_and(|rank0| rank0.public_key_sha256.is_some())
    }

    /// That each layer is in one window, in ring order, round after round.
    fn check_windows(&self) -> Result<(), RingPlanError> {
        let mut next = 0;
        for round in 0..self.rounds as usize {
            for (rank, member) in self.members.iter().enumerate() {
                let window = &member.windows[round];
                let field = format!("members[{rank}].windows[{round}]");
                let PlannedWindow {
                    first,
                    last,
                    gpu_layers,
                } = *window;
                if first != next || last < first {
                    let problem = format!(
                        "layers {first}..{last} do not continue at layer {next}; windows must cover every layer once, in ring order, round after round"
                    );
                    return Err(field_error(&field, problem));
                }
                if !(0..=last - first).contains(&gpu_layers) {
                    let problem =
                        format!("gpuLayers is {gpu_layers}, expected 0..={}", last - first);
                    return Err(field_error(&field, problem));
                }
                next = last;
            }
        }
        if next == self.model.layers {
            return Ok(());
        }
        let problem = format!(
            "the windows end at layer {next}, but the model has {} layers",
            self.model.layers
        );
        Err(field_error("members", problem))
    }

    /// The rank of the member called `name`.
    pub fn rank_of(&self, name: &str) -> Option<usize> {
        self.members.iter().position(|member| member.name == name)
    }
}

impl RingMember {
    /// A member that is alone on its machine. Nothing is said of its memory.
    pub fn new(name: String, address: String, windows: Vec<PlannedWindow>) -> Self {
        Self {
            name,
            address,
            public_key_sha256: None,
            windows,
            output_head_on_gpu: false,
            gpu_from_rows: None,
            members_on_machine: 1,
            read_bytes_per_token: None,
            read_ahead_bytes: None,
            memory_bytes: None,
            gpu_memory_bytes: None,
            kv_bytes: None,
            why: None,
        }
    }

    /// The host of its address; an IPv6 address without its brackets.
    pub fn host(&self) -> Option<&str> {
        let (host, _) = self.address.rsplit_once(':')?;
        Some(host.trim_matches(['[', ']']))
    }
}

impl PlannedWindow {
    /// The window's layers. Only for validated plans, whose bounds are not negative.
    pub fn layers(&self) -> Range<usize> {
        self.first as usize..self.last as usize
    }
}

fn bounded(field: &str, value: i64, low: i64, high: i64) -> Result<(), RingPlanError> {
    match (low..=high).contains(&value) {
        true => Ok(()),
        false => {
            let problem = format!("{value} is outside {low}..={high}");
            Err(field_error(field, problem))
        }
    }
}

fn field_error(field: &str, problem: String) -> RingPlanError {
    RingPlanError::Field {
        field: format!("spec.{field}"),
        problem,
    }
}

fn one() -> i32 {
    1
}

fn is_one(value: &i32) -> bool {
    *value == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(windows: &[&[(i32, i32)]]) -> RingPlanSpec {
        let model = PlannedModel::new("tiny", "/models/tiny.gguf", 1024, 6);
        let window = |&(first, last): &(i32, i32)| PlannedWindow {
            first,
            last,
            gpu_layers: 0,
        };
        let members = windows.iter().enumerate().map(|(rank, windows)| {
            let address = format!("127.0.0.1:{}", 7000 + rank);
            let windows = windows.iter().map(window).collect();
            RingMember::new(format!("m{rank}"), address, windows)
        });
        RingPlanSpec::new(model, 128, members.collect())
    }

    #[test]
    fn a_slow_ring_has_longer_to_end() {
        let model = PlannedModel::new("m", "m.gguf", 1, 1);
        let mut plan = RingPlanSpec::new(model, 128, Vec::new());
        assert_eq!(plan.drain_limit(), Duration::from_secs(30));
        for (token, seconds) in [
            (10_000, 30),
            (1_000_000, 64),
            (20_000_000, 90),
            (i64::MAX, 90),
        ] {
            plan.predicted = Some(Speed {
                token_microseconds: token,
                first_token_microseconds: 0,
            });
            assert_eq!(plan.drain_limit(), Duration::from_secs(seconds), "{token}");
        }
    }

    #[test]
    fn a_plan_is_cut_where_it_is_told() {
        let addresses = ["10.0.0.1:1".to_owned(), "10.0.0.2:1".to_owned()];
        let model = plan(&[&[(0, 6)]]).model;
        let cut = RingPlanSpec::cut(model, 128, &addresses, &[1, 4, 4, 6]);
        cut.validate().unwrap();
        let mut expected = plan(&[&[(0, 1), (4, 4)], &[(1, 4), (4, 6)]]);
        for (member, address) in expected.members.iter_mut().zip(addresses) {
            member.members_on_machine = 2;
            member.address = address;
        }
        assert_eq!(cut, expected);
    }

    fn problem(spec: &RingPlanSpec) -> String {
        spec.validate().expect_err("must be refused").to_string()
    }

    #[test]
    fn accepts_rounds_uneven_and_empty_windows() {
        plan(&[&[(0, 6)]]).validate().unwrap();
        plan(&[&[(0, 1), (4, 5)], &[(1, 4), (5, 6)]])
            .validate()
            .unwrap();
        plan(&[&[(0, 3)], &[(3, 3)], &[(3, 6)]]).validate().unwrap();
    }

    #[test]
    fn names_the_window_that_leaves_a_gap_an_overlap_or_a_rest() {
        assert!(problem(&plan(&[&[(0, 2)], &[(3, 6)]])).contains("members[1].windows[0]"));
        assert!(problem(&plan(&[&[(0, 4)], &[(3, 6)]])).contains("continue at layer 4"));
        assert!(problem(&plan(&[&[(0, 2)], &[(2, 5)]])).contains("end at layer 5"));
        assert!(problem(&plan(&[&[(0, 7)]])).contains("end at layer 7"));
        assert!(problem(&plan(&[&[(0, -1)]])).contains("windows[0]"));
    }

    #[test]
    fn names_the_field_of_a_bad_count_or_name() {
        let mut spec = plan(&[&[(0, 3)], &[(3, 6)]]);
        spec.members[1].name = "m0".into();
        assert!(problem(&spec).contains("spec.members[1].name"));

        let mut spec = plan(&[&[(0, 6)]]);
        spec.rounds = 2;
        assert!(problem(&spec).contains("expected one for each of the 2 rounds"));
        spec.rounds = 0;
        assert!(problem(&spec).contains("spec.rounds"));

        let mut spec = plan(&[&[(0, 6)]]);
        spec.members[0].windows[0].gpu_layers = 7;
        assert!(problem(&spec).contains("gpuLayers is 7, expected 0..=6"));

        let mut spec = plan(&[&[(0, 3)], &[(3, 6)]]);
        spec.members[0].output_head_on_gpu = true;
        spec.validate().unwrap();
        spec.members[1].output_head_on_gpu = true;
        assert!(problem(&spec).contains("members[1].outputHeadOnGpu: only rank 0"));

        let mut spec = plan(&[&[(0, 3)], &[(3, 6)]]);
        spec.members[1].gpu_from_rows = Some(1);
        spec.validate().unwrap();
        spec.members[1].gpu_from_rows = Some(0);
        assert!(problem(&spec).contains("members[1].gpuFromRows: 0 is outside 1.."));
    }

    #[test]
    fn members_have_keys_all_or_none() {
        let mut spec = plan(&[&[(0, 3)], &[(3, 6)]]);
        assert!(!spec.is_encrypted());
        spec.members[1].public_key_sha256 = Some("0a".repeat(32));
        assert!(problem(&spec).contains("members[1].publicKeySha256: expected of all"));
        spec.members[0].public_key_sha256 = Some("0b".repeat(32));
        spec.validate().unwrap();
        assert!(spec.is_encrypted());
        for bad in ["0B".repeat(32), "0b".repeat(31), String::new()] {
            spec.members[0].public_key_sha256 = Some(bad);
            assert!(problem(&spec).contains("members[0].publicKeySha256: expected 64"));
        }
    }

    #[test]
    fn a_draft_model_is_checked_as_the_model_is() {
        let mut spec = plan(&[&[(0, 6)]]);
        spec.draft = Some(PlannedDraft {
            model: PlannedModel::new("small", "/models/small.gguf", 512, 2),
            memory_bytes: 1000,
        });
        spec.validate().unwrap();
        let refused = |change: fn(&mut PlannedDraft)| {
            let mut spec = spec.clone();
            change(spec.draft.as_mut().unwrap());
            problem(&spec)
        };
        for (problem, field) in [
            (refused(|draft| draft.model.file.clear()), "model.file"),
            (refused(|draft| draft.model.layers = 0), "model.layers"),
            (
                refused(|draft| draft.model.size_bytes = 0),
                "model.sizeBytes",
            ),
            (refused(|draft| draft.memory_bytes = -1), "memoryBytes"),
        ] {
            assert!(
                problem.contains(&format!("spec.draft.{field}")),
                "{problem}"
            );
        }
    }

    #[test]
    fn a_plan_without_a_kv_dtype_is_f16() {
        let mut plan = RingPlan::new("tiny", plan(&[&[(0, 6)]]));
        let read = |plan: &RingPlan| {
            let yaml = serde_saphyr::to_string(plan).unwrap();
            let read = RingPlan::from_yaml("plan.yaml", &yaml).unwrap();
            (yaml.contains("kvDtype"), read.spec.kv_dtype)
        };
        // Agents that know no other read such a plan.
        assert_eq!(read(&plan), (false, KvDtype::F16));
        plan.spec.kv_dtype = KvDtype::Q8_0;
        assert_eq!(read(&plan), (true, KvDtype::Q8_0));
    }

    #[test]
    fn survives_a_trip_through_yaml_and_refuses_other_documents() {
        let plan = RingPlan::new("tiny", plan(&[&[(0, 2)], &[(2, 6)]]));
        let yaml = serde_saphyr::to_string(&plan).unwrap();
        assert_eq!(
            RingPlan::from_yaml("plan.yaml", &yaml).unwrap().spec,
            plan.spec
        );

        let other = yaml.replace("kind: RingPlan", "kind: Pod");
        let error = RingPlan::from_yaml("plan.yaml", &other).unwrap_err();
        assert_eq!(
            error.to_string(),
            "plan.yaml: kind is \"Pod\", expected RingPlan"
        );

        let unknown = yaml.replace("contextLength:", "contextLenght:");
        assert!(RingPlan::from_yaml("plan.yaml", &unknown).is_err());
    }
}
