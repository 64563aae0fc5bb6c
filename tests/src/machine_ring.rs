//! A ring of machines as in a cluster: each measures itself, one plan is made from what they measured, and on each an agent serves
//! its part of the plan. The machines are parts of this one ([`Machine`]) or emulated, with a copy of the model each. Suites that are not about
//! plans cut one themselves ([`cut`]), and so do not depend on the planner.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::node_profile::{LinkProfile, NodeProfile};
use prima_crds::v1alpha1::ring_plan::{
    DEFAULT_CONCURRENT_REQUESTS, PlannedDraft, PlannedModel, RingPlan, RingPlanSpec,
};
use prima_engine::Model;
use prima_gguf::model_bytes;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::free_ports::free_address;
use crate::inputs;
use crate::local_ring::smollm2;
use crate::machine::Machine;
use crate::patience::pause;
use crate::process::{Ended, Process, send_signal};
use crate::slow_link::slow_link;
use crate::{Endpoint, http};

/// The key of [`MachineRing::for_clients`].
pub const API_KEY: &str = "a-key-for-tests";
/// As long as `prima run` has it for SmolLM2.
pub const CONTEXT: i32 = 8192;

/// Big models are read from a slow disk for minutes.
const LOADS_WITHIN: Duration = Duration::from_secs(500);

/// A ring that serves.
pub struct MachineRing {
    /// In ring order.
    agents: Vec<Process>,
    address: SocketAddr,
    model: String,
    /// The plan's files.
    _folder: TempDir,
}

/// Where an agent runs.
pub trait Host {
    /// The program that cargo built for it, to be given arguments.
    fn program(&self, name: &str) -> Command {
        Command::new(inputs::program(name))
    }

    /// `command`, to be started there.
    fn enter(&self, command: Command) -> Command {
        command
    }
}

/// As it is.
pub struct ThisMachine;

impl Host for ThisMachine {}

impl Host for Machine {
    fn enter(&self, command: Command) -> Command {
        Machine::enter(self, command)
    }
}

/// A machine and its copy of the model.
pub struct Node<'a> {
    pub machine: &'a dyn Host,
    pub model: PathBuf,
}

/// A plan and what it predicts.
pub struct Planned {
    pub plan: RingPlan,
    pub tokens_per_second: f64,
}

impl Node<'_> {
    /// What `prima-node-agent profile` measures there, now. Panics with what it wrote if it fails.
    pub fn profile(&self) -> NodeProfile {
        let mut command = self.machine.program("prima-node-agent");
        command
            .args(["profile", "--output", "yaml", "--models"])
            .arg(&self.model)
            // No cache: measured now, and nothing kept of a machine that is not real.
            .env("PRIMA_CACHE", "/dev/null");
        let ended = Process::spawn(self.machine.enter(command)).wait();
        assert!(ended.status.success(), "{ended:#?}");
        NodeProfile::from_yaml("profile", &ended.stdout).expect("a profile")
    }
}

/// What a machine of round numbers measured, for rings whose plan need not fit this one.
pub fn usual_profile() -> NodeProfile {
    let file = inputs::file("tests/assets/machine.yaml");
    let yaml = std::fs::read_to_string(file).expect("a profile's file");
    NodeProfile::from_yaml("profile", &yaml).expect("a profile")
}

/// A plan of `members` on this machine, `m0`, `m1`, ..., which have as many layers as each other in each of `rounds`; for as many requests at once
/// as with `prima run`.
pub fn cut(file: &Path, context: i32, members: usize, rounds: usize) -> RingPlan {
    let model = planned_model(file);
    let windows = (members * rounds) as i32;
    let ends = (1..=windows).map(|window| model.layers * window / windows);
    let ends: Vec<i32> = ends.collect();
    // A ring finds free ports.
    let addresses = vec![String::new(); members];
    let spec = RingPlanSpec {
        max_concurrent_requests: DEFAULT_CONCURRENT_REQUESTS,
        ..RingPlanSpec::cut(model, context, &addresses, &ends)
    };
    RingPlan::new("cut", spec)
}

/// A draft model that rank 0 has as a file.
pub fn draft(file: &Path) -> PlannedDraft {
    let model = planned_model(file);
    PlannedDraft {
        memory_bytes: model.size_bytes,
        model,
    }
}

fn planned_model(file: &Path) -> PlannedModel {
    let name = file.file_stem().expect("a file's name").to_string_lossy();
    let bytes = model_bytes(file).expect("a model's file") as i64;
    let layers = Model::open(file).expect("a model").spec().layers.len() as i32;
    PlannedModel::new(name, file.display().to_string(), bytes, layers)
}

/// What `prima plan` makes of `profiles` as machines `m0`, `m1`, ...: all take part, and reach each other as each reaches itself. Panics
/// with what it wrote if it fails.
pub fn plan(model: &Path, profiles: Vec<NodeProfile>, arguments: &[&str]) -> Planned {
    let name = |index: usize| format!("m{index}");
    let count = profiles.len();
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(inputs::program("prima"));
    command
        .args(["plan", "--all", "--output", "json"])
        .args(arguments)
        .arg("--model")
        .arg(model)
        .arg("--profiles");
    for (index, mut profile) in profiles.into_iter().enumerate() {
        profile.metadata.name = Some(name(index));
        let status = profile.status.as_mut().expect("a status");
        let link = status.links.pop().expect("the link to itself");
        status.links = (0..count)
            .filter(|&other| other != index)
            .map(|other| LinkProfile {
                to: name(other),
                ..link.clone()
            })
            .collect();
        let file = folder.path().join(format!("{index}.yaml"));
        let yaml = serde_saphyr::to_string(&profile).expect("YAML");
        std::fs::write(&file, yaml).expect("write a profile");
        command.arg(file);
    }
    let ended = Process::spawn(command).wait();
    assert!(ended.status.success(), "{ended:#?}");
    let mut both: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    let milliseconds = both.pointer("/report/tpotMilliseconds");
    Planned {
        tokens_per_second: 1e3 / milliseconds.and_then(Value::as_f64).expect("a prediction"),
        plan: serde_json::from_value(both["ringPlan"].take()).expect("a RingPlan"),
    }
}

impl MachineRing {
    /// SmolLM2 on three members of this machine, for suites of clients, which send [`API_KEY`].
    pub fn for_clients(rounds: usize) -> MachineRing {
        let plan = cut(&smollm2(), CONTEXT, 3, rounds);
        Self::start_here(plan, &["--api-key", API_KEY])
    }

    /// As [`start`](Self::start), with all members on this machine, and the file that the plan names.
    pub fn start_here(plan: RingPlan, arguments: &[&str]) -> MachineRing {
        let node = |_| Node {
            machine: &ThisMachine,
            model: PathBuf::from(&plan.spec.model.file),
        };
        let nodes: Vec<Node<'_>> = plan.spec.members.iter().map(node).collect();
        Self::start(plan, &nodes, arguments)
    }

    /// Starts the agent of every member of `plan` on its node (`m0` on the first, and so on) with further `arguments`, and waits until a
    /// token went round. Panics with what an agent wrote if it ends before that.
    pub fn start(plan: RingPlan, nodes: &[Node<'_>], arguments: &[&str]) -> MachineRing {
        Self::start_over(plan, nodes, arguments, Ok)
    }

    /// As [`start`](Self::start), where every byte between members takes `delay`.
    pub fn start_apart(
        plan: RingPlan,
        nodes: &[Node<'_>],
        arguments: &[&str],
        delay: Duration,
    ) -> MachineRing {
        Self::start_over(plan, nodes, arguments, |to| slow_link(to, delay))
    }

    /// `link`: the address at which others reach what listens there.
    fn start_over(
        mut plan: RingPlan,
        nodes: &[Node<'_>],
        arguments: &[&str],
        link: impl Fn(SocketAddr) -> io::Result<SocketAddr>,
    ) -> MachineRing {
        let address = free_address();
        let listening: Vec<SocketAddr> = plan.spec.members.iter().map(|_| free_address()).collect();
        for (member, port) in plan.spec.members.iter_mut().zip(&listening) {
            member.address = link(*port).expect("a link").to_string();
        }
        let folder = tempfile::tempdir().expect("a folder");
        let model = plan.spec.model.name.clone();
        let agents = plan
            .spec
            .members
            .iter()
            .zip(&listening)
            .map(|(member, port)| {
                let index: usize = member.name[1..].parse().expect("a number");
                let mut own = plan.clone();
                own.spec.model.file = nodes[index].model.display().to_string();
                let file = folder.path().join(format!("{}.yaml", member.name));
                std::fs::write(&file, serde_saphyr::to_string(&own).expect("YAML"))
                    .expect("write a plan");
                let mut command = nodes[index].machine.program("prima-node-agent");
                command
                    .args(["serve", "--member", &member.name, "--http"])
                    .arg(address.to_string())
                    .args(["--listen", &port.to_string()])
                    .args(arguments)
                    .arg("--plan")
                    .arg(file)
                    .env_remove("PRIMA_API_KEY");
                Process::spawn(nodes[index].machine.enter(command))
            });
        let mut ring = MachineRing {
            agents: agents.collect(),
            address,
            model,
            _folder: folder,
        };
        ring.wait();
        ring
    }

    fn wait(&mut self) {
        let begun = Instant::now();
        loop {
            let asked = Instant::now();
            if http::get(self.address, "/health").is_ok_and(|health| health.status == 200) {
                return;
            }
            self.expect_all_running();
            assert!(begun.elapsed() < LOADS_WITHIN, "the ring hangs");
            // Where a processor is emulated, answering is a good part of what it does.
            pause(asked.elapsed());
        }
    }

    /// Panics with what it wrote if an agent has ended.
    pub fn expect_all_running(&mut self) {
        for agent in &mut self.agents {
            agent.expect_running();
        }
    }

    /// Ends the ring, and checks that each agent ends well.
    pub fn stop(mut self) {
        for ended in self.end() {
            assert!(ended.status.success(), "{ended:#?}");
        }
    }

    /// Rank 0 first, so that its clients hear of it while the ring still stands, then all others at once.
    fn end(&mut self) -> Vec<Ended> {
        let mut agents = mem::take(&mut self.agents);
        let first = agents.len().min(1);
        let (rank_0, others) = agents.split_at_mut(first);
        let mut ended = Vec::new();
        for agents in [rank_0, others] {
            for agent in agents.iter() {
                send_signal(agent.id(), Signal::TERM);
            }
            ended.extend(agents.iter_mut().map(Process::wait));
        }
        ended
    }

    /// What each agent has written to stderr, in ring order.
    pub fn errors(&self) -> Vec<String> {
        self.agents.iter().map(Process::errors).collect()
    }

    /// The agents' process ids, in ring order.
    pub fn pids(&self) -> Vec<u32> {
        self.agents.iter().map(Process::id).collect()
    }
}

impl Endpoint for MachineRing {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn model(&self) -> &str {
        &self.model
    }
}

impl Drop for MachineRing {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.end();
        }
    }
}
