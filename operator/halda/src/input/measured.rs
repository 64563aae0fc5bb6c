//! What machines cost, from what was measured of them: a layer on a processor, the output head, and the hops between machines; `gpus` says it of
//! GPUs. Seconds and bytes.

use std::collections::HashSet;

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfile, ModelProfileSpec};
use prima_crds::v1alpha1::node_profile::{
    GpuBackend, GpuMeasurements, NodeProfile, NodeProfileSpec, NodeProfileStatus, Os, Throughput,
};
use prima_crds::v1alpha1::ring_plan::{GPU_LATENT_QUERIES, KvDtype};

use super::gpus::{DeviceGpus, OfProcessor};
use super::{
    Device, HopCost, InputError, LayerCost, MemoryRule, ModelSizes, Options, Overlap, Workload,
    has_latents, name_of,
};

/// A disk slower than this is not relied on (s_threshold in the paper).
const SLOWEST_DISK: i64 = 50_000_000;
/// So that no coefficient of the MILP is millions of times another.
const SLOWEST_EXPERTS: i64 = 1_000_000;
/// Those of DeepSeek-V2 and V3, where it is not known how many there are. With fewer, a GPU would seem faster than it is.
const UNKNOWN_LATENT_HEADS: usize = 128;

pub(super) fn device(
    model: &ModelProfile,
    sizes: &ModelSizes,
    workload: &Workload,
    node: &NodeProfile,
    options: &Options,
    gpus_are_named: bool,
) -> Result<Device, InputError> {
    let name = name_of(node);
    let Some(status) = &node.status else {
        return Err(InputError::NotMeasured { name });
    };
    let spec = &model.spec;
    let (cpu, memory, disk) = (&status.cpu, &status.memory, &status.disk);
    let processor = |kv_dtype| Part {
        throughput: &cpu.throughput,
        kv_dtype,
        layer_overhead_nanoseconds: cpu.layer_overhead_nanoseconds,
        kv_append_bytes_per_second: memory.kv_append_bytes_per_second,
        read_bytes_per_second: memory.read_bytes_per_second,
        latent_queries: None,
    };
    let cpu_layer = processor(options.kv_dtype).layer_cost(&name, spec, options)?;
    let (output, _) = seconds(&name, &cpu.throughput, &spec.output_weights)?;
    let guess = match &options.draft {
        Some(draft) => {
            let layer = processor(KvDtype::F16).layer_cost(&name, draft, options)?;
            let (head, _) = seconds(&name, &cpu.throughput, &draft.output_weights)?;
            f64::from(draft.layers) * layer.decode_seconds + head
        }
        None => 0.0,
    };
    let of_machine = (name.as_str(), cpu_layer);
    let gpus = DeviceGpus::new(status, spec, sizes, options, of_machine, gpus_are_named)?;
    Ok(Device {
        required: options.use_all,
        memory_bytes: node.spec.left_to_ring(status, spec) as f64,
        memory_rule: match gpus.backend() {
            Some(GpuBackend::Metal) => MemoryRule::AllOrNothing,
            _ => MemoryRule::Overflow,
        },
        disk_bytes_per_second: disk_rate(&node.spec, status),
        expert_read_bytes_per_second: expert_rate(status),
        overlap: Overlap::new(
            f64::from(disk.compute_while_reading_percent) / 100.0,
            f64::from(disk.read_while_computing_percent) / 100.0,
        ),
        cpu: cpu_layer,
        head_seconds: output + guess,
        gpu: gpus.cost(
            &name,
            workload,
            OfProcessor {
                layer: cpu_layer,
                output,
                guess,
            },
        )?,
        gpu_split_bytes: gpus.split_bytes(),
        gpus: gpus.names(),
        gpu_unused: gpus.unused,
        name,
    })
}

/// In bytes per second; `None` if weights may not be streamed from it.
fn disk_rate(owner: &NodeProfileSpec, status: &NodeProfileStatus) -> Option<f64> {
    // macOS reads in random order what its page cache lost; Linux is advised to read in order.
    let rate = match status.system.os {
        Os::Linux | Os::Android => status.disk.sequential_read_bytes_per_second,
        Os::MacOs => status.disk.random_read_bytes_per_second,
    };
    let allowed = owner.disk_allowed.unwrap_or(true) && rate >= SLOWEST_DISK;
    allowed.then_some(rate as f64)
}

/// In bytes per second; `None`: as other weights.
fn expert_rate(status: &NodeProfileStatus) -> Option<f64> {
    match status.system.os {
        Os::Linux | Os::Android => {
            let rate = status.disk.expert_read_bytes_per_second?;
            Some(rate.max(SLOWEST_EXPERTS) as f64)
        }
        // The page cache cannot be emptied there, and was measured.
        Os::MacOs => None,
    }
}

/// What was measured of a CPU or GPU that runs layers.
pub(super) struct Part<'a> {
    throughput: &'a [Throughput],
    kv_dtype: KvDtype,
    layer_overhead_nanoseconds: i64,
    kv_append_bytes_per_second: i64,
    read_bytes_per_second: i64,
    /// Heads for which what a position leaves behind is read once, where they attend to latents. `None`: for all.
    latent_queries: Option<usize>,
}

impl<'a> Part<'a> {
    pub fn of_gpu(measured: &'a GpuMeasurements) -> Self {
        Self {
            throughput: &measured.throughput,
            kv_dtype: KvDtype::F16,
            layer_overhead_nanoseconds: measured.layer_overhead_nanoseconds,
            kv_append_bytes_per_second: measured.kv_append_bytes_per_second,
            read_bytes_per_second: measured.read_bytes_per_second,
            latent_queries: Some(GPU_LATENT_QUERIES),
        }
    }

    pub fn layer_cost(
        &self,
        name: &str,
        model: &ModelProfileSpec,
        options: &Options,
    ) -> Result<LayerCost, InputError> {
        let layers = f64::from(model.layers);
        let (decode, prefill) = seconds(name, self.throughput, &model.used_weights())?;
        let kv_position = model.kv_bytes(self.kv_dtype) as f64;
        let kv_append = kv_position / self.kv_append_bytes_per_second as f64;
        // All heads read the same latents, but on a GPU only a few of them at a time. Its caches may have them sooner than its memory; then computing
        // takes about as long, some two thousand operations for each head and position.
        let reads = self
            .latent_queries
            .map_or(1, |queries| latent_heads(model).div_ceil(queries).max(1));
        // Half of the answer is there when its middle token is computed.
        let middle = options.prompt_tokens as f64 + options.answer_tokens as f64 / 2.0;
        Ok(LayerCost {
            decode_seconds: decode / layers
                + self.layer_overhead_nanoseconds as f64 / 1e9
                + kv_append
                + reads as f64 * kv_position * model.seen_positions(middle)
                    / self.read_bytes_per_second as f64,
            prefill_seconds: prefill / layers + kv_append,
        })
    }
}

/// Heads of a layer that attend to latents. What was resolved by an operator of an earlier version stays, and does not say how many.
fn latent_heads(model: &ModelProfileSpec) -> usize {
    match model.latent_heads {
        0 if has_latents(model) => UNKNOWN_LATENT_HEADS,
        heads => heads as usize,
    }
}

/// Seconds to multiply all of `weights` with one position, alone and as one of many.
pub(super) fn seconds(
    name: &str,
    throughput: &[Throughput],
    weights: &[FormatWeights],
) -> Result<(f64, f64), InputError> {
    let mut sum = (0.0, 0.0);
    for one in weights {
        let rate = throughput
            .iter()
            .find(|rate| rate.format == one.format)
            .ok_or_else(|| InputError::Format {
                name: name.to_owned(),
                format: one.format.clone(),
            })?;
        sum.0 += one.bytes as f64 / rate.decode_bytes_per_second as f64;
        sum.1 += 2.0 * one.weights as f64 / rate.prefill_flop_per_second as f64;
    }
    Ok(sum)
}

/// From each machine to each. There is no way between machines of a pair in `apart`, whether it was measured or not.
pub(super) fn hops(
    nodes: &[&NodeProfile],
    apart: &[[String; 2]],
    activation_bytes: f64,
    chunk_tokens: usize,
) -> Result<Vec<Vec<HopCost>>, InputError> {
    let names: Vec<String> = nodes.iter().map(|node| name_of(node)).collect();
    let both_ways = apart.iter().flat_map(|[one, other]| {
        let (one, other) = (one.as_str(), other.as_str());
        [(one, other), (other, one)]
    });
    let apart: HashSet<(&str, &str)> = both_ways.collect();
    let from_one = |from: &NodeProfile| {
        let own = name_of(from);
        let hops = names.iter().map(|to| {
            if *to == own {
                Ok(HopCost {
                    decode_seconds: 0.0,
                    chunk_seconds: 0.0,
                })
            } else if apart.contains(&(own.as_str(), to.as_str())) {
                Ok(HopCost::NO_WAY)
            } else {
                hop(from, to, activation_bytes, chunk_tokens)
            }
        });
        hops.collect()
    };
    nodes.iter().map(|from| from_one(from)).collect()
}

fn hop(
    from: &NodeProfile,
    to: &str,
    activation_bytes: f64,
    chunk_tokens: usize,
) -> Result<HopCost, InputError> {
    let mut links = from.status.iter().flat_map(|status| &status.links);
    let link = links
        .find(|link| link.to == to)
        .ok_or_else(|| InputError::Link {
            from: name_of(from),
            to: to.to_owned(),
        })?;
    let latency = link.latency_nanoseconds as f64 / 1e9;
    let per_position = activation_bytes / link.bytes_per_second as f64;
    Ok(HopCost {
        decode_seconds: latency + per_position,
        chunk_seconds: latency + per_position * chunk_tokens as f64,
    })
}
