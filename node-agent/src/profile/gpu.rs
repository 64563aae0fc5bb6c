//! The GPUs of this machine: those that the engine can use, each measured; every other one that is seen, with the reason why
//! it cannot be used. Refuses to estimate: what was not measured is left out.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::node_profile::{GpuBackend, GpuMeasurements, GpuProfile, Throughput};
use prima_crds::v1alpha1::ring_plan;
use prima_engine::kernels::{MatrixError, ThreadPool};
use prima_engine::{
    BatchEntry, Compute, EngineError, GPU_HEAD_ROWS, GPU_LATENT_QUERIES, Gpu, GpuApi, GpuFacts,
    KvCache, KvFormat, LayerDevices, LayerWindow, Model, OpenedGpu, Residency, UPLOAD_BYTES,
};
use prima_gguf::GgmlType;
use prima_gguf::writer::{GgufWriter, WriterError};

use super::cpu::{self, SampleWeights};
use super::samples::RunTimes;

/// The planner counts what the engine takes.
const _: () = assert!(GPU_HEAD_ROWS == ring_plan::GPU_HEAD_ROWS);
const _: () = assert!(GPU_LATENT_QUERIES == ring_plan::GPU_LATENT_QUERIES);
const _: () = assert!(UPLOAD_BYTES == ring_plan::UPLOAD_BYTES);

#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    #[error("the engine failed")]
    Engine(#[from] EngineError),
    #[error("the weights cannot be used")]
    Matrix(#[from] MatrixError),
    #[error("none of the engine's weight formats runs on it; the last refusal")]
    NoFormat(#[source] EngineError),
    #[error("cannot write a small model to measure with")]
    File(#[source] std::io::Error),
    #[error("cannot write a small model to measure with")]
    Model(#[source] WriterError),
}

/// What a GPU that the engine can use says of itself, and which GPU it is and why it cannot be opened, if so.
pub type AskedGpu = (GpuFacts, Option<EngineError>);

/// What opening a GPU may take: its driver may wake it, and be loaded for it.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// The GPUs that the engine can use, opened, each for itself. One whose driver hangs has that as its problem: the machine is of use without it.
///
/// # Errors
/// Those of looking for them, and [`EngineError::NoGpu`] if that does not end.
pub fn open_all() -> Result<Vec<OpenedGpu>, EngineError> {
    let usable = answer(ANSWERS_WITHIN, Gpu::usable)??.into_iter();
    let questions = usable.map(|one| (one.facts.clone(), move || one.open()));
    Ok(opened_within(ANSWERS_WITHIN, questions))
}

/// What they answer who are asked all at once, each for a GPU of which these facts are known.
fn opened_within<Q>(
    within: Duration,
    questions: impl IntoIterator<Item = (GpuFacts, Q)>,
) -> Vec<OpenedGpu>
where
    Q: FnOnce() -> OpenedGpu + Send + 'static,
{
    let questions = questions.into_iter();
    let asked: Vec<_> = questions
        .map(|(facts, question)| (facts, ask(question)))
        .collect();
    let until = Instant::now() + within;
    let opened = asked.into_iter().map(|(facts, answer)| {
        let left = until.saturating_duration_since(Instant::now());
        answer.recv_timeout(left).unwrap_or_else(|none| OpenedGpu {
            facts,
            opened: Err(unanswered(none, within)),
        })
    });
    opened.collect()
}

fn answer<T: Send + 'static>(
    within: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Result<T, EngineError> {
    let answer = ask(question).recv_timeout(within);
    answer.map_err(|none| unanswered(none, within))
}

/// In a thread of its own, which nobody waits for if it hangs.
fn ask<T: Send + 'static>(question: impl FnOnce() -> T + Send + 'static) -> mpsc::Receiver<T> {
    let (say, answer) = mpsc::channel();
    let thread = thread::Builder::new().name("open-gpu".to_owned());
    // Where none can be started, there is no answer.
    let _ = thread.spawn(move || {
        // Nobody may want it any more.
        let _ = say.send(question());
    });
    answer
}

fn unanswered(none: RecvTimeoutError, within: Duration) -> EngineError {
    match none {
        RecvTimeoutError::Timeout => silent(within),
        RecvTimeoutError::Disconnected => EngineError::NoGpu {
            reason: "the thread that opens it has failed, or was not started".to_owned(),
        },
    }
}

/// Why a GPU cannot be used whose driver says nothing for so long.
pub fn silent(within: Duration) -> EngineError {
    let seconds = within.as_secs();
    EngineError::NoGpu {
        reason: format!("its driver has not opened it within {seconds} s"),
    }
}

pub fn asked(OpenedGpu { facts, opened }: OpenedGpu) -> AskedGpu {
    let problem = opened.err().map(|source| EngineError::OneGpu {
        gpu: facts.label(),
        source: Box::new(source),
    });
    (facts, problem)
}

/// Those of them that could be opened.
pub fn opened(asked: &[AskedGpu]) -> Vec<GpuFacts> {
    let opened = asked.iter().filter(|(_, problem)| problem.is_none());
    opened.map(|(facts, _)| facts.clone()).collect()
}

/// Why the others could not.
pub fn problems(asked: &[AskedGpu]) -> impl Iterator<Item = &EngineError> {
    asked.iter().filter_map(|(_, problem)| problem.as_ref())
}

/// What those say that were asked how much of their memory is free: one that is too full to be opened has none.
pub fn free(asked: &[AskedGpu]) -> Vec<GpuFacts> {
    let free = asked.iter().filter_map(|(facts, problem)| match problem {
        None => Some(facts.clone()),
        Some(problem) => problem.is_full_gpu().then(|| GpuFacts {
            available_bytes: 0,
            ..facts.clone()
        }),
    });
    free.collect()
}

/// Where in a profile each of the GPUs is that say this: by its place on the PCI bus; where that is not known, by its name, of equal ones in their
/// order.
pub fn places(gpus: &[GpuProfile], facts: &[GpuFacts]) -> Vec<Option<usize>> {
    let mut taken = vec![false; gpus.len()];
    let place = |facts: &GpuFacts| {
        let is_it = |gpu: &GpuProfile| match (&gpu.pci_address, &facts.pci_address) {
            (Some(one), Some(other)) => one == other,
            _ => gpu.name == facts.name,
        };
        let mut known = gpus.iter().zip(&taken);
        let found = known.position(|(gpu, taken)| !taken && is_it(gpu))?;
        taken[found] = true;
        Some(found)
    };
    facts.iter().map(place).collect()
}

/// Notes how much memory is free of the GPUs that say this, where that is worth telling. Returns whether it was of any.
pub fn set_available(
    gpus: &mut [GpuProfile],
    facts: &[GpuFacts],
    is_worth_telling: impl Fn(&GpuMeasurements, i64) -> bool,
) -> bool {
    let mut was_worth = false;
    for (facts, place) in facts.iter().zip(places(gpus, facts)) {
        let gpu = place.and_then(|place| gpus[place].measured.as_mut());
        let Some(measured) = gpu else {
            continue;
        };
        let now = i64::try_from(facts.available_bytes).unwrap_or(i64::MAX);
        let now = now.min(measured.total_bytes);
        if is_worth_telling(measured, now) {
            measured.available_bytes = now;
            was_worth = true;
        }
    }
    was_worth
}

/// All GPUs of this machine: those that the engine can use first, in the order in which they get layers. `opened`: as [`open_all`] has them. `pool`:
/// the threads that copy weights.
pub fn measure(
    root: &Path,
    pool: &ThreadPool,
    weights: &SampleWeights,
    opened: Result<&[OpenedGpu], &EngineError>,
) -> Vec<GpuProfile> {
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) => return seen(root, &prima_crds::error_chain(error)),
    };
    let why = "the engine uses others: those with memory of their own, else the first";
    let mut others = seen(root, why);
    let mut gpus = Vec::new();
    for OpenedGpu { facts, opened } in opened {
        // As the kernel lists it, if it has no name for it.
        let listed = facts.pci.map(|(vendor, device)| {
            listed_name(&format!("{vendor:#06x}"), &format!("{device:#06x}")).unwrap_or_default()
        });
        let same = |gpu: &GpuProfile| gpu.name == facts.name || Some(&gpu.name) == listed.as_ref();
        if let Some(same) = others.iter().position(same) {
            others.remove(same);
        }
        let opened = opened.as_ref();
        gpus.push(measured(facts, opened, pool, weights, cpu::formats()));
    }
    gpus.extend(others);
    gpus
}

/// One that the engine can use, or not, as it turns out.
fn measured(
    facts: &GpuFacts,
    opened: Result<&Gpu, &EngineError>,
    pool: &ThreadPool,
    weights: &SampleWeights,
    formats: impl Iterator<Item = GgmlType>,
) -> GpuProfile {
    let measured = match opened {
        Ok(gpu) => measurements(gpu, facts, pool, weights, formats)
            .map_err(|error| prima_crds::error_chain(&error)),
        Err(error) => Err(prima_crds::error_chain(error)),
    };
    let (measured, unusable) = match measured {
        Ok(measured) => (Some(measured), None),
        Err(reason) => (None, Some(reason)),
    };
    GpuProfile {
        name: facts.name.clone(),
        pci_address: facts.pci_address.clone(),
        backend: backend(facts.api),
        unusable,
        measured,
    }
}

fn backend(api: GpuApi) -> GpuBackend {
    match api {
        GpuApi::Vulkan => GpuBackend::Vulkan,
        GpuApi::Cuda => GpuBackend::Cuda,
        GpuApi::Metal => GpuBackend::Metal,
    }
}

/// Through what the engine uses a GPU of this profile, if it does.
pub fn api(backend: GpuBackend) -> Option<GpuApi> {
    match backend {
        GpuBackend::Vulkan => Some(GpuApi::Vulkan),
        GpuBackend::Cuda => Some(GpuApi::Cuda),
        GpuBackend::Metal => Some(GpuApi::Metal),
        GpuBackend::Other => None,
    }
}

/// Rows that are copied, read and written, and their length: 64 MiB in all. In tests, where a processor computes what GPUs do, 4 MiB: still more
/// than one piece of an upload.
const ROWS: usize = if cfg!(test) { 512 } else { 8192 };
const ROW: usize = 2048;
/// Rows of the matrices that are multiplied. In tests two of the kernels' tiles.
const MATRIX_ROWS: usize = if cfg!(test) { 128 } else { cpu::DECODE_ROWS };
/// Rows of a product that stands for a prompt's; layers, and positions that they see. Less in tests, but enough for the kernels of prompts.
const POSITIONS: usize = if cfg!(test) { 17 } else { cpu::POSITIONS };
const LAYERS: usize = if cfg!(test) { 2 } else { 16 };
const HELD: usize = if cfg!(test) { 17 } else { 100 };

fn measurements(
    gpu: &Gpu,
    facts: &GpuFacts,
    pool: &ThreadPool,
    weights: &SampleWeights,
    formats: impl Iterator<Item = GgmlType>,
) -> Result<GpuMeasurements, GpuError> {
    let numbers = vec![0.5; ROWS * ROW];
    let bytes = ROWS * ROW * 4;
    let rate = |samples: RunTimes| (bytes as f64 / samples.median()) as i64;
    let rows = gpu.copy_rows(&numbers, ROWS)?;
    let other_rows = gpu.copy_rows(&numbers, ROWS)?;
    let read = busy(|| gpu.read(&rows))?;
    let written = busy(|| gpu.append(&rows, &other_rows))?;
    // A window's activation goes there and back in one pass; what a pass of almost no bytes takes stands for both copies.
    let one = gpu.copy_rows(&[0.5], 1)?;
    let both = busy(|| gpu.copy_back(&one).map(drop))?;
    let (to, from) = match facts.unified_memory {
        true => (0, 0),
        false => {
            // What is copied most are weights for single passes, each time others.
            let mut parts = weights.bytes().chunks_exact(bytes).cycle();
            let to = busy(|| gpu.copy_weights(pool, parts.next().unwrap_or_default()))?;
            let from = busy(|| gpu.copy_back(&rows).map(drop))?;
            (rate(to), rate(from))
        }
    };
    let throughput = throughputs(gpu, weights, formats)?;
    let layer_overhead = layer_overhead_seconds(gpu, &throughput)?;
    Ok(GpuMeasurements {
        unified_memory: facts.unified_memory,
        total_bytes: facts.total_bytes as i64,
        available_bytes: facts.available_bytes as i64,
        read_bytes_per_second: rate(read),
        kv_append_bytes_per_second: rate(written),
        to_gpu_bytes_per_second: to,
        from_gpu_bytes_per_second: from,
        copy_overhead_nanoseconds: (both.median() / 2.0 * 1e9) as i64,
        throughput,
        layer_overhead_nanoseconds: (layer_overhead * 1e9) as i64,
        parts: Vec::new(),
        streams_weights: false,
        runs_drafts: false,
        most_buffer_bytes: None,
    })
}

/// Of those `formats` for which the GPU has kernels.
fn throughputs(
    gpu: &Gpu,
    weights: &SampleWeights,
    formats: impl Iterator<Item = GgmlType>,
) -> Result<Vec<Throughput>, GpuError> {
    let mut measured = Vec::new();
    let mut refusal = None;
    for format in formats {
        let matrices = weights.matrices(format, MATRIX_ROWS)?;
        match throughput(gpu, format, &matrices) {
            Ok(one) => measured.push(one),
            Err(error) => refusal = Some(error),
        }
    }
    match (measured.is_empty(), refusal) {
        (true, Some(error)) => Err(GpuError::NoFormat(error)),
        _ => Ok(measured),
    }
}

fn throughput(
    gpu: &Gpu,
    format: GgmlType,
    matrices: &[prima_engine::kernels::Matrix<'_>],
) -> Result<Throughput, EngineError> {
    let bytes: usize = matrices.iter().map(|matrix| matrix.bytes().len()).sum();
    let matrices = matrices
        .iter()
        .map(|matrix| gpu.copy_matrix(*matrix))
        .collect::<Result<Vec<_>, _>>()?;
    let rows = |n: usize| gpu.copy_rows(&vec![0.5; n * cpu::COLUMNS], n);
    let (one, many) = (rows(1)?, rows(POSITIONS)?);
    let all: Vec<_> = matrices.iter().collect();
    let decode_rounds = rounds(|| gpu.multiply(&all, &one))?;
    let often = all.repeat(decode_rounds);
    let decode = busy(|| gpu.multiply(&often, &one))?;
    let first: Vec<_> = all.first().copied().into_iter().collect();
    let prefill_rounds = rounds(|| gpu.multiply(&first, &many))?;
    let some: Vec<_> = all.iter().copied().cycle().take(prefill_rounds).collect();
    let prefill = busy(|| gpu.multiply(&some, &many))?;
    let flop = 2.0 * (cpu::COLUMNS * MATRIX_ROWS * POSITIONS) as f64;
    Ok(cpu::rates(
        format,
        (bytes * decode_rounds, &decode),
        (flop * prefill_rounds as f64, &prefill),
    ))
}

/// Samples of a GPU that has been busy for a while: when idle, it lowers its clocks.
fn busy(mut work: impl FnMut() -> Result<(), EngineError>) -> Result<RunTimes, EngineError> {
    const WARM_UP: Duration = Duration::from_millis(50);
    let begun = Instant::now();
    while begun.elapsed() < WARM_UP {
        work()?;
    }
    RunTimes::attempted(work)
}

/// How often work has to be done in a pass so that handing the pass to the GPU is a small part of it. Layers are handed over together, too.
fn rounds(mut work: impl FnMut() -> Result<(), EngineError>) -> Result<usize, EngineError> {
    const PASS: Duration = Duration::from_millis(2);
    let mut seconds = || -> Result<f64, EngineError> {
        let begun = Instant::now();
        work()?;
        Ok(begun.elapsed().as_secs_f64())
    };
    // The first may make kernels ready, which can take longer than the work.
    seconds()?;
    let rounds = PASS.as_secs_f64() / seconds()?.max(1e-6);
    Ok((rounds.ceil() as usize).clamp(1, 64))
}

/// What one more layer takes in the engine's own pass beside multiplying its weights: the time of a whole window less that of half its layers,
/// less what its weights take, as `throughput` has it (nothing, if their format was not measured). That rate is of products side by side, so what
/// is lost where they are not is in this. The layers are as wide as small models are, and see [`HELD`] positions: norms and attention of tiny
/// ones take less. A GPU with a large cache holds some of the weights, so there this comes out some microseconds too low.
fn layer_overhead_seconds(gpu: &Gpu, throughput: &[Throughput]) -> Result<f64, GpuError> {
    let file = tempfile::NamedTempFile::new().map_err(GpuError::File)?;
    write_small_model(file.as_file(), LAYERS)?;
    let model = Model::open(file.path())?;
    let compute = Compute::new(1)?;
    let devices = |layers| LayerDevices::last_on(layers, gpu.clone());
    let seconds = |layers: usize| -> Result<f64, GpuError> {
        let window = LayerWindow::open(&model, 0..layers, &devices(layers), &Residency::mapped())?;
        let mut kv = KvCache::new(&model, &[window.layers()], HELD + 1, KvFormat::F16);
        let forward = |kv: &mut KvCache, first_position: usize, rows: usize| {
            let mut activation = vec![0.5; rows * model.spec().hidden];
            let mut batch = [BatchEntry {
                kv,
                first_position,
                rows,
            }];
            window.forward(&compute, &mut activation, &mut batch)
        };
        forward(&mut kv, 0, HELD)?;
        let one_more = busy(|| {
            kv.truncate(HELD);
            forward(&mut kv, HELD, 1)
        });
        Ok(one_more?.median())
    };
    let (half, all) = (seconds(LAYERS / 2)?, seconds(LAYERS)?);
    let layer = (all - half) / (LAYERS - LAYERS / 2) as f64;
    Ok(beside_weights(layer, throughput))
}

/// What a layer of [`write_small_model`], which takes so many seconds, does not spend on its weights. Noise may swallow that.
fn beside_weights(layer: f64, throughput: &[Throughput]) -> f64 {
    let rate = throughput
        .iter()
        .find(|one| one.format == SMALL_MODEL.name())
        .map(|one| one.decode_bytes_per_second as f64);
    let weights = rate.map_or(0.0, |rate| small_layer_bytes() / rate);
    (layer - weights).max(0.0)
}

/// What the matrices of [`write_small_model`] are in.
const SMALL_MODEL: GgmlType = GgmlType::Q4_0;
const SIDE: u64 = if cfg!(test) { 256 } else { 1024 };
const HEAD_DIM: u64 = 64;
const MATRICES: [&str; 7] = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
];

fn matrix_bytes() -> usize {
    (SIDE * SIDE) as usize / SMALL_MODEL.block_len() * SMALL_MODEL.block_bytes()
}

fn small_layer_bytes() -> f64 {
    (MATRICES.len() * matrix_bytes()) as f64
}

/// A model of the llama family whose matrices are zeros: 4 MB a layer, but in tests.
fn write_small_model(file: &File, layers: usize) -> Result<(), GpuError> {
    let mut writer = GgufWriter::new();
    writer.metadata("general.architecture", "llama");
    for (key, value) in [
        ("block_count", layers as u32),
        ("embedding_length", SIDE as u32),
        ("feed_forward_length", SIDE as u32),
        ("attention.head_count", (SIDE / HEAD_DIM) as u32),
        ("attention.head_count_kv", (SIDE / HEAD_DIM) as u32),
        ("context_length", 128),
    ] {
        writer.metadata(&format!("llama.{key}"), value);
    }
    writer.metadata("llama.attention.layer_norm_rms_epsilon", 1e-5_f32);
    let mut names = vec!["token_embd".to_owned(), "output_norm".to_owned()];
    let parts = || MATRICES.iter().chain(&["attn_norm", "ffn_norm"]);
    names.extend(
        (0..layers).flat_map(|layer| parts().map(move |part| format!("blk.{layer}.{part}"))),
    );
    for name in &names {
        let name = format!("{name}.weight");
        match name.ends_with("_norm.weight") {
            true => writer.tensor(&name, GgmlType::F32, &[SIDE]),
            false => writer.tensor(&name, SMALL_MODEL, &[SIDE, SIDE]),
        };
    }
    let ones: Vec<u8> = (0..SIDE).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
    let zeros = vec![0; matrix_bytes()];
    let mut data = writer
        .write_header(BufWriter::new(file))
        .map_err(GpuError::Model)?;
    for name in &names {
        let bytes = if name.ends_with("_norm") {
            &ones
        } else {
            &zeros
        };
        data.tensor(bytes).map_err(GpuError::Model)?;
    }
    data.finish().map(drop).map_err(GpuError::Model)
}

/// The GPUs listed in the files below `root` (`/`, except in tests), none of them measured. `unusable` says why those that the engine could
/// use are not used.
fn seen(root: &Path, unusable: &str) -> Vec<GpuProfile> {
    let mut gpus = nvidia(root, unusable);
    let with_driver = !gpus.is_empty();
    for (vendor, device) in display_devices(root) {
        let Some(name) = listed_name(&vendor, &device) else {
            continue;
        };
        let (backend, reason) = match vendor.as_str() {
            NVIDIA if with_driver => continue,
            NVIDIA => (GpuBackend::Cuda, "NVIDIA's driver is not loaded"),
            _ => (GpuBackend::Vulkan, unusable),
        };
        gpus.push(GpuProfile {
            name,
            pci_address: None,
            backend,
            unusable: Some(reason.to_owned()),
            measured: None,
        });
    }
    gpus
}

const NVIDIA: &str = "0x10de";

/// What a card is called that the kernel knows by numbers only; `None` for display adapters of virtual machines.
fn listed_name(vendor: &str, device: &str) -> Option<String> {
    let maker = match vendor {
        NVIDIA => "NVIDIA",
        "0x1002" => "AMD",
        "0x8086" => "Intel",
        _ => return None,
    };
    Some(format!("{maker} GPU, device {device}"))
}

/// What NVIDIA's driver lists.
fn nvidia(root: &Path, unusable: &str) -> Vec<GpuProfile> {
    let mut names: Vec<String> = folders(&root.join("proc/driver/nvidia/gpus"))
        .filter_map(|folder| fs::read_to_string(folder.join("information")).ok())
        .map(|text| {
            let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
            model.map_or("NVIDIA GPU", str::trim).to_owned()
        })
        .collect();
    names.sort();
    names
        .into_iter()
        .map(|name| GpuProfile {
            name,
            pci_address: None,
            backend: GpuBackend::Cuda,
            unusable: Some(unusable.to_owned()),
            measured: None,
        })
        .collect()
}

/// PCI vendor and device of every card that the kernel's graphics drivers list, not of the cards' connectors.
fn display_devices(root: &Path) -> Vec<(String, String)> {
    let mut found: Vec<_> = folders(&root.join("sys/class/drm"))
        .filter(|folder| {
            let name = folder.file_name().and_then(|name| name.to_str());
            let number = name.and_then(|name| name.strip_prefix("card"));
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        })
        .filter_map(|folder| {
            let text = |file| fs::read_to_string(folder.join("device").join(file)).ok();
            Some((
                text("vendor")?.trim().to_owned(),
                text("device")?.trim().to_owned(),
            ))
        })
        .collect();
    found.sort();
    found
}

fn folders(path: &Path) -> impl Iterator<Item = std::path::PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use prima_engine::kernels::IsaLevel;

    use super::*;

    fn file(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn card(root: &Path, number: u32, vendor: &str, device: &str) {
        file(
            root,
            &format!("sys/class/drm/card{number}/device/vendor"),
            vendor,
        );
        file(
            root,
            &format!("sys/class/drm/card{number}/device/device"),
            device,
        );
    }

    #[test]
    fn every_gpu_is_listed_once_with_why_it_is_unusable() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let seen = |root| seen(root, "there is no driver");
        assert_eq!(seen(root), []);
        card(root, 0, "0x8086\n", "0x46a6\n");
        card(root, 1, "0x10de\n", "0x2484\n");
        card(root, 2, "0x1af4\n", "0x1050\n");
        file(root, "sys/class/drm/card0-eDP-1/device/vendor", "0x8086\n");
        file(root, "sys/class/drm/renderD128/device/vendor", "0x8086\n");
        let describe = |gpus: &[GpuProfile]| -> Vec<(String, String)> {
            let one = |gpu: &GpuProfile| (gpu.name.clone(), gpu.unusable.clone().unwrap());
            gpus.iter().map(one).collect()
        };
        let without_driver = describe(&seen(root));
        assert_eq!(without_driver.len(), 2, "{without_driver:?}");
        assert!(
            without_driver[0].1.contains("driver is not loaded"),
            "{without_driver:?}"
        );
        assert!(
            without_driver[1].0.contains("Intel GPU, device 0x46a6"),
            "{without_driver:?}"
        );

        let information = "Model: \t\t NVIDIA GeForce RTX 3070\nIRQ:   \t\t 80\n";
        file(
            root,
            "proc/driver/nvidia/gpus/0000:01:00.0/information",
            information,
        );
        let with_driver = describe(&seen(root));
        assert_eq!(with_driver.len(), 2, "{with_driver:?}");
        assert_eq!(with_driver[0].0, "NVIDIA GeForce RTX 3070");
        assert!(with_driver[0].1.contains("no driver"), "{with_driver:?}");
    }

    #[test]
    fn what_is_free_of_a_gpu_is_noted_where_that_gpu_was_measured() {
        let measured: GpuMeasurements = serde_json::from_value(serde_json::json!({
            "unifiedMemory": false, "totalBytes": 12, "availableBytes": 11, "readBytesPerSecond": 1,
            "kvAppendBytesPerSecond": 1, "toGpuBytesPerSecond": 1, "fromGpuBytesPerSecond": 1,
            "copyOverheadNanoseconds": 1, "layerOverheadNanoseconds": 1, "throughput": [],
        }))
        .unwrap();
        let mut gpus = seen_and_measured(measured);
        let says = |name: &str, available_bytes| GpuFacts {
            api: GpuApi::Vulkan,
            name: name.into(),
            pci: None,
            pci_address: None,
            unified_memory: false,
            total_bytes: 12,
            available_bytes,
            most_buffer_bytes: None,
        };
        let available = |gpus: &[GpuProfile]| gpus[1].measured.as_ref().unwrap().available_bytes;
        let always = |_: &GpuMeasurements, _: i64| true;
        assert!(set_available(&mut gpus, &[says("used", 3)], always));
        assert_eq!(available(&gpus), 3);
        assert!(!set_available(
            &mut gpus,
            &[says("used", 4)],
            |told, now| { (told.available_bytes, now) != (3, 4) }
        ));
        for other in ["seen", "absent"] {
            assert!(!set_available(&mut gpus, &[says(other, 5)], always));
        }
        assert_eq!(available(&gpus), 3);
        // A driver that says more than there is.
        let more = says("used", u64::MAX);
        assert!(set_available(&mut gpus, &[more], always));
        assert_eq!(available(&gpus), 12);

        // Two of a kind are known by their places, or by their order.
        let mut twins = vec![gpus[1].clone(), gpus[1].clone()];
        let both = |twins: &[GpuProfile]| {
            let measured = twins.iter().filter_map(|gpu| gpu.measured.as_ref());
            measured
                .map(|measured| measured.available_bytes)
                .collect::<Vec<_>>()
        };
        let say = [says("used", 1), says("used", 2)];
        assert!(set_available(&mut twins, &say, always));
        assert_eq!(both(&twins), [1, 2]);
        let at = |address: &str| Some(address.to_owned());
        twins[0].pci_address = at("0000:01:00.0");
        twins[1].pci_address = at("0000:02:00.0");
        let second = GpuFacts {
            pci_address: at("0000:02:00.0"),
            ..says("used", 7)
        };
        assert!(set_available(&mut twins, &[second], always));
        assert_eq!(both(&twins), [1, 7]);
    }

    /// One that cannot be used, and one that was measured.
    fn seen_and_measured(measured: GpuMeasurements) -> [GpuProfile; 2] {
        let gpu = |name: &str, unusable: Option<&str>, measured| GpuProfile {
            name: name.into(),
            pci_address: None,
            backend: GpuBackend::Vulkan,
            unusable: unusable.map(str::to_owned),
            measured,
        };
        [
            gpu("seen", Some("there is no driver"), None),
            gpu("used", None, Some(measured)),
        ]
    }

    /// On lavapipe, as there is no GPU where this is built: that all is measured, not how fast. Lavapipe
    /// takes minutes for all formats.
    #[test]
    fn everything_of_a_gpu_is_measured() {
        // One of them has no kernels there.
        let (gpu, formats) = (Gpu::software().unwrap(), [GgmlType::Q4_0, GgmlType::Iq1S]);
        let expected = formats.len() - 1;
        let facts = GpuFacts {
            api: GpuApi::Vulkan,
            name: "CPU".into(),
            pci: None,
            pci_address: None,
            unified_memory: false,
            total_bytes: 2,
            available_bytes: 1,
            most_buffer_bytes: Some(1 << 20),
        };
        let weights = few_weights();
        let measured = measurements(&gpu, &facts, &pool(), &weights, formats.into_iter()).unwrap();
        assert_eq!((measured.total_bytes, measured.available_bytes), (2, 1));
        for number in [
            measured.read_bytes_per_second,
            measured.kv_append_bytes_per_second,
            measured.to_gpu_bytes_per_second,
            measured.from_gpu_bytes_per_second,
            measured.copy_overhead_nanoseconds,
        ] {
            assert!(number > 0, "{measured:?}");
        }
        assert_eq!(measured.throughput.len(), expected, "{measured:?}");
    }

    /// As many as are copied at once.
    fn few_weights() -> SampleWeights {
        SampleWeights::of(ROWS * ROW * 4)
    }

    fn pool() -> ThreadPool {
        ThreadPool::new(2, IsaLevel::detect()).unwrap()
    }

    /// One of several of the same name.
    fn twin(address: &str) -> GpuFacts {
        GpuFacts {
            api: GpuApi::Vulkan,
            name: "twin".to_owned(),
            pci: None,
            pci_address: Some(address.to_owned()),
            unified_memory: true,
            total_bytes: 2,
            available_bytes: 1,
            most_buffer_bytes: None,
        }
    }

    fn refused(facts: &GpuFacts) -> OpenedGpu {
        OpenedGpu {
            facts: facts.clone(),
            opened: Err(EngineError::NoGpu {
                reason: "it fell off".to_owned(),
            }),
        }
    }

    #[test]
    fn a_driver_that_hangs_leaves_the_rest_of_the_machine() {
        const SOON: Duration = Duration::from_millis(10);
        let root = tempfile::tempdir().unwrap();
        let weights = few_weights();
        let told = |opened: Result<&[OpenedGpu], &EngineError>| {
            let gpus = measure(root.path(), &pool(), &weights, opened);
            let [gpu] = &gpus[..] else {
                panic!("one GPU, not {gpus:?}");
            };
            assert_eq!(gpu.measured, None);
            let reason = gpu.unusable.clone().unwrap();
            assert!(reason.contains("not opened it within 0 s"), "{reason}");
            gpu.plan_name().to_owned()
        };
        let (end, ended) = mpsc::channel::<()>();
        let facts = twin("0000:01:00.0");
        let late = refused(&facts);
        let hangs = move || {
            let _ = ended.recv();
            late
        };
        let opened = opened_within(SOON, [(facts, hangs)]);
        assert_eq!(told(Ok(&opened)), "0000:01:00.0");
        drop(end);

        // Before it has said what there is: the kernel says that.
        card(root.path(), 0, "0x8086\n", "0x46a6\n");
        let (end, ended) = mpsc::channel::<()>();
        let silent = answer(SOON, move || ended.recv()).unwrap_err();
        assert_eq!(told(Err(&silent)), "Intel GPU, device 0x46a6");
        drop(end);
    }

    /// Here the first answers once the second has.
    #[test]
    fn no_gpu_waits_until_another_is_opened() {
        let (say, said) = mpsc::channel::<()>();
        let (first, second) = (twin("0000:01:00.0"), twin("0000:02:00.0"));
        let (of_first, of_second) = (refused(&first), refused(&second));
        let waits: Box<dyn FnOnce() -> OpenedGpu + Send> = Box::new(move || {
            said.recv().unwrap();
            of_first
        });
        let tells: Box<dyn FnOnce() -> OpenedGpu + Send> = Box::new(move || {
            say.send(()).unwrap();
            of_second
        });
        let expected = [first.clone(), second.clone()];
        let opened = opened_within(ANSWERS_WITHIN, [(first, waits), (second, tells)]);
        for (one, facts) in opened.iter().zip(&expected) {
            assert_eq!(one.facts, *facts);
            let reason = one.opened.as_ref().unwrap_err().to_string();
            assert!(reason.contains("it fell off"), "{reason}");
        }
        assert_eq!(opened.len(), expected.len());
    }

    #[test]
    fn each_gpu_of_a_machine_is_in_its_profile() {
        let weights = few_weights();
        let formats = || [GgmlType::Q4_0].into_iter();
        let good = twin("0000:01:00.0");
        let gpu = Gpu::software();
        let good = measured(&good, gpu.as_ref(), &pool(), &weights, formats());
        assert_eq!(good.pci_address.as_deref(), Some("0000:01:00.0"));
        assert!(good.measured.is_some() && good.unusable.is_none());
        let gone = EngineError::NoGpu {
            reason: "it fell off".to_owned(),
        };
        let bad = twin("0000:02:00.0");
        let bad = measured(&bad, Err(&gone), &pool(), &weights, formats());
        assert_eq!(bad.plan_name(), "0000:02:00.0");
        assert!(bad.measured.is_none());
        assert!(bad.unusable.unwrap().contains("it fell off"));
    }

    #[test]
    fn of_a_layers_time_its_weights_are_no_overhead() {
        let rate = |format: GgmlType, seconds: f64| Throughput {
            format: format.name().to_owned(),
            decode_bytes_per_second: (small_layer_bytes() / seconds) as i64,
            prefill_flop_per_second: 1,
            spread_percent: None,
        };
        let measured = [rate(GgmlType::Q8_0, 2.0), rate(SMALL_MODEL, 0.25)];
        for (layer, expected) in [(1.0, 0.75), (0.25, 0.0), (0.1, 0.0), (-1.0, 0.0)] {
            let found = beside_weights(layer, &measured);
            assert!((found - expected).abs() < 1e-6, "{layer}: {found}");
        }
        // Of another format nothing is known.
        assert_eq!(beside_weights(1.0, &measured[..1]), 1.0);
    }
}
