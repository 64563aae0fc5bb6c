//! The peer: llama.cpp's own llama-bench, llama-batched-bench and llama-server, built once for this machine from the source in PyPI's
//! llama-cpp-python.
//!
//! Decides nothing about what is measured. Its defaults stay (flash attention and repacking as it likes), as they are what its users get;
//! after much context, where they are not its best, the caller chooses.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use prima_engine::Compute;
use prima_tests::free_ports::free_address;
use prima_tests::machine::Machine;
use prima_tests::{Endpoint, assets, http};

use crate::error::BenchError;

/// Its programs.
pub struct Programs {
    folder: PathBuf,
}

/// How it computes attention.
#[derive(Clone, Copy)]
pub enum FlashAttention {
    On,
    Off,
}

impl FlashAttention {
    pub const BOTH: [Self; 2] = [Self::On, Self::Off];

    pub fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

const PROGRAMS: [&str; 3] = ["llama-bench", "llama-batched-bench", "llama-server"];

/// llama-server; killed on drop.
pub struct Server {
    child: Child,
    address: SocketAddr,
}

/// For a large model to be read.
const LOADED_WITHIN: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Builds them when they are not there, which takes some ten minutes on two cores.
pub fn build() -> Result<Programs, BenchError> {
    let build = assets::cache()?.join("peers/llama.cpp-build");
    let programs = Programs {
        folder: build.join("bin"),
    };
    if PROGRAMS
        .iter()
        .all(|program| programs.folder.join(program).exists())
    {
        return Ok(programs);
    }
    let source = assets::path("peers/llama.cpp")?;
    eprintln!(
        "building {} in {} (once)",
        PROGRAMS.join(", "),
        build.display()
    );
    let mut configure = Command::new("nice");
    configure
        // Cargo's settings for HiGHS (.cargo/config.toml), which llama.cpp does not compile with.
        .env_remove("CMAKE_TOOLCHAIN_FILE")
        .args([
            "cmake",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=OFF",
        ])
        .args([
            "-DLLAMA_BUILD_TESTS=OFF",
            "-DLLAMA_BUILD_EXAMPLES=OFF",
            "-DLLAMA_BUILD_SERVER=ON",
            // Its page would be fetched from a hub.
            "-DLLAMA_USE_PREBUILT_UI=OFF",
        ])
        .arg("-S")
        .arg(&source)
        .arg("-B")
        .arg(&build);
    if has_doubtful_amx() {
        eprintln!("without AMX: this is a virtual machine, which may list it and not give it");
        let flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16";
        configure.args(["C", "CXX"].map(|language| format!("-DCMAKE_{language}_FLAGS={flags}")));
    }
    output("cmake", &mut configure)?;
    let mut compile = Command::new("nice");
    compile
        .args(["cmake", "--build"])
        .arg(&build)
        .arg("--target")
        .args(PROGRAMS)
        // Without a number, all files at once.
        .arg(format!("--parallel={}", Compute::available_threads()));
    output("cmake --build", &mut compile)?;
    Ok(programs)
}

/// Where a virtual machine lists it and does not give it, llama.cpp's code for it ends with SIGILL.
fn has_doubtful_amx() -> bool {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags"));
    let has = |name| flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == name));
    has("amx_tile") && has("hypervisor")
}

impl Programs {
    /// Tokens per second of one run: a prompt of `prefill` tokens in one batch, or `decode` tokens one at a time (the other being 0).
    pub fn tokens_per_second(
        &self,
        model: &Path,
        threads: usize,
        prefill: usize,
        decode: usize,
    ) -> Result<f64, BenchError> {
        rate(&mut self.bench(model, threads, prefill, decode))
    }

    /// The same after `depth` tokens of context, which are not counted.
    pub fn tokens_per_second_deep(
        &self,
        model: &Path,
        threads: usize,
        prefill: usize,
        decode: usize,
        depth: usize,
        flash_attention: FlashAttention,
    ) -> Result<f64, BenchError> {
        let mut command = self.bench(model, threads, prefill, decode);
        command.args(["-d", &depth.to_string(), "-fa", flash_attention.name()]);
        rate(&mut command)
    }

    /// As [`tokens_per_second`](Self::tokens_per_second), of `decode` tokens on `machine`, with weights in its map as they are: the last of so many
    /// repetitions.
    pub fn tokens_per_second_in(
        &self,
        machine: &Machine,
        model: &Path,
        threads: usize,
        decode: usize,
        repetitions: usize,
    ) -> Result<f64, BenchError> {
        let mut command = self.bench(model, threads, 0, decode);
        command
            .args(["--load-mode", "mmap", "--repack", "0"])
            .args(["-r", &repetitions.to_string()]);
        rate(&mut machine.enter(command))
    }

    /// Tokens per second of all of `sequences` together, each decoding `decode` tokens after its own prompt of `prompt`, which is not
    /// counted.
    pub fn tokens_per_second_at_once(
        &self,
        model: &Path,
        threads: usize,
        sequences: usize,
        prompt: usize,
        decode: usize,
    ) -> Result<f64, BenchError> {
        let mut command = Command::new(self.folder.join("llama-batched-bench"));
        command
            .arg("-m")
            .arg(model)
            .args(["-t", &threads.to_string()])
            .args(["-c", &(sequences * (prompt + decode)).to_string()])
            .args(["-npp", &prompt.to_string(), "-ntg", &decode.to_string()])
            .args(["-npl", &sequences.to_string()])
            .args(["--output-format", "jsonl"]);
        let output = output("llama-batched-bench", &mut command)?;
        let mut lines = output.lines().filter(|line| line.starts_with('{'));
        lines
            .next_back()
            .and_then(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .and_then(|run| run.get("speed_tg")?.as_f64())
            .ok_or(BenchError::PeerOutput { output })
    }

    /// llama-server, when it serves: with its defaults, prompt cache included, but for the `threads`, the tokens of all requests' `context`
    /// together, and `options`.
    pub fn server(
        &self,
        model: &Path,
        threads: usize,
        context: usize,
        options: &[&str],
    ) -> Result<Server, BenchError> {
        self.server_on(None, model, threads, context, options)
    }

    /// The same on `machine`.
    pub fn server_on(
        &self,
        machine: Option<&Machine>,
        model: &Path,
        threads: usize,
        context: usize,
        options: &[&str],
    ) -> Result<Server, BenchError> {
        const PROGRAM: &str = "llama-server";
        let failed = |source| BenchError::Run {
            program: PROGRAM.to_owned(),
            source,
        };
        let address = free_address();
        let mut command = Command::new(self.folder.join(PROGRAM));
        command
            .arg("-m")
            .arg(model)
            .args(["-t", &threads.to_string(), "-c", &context.to_string()])
            .args(["--port", &address.port().to_string()])
            .args(options);
        let mut command = match machine {
            Some(machine) => machine.enter(command),
            None => command,
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let mut server = Server { child, address };
        let begun = Instant::now();
        while !http::get(address, "/health").is_ok_and(|health| health.status == 200) {
            let ended = server.child.try_wait().map_err(failed)?;
            if ended.is_some() || begun.elapsed() > LOADED_WITHIN {
                let outcome =
                    ended.map_or("it still loads".to_owned(), |status| status.to_string());
                return Err(BenchError::PeerServer { outcome });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(server)
    }

    fn bench(&self, model: &Path, threads: usize, prefill: usize, decode: usize) -> Command {
        let mut command = Command::new(self.folder.join("llama-bench"));
        command
            .arg("-m")
            .arg(model)
            .args(["-t", &threads.to_string()])
            .args(["-p", &prefill.to_string(), "-n", &decode.to_string()])
            .args(["-r", "1", "-o", "json"]);
        command
    }
}

impl Endpoint for Server {
    fn address(&self) -> SocketAddr {
        self.address
    }

    /// It has one only, and takes any name.
    fn model(&self) -> &str {
        "llama.cpp"
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only where it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Of the last repetition.
fn rate(command: &mut Command) -> Result<f64, BenchError> {
    let output = output("llama-bench", command)?;
    serde_json::from_str::<serde_json::Value>(&output)
        .ok()
        .and_then(|runs| runs.get(0)?.get("samples_ts")?.as_array()?.last()?.as_f64())
        .ok_or(BenchError::PeerOutput { output })
}

/// The standard output of a program that must succeed.
fn output(program: &str, command: &mut Command) -> Result<String, BenchError> {
    let program = program.to_owned();
    match command.output() {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => Err(BenchError::Failed {
            program,
            status: output.status,
            output: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
        Err(source) => Err(BenchError::Run { program, source }),
    }
}
