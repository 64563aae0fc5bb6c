//! Which GPUs of a machine have layers of a model, and what they are together.
//!
//! Decides: all that have memory of their own and compute the model; where there is none, the first that shares the machine's. Together they
//! have the memory of all, and are as fast as the slowest.

use std::ptr;

use super::super::model_profile::ModelProfileSpec;
use super::super::ring_plan::PlannedGpu;
use super::parts::needed_parts;
use super::{GpuBackend, GpuMeasurements, GpuProfile, NodeProfileStatus, Throughput};

impl NodeProfileStatus {
    /// The GPUs that a member of this model's ring may use, in their order: those that compute all parts of the model, and were measured with
    /// all weight formats of its layers. One that lacks something is not used for this model.
    pub fn gpus_for(&self, model: &ModelProfileSpec) -> Vec<&GpuProfile> {
        let able = self.gpus.iter().filter(|gpu| {
            let measured = gpu.measured.as_ref();
            measured.is_some_and(|measured| measured.has_layers_of(model))
        });
        let shares = |gpu: &&GpuProfile| {
            let measured = gpu.measured.as_ref();
            measured.is_some_and(|measured| measured.unified_memory)
        };
        let (mut shared, own): (Vec<_>, Vec<_>) = able.partition(shares);
        match own.is_empty() {
            true => {
                shared.truncate(1);
                shared
            }
            false => own,
        }
    }

    /// All of them as if they were one.
    pub fn gpu_for(&self, model: &ModelProfileSpec) -> Option<(GpuBackend, GpuMeasurements)> {
        let gpus = self.gpus_for(model);
        let measured = GpuMeasurements::together(&gpus)?;
        Some((gpus.first()?.backend, measured))
    }

    /// Those of them that a plan names, in its order. Where it names none, as plans of earlier versions: the machine's first, if it is one of them,
    /// since its agent takes no other then.
    pub fn gpus_named(&self, planned: &[PlannedGpu], model: &ModelProfileSpec) -> Vec<&GpuProfile> {
        let mut gpus = self.gpus_for(model);
        if planned.is_empty() {
            gpus.retain(|gpu| self.is_first_gpu(gpu));
            return gpus;
        }
        let named = planned.iter().filter_map(|planned| {
            let place = gpus.iter().position(|gpu| gpu.is_named(&planned.name))?;
            Some(gpus.remove(place))
        });
        named.collect()
    }

    /// Whether it is the machine's first, which its agent uses for plans that name none.
    pub fn is_first_gpu(&self, gpu: &GpuProfile) -> bool {
        let first = self.gpus.first();
        first.is_some_and(|first| ptr::eq(first, gpu))
    }
}

impl GpuProfile {
    /// How plans name it: by its place on the PCI bus, since equal GPUs have one name; by its name where the place is not known.
    pub fn plan_name(&self) -> &str {
        self.pci_address.as_deref().unwrap_or(&self.name)
    }

    /// Whether a plan names this GPU, or those that have its name.
    pub fn is_named(&self, name: &str) -> bool {
        self.pci_address.as_deref() == Some(name) || self.name == name
    }
}

impl GpuMeasurements {
    /// What GPUs are that share the layers of a member: memory of all of them, and the rates of the slowest, for what each can do. What they
    /// compute is that of the first, since they are one agent's. `None`: none of them was measured.
    pub fn together(gpus: &[&GpuProfile]) -> Option<Self> {
        let measured = gpus.iter().filter_map(|gpu| gpu.measured.clone());
        measured.reduce(Self::and)
    }

    fn and(self, other: Self) -> Self {
        let Self {
            unified_memory,
            total_bytes,
            available_bytes,
            read_bytes_per_second,
            kv_append_bytes_per_second,
            to_gpu_bytes_per_second,
            from_gpu_bytes_per_second,
            copy_overhead_nanoseconds,
            throughput,
            layer_overhead_nanoseconds,
            parts: _,
            streams_weights,
            runs_drafts,
            most_buffer_bytes,
        } = other;
        let both = self.throughput.iter().filter_map(|one| {
            let mut others = throughput.iter();
            let other = others.find(|other| other.format == one.format)?;
            Some(slower(one, other))
        });
        Self {
            unified_memory: self.unified_memory || unified_memory,
            total_bytes: self.total_bytes.saturating_add(total_bytes),
            available_bytes: self.available_bytes.saturating_add(available_bytes),
            read_bytes_per_second: self.read_bytes_per_second.min(read_bytes_per_second),
            kv_append_bytes_per_second: self
                .kv_append_bytes_per_second
                .min(kv_append_bytes_per_second),
            to_gpu_bytes_per_second: self.to_gpu_bytes_per_second.min(to_gpu_bytes_per_second),
            from_gpu_bytes_per_second: self
                .from_gpu_bytes_per_second
                .min(from_gpu_bytes_per_second),
            copy_overhead_nanoseconds: self
                .copy_overhead_nanoseconds
                .max(copy_overhead_nanoseconds),
            throughput: both.collect(),
            layer_overhead_nanoseconds: self
                .layer_overhead_nanoseconds
                .max(layer_overhead_nanoseconds),
            streams_weights: self.streams_weights && streams_weights,
            runs_drafts: self.runs_drafts && runs_drafts,
            most_buffer_bytes: match (self.most_buffer_bytes, most_buffer_bytes) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            },
            parts: self.parts,
        }
    }

    fn has_layers_of(&self, model: &ModelProfileSpec) -> bool {
        let mut formats = model.layer_weights.iter().map(|weights| &weights.format);
        let runs = |format: &String| self.throughput.iter().any(|one| one.format == *format);
        needed_parts(model).all(|part| self.computes(part)) && formats.all(runs)
    }
}

/// Of two rates with one format.
fn slower(one: &Throughput, other: &Throughput) -> Throughput {
    Throughput {
        format: one.format.clone(),
        decode_bytes_per_second: one
            .decode_bytes_per_second
            .min(other.decode_bytes_per_second),
        prefill_flop_per_second: one
            .prefill_flop_per_second
            .min(other.prefill_flop_per_second),
        spread_percent: one.spread_percent.max(other.spread_percent),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::NodeProfile;
    use super::*;

    fn gpu(address: Option<&str>, unified: bool, rate: i64, available: i64) -> GpuProfile {
        serde_json::from_value(json!({
            "name": "twin", "backend": "Vulkan", "pciAddress": address,
            "measured": {
                "unifiedMemory": unified, "totalBytes": available, "availableBytes": available, "readBytesPerSecond": rate,
                "kvAppendBytesPerSecond": 9, "toGpuBytesPerSecond": 9, "fromGpuBytesPerSecond": 9,
                "copyOverheadNanoseconds": rate, "layerOverheadNanoseconds": 1,
                "throughput": [{"format": "Q4_K", "decodeBytesPerSecond": rate, "prefillFlopPerSecond": 9}],
            },
        }))
        .unwrap()
    }

    fn status(gpus: Vec<GpuProfile>) -> NodeProfileStatus {
        let yaml = include_str!("../../../tests/node-profile.yaml");
        let profile = NodeProfile::from_yaml("node.yaml", yaml).unwrap();
        let mut status = profile.status.unwrap();
        status.gpus = gpus;
        status
    }

    #[test]
    fn gpus_together_have_all_memory_and_the_slowest_rates() {
        let model = ModelProfileSpec::default();
        let mut status = status(vec![
            gpu(Some("0000:01:00.0"), false, 7, 100),
            gpu(None, true, 1, 900),
            gpu(Some("0000:02:00.0"), false, 5, 10),
        ]);
        // One that shares the machine's memory counts only where no other is.
        assert_eq!(status.own_gpu_bytes(&model), Some(110));
        let (_, both) = status.gpu_for(&model).unwrap();
        assert_eq!(both.read_bytes_per_second, 5);
        assert_eq!(both.copy_overhead_nanoseconds, 7);
        assert_eq!(both.throughput[0].decode_bytes_per_second, 5);
        status.gpus.retain(|gpu| gpu.pci_address.is_none());
        status.gpus.push(gpu(None, true, 2, 800));
        assert_eq!(status.own_gpu_bytes(&model), None);
        let (_, first) = status.gpu_for(&model).unwrap();
        assert_eq!(first.available_bytes, 900);
    }

    #[test]
    fn a_plans_gpus_are_found_by_their_places() {
        let model = ModelProfileSpec::default();
        let planned = |name: &str| PlannedGpu {
            name: name.to_owned(),
            beside_layers_bytes: 0,
        };
        let mut twins = status(vec![
            gpu(Some("0000:01:00.0"), false, 1, 1),
            gpu(Some("0000:02:00.0"), false, 1, 2),
        ]);
        let named = |twins: &NodeProfileStatus, planned: &[PlannedGpu]| -> Vec<i64> {
            let gpus = twins.gpus_named(planned, &model);
            let measured = gpus.iter().filter_map(|gpu| gpu.measured.as_ref());
            measured.map(|measured| measured.available_bytes).collect()
        };
        let found = |planned: &[PlannedGpu]| named(&twins, planned);
        assert_eq!(found(&[planned("0000:02:00.0")]), [2]);
        assert_eq!(
            found(&[planned("0000:02:00.0"), planned("0000:03:00.0")]),
            [2]
        );
        assert_eq!(found(&[planned("twin"), planned("twin")]), [1, 2]);
        // Of an operator of an earlier version.
        assert_eq!(found(&[]), [1]);
        assert_eq!(twins.gpus[1].plan_name(), "0000:02:00.0");
        assert_eq!(gpu(None, false, 1, 1).plan_name(), "twin");
        // Where the first has failed, its agent takes no other.
        twins.gpus[0].measured = None;
        assert_eq!(named(&twins, &[]), [0_i64; 0]);
        assert_eq!(named(&twins, &[planned("0000:02:00.0")]), [2]);
    }
}
