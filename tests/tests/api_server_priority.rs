//! Priorities of Models, on a real API server with machines that declare themselves: a ring of lower priority ends for one that else would not
//! fit, says so, and is planned again when there is room; a quota says who may do that. None ends for one that could not use the room.

use prima_tests::api_server::{ApiServer, Backend, condition};
use prima_tests::declared_machines::{DeclaredMachines, FILE, made_up};
use prima_tests::operator::{Operator, install_chart, ring_plan};
use prima_tests::{timeout_argument, wait_for, wait_until};
use serde_json::{Value, json};

#[test]
fn a_lower_priority_gives_way_and_comes_back() {
    let mut api = ApiServer::start(Backend::Etcd);
    api.start_controller_manager();
    install_chart(&api);
    let _machines = one_machine(&api);
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

    // Another operator finds it as it should be, and says so with what only it has seen.
    drop(operator);
    let lower = json!({"spec": {"priority": -1}}).to_string();
    api.kubectl(&["patch", "model", "small", "--type=merge", "-p", &lower])
        .expect("a lower priority");
    let operator = Operator::start(&api, "one");
    let said = said.replace("its own priority is 0", "its own priority is -1");
    wait_for("the other operator has looked at it", || {
        let model = model(&api, "default", "small");
        let planned = condition(&model, "Planned");
        match planned["message"] == said {
            true => Ok(()),
            false => Err(format!("{planned}\n{}", operator.log_tail())),
        }
    });
    wait_for_reason(&api, "default", "small", "Displaced", &operator);
    assert_eq!(plans(&api), ["big-1"]);

    let delete = ["delete", "model", "big", "-n", "kids", &timeout_argument()];
    api.kubectl(&delete).expect("is deleted");
    wait_until_ready(&api, "default", "small", &operator);
    assert_eq!(plans(&api), ["small-2"]);
}

#[test]
fn nobody_ends_for_a_model_that_could_not_run() {
    let api = ApiServer::start(Backend::Etcd);
    install_chart(&api);
    let _machines = one_machine(&api);
    let operator = Operator::start(&api, "one");
    apply_model(&api, "default", "small", 0);
    wait_until_ready(&api, "default", "small", &operator);

    // Its Service is somebody else's.
    api.kubectl(&["create", "namespace", "kids"])
        .expect("a namespace");
    let theirs = "{apiVersion: v1, kind: Service, metadata: {name: big, namespace: kids}, spec: {ports: [{port: 5432}]}}";
    api.apply(theirs).expect("a Service");
    apply_model(&api, "kids", "big", 10);
    wait_until("it was looked at several times", || {
        operator.metric("prima_operator_reconcile_failures_total") >= 3.0
    });
    assert_eq!(plans(&api), ["small-1"]);

    // Nor may it have a plan.
    let plan = ring_plan("probe", "probe");
    api.try_out(&plan).expect("plans are taken");
    api.apply(NO_MORE_PLANS).expect("a policy");
    wait_until("no plan is taken", || api.try_out(&plan).is_err());
    api.kubectl(&["delete", "service", "big", "-n", "kids"])
        .expect("is deleted");
    wait_until("the operator hears of it", || {
        operator.log_tail().contains("no more plans")
    });
    assert_eq!(plans(&api), ["small-1"]);

    // Once both are mended, it is planned.
    let binding = "validatingadmissionpolicybinding/no-more-plans";
    api.kubectl(&["delete", binding]).expect("is deleted");
    wait_until_ready(&api, "kids", "big", &operator);
    wait_for_reason(&api, "default", "small", "Displaced", &operator);
    assert_eq!(plans(&api), ["big-1"]);
}

const NO_MORE_PLANS: &str = "
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-more-plans}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
    - {apiGroups: [prima.dev], apiVersions: [v1alpha1], operations: [CREATE], resources: [ringplans]}
  validations:
  - {expression: 'false', message: no more plans}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-more-plans}
spec: {policyName: no-more-plans, validationActions: [Deny]}
";

/// A machine that has memory for one ring, and no disk to rely on: what does not fit does not run.
fn one_machine(api: &ApiServer) -> DeclaredMachines {
    let machines = DeclaredMachines::start(api, &[("desk", 9)], &made_up());
    machines.change("desk", |profile| {
        let status = profile.status.as_mut().expect("a status");
        status.disk.sequential_read_bytes_per_second = 10_000_000;
    });
    machines
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

/// Names of the plans of both namespaces.
fn plans(api: &ApiServer) -> Vec<String> {
    let of = |namespace| {
        let plans = api.object(namespace, "ringplans").expect("the plans");
        let plans = plans["items"].as_array().expect("items").clone();
        let name = |plan: &Value| plan["metadata"]["name"].as_str().map(str::to_owned);
        plans.iter().filter_map(name).collect::<Vec<_>>()
    };
    ["default", "kids"].map(of).concat()
}

fn wait_until_ready(api: &ApiServer, namespace: &str, name: &str, operator: &Operator) {
    wait_for(&format!("{namespace}/{name} is ready"), || {
        let model = model(api, namespace, name);
        match condition(&model, "Ready")["status"] == "True" {
            true => Ok(()),
            false => Err(format!("{model}\n{}", operator.log_tail())),
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
        let model = model(api, namespace, name);
        let planned = condition(&model, "Planned");
        match planned["reason"] == reason {
            true => Ok(planned["message"].as_str().unwrap_or_default().to_owned()),
            false => Err(format!("{model}\n{}", operator.log_tail())),
        }
    })
}

fn model(api: &ApiServer, namespace: &str, name: &str) -> Value {
    api.object(namespace, &format!("model/{name}"))
        .expect("a Model")
}
