//! NodeProfile: what one machine can do, as measured on it.
//!
//! The spec is the owner's (what may be used), the status is the agent's (what was measured). Units are in the names.
//! This file decides what a usable profile is ([`NodeProfile::validate`]): whatever the planner reads is there and within
//! what any machine could have. It never decides what to do with a machine (that is the planner's).

// A column is an attribute of its own, so their types repeat.
#![allow(clippy::duplicated_attributes)]

mod checks;
mod gpus;
mod memory;
mod parts;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::document::{self, DocumentError, is_false};
use super::model_profile::ModelProfileSpec;
use super::ring_plan::FileVersion;
use crate::quantity::Quantity;
pub use memory::usual_reserve_bytes;
use parts::first_architectures;

/// What the owner of a machine allows. Everything is optional.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema,
)]
#[kube(
    group = "prima.dev",
    version = "v1alpha1",
    kind = "NodeProfile",
    shortname = "np",
    category = "prima",
    status = "NodeProfileStatus",
    doc = "What one machine can do, as its agent measured it, and what its owner allows.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#
    ),
    printcolumn(name = "Threads", type_ = "integer", json_path = ".status.cpu.threads"),
    printcolumn(name = "Kernels", type_ = "string", json_path = ".status.cpu.kernels"),
    printcolumn(name = "Memory", type_ = "string", json_path = ".status.agent.memory"),
    printcolumn(name = "Disk", type_ = "string", json_path = ".status.agent.disk"),
    printcolumn(name = "GPU", type_ = "string", json_path = ".status.agent.gpus"),
    printcolumn(name = "Measured", type_ = "date", json_path = ".status.measuredAt"),
    printcolumn(
        name = "Excluded",
        type_ = "boolean",
        json_path = ".spec.exclude",
        priority = 1
    ),
    printcolumn(
        name = "Processor",
        type_ = "string",
        json_path = ".status.cpu.model",
        priority = 1
    ),
    printcolumn(
        name = "Address",
        type_ = "string",
        json_path = ".status.agent.address",
        priority = 1
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].message"#,
        priority = 1
    )
)]
#[x_kube(validation = Rule::new("!(has(self.reservedMemory) && has(self.reservedMemoryBytes))")
    .message("reservedMemory and reservedMemoryBytes are the same: set one of them"))]
#[x_kube(validation = Rule::new("!(has(self.memoryCap) && has(self.memoryCapBytes))")
    .message("memoryCap and memoryCapBytes are the same: set one of them"))]
#[serde(rename_all = "camelCase")]
pub struct NodeProfileSpec {
    /// Leave this machine out of all rings.
    #[serde(default, skip_serializing_if = "is_false")]
    pub exclude: bool,
    /// Memory that stays free for the owner, such as `2Gi`. Default: 5 % of the available memory, in a cluster 128 MiB at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_memory: Option<Quantity>,
    /// The same in bytes, as profiles had it first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub reserved_memory_bytes: Option<i64>,
    /// The most memory that rings may use, such as `8Gi`. Default: all that does not stay free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_cap: Option<Quantity>,
    /// The same in bytes, as profiles had it first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub memory_cap_bytes: Option<i64>,
    /// Whether weights that do not fit into memory may be read from disk for every token. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_allowed: Option<bool>,
}

impl NodeProfileSpec {
    /// Bytes of memory that stay free for the owner, if the owner says so.
    pub fn reserved_bytes(&self) -> Option<i64> {
        in_bytes(self.reserved_memory, self.reserved_memory_bytes)
    }

    /// The most bytes of memory that rings may use, if the owner says so.
    pub fn cap_bytes(&self) -> Option<i64> {
        in_bytes(self.memory_cap, self.memory_cap_bytes)
    }
}

fn in_bytes(quantity: Option<Quantity>, bytes: Option<i64>) -> Option<i64> {
    quantity.map(|quantity| quantity.bytes() as i64).or(bytes)
}

/// What the agent measured. Operators ignore fields that they do not know: the agent may be newer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeProfileStatus {
    /// Written by the operator: `Ready`, while the agent is heard of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// When it was measured (RFC 3339).
    pub measured_at: String,
    /// Version of the agent.
    pub agent_version: String,
    /// Families of models that the agent can run, as `general.architecture` of GGUF files names them.
    #[serde(default = "first_architectures")]
    #[schemars(length(max = 64), inner(length(max = 64)))]
    pub architectures: Vec<String>,
    /// Parts of models that the agent computes on the processor, such as `sliding-windows`. A machine is no member of a ring for a model with
    /// another part. None, or `experts` alone: the agent is of an earlier version, and counts as computing the parts that there were then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 64)))]
    pub parts: Vec<String>,
    /// Whether the agent reads the field `windowedSequences` of a RingPlan. Absent, as in documents of earlier versions: it refuses a plan that
    /// has it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub reads_windowed_sequences: bool,
    /// Whether the agent reads the fields `gpus` and `draftOnGpu` of a RingPlan's members. Absent, as in documents of earlier versions: it refuses
    /// a plan that has one of them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub reads_gpus: bool,
    /// Whether the agent reads the field `chunkPositions` of a RingPlan. Absent, as in documents of earlier versions: it refuses a plan that has
    /// it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub reads_chunk_positions: bool,
    pub system: SystemProfile,
    pub cpu: CpuProfile,
    pub memory: MemoryProfile,
    pub disk: DiskProfile,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuProfile>,
    /// Network links to other machines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<LinkProfile>,
    /// The agent that runs on the machine. Only in a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentProfile>,
}

/// The agent on this machine, as others reach it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentProfile {
    /// IP address of its ring ports. It changes when the agent gets a new pod.
    pub address: String,
    /// By which others know its key: SHA-256 of the public key (DER of its SubjectPublicKeyInfo, RFC 5280), in hexadecimal. Absent: the
    /// agent is of a version that has no key, and its rings are not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"))]
    pub public_key_sha256: Option<String>,
    /// For people: available and total memory.
    pub memory: String,
    /// For people: how fast the disk reads sequentially.
    pub disk: String,
    /// For people: all GPUs, and which of them cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<String>,
    /// The files that Models name by a path on the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub local_models: Vec<LocalModel>,
}

/// A file that a Model names by a path on the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalModel {
    /// Path of the file, as the Model has it.
    pub path: String,
    /// What the file's header says of the model. Absent if there is a problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ModelProfileSpec>,
    /// The version of the file. Absent if there is a problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<FileVersion>,
    /// Why the file cannot be used on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SystemProfile {
    pub os: Os,
    /// Name and version of the system or the distribution.
    pub os_name: String,
    /// Version of the kernel.
    pub kernel: String,
    /// `x86_64`, `aarch64`, ...
    pub architecture: String,
    /// Whether the agent runs in a container.
    pub in_container: bool,
}

/// The operating system. It decides how the planner counts memory and disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Os {
    Linux,
    #[serde(rename = "macOS")]
    MacOs,
    Android,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CpuProfile {
    /// Name of the processor.
    pub model: String,
    /// How many threads the agent computes with.
    pub threads: i32,
    /// Instruction sets that the processor has.
    pub features: Vec<String>,
    /// Which of the engine's kernels were measured: `scalar`, `avx2`, ...
    pub kernels: String,
    /// One entry per weight format that the engine runs.
    pub throughput: Vec<Throughput>,
    /// Time that a layer takes for one position beside multiplying weights: norms, rotary embedding, attention over few positions, waking
    /// threads.
    pub layer_overhead_nanoseconds: i64,
}

/// How fast weights of one format are multiplied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Throughput {
    /// GGML's name of the format: `Q4_K`, `F16`, ...
    pub format: String,
    /// For one position: bytes of weights per second. The time to read them from memory is included.
    pub decode_bytes_per_second: i64,
    /// For many positions at once: floating-point operations per second. A weight counts as two operations for each position: a multiplication
    /// and an addition.
    pub prefill_flop_per_second: i64,
    /// How much the samples of the noisier of the two rates differ: the largest minus the smallest, in percent of the median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread_percent: Option<i32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemoryProfile {
    /// Memory of the machine, or what its cgroup may have if that is less.
    pub total_bytes: i64,
    /// Memory that can be used now: what the machine has available, or its cgroup if that is less.
    pub available_bytes: i64,
    /// Only on Android: memory that can be swapped out to make room, at most what is free in swap. 0 on other systems.
    #[serde(default)]
    pub swappable_bytes: i64,
    /// How fast memory is read.
    pub read_bytes_per_second: i64,
    /// How fast keys and values are appended to the KV cache.
    pub kv_append_bytes_per_second: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskProfile {
    /// The folder whose disk was measured. Models are kept there.
    pub path: String,
    /// How fast a file is read in order, as the engine streams weights.
    pub sequential_read_bytes_per_second: i64,
    /// How fast single pages are read in random order, without read-ahead.
    pub random_read_bytes_per_second: i64,
    /// How fast parts of 1 MiB are read from all over a file: several at once, and the next ones when all of these are there. So the engine
    /// reads experts that a layer needs and memory lacks. Without it, plans take the rate of other weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_read_bytes_per_second: Option<i64>,
    /// How much of the sequential rate is left while all threads compute with weights in memory.
    pub read_while_computing_percent: i32,
    /// How much of the threads' decode rate is left while the disk is read sequentially.
    pub compute_while_reading_percent: i32,
    /// Why the rates may be too high: not all that was read came from the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caveat: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuProfile {
    pub name: String,
    /// Where it is on the machine's PCI bus, such as `0000:01:00.0`: equal GPUs have one name. Absent where its driver does not say, and in
    /// documents of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_address: Option<String>,
    pub backend: GpuBackend,
    /// Why the GPU cannot be used. There is either this or `measured`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unusable: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<GpuMeasurements>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuMeasurements {
    /// Whether it shares its memory with the CPU, so that nothing is copied.
    pub unified_memory: bool,
    /// Memory of the GPU, or the most that it may have of memory that it shares.
    pub total_bytes: i64,
    /// With Vulkan and CUDA, the memory that is free. With Metal, the recommended working set.
    pub available_bytes: i64,
    /// How fast its memory is read.
    pub read_bytes_per_second: i64,
    /// How fast keys and values are appended to the KV cache.
    pub kv_append_bytes_per_second: i64,
    /// How fast weights are copied to the GPU for single passes. Activations count as going as fast. 0 with unified memory.
    pub to_gpu_bytes_per_second: i64,
    /// How fast activations are copied from the GPU. 0 with unified memory.
    pub from_gpu_bytes_per_second: i64,
    /// What one copy to or from the GPU takes beside the time for its bytes.
    pub copy_overhead_nanoseconds: i64,
    /// One entry per weight format that the engine runs on this GPU.
    pub throughput: Vec<Throughput>,
    /// Time that a layer takes for one position beside multiplying weights.
    pub layer_overhead_nanoseconds: i64,
    /// Parts of models of which it computes layers, such as `sliding-windows`. It holds no layers of a model with another part. None: the
    /// agent is of an earlier version, and its GPU counts as computing all parts that there were then, without those of experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 64)))]
    pub parts: Vec<String>,
    /// Whether the agent copies weights to it for single passes, so that long prompts run on it through layers that have no room there. Absent,
    /// as in documents of earlier versions: it does not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub streams_weights: bool,
    /// Whether the agent runs a draft model on it, if its plan says so. Absent, as in documents of earlier versions: it does not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub runs_drafts: bool,
    /// The most bytes of a buffer of which its kernels see all at once. So many can the keys and values of a layer have there, of all sequences
    /// together; matrices can be larger, since they are seen in parts. Absent, as in documents of earlier versions: there is no such limit, or it
    /// is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_buffer_bytes: Option<i64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GpuBackend {
    #[serde(rename = "CUDA")]
    Cuda,
    Metal,
    Vulkan,
    /// One that the engine does not have.
    Other,
}

/// The network link to one other machine, measured with the ring's own transport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LinkProfile {
    /// Name of that machine.
    pub to: String,
    /// How long a frame without payload takes one way: half a round trip.
    pub latency_nanoseconds: i64,
    /// Bandwidth.
    pub bytes_per_second: i64,
}

impl NodeProfile {
    /// Reads a profile from YAML (or JSON) and validates it. `name` (a path) is used in errors.
    pub fn from_yaml(name: &str, text: &str) -> Result<Self, DocumentError> {
        let profile: Self = document::read(name, "NodeProfile", text)?;
        profile.validate(name)?;
        Ok(profile)
    }

    /// The same, or each profile of a list, as `kubectl get nodeprofiles -o yaml` prints one.
    ///
    /// # Errors
    /// As of one profile; of a list, the error names the profile.
    pub fn all_from_yaml(name: &str, text: &str) -> Result<Vec<Self>, DocumentError> {
        let Some(items) = document::items(name, text)? else {
            return Ok(vec![Self::from_yaml(name, text)?]);
        };
        let profiles = items.into_iter().enumerate().map(|(index, item)| {
            // Written by an API server, so a field that is not known is one of a newer agent.
            let profile: Self = document::item(name, "NodeProfile", index, item)?;
            let own = profile.metadata.name.as_deref().unwrap_or_default();
            profile.validate(&format!("{name}: {own}"))?;
            Ok(profile)
        });
        profiles.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = include_str!("../../tests/node-profile.yaml");

    #[test]
    fn a_profile_survives_a_trip_through_yaml() {
        let profile = NodeProfile::from_yaml("node.yaml", PROFILE).unwrap();
        let again = serde_saphyr::to_string(&profile).unwrap();
        assert_eq!(
            NodeProfile::from_yaml("again.yaml", &again).unwrap().status,
            profile.status
        );
    }

    #[test]
    fn a_missing_or_absurd_value_is_refused_by_name() {
        for (from, to, named) in [
            (
                "sequentialReadBytesPerSecond: 3100000000",
                "sequentialReadBytesPerSecond: 0",
                "status.disk.sequentialReadBytesPerSecond",
            ),
            (
                "expertReadBytesPerSecond: 2400000000",
                "expertReadBytesPerSecond: -1",
                "status.disk.expertReadBytesPerSecond",
            ),
            (
                "availableBytes: 8589934592",
                "availableBytes: 99999999999999",
                "status.memory.availableBytes",
            ),
            (
                "decodeBytesPerSecond: 20000000000",
                "decodeBytesPerSecond: -1",
                "(Q4_K).decodeBytesPerSecond",
            ),
            (
                "    readBytesPerSecond: 30000000000\n",
                "",
                "readBytesPerSecond",
            ),
            (
                "latencyNanoseconds: 200000",
                "latencyNanoseconds: 0",
                "status.links[0].latencyNanoseconds",
            ),
            ("threads: 8", "threads: 0", "status.cpu.threads"),
            ("name: desk", "name: ''", "metadata.name"),
        ] {
            assert!(PROFILE.contains(from), "{from}");
            let error =
                NodeProfile::from_yaml("node.yaml", &PROFILE.replacen(from, to, 1)).unwrap_err();
            let text = crate::error_chain(&error);
            assert!(text.contains(named) && text.contains("node.yaml"), "{text}");
        }
    }

    #[test]
    fn owners_write_memory_as_quantities_or_in_bytes() {
        let with = |spec: &str| {
            let text = PROFILE.replacen("spec: {}", &format!("spec: {spec}"), 1);
            NodeProfile::from_yaml("node.yaml", &text)
        };
        let (gib, cap) = (1_i64 << 30, 3_i64 << 30);
        for spec in [
            "{reservedMemory: 1Gi, memoryCap: 3Gi}",
            "{reservedMemory: 1073741824, memoryCapBytes: 3221225472}",
            "{reservedMemoryBytes: 1073741824, memoryCap: 3072Mi}",
        ] {
            let spec = with(spec).unwrap().spec;
            assert_eq!(
                (spec.reserved_bytes(), spec.cap_bytes()),
                (Some(gib), Some(cap))
            );
        }
        for (spec, named) in [
            ("{memoryCap: 8GB}", "such as 8Gi"),
            (
                "{memoryCap: 8Gi, memoryCapBytes: 1}",
                "spec.memoryCap: is the same as memoryCapBytes",
            ),
            ("{memoryCapBytes: -1}", "spec.memoryCap: -1 is outside"),
        ] {
            let error = crate::error_chain(&with(spec).unwrap_err());
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_list_of_profiles_is_read_as_kubectl_prints_it() {
        let indented: String = PROFILE.lines().map(|line| format!("  {line}\n")).collect();
        let item = |name: &str| {
            let text = indented.replacen("name: desk", &format!("name: {name}"), 1);
            format!("- {}", text.trim_start())
        };
        let list = |items: &str| {
            let text = format!(
                "apiVersion: v1\nitems:\n{items}kind: List\nmetadata:\n  resourceVersion: ''\n"
            );
            NodeProfile::all_from_yaml("nodes.yaml", &text)
        };
        let newer = item("pi4").replacen("  status:", "  status:\n    wings: 2", 1);
        let profiles = list(&(item("desk") + &newer)).unwrap();
        let names = profiles
            .iter()
            .map(|profile| profile.metadata.name.as_deref());
        assert_eq!(names.collect::<Vec<_>>(), [Some("desk"), Some("pi4")]);
        assert_eq!(NodeProfile::all_from_yaml("n", PROFILE).unwrap().len(), 1);
        for (items, named) in [
            (
                item("desk").replace("threads: 8", "threads: 0"),
                "nodes.yaml: desk: status.cpu.threads",
            ),
            (
                item("desk").replace("kind: NodeProfile", "kind: Model"),
                "items[0].kind is \"Model\"",
            ),
            (
                item("desk").replace("threads: 8", "threads: many"),
                "items[0]",
            ),
            ("  []\n".to_owned(), "items: is empty"),
        ] {
            let error = crate::error_chain(&list(&items).unwrap_err());
            assert!(error.contains(named), "{error}");
        }
    }
}
