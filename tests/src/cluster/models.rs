//! Models of a test's cluster: they are applied there, waited for and asked.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Cluster;
use crate::api_server::condition;
use crate::{timeout_argument, wait_for};

pub const PROMPT: &str = "Name three colours.";
pub const MAX_TOKENS: usize = 16;
/// For an answer, where another try may follow, or where none may be needed: a connection may have begun too early, and lead to an agent that is gone.
pub const TRY: Duration = Duration::from_secs(20);

/// The `spec` of a pod to ask from, in YAML.
pub const TOOLS_POD: &str = "{terminationGracePeriodSeconds: 0, \
    containers: [{name: tools, image: localhost/tools, imagePullPolicy: IfNotPresent}]}";

/// Such a pod, POD, on every node.
const TOOLS: &str = "
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: tools, namespace: default}
spec:
  selector: {matchLabels: {app: tools}}
  template:
    metadata: {labels: {app: tools}}
    spec: POD
";

impl Cluster {
    /// Starts a pod on every node, to ask Models from.
    pub fn start_tools(&self) {
        self.apply(&TOOLS.replace("POD", TOOLS_POD))
            .expect("pods to ask from");
    }

    /// As [`ApiServer::object`](crate::api_server::ApiServer::object).
    pub fn object(&self, namespace: &str, what: &str) -> Value {
        let found = self.api_server.object(namespace, what);
        found.unwrap_or_else(|error| panic!("{error}"))
    }

    /// All objects of a kind, in the namespace, where the kind has one.
    pub fn objects(&self, namespace: &str, kind: &str) -> Vec<Value> {
        match self.object(namespace, kind)["items"].take() {
            Value::Array(items) => items,
            other => panic!("expected a list of {kind}, found {other}"),
        }
    }

    /// What `kubectl get` and the like show.
    pub fn json(&self, args: &[&str]) -> Value {
        let text = self.kubectl(&[args, &["-o", "json"]].concat());
        let text = text.unwrap_or_else(|error| panic!("{error}"));
        serde_json::from_str(&text).expect("JSON")
    }

    /// A Model in the namespace default: `source` and more fields of its `spec`, with a comma before them, are YAML.
    pub fn apply_model(&self, name: &str, source: &str, spec: &str) {
        let yaml = format!(
            "{{apiVersion: prima.dev/v1alpha1, kind: Model, metadata: {{name: {name}, namespace: default}}, spec: {{source: {{{source}}}, contextLength: 512{spec}}}}}"
        );
        self.apply(&yaml).expect("a Model");
    }

    /// Waits until it is gone, with all that was made for it.
    pub fn delete_model(&self, name: &str) {
        self.kubectl(&["delete", "model", name, &timeout_argument()])
            .unwrap_or_else(|error| panic!("{error}"));
    }

    /// Status and message of one of a Model's conditions.
    pub fn condition(&self, model: &str, kind: &str) -> (String, String) {
        let found = self.object("default", &format!("model/{model}"));
        let condition = condition(&found, kind);
        let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        (text("status"), text("message"))
    }

    /// Says how long it took, or panics with all that there is to read of it.
    pub fn wait_until_ready(&self, model: &str) {
        let begun = Instant::now();
        let object = format!("model/{model}");
        let timeout = timeout_argument();
        let wait = ["wait", "--for=condition=Ready", &object, &timeout];
        if let Err(error) = self.kubectl(&wait) {
            panic!("{error}\n{}", self.told(model));
        }
        println!("{model} ready after {:.0} s", begun.elapsed().as_secs_f64());
    }

    /// What there is to read about a Model that does not do what it should.
    pub fn told(&self, model: &str) -> String {
        let told = |args: &[&str]| {
            let told = self.kubectl(args);
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

    /// Asks the Model's Service from a pod on this node, one of the [tools](Self::start_tools).
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn ask_from(&self, node: usize, model: &str, patience: Duration) -> Result<String, String> {
        let body = json!({
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        });
        let url = format!("http://{model}.default/v1/chat/completions");
        let node = format!("node-{node}");
        let pods = self.objects("default", "pods");
        let mut pods = pods.iter();
        let pod = pods.find(|pod| {
            pod["metadata"]["labels"]["app"] == "tools" && pod["spec"]["nodeName"] == node
        });
        let pod = pod.and_then(|pod| pod["metadata"]["name"].as_str());
        let pod = pod.expect("a pod to ask from");
        let (body, seconds) = (body.to_string(), patience.as_secs().to_string());
        let wget = [
            "exec",
            pod,
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
        let answer = self.kubectl(&wget).map_err(|error| error.to_string())?;
        let answer: Value = serde_json::from_str(&answer).map_err(|error| error.to_string())?;
        let content = answer["choices"][0]["message"]["content"].as_str();
        content.map(str::to_owned).ok_or_else(|| answer.to_string())
    }

    /// Waits for an answer: a node's kube-proxy hears where a Service leads a moment after the Model is ready.
    pub fn first_answer_from(&self, node: usize, model: &str) -> String {
        wait_for(&format!("{model} answers on node {node}"), || {
            self.ask_from(node, model, TRY)
        })
    }
}
