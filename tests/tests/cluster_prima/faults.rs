//! The operator, the agent of rank 0, a node and a link are lost in turn: no answer is wrong, and the Model answers again. An upgrade goes on
//! while the node is off.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use prima_tests::api_server::condition;
use prima_tests::local_ring::running_members;
use prima_tests::{timeout_argument, wait_for, wait_until};
use serde_json::Value;

use crate::harness::{NODES, Test, index_of};

/// 45 seconds, and a few for the operator to tell.
const WITHDRAWN_WITHIN: Duration = Duration::from_secs(50);

#[test]
fn it_answers_again_after_a_node_a_link_or_a_pod_is_gone() {
    let test = Test::start();
    test.install(&[]);
    test.cluster.wait_until_measured();
    test.limit_memory();
    test.apply_model("smollm2", &test.hub_source(), "");
    test.wait_until_ready("smollm2");
    let expected = test.first_answer_from(0, "smollm2");

    // The operator: no client notices.
    let operators = || {
        let operators = ["-l", "app.kubernetes.io/component=operator", "-o", "name"];
        test.kubectl(&[&["get", "pods", "-n", "prima"], &operators[..]].concat())
    };
    let before = operators();
    test.kubectl(&[
        "delete",
        "pod",
        "-n",
        "prima",
        "-l",
        "app.kubernetes.io/component=operator",
        "--wait=false",
    ]);
    let mut asked = 0;
    wait_until("the operator is back", || {
        assert_eq!(test.chat_from(0, "smollm2"), expected);
        asked += 1;
        let operator = test.json(&["get", "deployment", "prima-operator", "-n", "prima"]);
        let status = &operator["status"];
        let now = operators();
        let is_gone = |pod: &str| now.lines().all(|other| other != pod);
        asked > 1 && before.lines().all(is_gone) && status["readyReplicas"] == status["replicas"]
    });
    println!("operator's pods deleted: {asked} answers meanwhile");

    // The agent of rank 0.
    let rank0 = test.members("smollm2")[0].clone();
    let begun = Instant::now();
    test.delete_agent(&rank0);
    test.wait_until_answers("smollm2", &expected);
    println!(
        "agent pod of rank 0 deleted: answered again after {:.0} s",
        begun.elapsed().as_secs_f64()
    );

    // A node that loses its power, and comes back later; if there is a choice, the one of the operator that leads.
    let members = test.members("smollm2");
    let leader = test.leader();
    let lost = members.iter().find(|member| **member == leader);
    let lost = lost.or(members.last()).expect("a member").clone();
    let index = index_of(&lost);
    let begun = Instant::now();
    test.cluster.node(index).kill();
    let (withdrawn, said) = test.withdrawn_after("smollm2", Timestamp::now());
    assert!(withdrawn < WITHDRAWN_WITHIN, "{withdrawn:?}: {said}");
    test.wait_until_ready("smollm2");
    assert!(!test.members("smollm2").contains(&lost));
    let other = (0..NODES)
        .find(|node| *node != index)
        .expect("another node");
    test.wait_until_answers_from(other, "smollm2", &expected);
    println!(
        "{lost} of {members:?} killed (the operator on {leader} led): withdrawn after {:.0} s ({said}), answered again after {:.0} s",
        withdrawn.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    test.upgrade_others_than(&lost);
    test.wait_until_answers_from(other, "smollm2", &expected);
    test.wait_until_ready("smollm2");
    test.cluster.node(index).restart();
    test.kubectl(&[
        "wait",
        "--for=condition=Ready",
        &format!("node/{lost}"),
        &timeout_argument(),
    ]);

    // A link that is cut.
    let lost = test.members("smollm2").last().expect("a member").clone();
    let begun = Instant::now();
    test.cluster.node(index_of(&lost)).cut_link();
    let (withdrawn, said) = test.withdrawn_after("smollm2", Timestamp::now());
    assert!(withdrawn < WITHDRAWN_WITHIN, "{withdrawn:?}: {said}");
    test.wait_until_ready("smollm2");
    let other = (0..NODES)
        .find(|node| *node != index_of(&lost))
        .expect("another node");
    test.wait_until_answers_from(other, "smollm2", &expected);
    println!(
        "link of a member cut: withdrawn after {:.0} s ({said}), answered again after {:.0} s",
        withdrawn.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    test.cluster.node(index_of(&lost)).restore_link();

    // No ghost: what ran on the lost nodes ended, and only what the plan says runs.
    wait_until("one ring is left", || {
        let plans = test.json(&["get", "ringplans"]);
        plans["items"].as_array().map(Vec::len) == Some(1)
    });
    wait_until("the plan's members run, and no other", || {
        let mut members = test.members("smollm2");
        members.sort();
        let mut running = running_members();
        // Not those of a ring or a cluster beside this test.
        running.retain(|member| test.cluster.has_process(member.pid));
        let mut running: Vec<String> = running.into_iter().map(|member| member.name).collect();
        running.sort();
        running == members
    });
    // The agent's token lies there.
    let mut running = running_members();
    running.retain(|member| test.cluster.has_process(member.pid));
    for member in running {
        let arguments = std::fs::read(format!("/proc/{}/cmdline", member.pid));
        let arguments = String::from_utf8(arguments.expect("a process")).expect("UTF-8");
        let hides = arguments.contains("\0--hide\0/var/run/secrets\0");
        assert!(hides, "{member:?}: {arguments:?}");
    }
}

impl Test {
    /// Gives all nodes another agent, as documents say it for an upgrade while one of them is `off`, and waits for those that are on.
    fn upgrade_others_than(&self, off: &str) {
        let begun = Instant::now();
        let node = format!("node/{off}");
        let unknown = ["wait", "--for=condition=Ready=Unknown", &node];
        self.kubectl(&[&unknown[..], &[&timeout_argument()]].concat());
        self.cluster.upgrade_prima(&[
            "--set",
            "agent.updateStrategy.rollingUpdate.maxUnavailable=2,agent.podAnnotations.upgraded=yes",
        ]);
        let is_new = |pod: &Value| {
            pod["metadata"]["annotations"]["upgraded"] == "yes"
                && pod["spec"]["nodeName"] != off
                && condition(pod, "Ready")["status"] == "True"
        };
        wait_until("the agents of the nodes that are on are new", || {
            let agents = self.agents(&[]);
            agents.iter().filter(|pod| is_new(pod)).count() == NODES - 1
        });
        println!(
            "upgrade while {off} is off: the others' agents are new after {:.0} s",
            begun.elapsed().as_secs_f64()
        );
    }

    /// Waits until the Model is not ready any more. Returns how long after `fault` the operator withdrew its readiness, by its clock, which
    /// is this machine's, and why.
    fn withdrawn_after(&self, model: &str, fault: Timestamp) -> (Duration, String) {
        let ready = wait_for("readiness is withdrawn", || {
            let ready = condition(&self.json(&["get", "model", model]), "Ready");
            match ready["status"] == "False" {
                true => Ok(ready),
                false => Err(ready),
            }
        });
        let at = ready["lastTransitionTime"].as_str().expect("a time");
        let at: Timestamp = at.parse().expect("RFC 3339");
        // Whole seconds are kept of it; it may have been the end of that one.
        let after = at.as_millisecond() + 1000 - fault.as_millisecond();
        let after = Duration::from_millis(after.max(0).unsigned_abs());
        let said = ready["message"].as_str().expect("a message");
        (after, said.to_owned())
    }

    /// The node of the operator that leads. The Lease may name none, or a pod that is gone, until another one takes it.
    fn leader(&self) -> String {
        wait_for("an operator leads", || {
            let lease = self.json(&["get", "lease", "prima-operator", "-n", "prima"]);
            let pod = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
            let node = "jsonpath={.spec.nodeName}";
            let get = ["get", "pod", pod, "-n", "prima", "-o", node];
            self.cluster.kubectl(&get)
        })
    }
}
