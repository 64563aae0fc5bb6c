//! Priorities of Models, on a real API server with machines that declare themselves: a ring of lower priority ends for one that else would not
//! fit, says so, and is planned again when there is room; a quota says who may do that.

use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::declared_machines::{DeclaredMachines, FILE, made_up};
use prima_tests::operator::{Operator, install_chart};
use prima_tests::{timeout_argument, wait_for, wait_until};
use serde_json::{Value, json};

#[test]
fn a_lower_priority_gives_way_and_comes_back() {
    let mut api = ApiServer::start(Backend::Etcd);
    api.start_controller_manager();
    install_chart(&api);
    let machines = DeclaredMachines::start(&api, &[("desk", 9)], &made_up());
    machines.change("desk", |profile| {
        // No disk to rely on: what does not fit does not run.
        let status = profile.status.as_mut().expect("a status");
        status.disk.sequential_read_bytes_per_second = 10_000_000;
    });
    let quota = json!({
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "models", "namespace": "kids"},
        "spec": {"hard": {"prima.dev/priority": "0"}},
    });
    api.kubectl(&["create", "namespace", "kids"])
        .expect("a namespace");
    api.apply(&quota.to_string()).expect("a quota");
    let operator = Operator::start(&api, "one");
    apply_model(&api, "default", "small", 0);
    wait_until_ready(&api, "default", "small", &operator);

    apply_model(&api, "kids", "big", 10);
    let message = wait_for_reason(&api, "kids", "big", "OverQuota", &operator);
    let said = "ResourceQuota models, prima.dev/priority: Models of the namespace may have a priority of 0 at most, and this one has 10";
    assert_eq!(message, said);
    assert_eq!(plans(&api), ["small-1"]);

    let more = json!({"spec": {"hard": {"prima.dev/priority": "10"}}}).to_string();
    let patch = [
        "patch",
        "resourcequota/models",
        "-n",
        "kids",
        "--type=merge",
        "-p",
        &more,
    ];
    api.kubectl(&patch).expect("a larger quota");
    wait_until_ready(&api, "kids", "big", &operator);
    let message = wait_for_reason(&api, "default", "small", "Displaced", &operator);
    let said = "its memory goes to a Model of another namespace (priority 10), and its own priority is 0; it is planned again when there is room";
    assert_eq!(message, said);
    assert_eq!(plans(&api), ["big-1"]);
    wait_until("an event tells of it", || {
        let reasons = "jsonpath={.items[*].reason}";
        let events = api.kubectl(&["get", "events.events.k8s.io", "-o", reasons]);
        events.expect("events").contains("Displaced")
    });

    // Another operator finds it as it should be.
    drop(operator);
    let operator = Operator::start(&api, "one");
    wait_until("it has looked at both", || {
        operator.metric("prima_operator_reconcile_seconds_count") >= 2.0
    });
    let message = wait_for_reason(&api, "default", "small", "Displaced", &operator);
    assert_eq!(message, said);
    assert_eq!(plans(&api), ["big-1"]);

    let delete = ["delete", "model", "big", "-n", "kids", &timeout_argument()];
    api.kubectl(&delete).expect("is deleted");
    wait_until_ready(&api, "default", "small", &operator);
    assert_eq!(plans(&api), ["small-2"]);
}

/// A Model of the file that all machines have.
fn apply_model(api: &ApiServer, namespace: &str, name: &str, priority: i32) {
    let model = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"source": {"hostPath": {"path": FILE}}, "priority": priority},
    });
    api.apply(&model.to_string()).expect("a Model");
}

/// Names of all plans.
fn plans(api: &ApiServer) -> Vec<String> {
    let path = "jsonpath={.items[*].metadata.name}";
    let names = api.kubectl(&["get", "ringplans", "--all-namespaces", "-o", path]);
    let names = names.expect("the plans' names");
    names.split_whitespace().map(str::to_owned).collect()
}

fn wait_until_ready(api: &ApiServer, namespace: &str, name: &str, operator: &Operator) {
    wait_for(&format!("{namespace}/{name} is ready"), || {
        let status = status(api, namespace, name);
        match condition(&status, "Ready")["status"] == "True" {
            true => Ok(()),
            false => Err(format!("{status}\n{}", operator.log_tail())),
        }
    });
}

/// Waits until the Model's condition Planned has this reason, and returns its message.
fn wait_for_reason(
    api: &ApiServer,
    namespace: &str,
    name: &str,
    reason: &str,
    operator: &Operator,
) -> String {
    wait_for(&format!("{namespace}/{name}: {reason}"), || {
        let status = status(api, namespace, name);
        let planned = condition(&status, "Planned");
        match planned["reason"] == reason {
            true => Ok(planned["message"].as_str().unwrap_or_default().to_owned()),
            false => Err(format!("{status}\n{}", operator.log_tail())),
        }
    })
}

fn status(api: &ApiServer, namespace: &str, name: &str) -> Value {
    let model = api.kubectl(&["get", "model", name, "-n", namespace, "-o", "json"]);
    let mut model: Value = serde_json::from_str(&model.expect("a Model")).expect("JSON");
    model["status"].take()
}

/// `null` where there is none yet.
fn condition(status: &Value, kind: &str) -> Value {
    let conditions = status["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|one| one["type"] == kind);
    found.cloned().unwrap_or_default()
}
