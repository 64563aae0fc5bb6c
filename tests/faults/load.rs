//! Whether clients notice that prima is upgraded, or that a node is drained and switched off: several ask the Model's Service from the nodes,
//! through kube-proxy, one request after the other, and none of them asks again what has failed. Upgrades and drains are repeated until as many
//! requests were made as are wanted, so that all of them are made while something changes.

use std::fmt::{self, Display, Formatter};
use std::net::{IpAddr, SocketAddr};
use std::ops::AddAssign;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use prima_tests::cluster::{Cluster, Node, ON_DISK, PrimaImages};
use prima_tests::fault_sequences::complete;
use prima_tests::{PATIENCE, timeout_argument, wait_for, wait_until};
use serde_json::{Value, json};

const NODES: usize = 3;
const CLIENTS: usize = 4;
const MODEL: &str = "load";
const PROMPT: &str = "The capital of France is";
const TOKENS: usize = 4;
/// For how long a client waits for the next part of an answer.
const TRY: Duration = Duration::from_secs(30);
/// After a failure: who is refused at once must not fail a thousand times within a second.
const PAUSE: Duration = Duration::from_millis(200);
/// How long a machine that was drained is off.
const OFF: Duration = Duration::from_secs(5);

/// Makes at least so many requests. Whether one failed, or was answered by something else than others.
pub fn fails(least: usize) -> bool {
    let load = Load::start();
    let (mut all, mut rounds) = (Asked::default(), 0);
    while all.requests < least {
        rounds += 1;
        all += load.upgrade(rounds);
        all += load.drain();
    }
    println!(
        "{CLIENTS} clients at once, {rounds} rolling upgrades, and {rounds} times a node that was drained and switched off: {all}"
    );
    all.failures
        .iter()
        .for_each(|failure| println!("  {failure}"));
    !all.failures.is_empty()
}

/// A ring that answers.
struct Load {
    cluster: Cluster,
    service: SocketAddr,
    expected: String,
}

/// What clients got.
#[derive(Default)]
struct Asked {
    requests: usize,
    failures: Vec<String>,
    /// Of those that were answered.
    slowest: Duration,
}

impl AddAssign for Asked {
    fn add_assign(&mut self, more: Asked) {
        self.requests += more.requests;
        self.failures.extend(more.failures);
        self.slowest = self.slowest.max(more.slowest);
    }
}

impl Display for Asked {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} requests failed, the slowest answer took {:.1} s",
            self.failures.len(),
            self.requests,
            self.slowest.as_secs_f64()
        )
    }
}

impl Load {
    fn start() -> Load {
        let cluster = Cluster::with_prima(NODES, &PrimaImages::build());
        let model = json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": MODEL, "namespace": "default"},
            "spec": {"source": {"hostPath": {"path": ON_DISK}}, "contextLength": 512, "minNodes": 2},
        });
        cluster.apply(&model.to_string()).expect("a Model");
        let mut load = Load {
            cluster,
            service: SocketAddr::from(([0, 0, 0, 0], 80)),
            expected: String::new(),
        };
        load.wait_for_ring_without(None);
        let get = ["get", "service", MODEL, "-o", "jsonpath={.spec.clusterIP}"];
        let address: IpAddr = load.kubectl(&get).parse().expect("an address");
        load.service.set_ip(address);
        // A node's kube-proxy hears where a Service leads a moment after the Model is ready.
        for node in load.cluster.nodes() {
            let answer = wait_for("each node knows the Service", || node.within(|| load.ask()));
            load.expected = answer;
        }
        load
    }

    /// A new version of all pods, of agents one after the other.
    fn upgrade(&self, round: usize) -> Asked {
        let version =
            format!("agent.podAnnotations.round={round},operator.podAnnotations.round={round}");
        let nodes: Vec<&Node> = self.cluster.nodes().iter().collect();
        self.while_clients_ask("rolling upgrade", &nodes, || {
            self.cluster.upgrade_prima(&["--set-string", &version]);
            for what in ["daemonset/prima-agent", "deployment/prima-operator"] {
                let status = ["rollout", "status", what, "-n", "prima"];
                self.kubectl(&[&status[..], &[&timeout_argument()]].concat());
            }
            self.wait_until_whole();
            self.wait_for_ring_without(None);
        })
    }

    /// The node of rank 0 is drained, switched off when no ring needs it any more, and started again. Clients ask from the others.
    fn drain(&self) -> Asked {
        let rank0 = || self.members().into_iter().next();
        let rank0 = wait_for("a ring", || {
            rank0().ok_or("there is none, or more than one")
        });
        let nodes = self.cluster.nodes().iter();
        let (drained, others): (Vec<&Node>, Vec<&Node>) =
            nodes.partition(|node| node.name() == rank0);
        let drained = drained[0];
        self.while_clients_ask("drain", &others, || {
            self.cluster.drain(&rank0);
            self.wait_for_ring_without(Some(&rank0));
            drained.kill();
            thread::sleep(OFF);
            drained.restart();
            self.wait_until_whole();
            self.kubectl(&["uncordon", &rank0]);
        })
    }

    /// What clients on these nodes get while something is done.
    fn while_clients_ask(&self, what: &str, nodes: &[&Node], change: impl FnOnce()) -> Asked {
        let begun = Instant::now();
        let done = &AtomicBool::new(false);
        let mut asked = Asked::default();
        thread::scope(|threads| {
            let nodes = nodes.iter().cycle().take(CLIENTS);
            let clients: Vec<_> = nodes
                .map(|node| threads.spawn(move || node.within(|| self.keep_asking(done))))
                .collect();
            change();
            done.store(true, Ordering::Relaxed);
            for client in clients {
                asked += client.join().expect("a client that does not panic");
            }
        });
        println!("{what}, {:.0} s: {asked}", begun.elapsed().as_secs_f64());
        asked
    }

    /// Until it is done, or until whoever says so has failed.
    fn keep_asking(&self, done: &AtomicBool) -> Asked {
        let begun = Instant::now();
        let mut asked = Asked::default();
        while !done.load(Ordering::Relaxed) && begun.elapsed() < 2 * PATIENCE {
            let at = Instant::now();
            asked.requests += 1;
            match self.ask() {
                Ok(answer) if answer == self.expected => {
                    asked.slowest = asked.slowest.max(at.elapsed());
                }
                Ok(other) | Err(other) => {
                    let (after, took) = (at - begun, at.elapsed());
                    asked
                        .failures
                        .push(format!("after {after:.1?}, within {took:.1?}: {other}"));
                    thread::sleep(PAUSE);
                }
            }
        }
        asked
    }

    fn ask(&self) -> Result<String, String> {
        let answer = complete(TRY, self.service, MODEL, PROMPT, TOKENS);
        answer.map_err(|unanswered| unanswered.problem)
    }

    /// Waits until there is one ring, and it serves, without this node.
    fn wait_for_ring_without(&self, node: Option<&str>) {
        let ready = format!("model/{MODEL}");
        wait_until("a ring", || {
            let members = self.members();
            !members.is_empty() && members.iter().all(|member| Some(member.as_str()) != node)
        });
        self.kubectl(&["wait", "--for=condition=Ready", &ready, &timeout_argument()]);
    }

    /// Of the ring, by rank; none while there are several.
    fn members(&self) -> Vec<String> {
        let plans = self.kubectl(&["get", "ringplans", "-o", "json"]);
        let plans: Value = serde_json::from_str(&plans).expect("JSON");
        let plans = plans["items"].as_array().expect("plans");
        let [plan] = &plans[..] else {
            return Vec::new();
        };
        let members = plan["spec"]["members"].as_array().expect("members");
        let name = |member: &Value| member["name"].as_str().expect("a name").to_owned();
        members.iter().map(name).collect()
    }

    fn wait_until_whole(&self) {
        wait_for("all agents and operators are there", || {
            self.cluster.has_all_of_prima()
        });
    }

    fn kubectl(&self, args: &[&str]) -> String {
        let said = self.cluster.kubectl(args);
        said.unwrap_or_else(|error| panic!("{error}"))
    }
}
