//! prima on a cluster, by its chart: how tests install it, upgrade it, and see whether all of it is there.

use std::fs::{self, OpenOptions};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::image::{GPU_AGENT, app_version, prima_image};
use super::{Cluster, PrimaImages};
use crate::api_server::ALL_NAMESPACES;
use crate::command::run;
use crate::inputs;
use crate::local_ring::smollm2;
use crate::measurements::Measurements;
use crate::node_agent::MEASURED;
use crate::operator::{NAMESPACE, chart_before};
use crate::software_gpu::{self, GPU, SOFTWARE, used_gpu};
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
/// Of a chart to upgrade from, what is not as it was.
const OF_TODAY: [&str; 3] = [
    "files/crds",
    "templates/agent/rbac.yaml",
    "templates/operator/rbac.yaml",
];
/// And what is, as git's pathspecs; tests/run/machine.py has the same.
const OF_BEFORE: [&str; 3] = [
    "charts/prima/templates",
    "charts/prima/values.yaml",
    ":(exclude,glob)charts/prima/templates/*/rbac.yaml",
];

/// Of agents in pods.
fn measurements() -> Measurements {
    Measurements::of("on-a-node")
}

impl Cluster {
    /// Starts a cluster with prima as users install it, whose agents have measured their nodes, and with the model on all disks. Models may be fetched
    /// from servers at [`address`](Self::address).
    pub fn with_prima(nodes: usize, images: &PrimaImages) -> Cluster {
        let cluster = Cluster::start(nodes);
        cluster.import_prima(images);
        for node in 0..nodes {
            cluster.put_model_on(node);
        }
        let allowed = format!("allowedServers={{{}}}", cluster.address());
        cluster.install_prima(&chart(), &["--set", &allowed]);
        cluster.wait_until_measured();
        cluster
    }

    /// Puts prima's images on every node.
    pub fn import_prima(&self, images: &PrimaImages) {
        self.import_images(&images.archive);
    }

    /// Installs prima as the README says, by this chart, with more values. Its agents find what agents measured here before.
    pub fn install_prima(&self, chart: &Path, values: &[&str]) {
        for node in 0..self.nodes.len() {
            measurements().give(&self.measured(node), Path::new(DATA));
        }
        let begun = Instant::now();
        let install = [
            "install",
            "prima",
            text(chart),
            "--namespace",
            NAMESPACE,
            "--create-namespace",
            "--wait",
            &timeout_argument(),
            // Whichever version the chart is of, the images are of today's.
            "--set-string",
            &format!("image.tag={}", app_version()),
            // The disk is shared: how full it is must not decide what is kept.
            "--set",
            "agent.cacheBudgetBytes=10000000000",
        ];
        if let Err(error) = self.helm(&[&install[..], values].concat()) {
            // Agents may be in a namespace of their own.
            let pods = self.kubectl(&["describe", "pods", "--all-namespaces"]);
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

    /// Upgrades prima to today's chart as documents say, with other values; what the upgrade replaces is not waited for.
    pub fn upgrade_prima(&self, values: &[&str]) {
        let chart = chart();
        let upgrade = [
            "upgrade",
            "prima",
            text(&chart),
            "--namespace",
            NAMESPACE,
            "--reset-then-reuse-values",
        ];
        self.helm(&[&upgrade[..], values].concat())
            .unwrap_or_else(|error| panic!("{error}"));
    }

    /// Waits until the agents have measured each node, and the links between them.
    pub fn wait_until_measured(&self) {
        let nodes = self.nodes.len();
        wait_until("each node is measured, and the links between them", || {
            let profiles = self.objects(ALL_NAMESPACES, "nodeprofiles");
            profiles.len() == nodes
                && profiles.iter().all(|profile| {
                    profile["status"]["links"]
                        .as_array()
                        .is_some_and(|links| links.len() == nodes)
                })
        });
        measurements().keep(&self.measured(0));
    }

    /// What lavapipe is called in a pod of the agents' image with Vulkan.
    pub fn gpu_in_pods(&self) -> String {
        let image = format!("--image={}", prima_image(GPU_AGENT));
        let environment = format!("--env={GPU}={SOFTWARE}");
        let pod = ["run", "gpu", "--restart=Never", &image, &environment];
        let inspect = ["--", "inspect", "--gpu", "--output", "json"];
        let ended = "--for=jsonpath={.status.phase}=Succeeded";
        self.kubectl(&[&pod[..], &inspect].concat())
            .and_then(|_| self.kubectl(&["wait", ended, "pod/gpu", &timeout_argument()]))
            .and_then(|_| self.kubectl(&["logs", "gpu"]))
            .map(|said| used_gpu(&said))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Has a node hand out a GPU, as a device plugin does, and labels it as the chart's page says. Its next agent, if it is of the image with
    /// Vulkan, finds that it has measured one of this name, which is fast.
    pub fn give_gpu(&self, node: usize, name: &str) {
        software_gpu::declare(&self.measured(node), name);
        let node = self.nodes[node].name();
        let resource = r#"[{"op": "add", "path": "/status/capacity/squat.ai~1dri", "value": "1"}]"#;
        let patch = ["patch", "node", node, "--subresource=status", "--type=json"];
        self.kubectl(&[&patch[..], &["-p", resource]].concat())
            .and_then(|_| self.kubectl(&["label", "node", node, "prima.dev/gpu=dri"]))
            .unwrap_or_else(|error| panic!("{error}"));
    }

    /// Copies the model beside the path by which Models name it, and moves it there, as whoever repairs it.
    pub fn put_model_on(&self, node: usize) {
        let file = self.on_node(node, ON_DISK);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        let copy = file.with_extension("new");
        fs::copy(smollm2(), &copy).expect("a copy");
        fs::rename(copy, file).expect("the model's file");
    }

    /// Leaves a node the first MiB of that file, also where it is mapped.
    pub fn cut_model_off(&self, node: usize) {
        let file = self.on_node(node, ON_DISK);
        let file = OpenOptions::new().write(true).open(file);
        let cut = file.and_then(|file| file.set_len(1 << 20));
        cut.expect("a shorter file");
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
    pub fn pods_of(&self, component: &str) -> Result<Vec<Value>, String> {
        let pods = self.api_server.object(NAMESPACE, "pods");
        let mut pods = pods.map_err(|error| error.to_string())?;
        let pods = pods["items"].as_array_mut().ok_or("no list of pods")?;
        pods.retain(|pod| {
            let metadata = &pod["metadata"];
            metadata["labels"]["app.kubernetes.io/component"] == component
                && metadata["deletionTimestamp"].is_null()
        });
        Ok(std::mem::take(pods))
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

/// A chart to upgrade from, below `charts/prima`: the one before, as [`chart_before`] has it, with its values, pods, Services and policies
/// (`OF_BEFORE`). The programs that it starts are today's, as no others are built here; so the definitions and the rights are today's, too
/// (`OF_TODAY`). Else a program that writes a field, or asks for objects, that it did not before would not start. `None` in a shallow clone.
pub fn chart_to_upgrade_from() -> Option<TempDir> {
    let folder = chart_before(&OF_BEFORE)?;
    let (today, before) = (chart(), folder.path().join("charts/prima"));
    for part in OF_TODAY {
        let into = before.join(part);
        let mut copy = Command::new("cp");
        copy.arg("--recursive")
            .arg(today.join(part))
            .arg(into.parent().expect("a folder"));
        run(copy, "").unwrap_or_else(|error| panic!("{error}"));
    }
    Some(folder)
}

/// Today's chart.
pub fn chart() -> PathBuf {
    inputs::file("charts/prima")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
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
