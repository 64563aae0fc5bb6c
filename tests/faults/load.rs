//! Whether clients notice that prima is upgraded, or that a node is drained and switched off: several ask the Services of two Models from the nodes,
//! through kube-proxy, one request after the other, and none of them asks again what has failed. Upgrades and drains are repeated until as many
//! requests were made as are wanted, so that all of them are made while something changes.
//!
//! The file of one Model is on all disks, and none of its requests may fail. Agents fetch that of the other: while its ring is connected again in an
//! upgrade it does not answer, as documents say, so requests may fail then, but not in a drain. No Model may answer otherwise than before.

use std::fmt::{self, Display, Formatter};
use std::net::{IpAddr, SocketAddr};
use std::ops::AddAssign;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use prima_test_hub::ModelHub;
use prima_tests::cluster::{Cluster, Node, ON_DISK, PrimaImages};
use prima_tests::fault_sequences::complete;
use prima_tests::local_ring::smollm2;
use prima_tests::{PATIENCE, timeout_argument, wait_for, wait_until};
use serde_json::{Value, json};

const NODES: usize = 3;
const PROMPT: &str = "The capital of France is";
const TOKENS: usize = 4;
/// For how long a client waits for the next part of an answer.
const TRY: Duration = Duration::from_secs(30);
/// After a failure: who is refused at once must not fail a thousand times within a second.
const PAUSE: Duration = Duration::from_millis(200);
/// How long a machine that was drained is off.
const OFF: Duration = Duration::from_secs(5);

/// Makes at least so many requests. Whether one failed that must not, or was answered by something else than others.
pub fn fails(least: usize) -> bool {
    let load = Load::start();
    let (mut all, mut rounds): ([Asked; 2], usize) = Default::default();
    let mut problems = Vec::new();
    while all.iter().map(|asked| asked.requests).sum::<usize>() < least {
        rounds += 1;
        for (change, asked) in [
            (Change::Upgrade, load.upgrade(rounds)),
            (Change::Drain, load.drain()),
        ] {
            for ((model, asked), sum) in load.models.iter().zip(asked).zip(&mut all) {
                problems.extend(asked.problems(change, model));
                *sum += asked;
            }
        }
    }
    println!(
        "{rounds} rolling upgrades, and {rounds} times a node that was drained and switched off:"
    );
    for (model, asked) in load.models.iter().zip(&all) {
        println!("  {model}: {asked}");
    }
    problems.iter().for_each(|problem| println!("  {problem}"));
    !problems.is_empty()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Upgrade,
    Drain,
}

/// Rings that answer.
struct Load {
    // Dropped in this order.
    cluster: Cluster,
    /// In the cluster's network.
    hub: ModelHub,
    models: [Served; 2],
}

/// A Model, and what is known of it.
struct Served {
    name: &'static str,
    clients: usize,
    /// Whether agents fetch its file.
    fetched: bool,
    service: SocketAddr,
    expected: String,
}

/// What clients of a Model got.
#[derive(Default)]
struct Asked {
    requests: usize,
    /// Why there was no answer.
    failures: Vec<String>,
    /// Answers that were others than before.
    wrong: Vec<String>,
    /// Of those that were answered.
    slowest: Duration,
    /// From an answer to a client to the next one.
    longest_pause: Duration,
}

impl Asked {
    /// What must not be.
    fn problems(&self, change: Change, model: &Served) -> Vec<String> {
        let may_fail = model.fetched && change == Change::Upgrade;
        let failures = self.failures.iter().filter(|_| !may_fail);
        let problems = failures.chain(&self.wrong);
        problems
            .map(|problem| format!("{model}, {problem}"))
            .collect()
    }
}

impl AddAssign for Asked {
    fn add_assign(&mut self, more: Asked) {
        self.requests += more.requests;
        self.failures.extend(more.failures);
        self.wrong.extend(more.wrong);
        self.slowest = self.slowest.max(more.slowest);
        self.longest_pause = self.longest_pause.max(more.longest_pause);
    }
}

impl Display for Asked {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} requests failed, {} were answered otherwise; the slowest answer took {:.1} s, the longest pause {:.1} s",
            self.failures.len(),
            self.requests,
            self.wrong.len(),
            self.slowest.as_secs_f64(),
            self.longest_pause.as_secs_f64()
        )
    }
}

impl Display for Served {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Served { name, clients, .. } = self;
        write!(f, "{name} ({clients} clients)")
    }
}

impl Load {
    fn start() -> Load {
        let cluster = Cluster::with_prima(NODES, &PrimaImages::build());
        let [hub, cdn] = [(), ()].map(|()| cluster.listen());
        let hub = ModelHub::serve(&smollm2(), hub, cdn).expect("a hub");
        let served = |name, clients, fetched| Served {
            name,
            clients,
            fetched,
            service: SocketAddr::from(([0, 0, 0, 0], 80)),
            expected: String::new(),
        };
        let mut load = Load {
            cluster,
            hub,
            models: [served("on-disks", 4, false), served("fetched", 2, true)],
        };
        for model in &load.models {
            let source = match model.fetched {
                false => json!({"hostPath": {"path": ON_DISK}}),
                true => json!({"huggingFace": {
                    "repo": "people/models",
                    "file": "smollm2.gguf",
                    "endpoint": load.hub.endpoint(),
                }}),
            };
            let object = json!({
                "apiVersion": "prima.dev/v1alpha1",
                "kind": "Model",
                "metadata": {"name": model.name, "namespace": "default"},
                "spec": {"source": source, "contextLength": 512, "minNodes": 2},
            });
            load.cluster.apply(&object.to_string()).expect("a Model");
        }
        load.wait_for_rings_without(None);
        let first = load.models.each_ref();
        let first = first.map(|model| load.first_answer(model));
        for (model, (service, answer)) in load.models.iter_mut().zip(first) {
            (model.service, model.expected) = (service, answer);
        }
        load
    }

    /// Where the Model's Service is, and what it answers.
    fn first_answer(&self, model: &Served) -> (SocketAddr, String) {
        let address = "jsonpath={.spec.clusterIP}";
        let address = self.kubectl(&["get", "service", model.name, "-o", address]);
        let address: IpAddr = address.parse().expect("an address");
        let service = SocketAddr::new(address, model.service.port());
        let ask = || complete(TRY, service, model.name, PROMPT, TOKENS);
        let mut answer = String::new();
        // A node's kube-proxy hears where a Service leads a moment after the Model is ready.
        for node in self.cluster.nodes() {
            answer = wait_for("each node knows the Service", || node.within(ask));
        }
        (service, answer)
    }

    /// A new version of all pods, of agents one after the other.
    fn upgrade(&self, round: usize) -> [Asked; 2] {
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
            self.wait_for_rings_without(None);
        })
    }

    /// The node of a rank 0 is drained, switched off when no ring needs it any more, and started again. Clients ask from the others.
    fn drain(&self) -> [Asked; 2] {
        let rank0 = || self.members(self.models[0].name).into_iter().next();
        let rank0 = wait_for("a ring", || {
            rank0().ok_or("there is none, or more than one")
        });
        let nodes = self.cluster.nodes().iter();
        let (drained, others): (Vec<&Node>, Vec<&Node>) =
            nodes.partition(|node| node.name() == rank0);
        let drained = drained[0];
        self.while_clients_ask("drain", &others, || {
            self.cluster.drain(&rank0);
            self.wait_for_rings_without(Some(&rank0));
            drained.kill();
            thread::sleep(OFF);
            drained.restart();
            self.wait_until_whole();
            self.kubectl(&["uncordon", &rank0]);
        })
    }

    /// What the clients of each Model get on these nodes while something is done.
    fn while_clients_ask(&self, what: &str, nodes: &[&Node], change: impl FnOnce()) -> [Asked; 2] {
        let (begun, sent_before) = (Instant::now(), self.hub.body_bytes());
        let done = &AtomicBool::new(false);
        let asked = thread::scope(|threads| {
            let clients = self.models.each_ref().map(|model| {
                let nodes = nodes.iter().copied().cycle().take(model.clients);
                let clients = nodes.map(|node| {
                    threads.spawn(move || node.within(|| self.keep_asking(model, done)))
                });
                clients.collect::<Vec<_>>()
            });
            change();
            done.store(true, Ordering::Relaxed);
            clients.map(|clients| {
                let mut asked = Asked::default();
                for client in clients {
                    asked += client.join().expect("a client that does not panic");
                }
                asked
            })
        });
        println!(
            "{what}, {:.0} s, {:.1} MB fetched",
            begun.elapsed().as_secs_f64(),
            (self.hub.body_bytes() - sent_before) as f64 / 1e6
        );
        for (model, asked) in self.models.iter().zip(&asked) {
            println!("  {model}: {asked}");
        }
        asked
    }

    /// Until it is done, or until whoever says so has failed.
    fn keep_asking(&self, model: &Served, done: &AtomicBool) -> Asked {
        let begun = Instant::now();
        let (mut asked, mut answered) = (Asked::default(), begun);
        while !done.load(Ordering::Relaxed) && begun.elapsed() < 2 * PATIENCE {
            let at = Instant::now();
            asked.requests += 1;
            let answer = complete(TRY, model.service, model.name, PROMPT, TOKENS);
            let (after, took) = (at - begun, at.elapsed());
            let told = |what: String| format!("after {after:.1?}, within {took:.1?}: {what}");
            match answer {
                Ok(answer) if answer == model.expected => {
                    asked.slowest = asked.slowest.max(took);
                    asked.longest_pause = asked.longest_pause.max(answered.elapsed());
                    answered = Instant::now();
                }
                Ok(other) => asked.wrong.push(told(other)),
                Err(why) => {
                    asked.failures.push(told(why));
                    thread::sleep(PAUSE);
                }
            }
        }
        asked
    }

    /// Waits until each Model has one ring, and it serves, without this node.
    fn wait_for_rings_without(&self, node: Option<&str>) {
        for Served { name, .. } in &self.models {
            wait_until("a ring", || {
                let members = self.members(name);
                !members.is_empty() && members.iter().all(|member| Some(member.as_str()) != node)
            });
            let ready = format!("model/{name}");
            self.kubectl(&["wait", "--for=condition=Ready", &ready, &timeout_argument()]);
        }
    }

    /// Of the Model's ring, by rank; none while there are several.
    fn members(&self, model: &str) -> Vec<String> {
        let label = format!("prima.dev/model={model}");
        let plans = self.kubectl(&["get", "ringplans", "-l", &label, "-o", "json"]);
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
