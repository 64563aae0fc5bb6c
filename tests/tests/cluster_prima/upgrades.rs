//! An upgrade of prima and a node that is drained, while a client asks without a retry; and what nodes fetch because of that.

use std::collections::HashSet;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use prima_tests::cluster::TRY;
use prima_tests::{PATIENCE, wait_until};
use serde_json::Value;

use crate::harness::{HEADER, NODES, Test};

/// The model's.
const LAYERS: u64 = 30;

/// What nodes have run, and so have on their disks.
#[derive(Default)]
pub struct Runs {
    /// Nodes and layers.
    layers: HashSet<(String, u64)>,
    /// Nodes that were rank 0.
    first_ranks: HashSet<String>,
}

/// What nodes were told to run that they had not run before.
#[derive(Debug, Default)]
pub struct New {
    layers: usize,
    first_ranks: usize,
}

impl Runs {
    /// Takes in plans; returns what is new in them.
    pub fn note(&mut self, plans: &[Value]) -> New {
        let mut new = New::default();
        for plan in plans {
            let members = plan["spec"]["members"].as_array().expect("members");
            for (rank, member) in members.iter().enumerate() {
                let node = member["name"].as_str().expect("a name");
                if rank == 0 && self.first_ranks.insert(node.to_owned()) {
                    new.first_ranks += 1;
                }
                for window in member["windows"].as_array().expect("windows") {
                    let [first, last] = ["first", "last"].map(|end| window[end].as_u64());
                    for layer in first.expect("a layer")..last.expect("a layer") {
                        new.layers += usize::from(self.layers.insert((node.to_owned(), layer)));
                    }
                }
            }
        }
        new
    }
}

impl AddAssign for New {
    fn add_assign(&mut self, more: New) {
        self.layers += more.layers;
        self.first_ranks += more.first_ranks;
    }
}

impl Test {
    /// Asks a Model again and again until `done`, or until whoever says so has failed: how often it answered, and why it did not.
    fn keep_asking(&self, model: &str, done: &AtomicBool) -> (usize, Vec<String>) {
        let begun = Instant::now();
        let (mut answers, mut failures) = (0, Vec::new());
        while !done.load(Ordering::Relaxed) && begun.elapsed() < PATIENCE {
            match self.cluster.ask_from(2, model, TRY) {
                Ok(_) => answers += 1,
                Err(error) => failures.push(error),
            }
        }
        (answers, failures)
    }

    /// The hub has sent what is new to nodes, and beyond that no more than a header to each.
    pub fn assert_fetched(&self, new: &New, whole: u64) {
        // Rank 0 also has the embedding, which is less than half of this model.
        let moved = new.layers as u64 * whole / LAYERS + new.first_ranks as u64 * whole / 2;
        let sent = self.hub.body_bytes();
        assert!(
            sent < moved + NODES as u64 * HEADER,
            "{sent} bytes were fetched, for {new:?}"
        );
    }

    /// Upgrades prima, which takes each agent along in turn, until the Model answers as before. Returns what nodes had not run before.
    pub fn upgrade(&self, runs: &mut Runs, expected: &str) -> New {
        let begun = Instant::now();
        self.cluster.upgrade_prima(&[
            "--set",
            "logLevel=debug,tests.model.name=smollm2,tests.model.namespace=default",
        ]);
        let mut silent = Duration::ZERO;
        let mut new = New::default();
        let rolled = |what: &str| {
            let status = ["rollout", "status", what, "-n", "prima", "--watch=false"];
            self.kubectl(&status).contains("successfully rolled out")
        };
        let done = AtomicBool::new(false);
        let (answers, failures) = thread::scope(|scope| {
            let asking = scope.spawn(|| self.keep_asking("from-disk", &done));
            loop {
                let asked = Instant::now();
                // Looked at before it is asked: else an agent of before may have answered.
                let all_new =
                    rolled("daemonset/prima-agent") && rolled("deployment/prima-operator");
                let answer = self.cluster.ask_from(0, "smollm2", TRY);
                let answered = answer.is_ok_and(|answer| answer == expected);
                if !answered {
                    silent += asked.elapsed();
                }
                new += runs.note(&self.plans("smollm2"));
                // The operator says what is ready, and it restarts itself in an upgrade.
                if all_new && answered && self.is_ready("smollm2") {
                    break;
                }
                assert!(
                    begun.elapsed() < PATIENCE,
                    "the upgrade does not end: {}",
                    self.cluster.told("smollm2")
                );
            }
            done.store(true, Ordering::Relaxed);
            asking.join().expect("a client that does not panic")
        });
        new += runs.note(&self.plans("smollm2"));
        println!(
            "upgrade: {:.0} s, of which no answer for about {:.0} s; layers on nodes that had not run them: {}; \
             the model on all disks answered {answers} times",
            begun.elapsed().as_secs_f64(),
            silent.as_secs_f64(),
            new.layers
        );
        assert!(
            answers > 0 && failures.is_empty(),
            "no answer, without a retry, {} times of {}: {failures:#?}",
            failures.len(),
            answers + failures.len()
        );
        // The Service leads to an agent that runs.
        let slice = self.cluster.json(&["get", "endpointslice", "smollm2-ipv4"]);
        let address = slice["endpoints"][0]["addresses"][0].as_str();
        let agents = self.agent_addresses();
        assert!(
            agents
                .iter()
                .any(|(_, agent)| Some(agent.to_string().as_str()) == address),
            "{address:?} is none of {agents:?}"
        );
        new
    }

    /// Drains the node of a Model's rank 0 while a client asks, without a retry, until no ring of the Model has a part there.
    pub fn drain_under_load(&self, model: &str) {
        let rank0 = self.members(model)[0].clone();
        let begun = Instant::now();
        let done = AtomicBool::new(false);
        let (answers, failures) = thread::scope(|scope| {
            let asking = scope.spawn(|| self.keep_asking(model, &done));
            self.cluster.drain(&rank0);
            wait_until("no ring has a part on the node", || {
                let plans = self.plans(model);
                let members = plans.iter().map(|plan| &plan["spec"]["members"]);
                let mut members = members.filter_map(Value::as_array).flatten();
                members.all(|member| member["name"] != *rank0)
            });
            done.store(true, Ordering::Relaxed);
            asking.join().expect("a client that does not panic")
        });
        println!(
            "the node of rank 0 drained: its ring was gone after {:.0} s; answers meanwhile: {answers}",
            begun.elapsed().as_secs_f64()
        );
        assert!(
            answers > 0 && failures.is_empty(),
            "no answer, without a retry, {} times of {}: {failures:#?}",
            failures.len(),
            answers + failures.len()
        );
        self.kubectl(&["uncordon", &rank0]);
    }
}
