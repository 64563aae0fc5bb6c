//! Nodes of a cluster, with kubelets, on which the chart has installed prima; and how each of their faults is brought about, and lifted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use super::faults::{FIFTH, SLOW, in_bursts, pause, signal, sleep_until};
use super::sequence::{Fault, Kind, MACHINES, ON_NODES, Setting};
use super::stage::{Place, Roles};
use crate::api_server::ApiServer;
use crate::cluster::{Cluster, Node, ON_DISK, PrimaImages, pod_network};
use crate::command::run;
use crate::local_ring::running_members;
use crate::operator::NAMESPACE;
use crate::wait_for;

/// From the moment in which no operator is left until somebody tells what has become of a ring: another one does not judge a ring that it has not
/// reached yet, and hears after 40 s that an agent is gone.
const NOBODY_LOOKS: Duration = Duration::from_secs(35);
/// One that waits to lead gives the leader time to say it.
const STANDS_BY: Duration = Duration::from_secs(2);

/// Ends on drop.
pub struct Nodes {
    cluster: Cluster,
    /// Held by whatever happens to a node's power and link, and to the model's file there: one thing at a time.
    hit: [Mutex<()>; MACHINES],
    file: [Mutex<()>; MACHINES],
}

impl Nodes {
    /// Starts everything.
    pub fn new(images: &PrimaImages) -> Nodes {
        Nodes {
            cluster: Cluster::with_prima(MACHINES, images),
            hit: Default::default(),
            file: Default::default(),
        }
    }

    fn break_node(&self, fault: &Fault, roles: &Roles, end: Instant) -> Duration {
        let nodes = self.cluster.nodes();
        let order = roles.order(nodes.iter().map(Node::name));
        let (index, next) = (order[fault.victim], order[(fault.victim + 1) % order.len()]);
        let node = &nodes[index];
        match fault.kind {
            Kind::KillMember => signal(&members_on(node), Signal::KILL),
            Kind::StopMember => pause(&members_on(node), end),
            Kind::Truncate => {
                let _one_at_a_time = self.file[index].lock().unwrap();
                self.cluster.cut_model_off(index);
                sleep_until(end);
                self.cluster.put_model_on(index);
            }
            Kind::DeleteAgent => self.delete_pod(&[
                "-l",
                "app.kubernetes.io/component=agent",
                "--field-selector",
                &format!("spec.nodeName={}", node.name()),
            ]),
            _ => {
                let operators = wait_for("operators", || self.cluster.pods_of("operator"));
                let _one_at_a_time = self.hit[index].lock().unwrap();
                let nobody_leads = self.nobody_leads(&operators, &roles.leader, node, fault);
                hit_node(fault, node, next, end);
                return nobody_leads;
            }
        }
        Duration::ZERO
    }

    /// For how much longer than else a broken ring may go unseen, with this node gone.
    fn nobody_leads(
        &self,
        operators: &[Value],
        leader: &str,
        node: &Node,
        fault: &Fault,
    ) -> Duration {
        let is_here = |operator: &Value| operator["spec"]["nodeName"] == *node.name();
        let mut leading = operators.iter();
        let leads =
            leading.any(|operator| operator["metadata"]["name"] == *leader && is_here(operator));
        // The lock of this node is held, too.
        let is_hit = |node: usize| self.hit[node].try_lock().is_err();
        let places = self.cluster.nodes().iter().enumerate();
        let mut others = places.filter(|(index, _)| !is_hit(*index));
        let one_is_left = others.any(|(_, other)| {
            let mut there = operators.iter();
            there.any(|operator| operator["spec"]["nodeName"] == *other.name())
        });
        match (leads, one_is_left) {
            (_, false) => fault.lasts + NOBODY_LOOKS,
            (true, true) => STANDS_BY,
            (false, true) => Duration::ZERO,
        }
    }

    /// 0: the one that leads, else one that waits.
    fn delete_operator(&self, victim: usize, leader: &str) {
        let operators = wait_for("operators", || self.cluster.pods_of("operator"));
        let names = operators
            .iter()
            .filter_map(|pod| pod["metadata"]["name"].as_str());
        let (leading, waiting): (Vec<&str>, Vec<&str>) = names.partition(|name| *name == leader);
        let chosen = if victim == 0 { &leading } else { &waiting };
        // There may be none just now.
        if let Some(&name) = chosen.first() {
            self.delete_pod(&[name]);
        }
    }

    /// Tells it to end, and does not wait for that.
    fn delete_pod(&self, which: &[&str]) {
        let delete = [
            "delete",
            "pod",
            "-n",
            NAMESPACE,
            "--wait=false",
            "--ignore-not-found",
        ];
        let delete = [&delete[..], which].concat();
        // The API server may be away.
        wait_for("a pod is deleted", || self.cluster.kubectl(&delete));
    }
}

impl Place for Nodes {
    const SETTING: Setting = ON_NODES;

    /// In the network of the control plane.
    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.cluster.within(work)
    }

    fn api(&self) -> &ApiServer {
        self.cluster.api_server()
    }

    fn model(&self) -> PathBuf {
        ON_DISK.into()
    }

    fn carry_out(&self, fault: &Fault, roles: &Roles, end: Instant) -> Duration {
        match fault.kind {
            Kind::RestartApiServer => self.cluster.api_server().restart(),
            Kind::DeleteOperator => self.delete_operator(fault.victim, &roles.leader),
            _ => return self.break_node(fault, roles, end),
        }
        Duration::ZERO
    }

    /// Kubelets do.
    fn keep_up(&self, _over: &AtomicBool, _ended: &Mutex<Vec<String>>) {}

    fn members(&self) -> usize {
        let members = running_members().into_iter();
        members
            .filter(|member| self.cluster.has_process(member.pid))
            .count()
    }

    /// The cluster does.
    fn collect_garbage(&self, _model: &str) {}

    fn is_whole(&self) -> Result<(), String> {
        self.cluster.has_all_of_prima()
    }

    /// Of pods that are there.
    fn logs(&self) -> Vec<PathBuf> {
        let pods = (0..MACHINES).flat_map(|node| entries(&pod_logs(&self.cluster, node)));
        let of_prima = pods.filter(|pod| {
            let name = pod.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&format!("{NAMESPACE}_"))
        });
        let containers = of_prima.flat_map(|pod| entries(&pod));
        containers
            .flat_map(|container| entries(&container))
            .collect()
    }

    fn keep_logs(self) -> PathBuf {
        let kept = tempfile::Builder::new().prefix("prima-faults-").tempdir();
        let kept = kept.expect("a temporary folder").keep();
        for node in 0..MACHINES {
            let mut copy = Command::new("cp");
            copy.arg("-r")
                .arg(pod_logs(&self.cluster, node))
                .arg(kept.join(format!("node-{node}")));
            // Of a pod that goes meanwhile there is less.
            if let Err(error) = run(copy, "") {
                eprintln!("{error}");
            }
        }
        kept
    }
}

/// What takes a node's power, or is done to its link.
fn hit_node(fault: &Fault, node: &Node, next: usize, end: Instant) {
    let all = Some("");
    match fault.kind {
        Kind::KillNode => {
            node.kill();
            sleep_until(end);
            node.restart();
        }
        Kind::Isolate => {
            node.cut_link();
            sleep_until(end);
            node.restore_link();
        }
        Kind::Cut | Kind::CutOneWay => {
            let next = pod_network(next);
            let (to, from) = (format!("-d {next}"), format!("-s {next}"));
            let ways = fault.cut_ways();
            let cut = |way: usize, which| ways.contains(&way).then_some(which);
            node.drop_packets(cut(1, &*from), cut(0, &*to), || sleep_until(end));
        }
        Kind::Burst => in_bursts(end, |burst| node.drop_packets(all, all, burst)),
        Kind::Lose => node.drop_packets(Some(FIFTH), Some(FIFTH), || sleep_until(end)),
        Kind::Slow => {
            node.limit_rate(Some(SLOW));
            sleep_until(end);
            node.limit_rate(None);
        }
        _ => unreachable!("no fault of a node's power or link"),
    }
}

/// Processes of members on a node.
fn members_on(node: &Node) -> Vec<u32> {
    let members = running_members().into_iter().map(|member| member.pid);
    members.filter(|member| node.has_process(*member)).collect()
}

fn pod_logs(cluster: &Cluster, node: usize) -> PathBuf {
    cluster.var_of(node).join("log/pods")
}

/// What is in a folder, which may not be there.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.flatten().map(|entry| entry.path()).collect()
}
