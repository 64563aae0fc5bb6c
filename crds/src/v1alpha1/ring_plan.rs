//! RingPlan: who runs which layers, in which order, in how many rounds.
//!
//! A plan is immutable and complete: it leaves the agents that execute it no choices. It carries a generation,
//! by which agents refuse senders that still follow an older plan. This file decides what a well-formed plan is
//! ([`RingPlanSpec::validate`]); it never decides which plan is good (that is the planner's).

// A column is an attribute of its own, so their types repeat.
#![allow(clippy::duplicated_attributes)]

mod checks;

use std::ops::Range;
use std::time::Duration;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::document::{self, is_false, is_zero};
use super::model_profile::AttentionWindow;
use super::model_source::ModelSource;
pub use checks::RingPlanError;

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
    /// Long sequences for which each of the `kvContexts` has memory in layers with a sliding window, which keep only the end of each. It never has
    /// more there than a whole context takes. Absent: 4. Agents of earlier versions refuse a plan with another number.
    #[serde(
        default = "usual_windowed_sequences",
        skip_serializing_if = "are_usual_windowed_sequences"
    )]
    pub windowed_sequences: i32,
    /// The most positions of a prompt that go round the ring together, for which members have memory. The more they are, the less often weights are
    /// copied to a GPU for a prompt, and the longer others wait. Absent: 128. Agents of earlier versions refuse a plan with another number.
    #[serde(
        default = "usual_chunk_positions",
        skip_serializing_if = "are_usual_chunk_positions"
    )]
    pub chunk_positions: i32,
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
    /// Bytes of rank 0's `memoryBytes` that it takes: for its weights, and for as many contexts as the ring has. With `draftOnGpu`, that is on the GPU
    /// instead, but for a tenth of its embedding.
    pub memory_bytes: i64,
}

/// The longest ETag of a file. A server that tells a longer one is refused, since no document could name that version.
pub const MAX_ETAG_CHARS: usize = 500;
/// The longest name of a commit.
pub const MAX_COMMIT_CHARS: usize = 100;

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
    #[schemars(length(max = MAX_ETAG_CHARS))]
    pub etag: Option<String>,
    /// SHA-256 of the whole file, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub sha256: Option<String>,
    /// The commit that the source's `revision` meant when it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = MAX_COMMIT_CHARS))]
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
    #[schemars(length(max = MAX_ETAG_CHARS))]
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
    /// Whether the draft model runs on the GPU. Only rank 0 has one.
    #[serde(default, skip_serializing_if = "is_false")]
    pub draft_on_gpu: bool,
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
    /// Bytes of its GPUs' own memory that the plan counts on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory_bytes: Option<i64>,
    /// The GPUs that its layers on GPUs are split among. The first has what else the plan has on a GPU. None: the first GPU of the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub gpus: Vec<PlannedGpu>,
    /// Bytes of both that its KV cache takes at most, of all requests together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bytes: Option<i64>,
    /// For people: why it has these layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2000))]
    pub why: Option<String>,
}

/// A GPU of a member's machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannedGpu {
    /// Its `pciAddress` in the NodeProfile, or its name where there is none.
    #[schemars(length(max = 256))]
    pub name: String,
    /// Bytes of its memory that layers leave free: what passes take there, and on the first what else the plan has on a GPU.
    pub beside_layers_bytes: i64,
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

/// The most positions of a prompt that go round the ring together, where a plan does not say: the rows of activations in one frame. Longer prompts
/// go in chunks of this size, or of less beside others' tokens, several of them in flight.
pub const CHUNK_POSITIONS: usize = 128;

/// The most that a plan may say: more rows are several passes on a GPU, and weights are copied there for each.
pub const MOST_CHUNK_POSITIONS: usize = 512;

/// The most rows that a member computes at once: chunks of two sequences, or chunks and tokens of several. A larger chunk is computed alone.
pub const MOST_BATCH_ROWS: usize = 2 * CHUNK_POSITIONS;

/// Positions whose keys and values lie together: a cache grows and shrinks by so many.
pub const KV_BLOCK_POSITIONS: usize = 64;

/// Rows that go through the output head on a GPU at once by Vulkan, and whose logits it holds.
pub const GPU_HEAD_ROWS: usize = 32;

/// Heads that attend to latents together on a GPU by Vulkan: what a position leaves behind is read once for so many.
pub const GPU_LATENT_QUERIES: usize = 4;

/// Bytes of a machine's memory through which weights go to a GPU that gets them for single passes.
pub const UPLOAD_BYTES: u64 = 24 << 20;

/// Rows of drafts on the ring at a time, of all sequences: rank 0 holds the logits of each.
pub const DRAFTED_ROWS: usize = 64;

/// Requests that share one context's memory, where nobody says how many get a context each.
pub const DEFAULT_CONCURRENT_REQUESTS: i32 = 16;

/// Long sequences for which each context has memory in layers with a sliding window, where a plan does not say: as all plans had it first.
pub const USUAL_WINDOWED_SEQUENCES: i32 = 4;

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
    /// Only of rank 0: the neighbour that does not reach that member, if its other neighbour does. Both may be there, and the way between them is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub missed_by: Option<String>,
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

/// Tokens that an answer may still get when its ring is to end.
const TOKENS_AT_END: u32 = 64;
const LEAST_DRAIN: Duration = Duration::from_secs(30);
const MOST_DRAIN: Duration = Duration::from_secs(90);
/// An hour; no ring is as slow.
const MAX_TOKEN_MICROSECONDS: u64 = 3_600_000_000;

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
            windowed_sequences: USUAL_WINDOWED_SEQUENCES,
            chunk_positions: usual_chunk_positions(),
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

    /// Positions that all sequences together may hold, in each layer that sees all of them. Only for validated plans, as the next.
    pub fn kv_positions(&self) -> usize {
        self.kv_contexts as usize * self.context_length as usize
    }

    /// The same in each layer with this window.
    pub fn windowed_kv_positions(&self, window: AttentionWindow) -> usize {
        let (context, sequences) = (self.context_length, self.windowed_sequences);
        let chunk = self.chunk_positions as usize;
        self.kv_contexts as usize * window.planned(context as usize, sequences as usize, chunk)
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

    /// Whether its members know each other by their keys, and talk over TLS.
    pub fn is_encrypted(&self) -> bool {
        let rank0 = self.members.first();
        rank0.is_some_and(|rank0| rank0.public_key_sha256.is_some())
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
            draft_on_gpu: false,
            gpu_from_rows: None,
            members_on_machine: 1,
            read_bytes_per_token: None,
            read_ahead_bytes: None,
            memory_bytes: None,
            gpu_memory_bytes: None,
            gpus: Vec::new(),
            kv_bytes: None,
            why: None,
        }
    }

    /// The host of its address; an IPv6 address without its brackets.
    pub fn host(&self) -> Option<&str> {
        let (host, _) = self.address.rsplit_once(':')?;
        Some(host.trim_matches(['[', ']']))
    }

    /// Whether anything of it runs on a GPU.
    pub fn uses_gpu(&self) -> bool {
        let mut windows = self.windows.iter();
        windows.any(|window| window.gpu_layers > 0)
            || self.output_head_on_gpu
            || self.draft_on_gpu
            || self.gpu_from_rows.is_some()
    }
}

impl PlannedWindow {
    /// The window's layers. Only for validated plans, whose bounds are not negative.
    pub fn layers(&self) -> Range<usize> {
        self.first as usize..self.last as usize
    }
}

fn one() -> i32 {
    1
}

fn is_one(value: &i32) -> bool {
    *value == 1
}

fn usual_windowed_sequences() -> i32 {
    USUAL_WINDOWED_SEQUENCES
}

fn are_usual_windowed_sequences(value: &i32) -> bool {
    *value == USUAL_WINDOWED_SEQUENCES
}

fn usual_chunk_positions() -> i32 {
    CHUNK_POSITIONS as i32
}

fn are_usual_chunk_positions(value: &i32) -> bool {
    *value == usual_chunk_positions()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn plan(windows: &[&[(i32, i32)]]) -> RingPlanSpec {
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

    pub(super) fn problem(spec: &RingPlanSpec) -> String {
        spec.validate().expect_err("must be refused").to_string()
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

    #[test]
    fn whatever_is_on_a_gpu_uses_it() {
        let on_cpu = plan(&[&[(0, 6)]]).members.remove(0);
        assert!(!on_cpu.uses_gpu());
        let changes: [fn(&mut RingMember); 4] = [
            |member| member.windows[0].gpu_layers = 1,
            |member| member.output_head_on_gpu = true,
            |member| member.draft_on_gpu = true,
            |member| member.gpu_from_rows = Some(32),
        ];
        for change in changes {
            let mut member = on_cpu.clone();
            change(&mut member);
            assert!(member.uses_gpu(), "{member:?}");
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
    fn a_plan_that_does_not_say_has_windows_of_4_sequences() {
        let mut plan = RingPlan::new("tiny", plan(&[&[(0, 6)]]));
        let read = |plan: &RingPlan| {
            let yaml = serde_saphyr::to_string(plan).unwrap();
            let read = RingPlan::from_yaml("plan.yaml", &yaml).unwrap();
            (yaml.contains("windowedSequences"), read.spec)
        };
        let window = AttentionWindow { positions: 16 };
        // Agents that know no others read such a plan.
        let (said, spec) = read(&plan);
        assert_eq!((said, spec.windowed_sequences), (false, 4));
        // All the context is less.
        assert_eq!(spec.windowed_kv_positions(window), 128);
        (plan.spec.context_length, plan.spec.kv_contexts) = (8192, 2);
        let planned = |plan: &RingPlan| read(plan).1.windowed_kv_positions(window);
        assert_eq!(planned(&plan), 2 * 4 * (2 * 16 + 192));
        plan.spec.windowed_sequences = 16;
        assert!(read(&plan).0);
        assert_eq!(planned(&plan), 2 * 16 * (2 * 16 + 192));
        assert_eq!(plan.spec.kv_positions(), 2 * 8192);
        for bad in [0, 4097] {
            plan.spec.windowed_sequences = bad;
            assert!(problem(&plan.spec).contains("spec.windowedSequences"));
        }
    }

    #[test]
    fn a_plan_that_does_not_say_has_chunks_of_128() {
        let mut plan = RingPlan::new("tiny", plan(&[&[(0, 6)]]));
        plan.spec.context_length = 8192;
        let window = AttentionWindow { positions: 16 };
        for (positions, said) in [(128, false), (256, true), (512, true)] {
            plan.spec.chunk_positions = positions;
            let yaml = serde_saphyr::to_string(&plan).unwrap();
            // Agents that know no others read the first.
            assert_eq!(yaml.contains("chunkPositions"), said);
            let read = RingPlan::from_yaml("plan.yaml", &yaml).unwrap().spec;
            assert_eq!(read, plan.spec);
            // In windows, sequences hold a chunk more than what is seen.
            let kept = 2 * 16 + positions as usize + 64;
            assert_eq!(read.windowed_kv_positions(window), 4 * kept);
        }
        for bad in [0, 127, 513] {
            plan.spec.chunk_positions = bad;
            assert!(problem(&plan.spec).contains("spec.chunkPositions"));
        }
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
