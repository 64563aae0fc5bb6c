//! The agents of a local ring as child processes: starts them, shows what they write, notices when one ends, and ends
//! them in order. It knows nothing of what they do, and never starts one again: a ring that lost a member has lost its
//! sessions, and the user must see that.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Output};
use std::thread::available_parallelism;
use std::time::Duration;

use futures::future::select_all;
use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use prima_member_process::{Borrowed, Launch, Lent, MemberProcess, Serve, StartError, end};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

use super::lent;
use super::screen::Screen;

pub struct Agents {
    /// In ring order.
    names: Vec<String>,
    /// Of those on machines that are lent: who lends them.
    lenders: Vec<Option<String>>,
    processes: Vec<MemberProcess>,
}

/// What every agent of the ring is told beside its own name.
pub struct AgentOptions<'a> {
    pub plan_file: &'a Path,
    /// The machines that are lent, if there are any.
    pub borrowed: Option<&'a Borrowed>,
    /// Where rank 0 serves HTTP.
    pub http: SocketAddr,
    /// Of each member; `None`: all cores.
    pub threads: Option<usize>,
    /// Bytes that stay free on the machine; `None`: the agents' default.
    pub reserve_memory: Option<u64>,
    /// All weights are left to the page cache.
    pub no_streaming: bool,
    /// Rank 0 computes one token at a time.
    pub no_speculation: bool,
    pub any_model_name: bool,
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
    #[error("cannot start member {member}")]
    Start {
        member: String,
        #[source]
        source: StartError,
    },
}

/// How a member ended.
#[derive(Debug)]
pub struct MemberExit {
    member: String,
    rank: usize,
    pid: u32,
    lender: Option<String>,
    status: io::Result<ExitStatus>,
    last_lines: Vec<String>,
}

/// How long running requests may go on when the ring is asked to end: the user who pressed Ctrl-C is waiting.
const GRACE: Duration = Duration::from_secs(5);
/// How long an agent may take to end at once.
const LAST_GRACE: Duration = Duration::from_secs(2);

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

/// Runs a command that shows on stderr what it does. Returns the last that it said there, which is why it failed if it did, and the rest of its
/// output.
pub async fn followed(
    mut command: Command,
    stdin: String,
    screen: &Screen,
) -> io::Result<(String, Output)> {
    let mut child = command.spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // One that ends before it has read says why on stderr.
        let _ = input.write_all(stdin.as_bytes()).await;
    }
    let progress = child.stderr.take();
    let told = async {
        let mut said = String::new();
        if let Some(progress) = progress {
            let mut lines = BufReader::new(progress).lines();
            let mut failed = false;
            while let Ok(Some(line)) = lines.next_line().await {
                match (line.strip_prefix("error: "), failed) {
                    (Some(error), _) => (said, failed) = (error.to_owned(), true),
                    // An error may have several lines. Whoever asked tells it.
                    (None, true) => said = said + "\n" + &line,
                    (None, false) => {
                        screen.status(&line);
                        said = line;
                    }
                }
            }
        }
        said
    };
    let (said, output) = tokio::join!(told, child.wait_with_output());
    Ok((said, output?))
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
        let mut agents = Self {
            names: Vec::new(),
            lenders: Vec::new(),
            processes: Vec::new(),
        };
        for (rank, member) in plan.members.iter().enumerate() {
            let serve = Serve {
                // On loopback, members talk in the clear.
                identity: options.borrowed.map(|all| &*all.own.identity),
                http: (rank == 0).then_some(options.http),
                threads: Some(threads),
                reserve_memory: options.reserve_memory,
                no_streaming: options.no_streaming,
                no_speculation: options.no_speculation && rank == 0,
                any_model_name: options.any_model_name && rank == 0,
                api_key: options.api_key.filter(|_| rank == 0),
                ..Serve::new(options.plan_file, &member.name)
            };
            let lender = lent::lender(options.borrowed, &member.name);
            let launch = match lender {
                Some(lender) => Launch::Lent(Lent {
                    plan_file: options.plan_file,
                    member: &member.name,
                    lender,
                }),
                None => Launch::Serve(serve),
            };
            let (name, shown) = (member.name.clone(), screen.clone());
            let process = MemberProcess::start(&program, &launch, move |line| {
                shown.agent_line(&name, line);
            });
            agents
                .processes
                .push(process.map_err(|source| AgentsError::Start {
                    member: member.name.clone(),
                    source,
                })?);
            agents.names.push(member.name.clone());
            agents.lenders.push(lender.map(str::to_owned));
        }
        Ok(agents)
    }

    /// Process ids in ring order, of those on this machine.
    pub fn pids(&self) -> Vec<Option<u32>> {
        let members = self.processes.iter().zip(&self.lenders);
        members
            .map(|(process, lender)| lender.is_none().then(|| process.pid()))
            .collect()
    }

    /// Waits until a member ends, and tells which one and why. A ring has at least one.
    pub async fn first_exit(&mut self) -> MemberExit {
        let all = self.processes.iter_mut();
        let ended = all.map(|process| Box::pin(process.ended()));
        let (status, rank, _) = select_all(ended).await;
        let process = &self.processes[rank];
        MemberExit {
            member: self.names[rank].clone(),
            rank,
            pid: process.pid(),
            lender: self.lenders[rank].clone(),
            status,
            last_lines: process.last_lines(),
        }
    }

    /// Ends rank 0 first, so that its clients hear of it while the ring still stands, then all others at once.
    /// Returns when all have ended.
    pub async fn shut_down(&mut self) {
        let (rank_0, others) = self.processes.split_at_mut(1);
        end(rank_0, &[GRACE, LAST_GRACE]).await;
        end(others, &[GRACE, LAST_GRACE]).await;
    }

    /// Ends all at once, without grace.
    pub async fn kill(&mut self) {
        end(&mut self.processes, &[]).await;
    }
}

impl MemberExit {
    /// `HOST:PORT` of the agent that lends its machine, if it was on another.
    pub fn lender(&self) -> Option<&str> {
        self.lender.as_deref()
    }
}

impl fmt::Display for MemberExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            member,
            rank,
            pid,
            lender,
            status,
            last_lines,
        } = self;
        match lender {
            Some(lender) => write!(f, "member {member} (rank {rank}, lent by {lender}) ended: ")?,
            None => write!(f, "member {member} (rank {rank}, pid {pid}) ended: ")?,
        }
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
