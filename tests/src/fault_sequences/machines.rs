//! Machines that are networks with an agent each, beside an API server and two operators: all of them processes of this machine.

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use super::machine::{Clock, Machine};
use super::sequence::{Fault, MACHINES, ON_NETWORKS, Setting};
use super::stage::{Place, Roles};
use crate::api_server::{ApiServer, Backend};
use crate::network::{Network, Networks, ROUTER};
use crate::operator::{self, Operator};

/// Below the folder of every machine.
pub(super) const MODEL_FILE: &str = "models/model.gguf";
/// Seconds.
const LEADER_LEASE: &str = "10";
/// Between two looks at what has ended.
const LOOK: Duration = Duration::from_millis(200);

/// Ends on drop.
pub struct Machines<'a> {
    pub(super) operators: [OperatorSlot; 2],
    pub(super) machines: Vec<Machine>,
    pub(super) networks: &'a [Network],
    pub(super) api: ApiServer,
    folder: TempDir,
}

/// One of two operators.
pub(super) struct OperatorSlot {
    operator: Mutex<Option<Operator>>,
    pub(super) identity: &'static str,
    pub(super) clock: Clock,
    logs: PathBuf,
}

/// Makes networks for machines, and does `work` on the router between them. Everything that the process starts must be started by `work`.
pub fn with_networks<T: Send>(work: impl FnOnce(&[Network]) -> T + Send) -> T {
    let networks = Networks::new(MACHINES as u8);
    networks.within_router(|| work(&networks.each))
}

impl<'a> Machines<'a> {
    /// Starts everything.
    pub fn new(networks: &'a [Network]) -> Machines<'a> {
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
        Machines {
            operators,
            machines,
            networks,
            api,
            folder,
        }
    }
}

impl Place for Machines<'_> {
    const SETTING: Setting = ON_NETWORKS;

    /// It is where everything is done.
    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        work()
    }

    fn api(&self) -> &ApiServer {
        &self.api
    }

    fn model(&self) -> PathBuf {
        self.folder.path().join(MODEL_FILE)
    }

    /// The bounds of kinds have the time in them until another operator leads.
    fn carry_out(&self, fault: &Fault, roles: &Roles, end: Instant) -> Duration {
        match fault.kind.is_of_operators() {
            true => self.break_operator(fault, roles, end),
            false => self.break_machine(fault, roles, end),
        }
        Duration::ZERO
    }

    /// As kubelets do.
    fn keep_up(&self, over: &AtomicBool, ended: &Mutex<Vec<String>>) {
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

    fn members(&self) -> usize {
        self.machines.iter().flat_map(Machine::members).count()
    }

    fn collect_garbage(&self, model: &str) {
        let label = format!("prima.dev/model={model}");
        let rest = ["delete", "ringplans,services,endpointslices", "-l", &label];
        self.api.kubectl(&rest).expect("deleted");
    }

    /// Each fault is lifted by who has brought it about.
    fn is_whole(&self) -> Result<(), String> {
        Ok(())
    }

    fn logs(&self) -> Vec<PathBuf> {
        let logs = self.folder.path().join("logs");
        let folders = self
            .operators
            .iter()
            .map(|slot| slot.logs.clone())
            .chain([logs]);
        let files = folders.flat_map(|folder| fs::read_dir(folder).expect("logs").flatten());
        files.map(|file| file.path()).collect()
    }

    fn keep_logs(self) -> PathBuf {
        self.folder.keep().join("logs")
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
