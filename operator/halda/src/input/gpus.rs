//! What GPUs cost a plan: which of a machine's it may use, a layer on them, the output head and a draft model there, and weights that are copied
//! there for a chunk of a prompt. Seconds and bytes.
//!
//! Several GPUs of a machine are one to the planner: with the memory of all, and as fast as the slowest. Which of them gets which layers, the
//! machine's agent decides when it loads them: GPU by GPU, as many as have room. With n GPUs, n - 1 of them may be left with less room than a
//! layer takes. So all layers have a place as soon as they have that much less than all the room, wherever it is: what other rings hold may
//! lie on any of these GPUs. The fastest gets layers first, and has what is no layer. One that makes the others wait for more than its room is worth is left out,
//! and so is one that has no room for a layer, if another has.

use std::ptr;

use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::node_profile::{
    GpuBackend, GpuMeasurements, GpuProfile, NodeProfileStatus,
};
use prima_crds::v1alpha1::ring_plan::{KvDtype, UPLOAD_BYTES};

use super::measured::{Part, seconds};
use super::{
    F32_BYTES, GpuCost, InputError, LayerCost, ModelSizes, Options, StreamedCost, Workload,
    streaming_room,
};

/// Of memory that copies pass through.
const PIECE_BYTES: f64 = (2 << 20) as f64;
/// Matrices of a layer.
const MATRICES: f64 = 8.0;
/// The fewest rows of a pass for which weights are copied to a GPU. The tokens of some answers at once are fewer: they stay with the processor,
/// which computes the same bits whatever comes together.
const FEWEST_STREAMED_ROWS: f64 = 32.0;
/// The largest layer of a model, in units of the mean: quantizations give more bits to some layers' matrices.
const LARGEST_LAYER: f64 = 1.25;
const NOT_THE_FIRST: &str = "it is not the machine's first, and plans name others only where no agent is of an earlier version";

/// The GPUs of a machine that a plan may use.
pub(super) struct DeviceGpus<'a> {
    status: &'a NodeProfileStatus,
    spec: &'a ModelProfileSpec,
    sizes: &'a ModelSizes,
    options: &'a Options,
    /// Whether the plan may say which they are, and that a draft model is on one.
    named: bool,
    /// In the order in which they get layers.
    chosen: Vec<&'a GpuProfile>,
    /// Why there is none, if there is one that computes the model.
    pub unused: Option<String>,
}

/// What takes how long on the same machine's processor.
#[derive(Clone, Copy)]
pub(super) struct OfProcessor {
    pub layer: LayerCost,
    /// The output head for a token.
    pub output: f64,
    /// A draft model's guess of a token.
    pub guess: f64,
}

impl<'a> DeviceGpus<'a> {
    pub fn new(
        status: &'a NodeProfileStatus,
        spec: &'a ModelProfileSpec,
        sizes: &'a ModelSizes,
        options: &'a Options,
        (name, cpu): (&str, LayerCost),
        named: bool,
    ) -> Result<Self, InputError> {
        let (mut able, mut unused) = (Vec::new(), None);
        for gpu in status.gpus_for(spec) {
            let measured = gpu.measured.as_ref();
            let why = match named || status.is_first_gpu(gpu) {
                true => measured.and_then(|measured| beyond_a_buffer(measured, spec, options)),
                false => Some(NOT_THE_FIRST.to_owned()),
            };
            match why {
                None => able.push(gpu),
                Some(why) => unused = unused.or(Some(why)),
            }
        }
        let mut gpus = Self {
            status,
            spec,
            sizes,
            options,
            named,
            unused: unused.filter(|_| able.is_empty()),
            // Of one that is not the first, it is not known what is free.
            chosen: match options.split_gpus.iter().any(|split| split == name) {
                true => fastest_first(able, name, spec, options)?,
                false => with_room(fastest_first(able, name, spec, options)?, sizes),
            },
        };
        let count = gpus.best_count(name, cpu)?;
        gpus.chosen.truncate(count);
        Ok(gpus)
    }

    /// The fewest of them, the fastest first, with which a token takes the least time in all layers: on GPUs those for which there is room beside
    /// all else that could be there, as fast as the slowest GPU is, and on the processor the others.
    fn best_count(&self, name: &str, cpu: LayerCost) -> Result<usize, InputError> {
        let sizes = self.sizes;
        let beside = sizes.gpu_buffer_bytes + sizes.gpu_output_bytes + sizes.gpu_draft_bytes;
        let layer_bytes = sizes.layer_bytes + sizes.gpu_layer_kv_bytes;
        let layers = sizes.layers as f64;
        let (mut best, mut least) = (self.chosen.len().min(1), f64::INFINITY);
        for count in 1..=self.chosen.len() {
            let Some(together) = GpuMeasurements::together(&self.chosen[..count]) else {
                continue;
            };
            let bytes = together.own_available_bytes().unwrap_or(0) as f64;
            let room = bytes - split_bytes(count, sizes) - beside;
            let fit = (room / layer_bytes).floor().clamp(0.0, layers);
            let gpu = Part::of_gpu(&together).layer_cost(name, self.spec, self.options)?;
            let seconds = fit * gpu.decode_seconds + (layers - fit) * cpu.decode_seconds;
            if seconds < least {
                (best, least) = (count, seconds);
            }
        }
        Ok(best)
    }

    pub fn backend(&self) -> Option<GpuBackend> {
        self.chosen.first().map(|gpu| gpu.backend)
    }

    /// As plans name them; none where the machine has one GPU, whatever it is called, and where not all agents read names: then its agent uses the
    /// first. One that is not used counts, such as one that shares the machine's memory: the agent would take it if the others vanished.
    pub fn names(&self) -> Vec<String> {
        if !self.named || self.status.gpus.len() <= 1 {
            return Vec::new();
        }
        let names = self.chosen.iter().map(|gpu| gpu.plan_name().to_owned());
        names.collect()
    }

    /// Of their memory, what is no room for layers because these are split.
    pub fn split_bytes(&self) -> f64 {
        split_bytes(self.chosen.len(), self.sizes)
    }

    /// What they cost as one.
    pub fn cost(
        &self,
        name: &str,
        workload: &Workload,
        cpu: OfProcessor,
    ) -> Result<Option<GpuCost>, InputError> {
        let first = self.chosen.first();
        let first = first.and_then(|gpu| Some((*gpu, gpu.measured.as_ref()?)));
        let together = GpuMeasurements::together(&self.chosen);
        let (Some((profile, first)), Some(together)) = (first, together) else {
            return Ok(None);
        };
        let Self {
            spec,
            sizes,
            options,
            ..
        } = *self;
        let cost = gpu_device(name, &together, spec, options)?;
        let (count, split) = (self.chosen.len(), self.split_bytes());
        let gpu = GpuCost {
            memory_bytes: cost.memory_bytes.map(|bytes| (bytes - split).max(0.0)),
            lent_bytes: profile.lent_bytes().map(|bytes| bytes as f64),
            // From one to the next, activations cross the machine's memory.
            copy_seconds: count as f64 * cost.copy_seconds,
            ..cost
        };
        // One shares its memory out as layers leave it room. Of several, the first has to have room for all of this, whatever layers it gets.
        let mut room = match count {
            1 => f64::INFINITY,
            _ => first.available_bytes as f64 - sizes.gpu_buffer_bytes,
        };
        let mut has_room = |bytes: f64| {
            let has_room = bytes <= room;
            if has_room {
                room -= bytes;
            }
            has_room
        };
        let output = gpu_output_seconds(name, first, spec)
            .filter(|on_gpu| *on_gpu < cpu.output)
            .filter(|_| has_room(sizes.gpu_output_bytes));
        let gained = self
            .guess_seconds(name, profile, first)
            .map(|on_gpu| cpu.guess - on_gpu)
            .filter(|gained| *gained > 0.0)
            .filter(|_| has_room(sizes.gpu_draft_bytes));
        let streamed = streamed(spec, options, workload, cpu.layer, (&gpu, first))
            .filter(|streamed| has_room(streamed.room_bytes));
        Ok(Some(GpuCost {
            head_seconds: output.map(|on_gpu| on_gpu + cpu.guess),
            guess_gained: gained,
            streamed,
            ..gpu
        }))
    }

    /// A draft model's guess of one token, all on the first GPU, with its copies. `None` where it cannot be there, or there is no draft model.
    fn guess_seconds(
        &self,
        name: &str,
        profile: &GpuProfile,
        measured: &GpuMeasurements,
    ) -> Option<f64> {
        let options = self.options;
        let may_be_there = self.named && measured.runs_drafts;
        let draft = options.draft.as_ref().filter(|_| may_be_there)?;
        let mut of_draft = self.status.gpus_for(draft).into_iter();
        let computes = of_draft.any(|gpu| ptr::eq(gpu, profile));
        let fits = beyond_a_buffer(measured, draft, options).is_none();
        if !(computes && fits) {
            return None;
        }
        let layer = Part::of_gpu(measured).layer_cost(name, draft, options);
        let layers = f64::from(draft.layers) * layer.ok()?.decode_seconds;
        let copies = copy_seconds(measured, draft.hidden_size, draft.hidden_size);
        Some(layers + copies + gpu_output_seconds(name, measured, draft)?)
    }
}

/// By the time that a layer takes for a token: so the slowest of any number of them is the last, and can be left out. Equal ones stay in their order.
/// Those of one name count as the slowest of them: an agent takes such in the order in which it lists them, whichever a plan means.
fn fastest_first<'a>(
    gpus: Vec<&'a GpuProfile>,
    name: &str,
    spec: &ModelProfileSpec,
    options: &Options,
) -> Result<Vec<&'a GpuProfile>, InputError> {
    let mut timed: Vec<(f64, &'a GpuProfile)> = Vec::with_capacity(gpus.len());
    for gpu in gpus {
        if let Some(measured) = &gpu.measured {
            let layer = Part::of_gpu(measured).layer_cost(name, spec, options)?;
            timed.push((layer.decode_seconds, gpu));
        }
    }
    let slowest = |gpu: &GpuProfile| {
        let same = timed
            .iter()
            .filter(|(_, one)| one.plan_name() == gpu.plan_name());
        same.map(|(seconds, _)| *seconds).fold(0.0, f64::max)
    };
    let by_name = timed.iter().map(|&(_, gpu)| (slowest(gpu), gpu));
    let mut by_name: Vec<(f64, &'a GpuProfile)> = by_name.collect();
    by_name.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    Ok(by_name.into_iter().map(|(_, gpu)| gpu).collect())
}

/// Without those that have no room for a layer, if another has: of other programs, or of another Model's ring. The fastest would have what is no
/// layer, which would find no room there. Of several with one name, plans cannot say which: they stay if one of them has room.
fn with_room<'a>(gpus: Vec<&'a GpuProfile>, sizes: &ModelSizes) -> Vec<&'a GpuProfile> {
    let has_room = |gpu: &GpuProfile| {
        let measured = gpu.measured.as_ref();
        let own = measured.and_then(GpuMeasurements::own_available_bytes);
        // One that shares the machine's memory has none of its own to lack.
        own.is_none_or(|bytes| bytes as f64 >= least_bytes(sizes))
    };
    let stays = |gpu: &GpuProfile| {
        let mut same = gpus.iter().filter(|one| one.plan_name() == gpu.plan_name());
        same.any(|&one| has_room(one))
    };
    let with_room: Vec<&'a GpuProfile> = gpus.iter().copied().filter(|&gpu| stays(gpu)).collect();
    match with_room.is_empty() {
        true => gpus,
        false => with_room,
    }
}

/// What so many GPUs take beyond one: what passes take on each, and on all but one room that is less than a layer's.
fn split_bytes(gpus: usize, sizes: &ModelSizes) -> f64 {
    gpus.saturating_sub(1) as f64 * least_bytes(sizes)
}

/// What passes take on a GPU, and the largest layer with its keys and values.
fn least_bytes(sizes: &ModelSizes) -> f64 {
    let largest_kv = sizes.kv_of_layers.iter().copied().fold(1.0, f64::max);
    let layer = LARGEST_LAYER * sizes.layer_bytes + largest_kv * sizes.gpu_layer_kv_bytes;
    sizes.gpu_buffer_bytes + layer
}

/// Why no layer can be on a GPU whose driver limits buffers, if so. (Where some layers have windows, nobody chooses which a GPU gets.)
fn beyond_a_buffer(
    measured: &GpuMeasurements,
    spec: &ModelProfileSpec,
    options: &Options,
) -> Option<String> {
    let (most, wanted) = (measured.most_positions(spec)?, options.positions());
    (wanted > most).then(|| {
        format!(
            "its driver limits the keys and values of a layer to {most} positions, and {wanted} are asked for (a shorter context, or fewer \
             whole contexts, would do)"
        )
    })
}

fn gpu_device(
    name: &str,
    measured: &GpuMeasurements,
    model: &ModelProfileSpec,
    options: &Options,
) -> Result<GpuCost, InputError> {
    Ok(GpuCost {
        layer: Part::of_gpu(measured).layer_cost(name, model, options)?,
        memory_bytes: measured.own_available_bytes().map(|bytes| bytes as f64),
        lent_bytes: None,
        copy_seconds: match measured.unified_memory {
            true => 0.0,
            false => copy_seconds(measured, model.hidden_size, model.hidden_size),
        },
        head_seconds: None,
        guess_gained: None,
        streamed: None,
    })
}

/// What it takes to copy layers' weights to a GPU for each chunk of a prompt. `None` where that is no gain, and where the GPU shares the machine's
/// memory.
fn streamed(
    spec: &ModelProfileSpec,
    options: &Options,
    workload: &Workload,
    cpu: LayerCost,
    (gpu, measured): (&GpuCost, &GpuMeasurements),
) -> Option<StreamedCost> {
    gpu.memory_bytes.filter(|_| measured.streams_weights)?;
    let to_gpu = measured.to_gpu_bytes_per_second as f64;
    let rows = workload.chunk_tokens as f64;
    // Each matrix is waited for, and the first piece of the next is made ready only then.
    let wait = 2.0 * measured.copy_overhead_nanoseconds as f64 / 1e9 + PIECE_BYTES / to_gpu;
    // Half of the prompt is there on average, and crosses, too.
    let positions = spec.seen_positions(workload.prompt_tokens as f64 / 2.0);
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
        copying_bytes: UPLOAD_BYTES as f64,
        from_rows: from_rows as usize,
    })
}

/// The output head for one position, with its copies. `None` where the GPU lacks kernels for it, and where it shares the machine's memory, which it
/// reads no faster than the processor does.
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
