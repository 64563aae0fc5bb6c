//! RingPlan: who runs which layers, in which order, in how many rounds.
//!
//! A plan is immutable and complete: it leaves the agents that execute it no choices. It carries a generation,
//! by which agents refuse senders that still follow an older plan. This file decides what a well-formed plan is
//! ([`RingPlanSpec::validate`]); it never decides which plan is good (that is the planner's).

// A column is an attribute of its own, so their types repeat.
#![allow(clippy::duplicated_attributes)]

use std::collections::HashSet;
use std::ops::Range;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::document::{self, DocumentError, is_zero};
use super::model_source::ModelSource;

/// What an agent reads: the plan of one ring for one model.
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
    /// Counts up with every new plan of the same model. A frame of another generation is refused.
    pub generation: i64,
    /// The model that the ring runs.
    pub model: PlannedModel,
    /// Positions that one sequence may hold (prompt and answer together).
    pub context_length: i32,
    /// Sequences that may hold a KV cache at the same time.
    pub max_concurrent_requests: i32,
    /// Whole contexts that all sequences together have memory for; what they do not use keeps the beginnings of later requests.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub kv_contexts: i32,
    /// Number format of activations between members.
    #[serde(default)]
    pub activation_dtype: ActivationDtype,
    /// A small model of the same vocabulary at rank 0, whose guesses are verified several at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<PlannedDraft>,
    /// Number format of the KV cache.
    #[serde(default, skip_serializing_if = "KvDtype::is_f16")]
    pub kv_dtype: KvDtype,
    /// k: how often a token's activation goes round the ring. Every member has one window a round.
    pub rounds: i32,
    /// The ring in order; the first member is rank 0, the last hands back to it.
    #[schemars(length(max = 256))]
    pub members: Vec<RingMember>,
    /// What the planner expects of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Speed>,
    /// Port at rank 0's address where it serves HTTP. Absent: where the agent is told to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub http_port: Option<i32>,
    /// SHA-256 of each key that HTTP clients may send, in hexadecimal; none: no key is asked for. Agents so need no Secrets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 64)))]
    pub api_key_sha256: Vec<String>,
}

/// The model file and what a member must find in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannedModel {
    /// The name that clients ask for.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The GGUF file: its path on every member; with a source to fetch it from, its name.
    #[schemars(length(max = 2000))]
    pub file: String,
    /// Length of the file in bytes; a file of another length is another model.
    pub size_bytes: i64,
    /// Transformer layers (L).
    pub layers: i32,
    /// Where members fetch their parts of the file from. Absent: they have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ModelSource>,
    /// Which version of the file; another one is never mixed with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<FileVersion>,
}

impl PlannedModel {
    /// A file that every member has, in whatever version.
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
    /// The GGUF file: its path at rank 0.
    #[schemars(length(max = 2000))]
    pub file: String,
}

/// What tells one version of a model's file from another. What is absent was not told by its server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileVersion {
    /// Of the GGUF header, in hexadecimal: every member must have the same. Of a model in several files, of all their headers, one behind
    /// the other.
    #[schemars(length(max = 64))]
    pub header_sha256: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 500))]
    pub etag: Option<String>,
    /// Of the whole file, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub sha256: Option<String>,
    /// The commit that the revision was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 100))]
    pub commit: Option<String>,
    /// The files of a model in several that is fetched, in order; it has no other `etag` and `sha256`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub parts: Vec<PartVersion>,
}

/// One file of a model in several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PartVersion {
    /// Length in bytes.
    #[schemars(range(min = 0))]
    pub size_bytes: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 500))]
    pub etag: Option<String>,
    /// In hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub sha256: Option<String>,
}

/// One node of the ring.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RingMember {
    /// Unique in the ring; in a cluster the Node's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// `host:port` where the member's ring service listens.
    #[schemars(length(max = 300))]
    pub address: String,
    /// One layer window a round, `rounds` in all. May be empty (`first` = `last`).
    #[schemars(length(max = 1024))]
    pub windows: Vec<PlannedWindow>,
    /// Members of this ring on the same machine, which share its memory evenly.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub members_on_machine: i32,
    /// Weights that the planner expects the member to read from its disk for every token; to compare with what it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes_per_token: Option<i64>,
    /// Weights that it reads ahead in each round, while other members work; when other memory is available than planned, in
    /// proportion to what does not fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_ahead_bytes: Option<i64>,
    /// Memory that the plan counts on: weights that stay, KV cache, buffers. What one plan was promised is not promised again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory_bytes: Option<i64>,
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

/// Layers `first..last` (last excluded), of which the last `gpuLayers` run on the GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannedWindow {
    pub first: i32,
    pub last: i32,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpu_layers: i32,
}

/// Number format of activations between members. Only F32 keeps a split model bit-identical to a whole one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ActivationDtype {
    #[default]
    F32,
    BF16,
    F16,
}

impl ActivationDtype {
    /// Of one number on the wire.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
        }
    }
}

/// Number format of keys and values in memory. GPUs hold them as F16, and so do layers whose heads are not of whole 32 numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KvDtype {
    #[default]
    F16,
    /// Bytes, and an F16 scale for each 32 of them: 0.53 of F16's memory.
    Q8_0,
}

impl KvDtype {
    /// What documents without the field mean.
    pub fn is_f16(&self) -> bool {
        *self == Self::F16
    }
}

/// Positions of a prompt that go round the ring together, at most: the rows of activations in one frame. Longer prompts go in chunks of
/// this size, several in flight.
pub const CHUNK_POSITIONS: usize = 128;

/// What became of the plan. Each agent writes its own entry of `members`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RingPlanStatus {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub members: Vec<MemberStatus>,
}

/// How far one member is with the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberStatus {
    /// As in the plan's members.
    #[schemars(length(max = 253))]
    pub name: String,
    pub state: MemberState,
    /// For people: what it does, or what is wrong and what would help.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1000))]
    pub message: String,
    /// What went wrong is tried again after so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_seconds: Option<i64>,
    /// Of its part of the file, what is on its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<i64>,
    /// Rank 0: medians of its last answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Speed>,
}

/// In this order, if all goes well.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum MemberState {
    /// The plan cannot be honoured by this machine.
    Refused,
    /// It went wrong; it is tried again.
    Failed,
    Fetching,
    /// The weights are there, the process starts.
    Loading,
    /// The process runs its layers and waits for its neighbours.
    Loaded,
    /// Rank 0: a token went round the ring.
    Ready,
}

/// Why a document is no plan.
#[derive(Debug, thiserror::Error)]
pub enum RingPlanError {
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("RingPlan field {field}: {problem}")]
    Field { field: String, problem: String },
}

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
    /// The first generation, for one request at a time; whatever else may be absent is. Not checked.
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
            api_key_sha256: Vec::new(),
        }
    }

    /// One whose members `m0`, `m1`, ... at `addresses` have windows that end at the layers `ends`, in the order in which a token meets
    /// them: round by round, member by member. Not checked.
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
        let bounded = |field: &str, value: i64, low: i64, high: i64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(field_error(
                field,
                format!("{value} is outside {low}..={high}"),
            ))
        };
        bounded("generation", self.generation, 1, i64::MAX)?;
        bounded("model.sizeBytes", self.model.size_bytes, 1, i64::MAX)?;
        bounded(
            "model.layers",
            self.model.layers.into(),
            1,
            MAX_LAYERS.into(),
        )?;
        bounded(
            "contextLength",
            self.context_length.into(),
            1,
            MAX_CONTEXT.into(),
        )?;
        bounded(
            "maxConcurrentRequests",
            self.max_concurrent_requests.into(),
            1,
            MAX_CONCURRENT_REQUESTS.into(),
        )?;
        bounded(
            "kvContexts",
            self.kv_contexts.into(),
            1,
            MAX_CONCURRENT_REQUESTS.into(),
        )?;
        bounded("rounds", self.rounds.into(), 1, MAX_ROUNDS.into())?;
        bounded(
            "members (count)",
            self.members.len() as i64,
            1,
            MAX_MEMBERS as i64,
        )?;
        let port = self.http_port.unwrap_or(1);
        bounded("httpPort", port.into(), 1, u16::MAX.into())?;
        for (number, digest) in self.api_key_sha256.iter().enumerate() {
            if digest.len() != 64 || !digest.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(field_error(
                    &format!("apiKeySha256[{number}]"),
                    "expected 64 hexadecimal digits, the SHA-256 of a key".into(),
                ));
            }
        }
        if self.model.file.is_empty() {
            return Err(field_error("model.file", "must name the GGUF file".into()));
        }
        if self
            .draft
            .as_ref()
            .is_some_and(|draft| draft.file.is_empty())
        {
            return Err(field_error("draft.file", "must name the GGUF file".into()));
        }

        let mut names = HashSet::new();
        for (rank, member) in self.members.iter().enumerate() {
            if member.name.is_empty() || !names.insert(&member.name) {
                let problem = format!("{:?} must be non-empty and unique in the ring", member.name);
                return Err(field_error(&format!("members[{rank}].name"), problem));
            }
            let field = |name| format!("members[{rank}].{name}");
            let (sharing, most) = (member.members_on_machine, self.members.len() as i64);
            bounded(&field("membersOnMachine"), sharing.into(), 1, most)?;
            let read = member.read_bytes_per_token.unwrap_or(0);
            bounded(&field("readBytesPerToken"), read, 0, i64::MAX)?;
            let ahead = member.read_ahead_bytes.unwrap_or(0);
            bounded(&field("readAheadBytes"), ahead, 0, i64::MAX)?;
            if member.windows.len() != self.rounds as usize {
                return Err(field_error(
                    &format!("members[{rank}].windows"),
                    format!(
                        "{} windows, expected one for each of the {} rounds",
                        member.windows.len(),
                        self.rounds
                    ),
                ));
            }
        }

        let mut next = 0;
        for round in 0..self.rounds as usize {
            for (rank, member) in self.members.iter().enumerate() {
                let window = &member.windows[round];
                let field = format!("members[{rank}].windows[{round}]");
                if window.first != next || window.last < window.first {
                    let problem = format!(
                        "layers {}..{} do not continue at layer {next}; windows must cover every layer once, in ring order, round after round",
                        window.first, window.last
                    );
                    return Err(field_error(&field, problem));
                }
                if !(0..=window.last - window.first).contains(&window.gpu_layers) {
                    let problem = format!(
                        "gpuLayers is {}, expected 0..={}",
                        window.gpu_layers,
                        window.last - window.first
                    );
                    return Err(field_error(&field, problem));
                }
                next = window.last;
            }
        }
        if next != self.model.layers {
            let problem = format!(
                "the windows end at layer {next}, but the model has {} layers",
                self.model.layers
            );
            return Err(field_error("members", problem));
        }
        Ok(())
    }

    /// The rank of the member called `name`.
    pub fn rank_of(&self, name: &str) -> Option<usize> {
        self.members.iter().position(|member| member.name == name)
    }
}

impl RingMember {
    /// Alone on its machine; nothing is said of its memory.
    pub fn new(name: String, address: String, windows: Vec<PlannedWindow>) -> Self {
        Self {
            name,
            address,
            windows,
            members_on_machine: 1,
            read_bytes_per_token: None,
            read_ahead_bytes: None,
            memory_bytes: None,
            gpu_memory_bytes: None,
            why: None,
        }
    }

    /// The host of its address, an IPv6 one without its brackets.
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
