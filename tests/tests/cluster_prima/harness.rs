//! A cluster with a hub, where prima is installed: Models are applied there and asked, and what is there is read.

use std::net::IpAddr;
use std::path::Path;

use prima_test_hub::ModelHub;
use prima_tests::api_server::condition;
use prima_tests::cluster::{Cluster, PrimaImages, TRY, chart};
use prima_tests::local_ring::smollm2;
use prima_tests::{wait_for, wait_until};
use serde_json::{Value, json};

pub const NODES: usize = 3;
/// Two nodes with it hold the model, one does not.
const MEMORY_CAP: i64 = 115 << 20;
/// More than the header of the model, less than a tenth of it.
pub const HEADER: u64 = 4 << 20;

pub struct Test {
    // Dropped in this order.
    pub cluster: Cluster,
    pub hub: ModelHub,
}

impl Test {
    /// A cluster with a hub, and without prima.
    pub fn start() -> Self {
        let images = PrimaImages::build();
        let cluster = Cluster::start(NODES);
        cluster.import_prima(&images);
        cluster.start_tools();
        let [hub, cdn] = [(), ()].map(|()| cluster.listen());
        let hub = ModelHub::serve(&smollm2(), hub, cdn).expect("a hub");
        Self { cluster, hub }
    }

    /// Installs prima as the README says.
    pub fn install(&self, values: &[&str]) {
        self.install_chart(&chart(), values);
    }

    /// The same by another chart.
    pub fn install_chart(&self, chart: &Path, values: &[&str]) {
        // The hub is in the cluster's network.
        let allowed = format!("allowedServers={{{}}}", self.cluster.address());
        let values = [&["--set", &allowed][..], values].concat();
        self.cluster.install_prima(chart, &values);
        self.cluster.wait_for_daemon("tools");
    }

    pub fn kubectl(&self, args: &[&str]) -> String {
        self.cluster
            .kubectl(args)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn helm(&self, args: &[&str]) -> String {
        self.cluster
            .helm(args)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn hub_source(&self) -> String {
        format!(
            "huggingFace: {{repo: people/models, file: smollm2.gguf, endpoint: '{}'}}",
            self.hub.endpoint()
        )
    }

    /// The nodes of this cluster share a machine on which the model would fit many times.
    pub fn limit_memory(&self) {
        // The operator tells whom it leaves out, and so what it has read; else it might plan before it has.
        for (exclude, told) in [(true, "Excluded"), (false, "AgentRuns")] {
            let spec =
                json!({"memoryCapBytes": MEMORY_CAP, "diskAllowed": false, "exclude": exclude});
            let patch = json!({"spec": spec}).to_string();
            for node in 0..NODES {
                let profile = format!("nodeprofile/node-{node}");
                self.kubectl(&["patch", &profile, "--type=merge", "-p", &patch]);
            }
            wait_until("the operator knows what each node's owner allows", || {
                let profiles = self.cluster.objects("default", "nodeprofiles");
                let mut profiles = profiles.iter();
                profiles.all(|profile| condition(profile, "Ready")["reason"] == told)
            });
        }
    }

    pub fn lift_memory_limit(&self) {
        for node in 0..NODES {
            let profile = format!("nodeprofile/node-{node}");
            let patch = r#"{"spec": {"memoryCapBytes": null}}"#;
            self.kubectl(&["patch", &profile, "--type=merge", "-p", patch]);
        }
    }

    pub fn is_ready(&self, model: &str) -> bool {
        self.cluster.condition(model, "Ready").0 == "True"
    }

    /// Deletes the agent's pod on a node, and waits until it is gone.
    pub fn delete_agent(&self, node: &str) {
        let on_node = format!("spec.nodeName={node}");
        self.kubectl(&[
            "delete",
            "pod",
            "-n",
            "prima",
            "-l",
            "app.kubernetes.io/component=agent",
            "--field-selector",
            &on_node,
        ]);
    }

    /// The members of the plan that the Model names. The operator may replace that plan between the two reads; then both are made again.
    pub fn members(&self, model: &str) -> Vec<String> {
        wait_for("the plan that the Model names is there", || {
            let found = self.cluster.object("default", &format!("model/{model}"));
            self.members_of(model, &found).ok_or("not yet")
        })
    }

    /// The same of a Model as it was `found`; `None` if that plan is gone.
    pub fn members_of(&self, model: &str, found: &Value) -> Option<Vec<String>> {
        let plan = format!("{model}-{}", found["status"]["planGeneration"]);
        let mut plans = self.plans(model).into_iter();
        let plan = plans.find(|one| one["metadata"]["name"] == plan)?;
        let members = plan["spec"]["members"].as_array().expect("members");
        let name = |member: &Value| member["name"].as_str().expect("a name").to_owned();
        Some(members.iter().map(name).collect())
    }

    /// All plans there are of a Model.
    pub fn plans(&self, model: &str) -> Vec<Value> {
        let mut plans = self.cluster.objects("default", "ringplans");
        plans.retain(|plan| plan["metadata"]["labels"]["prima.dev/model"] == model);
        plans
    }

    pub fn wait_until_answers(&self, model: &str, expected: &str) {
        self.wait_until_answers_from(0, model, expected);
    }

    pub fn wait_until_answers_from(&self, node: usize, model: &str, expected: &str) {
        wait_for(&format!("{model} answers as before"), || {
            match self.cluster.ask_from(node, model, TRY) {
                Ok(answer) if answer == expected => Ok(()),
                Ok(other) | Err(other) => Err(other),
            }
        });
    }

    /// Bytes that the hub sent to the agent on each node; the hub sees the addresses of their pods.
    pub fn sent_by_node(&self) -> Vec<(String, u64)> {
        let counters = self.hub.counters();
        let sent = |address: IpAddr| {
            let counters = counters.iter();
            let ours = counters.filter(|counter| counter.client == address);
            ours.map(|counter| counter.body_bytes).sum()
        };
        let agents = self.agent_addresses().into_iter();
        agents
            .map(|(node, address)| (node, sent(address)))
            .collect()
    }

    /// The agents' pods.
    pub fn agents(&self) -> Vec<Value> {
        let mut pods = self.cluster.objects("prima", "pods");
        pods.retain(|pod| pod["metadata"]["labels"]["app.kubernetes.io/component"] == "agent");
        pods
    }

    /// Nodes, and the addresses of their agents' pods.
    pub fn agent_addresses(&self) -> Vec<(String, IpAddr)> {
        let pods = self.agents();
        pods.iter()
            .map(|pod| {
                let address = pod["status"]["podIP"].as_str();
                let address = address.and_then(|address| address.parse().ok());
                let node = pod["spec"]["nodeName"].as_str().expect("a node");
                (node.to_owned(), address.expect("an address"))
            })
            .collect()
    }
}

pub fn index_of(node: &str) -> usize {
    let index = node
        .strip_prefix("node-")
        .and_then(|index| index.parse().ok());
    index.expect("node-N")
}
