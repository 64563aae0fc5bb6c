//! The operator against a real API server, with the rights that the chart gives it: what it makes of Models and machines, and that
//! it makes the same whatever happens to it. The machines declare themselves; rings that compute are the cluster suite's.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use prima_crds::v1alpha1::api_keys::{API_KEYS, ApiKeys};
use prima_crds::v1alpha1::ring_plan::MemberState;
use prima_test_hub::TestHub;
use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::assets;
use prima_tests::declared_machines::{DeclaredMachines, FILE, made_up};
use prima_tests::operator::{NAMESPACE, Operator, USUAL_LEASE, install_chart, upgrade_chart};
use prima_tests::refused_models::{self, Refused};
use prima_tests::trace_collector::TraceCollector;
use prima_tests::{inputs, timeout_argument, wait_for, wait_until};
use serde_json::{Value, json};

const MACHINES: [(&str, i64); 3] = [("desk", 6), ("laptop", 4), ("pi4", 3)];

#[test]
fn a_model_becomes_a_ring_and_leaves_nothing_behind() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);

    let plan = test.object("ringplan/made-up-1");
    let members = plan["spec"]["members"].as_array().expect("members");
    assert!(
        members.len() > 1,
        "8 GB fit on no single machine: {members:?}"
    );
    let rank0 = &members[0];
    let slice = test.object("endpointslice/made-up-ipv4");
    let address = rank0["address"].as_str().expect("an address");
    let host = address.rsplit_once(':').expect("host:port").0;
    assert_eq!(slice["endpoints"][0]["addresses"][0], host);
    assert_eq!(slice["endpoints"][0]["nodeName"], rank0["name"]);
    assert_eq!(slice["ports"][0]["port"], plan["spec"]["httpPort"]);
    let service = test.object("service/made-up");
    assert_eq!(service["spec"]["ports"][0]["port"], 80);

    let model = test.object("model/made-up");
    let status = &model["status"];
    assert_eq!(status["ringNodes"], members.len());
    let all = format!("{0}/{0}", members.len());
    assert_eq!(status["readyNodes"], all);
    assert_eq!(
        status["endpoint"],
        "http://made-up.default.svc.cluster.local/v1"
    );
    assert!(
        status["tokensPerSecond"]
            .as_str()
            .expect("a speed")
            .starts_with('~')
    );
    for condition in [
        "Resolved",
        "Profiled",
        "Planned",
        "Downloaded",
        "Loaded",
        "Ready",
    ] {
        assert_eq!(
            test.condition("model/made-up", condition).0,
            "True",
            "{condition}"
        );
    }
    assert_eq!(test.condition("model/made-up", "Degraded").0, "False");
    // Events follow the status that they tell of.
    wait_for("the events of a Model that became ready", || {
        let reasons = "jsonpath={.items[*].reason}";
        let events = test.kubectl(&["get", "events.events.k8s.io", "-o", reasons]);
        let mut told = events.split(' ').collect::<Vec<_>>();
        told.retain(|reason| ["Resolved", "RingPlanned", "Ready"].contains(reason));
        told.sort_unstable();
        told.dedup();
        match told.len() {
            3 => Ok(()),
            _ => Err(events),
        }
    });

    // When suspended, the Model releases its machines, and can come back.
    test.patch("model/made-up", r#"{"spec":{"suspend":true}}"#);
    wait_until("the ring ends", || test.names("ringplans").is_empty());
    wait_until("it says so", || {
        test.condition("model/made-up", "Ready").1 == "Suspended"
    });
    let slice = test.object("endpointslice/made-up-ipv4");
    assert_eq!(slice["endpoints"].as_array().map_or(0, Vec::len), 0);
    test.patch("model/made-up", r#"{"spec":{"suspend":false}}"#);
    test.wait_for("model/made-up", "Ready", "True", &operator);

    test.delete_model("made-up");
    for kind in ["ringplans", "services", "endpointslices"] {
        wait_until(kind, || {
            let left = test.names(kind);
            left.iter().all(|name| !name.contains("made-up"))
        });
    }
}

#[test]
fn a_second_look_changes_nothing_whoever_looks() {
    let test = Test::start(Backend::Kine);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start_with(&test.api, "one", &[USUAL_LEASE]);
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    // The status is written last; by now all else is as it should be.
    let before = test.versions();
    assert!(before.len() >= 4, "{before:?}");
    drop(operator);
    // Its Lease runs out, the next one leads and looks at everything.
    let operator = Operator::start_with(&test.api, "two", &[USUAL_LEASE]);
    wait_until("another leads", || operator.ready() == "leads");
    let looks = || operator.metric("prima_operator_reconcile_seconds_count");
    wait_until("it has looked", || looks() > 0.0);
    let before_the_label = looks();
    // A label nobody knows makes it look once more.
    test.patch(
        "model/made-up",
        r#"{"metadata":{"labels":{"seen":"twice"}}}"#,
    );
    wait_until("it has looked again", || looks() > before_the_label);
    // Had it written anything, it would look at that, too.
    thread::sleep(Duration::from_secs(1));
    let mut after = test.versions();
    // Except for the label itself.
    let labelled = |entry: &(String, String)| entry.0.starts_with("models/");
    after.retain(|entry| !labelled(entry));
    let mut before = before;
    before.retain(|entry| !labelled(entry));
    assert_eq!(after, before);
    assert_eq!(
        operator.metric("prima_operator_reconcile_failures_total"),
        0.0
    );
}

#[test]
fn a_cordoned_machine_is_planned_around_while_it_still_answers() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&[("desk", 9), ("laptop", 9), ("pi4", 9)]);
    let node = "{apiVersion: v1, kind: Node, metadata: {name: laptop}}";
    test.api.apply(node).expect("a Node");
    let operator = Operator::start(&test.api, "one");
    test.api
        .apply(&model("made-up", "rank0: laptop"))
        .expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    test.patch("model/made-up", r#"{"spec":{"rank0":null}}"#);
    let laptop = || test.node("made-up", "laptop").expect("what is said of it");
    assert_eq!(laptop()["inRing"], true);

    test.kubectl(&["cordon", "laptop"]);
    wait_until("it is in no ring", || laptop()["inRing"] == false);
    let why = laptop()["why"].clone();
    assert_eq!(why, "its Node is cordoned (kubectl uncordon)");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let reason = || test.condition("nodeprofile/laptop", "Ready").1;
    wait_until("its profile says so", || reason() == "Cordoned");

    test.kubectl(&["uncordon", "laptop"]);
    test.patch("model/made-up", r#"{"spec":{"rank0":"laptop"}}"#);
    wait_until("it is back", || laptop()["inRing"] == true);
    wait_until("its profile says so, too", || reason() == "AgentRuns");
}

#[test]
fn a_machine_whose_agent_ends_is_planned_around_if_it_can_be() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&[("desk", 9), ("laptop", 9), ("pi4", 9)]);
    let operator = Operator::start(&test.api, "one");
    test.api
        .apply(&model("made-up", "rank0: laptop"))
        .expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let laptop = || test.node("made-up", "laptop").expect("what is said of it");
    let reason = || test.condition("nodeprofile/laptop", "Ready").1;

    // Nobody else may be rank 0, so the ring goes on as long as it does.
    machines.set_leaving("laptop", true);
    wait_until("its profile says so", || reason() == "AgentEnds");
    assert_eq!(laptop()["inRing"], true);
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let plans = test.object("ringplans");
    assert_eq!(plans["items"].as_array().map(Vec::len), Some(1), "{plans}");

    test.patch("model/made-up", r#"{"spec":{"rank0":null}}"#);
    wait_until("it is in no ring", || laptop()["inRing"] == false);
    let why = laptop()["why"].clone();
    assert_eq!(why, "its agent was asked to end");
    test.wait_for("model/made-up", "Ready", "True", &operator);

    // The next agent is there.
    machines.set_leaving("laptop", false);
    test.patch("model/made-up", r#"{"spec":{"rank0":"laptop"}}"#);
    wait_until("it is back", || laptop()["inRing"] == true);
    wait_until("its profile says so, too", || reason() == "AgentRuns");
}

#[test]
fn a_lost_machine_is_replaced_and_said_to_be_lost() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&[("desk", 9), ("laptop", 9), ("pi4", 9)]);
    let operator = Operator::start(&test.api, "one");
    // Rank 0 is set, so that the test knows which machine to lose.
    test.api
        .apply(&model("made-up", "rank0: laptop"))
        .expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    assert_eq!(
        test.object("ringplan/made-up-1")["spec"]["members"][0]["name"],
        "laptop"
    );

    let profile = || test.condition("nodeprofile/laptop", "Ready");
    wait_until("its profile says that its agent runs", || {
        profile().1 == "AgentRuns"
    });
    machines.silence("laptop");
    wait_until("readiness is withdrawn", || {
        test.condition("model/made-up", "Ready").0 == "False"
    });
    wait_until("its profile says that its agent is gone", || {
        let (status, reason, _) = profile();
        (status.as_str(), reason.as_str()) == ("False", "AgentSilent")
    });
    let status = test.object("model/made-up")["status"].clone();
    assert_eq!(status["summary"], "MachineOut", "{status}");
    let (_, reason, message) = test.condition("model/made-up", "Planned");
    assert!(
        message.contains("laptop") && message.contains("not heard of"),
        "{reason}: {message}"
    );
    let slice = test.object("endpointslice/made-up-ipv4");
    assert_eq!(slice["endpoints"].as_array().map_or(0, Vec::len), 0);

    // Without the wish, the others are enough.
    test.patch("model/made-up", r#"{"spec":{"rank0":null}}"#);
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let laptop = || test.node("made-up", "laptop").expect("the lost one");
    assert_eq!(laptop()["inRing"], false);
    let not_heard_of = |node: Value| {
        let why = node["why"].as_str().unwrap_or_default();
        why.contains("not heard of")
    };
    assert!(not_heard_of(laptop()), "{}", laptop());
    assert_eq!(test.names("ringplans").len(), 1, "the old plan is gone");

    // It comes back, and is taken where it is wanted.
    machines.wake("laptop");
    wait_until("it is heard of", || !not_heard_of(laptop()));
    wait_until("its profile says so, too", || profile().0 == "True");
    test.patch("model/made-up", r#"{"spec":{"rank0":"laptop"}}"#);
    wait_until("it is in the ring", || laptop()["inRing"] == true);
    test.wait_for("model/made-up", "Ready", "True", &operator);
    test.patch("model/made-up", r#"{"spec":{"rank0":null}}"#);
    machines.silence("laptop");
    wait_until("it is out again", || laptop()["inRing"] == false);

    // When its Node is removed, what the Node owns goes along, and the machine is forgotten.
    test.kubectl(&["delete", "nodeprofile", "laptop"]);
    test.kubectl(&["delete", "lease", "prima-agent-laptop", "-n", "prima"]);
    wait_until("it is forgotten", || {
        test.node("made-up", "laptop").is_none()
    });
}

/// The same sentence from `prima plan`, `prima run` and, within ten seconds, the Model. Of no file is a byte of weights fetched.
#[test]
fn models_that_are_not_run_are_refused_by_their_headers() {
    let folder = tempfile::tempdir().expect("a folder");
    let repo = folder.path().join("people/models");
    fs::create_dir_all(&repo).expect("a folder");
    let refused = refused_models::write(&repo);

    let profile = inputs::file("tests/assets/machine.yaml");
    let sentences: Vec<String> = refused
        .iter()
        .map(|Refused { path, said }| {
            let [mut plan, mut run] = [(); 2].map(|()| Command::new(inputs::program("prima")));
            plan.args(["plan", "--model"]).arg(path).arg("--profiles");
            run.arg("run").arg(path).arg("--profile");
            let [planned, ran] = [plan, run].map(|mut prima| {
                let output = prima.arg(&profile).output().expect("prima");
                assert!(!output.status.success(), "{said}");
                let found = String::from_utf8_lossy(&output.stderr);
                assert!(found.contains(said), "{said} is not in: {found}");
                without_files(&found)
            });
            assert_eq!(planned, ran);
            planned
        })
        .collect();

    let test = Test::start(Backend::Kine);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let hub = runtime
        .block_on(TestHub::start(folder.path()))
        .expect("a hub");
    let name = |number: usize| format!("refused-{number}");
    for (number, (Refused { path, said, .. }, sentence)) in
        refused.iter().zip(&sentences).enumerate()
    {
        let file = path.file_name().and_then(|name| name.to_str());
        let document = json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": name(number)},
            "spec": {"source": {"huggingFace": {"repo": "people/models", "file": file, "endpoint": hub.endpoint()}}},
        });
        // The next one follows when this one is refused: the 10 s are a promise for one, not for all at once.
        test.api.apply(&document.to_string()).expect("a Model");
        let model = format!("model/{}", name(number));
        test.wait_for(&model, "Resolved", "False", &operator);
        let (_, reason, message) = test.condition(&model, "Resolved");
        assert_eq!(reason, "ResolveFailed");
        // A file that is not there is missed by the hub, which says it in its own words.
        let same = match said.ends_with(".gguf") {
            true => message.contains(said),
            false => without_files(&message).ends_with(sentence),
        };
        assert!(same, "{sentence} is not in: {message}");
        let seconds = test.seconds_until(&model, "Resolved");
        assert!(seconds <= 10, "{model} was refused after {seconds} s");
    }
    assert_eq!(test.names("ringplans"), [""; 0]);
    assert!(hub.body_bytes() > 0, "no header was read");
    for counter in hub.counters() {
        let most = u64::from(refused_models::WEIGHTS_OFFSET);
        assert!(counter.end <= most, "more than a header: {counter:?}");
    }
}

/// A refusal without the program's name and without those of files, which are paths here and addresses with a revision there.
fn without_files(message: &str) -> String {
    let words = message.split_whitespace().filter(|word| {
        let word = word.trim_end_matches([':', ',']);
        !word.contains(".gguf") && word != "prima"
    });
    words.collect::<Vec<_>>().join(" ").replace("at main: ", "")
}

/// The files are real ones, on a hub; of none is more fetched than its header.
#[test]
fn a_draft_model_is_resolved_by_its_header_or_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let repo = folder.path().join("people/models");
    fs::create_dir_all(&repo).expect("a folder");
    const MODEL: &str = "SmolLM2-135M-Instruct-Q4_1.gguf";
    const STRANGER: &str = "stories15M-F32.gguf";
    for name in [MODEL, STRANGER] {
        let file = assets::path(&format!("models/{name}")).expect("a model");
        let file = file.canonicalize().expect("an absolute path");
        std::os::unix::fs::symlink(file, repo.join(name)).expect("a link");
    }
    fs::write(repo.join("nothing.gguf"), "this is no model").expect("a file");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let hub = runtime
        .block_on(TestHub::start(folder.path()))
        .expect("a hub");
    let source = |file: &str| {
        let endpoint = hub.endpoint();
        json!({"huggingFace": {"repo": "people/models", "file": file, "endpoint": endpoint}})
    };
    let test = Test::start(Backend::Kine);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    let apply = |name: &str, draft: &str| {
        let document = json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": name},
            "spec": {"source": source(MODEL), "speculation": {"draft": source(draft)}},
        });
        test.api.apply(&document.to_string()).expect("a Model");
    };
    for (name, draft, said) in [
        (
            "stranger",
            STRANGER,
            "people/models/stories15M-F32.gguf at main: expected the same vocabulary as the model's, found another; use a small model of the same family",
        ),
        ("nothing", "nothing.gguf", "not a GGUF file"),
        ("nowhere", "nowhere.gguf", "nowhere.gguf"),
    ] {
        apply(name, draft);
        let model = format!("model/{name}");
        test.wait_for(&model, "Resolved", "False", &operator);
        let (_, reason, message) = test.condition(&model, "Resolved");
        assert_eq!(reason, "ResolveFailed");
        let begins = message.starts_with("spec.speculation.draft: ");
        assert!(begins && message.contains(said), "{message}");
    }
    assert_eq!(test.names("ringplans"), [""; 0]);

    // Its own file guesses for a model, if nothing smaller does.
    apply("drafting", MODEL);
    test.wait_for("model/drafting", "Ready", "True", &operator);
    let (_, _, message) = test.condition("model/drafting", "Resolved");
    assert!(
        message.contains("; draft model people/models/SmolLM2"),
        "{message}"
    );
    let resolved = test.object("model/drafting")["status"]["resolved"].clone();
    assert_eq!(resolved["draft"]["version"], resolved["version"]);
    let draft = test.object("ringplan/drafting-1")["spec"]["draft"].clone();
    assert_eq!(
        draft["model"]["source"],
        source_with_defaults(source(MODEL))
    );
    assert_eq!(draft["model"]["version"], resolved["draft"]["version"]);
    let weights = fs::metadata(repo.join(MODEL)).expect("a file").len();
    assert!(draft["memoryBytes"].as_u64() > Some(weights), "{draft}");

    // Repaired, a Model goes on.
    test.patch(
        "model/stranger",
        &json!({"spec": {"speculation": {"draft": {"huggingFace": {"file": MODEL}}}}}).to_string(),
    );
    test.wait_for("model/stranger", "Ready", "True", &operator);
    assert!(hub.body_bytes() < weights / 2, "{:?}", hub.counters());
}

/// As the API server completes it.
fn source_with_defaults(mut source: Value) -> Value {
    source["huggingFace"]["revision"] = json!("main");
    source
}

#[test]
fn what_does_not_fit_says_by_how_much() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&[("desk", 9)]);
    machines.change("desk", |profile| {
        // No disk to rely on: what does not fit does not run.
        let status = profile.status.as_mut().expect("a status");
        status.disk.sequential_read_bytes_per_second = 10_000_000;
    });
    let quota = json!({
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "models", "namespace": "default"},
        "spec": {"hard": {"prima.dev/memory": "1Gi"}},
    });
    test.api.apply(&quota.to_string()).expect("a quota");
    let operator = Operator::start(&test.api, "one");
    test.api.apply(&model("first", "")).expect("a model");
    wait_until("the operator knows of the quota", || {
        test.condition("model/first", "Planned").1 == "OverQuota"
    });
    let message = test.condition("model/first", "Planned").2;
    assert!(message.contains("may take 1.0 GiB"), "{message}");
    let more = json!({"spec": {"hard": {"prima.dev/memory": "64Gi"}}});
    test.patch("resourcequota/models", &more.to_string());
    test.wait_for("model/first", "Ready", "True", &operator);
    test.api.apply(&model("second", "")).expect("a model");
    // While the planner searches, there is no plan yet.
    wait_until("the planner has an answer", || {
        test.condition("model/second", "Planned").1 == "DoesNotFit"
    });
    let (status, _, message) = test.condition("model/second", "Planned");
    assert_eq!(status, "False");
    assert!(message.contains("GiB are missing"), "{message}");
    test.delete_model("first");
    test.wait_for("model/second", "Ready", "True", &operator);
}

#[test]
fn a_ring_whose_agents_are_reached_elsewhere_keeps_its_layers() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let before = test.object("ringplan/made-up-1");
    let moved = before["spec"]["members"][1]["name"]
        .as_str()
        .expect("a name");

    // It also gets more memory, so that a new plan would give it more layers.
    machines.stop_at(moved, MemberState::Loading);
    machines.change(moved, |profile| {
        let status = profile.status.as_mut().expect("a status");
        status.memory.total_bytes = 12 << 30;
        status.memory.available_bytes = 12 << 30;
        status.agent.as_mut().expect("an agent").address = "10.9.9.9".to_owned();
    });
    wait_until("there is a new plan", || {
        test.names("ringplans") == ["made-up-2"]
    });
    let after = test.object("ringplan/made-up-2");
    let windows = |plan: &Value| -> Vec<(Value, Value)> {
        let members = plan["spec"]["members"].as_array().expect("members");
        members
            .iter()
            .map(|member| (member["name"].clone(), member["windows"].clone()))
            .collect()
    };
    assert_eq!(windows(&after), windows(&before));
    let address = after["spec"]["members"][1]["address"].as_str();
    assert!(address.expect("an address").starts_with("10.9.9.9:"));
    // What the old plan's members had said does not count any more.
    test.wait_for("model/made-up", "Ready", "False", &operator);
    machines.stop_at(moved, MemberState::Ready);
    test.kubectl(&["label", "ringplan", "made-up-2", "seen=again"]);
    test.wait_for("model/made-up", "Ready", "True", &operator);

    // A first plan of this moment gives it other layers, once the memory is free.
    test.delete_model("made-up");
    wait_until("its ring ends", || test.names("ringplans").is_empty());
    test.api.apply(&model("fresh", "")).expect("a model");
    test.wait_for("model/fresh", "Ready", "True", &operator);
    let fresh = test.object("ringplan/fresh-1");
    assert_ne!(windows(&fresh), windows(&before));
}

#[test]
fn an_edited_model_is_replaced_and_says_how() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&[("desk", 20)]);
    let operator = Operator::start(&test.api, "one");
    let only_one = "maxConcurrentRequests: 1, contextLength: 8192";
    test.api
        .apply(&model("made-up", only_one))
        .expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);

    // There is room for both rings.
    machines.stop_at("desk", MemberState::Loading);
    test.patch("model/made-up", r#"{"spec":{"contextLength":8000}}"#);
    test.wait_for("model/made-up", "Degraded", "True", &operator);
    let (_, reason, message) = test.condition("model/made-up", "Degraded");
    assert_eq!(reason, "Replacing");
    assert_eq!(message, "generation 1 serves until generation 2 has loaded");
    assert_eq!(test.condition("model/made-up", "Ready").0, "True");
    assert_eq!(test.names("ringplans"), ["made-up-1", "made-up-2"]);
    machines.stop_at("desk", MemberState::Ready);
    test.kubectl(&["label", "ringplan", "made-up-2", "seen=again"]);
    test.wait_for("model/made-up", "Degraded", "False", &operator);
    wait_until("the old ring ends", || {
        test.names("ringplans") == ["made-up-2"]
    });

    // Now there is not: the machine has 9 GiB left, the weights take 7.5 GB, and each ring a gigabyte of its own.
    machines.change("desk", |profile| {
        let status = profile.status.as_mut().expect("a status");
        status.memory.available_bytes = 9 << 30;
    });
    machines.stop_at("desk", MemberState::Loading);
    test.patch("model/made-up", r#"{"spec":{"contextLength":8192}}"#);
    test.wait_for("model/made-up", "Ready", "False", &operator);
    assert_eq!(test.names("ringplans"), ["made-up-3"]);
    wait_until("it loads", || {
        test.condition("model/made-up", "Downloaded").0 == "True"
    });
    let (planned, reason, message) = test.condition("model/made-up", "Planned");
    assert_eq!(
        (planned.as_str(), reason.as_str()),
        ("True", "OldRingEndedFirst")
    );
    assert!(
        message.contains(
            "lack the memory for two rings, so the old one ended first (the Model was changed)"
        ),
        "{message}"
    );
    machines.stop_at("desk", MemberState::Ready);
    test.kubectl(&["label", "ringplan", "made-up-3", "seen=again"]);
    test.wait_for("model/made-up", "Ready", "True", &operator);
    wait_until("it is said no more", || {
        test.condition("model/made-up", "Planned").1 == "Planned"
    });
}

#[test]
fn traces_go_where_the_environment_says() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    let collector = TraceCollector::start();
    let environment = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint()),
        ("OTEL_BSP_SCHEDULE_DELAY", "200".to_owned()),
    ];
    let environment = environment
        .each_ref()
        .map(|(name, value)| (*name, value.as_str()));
    let operator = Operator::start_with(&test.api, "one", &environment);
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    wait_until("a reconcile is traced", || {
        collector
            .spans()
            .iter()
            .any(|span| span.name == "reconcile")
    });
    assert!(operator.terminate().success());
}

#[test]
fn machines_that_are_out_say_why() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&[("desk", 9), ("laptop", 9), ("pi4", 9), ("nas", 9)]);
    test.api
        .apply("{apiVersion: v1, kind: Node, metadata: {name: desk, labels: {place: office}}}\n---\n{apiVersion: v1, kind: Node, metadata: {name: laptop, labels: {place: office}}}\n---\n{apiVersion: v1, kind: Node, metadata: {name: nas, labels: {place: office}}}")
        .expect("nodes");
    machines.stop_at("desk", MemberState::Refused);
    machines.change("nas", |profile| {
        let agent = profile
            .status
            .as_mut()
            .and_then(|status| status.agent.as_mut());
        agent.expect("an agent").local_models.clear();
    });
    let operator = Operator::start(&test.api, "one");
    test.api
        .apply(&model(
            "made-up",
            "rank0: desk, nodeSelector: {place: office}",
        ))
        .expect("a model");
    wait_until("a refusal is noticed", || {
        let (_, _, message) = test.condition("model/made-up", "Planned");
        message.contains("spec.rank0 is desk, but it could not follow a plan: declared")
    });
    test.patch("model/made-up", r#"{"spec":{"rank0":null}}"#);
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let model = test.object("model/made-up");
    let why = |name: &str| {
        let nodes = model["status"]["nodes"].as_array().expect("nodes");
        let node = nodes
            .iter()
            .find(|node| node["name"] == name)
            .expect("a node");
        assert_eq!(node["inRing"], name == "laptop", "{node}");
        node["why"].as_str().expect("a reason").to_owned()
    };
    assert!(
        why("desk").contains("could not follow a plan"),
        "{}",
        why("desk")
    );
    assert!(
        why("pi4").contains("lacks the label place=office"),
        "{}",
        why("pi4")
    );
    assert!(why("nas").contains("it has no file"), "{}", why("nas"));
    why("laptop");
}

#[test]
fn agents_of_the_next_version_do_not_blind_the_operator() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&[("desk", 9), ("laptop", 9), ("pi4", 9)]);
    // As the next version's chart has it: a field more, and a system more.
    let status = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties";
    let added = json!([
        {"op": "add", "path": format!("{status}/cpu/properties/next"), "value": {"type": "string"}},
        {"op": "add", "path": format!("{status}/system/properties/os/enum/-"), "value": "Plan9"},
    ]);
    let definition = "customresourcedefinition/nodeprofiles.prima.dev";
    test.kubectl(&["patch", definition, "--type=json", "-p", &added.to_string()]);
    let says = |machine: &str, status: &str| {
        let profile = format!("nodeprofile/{machine}");
        let patch = ["--subresource=status", "--type=merge", "-p", status];
        let patch = [&["patch", &profile], &patch[..]].concat();
        // An API server takes a moment to follow a definition.
        wait_until("the API server keeps what is new", || {
            let kept = test.api.kubectl(&patch).is_ok();
            kept && (test.object(&profile)["status"].to_string()).contains("next")
        });
    };
    says("desk", r#"{"status":{"cpu":{"next":"next"}}}"#);
    says(
        "pi4",
        r#"{"status":{"cpu":{"next":"next"},"system":{"os":"Plan9"}}}"#,
    );

    // Listed, and watched.
    let operator = Operator::start(&test.api, "one");
    let only_on = |machine: &str| model(&format!("on-{machine}"), &format!("rank0: {machine}"));
    test.api.apply(&only_on("desk")).expect("a model");
    test.wait_for("model/on-desk", "Ready", "True", &operator);
    let pi4 = test.node("on-desk", "pi4").expect("what is said of it");
    let why = pi4["why"].as_str().expect("a reason");
    assert!(why.contains("version") && why.contains("Plan9"), "{why}");
    says("laptop", r#"{"status":{"cpu":{"next":"next"}}}"#);
    test.api.apply(&only_on("laptop")).expect("a model");
    test.wait_for("model/on-laptop", "Ready", "True", &operator);
}

#[test]
fn an_api_key_comes_from_a_secret_and_no_ring_runs_without_it() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    let looks = std::cell::Cell::new(0);
    let look = || {
        // Whatever changes the Model makes it look again.
        looks.set(looks.get() + 1);
        let label = format!(
            r#"{{"metadata":{{"labels":{{"look":"{}"}}}}}}"#,
            looks.get()
        );
        test.patch("model/made-up", &label);
    };
    let lacks = |what: &str| {
        look();
        wait_until(what, || {
            let (status, reason, message) = test.condition("model/made-up", "Ready");
            (status.as_str(), reason.as_str()) == ("False", "NoApiKey") && message.contains(what)
        });
        assert!(test.names("ringplans").is_empty());
    };
    let secret = |data: &str| {
        let secret = format!(
            "{{apiVersion: v1, kind: Secret, metadata: {{name: keys, namespace: default}}, stringData: {{{data}}}}}"
        );
        test.api.apply(&secret).expect("a Secret");
    };
    // The only plan, and the keys that it tells.
    let told = || {
        let plans = test.object("ringplans");
        let [plan] = plans["items"].as_array().expect("plans").as_slice() else {
            panic!("not one plan: {plans}");
        };
        let keys = plan["metadata"]["annotations"][API_KEYS].as_str();
        let keys = ApiKeys::from_json(keys.expect("the keys")).expect("keys of ours");
        (plan["metadata"]["uid"].clone(), keys)
    };
    let spec = "apiKeySecretRef: {name: keys, key: key}";
    test.api.apply(&model("made-up", spec)).expect("a model");
    lacks("there is no Secret default/keys");
    secret("other: open-sesame");
    lacks("the Secret default/keys has nothing at key key");
    // Its message changes in between, which shows that it has looked.
    test.kubectl(&["delete", "secret", "keys"]);
    lacks("there is no Secret default/keys");
    secret("key: \"  \"");
    lacks("the Secret default/keys has nothing at key key");

    // White space around it is an editor's.
    secret("key: \" open-sesame\\n\"");
    look();
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let (plan, keys) = told();
    let salt = keys.salt.clone();
    let listed = |keys: &[(&str, &str)]| -> BTreeMap<String, String> {
        let digest = |key: &str| ApiKeys::digest(&salt, key.as_bytes());
        let keys = keys.iter();
        keys.map(|(name, key)| (name.to_string(), digest(key)))
            .collect()
    };
    assert_eq!(keys.sha256, listed(&[("key", "open-sesame")]));
    let text = test.kubectl(&["get", "ringplans", "-o", "yaml"]);
    assert!(!text.contains("sesame"), "{text}");

    // What changes is told to the ring that runs: nobody touches the Model, and its plan stays.
    let tells = |keys: &[(&str, &str)]| {
        wait_for("the ring is told", || match told().1 {
            now if now.sha256 == listed(keys) => Ok(()),
            now => Err(format!("{now:?}, {}", operator.log_tail())),
        });
        assert_eq!(told().0, plan);
    };
    secret("key: close-sesame");
    tells(&[("key", "close-sesame")]);
    // All entries, by their names, and what each may use.
    let all =
        r#"{"spec": {"apiKeySecretRef": {"key": null}, "apiKeyLimits": {"tokensPerMinute": 600}}}"#;
    test.patch("model/made-up", all);
    secret("key: close-sesame, alice: abc, bob: \"\"");
    tells(&[("key", "close-sesame"), ("alice", "abc")]);
    assert_eq!(told().1.limits.tokens_per_minute, Some(600));
    let revoked = r#"{"data": {"key": null}, "stringData": {"bob": "abd"}}"#;
    test.patch("secret/keys", revoked);
    tells(&[("alice", "abc"), ("bob", "abd")]);
    test.kubectl(&["delete", "secret", "keys"]);
    wait_until("no ring runs without keys", || {
        test.names("ringplans").is_empty()
    });
    let (_, reason, _) = test.condition("model/made-up", "Ready");
    assert_eq!(reason, "NoApiKey");
    // It is noticed that they are there again.
    secret("key: close-sesame");
    test.wait_for("model/made-up", "Ready", "True", &operator);

    // A cluster may keep its Secrets from the operator. The API server hears of roles that are gone a moment later.
    upgrade_chart(&test.api, &["--set", "operator.secretAccess=false"]);
    let account = format!("--as=system:serviceaccount:{NAMESPACE}:prima-operator");
    wait_until("the operator may not read Secrets", || {
        let may = ["auth", "can-i", "get", "secrets", "--quiet"];
        test.api.kubectl(&[&may[..], &[&account]].concat()).is_err()
    });
    lacks("the operator may not read the Secret default/keys");
}

#[test]
fn a_service_of_somebody_else_is_left_alone() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    let theirs = "{apiVersion: v1, kind: Service, metadata: {name: made-up, namespace: default}, spec: {ports: [{port: 5432}]}}";
    test.api.apply(theirs).expect("a Service");
    let operator = Operator::start(&test.api, "one");
    let spec = "serviceType: NodePort";
    test.api.apply(&model("made-up", spec)).expect("a model");
    wait_until("it says so", || {
        let events = [
            "get",
            "events.events.k8s.io",
            "-o",
            "jsonpath={.items[*].note}",
        ];
        let said = test.kubectl(&events);
        said.contains("there is a Service default/made-up of somebody else")
    });
    let service = test.object("service/made-up");
    assert_eq!(service["spec"]["ports"][0]["port"], 5432, "{service}");
    assert_eq!(service["metadata"]["ownerReferences"], Value::Null);

    test.kubectl(&["delete", "service", "made-up"]);
    test.wait_for("model/made-up", "Ready", "True", &operator);
    let service = test.object("service/made-up");
    assert_eq!(service["spec"]["type"], "NodePort");
    assert_eq!(service["spec"]["ports"][0]["port"], 80);
    assert!(service["spec"]["ports"][0]["nodePort"].as_i64() >= Some(30_000));

    // What spec.service says counts more, and goes when it is taken back.
    let wishes =
        json!({"type": "LoadBalancer", "port": 8081, "annotations": {"example.com/pool": "home"}});
    let patch = json!({"spec": {"service": wishes}}).to_string();
    test.patch("model/made-up", &patch);
    let as_wished = |port: i64, type_: &str, pool: Value| {
        let service = test.object("service/made-up");
        let found = &service["metadata"]["annotations"]["example.com/pool"];
        service["spec"]["ports"][0]["port"] == port
            && service["spec"]["type"] == type_
            && *found == pool
    };
    wait_until("the Service is as wished", || {
        as_wished(8081, "LoadBalancer", json!("home"))
    });
    wait_until("the endpoint has the port", || {
        let model = test.object("model/made-up");
        model["status"]["endpoint"] == "http://made-up.default.svc.cluster.local:8081/v1"
    });
    test.patch("model/made-up", r#"{"spec":{"service":null}}"#);
    wait_until("it is as before", || as_wished(80, "NodePort", Value::Null));
}

#[test]
fn rings_are_reached_by_ipv6_where_agents_are() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&[("desk", 9)]);
    let operator = Operator::start(&test.api, "one");
    let endpoints = |family: &str| {
        let slice = test.object(&format!("endpointslice/made-up-{family}"));
        assert_eq!(
            slice["addressType"]
                .as_str()
                .map(str::to_lowercase)
                .as_deref(),
            Some(family)
        );
        let endpoints = slice["endpoints"].as_array().cloned().unwrap_or_default();
        let addresses = endpoints.iter().map(|one| one["addresses"][0].clone());
        addresses.collect::<Vec<_>>()
    };
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    assert_eq!(endpoints("ipv4"), ["10.1.0.1"]);

    machines.change("desk", |profile| {
        let status = profile.status.as_mut().expect("a status");
        status.agent.as_mut().expect("an agent").address = "fd00::1".to_owned();
    });
    // Until its status is written anew, the Model is ready by the plan before.
    wait_until("another plan serves", || {
        let status = test.object("model/made-up")["status"].take();
        let conditions = status["conditions"].as_array().expect("conditions");
        let is_ready = |one: &Value| one["type"] == "Ready" && one["status"] == "True";
        status["planGeneration"] == 2 && conditions.iter().any(is_ready)
    });
    assert_eq!(test.names("ringplans"), ["made-up-2"]);
    let plan = test.object("ringplan/made-up-2");
    let port = plan["spec"]["httpPort"].as_i64().expect("a port") - 200;
    assert_eq!(
        plan["spec"]["members"][0]["address"],
        format!("[fd00::1]:{port}")
    );
    assert_eq!(endpoints("ipv6"), ["fd00::1"]);
    assert!(endpoints("ipv4").is_empty());
}

#[test]
fn what_a_killed_operator_began_another_ends() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    // Reconciling takes some 100 ms; the delays lie all over it, and some before and after.
    for (round, delay) in [0, 20, 40, 60, 80, 100, 130, 160, 200, 300]
        .into_iter()
        .enumerate()
    {
        let operator = Operator::start(&test.api, "one");
        wait_until("it leads", || operator.ready() == "leads");
        let name = format!("model-{round}");
        test.api
            .apply(&model(
                &name,
                "maxConcurrentRequests: 1, contextLength: 256",
            ))
            .expect("a model");
        thread::sleep(Duration::from_millis(delay));
        drop(operator);
        // The same identity has its Lease back at once.
        let operator = Operator::start(&test.api, "one");
        test.wait_for(&format!("model/{name}"), "Ready", "True", &operator);
        assert_eq!(
            test.names("ringplans"),
            [format!("{name}-1")],
            "after {delay} ms"
        );
        assert_eq!(test.names("endpointslices").len(), 1);
        drop(operator);
        test.delete_model(&name);
        wait_until("it is gone", || {
            test.names("ringplans").is_empty() && test.names("endpointslices").is_empty()
        });
    }
}

#[test]
fn of_two_operators_one_acts_and_the_other_takes_over() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    let operator = |name: &str| Operator::start_with(&test.api, name, &[USUAL_LEASE]);
    let first = operator("first");
    wait_until("the first leads", || first.ready() == "leads");
    let second = operator("second");
    wait_until("the second is there", || second.ready() == "waits to lead");
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &first);
    assert_eq!(second.metric("prima_operator_reconciles_total"), 0.0);
    drop(first);
    wait_until("the second leads", || second.ready() == "leads");
    test.api.apply(&model("another", "")).expect("a model");
    test.wait_for("model/another", "Resolved", "True", &second);

    // One that is asked to end leaves its Lease to the next.
    let third = operator("third");
    wait_until("the third is there", || third.ready() == "waits to lead");
    assert!(second.terminate().success());
    let lease = test.api.object(NAMESPACE, "lease/prima-operator");
    let lease = lease.expect("a Lease");
    assert_ne!(lease["spec"]["holderIdentity"], "second", "{lease}");
    wait_until("the third leads", || third.ready() == "leads");
}

#[test]
fn an_api_server_that_restarts_in_the_middle_is_waited_for() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    let operator = Operator::start(&test.api, "one");
    wait_until("it leads", || operator.ready() == "leads");
    test.api.apply(&model("made-up", "")).expect("a model");
    thread::sleep(Duration::from_millis(100));
    test.api.restart();
    test.wait_for("model/made-up", "Ready", "True", &operator);
    assert_eq!(test.names("ringplans"), ["made-up-1"]);
}

#[test]
fn fifty_models_on_two_hundred_machines_cost_nothing_at_rest() {
    const MODELS: usize = 50;
    const GROUP: usize = 4;
    let test = Test::start(Backend::Etcd);
    let names: Vec<String> = (0..MODELS * GROUP)
        .map(|index| format!("node-{index}"))
        .collect();
    let nodes: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(index, name)| format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}, labels: {{group: g{}}}}}}}", index / GROUP))
        .collect();
    test.api.apply(&nodes.join("\n---\n")).expect("nodes");
    let machines: Vec<(&str, i64)> = names.iter().map(|name| (name.as_str(), 4)).collect();
    let _machines = test.machines(&machines);
    let operator = Operator::start(&test.api, "one");
    wait_until("it leads", || operator.ready() == "leads");
    let begun = Instant::now();
    let models: Vec<String> = (0..MODELS)
        .map(|index| {
            model(
                &format!("model-{index}"),
                &format!("nodeSelector: {{group: g{index}}}"),
            )
        })
        .collect();
    test.api.apply(&models.join("\n---\n")).expect("models");
    wait_until("all are ready", || {
        operator.metric("prima_operator_ready_models") == MODELS as f64
    });
    let took = begun.elapsed();
    let reconciles = operator.metric("prima_operator_reconciles_total");
    let seconds = operator.metric("prima_operator_reconcile_seconds_sum");
    println!(
        "{MODELS} Models on {} machines: ready after {:.1} s, {reconciles} looks of {:.0} ms on average",
        names.len(),
        took.as_secs_f64(),
        1e3 * seconds / reconciles
    );
    assert_eq!(
        operator.metric("prima_operator_reconcile_failures_total"),
        0.0
    );

    // Once the last change is handled, which takes a busy machine its time, nobody asks for anything but Leases.
    let done = || {
        let begun = operator.metric("prima_operator_reconciles_total");
        let ended = operator.metric("prima_operator_reconcile_seconds_count");
        (begun == ended).then(|| (test.requests(), begun))
    };
    wait_until("the last change is handled", || {
        let before = done();
        thread::sleep(Duration::from_secs(10));
        before.is_some() && done() == before
    });
    let before = test.requests();
    let rest = Duration::from_secs(20);
    thread::sleep(rest);
    let asked = test.requests() - before;
    println!(
        "at rest: {asked} requests in {} s beside Leases and watches",
        rest.as_secs()
    );
    assert_eq!(asked, 0.0);
}

struct Test {
    api: ApiServer,
}

impl Test {
    fn start(backend: Backend) -> Self {
        let mut api = ApiServer::start(backend);
        api.start_controller_manager();
        install_chart(&api);
        Self { api }
    }

    fn machines(&self, machines: &[(&str, i64)]) -> DeclaredMachines {
        DeclaredMachines::start(&self.api, machines, &made_up())
    }

    fn kubectl(&self, args: &[&str]) -> String {
        self.api
            .kubectl(args)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`ApiServer::object`].
    fn object(&self, what: &str) -> Value {
        let found = self.api.object("default", what);
        found.unwrap_or_else(|error| panic!("{error}"))
    }

    /// What a Model's status says of a machine.
    fn node(&self, model: &str, machine: &str) -> Option<Value> {
        let mut model = self.object(&format!("model/{model}"));
        let nodes = model["status"]["nodes"].as_array_mut()?;
        let at = nodes.iter().position(|node| node["name"] == machine)?;
        Some(nodes.swap_remove(at))
    }

    fn delete_model(&self, name: &str) {
        self.kubectl(&["delete", "model", name, &timeout_argument()]);
    }

    fn patch(&self, object: &str, patch: &str) {
        self.kubectl(&["patch", object, "--type=merge", "-p", patch]);
    }

    /// Names of objects that the operator made.
    fn names(&self, kind: &str) -> Vec<String> {
        let found = self.object(kind);
        let all = found["items"].as_array().expect("items").iter();
        let ours = all.map(|one| &one["metadata"]).filter(|metadata| {
            metadata["labels"]["app.kubernetes.io/managed-by"] == "prima-operator"
        });
        let names = ours.map(|metadata| metadata["name"].as_str().expect("a name").to_owned());
        names.collect()
    }

    /// Status, reason and message; empty where there is none yet.
    fn condition(&self, object: &str, kind: &str) -> (String, String, String) {
        let found = self.object(object);
        let conditions = found["status"]["conditions"].as_array().cloned();
        let condition = conditions
            .unwrap_or_default()
            .into_iter()
            .find(|one| one["type"] == kind);
        let condition = condition.unwrap_or_default();
        let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        (text("status"), text("reason"), text("message"))
    }

    /// From when an object was made until this condition of it got its status, by the API server's and the operator's clock, which are one.
    fn seconds_until(&self, object: &str, kind: &str) -> i64 {
        let found = self.object(object);
        let conditions = found["status"]["conditions"].as_array();
        let mut conditions = conditions.expect("conditions").iter();
        let condition = conditions.find(|one| one["type"] == kind);
        let second = |time: &Value| -> i64 {
            let time: Timestamp = time.as_str().expect("a time").parse().expect("RFC 3339");
            time.as_second()
        };
        let became = &condition.expect("the condition")["lastTransitionTime"];
        second(became) - second(&found["metadata"]["creationTimestamp"])
    }

    fn wait_for(&self, object: &str, kind: &str, status: &str, operator: &Operator) {
        let condition = format!("--for=condition={kind}={status}");
        let wait = ["wait", object, &condition, &timeout_argument()];
        if let Err(error) = self.api.kubectl(&wait) {
            panic!(
                "{error}\n{}\n{}",
                self.kubectl(&["get", object, "-o", "yaml"]),
                operator.log_tail()
            );
        }
    }

    /// Requests so far for what the operator and the agents read and write, but for watches and Leases.
    fn requests(&self) -> f64 {
        const RESOURCES: [&str; 5] = [
            "models",
            "ringplans",
            "nodeprofiles",
            "services",
            "endpointslices",
        ];
        let metrics = self.kubectl(&["get", "--raw", "/metrics"]);
        let counts = metrics.lines().filter(|line| {
            line.starts_with("apiserver_request_total{")
                && !line.contains("verb=\"WATCH\"")
                && RESOURCES
                    .iter()
                    .any(|name| line.contains(&format!("resource=\"{name}\"")))
        });
        counts
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum()
    }

    /// Every object that belongs to a Model, and itself, with its version.
    fn versions(&self) -> Vec<(String, String)> {
        let mut versions = Vec::new();
        for kind in ["models", "ringplans", "services", "endpointslices"] {
            let found = self.object(kind);
            for item in found["items"].as_array().expect("items") {
                let name = item["metadata"]["name"].as_str().expect("a name");
                if name.starts_with("made-up") {
                    let version = item["metadata"]["resourceVersion"]
                        .as_str()
                        .expect("a version");
                    versions.push((format!("{kind}/{name}"), version.to_owned()));
                }
            }
        }
        versions
    }
}

fn model(name: &str, spec: &str) -> String {
    let comma = if spec.is_empty() { "" } else { ", " };
    format!(
        "{{apiVersion: prima.dev/v1alpha1, kind: Model, metadata: {{name: {name}, namespace: default}}, spec: {{source: {{hostPath: {{path: {FILE}}}}}{comma}{spec}}}}}"
    )
}
