//! Machines, Models and plans for tests: small ones that fit, to be changed field by field; and an operator that knows them.

use std::collections::{BTreeMap, BTreeSet};
use std::future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use kube::Client;
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector;
use prima_crds::v1alpha1::model::{Model, ResolvedFile, ResolvedModel};
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::node_profile::{GpuProfile, LocalModel, NodeProfile};
use prima_crds::v1alpha1::ring_plan::{FileVersion, RingPlan};
use prima_kubernetes::HubTokens;
use prima_weights::{Hub, PUBLIC_HUB, Reach};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::api_keys::KnownApiKeys;
use super::decide::{Decision, DecisionKind, skeleton};
use super::dereference::World;
use super::planner::Planner;
use super::resolve::{HeaderReader, RETRY, Resolution};
use super::{Context, OURS, Question, Reached};
use crate::cluster::metrics::Metrics;
use crate::cluster::world::{AgentState, Machine, Stores};

pub const GIB: i64 = 1 << 30;

/// A model of 8 layers, and its file.
pub fn model() -> (Model, ResolvedModel) {
    let source = json!({"source": {"hostPath": {"path": "/models/m.gguf"}}});
    let model = Model::new("m", serde_json::from_value(source.clone()).unwrap());
    let resolved = serde_json::from_value(json!({
        "source": source["source"],
        "profile": {
            "sizeBytes": 8 * GIB, "layers": 8, "hiddenSize": 64, "vocabularySize": 256, "trainedContextLength": 512,
            "kvBytesPerPositionAndLayer": 256, "embeddingBytes": 4096,
            "layerWeights": [{"format": "Q4_K", "weights": 8 * GIB / 9 * 16, "bytes": 8 * GIB}],
            "outputWeights": [{"format": "Q4_K", "weights": 256, "bytes": 144}],
        },
        "version": {"headerSha256": "0"},
    }));
    (model, resolved.unwrap())
}

/// Has the Model have a draft model of 1 GiB in 2 layers, a file that `machines` have.
pub fn add_draft(world: &mut World, machines: &[&str]) {
    let source = json!({"hostPath": {"path": "/models/d.gguf"}});
    let model = Arc::get_mut(&mut world.model).unwrap();
    let speculation = json!({"draft": source});
    model.spec.speculation = serde_json::from_value(speculation).unwrap();
    let Resolution::Done(resolved) = &mut world.resolution else {
        panic!("the model is not resolved");
    };
    let version: FileVersion = serde_json::from_value(json!({"headerSha256": "d"})).unwrap();
    resolved.draft = Some(ResolvedFile {
        source: serde_json::from_value(source).unwrap(),
        version: version.clone(),
        profile: ModelProfileSpec {
            size_bytes: GIB,
            layers: 2,
            ..resolved.profile.clone()
        },
    });
    let their = |machine: &&mut Machine| machines.contains(&machine.name.as_str());
    for machine in world.machines.iter_mut().filter(their) {
        let status = profile(machine).status.as_mut().unwrap();
        status
            .agent
            .as_mut()
            .unwrap()
            .local_models
            .push(LocalModel {
                path: "/models/d.gguf".to_owned(),
                profile: None,
                version: Some(version.clone()),
                problem: None,
            });
    }
}

/// A plan in which one member has these layers and so much memory.
pub fn ring(windows: &[(i32, i32)], memory_bytes: i64, gpu_memory_bytes: i64) -> Arc<RingPlan> {
    let (model, resolved) = model();
    let windows: Vec<_> = windows
        .iter()
        .map(|(first, last)| json!({"first": first, "last": last}))
        .collect();
    let member = json!({
        "name": "desk", "address": "10.0.0.1:9200", "windows": windows,
        "memoryBytes": memory_bytes, "gpuMemoryBytes": gpu_memory_bytes,
    });
    let mut spec = skeleton(&model, &resolved);
    spec.members = vec![serde_json::from_value(member).unwrap()];
    Arc::new(RingPlan::new("m-1", spec))
}

/// The only plan of a Model of this name and uid. Its rank 0 says that it is ready, and serves HTTP at this port of this machine.
pub fn serving(model: &str, port: u16) -> Arc<RingPlan> {
    let mut plan = RingPlan::clone(&ring(&[(0, 4)], 0, 0));
    let owner =
        json!({"apiVersion": "prima.dev/v1alpha1", "kind": "Model", "name": model, "uid": model});
    let metadata = json!({
        "name": format!("{model}-1"), "namespace": "home", "uid": format!("plan-{model}"), "ownerReferences": [owner],
    });
    plan.metadata = serde_json::from_value(metadata).unwrap();
    plan.spec.members[0].address = "127.0.0.1:9200".to_owned();
    plan.spec.http_port = Some(port.into());
    let status = json!({"members": [{"name": "desk", "state": "Ready"}]});
    plan.status = Some(serde_json::from_value(status).unwrap());
    Arc::new(plan)
}

/// The Model `m` of that uid, which says this of whether it is ready, by the ring of this generation.
pub fn saying(status: &str, reason: &str, generation: i64) -> Arc<Model> {
    let (mut model, _) = model();
    model.metadata.namespace = Some("home".to_owned());
    model.metadata.uid = Some("m".to_owned());
    let ready = json!({
        "type": "Ready", "status": status, "reason": reason, "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let status = json!({"conditions": [ready], "planGeneration": generation});
    model.status = Some(serde_json::from_value(status).unwrap());
    Arc::new(model)
}

/// A machine known for long: measured, with the file, memory for the whole model, and a link to each other machine.
pub fn machine(name: &str) -> Machine {
    let yaml = include_str!("../../../crds/tests/node-profile.yaml");
    let mut profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
    profile.metadata.name = Some(name.to_owned());
    let status = profile.status.as_mut().unwrap();
    status.memory.available_bytes = 12 * GIB;
    let link = status.links.remove(0);
    let others = ["desk", "pi4", "laptop"].into_iter();
    status.links = others
        .filter(|other| *other != name)
        .map(|other| {
            let mut link = link.clone();
            link.to = other.to_owned();
            link
        })
        .collect();
    let agent = json!({
        "address": "10.0.0.1", "memory": "", "disk": "",
        "localModels": [{"path": "/models/m.gguf", "version": {"headerSha256": "0"}}],
    });
    status.agent = Some(serde_json::from_value(agent).unwrap());
    Machine {
        name: name.to_owned(),
        profile: Some(Arc::new(profile)),
        unreadable: None,
        labels: BTreeMap::new(),
        cordoned: false,
        leaving: false,
        agent: known_for(1000),
        heard: None,
    }
}

/// A machine whose agent has been known for this many seconds and still measures it.
pub fn unmeasured(name: &str, seconds: u64) -> Machine {
    Machine {
        profile: None,
        agent: known_for(seconds),
        ..machine(name)
    }
}

pub fn known_for(seconds: u64) -> AgentState {
    AgentState::Alive {
        known_for: Duration::from_secs(seconds),
    }
}

/// A GPU with this much memory left.
pub fn gpu(bytes: i64) -> GpuProfile {
    let gpu = json!({
        "name": "GPU", "backend": "CUDA",
        "measured": {
            "unifiedMemory": false, "totalBytes": bytes, "availableBytes": bytes, "readBytesPerSecond": 100_000_000_000_i64,
            "kvAppendBytesPerSecond": 10_000_000_000_i64, "toGpuBytesPerSecond": 10_000_000_000_i64, "fromGpuBytesPerSecond": 10_000_000_000_i64,
            "copyOverheadNanoseconds": 1000, "layerOverheadNanoseconds": 1000,
            "throughput": [{"format": "Q4_K", "decodeBytesPerSecond": 50_000_000_000_i64, "prefillFlopPerSecond": 1_000_000_000_000_i64}],
        },
    });
    serde_json::from_value(gpu).unwrap()
}

/// To be changed.
pub fn profile(machine: &mut Machine) -> &mut NodeProfile {
    Arc::make_mut(machine.profile.as_mut().unwrap())
}

pub fn world(machines: &[Machine], plans: &[Arc<RingPlan>]) -> World {
    let (model, resolved) = model();
    World {
        model: Arc::new(model),
        resolution: Resolution::Done(Box::new(resolved)),
        machines: machines.to_vec(),
        plans: plans.to_vec(),
        others: Vec::new(),
        models: Vec::new(),
        quotas: Vec::new(),
        api_keys: KnownApiKeys::NotAsked,
        unready: Arc::default(),
        lossy: BTreeSet::new(),
    }
}

/// Nothing else is said.
pub fn decision(kind: DecisionKind) -> Decision {
    Decision {
        kind,
        out: Vec::new(),
        apart: Vec::new(),
        awaited: Vec::new(),
        fails: false,
    }
}

/// What is written to an API server: what for, as `PATCH /apis/...`, and the body.
pub type Writes = Arc<Mutex<Vec<(String, Value)>>>;

/// A client of an API server that has nothing, takes all that is written, and cannot read Secrets.
pub async fn api_server() -> (Client, Writes) {
    api_server_with(Vec::new()).await
}

/// The same where it has these, by how their paths end.
pub async fn api_server_with(objects: Vec<(&'static str, Value)>) -> (Client, Writes) {
    let writes = Writes::default();
    let written = writes.clone();
    let answer = move |method: Method, uri: Uri, body: String| {
        let path = uri.path();
        let answer = match method {
            Method::GET if path.contains("/secrets/") => {
                (StatusCode::INTERNAL_SERVER_ERROR, String::new())
            }
            Method::GET => match objects.iter().find(|(end, _)| path.ends_with(end)) {
                Some((_, object)) => (StatusCode::OK, object.to_string()),
                None => {
                    let none = json!({
                        "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404,
                        "message": "there is none",
                    });
                    (StatusCode::NOT_FOUND, none.to_string())
                }
            },
            method => {
                let mut object: Value = serde_json::from_str(&body).unwrap();
                let write = (format!("{method} {path}"), object.clone());
                written.lock().unwrap().push(write);
                match method {
                    Method::DELETE => object = json!({"kind": "Status", "status": "Success"}),
                    // Of a status that is written, all of the object comes back.
                    _ if path.contains("/models/") => {
                        object["spec"] = serde_json::to_value(model().0.spec).unwrap();
                    }
                    _ => {}
                }
                (StatusCode::OK, object.to_string())
            }
        };
        future::ready(answer)
    };
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    let app = Router::new().fallback(answer);
    tokio::spawn(async move { axum::serve(server, app).await });
    (client(&format!("http://{address}")), writes)
}

/// A client of an API server that is not there.
pub fn no_api_server() -> Client {
    client("http://127.0.0.1:9")
}

/// A client of an API server that takes connections and never answers, as long as the listener is there.
pub async fn silent_api_server() -> (Client, TcpListener) {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    (client(&format!("http://{address}")), server)
}

fn client(api_server: &str) -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut config = kube::Config::new(api_server.parse().unwrap());
    config.root_cert = Some(Vec::new());
    Client::try_from(config).unwrap()
}

/// Of an operator that has just begun, and knows this plan.
pub fn context(client: Client, plan: &Arc<RingPlan>) -> Context {
    let (stores, _) = Stores::watch(&no_api_server(), ("prima", &[]), OURS);
    stores.add_plan(plan.clone());
    let (models, _) = reflector::store();
    let hub = Hub::new(PUBLIC_HUB, None).unwrap();
    let files = prima_weights::Client::new(RETRY, Reach::anywhere()).unwrap();
    let (headers, _) = HeaderReader::new(HubTokens::new(client.clone(), hub), files);
    let metrics = Arc::new(Metrics::new());
    let (planner, _) = Planner::new(Question::answer, metrics.clone());
    let (look_again, _) = mpsc::unbounded_channel();
    let reporter = Reporter {
        controller: "test".to_owned(),
        instance: None,
    };
    Context {
        recorder: Recorder::new(client.clone(), reporter),
        client,
        stores,
        models,
        metrics,
        cluster_domain: "cluster.local".to_owned(),
        headers,
        states: Default::default(),
        planner,
        reached: Reached::default(),
        standings: Default::default(),
        look_again,
        deciding: Default::default(),
    }
}
