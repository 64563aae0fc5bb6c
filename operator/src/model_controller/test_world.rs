//! Machines, Models and plans for tests: small ones that fit, to be changed field by field.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prima_crds::v1alpha1::model::{Model, ResolvedFile, ResolvedModel};
use prima_crds::v1alpha1::model_profile::ModelProfileSpec;
use prima_crds::v1alpha1::node_profile::{GpuProfile, LocalModel, NodeProfile};
use prima_crds::v1alpha1::ring_plan::{FileVersion, RingPlan};
use serde_json::json;

use super::api_keys::KnownApiKeys;
use super::decide::skeleton;
use super::dereference::World;
use super::resolve::Resolution;
use crate::cluster::world::{AgentState, Machine};

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
    }
}
