//! NodeProfile: what one machine can do, as measured on it.
//!
//! The spec is the owner's (what may be used), the status is the agent's (what was measured). Units are in the names.
//! This file decides what a usable profile is ([`NodeProfile::validate`]): whatever the planner reads is there and within
//! what any machine could have. It never decides what to do with a machine (that is the planner's).

// A column is an attribute of its own, so their types repeat.
#![allow(clippy::duplicated_attributes)]

mod checks;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::document::{self, DocumentError, is_false};
use super::model_profile::ModelProfileSpec;
use super::ring_plan::FileVersion;

/// Share of the available memory that stays free unless the owner says otherwise: the machine is theirs.
pub const DEFAULT_RESERVE_PERCENT: u64 = 5;

/// What the owner of a machine allows. Everything is optional.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "prima.dev",
    version = "v1alpha1",
    kind = "NodeProfile",
    shortname = "np",
    category = "prima",
    status = "NodeProfileStatus",
    doc = "What one machine can do, as its agent measured it, and what its owner allows.",
    printcolumn(name = "Threads", type_ = "integer", json_path = ".status.cpu.threads"),
    printcolumn(name = "Kernels", type_ = "string", json_path = ".status.cpu.kernels"),
    printcolumn(name = "Memory", type_ = "string", json_path = ".status.agent.memory"),
    printcolumn(name = "Disk", type_ = "string", json_path = ".status.agent.disk"),
    printcolumn(name = "GPU", type_ = "string", json_path = ".status.gpus[*].name"),
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
    )
)]
#[serde(rename_all = "camelCase")]
pub struct NodeProfileSpec {
    /// Leave this machine out of all rings.
    #[serde(default, skip_serializing_if = "is_false")]
    pub exclude: bool,
    /// Bytes of memory that stay free for the owner. Absent: [`DEFAULT_RESERVE_PERCENT`] of what is available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub reserved_memory_bytes: Option<i64>,
    /// Bytes of memory that rings use at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub memory_cap_bytes: Option<i64>,
    /// Whether weights that do not fit into memory may be read from disk for every token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_allowed: Option<bool>,
}

/// What the agent measured. An older operator leaves out what a newer agent says beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeProfileStatus {
    /// RFC 3339.
    pub measured_at: String,
    pub agent_version: String,
    /// What the agent can run, as GGUF calls it in `general.architecture`.
    #[serde(default = "first_architectures")]
    #[schemars(length(max = 64), inner(length(max = 64)))]
    pub architectures: Vec<String>,
    pub system: SystemProfile,
    pub cpu: CpuProfile,
    pub memory: MemoryProfile,
    pub disk: DiskProfile,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuProfile>,
    /// To the other machines of a ring.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<LinkProfile>,
    /// In a cluster: the agent that runs there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentProfile>,
}

/// The agent on this machine, as others reach it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentProfile {
    /// IP address of its ring ports; another one after its pod was made anew.
    pub address: String,
    /// For people: available of total memory.
    pub memory: String,
    /// For people: the disk's sequential rate.
    pub disk: String,
    /// What it has of the files that Models name by a path on the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub local_models: Vec<LocalModel>,
}

/// A file that a Model names by a path on the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalModel {
    pub path: String,
    /// What the header says; absent where there is a problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ModelProfileSpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<FileVersion>,
    /// Why it cannot be used here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SystemProfile {
    pub os: Os,
    /// The distribution's or the system's own name and version.
    pub os_name: String,
    pub kernel: String,
    /// `x86_64`, `aarch64`, ...
    pub architecture: String,
    pub in_container: bool,
}

/// Which rules memory and disk follow.
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
    pub model: String,
    /// Threads that the agent computes with.
    pub threads: i32,
    pub features: Vec<String>,
    /// The engine's kernels that were measured: `scalar`, `avx2`, ...
    pub kernels: String,
    /// One entry per weight format that the engine runs.
    pub throughput: Vec<Throughput>,
    /// What a layer takes beside its weights for one position: norms, rotation, attention over little, waking threads.
    pub layer_overhead_nanoseconds: i64,
}

/// How fast weights of one format are multiplied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Throughput {
    /// GGML's name: `Q4_K`, `F16`, ...
    pub format: String,
    /// One position: bytes of weights a second. It contains reading them from memory.
    pub decode_bytes_per_second: i64,
    /// Many positions at once: multiplications and additions a second, two for each weight and position.
    pub prefill_flop_per_second: i64,
    /// Largest less smallest sample, in percent of the median, of the noisier of the two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread_percent: Option<i32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemoryProfile {
    pub total_bytes: i64,
    /// What can be used now: the smaller of the machine's and the cgroup's.
    pub available_bytes: i64,
    /// Android: what can be swapped out to make room, at most what swap has free. 0 elsewhere.
    #[serde(default)]
    pub swappable_bytes: i64,
    pub read_bytes_per_second: i64,
    /// Appending keys and values to the KV cache.
    pub kv_append_bytes_per_second: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskProfile {
    /// The folder that was measured: the models'.
    pub path: String,
    /// In the order of the file, with the system's read-ahead.
    pub sequential_read_bytes_per_second: i64,
    /// Single pages of 4 KiB in random order, without read-ahead.
    pub random_read_bytes_per_second: i64,
    /// Of the sequential rate, while all threads compute with weights in memory.
    pub read_while_computing_percent: i32,
    /// Of the threads' decode rate, while the disk is read in order.
    pub compute_while_reading_percent: i32,
    /// Why the figures may be too high: what was read did not all come from the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caveat: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuProfile {
    pub name: String,
    pub backend: GpuBackend,
    /// Why it cannot be used; what follows is left out then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unusable: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<GpuMeasurements>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuMeasurements {
    /// Shares its memory with the CPU: nothing is copied.
    pub unified_memory: bool,
    pub total_bytes: i64,
    /// CUDA: free. Metal: the recommended working set.
    pub available_bytes: i64,
    pub read_bytes_per_second: i64,
    pub kv_append_bytes_per_second: i64,
    /// 0 with unified memory.
    pub to_gpu_bytes_per_second: i64,
    pub from_gpu_bytes_per_second: i64,
    /// One copy of a single activation each way, whatever its size.
    pub copy_overhead_nanoseconds: i64,
    pub throughput: Vec<Throughput>,
    pub layer_overhead_nanoseconds: i64,
}

impl NodeProfileStatus {
    /// Whether the agent can run models of this one's architecture.
    pub fn runs(&self, model: &ModelProfileSpec) -> bool {
        self.architectures.contains(&model.architecture)
    }

    /// The GPU that a member of this model's ring uses: the first one that was measured with all weight formats of its layers. A GPU
    /// without kernels for one of them is none for this model: the processor has them.
    pub fn gpu_for(&self, model: &ModelProfileSpec) -> Option<(GpuBackend, &GpuMeasurements)> {
        self.gpus.iter().find_map(|gpu| {
            let measured = gpu.measured.as_ref()?;
            let mut formats = model.layer_weights.iter().map(|weights| &weights.format);
            let runs =
                |format: &String| measured.throughput.iter().any(|one| one.format == *format);
            formats.all(runs).then_some((gpu.backend, measured))
        })
    }
}

/// What agents run that do not say so.
fn first_architectures() -> Vec<String> {
    ["llama", "qwen2"].map(str::to_owned).to_vec()
}

impl GpuMeasurements {
    /// Of its own memory, what is left; none where it shares the machine's.
    pub fn own_available_bytes(&self) -> Option<i64> {
        (!self.unified_memory).then_some(self.available_bytes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GpuBackend {
    #[serde(rename = "CUDA")]
    Cuda,
    Metal,
    /// None that the engine has.
    Other,
}

/// The way to one other machine, over the ring's own transport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LinkProfile {
    /// That machine's name.
    pub to: String,
    /// One way, of a frame without payload: half a round trip.
    pub latency_nanoseconds: i64,
    pub bytes_per_second: i64,
}

impl NodeProfile {
    /// Reads a profile from YAML (or JSON) and validates it. `name` (a path) is used in errors.
    pub fn from_yaml(name: &str, text: &str) -> Result<Self, DocumentError> {
        let profile: Self = document::read(name, "NodeProfile", text)?;
        profile.validate(name)?;
        Ok(profile)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::v1alpha1::model_profile::FormatWeights;

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
    fn the_gpu_for_a_model_runs_all_its_formats() {
        let mut status = NodeProfile::from_yaml("node.yaml", PROFILE)
            .unwrap()
            .status
            .unwrap();
        let gpu = |name: &str, formats: &[&str], unified: bool| {
            let rate = |format: &&str| json!({"format": format, "decodeBytesPerSecond": 1, "prefillFlopPerSecond": 1});
            let throughput: Vec<_> = formats.iter().map(rate).collect();
            serde_json::from_value::<GpuProfile>(json!({
                "name": name, "backend": "CUDA",
                "measured": {
                    "unifiedMemory": unified, "totalBytes": 9, "availableBytes": formats.len(), "readBytesPerSecond": 1,
                    "kvAppendBytesPerSecond": 1, "toGpuBytesPerSecond": 1, "fromGpuBytesPerSecond": 1,
                    "copyOverheadNanoseconds": 1, "layerOverheadNanoseconds": 1, "throughput": throughput,
                },
            }))
            .unwrap()
        };
        let weights = |format: &str| FormatWeights {
            format: format.to_owned(),
            weights: 1,
            bytes: 1,
        };
        let model = ModelProfileSpec {
            layer_weights: vec![weights("Q4_K"), weights("Q6_K")],
            output_weights: vec![weights("F16")],
            ..ModelProfileSpec::default()
        };
        status.gpus = vec![gpu("half", &["Q4_K"], false)];
        assert!(status.gpu_for(&model).is_none());
        status.gpus.push(gpu("all", &["Q6_K", "Q4_K"], false));
        status
            .gpus
            .push(gpu("more", &["Q6_K", "Q4_K", "F16"], false));
        let (_, found) = status.gpu_for(&model).unwrap();
        assert_eq!(found.own_available_bytes(), Some(2));
        let shared = gpu("shared", &["Q4_K"], true).measured.unwrap();
        assert_eq!(shared.own_available_bytes(), None);
    }
}
