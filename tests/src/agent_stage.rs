//! An API server and the Nodes of two machines, whose agents a test runs beside it: what agents and operator have written there.

use std::net::SocketAddr;

use prima_crds::definitions;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::api_server::{ApiServer, Backend};
use crate::operator::{self, Operator};
use crate::wait_for;

pub struct Stage {
    pub api: ApiServer,
    /// For the machines' files.
    pub folder: TempDir,
}

impl Stage {
    /// An API server with the definitions, a namespace for agents and the Nodes `one` and `two`.
    pub fn new(namespace: &str) -> Stage {
        let api = ApiServer::start(Backend::Etcd);
        for definition in definitions::all() {
            let yaml = definitions::yaml(&definition).expect("a definition as YAML");
            api.apply(&yaml)
                .expect("a definition that the API server takes");
        }
        api.wait_for_definitions();
        api.kubectl(&["create", "namespace", namespace])
            .expect("a namespace");
        Stage::with_nodes(api)
    }

    /// The same with all that the chart installs, so that an operator may run beside it.
    pub fn with_chart() -> Stage {
        let api = ApiServer::start(Backend::Etcd);
        operator::install_chart(&api);
        Stage::with_nodes(api)
    }

    fn with_nodes(api: ApiServer) -> Stage {
        for node in ["one", "two"] {
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
            api.apply(&node.to_string()).expect("a Node");
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        Stage { api, folder }
    }

    pub fn get(&self, args: &[&str]) -> Value {
        let args = [&["get", "-o", "json"], args].concat();
        let text = self.api.kubectl(&args).expect("an object");
        serde_json::from_str(&text).expect("JSON")
    }

    /// As [`ApiServer::object`].
    pub fn object(&self, what: &str) -> Value {
        let found = self.api.object("default", what);
        found.unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn profile(&self, node: &str) -> Value {
        self.object(&format!("nodeprofile/{node}"))
    }

    /// By which others know the agent of `node`.
    pub fn key(&self, node: &str) -> Value {
        self.profile(node)["status"]["agent"]["publicKeySha256"].clone()
    }

    /// The entry of `node` in the plan's status; null while there is none.
    pub fn member(&self, plan: &str, node: &str) -> Value {
        let plan = self.object(&format!("ringplan/{plan}"));
        let members = plan["status"]["members"].as_array().cloned();
        members
            .unwrap_or_default()
            .into_iter()
            .find(|member| member["name"] == node)
            .unwrap_or_default()
    }

    /// Waits until the member is in this state, and returns its entry.
    pub fn wait_for_state(&self, plan: &str, node: &str, state: &str) -> Value {
        wait_for(&format!("{node} in {plan} is {state}"), || {
            let member = self.member(plan, node);
            match member["state"] == state {
                true => Ok(member),
                false => Err(member),
            }
        })
    }

    /// Applies a Model in the namespace default.
    pub fn apply_model(&self, name: &str, spec: &Value) {
        let object = json!({
            "apiVersion": "prima.dev/v1alpha1",
            "kind": "Model",
            "metadata": {"name": name, "namespace": "default"},
            "spec": spec,
        });
        self.api.apply(&object.to_string()).expect("a Model");
    }

    /// Waits until the operator has made this plan and its rank 0 is ready; where that answers, and the plan's `spec`. (The Model itself is never
    /// ready: no Service may lead to an address of loopback.)
    pub fn wait_for_ring(&self, operator: &Operator, plan: &str) -> (SocketAddr, Value) {
        let spec = wait_for(&format!("the plan {plan}"), || {
            let found = self.api.object("default", &format!("ringplan/{plan}"));
            let found = found.map_err(|error| format!("{error}\n{}", operator.log_tail()))?;
            Ok::<_, String>(found["spec"].clone())
        });
        let rank0 = spec["members"][0]["name"].as_str().expect("a name");
        self.wait_for_state(plan, rank0, "Ready");
        (http_of(&spec), spec)
    }
}

/// Where rank 0 of the plan with this `spec` serves HTTP.
pub fn http_of(spec: &Value) -> SocketAddr {
    let address = spec["members"][0]["address"].as_str().expect("an address");
    let mut address: SocketAddr = address.parse().expect("IP:PORT");
    let port = spec["httpPort"].as_u64().expect("a port");
    address.set_port(u16::try_from(port).expect("a port"));
    address
}
