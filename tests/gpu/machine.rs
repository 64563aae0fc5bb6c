//! What is checked: the GPU, its driver, the machine around it.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use prima_engine::{Compute, Gpu, GpuFacts};
use prima_tests::inputs;

use crate::error::CheckError;

pub struct Machine {
    pub gpu: Gpu,
    pub facts: GpuFacts,
    /// Whether the driver computes on the processor.
    pub software: bool,
    /// Whether its driver has a clock that tells when it computes: not every one has.
    pub has_clock: bool,
    driver: String,
    processor: String,
    /// What `prima-node-agent inspect --gpu` prints.
    pub inspected: String,
}

impl Machine {
    /// # Errors
    /// [`CheckError::NoGpu`] where there is none.
    pub fn inspect() -> Result<Machine, CheckError> {
        let gpu = Gpu::open().map_err(CheckError::NoGpu)?;
        let facts = gpu.facts()?;
        let has_clock = gpu.start_timeline().is_ok();
        gpu.end_timeline()?;
        let mut inspect = Command::new(inputs::program("prima-node-agent"));
        Ok(Machine {
            software: std::env::var_os("PRIMA_GPU").is_some_and(|choice| choice == "software"),
            driver: driver(&facts.name),
            processor: processor(),
            inspected: output(inspect.args(["inspect", "--gpu"]))?,
            has_clock,
            gpu,
            facts,
        })
    }

    pub fn threads() -> usize {
        Compute::available_threads()
    }

    /// The rows of the report's first table.
    pub fn rows(&self) -> [(&'static str, String); 4] {
        let gibibytes = self.facts.total_bytes as f64 / (1 << 30) as f64;
        let whose = match self.facts.unified_memory {
            true => "the processor's",
            false => "its own",
        };
        [
            (
                "GPU",
                format!("{}, {gibibytes:.1} GiB, {whose}", self.facts.name),
            ),
            ("through", format!("{:?}", self.facts.api)),
            ("driver", self.driver.clone()),
            (
                "processor",
                format!(
                    "{} ({}), {} threads",
                    self.processor,
                    std::env::consts::ARCH,
                    Self::threads()
                ),
            ),
        ]
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in self.rows() {
            writeln!(f, "{name:<10} {value}")?;
        }
        Ok(())
    }
}

/// What a program of the bundle prints.
///
/// # Errors
/// Where it cannot be started, or fails.
pub fn output(command: &mut Command) -> Result<String, CheckError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|source| CheckError::Run {
        program: program.clone(),
        source,
    })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(CheckError::Failed {
            program,
            status: output.status,
            output: text(&output.stdout) + &text(&output.stderr),
        }),
    }
}

/// A file that lies in the bundle, or in target/release.
pub fn beside_programs(name: &str) -> PathBuf {
    inputs::program("prima").with_file_name(name)
}

/// NVIDIA's driver says its version in a file; of others Vulkan's own tool knows it, where it is installed.
fn driver(gpu: &str) -> String {
    let nvidia = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    if let Some(line) = nvidia.lines().next().filter(|_| gpu.contains("NVIDIA")) {
        return line.split_whitespace().collect::<Vec<_>>().join(" ");
    }
    let summary = output(Command::new("vulkaninfo").arg("--summary")).unwrap_or_default();
    let of_gpu = summary.split("\nGPU").find(|part| part.contains(gpu));
    let line = of_gpu.and_then(|part| part.lines().find(|line| line.contains("driverInfo")));
    match line.and_then(|line| line.split_once('=')) {
        Some((_, version)) => version.trim().to_owned(),
        None => "unknown (vulkaninfo, which says it, is not installed)".to_owned(),
    }
}

fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':'));
    name.map_or("unknown processor".to_owned(), |(_, name)| {
        name.trim().to_owned()
    })
}

/// Bytes of the machine's memory that are free for programs.
pub fn available_memory() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kilobytes = kilobytes.and_then(|number| number.trim().parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
