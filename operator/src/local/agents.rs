//! The agents of a local ring as child processes: starts them, forwards what they write, notices when one ends, and
//! ends them in order. It knows nothing of what they do, and never starts one again: a ring that lost a member has
//! lost its sessions, and that is for the user to see.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::thread::available_parallelism;
use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::screen::Screen;

pub struct Agents {
    /// In ring order.
    agents: Vec<Agent>,
}

/// What every agent of the ring is told beside its own name.
pub struct AgentOptions<'a> {
    pub plan_file: &'a Path,
    /// Where rank 0 serves HTTP.
    pub http: SocketAddr,
    /// Of each member; all cores if not said.
    pub threads: Option<usize>,
    /// Bytes that stay free on the machine; the agents' default if not said.
    pub reserve_memory: Option<u64>,
    /// All weights are left to the page cache.
    pub no_streaming: bool,
    /// What rank 0 asks its clients for.
    pub api_key: Option<&'a str>,
}

/// Why the agents could not be started.
#[derive(Debug, thiserror::Error)]
pub enum AgentsError {
    #[error("cannot find out where this program lies, and with it prima-node-agent")]
    OwnPath(#[source] io::Error),
    #[error(
        "no prima-node-agent at {}: it must lie beside prima; build both with `cargo build --workspace`",
        path.display()
    )]
    Missing { path: PathBuf },
    #[error("cannot start member {member} ({})", path.display())]
    Spawn {
        member: String,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// How a member ended.
#[derive(Debug)]
pub struct MemberExit {
    member: String,
    rank: usize,
    pid: u32,
    status: io::Result<ExitStatus>,
    last_lines: Vec<String>,
}

struct Agent {
    name: String,
    pid: u32,
    child: Child,
    readers: Vec<JoinHandle<()>>,
    last_lines: Arc<Mutex<VecDeque<String>>>,
}

/// How long running requests may go on when the ring is asked to end: who pressed Ctrl-C is waiting.
const GRACE: Duration = Duration::from_secs(5);
/// How long an agent may take to end at once.
const LAST_GRACE: Duration = Duration::from_secs(2);
/// How long an ended agent's last output is waited for.
const LAST_OUTPUT: Duration = Duration::from_secs(1);
/// Lines kept of each agent, to be shown when it dies.
const LINES_KEPT: usize = 10;
/// A longer line is shown in pieces, so that no agent can fill our memory.
const MAX_LINE: usize = 8192;

/// The agent that lies beside this program.
pub fn program() -> Result<PathBuf, AgentsError> {
    let program = std::env::current_exe()
        .map_err(AgentsError::OwnPath)?
        .with_file_name(format!("prima-node-agent{}", std::env::consts::EXE_SUFFIX));
    match program.is_file() {
        true => Ok(program),
        false => Err(AgentsError::Missing { path: program }),
    }
}

impl Agents {
    /// Starts one agent for each member of `plan`. If one cannot be started, those before it are killed.
    pub fn start(
        plan: &RingPlanSpec,
        options: &AgentOptions<'_>,
        screen: &Screen,
    ) -> Result<Self, AgentsError> {
        let program = program()?;
        let threads = options
            .threads
            .unwrap_or_else(|| available_parallelism().map_or(1, |cores| cores.get()));
        let mut agents = Vec::with_capacity(plan.members.len());
        for (rank, member) in plan.members.iter().enumerate() {
            let mut command = Command::new(&program);
            command
                .arg("serve")
                .arg("--plan")
                .arg(options.plan_file)
                .args(["--member", &member.name])
                .args(["--threads", &threads.to_string()])
                .args(["--exit-with-parent", &std::process::id().to_string()])
                .env_remove("PRIMA_API_KEY")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                // A group of its own: Ctrl-C on the terminal is for prima, which ends the agents in order.
                .process_group(0)
                .kill_on_drop(true);
            if let Some(bytes) = options.reserve_memory {
                command.args(["--reserve-memory", &bytes.to_string()]);
            }
            if options.no_streaming {
                command.arg("--no-streaming");
            }
            if rank == 0 {
                command.args(["--http", &options.http.to_string()]);
                if let Some(key) = options.api_key {
                    // Not as an argument, which every user of the machine could read.
                    command.env("PRIMA_API_KEY", key);
                }
            }
            let spawn = |source| AgentsError::Spawn {
                member: member.name.clone(),
                path: program.clone(),
                source,
            };
            let mut child = command.spawn().map_err(spawn)?;
            let pid = child
                .id()
                .ok_or_else(|| spawn(io::Error::other("it has no process id")))?;
            let last_lines = Arc::default();
            let mut readers = Vec::new();
            if let Some(output) = child.stdout.take() {
                readers.push(forward(output, &member.name, &last_lines, screen));
            }
            if let Some(output) = child.stderr.take() {
                readers.push(forward(output, &member.name, &last_lines, screen));
            }
            agents.push(Agent {
                name: member.name.clone(),
                pid,
                child,
                readers,
                last_lines,
            });
        }
        Ok(Self { agents })
    }

    /// Process ids in ring order.
    pub fn pids(&self) -> Vec<u32> {
        self.agents.iter().map(|agent| agent.pid).collect()
    }

    /// Waits until a member ends, and tells which one and why.
    pub async fn first_exit(&mut self) -> MemberExit {
        let (rank, status) = poll_fn(|context| {
            for (rank, agent) in self.agents.iter_mut().enumerate() {
                // `wait` may be dropped and called again: the state is the child's.
                if let Poll::Ready(status) = pin!(agent.child.wait()).poll(context) {
                    return Poll::Ready((rank, status));
                }
            }
            Poll::Pending
        })
        .await;
        let agent = &mut self.agents[rank];
        agent.drain_output().await;
        let last_lines = lock(&agent.last_lines).iter().cloned().collect();
        MemberExit {
            member: agent.name.clone(),
            rank,
            pid: agent.pid,
            status,
            last_lines,
        }
    }

    /// Ends rank 0 first, so that its clients hear of it while the ring still stands, then all others at once.
    /// Returns when all have ended.
    pub async fn shut_down(&mut self) {
        let (rank_0, others) = self.agents.split_at_mut(1);
        end(rank_0).await;
        end(others).await;
    }

    /// Ends all at once, without grace.
    pub async fn kill(&mut self) {
        kill(&mut self.agents).await;
    }
}

/// SIGTERM, at which an agent finishes what runs; again, at which it ends at once; SIGKILL for whoever hangs.
async fn end(agents: &mut [Agent]) {
    for patience in [GRACE, LAST_GRACE] {
        for agent in agents.iter() {
            agent.signal(Signal::TERM);
        }
        if timeout(patience, all_ended(agents)).await.is_ok() {
            return;
        }
    }
    kill(agents).await;
}

async fn kill(agents: &mut [Agent]) {
    for agent in agents.iter() {
        agent.signal(Signal::KILL);
    }
    all_ended(agents).await;
}

async fn all_ended(agents: &mut [Agent]) {
    for agent in agents {
        agent.ended().await;
    }
}

impl Agent {
    /// To the agent's whole process group; nothing if it has ended (its id may be another's by then).
    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id as i32));
        if let Some(pid) = pid {
            // The only failure left is that it ended just now.
            let _ = kill_process_group(pid, signal);
        }
    }

    async fn ended(&mut self) {
        // An error means that there is no such child to wait for.
        let _ = self.child.wait().await;
        self.drain_output().await;
    }

    /// Waits until what the ended agent had written is forwarded, but not for a stranger who inherited the pipe.
    async fn drain_output(&mut self) {
        for mut reader in self.readers.drain(..) {
            if timeout(LAST_OUTPUT, &mut reader).await.is_err() {
                reader.abort();
            }
        }
    }
}

impl fmt::Display for MemberExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            member,
            rank,
            pid,
            status,
            last_lines,
        } = self;
        write!(f, "member {member} (rank {rank}, pid {pid}) ended: ")?;
        match status {
            Ok(status) => write!(f, "{status}")?,
            Err(error) => write!(f, "how is unknown ({error})")?,
        }
        if last_lines.is_empty() {
            return write!(f, "; it wrote nothing");
        }
        write!(f, "; its last lines:")?;
        for line in last_lines {
            write!(f, "\n    {line}")?;
        }
        Ok(())
    }
}

/// Shows every line of `output` under the member's name and keeps the last ones.
fn forward(
    output: impl AsyncRead + Unpin + Send + 'static,
    member: &str,
    last_lines: &Arc<Mutex<VecDeque<String>>>,
    screen: &Screen,
) -> JoinHandle<()> {
    let (member, last_lines, screen) = (member.to_owned(), last_lines.clone(), screen.clone());
    tokio::spawn(async move {
        let mut output = BufReader::with_capacity(MAX_LINE, output);
        let mut line = Vec::new();
        while let Ok(buffer) = output.fill_buf().await
            && !buffer.is_empty()
        {
            let end = buffer.iter().position(|&byte| byte == b'\n');
            let take = end.unwrap_or(buffer.len()).min(MAX_LINE - line.len());
            line.extend_from_slice(&buffer[..take]);
            let complete = end == Some(take);
            output.consume(take + usize::from(complete));
            if complete || line.len() == MAX_LINE {
                show_line(&mut line, &member, &last_lines, &screen);
            }
        }
        if !line.is_empty() {
            show_line(&mut line, &member, &last_lines, &screen);
        }
    })
}

fn show_line(
    line: &mut Vec<u8>,
    member: &str,
    last_lines: &Mutex<VecDeque<String>>,
    screen: &Screen,
) {
    let text = String::from_utf8_lossy(line).trim_end().to_owned();
    line.clear();
    screen.agent_line(member, &text);
    let mut last_lines = lock(last_lines);
    if last_lines.len() == LINES_KEPT {
        last_lines.pop_front();
    }
    last_lines.push_back(text);
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
