//! The life of a Model: it becomes a ring, waits for room, is edited, suspended and deleted.

use prima_crds::v1alpha1::ring_plan::MemberState;
use prima_tests::api_server::Backend;
use prima_tests::operator::Operator;
use prima_tests::{wait_for, wait_until};
use serde_json::json;

use crate::harness::{MACHINES, Test, model};

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
    // First clients leave it.
    wait_until("the old ring has ended", || {
        test.condition("model/made-up", "Planned").1 == "OldRingEndedFirst"
    });
    assert_eq!(test.names("ringplans"), ["made-up-3"]);
    let (planned, _, message) = test.condition("model/made-up", "Planned");
    assert_eq!(planned, "True");
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
