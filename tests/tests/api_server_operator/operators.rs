//! Operators that end, are killed, wait to lead and take over, an API server that restarts, and a Model of the next version; and where traces go.

use std::thread;
use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::MemberState;
use prima_tests::api_server::Backend;
use prima_tests::operator::{NAMESPACE, Operator, USUAL_LEASE};
use prima_tests::trace_collector::TraceCollector;
use prima_tests::wait_until;
use serde_json::{Value, json};

use crate::harness::{MACHINES, Test, model};

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
    let [first, second] = two_operators(&test);
    assert_eq!(second.metric("prima_operator_reconciles_total"), 0.0);
    drop(first);
    wait_until("the second leads", || second.ready() == "leads");
    test.api.apply(&model("another", "")).expect("a model");
    test.wait_for("model/another", "Resolved", "True", &second);

    // One that is asked to end leaves its Lease to the next.
    let third = Operator::start_with(&test.api, "third", &[USUAL_LEASE]);
    wait_until("the third is there", || third.ready() == "waits to lead");
    assert!(second.terminate().success());
    let lease = test.api.object(NAMESPACE, "lease/prima-operator");
    let lease = lease.expect("a Lease");
    assert_ne!(lease["spec"]["holderIdentity"], "second", "{lease}");
    wait_until("the third leads", || third.ready() == "leads");
}

#[test]
fn a_ring_that_breaks_with_the_leader_is_said_to() {
    let test = Test::start(Backend::Etcd);
    let machines = test.machines(&MACHINES);
    let [first, second] = two_operators(&test);
    let before = test.versions();
    let endpoints = || {
        let slice = test.object("endpointslice/made-up-ipv4");
        slice["endpoints"].as_array().map_or(0, Vec::len)
    };
    assert_eq!(endpoints(), 1);
    let plan = test.object("ringplan/made-up-1");
    let members = plan["spec"]["members"].as_array().expect("members");
    let last = members.last().expect("a member")["name"].as_str();
    let last = last.expect("a name");

    // Its Lease runs from here.
    drop(first);
    machines.say_of(last, "made-up-1", MemberState::Loading);
    wait_until("it is not ready", || {
        test.condition("model/made-up", "Ready").0 == "False"
    });
    // Long before it leads: until then it writes nothing else.
    assert_eq!(second.ready(), "waits to lead");
    assert_eq!(second.metric("prima_operator_reconciles_total"), 0.0);
    let (_, reason, message) = test.condition("model/made-up", "Ready");
    assert_eq!(reason, "Loading", "{message}");
    assert!(
        message.starts_with(&format!("{last}: loading")),
        "{message}"
    );
    assert_eq!(test.condition("model/made-up", "Planned").0, "True");
    let summary = test.object("model/made-up")["status"]["summary"].clone();
    assert_eq!(summary, "Loading");
    let others = |versions: Vec<(String, String)>| {
        let mut versions = versions;
        versions.retain(|(object, _)| object.starts_with("services/"));
        versions
    };
    assert_eq!(others(test.versions()), others(before));
    assert_eq!(endpoints(), 0);
    wait_until("an event tells of it", || {
        let notes = "jsonpath={.items[*].note}";
        let events = test.kubectl(&["get", "events.events.k8s.io", "-o", notes]);
        events.contains(&message)
    });

    machines.say_of(last, "made-up-1", MemberState::Loaded);
    wait_until("the second leads", || second.ready() == "leads");
    test.wait_for("model/made-up", "Ready", "True", &second);
    wait_until("clients are sent there again", || endpoints() == 1);
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
fn a_model_of_the_next_version_does_not_hide_the_others() {
    let test = Test::start(Backend::Etcd);
    let _machines = test.machines(&MACHINES);
    // As the next version's chart has it, which was rolled back since.
    let spec = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties";
    let added = json!([{"op": "add", "path": format!("{spec}/kvDtype/enum/-"), "value": "Q4_1"}]);
    let definition = "customresourcedefinition/models.prima.dev";
    test.kubectl(&["patch", definition, "--type=json", "-p", &added.to_string()]);
    // An API server takes a moment to follow a definition.
    let listed = model("listed", "kvDtype: Q4_1");
    wait_until("the API server takes what is new", || {
        test.api.apply(&listed).is_ok()
    });
    let operator = Operator::start(&test.api, "one");
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    test.api
        .apply(&model("watched", "kvDtype: Q4_1"))
        .expect("a model");
    test.api.apply(&model("another", "")).expect("a model");
    test.wait_for("model/another", "Resolved", "True", &operator);
    for newer in ["listed", "watched"] {
        let newer = format!("model/{newer}");
        assert_eq!(test.object(&newer)["status"], Value::Null);
        test.patch(&newer, r#"{"spec":{"kvDtype":"F16"}}"#);
        test.wait_for(&newer, "Resolved", "True", &operator);
    }
}

/// The first leads, and has made a Model ready; the second waits.
fn two_operators(test: &Test) -> [Operator; 2] {
    let operator = |name: &str| Operator::start_with(&test.api, name, &[USUAL_LEASE]);
    let first = operator("first");
    wait_until("the first leads", || first.ready() == "leads");
    let second = operator("second");
    wait_until("the second is there", || second.ready() == "waits to lead");
    test.api.apply(&model("made-up", "")).expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &first);
    [first, second]
}
