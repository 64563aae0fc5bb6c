//! A member's process: `prima-node-agent serve`, so that the layers of one model run apart from those of others and from the
//! agent, and one that crashes takes nothing along.
//!
//! Decides how it is started, watched and ended. Refuses to start it again, which is the member's to decide.

use std::collections::VecDeque;
use std::future::pending;
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::memory::{Children, Counted};
use super::plan_checks::Order;
use crate::serve::JOINED;

/// What a member's process is started with.
pub struct Start<'a> {
    /// For the log.
    pub plan: String,
    pub plan_file: &'a Path,
    /// This node.
    pub member: &'a str,
    pub order: Order,
    pub threads: Option<u16>,
    /// Memory that stays free for the machine's owner.
    pub reserved_bytes: Option<u64>,
    /// Memory that weights take at most.
    pub weights_bytes: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("cannot find out where this program lies")]
    OwnPath(#[source] io::Error),
    #[error("cannot start {}", path.display())]
    Spawn {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// One that is dropped is killed.
pub struct MemberProcess {
    plan: String,
    child: Child,
    joined: watch::Receiver<bool>,
    readers: Vec<JoinHandle<()>>,
    last_lines: Arc<Mutex<VecDeque<String>>>,
    _counted: Option<Counted>,
}

/// `serve` finishes what runs within 30 s of SIGTERM.
const GRACE: Duration = Duration::from_secs(35);
/// How long an ended process's last output is waited for.
const LAST_OUTPUT: Duration = Duration::from_secs(1);
/// Enough for an error and what led to it.
const LINES_KEPT: usize = 20;
/// A longer line is shown in pieces, so that no process can fill our memory.
const MAX_LINE: usize = 8192;

impl MemberProcess {
    /// Starts it. It ends with this process, in whatever way: the kernel sees to that, by the thread that calls this, which
    /// therefore must be the main one.
    ///
    /// # Errors
    /// [`ProcessError`].
    pub fn start(start: Start<'_>, children: &Children) -> Result<Self, ProcessError> {
        let program = std::env::current_exe().map_err(ProcessError::OwnPath)?;
        let mut command = Command::new(&program);
        command
            .arg("serve")
            .arg("--plan")
            .arg(start.plan_file)
            .args(["--member", start.member])
            .args(["--listen", &start.order.listen.to_string()])
            .args(["--exit-with-parent", &std::process::id().to_string()])
            // Keys come with the plan. Tokens are for those who fetch.
            .env_remove("PRIMA_API_KEY")
            .env_remove("HF_TOKEN")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        if let Some(http) = start.order.http {
            // On all of the pod's addresses: `kubectl port-forward` comes in by loopback.
            let any = match http.is_ipv4() {
                true => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                false => IpAddr::from(Ipv6Addr::UNSPECIFIED),
            };
            let http = SocketAddr::new(any, http.port());
            command.args(["--http", &http.to_string()]);
        }
        if let Some(threads) = start.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        for (flag, bytes) in [
            ("--reserve-memory", start.reserved_bytes),
            ("--weights-memory", start.weights_bytes),
        ] {
            if let Some(bytes) = bytes {
                command.args([flag, &bytes.to_string()]);
            }
        }
        let mut child = command.spawn().map_err(|source| ProcessError::Spawn {
            path: program,
            source,
        })?;
        let (tell, joined) = watch::channel(false);
        let output = Output {
            plan: start.plan.clone(),
            last_lines: Arc::default(),
            joined: tell,
        };
        let last_lines = output.last_lines.clone();
        let output = Arc::new(output);
        let mut readers = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            readers.push(tokio::spawn(follow(stdout, output.clone())));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.push(tokio::spawn(follow(stderr, output)));
        }
        Ok(Self {
            plan: start.plan,
            _counted: child.id().map(|pid| children.add(pid)),
            child,
            joined,
            readers,
            last_lines,
        })
    }

    /// Waits until it has joined its ring; for ever if it does not.
    pub fn joined(&self) -> impl Future<Output = ()> + use<> {
        let mut joined = self.joined.clone();
        async move {
            if joined.wait_for(|joined| *joined).await.is_err() {
                pending().await
            }
        }
    }

    /// Waits until it ends by itself, and says why.
    pub async fn ended(&mut self) -> String {
        let status = self.child.wait().await;
        self.drain_output().await;
        let last_lines = self.last_lines.lock();
        let last_lines = last_lines.unwrap_or_else(PoisonError::into_inner);
        match (last_error(&last_lines), status) {
            (Some(error), _) => format!("its process ended: {error}"),
            (None, Ok(status)) => format!("its process ended ({status})"),
            (None, Err(error)) => format!("its process ended ({error})"),
        }
    }

    /// SIGTERM, at which it finishes what runs; SIGKILL if it hangs.
    pub async fn end(mut self) {
        self.signal(Signal::TERM);
        if timeout(GRACE, self.child.wait()).await.is_err() {
            tracing::warn!(
                plan = self.plan,
                "the member did not end within {} s: killed",
                GRACE.as_secs()
            );
            self.signal(Signal::KILL);
            // An error means that there is no such child to wait for.
            let _ = self.child.wait().await;
        }
        self.drain_output().await;
    }

    /// To its whole process group; nothing if it has ended (its id may be another's by then).
    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id as i32));
        if let Some(pid) = pid {
            // The only failure left is that it ended just now.
            let _ = kill_process_group(pid, signal);
        }
    }

    /// Waits until what it had written is forwarded, but not for a stranger who inherited the pipe.
    async fn drain_output(&mut self) {
        for mut reader in self.readers.drain(..) {
            if timeout(LAST_OUTPUT, &mut reader).await.is_err() {
                reader.abort();
            }
        }
    }
}

/// What becomes of a process's lines.
struct Output {
    plan: String,
    last_lines: Arc<Mutex<VecDeque<String>>>,
    joined: watch::Sender<bool>,
}

async fn follow(output: impl AsyncRead + Unpin, shown: Arc<Output>) {
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
            shown.line(&mut line);
        }
    }
    if !line.is_empty() {
        shown.line(&mut line);
    }
}

impl Output {
    fn line(&self, line: &mut Vec<u8>) {
        let text = String::from_utf8_lossy(line).trim_end().to_owned();
        line.clear();
        if text.starts_with(JOINED) {
            self.joined.send_replace(true);
        }
        // It has a time and a level of its own.
        let _ = writeln!(io::stderr(), "{}: {text}", self.plan);
        let mut last_lines = self
            .last_lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if last_lines.len() == LINES_KEPT {
            last_lines.pop_front();
        }
        last_lines.push_back(text);
    }
}

/// What `serve` said last of what went wrong; else whatever it said last.
fn last_error(lines: &VecDeque<String>) -> Option<String> {
    let error = |line: &&String| line.starts_with("error: ") || line.contains(" ERROR ");
    let line = lines.iter().rev().find(error).or_else(|| lines.back())?;
    Some(line.strip_prefix("error: ").unwrap_or(line).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_counts_or_whatever_was_said_last() {
        let said =
            |lines: &[&str]| last_error(&lines.iter().map(|line| (*line).to_owned()).collect());
        assert_eq!(said(&[]), None);
        assert_eq!(
            said(&["INFO a", "error: cannot open model file", "INFO b"]).as_deref(),
            Some("cannot open model file")
        );
        assert_eq!(said(&["INFO a", "INFO b"]).as_deref(), Some("INFO b"));
    }

    #[tokio::test]
    async fn lines_are_kept_and_the_one_that_tells_of_joining_is_seen() {
        let (tell, mut joined) = watch::channel(false);
        let output = Arc::new(Output {
            plan: "default/tiny".into(),
            last_lines: Arc::default(),
            joined: tell,
        });
        let long = "x".repeat(MAX_LINE + 10);
        let text = format!("one\n{long}\n{JOINED} as m0 (rank 0)\nlast without an end");
        follow(text.as_bytes(), output.clone()).await;
        assert!(*joined.borrow_and_update());
        let lines = output.last_lines.lock().unwrap();
        let lengths: Vec<usize> = lines.iter().map(String::len).collect();
        assert_eq!(lengths[..3], [3, MAX_LINE, 10]);
        assert_eq!(lines.back().unwrap(), "last without an end");
    }
}
