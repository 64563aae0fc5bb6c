//! The control plane and the machines of many sequences, and what must hold of each sequence.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::ListParams;
use kube::{Api, Client};
use prima_crds::v1alpha1::ring_plan::RingPlan;
use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::client::{self, Asking, PROMPTS, View};
use super::machine::{Clock, Machine};
use super::observed::Observed;
use super::sequence::{Kind, MACHINES, Sequence};
use crate::api_server::{ApiServer, Backend};
use crate::declared_machines;
use crate::network::{Network, Networks, ROUTER};
use crate::operator::{self, Operator};
use crate::{wait_for, wait_until};

/// Below the folder of every machine.
pub(super) const MODEL_FILE: &str = "models/model.gguf";
/// Seconds.
const LEADER_LEASE: &str = "10";
/// From the moment in which the last fault is lifted until the Model is ready and answers. An agent that was killed more than once waits for some
/// time before it starts a member again.
const HEALS_WITHIN: Duration = Duration::from_secs(90);
/// Answers one after the other, until a ring counts as healed.
const IN_A_ROW: usize = 5;
/// How long members may take to end with their plan.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(200);

/// Made once for many sequences. Ends on drop.
pub struct Stage<'a> {
    pub(super) operators: [OperatorSlot; 2],
    pub(super) machines: Vec<Machine>,
    pub(super) networks: &'a [Network],
    expected: [String; 3],
    runtime: Runtime,
    client: Client,
    pub(super) api: ApiServer,
    folder: TempDir,
    sequences: AtomicU32,
}

/// One of two operators.
pub(super) struct OperatorSlot {
    operator: Mutex<Option<Operator>>,
    identity: &'static str,
    pub(super) clock: Clock,
    logs: PathBuf,
}

/// Ends what goes on until this is true, also where a thread that is waited for panics.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What came of a sequence.
#[derive(Debug)]
pub struct Report {
    /// From the Model's creation, before all faults.
    pub ready_after: Duration,
    pub answers: usize,
    pub failures: usize,
    pub longest_false_ready: Duration,
    /// After the last fault was lifted.
    pub healed_after: Option<Duration>,
    /// Programs that ended by themselves, as a leader does that finds another one.
    pub ended: Vec<String>,
    /// What must not be.
    pub problems: Vec<String>,
}

/// Makes networks for stages, and does `work` on the router between them. Everything that the process starts must be started by `work`.
pub fn with_networks<T: Send>(work: impl FnOnce(&[Network]) -> T + Send) -> T {
    let networks = Networks::new(MACHINES as u8);
    networks.within_router(|| work(&networks.each))
}

impl<'a> Stage<'a> {
    /// Starts everything, and waits until it answers.
    pub fn new(networks: &'a [Network]) -> Stage<'a> {
        let folder = tempfile::Builder::new().prefix("prima-faults-").tempdir();
        let folder = folder.expect("a temporary folder");
        let path = folder.path();
        let api = ApiServer::start_on(ROUTER, Backend::Kine);
        operator::install_chart(&api);
        let names = ["one", "two", "three"];
        for name in names {
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
            api.apply(&node.to_string()).expect("a Node");
        }
        for disk in ["data", "models", "image", "logs"] {
            fs::create_dir(path.join(disk)).expect("a folder");
        }
        let logs = path.join("logs");
        let library = Clock::build(path);
        let clock = |of: &str| Clock::new(&library, path.join(format!("clock-{of}")));
        let machines = names.iter().zip(networks);
        let machines: Vec<Machine> = machines
            .map(|(name, network)| {
                let machine = Machine::new(name, network, path, &logs, clock(name));
                machine.start_agent(&api);
                machine
            })
            .collect();
        let operators = ["operator-a", "operator-b"].map(|identity| {
            let slot = OperatorSlot {
                operator: Mutex::default(),
                identity,
                clock: clock(identity),
                logs: logs.join(identity),
            };
            fs::create_dir(&slot.logs).expect("a folder");
            slot.start(&api);
            slot
        });
        let runtime = Runtime::new().expect("a runtime");
        let client = runtime.block_on(declared_machines::client(&api));
        let mut stage = Stage {
            operators,
            machines,
            networks,
            expected: Default::default(),
            runtime,
            client,
            api,
            folder,
            sequences: AtomicU32::default(),
        };
        stage.expected = stage.undisturbed();
        stage
    }

    /// A Model, from its creation to its end, with these faults in between.
    pub fn run(&self, sequence: &Sequence) -> Report {
        let panics_before = self.panics();
        let model = format!(
            "sequence-{}",
            self.sequences.fetch_add(1, Ordering::Relaxed)
        );
        let created = Instant::now();
        self.create(&model);
        let view = View::of(&model, &self.client, &self.runtime);
        let (over, in_a_row, ended) = (AtomicBool::new(false), Mutex::default(), Mutex::default());
        let mut problems = Vec::new();
        let (ready_after, healed_after, (observed, wrong)) = thread::scope(|threads| {
            let end = SetOnDrop(&over);
            threads.spawn(|| self.restart_what_ends(&over, &ended));
            let is_ready = || view.ready().is_some();
            let ready_after = within(HEALS_WITHIN, is_ready).then(|| created.elapsed());
            let begin = Instant::now();
            let asking = Asking {
                view: &view,
                model: &model,
                expected: &self.expected,
                begin,
                stop: &over,
                in_a_row: &in_a_row,
            };
            let asking = threads.spawn(|| asking.run());
            let faults = sequence.0.iter();
            let faults: Vec<_> = faults
                .map(|fault| threads.spawn(move || self.carry_out(fault, begin)))
                .collect();
            for fault in faults {
                fault.join().expect("a fault");
            }
            let lifted = Instant::now();
            let mut answered_from = None;
            let healed = within(HEALS_WITHIN, || {
                let in_a_row = in_a_row.lock().unwrap();
                let mut since = in_a_row.iter().filter(|at| **at >= lifted);
                answered_from = since.next().copied();
                view.ready().is_some() && since.count() + 1 >= IN_A_ROW
            });
            let healed_after = answered_from
                .filter(|_| healed)
                .map(|at: Instant| at - lifted);
            drop(end);
            (ready_after, healed_after, asking.join().expect("a client"))
        });
        if ready_after.is_none() {
            problems.push(format!(
                "the ring was not ready within {HEALS_WITHIN:?}, before any fault"
            ));
        } else if healed_after.is_none() {
            problems.push(format!(
                "the ring did not come back within {HEALS_WITHIN:?}: {}",
                self.state(&model)
            ));
        }
        problems.extend(wrong);
        let longest_false_ready = observed.longest_false_ready();
        let bound = unseen(sequence);
        if longest_false_ready > bound {
            let trouble = told(&observed);
            problems.push(format!("said for {longest_false_ready:.1?} that it answers, and did not (bound: {bound:?}):\n{trouble}"));
        }
        self.delete(&model);
        let members = || self.machines.iter().flat_map(Machine::members).count();
        if !within(ENDS_WITHIN, || members() == 0) {
            problems.push(format!("{} members are left behind", members()));
        }
        let panics = self.panics();
        if panics.len() > panics_before.len() {
            problems.extend_from_slice(&panics[panics_before.len()..]);
        }
        Report {
            ready_after: ready_after.unwrap_or_default(),
            answers: observed.asked.len() - observed.failed(),
            failures: observed.failed(),
            longest_false_ready,
            healed_after,
            ended: ended.into_inner().expect("programs that ended"),
            problems,
        }
    }

    /// Keeps the logs of all programs, and tells where.
    pub fn keep_logs(self) -> PathBuf {
        self.folder.keep().join("logs")
    }

    /// Places in `machines`: those of the newest ring first, by rank.
    pub(super) fn machines_in_order(&self) -> Vec<usize> {
        let plans = Api::<RingPlan>::default_namespaced(self.client.clone());
        let plans = self.runtime.block_on(plans.list(&ListParams::default()));
        let newest = plans
            .expect("plans")
            .items
            .into_iter()
            .max_by_key(|plan| plan.spec.generation);
        let members = newest.map(|plan| plan.spec.members).unwrap_or_default();
        let mut order: Vec<usize> = (0..self.machines.len()).collect();
        order.sort_by_key(|index| {
            let name = &self.machines[*index].name;
            let rank = members.iter().position(|member| member.name == *name);
            rank.unwrap_or(members.len())
        });
        order
    }

    /// Which operator leads, or led last.
    pub(super) fn leader(&self) -> usize {
        let leases = Api::<Lease>::namespaced(self.client.clone(), operator::NAMESPACE);
        let lease = self
            .runtime
            .block_on(leases.get("prima-operator"))
            .expect("a Lease");
        let holder = lease.spec.and_then(|spec| spec.holder_identity);
        let is_it = |slot: &OperatorSlot| holder.as_deref() == Some(slot.identity);
        self.operators.iter().position(is_it).unwrap_or(0)
    }

    /// Answers while nothing is wrong.
    fn undisturbed(&self) -> [String; 3] {
        let model = "undisturbed";
        self.create(model);
        let view = View::of(model, &self.client, &self.runtime);
        let address = wait_for("a ring", || view.ready().ok_or_else(|| self.state(model)));
        let answers =
            PROMPTS.map(|prompt| client::complete(address, model, prompt).expect("an answer"));
        self.delete(model);
        wait_until("no members", || {
            self.machines
                .iter()
                .all(|machine| machine.members().is_empty())
        });
        answers
    }

    fn create(&self, model: &str) {
        let object = json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": model, "namespace": "default"},
            "spec": {
                "source": {"hostPath": {"path": self.folder.path().join(MODEL_FILE)}},
                "contextLength": 512,
                "minNodes": 2,
            },
        });
        self.api.apply(&object.to_string()).expect("a Model");
    }

    /// With all that belongs to it: nobody here collects garbage.
    fn delete(&self, model: &str) {
        self.api
            .kubectl(&["delete", "model", model])
            .expect("deleted");
        let label = format!("prima.dev/model={model}");
        let rest = ["delete", "ringplans,services,endpointslices", "-l", &label];
        self.api.kubectl(&rest).expect("deleted");
    }

    /// What the cluster says of it, for people.
    fn state(&self, model: &str) -> String {
        let conditions =
            "{range .status.conditions[*]}{.type}={.status} {.reason}: {.message}\n{end}";
        let conditions = format!("jsonpath={conditions}");
        let members = "{range .items[*]}{.metadata.name}: {range .status.members[*]}{.name} {.state} ({.message}), {end}\n{end}";
        let members = format!("jsonpath={members}");
        let asked = [
            ["model", model, "-o", &conditions],
            ["ringplans", "--all-namespaces", "-o", &members],
        ];
        let said = asked.map(|asked| {
            self.api
                .kubectl(&[&["get"], &asked[..]].concat())
                .unwrap_or_else(|error| error.to_string())
        });
        said.concat()
    }

    /// As kubelets do.
    fn restart_what_ends(&self, over: &AtomicBool, ended: &Mutex<Vec<String>>) {
        while !over.load(Ordering::Relaxed) {
            let note = |name: &str| ended.lock().unwrap().push(name.to_owned());
            for machine in &self.machines {
                if machine.restart_ended_agent(&self.api) {
                    note(&format!("the agent of {}", machine.name));
                }
            }
            for slot in &self.operators {
                if slot.restart_ended(&self.api) {
                    note(slot.identity);
                }
            }
            thread::sleep(LOOK);
        }
    }

    /// Lines of all logs.
    fn panics(&self) -> Vec<String> {
        let logs = self.folder.path().join("logs");
        let folders = self
            .operators
            .iter()
            .map(|slot| slot.logs.clone())
            .chain([logs]);
        let files = folders.flat_map(|folder| fs::read_dir(folder).expect("logs").flatten());
        let logs = files.filter_map(|file| fs::read(file.path()).ok());
        let lines = logs.flat_map(|log| {
            let log = String::from_utf8_lossy(&log).into_owned();
            let panics = log.lines().filter(|line| line.contains("panicked at"));
            panics.map(str::to_owned).collect::<Vec<_>>()
        });
        lines.collect()
    }
}

impl OperatorSlot {
    pub(super) fn start(&self, api: &ApiServer) {
        let mut operator = self.operator.lock().unwrap();
        if operator.is_none() {
            let clock = self.clock.variables();
            let environment = [&clock[..], &[("PRIMA_LEADER_LEASE", LEADER_LEASE)]].concat();
            *operator = Some(Operator::start_logging(
                &self.logs,
                api,
                self.identity,
                &environment,
            ));
        }
    }

    pub(super) fn kill(&self) {
        *self.operator.lock().unwrap() = None;
    }

    pub(super) fn process(&self) -> Option<u32> {
        self.operator
            .lock()
            .unwrap()
            .as_ref()
            .map(Operator::process)
    }

    fn restart_ended(&self, api: &ApiServer) -> bool {
        let ended = self
            .operator
            .lock()
            .unwrap()
            .take_if(Operator::has_ended)
            .is_some();
        if ended {
            self.start(api);
        }
        ended
    }
}

/// Says where the logs of a stage are in which a sequence failed, and tries shorter ones, each on a stage of its own. Returns the shortest that
/// fails.
pub fn shrunk(failed: Stage<'_>, networks: &[Network], sequence: Sequence) -> Sequence {
    eprintln!("logs: {}", failed.keep_logs().display());
    sequence.shrink(|shorter| {
        let stage = Stage::new(networks);
        let report = stage.run(shorter);
        eprintln!("without one: {shorter}\n  {report}");
        !report.problems.is_empty()
    })
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let healed = match self.healed_after {
            Some(after) => format!("healed after {:.1} s", after.as_secs_f64()),
            None => "not healed".to_owned(),
        };
        let (ready, lie) = (
            self.ready_after.as_secs_f64(),
            self.longest_false_ready.as_secs_f64(),
        );
        write!(
            f,
            "ready after {ready:.1} s; {} answers, {} failures, false Ready for {lie:.1} s; {healed}",
            self.answers, self.failures
        )?;
        if !self.ended.is_empty() {
            write!(f, "; ended by themselves: {}", self.ended.join(", "))?;
        }
        self.problems
            .iter()
            .try_for_each(|problem| write!(f, "\n  PROBLEM: {problem}"))
    }
}

/// How long it may go unseen that a ring is broken by these faults.
fn unseen(sequence: &Sequence) -> Duration {
    let longest = |of_operators: bool| {
        let kinds = sequence.0.iter().map(|fault| fault.kind);
        let kinds = kinds.filter(|kind| kind.is_of_operators() == of_operators);
        kinds.map(Kind::unseen).max().unwrap_or_default()
    };
    longest(false) + longest(true)
}

/// When it said what, and what failed, for people.
fn told(observed: &Observed) -> String {
    let said = observed
        .said
        .iter()
        .map(|(at, said)| (*at, format!("says that it answers: {said}")));
    let failed = observed
        .asked
        .iter()
        .filter_map(|asked| Some((asked.at, asked.problem.clone()?)));
    let mut lines: Vec<_> = said.chain(failed).collect();
    lines.sort();
    let lines: Vec<String> = lines
        .iter()
        .map(|(at, line)| format!("  {:5.1} s: {line}", at.as_secs_f64()))
        .collect();
    lines.join("\n")
}

fn within(patience: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        match holds() {
            true => return true,
            false if Instant::now() > deadline => return false,
            false => thread::sleep(LOOK),
        }
    }
}
