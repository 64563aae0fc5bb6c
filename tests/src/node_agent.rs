//! The agent of a machine, `prima-node-agent run`, as a process beside a test's API server. Each machine is an address of
//! loopback, so that all of them have the usual ports.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use rustix::process::Signal;

use crate::api_server::{ApiServer, free_loopback_address};
use crate::http;
use crate::inputs;
use crate::measurements::Measurements;
use crate::process::send_signal;
use crate::service::Service;
use crate::software_gpu;

/// A machine of a test: what stays when its agent is started anew.
pub struct AgentMachine {
    pub node: String,
    pub address: Ipv4Addr,
    /// What fetched models may take of its disk.
    pub cache_budget: &'static str,
    /// The agent's folder, and its log.
    data: PathBuf,
}

/// Killed on drop, with its members.
pub struct NodeAgent {
    service: Service,
    http: SocketAddr,
    data: PathBuf,
    /// Where what it measured is kept for others. `None`: its machine had measurements of its own, which are for that alone.
    measurements: Option<Measurements>,
}

const LINKS_PORT: u16 = 9190;
/// Less than a fifth of the disk may be free here.
const CACHE_BUDGET: &str = "10Gi";
/// What an agent measured, in its folder.
pub const MEASURED: &str = "profile.json";
const HTTP_PORT: u16 = 9191;

/// Of agents as they are started here. Where they are told which GPU to use, they are not started like others.
fn measurements(environment: &[(&str, &str)]) -> Measurements {
    let mut environment = environment.iter();
    match environment.find(|(name, _)| *name == software_gpu::GPU) {
        None => Measurements::of("with-one-thread"),
        Some((_, choice)) => Measurements::of(&format!("with-one-thread-gpu-{choice}")),
    }
}

impl AgentMachine {
    /// The machine of Node `node`, which the test creates; its files are in a folder of that name in `folder`.
    pub fn new(node: &str, folder: &Path) -> AgentMachine {
        let data = folder.join(node);
        fs::create_dir_all(&data).expect("a folder for an agent");
        // As the agent calls it.
        let data = data.canonicalize().expect("a folder for an agent");
        AgentMachine {
            node: node.to_owned(),
            address: free_loopback_address(LINKS_PORT),
            cache_budget: CACHE_BUDGET,
            data,
        }
    }

    /// A machine of a test's own network, with this folder for its agent.
    pub(crate) fn at(node: &str, address: Ipv4Addr, data: &Path) -> AgentMachine {
        AgentMachine {
            node: node.to_owned(),
            address,
            cache_budget: CACHE_BUDGET,
            data: data.to_owned(),
        }
    }

    /// Its agent, as a pod called `agent-NODE` in `namespace`.
    pub fn start_agent(&self, api: &ApiServer, namespace: &str) -> NodeAgent {
        self.start_agent_with(api, namespace, &[])
    }

    /// The same with more environment variables.
    pub fn start_agent_with(
        &self,
        api: &ApiServer,
        namespace: &str,
        environment: &[(&str, &str)],
    ) -> NodeAgent {
        let own = self.data.join(MEASURED);
        let measurements = (!own.exists()).then(|| measurements(environment));
        if let Some(measurements) = &measurements {
            measurements.give(&own, &self.data);
        }
        let name = format!("agent-{}", self.node);
        let mut command = self.agent(api, namespace);
        command.envs(environment.iter().copied());
        let service = Service::start(&name, command, &self.data);
        NodeAgent {
            service,
            http: SocketAddr::from((self.address, HTTP_PORT)),
            data: self.data.clone(),
            measurements,
        }
    }

    /// Has its next agent find that this machine, which an agent has measured, has a GPU of this name that is fast.
    pub fn declare_gpu(&self, name: &str) {
        software_gpu::declare(&self.data.join(MEASURED), name);
    }

    /// The command of [`start_agent`](Self::start_agent).
    pub(crate) fn agent(&self, api: &ApiServer, namespace: &str) -> Command {
        let mut command = api.command(inputs::program("prima-node-agent"));
        let http = SocketAddr::from((self.address, HTTP_PORT));
        command
            .arg("run")
            .args(["--node", &self.node])
            .args(["--pod-ip", &self.address.to_string()])
            .args(["--namespace", namespace])
            .arg("--data")
            .arg(&self.data)
            .args(["--http", &http.to_string()])
            .args(["--threads", "1"])
            .args(["--cache-budget", self.cache_budget])
            // The hubs of tests.
            .env("PRIMA_ALLOWED_SERVERS", "127.0.0.1")
            .env("POD_NAME", format!("agent-{}", self.node));
        command
    }
}

impl NodeAgent {
    /// Until its profile is published and its watches work.
    pub fn wait_until_ready(&mut self) {
        let http = self.http;
        self.service
            .wait_until(|| match http::get(http, "/readyz") {
                Ok(answer) if answer.status == 200 => Ok(()),
                Ok(answer) => Err(answer.body),
                Err(error) => Err(error.to_string()),
            });
        if let Some(measurements) = &self.measurements {
            measurements.keep(&self.data.join(MEASURED));
        }
    }

    /// Until this is in its log.
    pub fn wait_until_it_says(&mut self, text: &str) {
        let log = self.service.log().to_owned();
        self.service.wait_until(|| {
            let said = fs::read_to_string(&log).unwrap_or_default();
            match said.contains(text) {
                true => Ok(()),
                false => Err(format!("it does not say {text:?}")),
            }
        });
    }

    /// Where its probes and metrics are.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// The text of its /metrics.
    pub fn metrics(&self) -> String {
        http::get(self.http, "/metrics").expect("metrics").body
    }

    /// Process ids of its members.
    pub fn members(&self) -> Vec<u32> {
        let id = self.service.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let children = children.expect("an agent that runs");
        children
            .split_whitespace()
            .map(|id| id.parse().expect("a process id"))
            .collect()
    }

    /// Asks it to end.
    pub fn ask_to_end(&self) {
        send_signal(self.service.id(), Signal::TERM);
    }

    /// Asks it to end, once more if it was asked, and waits until it has.
    pub fn terminate(mut self) -> ExitStatus {
        self.ask_to_end();
        self.service.wait_for_end()
    }
}
