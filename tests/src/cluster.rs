//! A real cluster on this machine for one test: a control plane and nodes, each on a host of its own, with kubelets that run pods in
//! containerd. Takes root, Debian's packages (`tests/run` installs them) and cgroups, of version 1 or 2.
//!
//! The network is the cluster's own: what talks to the API server, to pods or to Services is started by [`command`](Cluster::command),
//! or runs [`within`](Cluster::within) it.

mod host;
mod image;
mod models;
mod network;
mod node;
mod policies;
mod prima;

use std::ffi::OsStr;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use crate::api_server::{ALL_NAMESPACES, ApiServer, Backend, Site};
use crate::command::CommandError;
use crate::programs::program;
use crate::service::Service;
use crate::timeout_argument;
pub(crate) use host::Host;
pub use image::{PrimaImages, build_images};
pub use models::{MAX_TOKENS, PROMPT, TOOLS_POD, TRY};
pub(crate) use network::pod_network;
use network::{CONTROL_PLANE, REGISTRY_PORT};
pub use node::Node;
pub use prima::{ON_DISK, chart, chart_to_upgrade_from};

/// Everything that belongs to it ends on drop, and leaves nothing.
pub struct Cluster {
    // Dropped in this order.
    nodes: Vec<Node>,
    _names: Service,
    api_server: ApiServer,
    control_plane: Arc<Host>,
    folder: TempDir,
}

/// Knows the Services, as in any cluster; names outside the cluster are unknown here.
const COREFILE: &str = "
.:53 {
    bind ADDRESS
    kubernetes cluster.local {
        kubeconfig KUBECONFIG
    }
    errors
}
";

impl Cluster {
    /// Starts a cluster of this many nodes and waits until they are ready. Panics with the end of a log if it does not get there.
    pub fn start(nodes: usize) -> Cluster {
        let folder = tempfile::Builder::new().prefix("prima-cluster-").tempdir();
        let folder = folder.expect("a temporary folder");
        let path = folder.path();
        let group = path.file_name().expect("a name").to_string_lossy();
        let control_plane = Host::start(
            &format!("{group}-control-plane"),
            "control-plane",
            &path.join("control-plane/var"),
        );
        let control_plane = Arc::new(control_plane);
        network::make_bridge(&control_plane, nodes).expect("a network");

        let names: Vec<String> = (0..nodes).map(node::node_name).collect();
        let site = Site::host(control_plane.clone(), CONTROL_PLANE);
        // As k3s has it, and so most clusters at home.
        let mut api_server = ApiServer::start_at(site, Backend::Kine, &names);
        api_server.start_controller_manager();
        api_server.start_scheduler();

        let nodes =
            (0..nodes).map(|index| Node::new(index, nodes, path, &api_server, &control_plane));
        let cluster = Cluster {
            nodes: nodes.collect(),
            _names: start_name_server(&api_server, path),
            api_server,
            control_plane,
            folder,
        };
        let tools = image::made("tools.tar");
        thread::scope(|scope| {
            for node in &cluster.nodes {
                scope.spawn(|| {
                    node.start();
                    node.import_images(&tools);
                });
            }
        });
        let timeout = timeout_argument();
        // One by one: of several, kubectl waits for the first only, and fails for the others.
        for condition in ["--for=create", "--for=condition=Ready"] {
            for name in &names {
                let node = format!("node/{name}");
                let waited = cluster.kubectl(&["wait", condition, &timeout, &node]);
                waited.expect("nodes that are ready");
            }
        }
        cluster
    }

    /// Puts the images of an OCI archive on every node, under the names that they have in there.
    pub fn import_images(&self, archive: &Path) {
        thread::scope(|scope| {
            for node in &self.nodes {
                scope.spawn(|| node.import_images(archive));
            }
        });
    }

    /// Waits until each node has an available pod of this DaemonSet, in the namespace default. `kubectl rollout status` would not do:
    /// it is content with the nodes that the controller has heard of, which may be fewer for a moment.
    pub fn wait_for_daemon(&self, name: &str) {
        let available = self.nodes.len();
        let available = format!("--for=jsonpath={{.status.numberAvailable}}={available}");
        let daemon = format!("daemonset/{name}");
        if let Err(error) = self.kubectl(&["wait", &available, &daemon, &timeout_argument()]) {
            let pods = self.kubectl(&["describe", "pods"]);
            panic!("{error}\n{}", pods.unwrap_or_default());
        }
    }

    /// Counts from 0.
    pub fn node(&self, index: usize) -> &Node {
        &self.nodes[index]
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The folder of this machine that is the /var of the node with this index.
    pub fn var_of(&self, index: usize) -> PathBuf {
        self.nodes[index].var()
    }

    /// Whether a process of this machine runs on a node of this cluster. Other clusters may have nodes of the same names.
    pub fn has_process(&self, id: u32) -> bool {
        let group = self.folder.path().file_name().expect("a name");
        let groups = fs::read_to_string(format!("/proc/{id}/cgroup"));
        groups.is_ok_and(|groups| groups.contains(&*group.to_string_lossy()))
    }

    /// The one of the control plane, which can be restarted.
    pub(crate) fn api_server(&self) -> &ApiServer {
        &self.api_server
    }

    /// What kubectl prints.
    ///
    /// # Errors
    /// What it wrote on stderr, where it fails.
    pub fn kubectl(&self, args: &[&str]) -> Result<String, CommandError> {
        self.api_server.kubectl(args)
    }

    /// `kubectl apply --server-side` of these documents.
    ///
    /// # Errors
    /// As [`kubectl`](Self::kubectl).
    pub fn apply(&self, yaml: &str) -> Result<String, CommandError> {
        self.api_server.apply(yaml)
    }

    /// Does `work` while the existing NetworkPolicies are enforced for the existing pods. Afterwards the rules stay as they then are: later
    /// pods are open, and policies do not know them.
    pub fn enforcing_policies<T>(&self, work: impl FnOnce() -> T) -> T {
        thread::scope(|scope| {
            // Dropped when the work ends, however it does.
            let (working, ended) = mpsc::channel::<()>();
            let enforcer = scope.spawn(move || {
                let mut in_force = String::new();
                loop {
                    self.enforce_policies(&mut in_force);
                    let waited = ended.recv_timeout(Duration::from_secs(1));
                    if waited == Err(RecvTimeoutError::Disconnected) {
                        return self.enforce_policies(&mut in_force);
                    }
                }
            });
            let done = work();
            drop(working);
            enforcer.join().expect("policies that can be enforced");
            done
        })
    }

    /// Nodes that have these rules already, `in_force`, are left alone: each takes several processes.
    fn enforce_policies(&self, in_force: &mut String) {
        let kinds = ["networkpolicies", "namespaces", "pods"];
        let listed = kinds.map(|kind| self.objects(ALL_NAMESPACES, kind));
        let objects = listed.concat();
        let rules = policies::rules(&objects).unwrap_or_else(|error| panic!("{error}"));
        if rules == *in_force {
            return;
        }
        for node in &self.nodes {
            node.enforce(&rules);
        }
        *in_force = rules;
    }

    /// What helm prints.
    ///
    /// # Errors
    /// As [`kubectl`](Self::kubectl).
    pub fn helm(&self, args: &[&str]) -> Result<String, CommandError> {
        self.api_server.helm(args)
    }

    /// `kubectl port-forward` to a port of `target`, for example `service/NAME`, in `namespace`.
    pub fn port_forward(&self, namespace: &str, target: &str, port: u16) -> PortForward {
        let mut command = self.api_server.command(program("kubectl"));
        command.args([
            "port-forward",
            "--namespace",
            namespace,
            target,
            &format!(":{port}"),
        ]);
        let logs = tempfile::tempdir_in(self.folder.path()).expect("a temporary folder");
        let mut service = Service::start("port-forward", command, logs.path());
        let line = service.wait_for_line("Forwarding from ");
        let address = line
            .split_whitespace()
            .nth(2)
            .and_then(|word| word.parse().ok());
        PortForward {
            _service: service,
            address: address.unwrap_or_else(|| panic!("no address in {line:?}")),
            _logs: logs,
        }
    }

    /// Starts `kubectl get ARGS --watch`, of objects of which there is one. No change is missed once this returns.
    pub fn watch(&self, args: &[&str]) -> Watch {
        let mut command = self.api_server.command(program("kubectl"));
        command.arg("get").args(args).arg("--watch");
        let logs = tempfile::tempdir_in(self.folder.path()).expect("a temporary folder");
        let mut service = Service::start("watch", command, logs.path());
        // It has listed them, and goes on from there.
        service.wait_for_line("");
        Watch {
            service,
            _logs: logs,
        }
    }

    /// `program`, to be started in the control plane's network, with the administrator's kubeconfig.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.api_server.command(program)
    }

    /// Where pods reach a test's own servers: whatever is bound to this address [`within`](Self::within) the cluster's network.
    pub fn address(&self) -> Ipv4Addr {
        CONTROL_PLANE
    }

    /// A port of [`address`](Self::address), for a test's own server.
    pub fn listen(&self) -> TcpListener {
        let listener = self.within(|| TcpListener::bind((CONTROL_PLANE, 0)));
        listener.expect("a port in the cluster's network")
    }

    /// Where a [`Registry`](crate::registry::Registry) may be: nodes ask there for images that they lack, whichever registry these are of.
    pub(crate) fn registry(&self) -> SocketAddr {
        SocketAddr::from((CONTROL_PLANE, REGISTRY_PORT))
    }

    /// Does `work` in the control plane's network, from where pods and nodes can be reached. A socket that is made there stays there:
    /// a test's own server is bound like this, and then serves from any thread.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.control_plane.within(work)
    }
}

/// CoreDNS beside the API server, not in a pod, so that it is there when the first pod asks.
fn start_name_server(api_server: &ApiServer, folder: &Path) -> Service {
    let kubeconfig = api_server.kubeconfig().display().to_string();
    let corefile = COREFILE
        .replace("ADDRESS", &CONTROL_PLANE.to_string())
        .replace("KUBECONFIG", &kubeconfig);
    let path = folder.join("Corefile");
    fs::write(&path, corefile)
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    let mut command = api_server.command(program("coredns"));
    command.arg("-conf").arg(path);
    let mut server = Service::start("coredns", command, folder);
    server.wait_for_line("CoreDNS-");
    server
}

/// What kubectl prints of each change. It ends on drop.
pub struct Watch {
    service: Service,
    _logs: TempDir,
}

impl Watch {
    /// All that it has printed so far.
    pub fn printed(&self) -> String {
        let log = self.service.log();
        fs::read_to_string(log)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", log.display()))
    }
}

/// It ends on drop.
pub struct PortForward {
    _service: Service,
    /// On loopback of the control plane's host.
    pub address: SocketAddr,
    _logs: TempDir,
}
