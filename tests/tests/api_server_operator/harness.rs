//! An API server with prima's chart, machines that declare themselves, and what is asked of the objects there.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::declared_machines::{DeclaredMachines, FILE, made_up};
use prima_tests::operator::{Operator, install_chart};
use prima_tests::timeout_argument;
use serde_json::Value;

pub const MACHINES: [(&str, i64); 3] = [("desk", 6), ("laptop", 4), ("pi4", 3)];

pub struct Test {
    pub api: ApiServer,
}

impl Test {
    pub fn start(backend: Backend) -> Self {
        let mut api = ApiServer::start(backend);
        api.start_controller_manager();
        install_chart(&api);
        Self { api }
    }

    pub fn machines(&self, machines: &[(&str, i64)]) -> DeclaredMachines {
        DeclaredMachines::start(&self.api, machines, &made_up())
    }

    pub fn kubectl(&self, args: &[&str]) -> String {
        self.api
            .kubectl(args)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`ApiServer::object`].
    pub fn object(&self, what: &str) -> Value {
        let found = self.api.object("default", what);
        found.unwrap_or_else(|error| panic!("{error}"))
    }

    /// What a Model's status says of a machine.
    pub fn node(&self, model: &str, machine: &str) -> Option<Value> {
        let mut model = self.object(&format!("model/{model}"));
        let nodes = model["status"]["nodes"].as_array_mut()?;
        let at = nodes.iter().position(|node| node["name"] == machine)?;
        Some(nodes.swap_remove(at))
    }

    pub fn delete_model(&self, name: &str) {
        self.kubectl(&["delete", "model", name, &timeout_argument()]);
    }

    pub fn patch(&self, object: &str, patch: &str) {
        self.kubectl(&["patch", object, "--type=merge", "-p", patch]);
    }

    /// Names of objects that the operator made.
    pub fn names(&self, kind: &str) -> Vec<String> {
        let found = self.object(kind);
        let all = found["items"].as_array().expect("items").iter();
        let ours = all.map(|one| &one["metadata"]).filter(|metadata| {
            metadata["labels"]["app.kubernetes.io/managed-by"] == "prima-operator"
        });
        let names = ours.map(|metadata| metadata["name"].as_str().expect("a name").to_owned());
        names.collect()
    }

    /// Status, reason and message; empty where there is none yet.
    pub fn condition(&self, object: &str, kind: &str) -> (String, String, String) {
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
    pub fn seconds_until(&self, object: &str, kind: &str) -> i64 {
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

    pub fn wait_for(&self, object: &str, kind: &str, status: &str, operator: &Operator) {
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

    /// Requests so far for what the operator and the agents read and write, but for watches and Leases, by what was asked for. Those are left out
    /// that the API server makes itself: every three minutes it lists all Services.
    pub fn requests(&self) -> BTreeMap<String, f64> {
        const RESOURCES: [&str; 5] = [
            "models",
            "ringplans",
            "nodeprofiles",
            "services",
            "endpointslices",
        ];
        let mut requests: BTreeMap<String, f64> = BTreeMap::new();
        for line in self.kubectl(&["get", "--raw", "/metrics"]).lines() {
            let sign = match line.split_once('{') {
                Some(("apiserver_request_total", _)) => 1.0,
                Some(("apiserver_selfrequest_total", _)) => -1.0,
                _ => continue,
            };
            let label = |name: &str| {
                let (_, value) = line.split_once(&format!("{name}=\""))?;
                Some(value.split_once('"')?.0)
            };
            let (Some(resource), Some(verb)) = (label("resource"), label("verb")) else {
                continue;
            };
            let count = line.rsplit_once(' ').map(|(_, count)| count.parse::<f64>());
            if let Some(Ok(count)) = count
                && RESOURCES.contains(&resource)
                && verb != "WATCH"
            {
                *requests.entry(format!("{verb} {resource}")).or_default() += sign * count;
            }
        }
        requests
    }

    /// Every object that belongs to a Model, and itself, with its version.
    pub fn versions(&self) -> Vec<(String, String)> {
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

pub fn model(name: &str, spec: &str) -> String {
    let comma = if spec.is_empty() { "" } else { ", " };
    format!(
        "{{apiVersion: prima.dev/v1alpha1, kind: Model, metadata: {{name: {name}, namespace: default}}, spec: {{source: {{hostPath: {{path: {FILE}}}}}{comma}{spec}}}}}"
    )
}
