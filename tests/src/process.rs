//! Programs that cargo built, as processes whose output is collected. One that is dropped is killed.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::PATIENCE;

/// How a program ended and what it had written.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// A child whose output is collected while it runs.
pub struct Process {
    child: Child,
    pub(crate) stdout: Arc<Mutex<String>>,
    stderr: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Process {
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let (stdout, stderr) = (Arc::default(), Arc::default());
        let readers = vec![
            collect(child.stdout.take().expect("stdout"), &stdout),
            collect(child.stderr.take().expect("stderr"), &stderr),
        ];
        Self {
            child,
            stdout,
            stderr,
            readers,
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to stderr. A copy: who panics with it must not hold the lock, which `drop` takes again.
    pub(crate) fn errors(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }

    /// Panics with what it wrote if it has ended.
    pub(crate) fn expect_running(&mut self) {
        if let Some(status) = self.child.try_wait().expect("wait for a child") {
            panic!("it ended with {status}:\n{}", self.errors());
        }
    }

    pub(crate) fn wait_for_output(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.stdout.lock().unwrap().contains(text) {
            let ended = self.child.try_wait().expect("wait for a child");
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "no {text:?} from a process that {}:\n{}",
                ended.map_or("hangs".into(), |status| format!("ended with {status}")),
                self.errors(),
            );
            thread::sleep(POLL_INTERVAL);
        }
    }

    pub(crate) fn wait(&mut self) -> Ended {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("wait for a child") {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "still running after {PATIENCE:?}:\n{}",
                self.errors(),
            );
            thread::sleep(POLL_INTERVAL);
        };
        for reader in self.readers.drain(..) {
            reader.join().expect("a reader that did not panic");
        }
        Ended {
            status,
            stdout: std::mem::take(&mut self.stdout.lock().unwrap()),
            stderr: std::mem::take(&mut self.stderr.lock().unwrap()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only where it has ended already. A killed `prima` takes its agents along.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("it wrote:\n{}", self.errors());
        }
    }
}

fn collect(mut from: impl Read + Send + 'static, into: &Arc<Mutex<String>>) -> JoinHandle<()> {
    let into = into.clone();
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let text = String::from_utf8_lossy(&buffer[..count]);
            into.lock().unwrap().push_str(&text);
        }
    })
}

/// `command` as the last arguments of `wrapper`, which starts it in turn.
pub(crate) fn under(mut wrapper: Command, command: &Command) -> Command {
    wrapper.arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => wrapper.env(key, value),
            None => wrapper.env_remove(key),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        wrapper.current_dir(folder);
    }
    wrapper
}

pub fn send_signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("a process id");
    kill_process(pid, signal).expect("send a signal");
}

/// The most memory that a process has had, in bytes: the line `VmHWM: 1234 kB` of /proc/PID/status. 0 if it has ended.
pub fn peak_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB"));
    kilobytes.map_or(0, |number| number.trim().parse::<u64>().unwrap() * 1024)
}
