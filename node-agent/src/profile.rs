//! `prima-node-agent profile`: measures this machine and writes it down as a NodeProfile, for the planner.
//!
//! Decides what is measured and how it is split, so that the planner can add it up and nothing is counted twice. For
//! one position a layer takes
//!
//! - its weights' bytes / `decodeBytesPerSecond` of their format: this contains reading them from memory,
//! - `layerOverheadNanoseconds`: everything else but the KV cache (norms, rotation, handing out work to threads),
//! - the KV cache's bytes of the positions before / `memory.readBytesPerSecond`,
//! - its own keys' and values' bytes / `memory.kvAppendBytesPerSecond`.
//!
//! For many positions (prefill), 2 FLOP for each weight and position / `prefillFlopPerSecond` replaces the first item. Weights that are not
//! in memory take their bytes / `disk.sequentialReadBytesPerSecond` in addition; while that overlaps with computing, both run at their
//! shares `readWhileComputingPercent` and `computeWhileReadingPercent`. Experts that are not in memory take their bytes /
//! `disk.expertReadBytesPerSecond`, which overlaps with nothing. A hop takes `latencyNanoseconds` + its bytes / `bytesPerSecond` of
//! the link.
//!
//! All of it is measured with the engine's own kernels, map and transport, and with as many threads as `serve` takes; the
//! median of several runs counts. A machine that is busy while it is measured looks slower than it is. Refuses: to guess
//! what was not measured, and to decide what the machine is used for.

mod cache;
mod cpu;
mod disk;
pub(crate) mod gpu;
pub(crate) mod gpu_power;
pub(crate) mod links;
mod memory;
mod others;
mod samples;
pub(crate) mod system;
mod table;

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use jiff::Timestamp;
use prima_crds::v1alpha1::document::DocumentError;
use prima_crds::v1alpha1::node_profile::{
    CpuProfile, LinkProfile, MemoryProfile, NodeProfile, NodeProfileSpec, NodeProfileStatus,
    SystemProfile,
};
use prima_engine::kernels::{IsaLevel, IsaLevelError, MatrixError, ThreadPool, ThreadPoolError};
use prima_engine::{Compute, EngineError, Gpu, GpuApi, OpenedGpu};
use prima_gguf::part_paths;
use prima_model::ModelPart;
use prima_weights::cache_folder;

use crate::available_memory::{self, MemoryError, MemoryNow};
use crate::ring::LinkError;
pub use cache::{BUSY_PERCENT, CacheKey};
use cpu::SampleWeights;
pub use cpu::cache_bytes;
use disk::DiskError;
use links::LinkTarget;

#[derive(clap::Args)]
pub struct ProfileArgs {
    /// This machine's name [default: its host name]
    #[arg(long, value_name = "NAME", value_parser = system::check_name)]
    name: Option<String>,
    /// Where models lie, a folder or a GGUF file: its disk is measured [default: `models` in prima's cache]
    #[arg(long, value_name = "PATH")]
    models: Option<PathBuf>,
    /// Compute threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Measure the link to another machine, where `serve` runs a member without a key; may be repeated [default: to this machine itself]
    #[arg(long = "link", value_name = "NAME=HOST:PORT", value_parser = links::parse_target)]
    links: Vec<LinkTarget>,
    /// Measure again what was measured in the last seven days
    #[arg(long)]
    fresh: bool,
    /// For people or for programs
    #[arg(short, long, value_enum, default_value = "table")]
    output: OutputFormat,
}

/// How to show the profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OutputFormat {
    /// For people: rounded.
    Table,
    /// The NodeProfile document.
    Yaml,
    /// The same as JSON.
    Json,
}

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("cannot choose the processor's kernels")]
    Level(#[source] IsaLevelError),
    #[error("cannot start the compute threads")]
    Threads(#[source] ThreadPoolError),
    #[error("cannot measure the processor")]
    Cpu(#[source] MatrixError),
    #[error("cannot measure the memory")]
    Memory(#[source] MemoryError),
    #[error("cannot measure the disk")]
    Disk(#[source] DiskError),
    #[error("cannot measure the link to {name}")]
    Link {
        name: String,
        #[source]
        source: LinkError,
    },
    #[error(
        "neither PRIMA_CACHE, XDG_CACHE_HOME nor HOME says where models are kept: name the folder with --models"
    )]
    NoModelsFolder,
    #[error("cannot make the models' folder {}; name another one with --models", path.display())]
    ModelsFolder {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("what was measured makes no sense; measure again, and report it if it stays so")]
    Invalid(#[source] DocumentError),
    #[error("cannot write the profile as YAML")]
    Yaml(#[source] serde_saphyr::SerializeError),
    #[error("cannot write the profile as JSON")]
    Json(#[source] serde_json::Error),
}

/// Measures this machine, or takes a recent measurement, and shows it. Reports progress on stderr.
///
/// # Errors
/// Whatever prevents a measurement. A cache that cannot be written is only reported.
pub fn run(args: ProfileArgs) -> Result<String, ProfileError> {
    let name = args.name.unwrap_or_else(system::host_name);
    let models = models_path(args.models)?;
    // Links come first: they depend on others, and a wrong name should be reported at once. Never from the cache.
    let links: Vec<LinkProfile> = args.links.iter().map(link).collect::<Result<_, _>>()?;
    let cache_file = cache_file(&name);
    let Measured { mut status, .. } = measured(&Measuring {
        models: &models,
        threads: args
            .threads
            .map_or_else(Compute::available_threads, usize::from),
        cache_file: cache_file.as_deref(),
        fresh: args.fresh,
    })?;
    if !links.is_empty() {
        status.links = links;
    }

    let mut profile = NodeProfile::new(&name, NodeProfileSpec::default());
    profile.status = Some(status);
    profile.validate(&name).map_err(ProfileError::Invalid)?;
    show(&profile, args.output)
}

/// Where the measurements of the machine `name` are kept, if there is a place for it.
pub fn cache_file(name: &str) -> Option<PathBuf> {
    Some(cache_folder()?.join(format!("profiles/{name}.json")))
}

/// How many weight formats a profile has rates of.
#[cfg(test)]
pub(crate) fn formats() -> usize {
    cpu::formats().count()
}

/// How a machine is measured.
pub struct Measuring<'a> {
    /// Absolute: the folder or file whose disk is measured.
    pub models: &'a Path,
    /// Compute threads.
    pub threads: usize,
    /// Where measurements are kept. `None`: nowhere.
    pub cache_file: Option<&'a Path>,
    /// Measure again what was measured recently.
    pub fresh: bool,
}

/// What a machine can do, as it was measured.
#[derive(Debug)]
pub struct Measured {
    pub status: NodeProfileStatus,
    /// How much of the processors' time other programs used meanwhile. With more than [`BUSY_PERCENT`] the machine looks slower than it is.
    pub others_percent: u8,
    /// What it depends on.
    pub key: CacheKey,
}

impl Measured {
    /// Keeps it for calls of [`measured`] with this file. A file that cannot be written is only reported.
    pub fn keep(&self, file: &Path) {
        let (key, status) = (self.key.clone(), self.status.clone());
        if let Err(error) = cache::store(file, key, self.others_percent, status) {
            progress(&prima_crds::error_chain(&error));
        }
    }
}

/// What this machine can do, measured now or recently, with the memory that is available now. Reports progress on stderr.
///
/// # Errors
/// As [`run`].
pub fn measured(measuring: &Measuring<'_>) -> Result<Measured, ProfileError> {
    let Measuring {
        models,
        threads,
        cache_file,
        fresh,
    } = *measuring;
    let root = Path::new("/");
    let system = system::read(root);
    let now = available_memory::read(root, system.os).map_err(ProfileError::Memory)?;
    let level = IsaLevel::from_environment().map_err(ProfileError::Level)?;
    let opened = gpu::open_all();
    let key = CacheKey {
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        kernels: level.name().to_owned(),
        cpu_model: system::cpu_model(root),
        threads,
        models: disk::folder(models).to_owned(),
        memory_total_bytes: now.total,
        gpu: match &opened {
            Ok(opened) => gpus_key(opened),
            Err(error) => prima_crds::error_chain(error),
        },
    };
    let mut measured = match cached(cache_file, &key, fresh) {
        Some(measured) => measured,
        None => {
            let pool = ThreadPool::new(threads, level).map_err(ProfileError::Threads)?;
            let before = others::Ticks::read(root);
            let gpus = opened.as_deref();
            let status = measure(root, system, &key, models, now, &pool, gpus)?;
            let others_percent = match (before, others::Ticks::read(root)) {
                (Some(before), Some(after)) => after.others_percent(before),
                _ => 0,
            };
            if others_percent > BUSY_PERCENT {
                progress(&format!(
                    "other programs used {others_percent} % of the processors meanwhile: this machine looks slower than it is, \
                     and is measured again in some minutes, or with --fresh"
                ));
            }
            let measured = Measured {
                status,
                others_percent,
                key,
            };
            if let Some(file) = cache_file {
                measured.keep(file);
            }
            measured
        }
    };
    let status = &mut measured.status;
    status.architectures = prima_model::architectures().map(str::to_owned).collect();
    status.parts = names(Compute::model_parts());
    status.reads_windowed_sequences = true;
    status.reads_gpus = true;
    status.reads_chunk_positions = true;
    for gpu in &mut status.gpus {
        if let (Some(measured), Some(api)) = (gpu.measured.as_mut(), gpu::api(gpu.backend)) {
            measured.parts = names(Gpu::model_parts(api));
            measured.streams_weights = api == GpuApi::Vulkan && !measured.unified_memory;
            measured.runs_drafts = true;
            measured.most_buffer_bytes = None;
        }
    }
    let opened = opened.unwrap_or_default().into_iter();
    let asked: Vec<gpu::AskedGpu> = opened.map(gpu::asked).collect();
    let opened = gpu::opened(&asked);
    for (facts, place) in opened.iter().zip(gpu::places(&status.gpus, &opened)) {
        if let Some(measured) = place.and_then(|place| status.gpus[place].measured.as_mut()) {
            let bytes = facts.most_buffer_bytes;
            measured.most_buffer_bytes =
                bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }
    // What changes from hour to hour is never taken from the cache.
    let now = available_memory::read(root, status.system.os).map_err(ProfileError::Memory)?;
    status.memory.total_bytes = now.total as i64;
    status.memory.available_bytes = now.available as i64;
    status.memory.swappable_bytes = now.swappable as i64;
    gpu::set_available(&mut status.gpus, &gpu::free(&asked), |_, _| true);
    Ok(measured)
}

/// Names of the GPUs with their places, and why one cannot be opened.
fn gpus_key(opened: &[OpenedGpu]) -> String {
    let each = opened.iter().map(|gpu| match &gpu.opened {
        Ok(_) => gpu.facts.label(),
        Err(error) => format!("{}: {}", gpu.facts.label(), prima_crds::error_chain(error)),
    });
    each.collect::<Vec<_>>().join(", ")
}

/// As a profile has them.
fn names(parts: impl Iterator<Item = ModelPart>) -> Vec<String> {
    parts.map(|part| part.name().to_owned()).collect()
}

/// The whole machine, in ten to fifteen seconds.
fn measure(
    root: &Path,
    system: SystemProfile,
    key: &CacheKey,
    models: &Path,
    now: MemoryNow,
    pool: &ThreadPool,
    opened: Result<&[OpenedGpu], &EngineError>,
) -> Result<NodeProfileStatus, ProfileError> {
    let begun = Instant::now();
    let weights = SampleWeights::new(cpu::cache_bytes(root), now.available);
    progress(&format!("measuring the disk of {}", models.display()));
    let some_work = cpu::some_work(pool, &weights).map_err(ProfileError::Cpu)?;
    let disk = disk::measure(models, pool, &some_work).map_err(ProfileError::Disk)?;
    drop(some_work);

    progress("measuring the memory");
    let memory = MemoryProfile {
        total_bytes: now.total as i64,
        available_bytes: now.available as i64,
        swappable_bytes: now.swappable as i64,
        read_bytes_per_second: memory::read_rate(pool, weights.bytes()) as i64,
        kv_append_bytes_per_second: memory::kv_append_rate(pool, weights.bytes()) as i64,
    };

    progress(&format!(
        "measuring the processor: {} formats of weights, {} threads, {} kernels",
        cpu::formats().count(),
        pool.threads(),
        pool.level()
    ));
    let throughput = cpu::formats()
        .map(|format| cpu::throughput(pool, &weights, format))
        .collect::<Result<_, _>>()
        .map_err(ProfileError::Cpu)?;
    let overhead = cpu::layer_overhead_seconds(pool, &weights).map_err(ProfileError::Cpu)?;
    progress("measuring the GPUs, if there are any");
    let gpus = gpu::measure(root, pool, &weights, opened);
    drop(weights);

    progress("measuring the link to this machine itself");
    let loopback = links::measure_loopback().map_err(|source| ProfileError::Link {
        name: links::LOOPBACK.to_owned(),
        source,
    })?;
    progress(&format!(
        "measured in {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    Ok(NodeProfileStatus {
        conditions: Vec::new(),
        measured_at: now_to_the_second().to_string(),
        agent_version: key.agent_version.clone(),
        architectures: Vec::new(),
        parts: Vec::new(),
        reads_windowed_sequences: false,
        reads_gpus: false,
        reads_chunk_positions: false,
        system,
        cpu: CpuProfile {
            model: key.cpu_model.clone(),
            threads: key.threads as i32,
            features: IsaLevel::detected_features()
                .into_iter()
                .map(str::to_owned)
                .collect(),
            kernels: key.kernels.clone(),
            throughput,
            layer_overhead_nanoseconds: (overhead * 1e9) as i64,
        },
        memory,
        disk,
        gpus,
        links: vec![loopback],
        agent: None,
    })
}

/// The earlier measurement, if it still counts; if not, reports why.
fn cached(file: Option<&Path>, key: &CacheKey, fresh: bool) -> Option<Measured> {
    match cache::load(file?, key, Timestamp::now()) {
        _ if fresh => None,
        Ok(measured) => {
            progress(&format!(
                "measured at {}; --fresh measures again",
                measured.status.measured_at
            ));
            Some(measured)
        }
        Err(reason) => {
            progress(&reason);
            None
        }
    }
}

fn link(target: &LinkTarget) -> Result<LinkProfile, ProfileError> {
    progress(&format!(
        "measuring the link to {} ({})",
        target.name, target.address
    ));
    links::measure(target, None).map_err(|source| ProfileError::Link {
        name: target.name.clone(),
        source,
    })
}

/// The models' folder or file, absolute. The default is created if it is missing; a named one must exist.
fn models_path(named: Option<PathBuf>) -> Result<PathBuf, ProfileError> {
    let path = match named {
        Some(path) => largest_part(path),
        None => {
            let path = cache_folder()
                .ok_or(ProfileError::NoModelsFolder)?
                .join("models");
            fs::create_dir_all(&path).map_err(|source| ProfileError::ModelsFolder {
                path: path.clone(),
                source,
            })?;
            path
        }
    };
    path.canonicalize()
        .map_err(|source| ProfileError::Disk(DiskError::Models { path, source }))
}

/// The largest file of the model that begins with `first`: the first of several may have no tensors. A folder, and what is not there, as it is.
fn largest_part(first: PathBuf) -> PathBuf {
    let length = |path: &PathBuf| fs::metadata(path).ok().map(|metadata| metadata.len());
    // From behind: of equals the last counts.
    let largest = part_paths(&first).into_iter().rev().max_by_key(length);
    largest.unwrap_or(first)
}

fn show(profile: &NodeProfile, output: OutputFormat) -> Result<String, ProfileError> {
    match (output, &profile.status) {
        (OutputFormat::Table, Some(status)) => {
            let name = profile.metadata.name.as_deref().unwrap_or_default();
            Ok(table::show(name, status))
        }
        (OutputFormat::Json, _) => {
            let mut text = serde_json::to_string_pretty(profile).map_err(ProfileError::Json)?;
            text.push('\n');
            Ok(text)
        }
        (OutputFormat::Yaml | OutputFormat::Table, _) => {
            serde_saphyr::to_string(profile).map_err(ProfileError::Yaml)
        }
    }
}

fn now_to_the_second() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

fn progress(text: &str) {
    // Nobody may be reading; the profile is what counts.
    let _ = writeln!(io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn of_a_model_in_several_files_the_largest_is_measured() {
        let folder = tempfile::tempdir().unwrap();
        let part = |number| folder.path().join(format!("m-0000{number}-of-00003.gguf"));
        assert_eq!(largest_part(part(1)), part(1), "none is there");
        // Links to files whose names do not tell that they are one model.
        for (number, length) in [(1, 4), (2, 900), (3, 800)] {
            let file = folder.path().join(format!("blob-{number}"));
            fs::write(&file, vec![1; length]).unwrap();
            symlink(file, part(number)).unwrap();
        }
        assert_eq!(largest_part(part(1)), part(2));
        let found = models_path(Some(part(1))).unwrap();
        assert_eq!(found.file_name(), Some("blob-2".as_ref()));
        assert_eq!(largest_part(folder.path().to_owned()), folder.path());
    }
}
