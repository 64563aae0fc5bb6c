//! The process itself.

use std::ffi::OsStr;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::lines::Lines;

/// The arguments that `serve` is started with. It chooses what is not given.
#[derive(Clone, Copy)]
pub struct Serve<'a> {
    pub plan_file: &'a Path,
    /// Its name in the plan.
    pub member: &'a str,
    /// The file with the key of the machine's agent, if the plan has keys.
    pub identity: Option<&'a Path>,
    /// The file with the API keys that rank 0 asks its clients for, if the plan says so.
    pub api_key_file: Option<&'a Path>,
    /// Where its predecessor connects, if not where the plan says.
    pub listen: Option<SocketAddr>,
    /// Where rank 0 serves HTTP.
    pub http: Option<SocketAddr>,
    pub threads: Option<usize>,
    /// Bytes that stay free for the machine's owner.
    pub reserve_memory: Option<u64>,
    /// Bytes that weights take at most.
    pub weights_memory: Option<u64>,
    /// All weights are left to the page cache.
    pub no_streaming: bool,
    /// Rank 0 computes one token at a time.
    pub no_speculation: bool,
    /// Rank 0 answers to any model's name.
    pub any_model_name: bool,
    /// The key that rank 0 asks its clients for, beside the keys of the plan.
    pub api_key: Option<&'a str>,
    /// A folder that it must not read.
    pub hidden: Option<&'a Path>,
    /// Seconds that requests wait for a member that was lost. Zero where nobody starts it again: they fail.
    pub outlast_losses: u64,
    /// It gives signs of life, for [`MemberProcess::hangs`].
    pub says_alive: bool,
}

impl<'a> Serve<'a> {
    /// A member that chooses all else.
    pub fn new(plan_file: &'a Path, member: &'a str) -> Self {
        Self {
            plan_file,
            member,
            identity: None,
            api_key_file: None,
            listen: None,
            http: None,
            threads: None,
            reserve_memory: None,
            weights_memory: None,
            no_streaming: false,
            no_speculation: false,
            any_model_name: false,
            api_key: None,
            hidden: None,
            outlast_losses: 0,
            says_alive: false,
        }
    }
}

/// The arguments that `borrow run` is started with: a member on a machine that is lent.
#[derive(Clone, Copy)]
pub struct Lent<'a> {
    pub plan_file: &'a Path,
    /// Its name in the plan.
    pub member: &'a str,
    /// `HOST:PORT` of the agent that lends the machine.
    pub lender: &'a str,
}

/// What a member's process is.
#[derive(Clone, Copy)]
pub enum Launch<'a> {
    Serve(Serve<'a>),
    Lent(Lent<'a>),
}

#[derive(Debug, thiserror::Error)]
#[error("cannot start {}", program.display())]
pub struct StartError {
    program: PathBuf,
    source: io::Error,
}

/// Dropping it kills the process.
pub struct MemberProcess {
    child: Child,
    pid: u32,
    lines: Arc<Lines>,
    readers: Vec<JoinHandle<()>>,
}

/// The variable with the key that rank 0 asks for.
const API_KEY: &str = "PRIMA_API_KEY";
/// Variables that every program may have, and those of logs.
const HANDED_ON: [&str; 15] = [
    "GLIBC_TUNABLES",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "LOCALE_ARCHIVE",
    "PATH",
    "RAYON_NUM_THREADS",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "TERM",
    "TMPDIR",
    "TZ",
    "TZDIR",
    "USER",
];
/// How the variables begin that collectors of traces, folders, the system's memory, candle, the loader of Vulkan, and drivers of GPUs have.
const DRIVERS: [&str; 24] = [
    "AMD_",
    "ANV_",
    "CANDLE_",
    "CUDA_",
    "DISABLE_LAYER_",
    "DRI_",
    "DYLD_",
    "GALLIUM_",
    "HSA_",
    "INTEL_",
    "LIBGL_",
    "LP_",
    "MALLOC_",
    "MESA_",
    "METAL_",
    "MVK_",
    "NODEVICE_",
    "NVIDIA_",
    "NVK_",
    "OTEL_",
    "RADV_",
    "VK_",
    "XDG_",
    "__GL_",
];

/// A process that says that it is alive, every [`ALIVE_INTERVAL`](crate::ALIVE_INTERVAL), and has not for so long, hangs.
pub const HANGS_AFTER: Duration = Duration::from_secs(20);
/// How long to wait for the last output of an ended process.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

impl MemberProcess {
    /// Starts `program`, a `prima-node-agent`. It ends when this process ends, in whatever way: the kernel ties it to the thread that
    /// calls this, which therefore must be the main one. `each_line` gets what it writes.
    pub fn start(
        program: &Path,
        launch: &Launch<'_>,
        each_line: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, StartError> {
        let cannot = |source| StartError {
            program: program.to_owned(),
            source,
        };
        let mut child = command(program, launch).spawn().map_err(cannot)?;
        let pid = child
            .id()
            .ok_or_else(|| cannot(io::Error::other("it has no process id")))?;
        let lines = Lines::new(each_line);
        let mut readers = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            readers.push(tokio::spawn(lines.clone().follow(stdout)));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.push(tokio::spawn(lines.clone().follow(stderr)));
        }
        Ok(Self {
            child,
            pid,
            lines,
            readers,
        })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it wrote last, oldest first.
    pub fn last_lines(&self) -> Vec<String> {
        self.lines.last()
    }

    /// Waits until it has joined its ring; for ever if it does not.
    pub fn joined(&self) -> impl Future<Output = ()> + use<> {
        let mut joined = self.lines.joined();
        async move {
            if joined.wait_for(|joined| *joined).await.is_err() {
                pending().await
            }
        }
    }

    /// Waits until it has given no sign of life for [`HANGS_AFTER`]; for ever if it ends before.
    pub fn hangs(&self) -> impl Future<Output = ()> + use<> {
        let mut alive = self.lines.alive();
        async move {
            let mut silences = 0;
            // Two silences, each of half the time: after the first, signs may wait to be read, because this process could not run itself.
            while silences < 2 {
                match timeout(HANGS_AFTER / 2, alive.changed()).await {
                    Ok(Ok(())) => silences = 0,
                    Ok(Err(_)) => pending().await,
                    Err(_) => silences += 1,
                }
            }
        }
    }

    /// Waits until it has ended and its last lines are there. May be dropped and called again.
    ///
    /// # Errors
    /// If there is no such process to wait for.
    pub async fn ended(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait().await;
        // Not for another process that inherited the pipe.
        while let Some(reader) = self.readers.last_mut() {
            if timeout(LAST_OUTPUT, &mut *reader).await.is_err() {
                reader.abort();
            }
            self.readers.pop();
        }
        status
    }

    /// Sends it to the whole process group; nothing if it has ended (its id may be another's by then).
    pub fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id as i32));
        if let Some(pid) = pid {
            // The only failure left is that it ended just now.
            let _ = kill_process_group(pid, signal);
        }
    }
}

/// Ends all of them: SIGTERM, at which a member finishes what runs; SIGTERM again after each `patience`, at which it ends at once;
/// SIGKILL for those that hang. Returns whether SIGKILL was needed.
pub async fn end(processes: &mut [MemberProcess], patience: &[Duration]) -> bool {
    for patience in patience {
        signal_all(processes, Signal::TERM);
        if timeout(*patience, all_ended(processes)).await.is_ok() {
            return false;
        }
    }
    signal_all(processes, Signal::KILL);
    all_ended(processes).await;
    true
}

fn signal_all(processes: &[MemberProcess], signal: Signal) {
    for process in processes {
        process.signal(signal);
    }
}

async fn all_ended(processes: &mut [MemberProcess]) {
    for process in processes {
        // An error means that there is none to wait for.
        let _ = process.ended().await;
    }
}

fn command(program: &Path, launch: &Launch<'_>) -> Command {
    let mut command = Command::new(program);
    let (plan_file, member) = match launch {
        Launch::Serve(serve) => {
            command.arg("serve");
            (serve.plan_file, serve.member)
        }
        Launch::Lent(lent) => {
            command.args(["borrow", "run", "--lender", lent.lender]);
            (lent.plan_file, lent.member)
        }
    };
    command
        .arg("--plan")
        .arg(plan_file)
        .args(["--member", member])
        .args(["--exit-with-parent", &std::process::id().to_string()])
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| is_handed_on(name)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A group of its own: Ctrl-C on the terminal is for its owner, which ends members in order.
        .process_group(0)
        .kill_on_drop(true);
    if let Launch::Serve(serve) = launch {
        add_options(&mut command, serve);
    }
    command
}

/// Whether a member gets a variable of the environment of whoever starts it. It reads what strangers send, and needs no tokens and no proxies'
/// passwords.
fn is_handed_on(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    let ours = name.starts_with("PRIMA_") && name != API_KEY;
    ours || HANDED_ON.contains(&name) || DRIVERS.iter().any(|prefix| name.starts_with(prefix))
}

fn add_options(command: &mut Command, serve: &Serve<'_>) {
    let Serve {
        plan_file: _,
        member: _,
        identity,
        api_key_file,
        listen,
        http,
        threads,
        reserve_memory,
        weights_memory,
        no_streaming,
        no_speculation,
        any_model_name,
        api_key,
        hidden,
        outlast_losses,
        says_alive,
    } = serve;
    for (flag, value) in [
        ("--listen", listen.map(|address| address.to_string())),
        ("--http", http.map(|address| address.to_string())),
        ("--threads", threads.map(|count| count.to_string())),
        (
            "--reserve-memory",
            reserve_memory.map(|bytes| bytes.to_string()),
        ),
        (
            "--weights-memory",
            weights_memory.map(|bytes| bytes.to_string()),
        ),
        (
            "--outlast-losses",
            (*outlast_losses > 0).then(|| outlast_losses.to_string()),
        ),
    ] {
        if let Some(value) = value {
            command.args([flag, &value]);
        }
    }
    for (flag, given) in [
        ("--no-streaming", *no_streaming),
        ("--no-speculation", *no_speculation),
        ("--any-model-name", *any_model_name),
        ("--say-alive", *says_alive),
    ] {
        if given {
            command.arg(flag);
        }
    }
    for (flag, file) in [
        ("--identity", identity),
        ("--api-key-file", api_key_file),
        ("--hide", hidden),
    ] {
        if let Some(file) = file {
            command.arg(flag).arg(file);
        }
    }
    if let Some(key) = api_key {
        // Not as an argument, which every user of the machine could read.
        command.env(API_KEY, key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_get_their_variables_and_nobody_gets_tokens() {
        let handed_on = |name: &str| is_handed_on(OsStr::new(name));
        for name in [
            "HOME",
            "RUST_LOG",
            "PRIMA_GPU",
            "OTEL_TRACES_SAMPLER",
            "MESA_SHADER_CACHE_DIR",
            "__GL_SHADER_DISK_CACHE_PATH",
            "NVIDIA_VISIBLE_DEVICES",
        ] {
            assert!(handed_on(name), "{name}");
        }
        for name in [
            "HF_TOKEN",
            "PRIMA_API_KEY",
            "HTTPS_PROXY",
            "AWS_SECRET_ACCESS_KEY",
            "KUBERNETES_SERVICE_HOST",
        ] {
            assert!(!handed_on(name), "{name}");
        }
    }
}
