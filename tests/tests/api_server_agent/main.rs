//! Two agents beside a real API server, each the machine of a Node: what they tell of their machines, and what they do with
//! plans that name them, until rank 0 answers a chat; what a refusal says; what is left after an agent was killed, and after
//! a plan is gone. With the operator beside them: [`with_operator`].

mod with_operator;

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use prima_crds::LEAVING;
use prima_crds::v1alpha1::api_keys::{API_KEYS, ApiKeys};
use prima_gguf::model_bytes;
use prima_test_hub::TestHub;
use prima_tests::agent_stage::Stage;
use prima_tests::node_agent::{AgentMachine, NodeAgent};
use prima_tests::operator;
use prima_tests::process::send_signal;
use prima_tests::{assets, http, split_model, wait_for, wait_until};
use prima_weights::{Client, Location, Reach, RemoteModel, Retry, Source};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

const NAMESPACE: &str = "prima-agents";
const LINKS_PORT: u16 = 9190;
const RING_PORT: u16 = 9200;
const HTTP_PORT: u16 = 9400;

/// A hub whose repository `people/models` has the model under this name.
fn hub_with_the_model_as(file: &str, stage: &Stage, runtime: &Runtime) -> TestHub {
    let files = stage.folder.path().join("hub");
    let repo = files.join("people/models");
    fs::create_dir_all(&repo).expect("a folder for a hub");
    std::os::unix::fs::symlink(model(), repo.join(file)).expect("a link");
    runtime.block_on(TestHub::start(&files)).expect("a hub")
}

/// The plan with the keys that its members have, so that they talk over TLS.
fn encrypted(stage: &Stage, mut plan: Value) -> Value {
    let members = plan["spec"]["members"].as_array_mut().expect("members");
    for member in members {
        let node = member["name"].as_str().expect("a name");
        member["publicKeySha256"] = stage.key(node);
    }
    plan
}

/// A plan of two members, each with half of the 30 layers.
fn plan(
    name: &str,
    machines: &[AgentMachine; 2],
    model: &Path,
    header_sha256: &str,
    ports: (u16, u16),
) -> Value {
    let members: Vec<Value> = machines
        .iter()
        .zip([(0, 15), (15, 30)])
        .map(|(machine, (first, last))| {
            json!({
                "name": machine.node,
                "address": format!("{}:{}", machine.address, ports.0),
                "windows": [{"first": first, "last": last}],
                "membersOnMachine": 2,
            })
        })
        .collect();
    json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "RingPlan",
        "metadata": {
            "name": name, "namespace": "default", "annotations": api_keys(&[("alice", "abc")]),
            "ownerReferences": [{"apiVersion": "prima.dev/v1alpha1", "kind": "Model", "name": "smollm2", "uid": "0"}],
        },
        "spec": {
            "generation": 1,
            "model": {
                "name": "smollm2",
                "file": model,
                "sizeBytes": model_bytes(model).expect("a model file"),
                "layers": 30,
                "version": {"headerSha256": header_sha256},
            },
            "contextLength": 512,
            "maxConcurrentRequests": 2,
            "rounds": 1,
            "members": members,
            "httpPort": ports.1,
            "apiKeyRequired": true,
        },
    })
}

/// What a plan says of these API keys, by their names.
fn api_keys(keys: &[(&str, &str)]) -> Value {
    let digest = |key: &str| ApiKeys::digest("salt", key.as_bytes());
    let keys = ApiKeys {
        salt: "salt".to_owned(),
        sha256: keys
            .iter()
            .map(|(name, key)| (name.to_string(), digest(key)))
            .collect(),
        ..ApiKeys::default()
    };
    json!({API_KEYS: keys.to_json()})
}

/// The model as the operator would know it: the files' identities, and the checksum of their headers.
fn remote(source: &Source) -> RemoteModel {
    let client = Client::new(Retry::default(), Reach::anywhere()).expect("a client");
    let opened = runtime().block_on(RemoteModel::open(&client, source));
    opened.expect("a model on the hub")
}

fn runtime() -> Runtime {
    Runtime::new().expect("a runtime")
}

fn chat(address: SocketAddr, key: &str) -> http::Response {
    try_to_chat(address, key).expect("an answer")
}

fn try_to_chat(address: SocketAddr, key: &str) -> io::Result<http::Response> {
    let body = json!({
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "temperature": 0,
    });
    http::post_with_key(address, "/v1/chat/completions", key, &body)
}

/// A rank 0 that is started again listens a moment later.
fn wait_until_answers(address: SocketAddr) {
    wait_for("the ring answers", || match try_to_chat(address, "abc") {
        Ok(answer) if answer.status == 200 => Ok(()),
        Ok(answer) => Err(format!("status {}", answer.status)),
        Err(error) => Err(error.to_string()),
    });
}

/// Whoever connects without TLS gets an alert of TLS (record type 21), or nothing.
fn speaks_tls_only(address: SocketAddr) {
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .expect("sent");
    let mut answer = Vec::new();
    // An error is that of a closed connection.
    let _ = stream.read_to_end(&mut answer);
    assert!(matches!(answer.first(), None | Some(21)), "{answer:?}");
}

fn start(stage: &Stage, machine: &AgentMachine) -> NodeAgent {
    machine.start_agent(&stage.api, NAMESPACE)
}

/// A streamed text, and the longest pause in it. `each` is told how many parts have come.
fn story(address: SocketAddr, each: impl Fn(usize)) -> (String, Duration) {
    let body = json!({
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": 200,
        "temperature": 0,
        "stream": true,
    });
    let events = http::post_streaming_with_key(address, "/v1/completions", "abc", &body);
    let (mut text, mut longest, mut last) = (String::new(), Duration::ZERO, Instant::now());
    for (count, event) in events.expect("a stream").enumerate() {
        let event = event.expect("an event");
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if event == "[DONE]" {
            return (text, longest);
        }
        let event: Value = serde_json::from_str(&event).expect("JSON");
        let part = event["choices"][0]["text"].as_str();
        text += part.unwrap_or_else(|| panic!("no text in {event}"));
        each(count);
    }
    panic!("it breaks off after {text:?}");
}

/// Whether an agent's only member is not this process any more.
fn another(agent: &NodeAgent, member: u32) -> Result<(), String> {
    match agent.members()[..] {
        [again] if again != member => Ok(()),
        ref others => Err(format!("{others:?}")),
    }
}

fn model() -> PathBuf {
    let path = assets::path("models/SmolLM2-135M-Instruct-Q4_1.gguf").expect("a model");
    path.canonicalize().expect("an absolute path")
}

#[test]
fn agents_tell_of_their_machines_and_run_plans() {
    let stage = Stage::new(NAMESPACE);
    // Three files that are one model.
    let model = split_model::in_three_files(&model(), stage.folder.path());
    let machines = ["one", "two"].map(|node| AgentMachine::new(node, stage.folder.path()));
    let [mut one, mut two] = [&machines[0], &machines[1]].map(|machine| start(&stage, machine));
    one.wait_until_ready();
    two.wait_until_ready();

    // Its NodeProfile: of the Node, with what others must know to reach it.
    let profile = stage.profile("one");
    let owner = &profile["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["name"]),
        (&json!("Node"), &json!("one"))
    );
    assert_eq!(owner["uid"], stage.get(&["node", "one"])["metadata"]["uid"]);
    assert_eq!(owner["controller"], Value::Null);
    let agent = &profile["status"]["agent"];
    assert_eq!(agent["address"], machines[0].address.to_string());
    assert!(
        agent["memory"]
            .as_str()
            .is_some_and(|text| text.ends_with(" GiB")),
        "{agent}"
    );
    let bytes = profile.to_string().len();
    assert!(bytes < 8 << 10, "{bytes} bytes");

    // Its Lease.
    let lease = wait_for("a Lease that its Node owns", || {
        let lease = stage.api.object(NAMESPACE, "lease/prima-agent-one");
        let lease = lease.map_err(|error| error.to_string())?;
        match lease["metadata"]["ownerReferences"].is_array() {
            true => Ok(lease),
            false => Err(lease.to_string()),
        }
    });
    let spec = &lease["spec"];
    assert_eq!(
        (&spec["holderIdentity"], &spec["leaseDurationSeconds"]),
        (&json!("agent-one"), &json!(40))
    );
    assert_eq!(
        &lease["metadata"]["ownerReferences"][0]["uid"],
        &owner["uid"]
    );

    // The links, both ways.
    for (node, other) in [("one", "two"), ("two", "one")] {
        wait_for(&format!("the links of {node}"), || {
            let links = stage.profile(node)["status"]["links"].clone();
            let to = |name| {
                links
                    .as_array()
                    .is_some_and(|links| links.iter().any(|link| link["to"] == name))
            };
            match to(other) && to("loopback") {
                true => Ok(()),
                false => Err(links),
            }
        });
    }

    // What it has of a model that is named by a path.
    let spec = json!({"source": {"hostPath": {"path": model}}});
    stage.apply_model("smollm2", &spec);
    let local = wait_for("a local model", || {
        let agent = stage.profile("two")["status"]["agent"].clone();
        agent["localModels"].get(0).cloned().ok_or(agent)
    });
    assert_eq!(
        (&local["path"], &local["profile"]["layers"]),
        (&json!(model), &json!(30))
    );
    let header = local["version"]["headerSha256"]
        .as_str()
        .expect("a checksum");

    // What the owner of one machine leaves to rings.
    let owner = json!({"spec": {"reservedMemoryBytes": 300 << 20, "memoryCap": "4Gi"}});
    let owner = owner.to_string();
    let patched = stage
        .api
        .kubectl(&["patch", "nodeprofile", "two", "--type=merge", "-p", &owner]);
    patched.expect("a patch");

    // A plan, until it answers, with the key whose digest it tells and with no other.
    let ring = plan(
        "smollm2-1",
        &machines,
        &model,
        header,
        (RING_PORT, HTTP_PORT),
    );
    let ring = encrypted(&stage, ring);
    stage.api.apply(&ring.to_string()).expect("a RingPlan");
    stage.wait_for_state("smollm2-1", "one", "Ready");
    stage.wait_for_state("smollm2-1", "two", "Loaded");
    let http = SocketAddr::from((machines[0].address, HTTP_PORT));
    assert_eq!(chat(http, "abd").status, 401);
    let answer = chat(http, "abc");
    let content = answer.json()["choices"][0]["message"]["content"].clone();
    assert!(
        content.as_str().is_some_and(|text| !text.is_empty()),
        "{}",
        answer.body
    );
    // Another key counts, and the first no more, while the ring runs.
    let running = (one.members(), two.members());
    let tell = |keys: &[(&str, &str)]| {
        let patch = json!({"metadata": {"annotations": api_keys(keys)}}).to_string();
        let patch = [
            "patch",
            "ringplan",
            "smollm2-1",
            "--type=merge",
            "-p",
            &patch,
        ];
        stage.api.kubectl(&patch).expect("a patch");
    };
    let statuses = || ["abc", "abd"].map(|key| chat(http, key).status);
    tell(&[("bob", "abd")]);
    wait_until("only the new key counts", || statuses() == [401, 200]);
    tell(&[("alice", "abc"), ("bob", "abd")]);
    wait_until("both count", || statuses() == [200, 200]);
    let metrics = http::get(http, "/metrics").expect("metrics").body;
    assert!(
        metrics.contains(r#"prima_api_key_generated_tokens_total{key="bob"}"#),
        "{metrics}"
    );
    assert_eq!((one.members(), two.members()), running);
    let command_of = |member: u32| {
        let words = fs::read_to_string(format!("/proc/{member}/cmdline")).expect("a process");
        words.replace('\0', " ")
    };
    let [free, kept] = [one.members()[0], two.members()[0]].map(command_of);
    assert!(
        kept.contains(&format!("--reserve-memory {} ", 300 << 20))
            && kept.contains(&format!("--weights-memory {} ", 4_i64 << 30)),
        "{kept}"
    );
    assert!(!free.contains("-memory "), "{free}");
    speaks_tls_only(SocketAddr::from((machines[1].address, RING_PORT)));
    speaks_tls_only(SocketAddr::from((machines[1].address, LINKS_PORT)));
    wait_for("a speed", || {
        let member = stage.member("smollm2-1", "one");
        match &member["measured"]["tokenMicroseconds"] {
            Value::Number(_) => Ok(()),
            _ => Err(member),
        }
    });

    // A second plan at the same time, for another file: both refuse it and say why, the first goes on.
    let other = plan(
        "smollm2-other",
        &machines,
        &model,
        &"0".repeat(64),
        (RING_PORT + 1, HTTP_PORT + 1),
    );
    stage.api.apply(&other.to_string()).expect("a RingPlan");
    for node in ["one", "two"] {
        let refused = stage.wait_for_state("smollm2-other", node, "Refused");
        let message = refused["message"].as_str().expect("a message");
        assert!(
            message.contains("another file than the plan was made for"),
            "{message}"
        );
    }
    assert_eq!((one.members().len(), two.members().len()), (1, 1));
    // A draft model that rank 0 has not.
    let mut drafting = plan(
        "smollm2-drafting",
        &machines,
        &model,
        header,
        (RING_PORT + 2, HTTP_PORT + 2),
    );
    let nowhere = json!({"name": "d", "file": "/nowhere/d.gguf", "sizeBytes": 9, "layers": 1});
    drafting["spec"]["draft"] = json!({"model": nowhere, "memoryBytes": 9});
    stage.api.apply(&drafting.to_string()).expect("a RingPlan");
    let refused = stage.wait_for_state("smollm2-drafting", "one", "Refused");
    let message = refused["message"].as_str().expect("a message");
    assert!(
        message.starts_with("cannot get the draft model: /nowhere/d.gguf is not on this machine"),
        "{message}"
    );
    // The other member has nothing to do with it.
    stage.wait_for_state("smollm2-drafting", "two", "Loaded");
    stage
        .api
        .kubectl(&["delete", "ringplan", "smollm2-drafting"])
        .expect("deleted");
    wait_until("one member of two", || two.members().len() == 1);
    assert!(
        two.metrics()
            .contains("prima_agent_members{state=\"refused\"} 1"),
        "{}",
        two.metrics()
    );

    // A member's process that dies is started again, and the ring comes back: an answer goes on where it stopped.
    let (whole, _) = story(http, |_| ());
    let member = two.members()[0];
    let (outlasting, pause) = story(http, |count| {
        if count == 5 {
            send_signal(member, Signal::KILL);
        }
    });
    assert_eq!(outlasting, whole);
    // Else it was not interrupted.
    assert!(pause > Duration::from_millis(500), "{pause:?}");
    wait_for("another member of two", || another(&two, member));
    wait_until_answers(http);
    assert!(
        two.metrics()
            .contains("prima_agent_member_restarts_total 1"),
        "{}",
        two.metrics()
    );

    // One that hangs is named by rank 0, and started again by its agent; also rank 0 itself.
    let hung = two.members()[0];
    send_signal(hung, Signal::STOP);
    wait_for("rank 0 says where the ring fails", || {
        let rank0 = stage.member("smollm2-1", "one");
        match rank0["failsAt"] == "two" {
            true => Ok(()),
            false => Err(rank0),
        }
    });
    wait_for("another member of two", || another(&two, hung));
    wait_until_answers(http);
    let hung = one.members()[0];
    send_signal(hung, Signal::STOP);
    wait_until("rank 0 is not ready while it hangs", || {
        stage.member("smollm2-1", "one")["state"] == "Loaded"
    });
    wait_for("another member of one", || another(&one, hung));
    wait_until_answers(http);
    let rank0 = stage.wait_for_state("smollm2-1", "one", "Ready");
    assert_eq!(rank0["failsAt"], Value::Null);

    // An agent that is killed takes its members along; the next one measures nothing anew and goes on.
    let measured_at = stage.profile("two")["status"]["measuredAt"].clone();
    let members = two.members();
    drop(two);
    wait_until("no member outlives its agent", || {
        let mut members = members.iter();
        members.all(|id| !Path::new(&format!("/proc/{id}")).exists())
    });
    wait_until("rank 0 is not ready without its ring", || {
        stage.member("smollm2-1", "one")["state"] != "Ready"
    });
    let mut two = start(&stage, &machines[1]);
    two.wait_until_ready();
    stage.wait_for_state("smollm2-1", "one", "Ready");
    assert_eq!(chat(http, "abc").status, 200);
    assert_eq!(stage.profile("two")["status"]["measuredAt"], measured_at);

    // A machine gets another key while its ring goes on, and then a ring of the next plan.
    let before = stage.key("two");
    fs::remove_file(stage.folder.path().join("two/identity.key")).expect("a key");
    let after = wait_for("another key of two", || match stage.key("two") {
        after if after != before => Ok(after),
        same => Err(same),
    });
    assert_eq!(chat(http, "abc").status, 200);
    let ports = (RING_PORT + 3, HTTP_PORT + 3);
    let next = plan("smollm2-2", &machines, &model, header, ports);
    let next = encrypted(&stage, next);
    assert_eq!(next["spec"]["members"][1]["publicKeySha256"], after);
    stage.api.apply(&next.to_string()).expect("a RingPlan");
    stage.wait_for_state("smollm2-2", "one", "Ready");
    let new_http = SocketAddr::from((machines[0].address, ports.1));
    assert_eq!(chat(new_http, "abc").status, 200);
    assert_eq!(chat(http, "abc").status, 200);
    stage
        .api
        .kubectl(&["delete", "ringplan", "smollm2-2"])
        .expect("deleted");

    // An agent that is asked to end says so, and runs its member until another ring does without it.
    two.ask_to_end();
    let mut without = plan(
        "smollm2-3",
        &machines,
        &model,
        header,
        (RING_PORT + 6, HTTP_PORT + 6),
    );
    let members = without["spec"]["members"].as_array_mut().expect("members");
    members.truncate(1);
    members[0]["windows"][0]["last"] = json!(30);
    members[0]["membersOnMachine"] = json!(1);
    without["spec"]["generation"] = json!(2);
    stage.api.apply(&without.to_string()).expect("a RingPlan");
    wait_until("its Lease says that it ends", || {
        let lease = stage.get(&["lease", "prima-agent-two", "--namespace", NAMESPACE]);
        !lease["metadata"]["annotations"][LEAVING].is_null()
    });
    stage.wait_for_state("smollm2-3", "one", "Ready");
    assert_eq!(chat(http, "abc").status, 200);

    // A plan that is gone takes its members along.
    stage
        .api
        .kubectl(&["delete", "ringplan", "smollm2-1"])
        .expect("deleted");
    wait_until("no member of a plan that is gone", || {
        one.members().len() == 1 && two.members().is_empty()
    });
    assert_eq!(stage.member("smollm2-other", "two")["state"], "Refused");

    assert!(one.terminate().success() && two.terminate().success());
    assert_eq!(stage.member("smollm2-other", "one")["state"], "Failed");
}

#[test]
fn what_a_killed_agent_said_is_taken_back_before_its_lease() {
    let stage = Stage::new(NAMESPACE);
    let machines = ["one", "two"].map(|node| AgentMachine::new(node, stage.folder.path()));
    // Of a file that nobody has, so no member of it can run.
    let ports = (RING_PORT, HTTP_PORT);
    let ring = plan("smollm2-1", &machines, &model(), &"0".repeat(64), ports);
    stage.api.apply(&ring.to_string()).expect("a RingPlan");
    let said = json!({"status": {"members": [
        {"name": "one", "state": "Ready"},
        {"name": "two", "state": "Loaded"},
    ]}});
    let said = said.to_string();
    let patch = ["patch", "ringplan", "smollm2-1", "--subresource=status"];
    let patch = [&patch[..], &["--type=merge", "-p", &said]].concat();
    stage.api.kubectl(&patch).expect("a status");
    // The next agent has to measure its machine before it watches plans.
    fs::write(stage.folder.path().join("one/profile.json"), "{}").expect("a file");
    let _one = start(&stage, &machines[0]);
    wait_for("its Lease", || {
        stage.api.object(NAMESPACE, "lease/prima-agent-one")
    });
    let member = stage.member("smollm2-1", "one");
    assert!(
        ["Failed", "Refused"].contains(&member["state"].as_str().expect("a state")),
        "{member}"
    );
    assert_eq!(stage.member("smollm2-1", "two")["state"], "Loaded");
}

#[test]
fn an_agent_waits_until_another_of_its_machine_has_ended() {
    let stage = Stage::new(NAMESPACE);
    // Each has its pod's address; the folder is the machine's.
    let pods = [(); 2].map(|()| AgentMachine::new("one", stage.folder.path()));
    let mut first = start(&stage, &pods[0]);
    first.wait_until_ready();
    let holds_lease = |pod: &str| {
        let lease = stage.api.object(NAMESPACE, "lease/prima-agent-one");
        lease.is_ok_and(|lease| lease["spec"]["holderIdentity"] == pod)
    };
    wait_until("the first has the Lease", || holds_lease("agent-one"));
    let of_a_member = stage.folder.path().join("one/plans/keys");
    fs::write(&of_a_member, "").expect("a file");

    let second = || {
        let name = [("POD_NAME", "second")];
        let mut agent = pods[1].start_agent_with(&stage.api, NAMESPACE, &name);
        agent.wait_until_it_says("waits until another agent of this machine");
        agent
    };
    let healthy = |agent: &NodeAgent, path: &str| {
        let answer = http::get(agent.http(), path).expect("an answer");
        answer.status == 200
    };
    let waiting = second();
    assert!(healthy(&waiting, "/healthz") && !healthy(&waiting, "/readyz"));
    assert!(waiting.terminate().success());
    // Else what it said there would be taken for the next one's.
    fs::remove_file(stage.folder.path().join("one/agent-one.log")).expect("a log");
    let mut waiting = second();
    assert!(of_a_member.exists() && holds_lease("agent-one"));

    assert!(first.terminate().success());
    waiting.wait_until_ready();
    assert!(!of_a_member.exists());
    wait_until("the second has the Lease", || holds_lease("second"));
}

#[test]
fn members_fetch_their_layers_and_keep_them() {
    let stage = Stage::new(NAMESPACE);
    let runtime = runtime();
    let files = stage.folder.path().join("hub");
    let repo = files.join("people/models");
    fs::create_dir_all(&repo).expect("a folder for a hub");
    let first = split_model::in_three_files(&model(), &repo);
    let file = first
        .file_name()
        .and_then(|name| name.to_str())
        .expect("a name");
    let hub = runtime.block_on(TestHub::start(&files)).expect("a hub");
    let location = Location::HuggingFace {
        endpoint: hub.endpoint(),
        repo: "people/models".into(),
        revision: "main".into(),
        file: file.into(),
    };
    let remote = remote(&Source {
        location,
        token: None,
    });
    assert_eq!(remote.files.len(), 3);
    let mut machines = ["one", "two"].map(|node| AgentMachine::new(node, stage.folder.path()));
    let [mut one, mut two] = [&machines[0], &machines[1]].map(|machine| start(&stage, machine));

    let mut ring = plan("fetched", &machines, &model(), "", (RING_PORT, HTTP_PORT));
    ring["spec"]["model"]["file"] = json!(file);
    ring["spec"]["model"]["sizeBytes"] = json!(remote.gguf.file_len);
    ring["spec"]["model"]["source"] = json!({"huggingFace": {
        "repo": "people/models",
        "file": file,
        "endpoint": hub.endpoint(),
    }});
    ring["spec"]["model"]["version"] = json!(remote.version);
    stage.api.apply(&ring.to_string()).expect("a RingPlan");
    one.wait_until_ready();
    two.wait_until_ready();
    stage.wait_for_state("fetched", "one", "Ready");
    let second = stage.wait_for_state("fetched", "two", "Loaded");
    let http = SocketAddr::from((machines[0].address, HTTP_PORT));
    assert_eq!(chat(http, "abc").status, 200);

    // The second has half of the layers, and neither embedding nor output head.
    let whole = fs::metadata(model()).expect("a model").len();
    let total = second["totalBytes"].as_u64().expect("bytes");
    assert_eq!(second["fetchedBytes"], second["totalBytes"]);
    assert!((1..whole / 2).contains(&total), "{total} of {whole} bytes");
    let fetched = format!("prima_agent_fetched_bytes_total {total}");
    assert!(
        two.metrics().contains(&fetched),
        "expected {fetched}: {}",
        two.metrics()
    );

    drop((hub, runtime));
    drop(two);
    // What plans need stays when the disk is full, and needs no more room.
    machines[1].cache_budget = "1";
    let mut two = start(&stage, &machines[1]);
    two.wait_until_ready();
    wait_until("one member of two", || two.members().len() == 1);
    wait_until_answers(http);
    let member = stage.wait_for_state("fetched", "two", "Loaded");
    assert_eq!(member["fetchedBytes"], second["fetchedBytes"]);
    assert!(
        two.metrics().contains("prima_agent_fetched_bytes_total 0"),
        "{}",
        two.metrics()
    );
}

#[test]
fn a_member_is_fetched_with_the_token_of_its_plans_namespace() {
    let stage = Stage::new(NAMESPACE);
    let runtime = runtime();
    let hub = hub_with_the_model_as("gated.gguf", &stage, &runtime);
    let endpoint = hub.endpoint();
    let location = Location::HuggingFace {
        endpoint: endpoint.clone(),
        repo: "people/models".into(),
        revision: "main".into(),
        file: "gated.gguf".into(),
    };
    let remote = remote(&Source {
        location,
        token: None,
    });
    hub.control(|control| {
        control.token = Some("hf_of_the_namespace".to_owned());
        control.gated = vec!["people/models".to_owned()];
    });
    let machines = ["one", "two"].map(|node| AgentMachine::new(node, stage.folder.path()));
    let environment = [("HF_ENDPOINT", &*endpoint), ("HF_TOKEN", "hf_shared")];
    let mut one = machines[0].start_agent_with(&stage.api, NAMESPACE, &environment);

    let mut ring = plan("gated", &machines, &model(), "", (RING_PORT, HTTP_PORT));
    ring["spec"]["model"]["file"] = json!("gated.gguf");
    ring["spec"]["model"]["source"] =
        json!({"huggingFace": {"repo": "people/models", "file": "gated.gguf"}});
    ring["spec"]["model"]["version"] = json!(remote.version);
    // One member is enough.
    let members = ring["spec"]["members"].as_array_mut().expect("members");
    members.truncate(1);
    members[0]["windows"] = json!([{"first": 0, "last": 30}]);
    members[0]["membersOnMachine"] = json!(1);
    stage.api.apply(&ring.to_string()).expect("a RingPlan");
    one.wait_until_ready();
    let member = stage.wait_for_state("gated", "one", "Refused");
    let message = member["message"].as_str().expect("a message");
    assert!(message.contains("people/models is gated"), "{message}");

    operator::give_hub_token(&stage.api, "default", "hf_of_the_namespace");
    stage.wait_for_state("gated", "one", "Ready");

    // What is there needs neither hub nor token.
    stage
        .api
        .kubectl(&["delete", "secret", "prima-hub"])
        .expect("deleted");
    let member = one.members()[0];
    hub.clear();
    send_signal(member, Signal::KILL);
    wait_for("another member", || another(&one, member));
    stage.wait_for_state("gated", "one", "Ready");
    assert_eq!(hub.requests(), 0);
}
