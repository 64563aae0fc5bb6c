//! prima on a real cluster of three nodes: `helm install`, `kubectl apply`, and the model answers; and what becomes of it when a node,
//! a link, a pod, the hub or the disk fails. Each test has a cluster of its own. The seconds that things took are printed.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use prima_tests::cluster::{Cluster, PrimaImages};
use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::{assets, http};
use prima_weights::test_hub::{Cut, TestHub};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

const NODES: usize = 3;
const PROMPT: &str = "Name three colours.";
const MAX_TOKENS: usize = 16;
/// Two of them hold the model, one does not.
const MEMORY_CAP: i64 = 115 << 20;

#[test]
fn a_model_from_a_hub_and_one_from_disks_answer_as_on_one_machine() {
    let test = Test::install(&[]);
    test.each_node_is_measured();
    test.limit_memory();

    test.apply_model("smollm2", &test.hub_source(), "");
    test.wait_until_ready("smollm2");
    let model = test.json(&["get", "model", "smollm2"]);
    assert_eq!(model["status"]["ringNodes"], 2, "{}", model["status"]);
    let here = LocalRing::builder().model(&smollm2()).members(1).start();
    let expected = here.chat(PROMPT, MAX_TOKENS);
    here.stop();
    for node in 0..NODES {
        assert_eq!(
            test.chat_from(node, "smollm2"),
            expected,
            "from node {node}"
        );
    }
    test.openai_client_answers("smollm2", &expected);

    // Each node fetched its part and, to know it, the header; the third fetched nothing.
    let whole = fs::metadata(smollm2()).expect("a model").len();
    let sent = test.sent_by_node();
    for node in model["status"]["nodes"].as_array().expect("nodes") {
        let name = node["name"].as_str().expect("a name");
        let bytes = sent
            .iter()
            .find(|(node, _)| node == name)
            .map_or(0, |(_, bytes)| *bytes);
        match node["totalBytes"].as_u64() {
            Some(total) => {
                assert_eq!(node["fetchedBytes"], node["totalBytes"]);
                assert!(
                    (total..total + HEADER).contains(&bytes),
                    "{name}: {bytes} for {total}"
                );
                assert!(total < whole, "{total} of {whole}");
            }
            None => assert_eq!(bytes, 0, "{name} is not in the ring"),
        }
    }

    // What people look at, as the README shows it.
    println!(
        "{}",
        test.kubectl(&["get", "models,nodeprofiles,ringplans"])
    );
    println!("{}", test.kubectl(&["describe", "model", "smollm2"]));

    test.kubectl(&["delete", "model", "smollm2", "--timeout=60s"]);
    wait_until("nothing is left", || {
        test.kubectl(&[
            "get",
            "ringplans,services,endpointslices",
            "-o",
            "name",
            "-l",
            "app.kubernetes.io/managed-by=prima-operator",
        ])
        .is_empty()
    });

    // The same file on the disks of two nodes.
    for node in 0..2 {
        let folder = test.cluster.var_of(node).join("lib/prima/models");
        fs::create_dir_all(&folder).expect("a folder");
        fs::copy(smollm2(), folder.join("smollm2.gguf")).expect("a copy");
    }
    let source = "hostPath: {path: /var/lib/prima/models/smollm2.gguf}";
    test.apply_model("from-disk", source, "");
    test.wait_until_ready("from-disk");
    assert_eq!(test.chat_from(2, "from-disk"), expected);
    let model = test.json(&["get", "model", "from-disk"]);
    let nodes = model["status"]["nodes"].as_array().expect("nodes");
    let third = nodes
        .iter()
        .find(|node| node["name"] == "node-2")
        .expect("a node");
    assert!(
        third["why"]
            .as_str()
            .expect("a reason")
            .contains("it has no file"),
        "{third}"
    );

    // The caches are still there: at most what a plan of this moment moves to another node is fetched.
    test.hub.clear();
    test.apply_model("smollm2", &test.hub_source(), "");
    test.wait_until_ready("smollm2");
    assert!(
        test.hub.body_bytes() < whole / 2,
        "fetched again: {}",
        test.hub.body_bytes()
    );
    // An upgrade takes each agent along in turn.
    test.hub.clear();
    let begun = Instant::now();
    test.helm(&[
        "upgrade",
        "prima",
        &chart(),
        "--namespace",
        "prima",
        "--reuse-values",
        "--set",
        "logLevel=debug",
    ]);
    let mut silent = Duration::ZERO;
    let rolled = || {
        let status = [
            "rollout",
            "status",
            "daemonset/prima-agent",
            "-n",
            "prima",
            "--timeout=1s",
        ];
        test.cluster.kubectl(&status).is_ok()
    };
    while !rolled() || !test.is_ready("smollm2") {
        let asked = Instant::now();
        if test.ask_from(0, "smollm2").is_err() {
            silent += asked.elapsed() + Duration::from_secs(1);
        }
        assert!(
            begun.elapsed() < Duration::from_secs(200),
            "the upgrade does not end: {}",
            test.told("smollm2")
        );
    }
    println!(
        "upgrade: {:.0} s, of which no answer for about {:.0} s",
        begun.elapsed().as_secs_f64(),
        silent.as_secs_f64()
    );
    assert_eq!(test.chat_from(0, "smollm2"), expected);
    assert!(
        test.hub.body_bytes() < whole,
        "fetched again: {}",
        test.hub.body_bytes()
    );

    // Uninstalled, Models stay as they are, and what answered is gone.
    test.helm(&["uninstall", "prima", "--namespace", "prima", "--wait"]);
    let left = test.kubectl(&["get", "models", "-o", "name"]);
    assert_eq!(left, "model.prima.dev/from-disk\nmodel.prima.dev/smollm2\n");
    assert!(test.ask_from(0, "smollm2").is_err());
}

#[test]
fn it_answers_again_after_a_node_a_link_or_a_pod_is_gone() {
    let mut test = Test::install(&[]);
    test.each_node_is_measured();
    test.limit_memory();
    test.apply_model("smollm2", &test.hub_source(), "");
    test.wait_until_ready("smollm2");
    let expected = test.chat_from(0, "smollm2");

    // The operator: nobody who asks notices.
    test.kubectl(&[
        "delete",
        "pod",
        "-n",
        "prima",
        "-l",
        "app.kubernetes.io/component=operator",
        "--wait=false",
    ]);
    assert_eq!(test.chat_from(0, "smollm2"), expected);
    test.kubectl(&[
        "rollout",
        "status",
        "deployment/prima-operator",
        "-n",
        "prima",
        "--timeout=90s",
    ]);

    // The agent of rank 0.
    let rank0 = test.members("smollm2")[0].clone();
    let begun = Instant::now();
    let on_node = format!("spec.nodeName={rank0}");
    test.kubectl(&[
        "delete",
        "pod",
        "-n",
        "prima",
        "-l",
        "app.kubernetes.io/component=agent",
        "--field-selector",
        &on_node,
    ]);
    test.wait_until_answers("smollm2", &expected);
    println!(
        "agent pod of rank 0 deleted: answered again after {:.0} s",
        begun.elapsed().as_secs_f64()
    );

    // A node that loses its power, and comes back later.
    let lost = test.members("smollm2").last().expect("a member").clone();
    let index = index_of(&lost);
    let begun = Instant::now();
    test.cluster.node(index).kill();
    wait_until("readiness is withdrawn", || !test.is_ready("smollm2"));
    let withdrawn = begun.elapsed();
    assert!(withdrawn < Duration::from_secs(50), "{withdrawn:?}");
    test.wait_until_ready("smollm2");
    assert!(!test.members("smollm2").contains(&lost));
    let other = (0..NODES)
        .find(|node| *node != index)
        .expect("another node");
    test.wait_until_answers_from(other, "smollm2", &expected);
    println!(
        "node of a member killed: withdrawn after {:.0} s, answered again after {:.0} s",
        withdrawn.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    test.cluster.node(index).restart();
    test.kubectl(&[
        "wait",
        "--for=condition=Ready",
        &format!("node/{lost}"),
        "--timeout=120s",
    ]);

    // A link that is cut.
    let lost = test.members("smollm2").last().expect("a member").clone();
    let begun = Instant::now();
    test.cluster.node(index_of(&lost)).cut_link();
    wait_until("readiness is withdrawn", || !test.is_ready("smollm2"));
    let withdrawn = begun.elapsed();
    test.wait_until_ready("smollm2");
    let other = (0..NODES)
        .find(|node| *node != index_of(&lost))
        .expect("another node");
    test.wait_until_answers_from(other, "smollm2", &expected);
    println!(
        "link of a member cut: withdrawn after {:.0} s, answered again after {:.0} s",
        withdrawn.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    test.cluster.node(index_of(&lost)).restore_link();

    // No ghost: what ran on the lost nodes ended, and only what the plan says runs.
    wait_until("one ring is left", || {
        let plans = test.json(&["get", "ringplans"]);
        plans["items"].as_array().map(Vec::len) == Some(1)
    });
}

#[test]
fn a_download_survives_its_hub_and_says_what_it_lacks() {
    let test = Test::install(&[]);
    test.each_node_is_measured();
    test.limit_memory();

    // Every answer ends early, for a while.
    test.hub.control(|hub| {
        hub.cut = Some(Cut {
            after_bytes: 3 << 20,
            times: 12,
        })
    });
    test.apply_model("smollm2", &test.hub_source(), "");
    test.wait_until_ready("smollm2");
    let whole = fs::metadata(smollm2()).expect("a model").len();
    let sent: u64 = test.sent_by_node().iter().map(|(_, bytes)| bytes).sum();
    assert!(
        sent < whole + 3 * HEADER,
        "{sent} of {whole}: what was there is not fetched again"
    );

    // A repository that asks for its licence to be accepted first says so where people look.
    test.hub
        .control(|hub| hub.gated = vec!["people/models".to_owned()]);
    test.apply_model("gated", &test.hub_source(), "");
    wait_until("it says why", || {
        let (status, message) = test.condition("gated", "Ready");
        status == "False" && message.contains("licence")
    });
    test.hub.control(|hub| hub.gated.clear());
    test.wait_until_ready("gated");
}

/// More than the header of the model, less than a tenth of it.
const HEADER: u64 = 4 << 20;

struct Test {
    // Dropped in this order.
    cluster: Cluster,
    hub: TestHub,
    _runtime: Runtime,
    _files: tempfile::TempDir,
    _images: PrimaImages,
}

impl Test {
    /// A cluster with prima installed as the README says.
    fn install(values: &[&str]) -> Self {
        let images = PrimaImages::build();
        let cluster = Cluster::start(NODES);
        for archive in &images.archives {
            cluster.import_image(archive);
        }
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
        let test = Self {
            cluster,
            hub,
            _runtime: runtime,
            _files: files,
            _images: images,
        };
        let begun = Instant::now();
        let install = [
            "install",
            "prima",
            &chart(),
            "--namespace",
            "prima",
            "--create-namespace",
            "--wait",
            "--timeout=180s",
        ];
        if let Err(error) = test.cluster.helm(&[&install[..], values].concat()) {
            let pods = test.cluster.kubectl(&["describe", "pods", "-n", "prima"]);
            let logs = test.cluster.kubectl(&[
                "logs",
                "-n",
                "prima",
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
        test.kubectl(&["rollout", "status", "daemonset/tools", "--timeout=90s"]);
        test
    }

    fn kubectl(&self, args: &[&str]) -> String {
        self.cluster
            .kubectl(args)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn helm(&self, args: &[&str]) -> String {
        self.cluster
            .helm(args)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn json(&self, args: &[&str]) -> Value {
        let text = self.kubectl(&[args, &["-o", "json"]].concat());
        serde_json::from_str(&text).expect("JSON")
    }

    fn hub_source(&self) -> String {
        format!(
            "huggingFace: {{repo: people/models, file: smollm2.gguf, endpoint: '{}'}}",
            self.hub.endpoint()
        )
    }

    fn apply_model(&self, name: &str, source: &str, spec: &str) {
        let yaml = format!(
            "{{apiVersion: prima.dev/v1alpha1, kind: Model, metadata: {{name: {name}, namespace: default}}, spec: {{source: {{{source}}}, contextLength: 512{spec}}}}}"
        );
        self.cluster.apply(&yaml).expect("a Model");
    }

    fn each_node_is_measured(&self) {
        wait_until("each node is measured, and the links between them", || {
            let profiles = self.json(&["get", "nodeprofiles"]);
            let profiles = profiles["items"].as_array().cloned().unwrap_or_default();
            profiles.len() == NODES
                && profiles.iter().all(|profile| {
                    profile["status"]["links"]
                        .as_array()
                        .is_some_and(|links| links.len() == NODES)
                })
        });
    }

    /// The nodes of this cluster share a machine on which the model would fit many times.
    fn limit_memory(&self) {
        let patch =
            json!({"spec": {"memoryCapBytes": MEMORY_CAP, "diskAllowed": false}}).to_string();
        for node in 0..NODES {
            let profile = format!("nodeprofile/node-{node}");
            self.kubectl(&["patch", &profile, "--type=merge", "-p", &patch]);
        }
    }

    fn condition(&self, model: &str, kind: &str) -> (String, String) {
        let found = self.json(&["get", "model", model]);
        let conditions = found["status"]["conditions"].as_array().cloned();
        let condition = conditions
            .unwrap_or_default()
            .into_iter()
            .find(|one| one["type"] == kind);
        let condition = condition.unwrap_or_default();
        let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        (text("status"), text("message"))
    }

    fn is_ready(&self, model: &str) -> bool {
        self.condition(model, "Ready").0 == "True"
    }

    fn wait_until_ready(&self, model: &str) {
        let begun = Instant::now();
        let object = format!("model/{model}");
        let wait = ["wait", "--for=condition=Ready", &object, "--timeout=180s"];
        if let Err(error) = self.cluster.kubectl(&wait) {
            panic!("{error}\n{}", self.told(model));
        }
        println!("{model} ready after {:.0} s", begun.elapsed().as_secs_f64());
    }

    /// What there is to read about a Model that does not do what it should.
    fn told(&self, model: &str) -> String {
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

    fn members(&self, model: &str) -> Vec<String> {
        let found = self.json(&["get", "model", model]);
        let plan = format!("{model}-{}", found["status"]["planGeneration"]);
        let plan = self.json(&["get", "ringplan", &plan]);
        let members = plan["spec"]["members"].as_array().expect("members");
        members
            .iter()
            .map(|member| member["name"].as_str().expect("a name").to_owned())
            .collect()
    }

    /// Asks the Model's Service from a pod on this node.
    fn ask_from(&self, node: usize, model: &str) -> Result<String, String> {
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
        let body = body.to_string();
        let wget = [
            "exec",
            &pod,
            "--",
            "/bin/busybox",
            "timeout",
            "20",
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

    fn chat_from(&self, node: usize, model: &str) -> String {
        self.ask_from(node, model)
            .unwrap_or_else(|error| panic!("from node {node}: {error}"))
    }

    fn wait_until_answers(&self, model: &str, expected: &str) {
        self.wait_until_answers_from(0, model, expected);
    }

    fn wait_until_answers_from(&self, node: usize, model: &str, expected: &str) {
        let mut last = String::new();
        let deadline = Instant::now() + Duration::from_secs(150);
        while last != expected {
            assert!(
                Instant::now() < deadline,
                "{model} does not answer as before: {last}"
            );
            last = self.ask_from(node, model).unwrap_or_else(|error| error);
            thread::sleep(Duration::from_millis(500));
        }
    }

    /// OpenAI's client, through a port that kubectl forwards to rank 0.
    fn openai_client_answers(&self, model: &str, expected: &str) {
        let slice = self.json(&["get", "endpointslice", &format!("{model}-ipv4")]);
        let node = slice["endpoints"][0]["nodeName"].as_str().expect("a node");
        let port = slice["ports"][0]["port"].as_u64().expect("a port") as u16;
        let on_node = format!("spec.nodeName={node}");
        let pods = [
            "get",
            "pods",
            "-n",
            "prima",
            "-l",
            "app.kubernetes.io/component=agent",
            "-o",
            "name",
            "--field-selector",
        ];
        let pod = self.kubectl(&[&pods[..], &[&on_node]].concat());
        let forward = self.cluster.port_forward("prima", pod.trim(), port);
        let address: SocketAddr = forward.address;
        let models = self
            .cluster
            .within(|| http::get(address, "/v1/models"))
            .expect("an answer");
        assert_eq!(models.json()["data"][0]["id"], model);
        let python = assets::path("venv/bin/python").expect("Python");
        let script = format!(
            "import openai\nclient = openai.OpenAI(base_url='http://{address}/v1', api_key='none')\nanswer = client.chat.completions.create(model='{model}', messages=[{{'role': 'user', 'content': '{PROMPT}'}}], max_tokens={MAX_TOKENS}, temperature=0)\nprint(answer.choices[0].message.content, end='')"
        );
        let mut command = self.cluster.command(python);
        command.args(["-c", &script]);
        let output = command.output().expect("Python");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            printed,
            expected,
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    /// Bytes that the hub sent to the agent on each node; it is the addresses of their pods that the hub sees.
    fn sent_by_node(&self) -> Vec<(String, u64)> {
        let pods = self.json(&[
            "get",
            "pods",
            "-n",
            "prima",
            "-l",
            "app.kubernetes.io/component=agent",
        ]);
        let pods = pods["items"].as_array().expect("pods");
        pods.iter()
            .map(|pod| {
                let address: IpAddr = pod["status"]["podIP"]
                    .as_str()
                    .and_then(|ip| ip.parse().ok())
                    .expect("an address");
                let counters = self.hub.counters();
                let sent = counters.iter().filter(|counter| counter.client == address);
                let node = pod["spec"]["nodeName"].as_str().expect("a node");
                (
                    node.to_owned(),
                    sent.map(|counter| counter.body_bytes).sum(),
                )
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

fn chart() -> String {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/prima");
    chart.to_str().expect("a path in UTF-8").to_owned()
}

fn index_of(node: &str) -> usize {
    let index = node
        .strip_prefix("node-")
        .and_then(|index| index.parse().ok());
    index.expect("node-N")
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(500));
    }
}
