//! Agents and the operator beside a real API server, where a machine gets a GPU and loses it: Vulkan on the processor (lavapipe), which its agent
//! takes for a fast one.

use prima_tests::agent_stage::Stage;
use prima_tests::api_server::condition;
use prima_tests::local_ring::smollm2;
use prima_tests::node_agent::{AgentMachine, NodeAgent};
use prima_tests::operator::{self, Operator};
use prima_tests::software_gpu::{self, GPU, PROMPT, SOFTWARE, complete, gpu_layers};
use prima_tests::{wait_for, wait_until};
use serde_json::{Value, json};

#[test]
fn a_model_runs_on_a_gpu_for_as_long_as_there_is_one() {
    let stage = Stage::with_chart();
    let machines = ["one", "two"].map(|node| AgentMachine::new(node, stage.folder.path()));
    let start = |machine: &AgentMachine, gpu: &str| -> NodeAgent {
        let namespace = operator::NAMESPACE;
        let mut agent = machine.start_agent_with(&stage.api, namespace, &[(GPU, gpu)]);
        agent.wait_until_ready();
        agent
    };
    let answer = |address| {
        let answer = complete(address, "smollm2", PROMPT);
        answer.unwrap_or_else(|error| panic!("{error}"))
    };
    let suspend = |suspended: bool| {
        let patch = json!({"spec": {"suspend": suspended}}).to_string();
        let patch = ["patch", "model", "smollm2", "--type=merge", "-p", &patch];
        stage.api.kubectl(&patch).expect("a patch");
    };

    // Without a GPU.
    let [one, _two] = machines.each_ref().map(|machine| start(machine, "none"));
    let operator = Operator::start(&stage.api, "one");
    let file = smollm2().canonicalize().expect("an absolute path");
    let spec = json!({"source": {"hostPath": {"path": file}}, "contextLength": 512});
    stage.apply_model("smollm2", &spec);
    let (address, plan) = stage.wait_for_ring(&operator, "smollm2-1");
    assert_eq!(gpu_layers(&plan), 0, "{plan}");
    let expected = answer(address);

    // With one. A ring that works would be left alone for ten minutes.
    suspend(true);
    wait_until("its ring has ended", || one.members().is_empty());
    assert!(one.terminate().success());
    machines[0].declare_gpu(&software_gpu::name());
    let one = start(&machines[0], SOFTWARE);
    wait_for("the operator knows of the GPU", || {
        let profile = stage.profile("one");
        match has_gpu(&profile) && condition(&profile, "Ready")["reason"] == "AgentRuns" {
            true => Ok(()),
            false => Err(profile),
        }
    });
    suspend(false);
    let (address, plan) = stage.wait_for_ring(&operator, "smollm2-2");
    assert!(gpu_layers(&plan) > 0, "{plan}");
    let members = one.members();
    assert!(
        members.len() == 1 && software_gpu::is_in(members[0]),
        "{members:?} of {plan}"
    );
    assert_eq!(answer(address), expected);

    // The machine is switched off, and comes back without it.
    drop(one);
    let _one = start(&machines[0], "none");
    let (address, plan) = stage.wait_for_ring(&operator, "smollm2-3");
    assert_eq!(gpu_layers(&plan), 0, "{plan}");
    assert_eq!(answer(address), expected);
    assert!(!has_gpu(&stage.profile("one")));
}

/// Whether layers may run on a GPU of this machine.
fn has_gpu(profile: &Value) -> bool {
    let mut gpus = profile["status"]["gpus"].as_array().into_iter().flatten();
    gpus.any(|gpu| gpu["measured"].is_object())
}
