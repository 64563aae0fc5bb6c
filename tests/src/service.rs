//! Programs that run as long as a test needs them: each writes a log of its own, and none outlives its test.
//!
//! One that is dropped is killed with all that it started. One whose test is killed from outside, so that nothing is
//! dropped, is killed by the kernel.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{LazyLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::patience::{PATIENCE, pause};
use crate::process::under;

pub(crate) struct Service {
    name: String,
    child: Child,
    log: PathBuf,
}

const LOG_TAIL_LINES: usize = 20;

impl Service {
    /// Its log is `NAME.log` in `logs`, where a service of this name that ran before wrote too.
    pub(crate) fn start(name: &str, command: Command, logs: &Path) -> Service {
        let log = logs.join(format!("{name}.log"));
        let file = OpenOptions::new().create(true).append(true).open(&log);
        let file = file.unwrap_or_else(|error| panic!("cannot write {}: {error}", log.display()));
        let mut wrapper = Command::new("setpriv");
        wrapper.args(["--pdeathsig", "KILL", "--"]);
        let mut command = under(wrapper, &command);
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a second handle of a log"))
            .stderr(file)
            .process_group(0);
        let child = spawn(command).unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        Service {
            name: name.to_owned(),
            child,
            log,
        }
    }

    /// Waits until `is_ready` says so. Panics with what it said last and the log's tail if that takes too long or the service ends.
    pub(crate) fn wait_until<E: std::fmt::Display>(
        &mut self,
        mut is_ready: impl FnMut() -> Result<(), E>,
    ) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let begun = Instant::now();
            let Err(reason) = is_ready() else {
                return;
            };
            let looked = begun.elapsed();
            let ended = self.child.try_wait().expect("wait for a child");
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "{} {}: {reason}\n{}",
                self.name,
                ended.map_or("is not ready".into(), |status| format!(
                    "ended with {status}"
                )),
                self.log_tail(),
            );
            pause(looked);
        }
    }

    /// Waits for a line of its output that starts with `start`. Panics as [`wait_until`](Self::wait_until) does.
    pub(crate) fn wait_for_line(&mut self, start: &str) -> String {
        let log = self.log.clone();
        let mut found = None;
        self.wait_until(|| {
            let text = fs::read_to_string(&log).unwrap_or_default();
            found = text
                .lines()
                .find(|line| line.starts_with(start))
                .map(str::to_owned);
            found
                .as_ref()
                .map(drop)
                .ok_or_else(|| format!("no line starts with {start:?}"))
        });
        found.expect("a line that was waited for")
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait for a child").is_some()
    }

    /// Panics with its log's tail if it does not end in time.
    pub(crate) fn wait_for_end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("wait for a child") {
                return status;
            }
            let in_time = Instant::now() < deadline;
            assert!(in_time, "{} does not end\n{}", self.name, self.log_tail());
            pause(Duration::ZERO);
        }
    }

    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    pub(crate) fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(LOG_TAIL_LINES)..];
        format!("the end of {}'s log:\n{}", self.name, tail.join("\n"))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Both fail only where it has ended already.
        let group = Pid::from_child(&self.child);
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("{}", self.log_tail());
        }
    }
}

/// The kernel kills a child when the thread that started it ends, not the process; so one thread, which never ends, starts them all.
fn spawn(command: Command) -> io::Result<Child> {
    type Request = (Command, mpsc::Sender<io::Result<Child>>);
    static SPAWNER: LazyLock<mpsc::Sender<Request>> = LazyLock::new(|| {
        let (sender, requests) = mpsc::channel::<Request>();
        thread::spawn(move || {
            for (mut command, answer) in requests {
                // Whoever asked waits for the answer.
                let _ = answer.send(command.spawn());
            }
        });
        sender
    });
    let (answer, answered) = mpsc::channel();
    let sent = SPAWNER.send((command, answer));
    sent.expect("a spawner that never ends");
    answered.recv().expect("a spawner that answers")
}
