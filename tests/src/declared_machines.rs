//! Machines that only declare themselves: they write what agents write (NodeProfile, Lease, their part of a plan's status), without running
//! layers. For tests of what the operator does with many machines, or with machines that nobody has here.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use prima_crds::v1alpha1::model_profile::{FormatWeights, ModelProfileSpec};
use prima_crds::v1alpha1::node_profile::{AgentProfile, LinkProfile, LocalModel, NodeProfile};
use prima_crds::v1alpha1::ring_plan::{FileVersion, MemberState, RingPlan};
use prima_crds::{AGENT_LEASE_PREFIX, LEAVING};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::api_server::ApiServer;
use crate::operator::NAMESPACE;

/// Gone when dropped: then nothing renews their Leases.
pub struct DeclaredMachines {
    runtime: Runtime,
    client: Client,
    renewal: Duration,
    silent: Arc<Mutex<HashSet<String>>>,
    leaving: Arc<Mutex<HashSet<String>>>,
    /// How far machines go with a plan; others go as far as they can.
    most: Arc<Mutex<BTreeMap<String, MemberState>>>,
    names: Vec<String>,
}

/// A file that they may have.
pub const FILE: &str = "/var/lib/prima/models/made-up.gguf";

/// Real Leases last 40 s. These last 600, the most that the operator believes, so that a slow test loses no machine. A machine that falls
/// silent first shortens its own to 5 s.
const RENEWAL: Duration = Duration::from_secs(5);
const LASTS_SECONDS: i32 = 600;
const SILENT_AFTER_SECONDS: i32 = 5;
/// After a word that the API server did not take.
const AGAIN: Duration = Duration::from_millis(200);
/// For every so many machines, each renews its Lease that much later again.
const TOGETHER: usize = 40;
const GIB: i64 = 1 << 30;

impl DeclaredMachines {
    /// Machines by name and gibibytes of memory, which all have the file of `model`.
    pub fn start(api: &ApiServer, machines: &[(&str, i64)], model: &LocalModel) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let client = runtime.block_on(client(api));
        let declared = Self {
            runtime,
            client,
            renewal: RENEWAL * (1 + machines.len() / TOGETHER) as u32,
            silent: Arc::default(),
            leaving: Arc::default(),
            most: Arc::default(),
            names: machines
                .iter()
                .map(|(name, _)| (*name).to_owned())
                .collect(),
        };
        for (index, (name, gibibytes)) in machines.iter().enumerate() {
            declared.renew(name);
            let profile = profile(&declared.names, index, *gibibytes, model);
            declared.runtime.block_on(declared.publish(&profile));
        }
        declared.follow_plans();
        declared
    }

    /// The machine is soon not heard of any more.
    pub fn silence(&self, name: &str) {
        self.silent.lock().unwrap().insert(name.to_owned());
    }

    /// The machine is heard of again.
    pub fn wake(&self, name: &str) {
        self.silent.lock().unwrap().remove(name);
    }

    /// The machine's agent is asked to end, or its successor has come.
    pub fn set_leaving(&self, name: &str, leaving: bool) {
        let mut all = self.leaving.lock().unwrap();
        match leaving {
            true => all.insert(name.to_owned()),
            false => all.remove(name),
        };
    }

    /// From now on the machine goes no further than this with any new plan.
    pub fn stop_at(&self, name: &str, state: MemberState) {
        self.most.lock().unwrap().insert(name.to_owned(), state);
    }

    /// The machine goes only so far with new plans, and says it of this one of the namespace `default`, whatever it said before.
    pub fn say_of(&self, name: &str, plan: &str, state: MemberState) {
        self.stop_at(name, state);
        let plans = Api::namespaced(self.client.clone(), "default");
        let said = self.runtime.block_on(say(&plans, plan, name, state));
        said.expect("the status of a plan");
    }

    /// Publishes a machine's profile anew, changed.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut NodeProfile)) {
        self.runtime.block_on(async {
            let api = Api::<NodeProfile>::all(self.client.clone());
            let mut profile = api.get(name).await.expect("its profile");
            profile.metadata.managed_fields = None;
            change(&mut profile);
            self.publish(&profile).await;
        });
    }

    async fn publish(&self, profile: &NodeProfile) {
        let api = Api::<NodeProfile>::all(self.client.clone());
        let name = profile.name_any();
        let object = json!({"apiVersion": "prima.dev/v1alpha1", "kind": "NodeProfile", "metadata": {"name": name}, "spec": {}});
        let as_agent = PatchParams::apply("prima-node-agent").force();
        api.patch(&name, &as_agent, &Patch::Apply(&object))
            .await
            .expect("a profile");
        let status = json!({"apiVersion": "prima.dev/v1alpha1", "kind": "NodeProfile", "metadata": {"name": name}, "status": profile.status});
        api.patch_status(&name, &as_agent, &Patch::Apply(&status))
            .await
            .expect("a profile's status");
    }

    fn renew(&self, name: &str) {
        let (client, silent, name) = (self.client.clone(), self.silent.clone(), name.to_owned());
        let (leaving, renewal) = (self.leaving.clone(), self.renewal);
        self.runtime.spawn(async move {
            let api = Api::<Lease>::namespaced(client, NAMESPACE);
            let mut lease = Lease::default();
            lease.metadata.name = Some(format!("{AGENT_LEASE_PREFIX}{name}"));
            let mut said_its_last = false;
            loop {
                let falls_silent = silent.lock().unwrap().contains(&name);
                if !(falls_silent && said_its_last) {
                    let lasts = match falls_silent {
                        true => SILENT_AFTER_SECONDS,
                        false => LASTS_SECONDS,
                    };
                    let leaves = leaving.lock().unwrap().contains(&name);
                    let annotation = (LEAVING.to_owned(), "true".to_owned());
                    lease.metadata.annotations = leaves.then(|| [annotation].into());
                    lease.spec = Some(LeaseSpec {
                        holder_identity: Some(name.clone()),
                        lease_duration_seconds: Some(lasts),
                        renew_time: Some(MicroTime(Timestamp::now())),
                        ..LeaseSpec::default()
                    });
                    let params = PatchParams::apply("prima-node-agent").force();
                    let renewed = api
                        .patch(&lease.name_any(), &params, &Patch::Apply(&lease))
                        .await;
                    // An API server that is being restarted is asked again.
                    said_its_last = falls_silent && renewed.is_ok();
                }
                tokio::time::sleep(renewal).await;
            }
        });
    }

    /// Every member of a plan whose machine is not silent says at once that it does what it should. It never takes back what it has said:
    /// a plan may be seen again late, when the machine goes no further with the next one.
    fn follow_plans(&self) {
        let (client, silent, most) = (self.client.clone(), self.silent.clone(), self.most.clone());
        let names = self.names.clone();
        self.runtime.spawn(async move {
            let plans = watcher(
                Api::<RingPlan>::all(client.clone()),
                watcher::Config::default(),
            );
            let mut plans = std::pin::pin!(plans.default_backoff().applied_objects());
            while let Some(plan) = plans.next().await {
                let Ok(plan) = plan else { continue };
                for (rank, member) in plan.spec.members.iter().enumerate() {
                    let name = &member.name;
                    let known = plan.status.iter().flat_map(|status| &status.members);
                    let state = match rank {
                        0 => MemberState::Ready,
                        _ => MemberState::Loaded,
                    };
                    let state = most
                        .lock()
                        .unwrap()
                        .get(name)
                        .map_or(state, |most| state.min(*most));
                    let said = known
                        .into_iter()
                        .any(|one| one.name == *name && one.state >= state);
                    if said || !names.contains(name) || silent.lock().unwrap().contains(name) {
                        continue;
                    }
                    let namespace = plan.namespace().unwrap_or_default();
                    let plans = Api::namespaced(client.clone(), &namespace);
                    // An API server that is busy, or being restarted, is asked again: nobody may tell of this plan once more. One that is gone by now
                    // needs no status.
                    while let Err(error) = say(&plans, &plan.name_any(), name, state).await {
                        let is_gone =
                            matches!(&error, kube::Error::Api(status) if status.is_not_found());
                        if is_gone || silent.lock().unwrap().contains(name) {
                            break;
                        }
                        tokio::time::sleep(AGAIN).await;
                    }
                }
            }
        });
    }
}

/// Writes a machine's part of a plan's status.
async fn say(
    plans: &Api<RingPlan>,
    plan: &str,
    machine: &str,
    state: MemberState,
) -> kube::Result<RingPlan> {
    let status = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "RingPlan",
        "metadata": {"name": plan},
        "status": {"members": [{"name": machine, "state": state, "message": "declared"}]},
    });
    let manager = PatchParams::apply(&format!("prima-node-agent-{machine}")).force();
    plans
        .patch_status(plan, &manager, &Patch::Apply(&status))
        .await
}

/// A model of 7.5 GB in 32 layers.
pub fn made_up() -> LocalModel {
    let weights = |format: &str, bytes: i64| FormatWeights {
        format: format.to_owned(),
        weights: bytes * 16 / 9,
        bytes,
    };
    LocalModel {
        path: FILE.to_owned(),
        profile: Some(ModelProfileSpec {
            architecture: "llama".to_owned(),
            parts: Vec::new(),
            size_bytes: 7_500_000_000,
            layers: 32,
            hidden_size: 4096,
            vocabulary_size: 128_256,
            vocabulary_marks: Vec::new(),
            trained_context_length: 8192,
            kv_bytes_per_position_and_layer: 4096,
            quantized_kv_bytes_per_position_and_layer: 2176,
            latent_heads: 0,
            windowed_layers: 0,
            attention_window: 0,
            full_attention_layers: Vec::new(),
            layer_weights: vec![weights("Q4_K", 6_500_000_000)],
            expert_weights: Vec::new(),
            largest_part_bytes: 0,
            experts: 0,
            experts_per_token: 0,
            output_weights: vec![weights("Q6_K", 500_000_000)],
            embedding_bytes: 500_000_000,
        }),
        version: Some(FileVersion {
            header_sha256: "5".repeat(64),
            ..FileVersion::default()
        }),
        problem: None,
    }
}

/// A client as the administrator.
pub async fn client(api: &ApiServer) -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::read_from(api.kubeconfig()).expect("a kubeconfig");
    let options = KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await;
    Client::try_from(config.expect("a configuration")).expect("a client")
}

fn profile(names: &[String], index: usize, gibibytes: i64, model: &LocalModel) -> NodeProfile {
    let yaml = include_str!("../../crds/tests/node-profile.yaml");
    let mut profile = NodeProfile::from_yaml("node-profile.yaml", yaml).expect("a profile");
    profile.metadata.name = Some(names[index].clone());
    let status = profile.status.as_mut().expect("a status");
    status.memory.total_bytes = gibibytes * GIB;
    status.memory.available_bytes = gibibytes * GIB;
    let template = status.cpu.throughput[0].clone();
    status.cpu.throughput = ["Q4_K", "Q6_K", "F32", "Q4_1", "Q8_0"]
        .map(|format| {
            let mut throughput = template.clone();
            throughput.format = format.to_owned();
            throughput
        })
        .to_vec();
    let link = status.links[0].clone();
    status.links = names
        .iter()
        .filter(|name| **name != names[index])
        .map(|name| LinkProfile {
            to: name.clone(),
            ..link.clone()
        })
        .collect();
    status.agent = Some(AgentProfile {
        address: format!("10.1.{}.{}", index / 250, index % 250 + 1),
        public_key_sha256: Some(format!("{:064x}", index + 1)),
        memory: format!("{gibibytes} GiB"),
        disk: "3.1 GB/s".to_owned(),
        gpus: None,
        local_models: vec![model.clone()],
    });
    profile
}
