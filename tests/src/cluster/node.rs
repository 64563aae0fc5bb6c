//! A node of a cluster: a host with a containerd, a kubelet and a kube-proxy as on any machine, and images that are imported, or pulled from a
//! registry of the test's own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use super::host::{Host, within_network};
use super::network::{
    self, CONTROL_PLANE, POD_NETWORK, REGISTRY_PORT, UPLINK, node_address, pod_network,
};
use super::policies;
use crate::api_server::{Account, ApiServer};
use crate::command::run;
use crate::programs::program;
use crate::service::Service;

/// A machine of a cluster, which is on until it is killed.
pub struct Node {
    name: String,
    index: usize,
    nodes: usize,
    /// Configuration and logs; its disk is below.
    folder: PathBuf,
    control_plane: Arc<Host>,
    /// `None`: without power.
    running: Mutex<Option<Running>>,
}

struct Running {
    // Dropped in this order.
    _services: Vec<Service>,
    host: Host,
}

const CONTAINERD_CONFIG: &str = r#"
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  # Of the pods' networks. It is imported, never fetched.
  sandbox_image = "localhost/tools:latest"
  # This machine may not let a container be safer from being killed for memory than the test is.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "FOLDER/cni"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "FOLDER/certs.d"
"#;

/// Where images are looked for before any other registry: what k3s makes of a registries.yaml with a mirror for "*".
const MIRROR: &str = r#"
[host."http://ADDRESS"]
  capabilities = ["pull", "resolve"]
"#;

impl Node {
    /// Prepares the node `index` of `nodes`; it is off.
    pub(crate) fn new(
        index: usize,
        nodes: usize,
        folder: &Path,
        api_server: &ApiServer,
        control_plane: &Arc<Host>,
    ) -> Node {
        let name = node_name(index);
        let node = Node {
            folder: folder.join(&name),
            name,
            index,
            nodes,
            control_plane: control_plane.clone(),
            running: Mutex::default(),
        };
        let folder = node.folder.display();
        for folder in ["cni", "certs.d/_default"] {
            fs::create_dir_all(node.path(folder)).expect("a folder of a node");
        }
        node.write(
            "containerd.toml",
            &CONTAINERD_CONFIG.replace("FOLDER", &folder.to_string()),
        );
        node.write(
            "certs.d/_default/hosts.toml",
            &MIRROR.replace("ADDRESS", &format!("{CONTROL_PLANE}:{REGISTRY_PORT}")),
        );
        node.write("cni/pods.conflist", &node.pod_network_config());
        node.write(
            "kubelet.yaml",
            &node.kubelet_config(&api_server.authority()),
        );
        let kubelet = Account::kubelet(&node.name).token();
        api_server.write_kubeconfig(&node.path("kubelet.kubeconfig"), &kubelet);
        let proxy = Account::component("kube-proxy").token();
        api_server.write_kubeconfig(&node.path("kube-proxy.kubeconfig"), &proxy);
        node
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder of this machine that is the node's /var, where pods mount a hostPath.
    pub fn var(&self) -> PathBuf {
        self.path("var")
    }

    /// Ends every process of the node at once, pods too, as when it loses power.
    pub fn kill(&self) {
        // Until it has ended, others need not wait for the lock.
        let running = self.running.lock().unwrap().take();
        if running.is_some() {
            drop(running);
            network::unlink_node(&self.control_plane, self.index);
        }
    }

    /// Starts the node after [`kill`](Self::kill), with the disk that it had.
    pub fn restart(&self) {
        self.kill();
        self.start();
    }

    /// Whether a process of this machine runs on the node.
    pub fn has_process(&self, id: u32) -> bool {
        let groups = fs::read_to_string(format!("/proc/{id}/cgroup")).unwrap_or_default();
        let own = self.group();
        groups.split(['/', '\n']).any(|group| group == own)
    }

    /// Takes the node off the network; what runs on it goes on.
    pub fn cut_link(&self) {
        network::set_link(&self.control_plane, self.index, false).expect("cut a link");
    }

    pub fn restore_link(&self) {
        network::set_link(&self.control_plane, self.index, true).expect("restore a link");
    }

    /// While `meanwhile` is done, drops what comes in over its link and matches, and what goes out (matches of iptables, which an empty one does all).
    pub(crate) fn drop_packets(
        &self,
        incoming: Option<&str>,
        outgoing: Option<&str>,
        meanwhile: impl FnOnce(),
    ) {
        let change = |change: &str| {
            let incoming =
                incoming.map(|which| format!("raw {change} PREROUTING -i {UPLINK} {which}"));
            let outgoing =
                outgoing.map(|which| format!("mangle {change} POSTROUTING -o {UPLINK} {which}"));
            for rule in incoming.into_iter().chain(outgoing) {
                let line = format!("iptables --wait -t {rule} -j DROP");
                let changed = self.on_host(|host| host.run(&line));
                changed.unwrap_or_else(|error| panic!("{}: {error}", self.name));
            }
        };
        change("-A");
        meanwhile();
        change("-D");
    }

    /// Lets its link take so much (`tc`) each way; `None`: all again.
    pub(crate) fn limit_rate(&self, rate: Option<&str>) {
        let limited =
            self.on_host(|host| network::set_rate(&self.control_plane, host, self.index, rate));
        limited.unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    /// Gives a folder of the node's /var a disk of its own with so many bytes, empty, until the node is killed. Pods that run
    /// already do not see it.
    pub fn mount_disk(&self, folder: &str, bytes: u64) {
        let mount = format!("mount -t tmpfs -o size={bytes} tmpfs /var/{folder}");
        let mounted = self.on_host(|host| host.run(&mount));
        mounted.unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    /// Does `work` in the node's own network, from where its pods can always be reached.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let network = self.on_host(Host::network);
        within_network(&network, work)
    }

    /// Puts rules of [`policies`] in force, in place of those before.
    pub(crate) fn enforce(&self, rules: &str) {
        let mut restore = Command::new("iptables-restore");
        restore.args(["--wait", "--noflush"]);
        let set = self.on_host(|host| {
            run(host.enter(restore), rules)?;
            let jump = format!("FORWARD --jump {}", policies::CHAIN);
            let there = host.run(&format!("iptables --wait --check {jump}"));
            there.or_else(|_| host.run(&format!("iptables --wait --insert {jump}")))
        });
        set.unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    pub(crate) fn start(&self) {
        let host = Host::start(&self.group(), &self.name, &self.var());
        network::link_node(&self.control_plane, &host, self.index, self.nodes).expect("a link");
        let start = |name: &str, command| {
            Service::start(
                &format!("{}-{name}", self.name),
                host.enter(command),
                &self.folder,
            )
        };

        let mut containerd = Command::new("containerd");
        containerd.arg("--config").arg(self.path("containerd.toml"));
        let mut containerd = start("containerd", containerd);
        containerd.wait_until(|| host.run("ctr version").map(drop));

        let mut kubelet = Command::new(program("kubelet"));
        kubelet
            .arg("--config")
            .arg(self.path("kubelet.yaml"))
            .arg("--kubeconfig")
            .arg(self.path("kubelet.kubeconfig"))
            .arg(format!("--hostname-override={}", self.name))
            .arg(format!("--node-ip={}", node_address(self.index)));
        let mut proxy = Command::new(program("kube-proxy"));
        proxy
            .arg("--kubeconfig")
            .arg(self.path("kube-proxy.kubeconfig"))
            .arg(format!("--hostname-override={}", self.name))
            .arg(format!("--cluster-cidr={POD_NETWORK}"))
            .arg("--proxy-mode=iptables")
            // The table of connections belongs to the whole machine.
            .arg("--conntrack-max-per-core=0");
        let running = Running {
            _services: vec![
                containerd,
                start("kubelet", kubelet),
                start("kube-proxy", proxy),
            ],
            host,
        };
        *self.running.lock().unwrap() = Some(running);
    }

    pub(crate) fn import_images(&self, archive: &Path) {
        let mut import = Command::new("ctr");
        import
            .args(["--namespace", "k8s.io", "images", "import"])
            .arg(archive);
        let imported = self.on_host(|host| run(host.enter(import), ""));
        imported.unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    /// Does something with its host, which is on.
    fn on_host<T>(&self, work: impl FnOnce(&Host) -> T) -> T {
        let running = self.running.lock().unwrap();
        work(&running.as_ref().expect("a node that runs").host)
    }

    /// Names its cgroups.
    fn group(&self) -> String {
        let cluster = self.folder.parent().and_then(Path::file_name);
        let cluster = cluster.expect("the name of a cluster").to_string_lossy();
        format!("{cluster}-{}", self.name)
    }

    fn kubelet_config(&self, authority: &Path) -> String {
        format!(
            r#"
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
authentication: {{anonymous: {{enabled: false}}, x509: {{clientCAFile: "{authority}"}}}}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
clusterDNS: ["{CONTROL_PLANE}"]
clusterDomain: cluster.local
resolvConf: ""
# What this machine has in cgroups and swap, it has: they are not the kubelet's to judge or to arrange.
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
# The disk is the machine's too: a full one is no reason to evict pods, or to delete images that cannot be fetched again.
evictionHard: {{memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%"}}
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
"#,
            address = node_address(self.index),
            authority = authority.display(),
        )
    }

    fn pod_network_config(&self) -> String {
        let subnet = pod_network(self.index);
        format!(
            r#"
{{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {{"type": "ptp", "ipam": {{"type": "host-local", "dataDir": "/run/cni", "ranges": [[{{"subnet": "{subnet}"}}]], "routes": [{{"dst": "0.0.0.0/0"}}]}}}},
  {{"type": "portmap", "capabilities": {{"portMappings": true}}}}
]}}
"#
        )
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::write(&path, text)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    }
}

pub(crate) fn node_name(index: usize) -> String {
    format!("node-{index}")
}
