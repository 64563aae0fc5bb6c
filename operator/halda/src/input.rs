//! Documents become numbers: the one place where units are converted. From here on everything is seconds and bytes.
//!
//! Decides what a layer costs on each device, and which devices cannot take part at all. A weight is counted once: the
//! measured decode throughput of a format contains reading the weights from memory, so only the KV cache is read beside it.

use std::collections::HashSet;
use std::iter;

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfile, ModelProfileSpec};
use prima_crds::v1alpha1::node_profile::{
    GpuBackend, GpuMeasurements, NodeProfile, NodeProfileSpec, NodeProfileStatus, Os, Throughput,
};
use prima_crds::v1alpha1::ring_plan::{
    ActivationDtype, CHUNK_POSITIONS, DEFAULT_CONCURRENT_REQUESTS, DRAFTED_ROWS, GPU_HEAD_ROWS,
    KvDtype,
};

/// All that a plan depends on.
#[derive(Clone, Debug)]
pub struct PlanningInput {
    pub model: ModelSizes,
    pub workload: Workload,
    pub devices: Vec<Device>,
    /// From each device to each device, in the order of `devices`; the diagonal is unused.
    pub hops: Vec<Vec<HopCost>>,
    /// The only device that may be rank 0.
    pub rank0: Option<usize>,
    /// The only number of rounds.
    pub rounds: Option<usize>,
    /// The fewest devices of a ring. If it is more than one, each of them has a layer.
    pub fewest: usize,
    /// Devices that were left out before planning, and why.
    pub left_out: Vec<(String, String)>,
}

/// Layers are taken as equal: each is the mean of all. KV caches are not, since each must fit where its layer is.
#[derive(Clone, Debug)]
pub struct ModelSizes {
    pub name: String,
    pub layers: usize,
    /// Weights of one layer.
    pub layer_bytes: f64,
    pub experts: ExpertWeights,
    /// KV cache of one layer for all the context that was asked for, on average over the layers.
    pub layer_kv_bytes: f64,
    /// KV cache of each layer, as a multiple of the mean. Empty: all are alike.
    pub kv_of_layers: Vec<f64>,
    /// What rank 0 holds beside its layers: output head and the rows of the embedding that are in use.
    pub head_bytes: f64,
    /// Of these, the output head's weights. Where rank 0's GPU has them, it has room for the logits of some rows, too.
    pub output_bytes: f64,
    pub gpu_output_bytes: f64,
    /// What rank 0 has besides, all of which stays in memory: the logits of rows that it waits for, and a draft model.
    pub rank0_bytes: f64,
    /// Activations and the process itself.
    pub buffer_bytes: f64,
    /// As `layer_kv_bytes` and `buffer_bytes`, for layers on GPUs, where the KV cache is F16.
    pub gpu_layer_kv_bytes: f64,
    pub gpu_buffer_bytes: f64,
    /// One position's activation on the wire.
    pub activation_bytes: f64,
}

impl ModelSizes {
    /// The most that the KV caches of a member's layers can take in memory of `device` beyond the mean, in bytes, if they lie in so many windows.
    /// Before all layers have a member, only their number is known.
    pub fn kv_reserve_bytes(&self, device: &Device, windows: usize) -> f64 {
        let shares_memory = |gpu: &GpuCost| gpu.memory_bytes.is_none();
        let layer = match device.gpu.as_ref().is_some_and(shares_memory) {
            true => self.layer_kv_bytes.max(self.gpu_layer_kv_bytes),
            false => self.layer_kv_bytes,
        };
        layer * self.kv_excess(windows)
    }

    /// The same in a GPU's own memory.
    pub fn gpu_kv_reserve_bytes(&self, windows: usize) -> f64 {
        self.gpu_layer_kv_bytes * self.kv_excess(windows)
    }

    /// In units of the mean. No window exceeds it by more than the run of layers that exceeds it most, and all together not by more than all
    /// layers above it.
    pub fn kv_excess(&self, windows: usize) -> f64 {
        let (mut run, mut largest, mut all) = (0.0_f64, 0.0_f64, 0.0_f64);
        for layer in &self.kv_of_layers {
            let more = layer - 1.0;
            run = (run + more).max(0.0);
            largest = largest.max(run);
            all += more.max(0.0);
        }
        (windows as f64 * largest).min(all)
    }
}

/// Of a layer's weights, those of its experts. A token uses a part of them, and reads those that are not in memory when it needs them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertWeights {
    pub layer_bytes: f64,
    /// The share of them that a token uses.
    pub share: f64,
    /// Of those for which memory has no room, a token needs this part of its share: 1 if tokens choose all alike, less where they come back to
    /// what they used lately. (Where none has room, it is 1 in truth; to say so would take the MILP a product.)
    pub misses: f64,
}

impl ExpertWeights {
    /// The part of those that are missing which a token reads.
    pub fn read_share(&self) -> f64 {
        self.share * self.misses
    }
}

/// What requests look like.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub prompt_tokens: usize,
    pub answer_tokens: usize,
    /// Positions of a prompt that are computed together.
    pub chunk_tokens: usize,
}

#[derive(Clone, Debug)]
pub struct Device {
    pub name: String,
    /// Gets at least one layer.
    pub required: bool,
    pub memory_bytes: f64,
    pub memory_rule: MemoryRule,
    /// `None`: weights that do not fit may not be streamed.
    pub disk_bytes_per_second: Option<f64>,
    /// Experts that a layer needs and memory lacks; `None`: they are read as fast as other weights.
    pub expert_read_bytes_per_second: Option<f64>,
    pub overlap: Overlap,
    pub cpu: LayerCost,
    /// Output head for one position, and the embedding; where there is a draft model, also its guess of one token.
    pub head_seconds: f64,
    pub gpu: Option<GpuCost>,
}

/// How reading from disk and a device's own computing slow each other. When both run at once, reading runs at the share d of its rate and
/// computing at the share c.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overlap {
    /// Seconds of reading that are gained in each second of work, timed as if it computed alone: (c + d - 1) / c.
    pub hidden: f64,
    /// Seconds that computing loses for each second of reading behind it: (1 - c) / d.
    pub slowdown: f64,
}

impl Device {
    /// At which experts are read where other weights are read at `disk`, in bytes per second.
    pub fn expert_rate(&self, disk: f64) -> f64 {
        self.expert_read_bytes_per_second.unwrap_or(disk)
    }
}

impl Overlap {
    /// From c and d. If both at once gain nothing, they are done in turns.
    pub fn new(compute: f64, read: f64) -> Self {
        match compute + read > 1.0 {
            true => Self {
                hidden: (compute + read - 1.0) / compute,
                slowdown: (1.0 - compute) / read,
            },
            false => Self {
                hidden: 0.0,
                slowdown: 1.0,
            },
        }
    }

    /// Seconds that `work` takes longer because of `reading` at the same time; both are given in seconds that they take alone. Exact for
    /// two activities at the rates c and d until one of them is done.
    pub fn stall(self, work: f64, reading: f64) -> f64 {
        (reading - self.hidden * work)
            .max(self.slowdown * reading)
            .max(0.0)
    }
}

/// What happens to weights that do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryRule {
    /// Only the overflow is read again (Linux, Android, macOS without Metal; equations 15 and 17).
    Overflow,
    /// Everything is read again (macOS with Metal; equation 16).
    AllOrNothing,
}

/// Seconds of one layer for one position.
#[derive(Clone, Copy, Debug)]
pub struct LayerCost {
    /// For one alone.
    pub decode_seconds: f64,
    /// For one of many positions.
    pub prefill_seconds: f64,
}

#[derive(Clone, Debug)]
pub struct GpuCost {
    pub layer: LayerCost,
    /// The GPU's own; `None` if memory is unified: then it counts against the device's memory.
    pub memory_bytes: Option<f64>,
    /// To move an activation there and back, once per window.
    pub copy_seconds: f64,
    /// The device's `head_seconds` with the output head on this GPU. `None`: that is no gain, or it cannot be there.
    pub head_seconds: Option<f64>,
    /// For layers on the CPU. `None`: that is no gain for a chunk of a prompt, or it cannot be done.
    pub streamed: Option<StreamedCost>,
}

/// Layers on the CPU that are computed on the GPU where a pass has many rows: their matrices are copied there for it, the next while one is computed
/// with.
#[derive(Clone, Copy, Debug)]
pub struct StreamedCost {
    /// One layer, for a chunk of a prompt.
    pub chunk_seconds: f64,
    /// What two matrices (or all experts of two layers), and the keys and values of two layers for all the context, take there.
    pub room_bytes: f64,
    /// The fewest rows of a pass that go there, of sequences that begin.
    pub from_rows: usize,
}

/// One way from device to device.
#[derive(Clone, Copy, Debug)]
pub struct HopCost {
    /// One activation.
    pub decode_seconds: f64,
    /// The activations of a chunk of the prompt.
    pub chunk_seconds: f64,
}

/// What is asked for beside the documents.
#[derive(Clone, Debug)]
pub struct Options {
    pub context_tokens: usize,
    /// Requests that have a KV cache of the whole context at the same time.
    pub concurrent_requests: usize,
    pub prompt_tokens: usize,
    pub answer_tokens: usize,
    pub exclude: Vec<String>,
    pub use_all: bool,
    /// The fewest machines of a ring. If it is more than one, each of them has a layer.
    pub min_nodes: usize,
    pub rank0: Option<String>,
    pub rounds: Option<usize>,
    /// Type of numbers on the wire.
    pub activation_dtype: ActivationDtype,
    /// Type of numbers in the KV cache of layers that are not on a GPU.
    pub kv_dtype: KvDtype,
    /// A small model that guesses, on rank 0's processor. For each token it computes at least one. How many guesses are right depends on the
    /// text, so a plan promises what comes without a right one.
    pub draft: Option<ModelProfileSpec>,
    /// Of the experts that tokens would lack if they chose all alike, the part that they do lack, as rings of this model measured it: more than 0,
    /// and 1 while nothing is known.
    pub expert_misses: f64,
}

impl Options {
    /// What a draft model takes at rank 0, in bytes.
    pub fn draft_bytes(&self) -> i64 {
        let positions = self.context_tokens.saturating_mul(self.concurrent_requests);
        let draft = self.draft.as_ref();
        draft.map_or(0, |draft| draft.whole_bytes(positions as i64))
    }

    /// The logits that rank 0 holds at a time, in bytes: of all rows of drafts, and of a row of each sequence.
    pub fn logits_bytes(&self, spec: &ModelProfileSpec) -> i64 {
        let sequences = self
            .concurrent_requests
            .max(DEFAULT_CONCURRENT_REQUESTS as usize);
        let rows = DRAFTED_ROWS.saturating_add(sequences) as i64;
        let row = i64::from(spec.vocabulary_size) * size_of::<f32>() as i64;
        rows.saturating_mul(row)
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            context_tokens: 4096,
            concurrent_requests: 1,
            prompt_tokens: 512,
            answer_tokens: 256,
            exclude: Vec::new(),
            use_all: false,
            min_nodes: 1,
            rank0: None,
            rounds: None,
            activation_dtype: ActivationDtype::default(),
            kv_dtype: KvDtype::default(),
            draft: None,
            expert_misses: 1.0,
        }
    }
}

#[derive(Debug, PartialEq, thiserror::Error)]
pub enum InputError {
    #[error(
        "no machine to plan with: give at least one NodeProfile that may be used{}",
        reasons(left_out)
    )]
    NoDevice { left_out: Vec<(String, String)> },
    #[error(
        "at least {wanted} machines are asked for (minNodes), each with a layer, but {found} can take part in a model of {layers} layers{}",
        reasons(left_out)
    )]
    TooFew {
        wanted: usize,
        found: usize,
        layers: usize,
        left_out: Vec<(String, String)>,
    },
    #[error("two NodeProfiles are named {name}")]
    SameName { name: String },
    #[error("{option}: there is no NodeProfile named {name}")]
    UnknownName { option: &'static str, name: String },
    #[error("NodeProfile {name}: status is missing: nothing was measured")]
    NotMeasured { name: String },
    #[error(
        "NodeProfile {name}: status.cpu.throughput has no entry for {format}, a weight format of the model or its draft model"
    )]
    Format { name: String, format: String },
    #[error(
        "NodeProfile {from}: status.links has no entry for {to}; measure the links between all machines that are to be planned with"
    )]
    Link { from: String, to: String },
    #[error("{option}: expected {expected}, found {found}")]
    Range {
        option: &'static str,
        expected: String,
        found: usize,
    },
}

/// A process with its vocabulary, its threads and its network buffers (measured: 19 MB of anonymous memory with SmolLM2).
const PROCESS_BYTES: f64 = 24.0 * 1024.0 * 1024.0;
/// Rows of activations that are held at once, and how many numbers each has in units of the hidden size: the widest buffers
/// are the two of the feed-forward part, about four times as wide in most models, beside queries, keys, values and output.
const BUFFER_ROWS: f64 = CHUNK_POSITIONS as f64;
const BUFFER_WIDTHS: f64 = 16.0;
/// The same for latent attention, whose queries are latents: several times as wide as heads are.
const LATENT_BUFFER_WIDTHS: f64 = 32.0;
const LATENT_ATTENTION: &str = "latent-attention";
/// What a GPU needs beside its own layers so that weights of others can pass through: room for two matrices (all experts of a layer are one), and for
/// the keys and values of two layers that see all the context. What is not a matrix stays there.
pub fn streaming_room(spec: &ModelProfileSpec, options: &Options) -> i64 {
    let positions =
        (options.context_tokens as i64).saturating_mul(options.concurrent_requests as i64);
    let kv = spec.kv_bytes(KvDtype::F16).saturating_mul(positions);
    let vectors = match spec.parts.iter().any(|part| part == EXPERT_BIASES) {
        true => bytes(&spec.layer_weights) * OF_EXPERT_BIASES,
        false => 0.0,
    };
    2_i64
        .saturating_mul(spec.part_bytes().saturating_add(kv))
        .saturating_add(vectors as i64)
}

const EXPERT_BIASES: &str = "expert-biases";
/// Bytes of experts' biases for each byte of weights (gpt-oss: a number of 4 bytes for each row of 2880 weights of 4.25 bits).
const OF_EXPERT_BIASES: f64 = 0.003;
/// Of memory that copies pass through.
const PIECE_BYTES: f64 = (2 << 20) as f64;
/// Matrices of a layer.
const MATRICES: f64 = 8.0;
/// The fewest rows of a pass for which weights are copied to a GPU. The tokens of some answers at once are fewer: they stay with the processor,
/// which computes the same bits whatever comes together.
const FEWEST_STREAMED_ROWS: f64 = 32.0;
const HEAD_ROWS: f64 = GPU_HEAD_ROWS as f64;
/// Activations in memory are F32, whatever the wire carries.
const F32_BYTES: f64 = 4.0;
/// A disk slower than this is not relied on (s_threshold in the paper).
const SLOWEST_DISK: i64 = 50_000_000;
/// So that no coefficient of the MILP is millions of times another.
const SLOWEST_EXPERTS: i64 = 1_000_000;
/// Embedding rows are read in random order; as many stay in memory as a long text has different words.
const EMBEDDING_SHARE: f64 = 0.1;

impl PlanningInput {
    /// `links` lie in the NodeProfiles. Two machines of the same name are refused, also unmeasured or unusable ones.
    pub fn new(
        model: &ModelProfile,
        nodes: &[NodeProfile],
        options: &Options,
    ) -> Result<Self, InputError> {
        check_bounds(model, options)?;
        let (used, left_out) = usable(model, nodes, options)?;
        let devices = used
            .iter()
            .map(|node| device(model, node, options))
            .collect::<Result<Vec<_>, _>>()?;
        let workload = Workload {
            prompt_tokens: options.prompt_tokens,
            answer_tokens: options.answer_tokens,
            chunk_tokens: CHUNK_POSITIONS.min(options.prompt_tokens),
        };
        let model = planned_model(model, options);
        let hops = hops(&used, model.activation_bytes, workload.chunk_tokens)?;
        let rank0 = rank0(&devices, options)?;
        if options.use_all && devices.len() > model.layers {
            return Err(InputError::Range {
                option: "--members",
                expected: format!("at most the model's {} layers", model.layers),
                found: devices.len(),
            });
        }
        if options.min_nodes > devices.len() || options.min_nodes > model.layers {
            return Err(InputError::TooFew {
                wanted: options.min_nodes,
                found: devices.len(),
                layers: model.layers,
                left_out,
            });
        }
        Ok(Self {
            model,
            workload,
            devices,
            hops,
            rank0,
            rounds: options.rounds,
            fewest: options.min_nodes,
            left_out,
        })
    }
}

fn check_bounds(model: &ModelProfile, options: &Options) -> Result<(), InputError> {
    let layers = model.spec.layers as usize;
    for (option, found, most) in [
        ("--context", options.context_tokens, 1 << 24),
        ("--concurrency", options.concurrent_requests, 4096),
        ("--prompt", options.prompt_tokens, 1 << 24),
        ("--answer", options.answer_tokens, 1 << 24),
        ("--rounds", options.rounds.unwrap_or(1), layers),
    ] {
        if !(1..=most).contains(&found) {
            return Err(InputError::Range {
                option,
                expected: format!("1..={most}"),
                found,
            });
        }
    }
    Ok(())
}

fn reasons(left_out: &[(String, String)]) -> String {
    let reasons = left_out
        .iter()
        .map(|(name, why)| format!("; {name}: {why}"));
    reasons.collect()
}

/// Machines that may be planned with; names of the others, and why.
type Usable<'a> = (Vec<&'a NodeProfile>, Vec<(String, String)>);

fn usable<'a>(
    model: &ModelProfile,
    nodes: &'a [NodeProfile],
    options: &Options,
) -> Result<Usable<'a>, InputError> {
    let mut names = HashSet::new();
    for node in nodes {
        if !names.insert(name_of(node)) {
            return Err(InputError::SameName {
                name: name_of(node),
            });
        }
    }
    if let Some(name) = options.exclude.iter().find(|name| !names.contains(*name)) {
        return Err(InputError::UnknownName {
            option: "--exclude",
            name: name.clone(),
        });
    }
    let (mut used, mut left_out) = (Vec::new(), Vec::new());
    for node in nodes {
        let name = name_of(node);
        let lacking = node.status.as_ref().and_then(|status| {
            let draft = options.draft.as_ref().map(|draft| ("draft model", draft));
            let mut models = iter::once(("model", &model.spec)).chain(draft);
            models.find_map(|(what, model)| status.lacks(what, model))
        });
        if options.exclude.contains(&name) {
            left_out.push((name, "excluded by the command".to_owned()));
        } else if node.spec.exclude {
            left_out.push((name, "excluded by its owner (spec.exclude)".to_owned()));
        } else if let Some(why) = lacking {
            left_out.push((name, why));
        } else {
            used.push(node);
        }
    }
    match used.is_empty() {
        true => Err(InputError::NoDevice { left_out }),
        false => Ok((used, left_out)),
    }
}

fn planned_model(model: &ModelProfile, options: &Options) -> ModelSizes {
    let spec = &model.spec;
    let kept = spec.kept_positions(options.context_tokens);
    let kept = kept.iter().map(|&positions| positions as f64);
    let mean = kept.clone().sum::<f64>() / f64::from(spec.layers);
    let kv_bytes = |dtype: KvDtype| {
        let requests = options.concurrent_requests as f64;
        spec.kv_bytes(dtype) as f64 * mean * requests
    };
    let alike = kept.clone().all(|positions| positions == mean);
    let latent = spec.parts.iter().any(|part| part == LATENT_ATTENTION);
    let widths = if latent {
        LATENT_BUFFER_WIDTHS
    } else {
        BUFFER_WIDTHS
    };
    let row = widths * f64::from(spec.hidden_size) + expert_numbers(spec);
    let buffer_bytes = PROCESS_BYTES + BUFFER_ROWS * row * F32_BYTES;
    let output_bytes = bytes(&spec.output_weights);
    ModelSizes {
        name: model.metadata.name.clone(),
        layers: spec.layers as usize,
        layer_bytes: bytes(&spec.layer_weights) / f64::from(spec.layers),
        experts: ExpertWeights {
            layer_bytes: bytes(&spec.expert_weights) / f64::from(spec.layers),
            share: spec.expert_share(),
            misses: options.expert_misses,
        },
        layer_kv_bytes: kv_bytes(options.kv_dtype),
        kv_of_layers: match alike {
            true => Vec::new(),
            false => kept.map(|positions| positions / mean).collect(),
        },
        head_bytes: output_bytes + EMBEDDING_SHARE * spec.embedding_bytes as f64,
        output_bytes,
        gpu_output_bytes: output_bytes + HEAD_ROWS * F32_BYTES * f64::from(spec.vocabulary_size),
        rank0_bytes: (options.logits_bytes(spec) + options.draft_bytes()) as f64,
        buffer_bytes,
        gpu_layer_kv_bytes: kv_bytes(KvDtype::F16),
        gpu_buffer_bytes: buffer_bytes,
        activation_bytes: (options.activation_dtype.bytes() * spec.hidden_size as usize) as f64,
    }
}

/// Numbers in buffers for a row that goes through its experts: each has two projections, and is given a copy of the row and room for its
/// result.
fn expert_numbers(spec: &ModelProfileSpec) -> f64 {
    if spec.experts == 0 {
        return 0.0;
    }
    let weights: i64 = spec.expert_weights.iter().map(|one| one.weights).sum();
    let of_one = weights as f64 / (f64::from(spec.layers) * f64::from(spec.experts));
    let hidden = f64::from(spec.hidden_size);
    // Three matrices, hidden x width.
    let width = of_one / (3.0 * hidden);
    2.0 * f64::from(spec.experts_per_token) * (hidden + width)
}

fn rank0(devices: &[Device], options: &Options) -> Result<Option<usize>, InputError> {
    let Some(name) = &options.rank0 else {
        return Ok(None);
    };
    match devices.iter().position(|device| device.name == *name) {
        Some(rank0) => Ok(Some(rank0)),
        None => Err(InputError::UnknownName {
            option: "--rank0",
            name: name.clone(),
        }),
    }
}

fn name_of(node: &NodeProfile) -> String {
    node.metadata.name.clone().unwrap_or_default()
}

fn device(
    model: &ModelProfile,
    node: &NodeProfile,
    options: &Options,
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
    let gpu = status.gpu_for(spec);
    Ok(Device {
        required: options.use_all,
        memory_bytes: node.spec.left_to_ring(status, spec) as f64,
        memory_rule: match gpu {
            Some((GpuBackend::Metal, _)) => MemoryRule::AllOrNothing,
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
        gpu: match gpu {
            Some((_, measured)) => {
                let gpu = gpu_device(&name, measured, spec, options)?;
                Some(GpuCost {
                    head_seconds: gpu_output_seconds(&name, measured, spec)
                        .filter(|on_gpu| *on_gpu < output)
                        .map(|on_gpu| on_gpu + guess),
                    streamed: streamed(spec, options, cpu_layer, (&gpu, measured)),
                    ..gpu
                })
            }
            None => None,
        },
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

fn gpu_device(
    name: &str,
    measured: &GpuMeasurements,
    model: &ModelProfileSpec,
    options: &Options,
) -> Result<GpuCost, InputError> {
    let layer = Part {
        throughput: &measured.throughput,
        kv_dtype: KvDtype::F16,
        layer_overhead_nanoseconds: measured.layer_overhead_nanoseconds,
        kv_append_bytes_per_second: measured.kv_append_bytes_per_second,
        read_bytes_per_second: measured.read_bytes_per_second,
    };
    Ok(GpuCost {
        layer: layer.layer_cost(name, model, options)?,
        memory_bytes: measured.own_available_bytes().map(|bytes| bytes as f64),
        copy_seconds: match measured.unified_memory {
            true => 0.0,
            false => copy_seconds(measured, model.hidden_size, model.hidden_size),
        },
        head_seconds: None,
        streamed: None,
    })
}

/// What it takes to copy layers' weights to a GPU for each chunk of a prompt. `None` where that is no gain, and where the GPU shares the
/// machine's memory.
fn streamed(
    spec: &ModelProfileSpec,
    options: &Options,
    cpu: LayerCost,
    (gpu, measured): (&GpuCost, &GpuMeasurements),
) -> Option<StreamedCost> {
    gpu.memory_bytes.filter(|_| measured.streams_weights)?;
    let to_gpu = measured.to_gpu_bytes_per_second as f64;
    let rows = CHUNK_POSITIONS.min(options.prompt_tokens) as f64;
    // Each matrix is waited for, and the first piece of the next is made ready only then.
    let wait = 2.0 * measured.copy_overhead_nanoseconds as f64 / 1e9 + PIECE_BYTES / to_gpu;
    // Half of the prompt is there on average, and crosses, too.
    let positions = spec.seen_positions(options.prompt_tokens as f64 / 2.0);
    let kv = spec.kv_bytes(KvDtype::F16) as f64 * positions;
    let weights = spec.layer_bytes() as f64 / to_gpu + MATRICES * wait;
    let copied = weights + kv / to_gpu;
    // While one is computed with, the next is copied.
    let chunk_seconds = copied.max(rows * gpu.layer.prefill_seconds);
    let from_rows = (weights / cpu.prefill_seconds)
        .ceil()
        .max(FEWEST_STREAMED_ROWS);
    let pays = rows >= from_rows && chunk_seconds < rows * cpu.prefill_seconds;
    pays.then_some(StreamedCost {
        chunk_seconds,
        room_bytes: streaming_room(spec, options) as f64,
        from_rows: from_rows as usize,
    })
}

/// The output head for one position, with its copies. `None` where the GPU lacks kernels for it, and where it shares the machine's memory, which
/// it reads no faster than the processor does.
fn gpu_output_seconds(
    name: &str,
    measured: &GpuMeasurements,
    model: &ModelProfileSpec,
) -> Option<f64> {
    measured.own_available_bytes()?;
    let (output, _) = seconds(name, &measured.throughput, &model.output_weights).ok()?;
    Some(output + copy_seconds(measured, model.hidden_size, model.vocabulary_size))
}

/// To copy so many numbers there, and so many back.
fn copy_seconds(measured: &GpuMeasurements, there: i32, back: i32) -> f64 {
    F32_BYTES * f64::from(there) / measured.to_gpu_bytes_per_second as f64
        + F32_BYTES * f64::from(back) / measured.from_gpu_bytes_per_second as f64
        + 2.0 * measured.copy_overhead_nanoseconds as f64 / 1e9
}

/// What was measured of a CPU or GPU that runs layers.
struct Part<'a> {
    throughput: &'a [Throughput],
    kv_dtype: KvDtype,
    layer_overhead_nanoseconds: i64,
    kv_append_bytes_per_second: i64,
    read_bytes_per_second: i64,
}

impl Part<'_> {
    fn layer_cost(
        &self,
        name: &str,
        model: &ModelProfileSpec,
        options: &Options,
    ) -> Result<LayerCost, InputError> {
        let layers = f64::from(model.layers);
        let (decode, prefill) = seconds(name, self.throughput, &model.used_weights())?;
        let kv_position = model.kv_bytes(self.kv_dtype) as f64;
        let kv_append = kv_position / self.kv_append_bytes_per_second as f64;
        // Half of the answer is there when its middle token is computed.
        let middle = options.prompt_tokens as f64 + options.answer_tokens as f64 / 2.0;
        Ok(LayerCost {
            decode_seconds: decode / layers
                + self.layer_overhead_nanoseconds as f64 / 1e9
                + kv_append
                + kv_position * model.seen_positions(middle) / self.read_bytes_per_second as f64,
            prefill_seconds: prefill / layers + kv_append,
        })
    }
}

/// Seconds to multiply all of `weights` with one position, alone and as one of many.
fn seconds(
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

/// From each machine to each.
fn hops(
    nodes: &[&NodeProfile],
    activation_bytes: f64,
    chunk_tokens: usize,
) -> Result<Vec<Vec<HopCost>>, InputError> {
    let names: Vec<String> = nodes.iter().map(|node| name_of(node)).collect();
    let from_one = |from: &NodeProfile| {
        let own = name_of(from);
        let hops = names.iter().map(|to| match *to == own {
            true => Ok(HopCost {
                decode_seconds: 0.0,
                chunk_seconds: 0.0,
            }),
            false => hop(from, to, activation_bytes, chunk_tokens),
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

fn bytes(weights: &[FormatWeights]) -> f64 {
    weights.iter().map(|one| one.bytes as f64).sum()
}
