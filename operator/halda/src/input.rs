//! Documents become numbers: the one place where units are converted. From here on everything is seconds and bytes.
//!
//! Decides what a layer costs on each device, and which devices cannot take part at all. A weight is counted once: the
//! measured decode throughput of a format contains reading the weights from memory, so only the KV cache is read beside it.

mod gpus;
mod measured;

use std::collections::HashSet;
use std::iter;

use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfile, ModelProfileSpec};
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::{
    ActivationDtype, CHUNK_POSITIONS, DEFAULT_CONCURRENT_REQUESTS, DRAFTED_ROWS, GPU_HEAD_ROWS,
    KvDtype, MOST_BATCH_ROWS, MOST_CHUNK_POSITIONS, USUAL_WINDOWED_SEQUENCES,
};

use measured::{device, hops};

/// All that a plan depends on.
#[derive(Clone, Debug)]
pub struct PlanningInput {
    pub model: ModelSizes,
    /// Whole contexts that there is memory for; the KV caches of `model` are as large.
    pub kv_contexts: usize,
    /// Long sequences for which each context has memory in layers with windows; the KV caches of `model` are as large.
    pub windowed_sequences: usize,
    /// The most positions of a prompt that are computed together; buffers, and the KV caches of `model`, are as large.
    pub chunk_positions: usize,
    pub workload: Workload,
    pub devices: Vec<Device>,
    /// From each device to each device, in the order of `devices`; the diagonal is unused.
    pub hops: Vec<Vec<HopCost>>,
    /// The only device that may be rank 0.
    pub rank0: Option<usize>,
    /// The only number of rounds.
    pub rounds: Option<usize>,
    /// The most seconds from a request to its first token.
    pub first_token_seconds: Option<f64>,
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
    /// Of these, what a draft model takes less where it is on rank 0's GPU, and what it takes there.
    pub draft_moved_bytes: f64,
    pub gpu_draft_bytes: f64,
    /// Activations and the process itself.
    pub buffer_bytes: f64,
    /// As `layer_kv_bytes` and `buffer_bytes`, for layers on GPUs, where the KV cache is F16. What passes take on a GPU that shares the machine's
    /// memory is taken there, but for Metal.
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
    /// Positions of such a prompt that are computed together.
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
    /// All GPUs that it may use, as one.
    pub gpu: Option<GpuCost>,
    /// How plans name these GPUs, in the order in which they get layers. Empty: the machine's first, and no other.
    pub gpus: Vec<String>,
    /// What they take of their memory beyond one GPU, because layers are split among them: it is no part of [`GpuCost::memory_bytes`].
    pub gpu_split_bytes: f64,
    /// Why a GPU that computes the model's layers is not used.
    pub gpu_unused: Option<String>,
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
    /// Memory that copies of weights to its GPU pass through, if there are any. It counts as taken then, whatever layers it has: whether there
    /// is room for them there follows from those.
    pub fn copying_bytes(&self) -> f64 {
        let streamed = self.gpu.as_ref().and_then(|gpu| gpu.streamed);
        streamed.map_or(0.0, |streamed| streamed.copying_bytes)
    }

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
    /// Of the device's memory, the most that the GPU's driver lends it for layers and passes. `None`: it has its own, or there is no such bound.
    pub lent_bytes: Option<f64>,
    /// To move an activation there and back, once per window, and per GPU.
    pub copy_seconds: f64,
    /// The device's `head_seconds` with the output head on this GPU. `None`: that is no gain, or it cannot be there.
    pub head_seconds: Option<f64>,
    /// By how much a draft model's guess takes less on this GPU than in the device's `head_seconds`. `None`: as above.
    pub guess_gained: Option<f64>,
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
    /// What copies pass through, in the machine's memory.
    pub copying_bytes: f64,
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

impl HopCost {
    /// There is none: the two do not reach each other, and are neighbours in no ring.
    pub const NO_WAY: Self = Self {
        decode_seconds: f64::INFINITY,
        chunk_seconds: f64::INFINITY,
    };

    /// Whether there is one.
    pub fn is_way(&self) -> bool {
        self.decode_seconds.is_finite()
    }
}

/// What is asked for beside the documents.
#[derive(Clone, Debug)]
pub struct Options {
    pub context_tokens: usize,
    /// Requests that are computed at the same time,
    pub concurrent_requests: usize,
    /// and whole contexts for which there is memory, which they share.
    pub kv_contexts: usize,
    pub prompt_tokens: usize,
    pub answer_tokens: usize,
    pub exclude: Vec<String>,
    pub use_all: bool,
    /// The fewest machines of a ring. If it is more than one, each of them has a layer.
    pub min_nodes: usize,
    pub rank0: Option<String>,
    /// Pairs of machines that do not reach each other, and so are neighbours in no ring. What was measured between them, if anything was, is of before.
    pub apart: Vec<[String; 2]>,
    /// Machines on which a ring of another model is on several GPUs. How much of it each has is not known: of these GPUs, what is free is known of
    /// all together, and of the first.
    pub split_gpus: Vec<String>,
    pub rounds: Option<usize>,
    /// The most seconds from a request to its first token. Of the rings that keep to it, the one is planned that answers the request soonest.
    pub first_token_seconds: Option<f64>,
    /// Type of numbers on the wire.
    pub activation_dtype: ActivationDtype,
    /// Type of numbers in the KV cache of layers that are not on a GPU.
    pub kv_dtype: KvDtype,
    /// A small model that guesses, on rank 0's processor, or on its GPU where that has room. For each token it computes at least one. How many
    /// guesses are right depends on the text, so a plan promises what comes without a right one.
    pub draft: Option<ModelProfileSpec>,
    /// Of the experts that tokens would lack if they chose all alike, the part that they do lack, as rings of this model measured it: more than 0,
    /// and 1 while nothing is known.
    pub expert_misses: f64,
}

impl Options {
    /// What a draft model takes at rank 0 on the processor, in bytes.
    pub fn draft_bytes(&self) -> i64 {
        let draft = self.draft.as_ref();
        draft.map_or(0, |draft| draft.whole_bytes(self.positions()))
    }

    /// The same on its GPU: bytes of the machine's memory, for rows of the embedding, and of the GPU's. What its passes take there is less than
    /// what those of the model do.
    pub fn draft_bytes_on_gpu(&self) -> (i64, i64) {
        let Some(draft) = &self.draft else {
            return (0, 0);
        };
        let kv = draft.whole_bytes(self.positions()) - draft.size_bytes;
        let weights = bytes(&draft.layer_weights) + bytes(&draft.output_weights);
        let rows = EMBEDDING_SHARE * draft.embedding_bytes as f64;
        (rows as i64, kv.saturating_add(weights as i64))
    }

    /// Positions that all sequences together may have.
    pub fn positions(&self) -> i64 {
        (self.context_tokens as i64).saturating_mul(self.kv_contexts as i64)
    }

    /// The logits that rank 0 holds at a time, in bytes: of all rows of drafts, and of a row of each sequence.
    pub fn logits_bytes(&self, spec: &ModelProfileSpec) -> i64 {
        let rows = DRAFTED_ROWS.saturating_add(self.concurrent_requests) as i64;
        let row = i64::from(spec.vocabulary_size) * size_of::<f32>() as i64;
        rows.saturating_mul(row)
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            context_tokens: 4096,
            concurrent_requests: DEFAULT_CONCURRENT_REQUESTS as usize,
            kv_contexts: 1,
            prompt_tokens: 512,
            answer_tokens: 256,
            exclude: Vec::new(),
            use_all: false,
            min_nodes: 1,
            rank0: None,
            apart: Vec::new(),
            split_gpus: Vec::new(),
            rounds: None,
            first_token_seconds: None,
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
/// How many numbers a row of activations has, in units of the hidden size: the widest buffers are the two of the feed-forward part, about four times
/// as wide in most models, beside queries, keys, values and output. The rows of a chunk are held at once. Where more come together, weights give way
/// for as long.
const BUFFER_WIDTHS: f64 = 16.0;
/// The same for latent attention, whose queries are latents: several times as wide as heads are.
const LATENT_BUFFER_WIDTHS: f64 = 32.0;
/// What a GPU has for them beside: of each head two rows in the space of latents, and what goes in and comes out (184,000 numbers with the 128 heads
/// and the 5120 numbers of DeepSeek-V2, which has most of them for its size).
const GPU_LATENT_WIDTHS: f64 = 40.0;
const LATENT_ATTENTION: &str = "latent-attention";
/// Larger chunks than the usual ones that plans may have.
const LARGER_CHUNKS: [usize; 2] = [2 * CHUNK_POSITIONS, MOST_CHUNK_POSITIONS];
/// What a pass takes on a GPU beside its rows: what the parts of an attention find where few groups attend (of 512 rows and heads at most, in 32 parts,
/// 258 numbers each, or of half as many to latents, 514 each: 17 MB), where blocks are, and what the driver rounds up.
const GPU_PASS_BYTES: f64 = 24.0 * 1024.0 * 1024.0;
/// What a GPU needs beside its own layers so that weights of others can pass through: room for two matrices (all experts of a layer are one), and for
/// the keys and values of two layers that see all the context. What is not a matrix stays there.
pub fn streaming_room(spec: &ModelProfileSpec, options: &Options) -> i64 {
    let kv = spec
        .kv_bytes(KvDtype::F16)
        .saturating_mul(options.positions());
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
const HEAD_ROWS: f64 = GPU_HEAD_ROWS as f64;
/// Activations in memory are F32, whatever the wire carries.
const F32_BYTES: f64 = 4.0;
/// Embedding rows are read in random order; as many stay in memory as a long text has different words.
const EMBEDDING_SHARE: f64 = 0.1;

impl PlanningInput {
    /// Whether each device reaches each other one.
    pub fn all_meet(&self) -> bool {
        self.hops.iter().flatten().all(HopCost::is_way)
    }

    /// With chunks of the usual size. `links` lie in the NodeProfiles. Two machines of the same name are refused, also unmeasured or unusable ones.
    pub fn new(
        model: &ModelProfile,
        nodes: &[NodeProfile],
        options: &Options,
    ) -> Result<Self, InputError> {
        Self::with_chunks_of(CHUNK_POSITIONS, model, nodes, options)
    }

    /// For each size of chunks that may be best, the usual one first. Larger ones spare copies of weights to a GPU. They take more memory, and of a
    /// prompt that is cut less, fewer members compute at the same time. All agents have to read that a plan has them.
    pub fn of_each_chunk_size(
        model: &ModelProfile,
        nodes: &[NodeProfile],
        options: &Options,
    ) -> Result<Vec<Self>, InputError> {
        let mut inputs = vec![Self::new(model, nodes, options)?];
        let (used, _) = usable(model, nodes, options)?;
        let can_be_told = |node: &NodeProfile| {
            let status = node.status.as_ref();
            status.is_some_and(|status| status.reads_chunk_positions)
        };
        if !used.into_iter().all(can_be_told) {
            return Ok(inputs);
        }
        // A prompt that is one chunk of half the size is cut no less.
        let cut_less = |positions: &usize| positions / 2 < options.prompt_tokens;
        for positions in LARGER_CHUNKS.into_iter().filter(cut_less) {
            let input = Self::with_chunks_of(positions, model, nodes, options)?;
            let streams = |device: &Device| {
                let gpu = device.gpu.as_ref();
                gpu.is_some_and(|gpu| gpu.streamed.is_some())
            };
            if input.devices.iter().any(streams) {
                inputs.push(input);
            }
        }
        Ok(inputs)
    }

    /// With chunks of so many positions, whether they are best or not.
    pub fn with_chunks_of(
        chunk_positions: usize,
        model: &ModelProfile,
        nodes: &[NodeProfile],
        options: &Options,
    ) -> Result<Self, InputError> {
        check_bounds(model, options)?;
        let (used, left_out) = usable(model, nodes, options)?;
        let workload = Workload {
            prompt_tokens: options.prompt_tokens,
            answer_tokens: options.answer_tokens,
            chunk_tokens: chunk_positions.min(options.prompt_tokens),
        };
        let windowed_sequences = windowed_sequences(&model.spec, used.iter().copied(), options);
        let sizes = planned_model(model, windowed_sequences, chunk_positions, options);
        let named = gpus_are_named(&used);
        let devices = used
            .iter()
            .map(|node| device(model, &sizes, &workload, node, options, named))
            .collect::<Result<Vec<_>, _>>()?;
        let model = sizes;
        let hops = hops(
            &used,
            &options.apart,
            model.activation_bytes,
            workload.chunk_tokens,
        )?;
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
            kv_contexts: options.kv_contexts,
            windowed_sequences,
            chunk_positions,
            workload,
            devices,
            hops,
            rank0,
            rounds: options.rounds,
            first_token_seconds: options.first_token_seconds,
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
        ("--concurrency", options.kv_contexts, 4096),
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

/// For how many long sequences each context of a ring of these machines has memory in layers with windows. Where a machine's agent could not be
/// told, as many as such agents count on.
pub fn windowed_sequences<'a>(
    model: &ModelProfileSpec,
    mut nodes: impl Iterator<Item = &'a NodeProfile>,
    options: &Options,
) -> usize {
    let can_be_told = |node: &NodeProfile| {
        let status = node.status.as_ref();
        status.is_some_and(|status| status.reads_windowed_sequences)
    };
    match nodes.all(can_be_told) {
        true => model.windowed_sequences(options.concurrent_requests, options.kv_contexts),
        false => USUAL_WINDOWED_SEQUENCES as usize,
    }
}

/// Whether a plan for these machines may say which GPUs a member uses, and that a draft model is on one: an agent that does not read that refuses the
/// whole plan, whichever member it is said of.
fn gpus_are_named(nodes: &[&NodeProfile]) -> bool {
    let can_be_told = |node: &&NodeProfile| {
        let status = node.status.as_ref();
        status.is_some_and(|status| status.reads_gpus)
    };
    nodes.iter().all(can_be_told)
}

fn planned_model(
    model: &ModelProfile,
    windowed_sequences: usize,
    chunk_positions: usize,
    options: &Options,
) -> ModelSizes {
    let spec = &model.spec;
    let kept = spec.kept_positions(options.context_tokens, windowed_sequences, chunk_positions);
    let kept = kept.iter().map(|&positions| positions as f64);
    let mean = kept.clone().sum::<f64>() / f64::from(spec.layers);
    let kv_bytes = |dtype: KvDtype| {
        let contexts = options.kv_contexts as f64;
        spec.kv_bytes(dtype) as f64 * mean * contexts
    };
    let alike = kept.clone().all(|positions| positions == mean);
    let widths = match has_latents(spec) {
        true => LATENT_BUFFER_WIDTHS,
        false => BUFFER_WIDTHS,
    };
    let row = widths * f64::from(spec.hidden_size) + expert_numbers(spec);
    let buffer_bytes = PROCESS_BYTES + chunk_positions as f64 * row * F32_BYTES;
    // There is room for the rows of any pass, since nothing gives way there.
    let gpu_rows = MOST_BATCH_ROWS.max(chunk_positions) as f64;
    let output_bytes = bytes(&spec.output_weights);
    let draft_bytes = options.draft_bytes();
    let (draft_rows, gpu_draft_bytes) = options.draft_bytes_on_gpu();
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
        rank0_bytes: (options.logits_bytes(spec) + draft_bytes) as f64,
        draft_moved_bytes: (draft_bytes - draft_rows) as f64,
        gpu_draft_bytes: gpu_draft_bytes as f64,
        buffer_bytes,
        gpu_layer_kv_bytes: kv_bytes(KvDtype::F16),
        gpu_buffer_bytes: GPU_PASS_BYTES + gpu_rows * gpu_row_numbers(spec) * F32_BYTES,
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

/// Numbers that a GPU has for a row, at most: three activations; what matrices make of an activation, and make one of (each has as many weights for
/// every number of an activation); and those of experts and latents.
fn gpu_row_numbers(spec: &ModelProfileSpec) -> f64 {
    let hidden = f64::from(spec.hidden_size);
    let weights = |of: &[FormatWeights]| of.iter().map(|one| one.weights as f64).sum::<f64>();
    let for_all_rows = weights(&spec.layer_weights) - weights(&spec.expert_weights);
    let latents = match has_latents(spec) {
        true => GPU_LATENT_WIDTHS * hidden,
        false => 0.0,
    };
    3.0 * hidden + for_all_rows / f64::from(spec.layers) / hidden + expert_numbers(spec) + latents
}

fn has_latents(spec: &ModelProfileSpec) -> bool {
    spec.parts.iter().any(|part| part == LATENT_ATTENTION)
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

fn bytes(weights: &[FormatWeights]) -> f64 {
    weights.iter().map(|one| one.bytes as f64).sum()
}
