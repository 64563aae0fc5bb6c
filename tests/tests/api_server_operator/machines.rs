//! What becomes of a ring when its machines are cordoned, leave, are lost or are reached elsewhere; and what is said of those that are out.

use prima_crds::v1alpha1::ring_plan::MemberState;
use prima_tests::api_server::Backend;
use prima_tests::declared_machines::DeclaredMachines;
use prima_tests::operator::Operator;
use prima_tests::{wait_for, wait_until};
use serde_json::{Value, json};

use crate::harness::{MACHINES, Test, model};

const ALIKE: [(&str, i64); 3] = [("desk", 9), ("laptop", 9), ("pi4", 9)];

#[test]
fn a_cordoned_machine_is_planned_around_while_it_still_answers() {
    let test = Test::start(Backend::Etcd);
    let node = "{apiVersion: v1, kind: Node, metadata: {name: laptop}}";
    test.api.apply(node).expect("a Node");
    let (_machines, operator) = ring_with_laptop(&test);
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
    let (machines, operator) = ring_with_laptop(&test);
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
    let (machines, operator) = ring_with_laptop(&test);
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
    // Said last: that it is not ready comes before all else.
    wait_for("there is no plan, and why", || {
        let (_, reason, message) = test.condition("model/made-up", "Planned");
        match message.contains("laptop") && message.contains("not heard of") {
            true => Ok(()),
            false => Err(format!("{reason}: {message}")),
        }
    });
    let status = test.object("model/made-up")["status"].clone();
    assert_eq!(status["summary"], "MachineOut", "{status}");
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
    let _machines = test.machines(&ALIKE);
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

/// Machines that are alike, and a ready ring whose rank 0 is set, so that a test knows one machine of it.
fn ring_with_laptop(test: &Test) -> (DeclaredMachines, Operator) {
    let machines = test.machines(&ALIKE);
    let operator = Operator::start(&test.api, "one");
    test.api
        .apply(&model("made-up", "rank0: laptop"))
        .expect("a model");
    test.wait_for("model/made-up", "Ready", "True", &operator);
    (machines, operator)
}
