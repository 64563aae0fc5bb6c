//! Rings of real processes: starts the `prima` that cargo built beside the tests as a user would, and reads what it
//! prints. Run with `--workspace`, since cargo builds `prima` and `prima-node-agent` only then.
//!
//! A ring that is dropped is killed. Nothing here looks inside a process: only its output, exit status, and /proc.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;

use crate::inputs;
use crate::machine::Machine;
use crate::network::Network;
use crate::process::{Ended, Process, send_signal, under};
use crate::{Endpoint, assets, wait_until};

/// Arguments of `prima run`.
#[derive(Default)]
pub struct LocalRingBuilder {
    args: Vec<OsString>,
    variables: Vec<(&'static str, OsString)>,
    measures: bool,
}

/// A ring that serves.
pub struct LocalRing {
    prima: Process,
    members: Vec<Member>,
    address: SocketAddr,
    model: String,
}

/// One agent of a ring.
#[derive(Clone, Debug)]
pub struct Member {
    pub name: String,
    pub pid: u32,
}

/// The last line that `prima run` prints when its ring serves.
const READY: &str = "Ctrl-C stops the ring.";

impl LocalRingBuilder {
    pub fn model(self, path: &Path) -> Self {
        self.arg(path)
    }

    pub fn members(self, count: usize) -> Self {
        self.arg("--members").arg(count.to_string())
    }

    pub fn rounds(self, rounds: usize) -> Self {
        self.arg("--rounds").arg(rounds.to_string())
    }

    /// Layers of each member, in all rounds together.
    pub fn split(self, layers: &[usize]) -> Self {
        let layers: Vec<String> = layers.iter().map(usize::to_string).collect();
        self.arg("--split").arg(layers.join(","))
    }

    /// Measures the machine now, as `prima run` does the first time, instead of reading a profile; that takes a while.
    pub fn measured(mut self) -> Self {
        self.measures = true;
        self
    }

    /// Any further argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// A variable of its environment.
    pub fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.variables.push((name, value.into()));
        self
    }

    /// Starts the ring and waits until it serves. Panics with what `prima` wrote if it does not.
    pub fn start(self) -> LocalRing {
        LocalRing::serving(Process::spawn(self.command()))
    }

    /// As [`start`](Self::start), on `machine`.
    pub fn start_on(self, machine: &Machine) -> LocalRing {
        LocalRing::serving(Process::spawn(machine.enter(self.command())))
    }

    /// As [`start`](Self::start), in `network`: only there it can be asked.
    pub fn start_in(self, network: &Network) -> LocalRing {
        LocalRing::serving(Process::spawn(network.enter(self.command())))
    }

    /// As [`start`](Self::start), by `nohup`: it is to outlive its terminal.
    pub fn start_by_nohup(self) -> LocalRing {
        let nohup = Command::new("nohup");
        LocalRing::serving(Process::spawn(under(nohup, &self.command())))
    }

    /// Runs `prima` where it is expected to end by itself, and waits for that.
    pub fn run_to_end(self) -> Ended {
        Process::spawn(self.command()).wait()
    }

    /// The same, in `network`.
    pub fn run_to_end_in(self, network: &Network) -> Ended {
        Process::spawn(network.enter(self.command())).wait()
    }

    fn command(mut self) -> Command {
        if !self.args.iter().any(|arg| arg == "--port") {
            self = self.arg("--port").arg("0");
        }
        if !self
            .args
            .iter()
            .any(|arg| arg == "--profile" || arg == "--split")
            && !self.measures
        {
            let profile = inputs::file("tests/assets/machine.yaml");
            self = self.arg("--profile").arg(profile);
        }
        let mut command = Command::new(inputs::program("prima"));
        command
            .arg("run")
            .args(&self.args)
            .env_remove("PRIMA_API_KEY")
            .env_remove("PRIMA_ROUTING_TRACE")
            .envs(self.variables);
        if self.measures {
            // No cache: measured now, not when an earlier test ran.
            command.env("PRIMA_CACHE", "/dev/null");
        }
        command
    }
}

impl LocalRing {
    /// Like `prima run`, on any free port unless `--port` is given.
    pub fn builder() -> LocalRingBuilder {
        LocalRingBuilder::default()
    }

    fn serving(mut prima: Process) -> LocalRing {
        prima.wait_for_output(READY);
        let printed = prima.stdout.lock().unwrap().clone();
        let (model, _) = printed.split_once(" is ready").expect("the model's name");
        let (_, rest) = printed.split_once("http://").expect("the endpoint");
        let address = rest.split('/').next().and_then(|it| it.parse().ok());
        LocalRing {
            members: agents_of(prima.id()),
            address: address.expect("the endpoint's address"),
            model: model.trim().to_owned(),
            prima,
        }
    }

    /// In ring order.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The id of the process of `prima`.
    pub fn pid(&self) -> u32 {
        self.prima.id()
    }

    /// What `prima` has printed so far, for people to read.
    pub fn printed(&self) -> String {
        self.prima.stdout.lock().unwrap().clone()
    }

    /// What `prima` and its members have written to stderr so far.
    pub fn logged(&self) -> String {
        self.prima.errors()
    }

    /// Tokens per second that `prima` predicts, as it has printed it.
    pub fn predicted(&self) -> Option<f64> {
        let printed = self.printed();
        let (_, rest) = printed.split_once("Predicted: ")?;
        rest.split(' ').next()?.parse().ok()
    }

    /// The line that `prima run` offers to paste into a shell.
    pub fn curl_line(&self) -> String {
        let printed = self.prima.stdout.lock().unwrap();
        let line = printed.lines().find(|line| line.contains("curl "));
        line.expect("a curl line").trim().to_owned()
    }

    /// Asks `prima` to end, as Ctrl-C does, and does not wait for that.
    pub fn interrupt(&self) {
        send_signal(self.prima.id(), Signal::INT);
    }

    /// Sends `signal` to `prima`, and waits until it has ended.
    pub fn end_by(mut self, signal: Signal) -> Ended {
        send_signal(self.prima.id(), signal);
        self.prima.wait()
    }

    /// Waits until `prima` ends by itself.
    pub fn wait_for_end(mut self) -> Ended {
        self.prima.wait()
    }

    /// Ends the ring as Ctrl-C does, and checks that it ends well: status 0, and no member left.
    pub fn stop(self) {
        let members = self.members.clone();
        let ended = self.end_by(Signal::INT);
        assert!(ended.status.success(), "{ended:#?}");
        assert_none_left(&members);
    }
}

impl Endpoint for LocalRing {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn model(&self) -> &str {
        &self.model
    }
}

/// Panics with what is left, if a member's process is.
pub fn assert_none_left(members: &[Member]) {
    // The kernel may still be taking a killed process apart.
    for member in members {
        wait_until(&format!("{member:?} is gone"), || {
            agent_arguments(member.pid).is_none()
        });
    }
}

/// The model of `make run`.
pub fn smollm2() -> PathBuf {
    assets::path("models/SmolLM2-135M-Instruct-Q4_1.gguf").expect("the model of `make run`")
}

/// The agents that `parent` started, by rank: on one machine they are called m0, m1, and so on; others are in the order of their start.
fn agents_of(parent: u32) -> Vec<Member> {
    let mut members = running_members();
    members.retain(|member| parent_of(member.pid) == Some(parent));
    members.sort_by_key(|member| member.name[1..].parse().unwrap_or(member.pid));
    members
}

/// All agents on this machine that run as a member of a ring, whoever started them, in containers, too.
pub fn running_members() -> Vec<Member> {
    fs::read_dir("/proc")
        .expect("/proc")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid| {
            let arguments = agent_arguments(pid)?;
            let at = arguments.iter().position(|arg| arg == "--member")?;
            Some(Member {
                name: arguments.get(at + 1)?.clone(),
                pid,
            })
        })
        .collect()
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // pid (name) state parent ...; the name may hold anything.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(1)?.parse().ok()
}

/// The arguments of the agent with this process id; `None` if there is none, or if it has ended.
fn agent_arguments(pid: u32) -> Option<Vec<String>> {
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    let arguments: Vec<String> = line.split_terminator('\0').map(str::to_owned).collect();
    let program = Path::new(arguments.first()?).file_name()?;
    (program == "prima-node-agent").then_some(arguments)
}
