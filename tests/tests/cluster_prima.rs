//! prima on a real cluster of three nodes: `helm install`, `kubectl apply`, and the model answers; and what becomes of it when a node,
//! a link, a pod, the hub or the disk fails. Each test has a cluster of its own. The seconds that things took are printed.

use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::AddAssign;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use prima_test_hub::{Cut, TestHub};
use prima_tests::api_server::condition;
use prima_tests::cluster::{Cluster, ON_DISK, PrimaImages};
use prima_tests::local_ring::{LocalRing, running_members, smollm2};
use prima_tests::{PATIENCE, assets, http, timeout_argument, wait_for, wait_until};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::runtime::Runtime;

const NODES: usize = 3;
const PROMPT: &str = "Name three colours.";
const MAX_TOKENS: usize = 16;
/// Two nodes with it hold the model, one does not.
const MEMORY_CAP: i64 = 115 << 20;

#[test]
fn models_from_hub_and_disk_answer_as_on_one_machine() {
    let test = Test::start();
    test.cluster.enforcing_policies(|| {
        test.install(&[
            "--set-json",
            r#"networkPolicy.apiFrom=[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}]"#,
        ]);
        test.cluster.wait_until_measured();
    });
    test.limit_memory();

    test.apply_model("smollm2", &test.hub_source(), "");
    test.wait_until_ready("smollm2");
    test.strangers_are_kept_out("smollm2");
    let model = test.json(&["get", "model", "smollm2"]);
    // Two are enough. The third takes part if one of them was measured as slow, which may happen, as they share processors.
    let ring_nodes = model["status"]["ringNodes"].as_u64();
    assert!(
        ring_nodes == Some(2) || ring_nodes == Some(3),
        "{}",
        model["status"]
    );
    let here = LocalRing::builder().model(&smollm2()).members(1).start();
    let expected = here.chat(PROMPT, MAX_TOKENS);
    here.stop();
    for node in 0..NODES {
        assert_eq!(
            test.first_answer_from(node, "smollm2"),
            expected,
            "from node {node}"
        );
    }
    test.openai_client_answers("smollm2", &expected);

    // Each node fetched its part and, to know it, the header; one that is not in the ring fetched nothing.
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

    let first = test.plans("smollm2");

    // What people look at, as charts/docs/running.md shows it.
    println!(
        "{}",
        test.kubectl(&["get", "models,nodeprofiles,ringplans"])
    );
    println!("{}", test.kubectl(&["describe", "model", "smollm2"]));

    test.delete_model("smollm2");
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
        test.cluster.put_model_on(node);
    }
    let source = format!("hostPath: {{path: {ON_DISK}}}");
    test.apply_model("from-disk", &source, "");
    test.wait_until_ready("from-disk");
    assert_eq!(test.first_answer_from(2, "from-disk"), expected);
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

    // The caches are still there.
    let mut runs = Runs::default();
    runs.note(&first);
    test.hub.clear();
    test.apply_model("smollm2", &test.hub_source(), "");
    test.wait_until_ready("smollm2");
    let new = runs.note(&test.plans("smollm2"));
    test.assert_fetched(&new, whole);

    // What all machines have on their disks, with memory for two rings, need not stand still in an upgrade.
    test.cluster.put_model_on(2);
    test.lift_memory_limit();

    // The policies follow the pods of the upgrade.
    test.hub.clear();
    test.cluster.enforcing_policies(|| {
        let new = test.upgrade(&mut runs, &expected);
        test.assert_fetched(&new, whole);

        // The chart's own test asks the operator and the Model.
        let timeout = timeout_argument();
        let said = test.helm(&["test", "prima", "--namespace", "prima", &timeout]);
        assert!(said.contains("Succeeded"), "{said}");

        test.drain_under_load("from-disk");
    });

    // Uninstalled, Models stay as they are, and what answered is gone.
    test.helm(&["uninstall", "prima", "--namespace", "prima", "--wait"]);
    let left = test.kubectl(&["get", "models", "-o", "name"]);
    assert_eq!(left, "model.prima.dev/from-disk\nmodel.prima.dev/smollm2\n");
    wait_until("the agents' pods are gone", || test.agents(&[]).is_empty());
    assert!(test.ask_from(0, "smollm2", TRY).is_err());
}

#[test]
fn it_answers_again_after_a_node_a_link_or_a_pod_is_gone() {
    let test = Test::start();
    test.install(&[]);
    test.cluster.wait_until_measured();
    test.limit_memory();
    test.apply_model("smollm2", &test.hub_source(), "");
    test.wait_until_ready("smollm2");
    let expected = test.first_answer_from(0, "smollm2");

    // The operator: no client notices.
    let operators = || {
        let operators = ["-l", "app.kubernetes.io/component=operator", "-o", "name"];
        test.kubectl(&[&["get", "pods", "-n", "prima"], &operators[..]].concat())
    };
    let before = operators();
    test.kubectl(&[
        "delete",
        "pod",
        "-n",
        "prima",
        "-l",
        "app.kubernetes.io/component=operator",
        "--wait=false",
    ]);
    let mut asked = 0;
    wait_until("the operator is back", || {
        assert_eq!(test.chat_from(0, "smollm2"), expected);
        asked += 1;
        let operator = test.json(&["get", "deployment", "prima-operator", "-n", "prima"]);
        let status = &operator["status"];
        let now = operators();
        let is_gone = |pod: &str| now.lines().all(|other| other != pod);
        asked > 1 && before.lines().all(is_gone) && status["readyReplicas"] == status["replicas"]
    });
    println!("operator's pods deleted: {asked} answers meanwhile");

    // The agent of rank 0.
    let rank0 = test.members("smollm2")[0].clone();
    let begun = Instant::now();
    test.delete_agent(&rank0);
    test.wait_until_answers("smollm2", &expected);
    println!(
        "agent pod of rank 0 deleted: answered again after {:.0} s",
        begun.elapsed().as_secs_f64()
    );

    // A node that loses its power, and comes back later; if there is a choice, the one of the operator that leads.
    let members = test.members("smollm2");
    let leader = test.leader();
    let lost = members.iter().find(|member| **member == leader);
    let lost = lost.or(members.last()).expect("a member").clone();
    let index = index_of(&lost);
    let begun = Instant::now();
    test.cluster.node(index).kill();
    let (withdrawn, said) = test.withdrawn_after("smollm2", Timestamp::now());
    assert!(withdrawn < WITHDRAWN_WITHIN, "{withdrawn:?}: {said}");
    test.wait_until_ready("smollm2");
    assert!(!test.members("smollm2").contains(&lost));
    let other = (0..NODES)
        .find(|node| *node != index)
        .expect("another node");
    test.wait_until_answers_from(other, "smollm2", &expected);
    println!(
        "{lost} of {members:?} killed (the operator on {leader} led): withdrawn after {:.0} s ({said}), answered again after {:.0} s",
        withdrawn.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    test.cluster.node(index).restart();
    test.kubectl(&[
        "wait",
        "--for=condition=Ready",
        &format!("node/{lost}"),
        &timeout_argument(),
    ]);

    // A link that is cut.
    let lost = test.members("smollm2").last().expect("a member").clone();
    let begun = Instant::now();
    test.cluster.node(index_of(&lost)).cut_link();
    let (withdrawn, said) = test.withdrawn_after("smollm2", Timestamp::now());
    assert!(withdrawn < WITHDRAWN_WITHIN, "{withdrawn:?}: {said}");
    test.wait_until_ready("smollm2");
    let other = (0..NODES)
        .find(|node| *node != index_of(&lost))
        .expect("another node");
    test.wait_until_answers_from(other, "smollm2", &expected);
    println!(
        "link of a member cut: withdrawn after {:.0} s ({said}), answered again after {:.0} s",
        withdrawn.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    test.cluster.node(index_of(&lost)).restore_link();

    // No ghost: what ran on the lost nodes ended, and only what the plan says runs.
    wait_until("one ring is left", || {
        let plans = test.json(&["get", "ringplans"]);
        plans["items"].as_array().map(Vec::len) == Some(1)
    });
    wait_until("the plan's members run, and no other", || {
        let mut members = test.members("smollm2");
        members.sort();
        let mut running = running_members();
        // Not those of a ring or a cluster beside this test.
        running.retain(|member| test.cluster.has_process(member.pid));
        let mut running: Vec<String> = running.into_iter().map(|member| member.name).collect();
        running.sort();
        running == members
    });
    // The agent's token lies there.
    let mut running = running_members();
    running.retain(|member| test.cluster.has_process(member.pid));
    for member in running {
        let arguments = std::fs::read(format!("/proc/{}/cmdline", member.pid));
        let arguments = String::from_utf8(arguments.expect("a process")).expect("UTF-8");
        let hides = arguments.contains("\0--hide\0/var/run/secrets\0");
        assert!(hides, "{member:?}: {arguments:?}");
    }
}

#[test]
fn a_download_survives_its_hub_and_a_full_disk() {
    let test = Test::start();
    test.install(&[]);
    test.cluster.wait_until_measured();
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
    for model in ["smollm2", "gated"] {
        test.delete_model(model);
    }

    // A disk without room for a node's part, from an address that is no hub.
    let full = 0;
    test.cluster
        .node(full)
        .mount_disk("lib/prima/cache", HEADER + (8 << 20));
    test.delete_agent("node-0");
    wait_until("its next agent has told of the disk", || {
        let pods = test.agents(&["--field-selector", "spec.nodeName=node-0"]);
        let mut pods = pods.iter();
        pods.any(|pod| condition(pod, "Ready")["status"] == "True")
    });
    let file = format!("{}/_files/people/models/smollm2.gguf", test.hub.endpoint());
    let source = format!("url: {{url: '{file}', sha256: {}}}", sha256(&smollm2()));
    test.apply_model("by-url", &source, ", rank0: node-0");
    wait_until("it says that the disk is full", || {
        let (status, message) = test.condition("by-url", "Planned");
        status == "False" && message.contains("node-0") && message.contains("the disk has room for")
    });
    let on_any = r#"{"spec":{"rank0":null}}"#;
    test.kubectl(&["patch", "model/by-url", "--type=merge", "-p", on_any]);
    test.wait_until_ready("by-url");
    assert!(!test.members("by-url").contains(&"node-0".to_owned()));
    let nodes = test.json(&["get", "model", "by-url"])["status"]["nodes"].clone();
    let nodes = nodes.as_array().expect("nodes");
    let out = nodes.iter().find(|node| node["name"] == "node-0");
    let why = out.expect("the node with the full disk")["why"].clone();
    assert!(
        why.as_str()
            .is_some_and(|why| why.contains("the disk has room for")),
        "{why}"
    );
    test.first_answer_from(1, "by-url");
}

/// For an answer, where another try may follow, or where none may be needed: a connection may have begun too early, and lead to an agent that is gone.
const TRY: Duration = Duration::from_secs(20);
/// 45 seconds, and a few for the operator to tell.
const WITHDRAWN_WITHIN: Duration = Duration::from_secs(50);
/// More than the header of the model, less than a tenth of it.
const HEADER: u64 = 4 << 20;

/// The model's.
const LAYERS: u64 = 30;

/// What nodes have run, and so have on their disks.
#[derive(Default)]
struct Runs {
    /// Nodes and layers.
    layers: HashSet<(String, u64)>,
    /// Nodes that were rank 0.
    first_ranks: HashSet<String>,
}

/// What nodes were told to run that they had not run before.
#[derive(Debug, Default)]
struct New {
    layers: usize,
    first_ranks: usize,
}

impl Runs {
    /// Takes in plans; returns what is new in them.
    fn note(&mut self, plans: &[Value]) -> New {
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

struct Test {
    // Dropped in this order.
    cluster: Cluster,
    hub: TestHub,
    _runtime: Runtime,
    _files: tempfile::TempDir,
    _images: PrimaImages,
}

impl Test {
    /// A cluster with a hub, and without prima.
    fn start() -> Self {
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
    fn install(&self, values: &[&str]) {
        self.cluster.install_prima(values);
        self.kubectl(&["rollout", "status", "daemonset/tools", &timeout_argument()]);
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

    fn delete_model(&self, name: &str) {
        self.kubectl(&["delete", "model", name, &timeout_argument()]);
    }

    /// The nodes of this cluster share a machine on which the model would fit many times.
    fn limit_memory(&self) {
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

    fn lift_memory_limit(&self) {
        for node in 0..NODES {
            let profile = format!("nodeprofile/node-{node}");
            let patch = r#"{"spec": {"memoryCapBytes": null}}"#;
            self.kubectl(&["patch", &profile, "--type=merge", "-p", patch]);
        }
    }

    /// Asks a Model again and again until `done`, or until whoever says so has failed: how often it answered, and why it did not.
    fn keep_asking(&self, model: &str, done: &AtomicBool) -> (usize, Vec<String>) {
        let begun = Instant::now();
        let (mut answers, mut failures) = (0, Vec::new());
        while !done.load(Ordering::Relaxed) && begun.elapsed() < PATIENCE {
            match self.ask_from(2, model, TRY) {
                Ok(_) => answers += 1,
                Err(error) => failures.push(error),
            }
        }
        (answers, failures)
    }

    /// Status and message.
    fn condition(&self, model: &str, kind: &str) -> (String, String) {
        let condition = condition(&self.json(&["get", "model", model]), kind);
        let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        (text("status"), text("message"))
    }

    /// Waits until the Model is not ready any more. Returns how long after `fault` the operator withdrew its readiness, by its clock, which
    /// is this machine's, and why.
    fn withdrawn_after(&self, model: &str, fault: Timestamp) -> (Duration, String) {
        let ready = wait_for("readiness is withdrawn", || {
            let ready = condition(&self.json(&["get", "model", model]), "Ready");
            match ready["status"] == "False" {
                true => Ok(ready),
                false => Err(ready),
            }
        });
        let at = ready["lastTransitionTime"].as_str().expect("a time");
        let at: Timestamp = at.parse().expect("RFC 3339");
        // Whole seconds are kept of it; it may have been the end of that one.
        let after = at.as_millisecond() + 1000 - fault.as_millisecond();
        let after = Duration::from_millis(after.max(0).unsigned_abs());
        let said = ready["message"].as_str().expect("a message");
        (after, said.to_owned())
    }

    fn is_ready(&self, model: &str) -> bool {
        self.condition(model, "Ready").0 == "True"
    }

    fn wait_until_ready(&self, model: &str) {
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

    /// The node of the operator that leads. The Lease may name none, or a pod that is gone, until another one takes it.
    fn leader(&self) -> String {
        wait_for("an operator leads", || {
            let lease = self.json(&["get", "lease", "prima-operator", "-n", "prima"]);
            let pod = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
            let node = "jsonpath={.spec.nodeName}";
            let get = ["get", "pod", pod, "-n", "prima", "-o", node];
            self.cluster.kubectl(&get)
        })
    }

    /// Deletes the agent's pod on a node, and waits until it is gone.
    fn delete_agent(&self, node: &str) {
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
    fn members(&self, model: &str) -> Vec<String> {
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
    fn plans(&self, model: &str) -> Vec<Value> {
        let plans = self.json(&[
            "get",
            "ringplans",
            "-l",
            &format!("prima.dev/model={model}"),
        ]);
        plans["items"].as_array().expect("plans").clone()
    }

    /// The hub has sent what is new to nodes, and beyond that no more than a header to each.
    fn assert_fetched(&self, new: &New, whole: u64) {
        // Rank 0 also has the embedding, which is less than half of this model.
        let moved = new.layers as u64 * whole / LAYERS + new.first_ranks as u64 * whole / 2;
        let sent = self.hub.body_bytes();
        assert!(
            sent < moved + NODES as u64 * HEADER,
            "{sent} bytes were fetched, for {new:?}"
        );
    }

    /// Asks the Model's Service from a pod on this node.
    fn ask_from(&self, node: usize, model: &str, patience: Duration) -> Result<String, String> {
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

    fn chat_from(&self, node: usize, model: &str) -> String {
        self.ask_from(node, model, PATIENCE)
            .unwrap_or_else(|error| panic!("from node {node}: {error}"))
    }

    /// A node's kube-proxy hears where a Service leads a moment after the Model is ready.
    fn first_answer_from(&self, node: usize, model: &str) -> String {
        wait_for(&format!("{model} answers on node {node}"), || {
            self.ask_from(node, model, TRY)
        })
    }

    fn wait_until_answers(&self, model: &str, expected: &str) {
        self.wait_until_answers_from(0, model, expected);
    }

    fn wait_until_answers_from(&self, node: usize, model: &str, expected: &str) {
        wait_for(&format!("{model} answers as before"), || {
            match self.ask_from(node, model, TRY) {
                Ok(answer) if answer == expected => Ok(()),
                Ok(other) | Err(other) => Err(other),
            }
        });
    }

    /// Upgrades prima, which takes each agent along in turn, until the Model answers as before. Returns what nodes had not run before.
    fn upgrade(&self, runs: &mut Runs, expected: &str) -> New {
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
                let answer = self.ask_from(0, "smollm2", TRY);
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
                    self.told("smollm2")
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
        let slice = self.json(&["get", "endpointslice", "smollm2-ipv4"]);
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
    fn drain_under_load(&self, model: &str) {
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

    /// Only agents reach the ports that are for agents, and only clients that the chart's values allow reach a Model; others reach metrics.
    fn strangers_are_kept_out(&self, model: &str) {
        // Its account comes a moment after its namespace.
        wait_for("a pod", || self.cluster.apply(STRANGER));
        let stranger = "pod/stranger";
        let ready = ["wait", "--for=condition=Ready", stranger, "-n", "strangers"];
        self.kubectl(&[&ready[..], &[&timeout_argument()]].concat());

        let plan = self.plans(model).pop().expect("a plan");
        let last = plan["spec"]["members"].as_array().expect("members").last();
        let last = last.expect("a member").clone();
        let ring: SocketAddr = last["address"]
            .as_str()
            .and_then(|address| address.parse().ok())
            .expect("an address");
        let slice = self.json(&["get", "endpointslice", &format!("{model}-ipv4")]);
        let rank0 = slice["endpoints"][0]["addresses"][0].as_str();
        let rank0 = rank0.and_then(|address| address.parse().ok());
        let rank0: IpAddr = rank0.expect("an address");
        let api = slice["ports"][0]["port"].as_u64().expect("a port") as u16;

        let links = SocketAddr::new(ring.ip(), 9190);
        let node = index_of(last["name"].as_str().expect("a name"));
        for port in [ring, links] {
            let there = self.cluster.node(node).within(|| TcpStream::connect(port));
            there.unwrap_or_else(|error| panic!("{port}: {error}"));
            assert!(!self.connects("default", "daemonset/tools", port), "{port}");
            assert!(!self.connects("strangers", stranger, port), "{port}");
        }
        let api = SocketAddr::new(rank0, api);
        assert!(self.connects("default", "daemonset/tools", api));
        assert!(!self.connects("strangers", stranger, api));
        let metrics = SocketAddr::new(rank0, 9191);
        assert!(self.connects("strangers", stranger, metrics));
    }

    /// Whether a pod of a namespace gets a connection.
    fn connects(&self, namespace: &str, pod: &str, to: SocketAddr) -> bool {
        let url = format!("http://{to}/metrics");
        let seconds = PATIENCE.as_secs().to_string();
        let wget = ["/bin/busybox", "timeout", &seconds, "/bin/busybox", "wget"];
        let wget = [&wget[..], &["-q", "-O", "-", &url]].concat();
        let exec = ["exec", "-n", namespace, pod, "--"];
        match self.cluster.kubectl(&[&exec[..], &wget].concat()) {
            Ok(_) => true,
            Err(error) => {
                let said = error.to_string();
                // A server of another protocol than HTTP, or without this page, is there.
                assert!(said.contains("wget: "), "{said}");
                !said.contains("can't connect")
            }
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

    /// Bytes that the hub sent to the agent on each node; the hub sees the addresses of their pods.
    fn sent_by_node(&self) -> Vec<(String, u64)> {
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
    fn agents(&self, which: &[&str]) -> Vec<Value> {
        let agents = ["-l", "app.kubernetes.io/component=agent"];
        let pods = self.json(&[&["get", "pods", "-n", "prima"], &agents[..], which].concat());
        pods["items"].as_array().expect("pods").clone()
    }

    /// Nodes, and the addresses of their agents' pods.
    fn agent_addresses(&self) -> Vec<(String, IpAddr)> {
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

/// A pod that nobody let in.
const STRANGER: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: strangers}
---
apiVersion: v1
kind: Pod
metadata: {name: stranger, namespace: strangers}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: tools, image: localhost/tools, imagePullPolicy: IfNotPresent}
";

fn sha256(file: &Path) -> String {
    format!("{:x}", Sha256::digest(fs::read(file).expect("a file")))
}

fn index_of(node: &str) -> usize {
    let index = node
        .strip_prefix("node-")
        .and_then(|index| index.parse().ok());
    index.expect("node-N")
}
