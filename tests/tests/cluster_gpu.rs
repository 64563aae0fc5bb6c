//! A node of a real cluster that gets a GPU and loses it, by the chart's agents for GPUs of AMD and Intel and their image: Vulkan on the processor
//! (lavapipe), which the agent takes for a fast one.

use std::net::SocketAddr;

use prima_tests::agent_stage::http_of;
use prima_tests::api_server::condition;
use prima_tests::cluster::{Cluster, ON_DISK, PrimaImages, chart};
use prima_tests::local_ring::running_members;
use prima_tests::software_gpu::{self, PROMPT, complete, gpu_layers};
use prima_tests::wait_for;
use serde_json::{Value, json};

#[test]
fn a_node_runs_layers_on_its_gpu_for_as_long_as_it_has_one() {
    let images = [PrimaImages::build(), PrimaImages::for_gpus()];
    let cluster = Cluster::start(1);
    for images in &images {
        cluster.import_prima(images);
    }
    cluster.put_model_on(0);
    cluster.install_prima(&chart(), &[]);
    cluster.wait_until_measured();

    // Without a GPU.
    let model = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "smollm2", "namespace": "default"},
        "spec": {"source": {"hostPath": {"path": ON_DISK}}, "contextLength": 512},
    });
    cluster.apply(&model.to_string()).expect("a Model");
    let (generation, plan) = wait_for_ring(&cluster, 0);
    assert_eq!(gpu_layers(&plan), 0, "{plan}");
    let expected = answer(&cluster, http_of(&plan));

    // With one. A ring that works would be left alone for ten minutes.
    suspend(&cluster, true);
    cluster.give_gpu(0, &cluster.gpu_in_pods());
    let enable = ["--set", "agent.gpus.dri.enabled=true"];
    cluster.upgrade_prima(&[&enable[..], &["--set-json", &extra_env("software")]].concat());
    wait_for("the operator knows of the GPU", || {
        let profile = object(&cluster, "nodeprofile/node-0")?;
        let mut gpus = profile["status"]["gpus"].as_array().into_iter().flatten();
        let has_gpu = gpus.any(|gpu| gpu["measured"].is_object());
        match has_gpu && condition(&profile, "Ready")["reason"] == "AgentRuns" {
            true => Ok(()),
            false => Err(profile["status"].to_string()),
        }
    });
    suspend(&cluster, false);
    let (generation, plan) = wait_for_ring(&cluster, generation);
    assert!(gpu_layers(&plan) > 0, "{plan}");
    let mut members = running_members();
    members.retain(|member| cluster.has_process(member.pid));
    assert!(
        members.len() == 1 && software_gpu::is_in(members[0].pid),
        "{members:?} of {plan}"
    );
    assert_eq!(answer(&cluster, http_of(&plan)), expected);

    // The agent is killed, and the next one finds none.
    cluster.upgrade_prima(&["--set-json", &extra_env("none")]);
    kubectl(
        &cluster,
        &[
            "delete",
            "pod",
            "-n",
            "prima",
            "-l",
            "app.kubernetes.io/component=agent",
            "--grace-period=1",
        ],
    );
    let (_, plan) = wait_for_ring(&cluster, generation);
    assert_eq!(gpu_layers(&plan), 0, "{plan}");
    assert_eq!(answer(&cluster, http_of(&plan)), expected);
}

/// The value of the chart that has agents use these GPUs.
fn extra_env(gpus: &str) -> String {
    let variable = json!([{"name": software_gpu::GPU, "value": gpus}]);
    format!("agent.extraEnv={variable}")
}

/// The first words of an answer, of whoever serves there.
fn answer(cluster: &Cluster, address: SocketAddr) -> String {
    let answer = cluster.within(|| complete(address, "smollm2", PROMPT));
    answer.unwrap_or_else(|error| panic!("{error}"))
}

fn suspend(cluster: &Cluster, suspended: bool) {
    let patch = json!({"spec": {"suspend": suspended}}).to_string();
    let patch = ["patch", "model", "smollm2", "--type=merge", "-p", &patch];
    kubectl(cluster, &patch);
    if suspended {
        wait_for("its ring has ended", || {
            let plans = object(cluster, "ringplans")?;
            match plans["items"].as_array().is_some_and(Vec::is_empty) {
                true => Ok(()),
                false => Err(plans.to_string()),
            }
        });
    }
}

/// Waits until the Model is ready by a later plan than that of generation `after`; the plan's generation and its `spec`.
fn wait_for_ring(cluster: &Cluster, after: u64) -> (u64, Value) {
    wait_for("the Model is ready by another plan", || {
        let model = object(cluster, "model/smollm2")?;
        let generation = model["status"]["planGeneration"].as_u64();
        let later = generation.filter(|generation| *generation > after);
        let is_ready = condition(&model, "Ready")["status"] == "True";
        match later.filter(|_| is_ready) {
            Some(later) => {
                let plan = object(cluster, &format!("ringplan/smollm2-{later}"))?;
                Ok((later, plan["spec"].clone()))
            }
            None => Err(model["status"].to_string()),
        }
    })
}

fn object(cluster: &Cluster, what: &str) -> Result<Value, String> {
    let found = cluster.kubectl(&["get", what, "-o", "json"]);
    let found = found.map_err(|error| error.to_string())?;
    serde_json::from_str(&found).map_err(|error| error.to_string())
}

fn kubectl(cluster: &Cluster, args: &[&str]) {
    let done = cluster.kubectl(args);
    done.unwrap_or_else(|error| panic!("{error}"));
}
