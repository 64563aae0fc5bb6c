//! A member's process: `prima-node-agent serve`, so that the layers of one model run apart from other models and from the agent, and a
//! crash affects nothing else.
//!
//! Decides how the process is started and ended. Does not start it again: `member` decides that.

use std::io::{self, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::slice::from_mut;
use std::time::{Duration, Instant};

use prima_member_process::{
    HANGS_AFTER, Launch, MemberProcess, Serve, StartError, cut_off, on_all_addresses, without_gpu,
};
use prometheus_client::metrics::counter::Counter;
use tokio::time::timeout;

use super::lost_gpu::GpuFailures;
use super::memory::{Children, Counted};
use super::plan_checks::LaunchParams;

/// What a member's process is started with.
pub struct Start<'a> {
    /// For the log.
    pub plan: String,
    /// How long what runs has to finish when it is asked to end.
    pub drain_limit: Duration,
    pub plan_file: &'a Path,
    /// This node.
    pub member: &'a str,
    pub launch: LaunchParams,
    /// The file with the agent's key, if the plan has keys.
    pub identity: Option<&'a Path>,
    /// The file with the API keys, if clients have to send one.
    pub api_key_file: Option<&'a Path>,
    pub threads: Option<u16>,
    /// Memory that stays free for the machine's owner.
    pub reserved_bytes: Option<u64>,
    /// Memory that weights take at most.
    pub weights_bytes: Option<u64>,
    /// For answers that it cuts off.
    pub cut_answers: Counter,
    /// For what becomes of its GPU.
    pub gpu_failures: GpuFailures,
}

#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("cannot find out where this program lies")]
    OwnPath(#[source] io::Error),
    #[error(transparent)]
    Start(#[from] StartError),
}

/// A running process; killed when dropped.
pub struct Running {
    plan: String,
    drain_limit: Duration,
    started: Instant,
    process: MemberProcess,
    _counted: Counted,
}

/// The agent's token lies there.
const SECRETS: &str = "/var/run/secrets";
/// Within that, an agent has started a member again that has died or hangs. If its machine is lost, there is soon another ring.
const OUTLAST_LOSSES: Duration = Duration::from_secs(30);
/// What a killed process may take to end: it unmaps its weights.
const LAST_MOMENTS: Duration = Duration::from_secs(5);
/// Beyond the plan's limit for what runs.
const GRACE: Duration = Duration::from_secs(5);

impl Running {
    /// On the main thread only: the process ends with the thread that starts it.
    ///
    /// # Errors
    /// [`ProcessError`].
    pub fn start(start: Start<'_>, children: &Children) -> Result<Self, ProcessError> {
        let program = std::env::current_exe().map_err(ProcessError::OwnPath)?;
        let serve = Serve {
            identity: start.identity,
            api_key_file: start.api_key_file,
            listen: Some(start.launch.listen),
            http: start.launch.http.map(on_all_addresses),
            threads: start.threads.map(usize::from),
            reserve_memory: start.reserved_bytes,
            weights_memory: start.weights_bytes,
            hidden: Some(Path::new(SECRETS)).filter(|folder| folder.exists()),
            outlast_losses: OUTLAST_LOSSES.as_secs(),
            says_alive: true,
            ..Serve::new(start.plan_file, start.member)
        };
        let (plan, cut_answers) = (start.plan.clone(), start.cut_answers);
        let gpu_failures = start.gpu_failures;
        let process = MemberProcess::start(&program, &Launch::Serve(serve), move |line| {
            cut_answers.inc_by(cut_off(line).unwrap_or(0));
            if let Some(why) = without_gpu(line) {
                gpu_failures.tell(why);
            }
            // The line has its own time and level.
            let _ = writeln!(io::stderr(), "{plan}: {line}");
        })?;
        Ok(Self {
            plan: start.plan,
            drain_limit: start.drain_limit,
            started: Instant::now(),
            _counted: children.add(process.pid(), start.launch.on_gpu),
            process,
        })
    }

    /// How long ago it was started.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Waits until it has joined its ring; for ever if it does not.
    pub fn joined(&self) -> impl Future<Output = ()> + use<> {
        self.process.joined()
    }

    /// Waits until it ends by itself, or hangs, and says why.
    pub async fn ended(&mut self) -> String {
        let hangs = self.process.hangs();
        let status = tokio::select! {
            status = self.process.ended() => status,
            () = hangs => {
                let seconds = HANGS_AFTER.as_secs();
                return format!("its process hangs: no sign of life for {seconds} s");
            }
        };
        let killed = matches!(&status, Ok(status) if status.signal().is_some());
        match (last_error(&self.process.last_lines(), killed), status) {
            (Some(error), _) => format!("its process ended: {error}"),
            (None, Ok(status)) => format!("its process ended ({status})"),
            (None, Err(error)) => format!("its process ended ({error})"),
        }
    }

    /// Gives its port and memory back before another takes its place, unless that takes long.
    pub async fn kill(mut self) {
        let killed = prima_member_process::end(from_mut(&mut self.process), &[]);
        let _ = timeout(LAST_MOMENTS, killed).await;
    }

    /// Lets it finish what runs.
    pub async fn end(mut self) {
        let patience = self.drain_limit + GRACE;
        if prima_member_process::end(from_mut(&mut self.process), &[patience]).await {
            tracing::warn!(
                plan = self.plan,
                "the member did not end within {} s: killed",
                patience.as_secs()
            );
        }
    }
}

/// The last error that `serve` printed; if there is none, its last line, unless it was killed before it could say anything.
fn last_error(lines: &[String], killed: bool) -> Option<String> {
    let error = |line: &&String| line.starts_with("error: ") || line.contains(" ERROR ");
    let last = lines.last().filter(|_| !killed);
    let line = lines.iter().rev().find(error).or(last)?;
    Some(line.strip_prefix("error: ").unwrap_or(line).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_counts_or_whatever_was_said_last() {
        let said_of = |killed, lines: &[&str]| {
            last_error(
                &lines
                    .iter()
                    .map(|line| (*line).to_owned())
                    .collect::<Vec<_>>(),
                killed,
            )
        };
        let said = |lines: &[&str]| said_of(false, lines);
        assert_eq!(said(&[]), None);
        assert_eq!(
            said(&["INFO a", "error: cannot open model file", "INFO b"]).as_deref(),
            Some("cannot open model file")
        );
        assert_eq!(said(&["INFO a", "INFO b"]).as_deref(), Some("INFO b"));
        assert_eq!(said_of(true, &["INFO a"]), None);
        let died = said_of(true, &["error: no memory", "INFO b"]);
        assert_eq!(died.as_deref(), Some("no memory"));
    }
}
