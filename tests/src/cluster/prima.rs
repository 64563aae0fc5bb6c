//! prima on a cluster, by its chart: how tests install it, upgrade it, and see whether all of it is there.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Cluster, PrimaImages};
use crate::inputs;
use crate::local_ring::smollm2;
use crate::measurements::Measurements;
use crate::node_agent::MEASURED;
use crate::operator::NAMESPACE;
use crate::{timeout_argument, wait_until};

/// An agent's folder, on its node and in its pod.
const DATA: &str = "/var/lib/prima";
/// The model, on the disks that it was put on.
pub const ON_DISK: &str = "/var/lib/prima/models/smollm2.gguf";
/// The chart's.
const OPERATORS: usize = 2;
const AGENTS_PORT: u16 = 9191;
const OPERATORS_PORT: u16 = 8080;
const CONNECTS_WITHIN: Duration = Duration::from_secs(2);

/// Of agents in pods.
fn measurements() -> Measurements {
    Measurements::of("on-a-node")
}

impl Cluster {
    /// Starts a cluster with prima as users install it, whose agents have measured their nodes, and with the model on all disks.
    pub fn with_prima(nodes: usize, images: &PrimaImages) -> Cluster {
        let cluster = Cluster::start(nodes);
        cluster.import_prima(images);
        for node in 0..nodes {
            cluster.put_model_on(node);
        }
        cluster.install_prima(&[]);
        cluster.wait_until_measured();
        cluster
    }

    /// Puts prima's images on every node.
    pub fn import_prima(&self, images: &PrimaImages) {
        self.import_images(&images.archive);
    }

    /// Installs prima as the README says, with more values. Its agents find what agents measured here before.
    pub fn install_prima(&self, values: &[&str]) {
        for node in 0..self.nodes.len() {
            measurements().give(&self.measured(node), Path::new(DATA));
        }
        let begun = Instant::now();
        let install = [
            "install",
            "prima",
            &chart(),
            "--namespace",
            NAMESPACE,
            "--create-namespace",
            "--wait",
            &timeout_argument(),
            // The disk is shared: how full it is must not decide what is kept.
            "--set",
            "agent.cacheBudgetBytes=10000000000",
            "--set",
            // Their hub is in their own network.
            &format!("allowedServers={{{}}}", self.address()),
        ];
        if let Err(error) = self.helm(&[&install[..], values].concat()) {
            let pods = self.kubectl(&["describe", "pods", "-n", NAMESPACE]);
            let logs = self.kubectl(&[
                "logs",
                "-n",
                NAMESPACE,
                "--all-containers",
                "--prefix",
                "--tail=20",
                "-l",
                "app.kubernetes.io/name=prima",
            ]);
            panic!(
                "{error}\n{}\n{}",
                pods.unwrap_or_default(),
                logs.unwrap_or_default()
            );
        }
        println!(
            "helm install --wait: {:.0} s",
            begun.elapsed().as_secs_f64()
        );
    }

    /// Upgrades prima, with other values; what the upgrade replaces is not waited for.
    pub fn upgrade_prima(&self, values: &[&str]) {
        let upgrade = [
            "upgrade",
            "prima",
            &chart(),
            "--namespace",
            NAMESPACE,
            "--reuse-values",
        ];
        self.helm(&[&upgrade[..], values].concat())
            .unwrap_or_else(|error| panic!("{error}"));
    }

    /// Waits until the agents have measured each node, and the links between them.
    pub fn wait_until_measured(&self) {
        let nodes = self.nodes.len();
        wait_until("each node is measured, and the links between them", || {
            let profiles = self.kubectl(&["get", "nodeprofiles", "-o", "json"]);
            let profiles = items(&profiles.unwrap_or_else(|error| panic!("{error}")));
            profiles.len() == nodes
                && profiles.iter().all(|profile| {
                    profile["status"]["links"]
                        .as_array()
                        .is_some_and(|links| links.len() == nodes)
                })
        });
        measurements().keep(&self.measured(0));
    }

    /// Copies the model to where Models name it by a path.
    pub fn put_model_on(&self, node: usize) {
        let file = self.on_node(node, ON_DISK);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::copy(smollm2(), file).expect("a copy");
    }

    /// `kubectl drain`, as before a machine is switched off. What belongs to a DaemonSet stays, and so does the agent.
    pub fn drain(&self, node: &str) {
        self.kubectl(&[
            "drain",
            node,
            "--ignore-daemonsets",
            "--delete-emptydir-data",
            "--force",
            &timeout_argument(),
        ])
        .unwrap_or_else(|error| panic!("{error}"));
    }

    /// The pods of `operator` or `agent`, but for those that are about to end.
    ///
    /// # Errors
    /// Why they are not known.
    pub(crate) fn pods_of(&self, component: &str) -> Result<Vec<Value>, String> {
        let label = format!("app.kubernetes.io/component={component}");
        let get = ["get", "pods", "-n", NAMESPACE, "-l", &label, "-o", "json"];
        let pods = self.kubectl(&get).map_err(|error| error.to_string())?;
        let mut pods = items(&pods);
        pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        Ok(pods)
    }

    /// Whether all agents and operators are ready, and are there.
    ///
    /// # Errors
    /// How many are.
    pub fn has_all_of_prima(&self) -> Result<(), String> {
        let there = |component: &str, port: u16| -> Result<usize, String> {
            let pods = self.pods_of(component)?;
            // What is said of a pod outlasts its node's power.
            let is_there = |pod: &&Value| is_ready(pod) && is_at(pod, port);
            Ok(self.within(|| pods.iter().filter(is_there).count()))
        };
        let nodes = self.nodes.len();
        let agents = there("agent", AGENTS_PORT)?;
        let operators = there("operator", OPERATORS_PORT)?;
        match (agents, operators) == (nodes, OPERATORS) {
            true => Ok(()),
            false => Err(format!(
                "{agents} of {nodes} agents and {operators} of {OPERATORS} operators are there"
            )),
        }
    }

    /// What the agent of the node measured.
    fn measured(&self, node: usize) -> PathBuf {
        self.on_node(node, DATA).join(MEASURED)
    }

    /// A path below a node's /var, as seen from here.
    fn on_node(&self, node: usize, path: &str) -> PathBuf {
        let below = path.strip_prefix("/var/").expect("a path below /var");
        self.var_of(node).join(below)
    }
}

fn chart() -> String {
    let chart = inputs::file("charts/prima");
    chart.to_str().expect("a path in UTF-8").to_owned()
}

/// The objects of a list in JSON.
fn items(list: &str) -> Vec<Value> {
    let mut list: Value = serde_json::from_str(list).expect("JSON");
    match list["items"].take() {
        Value::Array(items) => items,
        other => panic!("expected a list, found {other}"),
    }
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// Whether somebody listens there.
fn is_at(pod: &Value, port: u16) -> bool {
    let address = pod["status"]["podIP"].as_str();
    let address = address.and_then(|address| address.parse::<IpAddr>().ok());
    address.is_some_and(|address| {
        TcpStream::connect_timeout(&SocketAddr::new(address, port), CONNECTS_WITHIN).is_ok()
    })
}
