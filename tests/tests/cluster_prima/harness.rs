//! A cluster with a hub, where prima is installed: Models are applied there and asked, and what is there is read.

use std::fs;
use std::net::{IpAddr, TcpListener};
use std::time::{Duration, Instant};

use prima_test_hub::TestHub;
use prima_tests::api_server::condition;
use prima_tests::cluster::{Cluster, PrimaImages};
use prima_tests::local_ring::smollm2;
use prima_tests::{PATIENCE, timeout_argument, wait_for, wait_until};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

pub const NODES: usize = 3;
pub const PROMPT: &str = "Name three colours.";
pub const MAX_TOKENS: usize = 16;
/// Two nodes with it hold the model, one does not.
const MEMORY_CAP: i64 = 115 << 20;
/// For an answer, where another try may follow, or where none may be needed: a connection may have begun too early, and lead to an agent that is gone.
pub const TRY: Duration = Duration::from_secs(20);
/// More than the header of the model, less than a tenth of it.
pub const HEADER: u64 = 4 << 20;

pub struct Test {
    // Dropped in this order.
    pub cluster: Cluster,
    pub hub: TestHub,
    _runtime: Runtime,
    _files: tempfile::TempDir,
    _images: PrimaImages,
}

impl Test {
    /// A cluster with a hub, and without prima.
    pub fn start() -> Self {
        let images = PrimaImages::build();
        let cluster = Cluster::start(NODES);
        cluster.import_prima(&images);
        cluster.apply(TOOLS).expect("pods to ask from");
        let files = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(files.path().join("people/models")).expect("a folder");
        fs::copy(smollm2(), files.path().join("people/models/smollm2.gguf")).expect("a copy");
        let runtime = Runtime::new().expect("a runtime");
        let hub = runtime.block_on(async {
            let [hub, cdn] = [(), ()].map(|()| {
                let listener = cluster.within(|| TcpListener::bind((cluster.address(), 0)));
                let listener = listener.expect("a port in the cluster's network");
                listener.set_nonblocking(true).expect("a listener");
                tokio::net::TcpListener::from_std(listener).expect("a listener")
            });
            TestHub::serve(files.path(), hub, cdn).expect("a hub")
        });
        Self {
            cluster,
            hub,
            _runtime: runtime,
            _files: files,
            _images: images,
        }
    }

    /// Installs prima as the README says.
    pub fn install(&self, values: &[&str]) {
        self.cluster.install_prima(values);
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

    pub fn json(&self, args: &[&str]) -> Value {
        let text = self.kubectl(&[args, &["-o", "json"]].concat());
        serde_json::from_str(&text).expect("JSON")
    }

    pub fn hub_source(&self) -> String {
        format!(
            "huggingFace: {{repo: people/models, file: smollm2.gguf, endpoint: '{}'}}",
            self.hub.endpoint()
        )
    }

    pub fn apply_model(&self, name: &str, source: &str, spec: &str) {
        let yaml = format!(
            "{{apiVersion: prima.dev/v1alpha1, kind: Model, metadata: {{name: {name}, namespace: default}}, spec: {{source: {{{source}}}, contextLength: 512{spec}}}}}"
        );
        self.cluster.apply(&yaml).expect("a Model");
    }

    pub fn delete_model(&self, name: &str) {
        self.kubectl(&["delete", "model", name, &timeout_argument()]);
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
                let profiles = self.json(&["get", "nodeprofiles"]);
                let mut profiles = profiles["items"].as_array().expect("profiles").iter();
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

    /// Status and message.
    pub fn condition(&self, model: &str, kind: &str) -> (String, String) {
        let condition = condition(&self.json(&["get", "model", model]), kind);
        let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        (text("status"), text("message"))
    }

    pub fn is_ready(&self, model: &str) -> bool {
        self.condition(model, "Ready").0 == "True"
    }

    pub fn wait_until_ready(&self, model: &str) {
        let begun = Instant::now();
        let object = format!("model/{model}");
        let timeout = timeout_argument();
        let wait = ["wait", "--for=condition=Ready", &object, &timeout];
        if let Err(error) = self.cluster.kubectl(&wait) {
            panic!("{error}\n{}", self.told(model));
        }
        println!("{model} ready after {:.0} s", begun.elapsed().as_secs_f64());
    }

    /// What there is to read about a Model that does not do what it should.
    pub fn told(&self, model: &str) -> String {
        let told = |args: &[&str]| {
            let told = self.cluster.kubectl(args);
            told.unwrap_or_else(|error| error.to_string())
        };
        let logs = [
            "logs",
            "-n",
            "prima",
            "--all-containers",
            "--prefix",
            "--tail=30",
            "-l",
            "app.kubernetes.io/name=prima",
        ];
        [
            told(&["describe", "model", model]),
            told(&["get", "ringplans", "-o", "yaml"]),
            told(&["get", "pods", "-A", "-o", "wide"]),
            told(&logs),
        ]
        .join("\n")
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
        let mut names = Vec::new();
        wait_until("the plan that the Model names is there", || {
            let found = self.json(&["get", "model", model]);
            let plan = format!("{model}-{}", found["status"]["planGeneration"]);
            let mut plans = self.plans(model).into_iter();
            let Some(plan) = plans.find(|one| one["metadata"]["name"] == plan) else {
                return false;
            };
            let members = plan["spec"]["members"].as_array().expect("members");
            let name = |member: &Value| member["name"].as_str().expect("a name").to_owned();
            names = members.iter().map(name).collect();
            true
        });
        names
    }

    /// All plans there are of a Model.
    pub fn plans(&self, model: &str) -> Vec<Value> {
        let plans = self.json(&[
            "get",
            "ringplans",
            "-l",
            &format!("prima.dev/model={model}"),
        ]);
        plans["items"].as_array().expect("plans").clone()
    }

    /// Asks the Model's Service from a pod on this node.
    pub fn ask_from(&self, node: usize, model: &str, patience: Duration) -> Result<String, String> {
        let body = json!({
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        });
        let url = format!("http://{model}.default/v1/chat/completions");
        let pods = [
            "get",
            "pods",
            "-l",
            "app=tools",
            "-o",
            "jsonpath={.items[0].metadata.name}",
            "--field-selector",
        ];
        let on_node = format!("spec.nodeName=node-{node}");
        let pod = self.kubectl(&[&pods[..], &[&on_node]].concat());
        let (body, seconds) = (body.to_string(), patience.as_secs().to_string());
        let wget = [
            "exec",
            &pod,
            "--",
            "/bin/busybox",
            "timeout",
            &seconds,
            "/bin/busybox",
            "wget",
            "-q",
            "-O",
            "-",
            "--header",
            "Content-Type: application/json",
            "--post-data",
            &body,
            &url,
        ];
        let answer = self
            .cluster
            .kubectl(&wget)
            .map_err(|error| error.to_string())?;
        let answer: Value = serde_json::from_str(&answer).map_err(|error| error.to_string())?;
        let content = answer["choices"][0]["message"]["content"].as_str();
        content.map(str::to_owned).ok_or_else(|| answer.to_string())
    }

    pub fn chat_from(&self, node: usize, model: &str) -> String {
        self.ask_from(node, model, PATIENCE)
            .unwrap_or_else(|error| panic!("from node {node}: {error}"))
    }

    /// A node's kube-proxy hears where a Service leads a moment after the Model is ready.
    pub fn first_answer_from(&self, node: usize, model: &str) -> String {
        wait_for(&format!("{model} answers on node {node}"), || {
            self.ask_from(node, model, TRY)
        })
    }

    pub fn wait_until_answers(&self, model: &str, expected: &str) {
        self.wait_until_answers_from(0, model, expected);
    }

    pub fn wait_until_answers_from(&self, node: usize, model: &str, expected: &str) {
        wait_for(&format!("{model} answers as before"), || {
            match self.ask_from(node, model, TRY) {
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

    /// The agents' pods, or some of them.
    pub fn agents(&self, which: &[&str]) -> Vec<Value> {
        let agents = ["-l", "app.kubernetes.io/component=agent"];
        let pods = self.json(&[&["get", "pods", "-n", "prima"], &agents[..], which].concat());
        pods["items"].as_array().expect("pods").clone()
    }

    /// Nodes, and the addresses of their agents' pods.
    pub fn agent_addresses(&self) -> Vec<(String, IpAddr)> {
        let pods = self.agents(&[]);
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

/// A pod on every node, to ask from.
const TOOLS: &str = "
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: tools, namespace: default}
spec:
  selector: {matchLabels: {app: tools}}
  template:
    metadata: {labels: {app: tools}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - {name: tools, image: localhost/tools, imagePullPolicy: IfNotPresent}
";

pub fn index_of(node: &str) -> usize {
    let index = node
        .strip_prefix("node-")
        .and_then(|index| index.parse().ok());
    index.expect("node-N")
}
