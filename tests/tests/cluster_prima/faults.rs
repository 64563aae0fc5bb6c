//! The operator, the agent of rank 0, a node and a link are lost in turn: no answer is wrong, and the Model answers again. An upgrade goes on
//! while the node is off.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use prima_tests::api_server::condition;
use prima_tests::cluster::Watch;
use prima_tests::local_ring::running_members;
use prima_tests::stopwatch::{Stopwatch, without_waits};
use prima_tests::{PATIENCE, timeout_argument, wait_for, wait_until};
use serde_json::Value;

use crate::harness::{NODES, Test, index_of};

/// Five seconds are promised, while an operator leads or waits to. One more since only whole seconds are known; the rest is for a busy machine.
const WITHDRAWN_WITHIN: Duration = Duration::from_secs(12);

#[test]
fn it_answers_again_after_a_node_a_link_or_a_pod_is_gone() {
    let test = Test::start();
    test.install(&[]);
    test.cluster.wait_until_measured();
    test.limit_memory();
    test.cluster.apply_model("smollm2", &test.hub_source(), "");
    test.cluster.wait_until_ready("smollm2");
    let expected = test.cluster.first_answer_from(0, "smollm2");

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
        match test.cluster.ask_from(0, "smollm2", PATIENCE) {
            Ok(answer) => {
                assert_eq!(answer, expected);
                asked += 1;
            }
            // Whoever leads sends nobody to a ring that gets no processor for seconds.
            Err(error) => {
                let what = format!("it is told that the ring stood still: {error}");
                wait_until(&what, || test.stood_still("smollm2"));
            }
        }
        let now = operators();
        let is_gone = |pod: &str| now.lines().all(|other| other != pod);
        asked > 1 && before.lines().all(is_gone) && test.operators_are_ready()
    });
    println!("operator's pods deleted: {asked} answers meanwhile");

    // The agent of rank 0.
    let rank0 = test.members("smollm2")[0].clone();
    let begun = Instant::now();
    test.delete_agent(&rank0);
    test.wait_until_answers("smollm2", &expected);
    test.cluster.wait_until_ready("smollm2");
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
    let watch = test.watch("smollm2");
    let begun = Instant::now();
    test.cluster.node(index).kill();
    let (withdrawn, said) = test.withdrawn_and_ready_without(&lost, "smollm2", &watch);
    assert!(withdrawn < WITHDRAWN_WITHIN, "{withdrawn:?}: {said}");
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
    test.cluster.wait_until_ready("smollm2");
    test.cluster.node(index).restart();
    test.kubectl(&[
        "wait",
        "--for=condition=Ready",
        &format!("node/{lost}"),
        &timeout_argument(),
    ]);

    // A link that is cut. If it is that of the operator that leads, the other one tells.
    wait_until("two operators are there", || test.operators_are_ready());
    let lost = test.members("smollm2").last().expect("a member").clone();
    let watch = test.watch("smollm2");
    let begun = Instant::now();
    test.cluster.node(index_of(&lost)).cut_link();
    let (withdrawn, said) = test.withdrawn_and_ready_without(&lost, "smollm2", &watch);
    assert!(withdrawn < WITHDRAWN_WITHIN, "{withdrawn:?}: {said}");
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
        test.cluster.objects("default", "ringplans").len() == 1
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
    /// One that leads, and one that waits to.
    fn operators_are_ready(&self) -> bool {
        let operator = self
            .cluster
            .json(&["get", "deployment", "prima-operator", "-n", "prima"]);
        let status = &operator["status"];
        status["readyReplicas"] == status["replicas"]
    }

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
            let agents = self.agents();
            agents.iter().filter(|pod| is_new(pod)).count() == NODES - 1
        });
        println!(
            "upgrade while {off} is off: the others' agents are new after {:.0} s",
            begun.elapsed().as_secs_f64()
        );
    }

    /// Follows what a Model says of its ring ([`said_of_ring`]).
    fn watch(&self, model: &str) -> Watch {
        let name = format!("metadata.name={model}");
        let said =
            r#"jsonpath={.status.planGeneration} {.status.conditions[?(@.type=="Ready")]}{"\n"}"#;
        let watch = ["models", "--field-selector", &name, "-o", said];
        self.cluster.watch(&watch)
    }

    /// Waits until the Model is ready without a node that is lost from now on, and was not when the watch began. Returns when the operator withdrew
    /// the readiness of the ring with that node, by its clock, which is this machine's, and why. A ring that stands still on a busy machine may be
    /// withdrawn before, and be ready once more until it is known that a node is lost: the last time counts.
    fn withdrawn_and_ready_without(
        &self,
        lost: &str,
        model: &str,
        watch: &Watch,
    ) -> (Duration, String) {
        let (fault, clock) = (Timestamp::now(), Stopwatch::start());
        let said = || said_of_ring(&watch.printed());
        // Of the newest plan with that node.
        let mut newest = said().first().expect("a ring").0;
        // When it was looked, and for how long programs had waited by then.
        let mut looks: Vec<(Timestamp, Duration)> = Vec::new();
        let ready_by = wait_for(&format!("{model} is ready without {lost}"), || {
            let found = self.cluster.object("default", &format!("model/{model}"));
            looks.push((Timestamp::now(), clock.waited()));
            let ready = condition(&found, "Ready");
            let members = self.members_of(model, &found);
            let members = members.ok_or("the plan that it names is gone")?;
            let generation = found["status"]["planGeneration"].as_i64();
            let generation = generation.ok_or("it names no plan")?;
            if members.iter().any(|member| member == lost) {
                newest = newest.max(generation);
            } else if ready["status"] == "True" {
                return Ok(generation);
            }
            Err(format!("on {members:?}: {ready}"))
        });
        wait_until("the watch has come as far", || {
            let mut said = said().into_iter();
            said.any(|(generation, ready)| generation == ready_by && ready["status"] == "True")
        });
        let said = said();
        let ready = last_withdrawn(&said, newest);
        let ready = ready.unwrap_or_else(|| panic!("its readiness was not withdrawn: {said:?}"));
        let at = ready["lastTransitionTime"].as_str().expect("a time");
        let at: Timestamp = at.parse().expect("RFC 3339");
        // Whole seconds are kept of it; it may have been the end of that one.
        let at = at.as_millisecond() + 1000;
        let after = Duration::from_millis((at - fault.as_millisecond()).max(0).unsigned_abs());
        let mut looks = looks.into_iter();
        let look = looks.find(|(look, _)| look.as_millisecond() >= at);
        let waited = look.map_or_else(|| clock.waited(), |(_, waited)| waited);
        let why = ready["message"].as_str().expect("a message");
        (without_waits(after, waited), why.to_owned())
    }

    /// Whether an operator told that rank 0 of a ready ring did not answer, or said itself that the ring was not ready.
    fn stood_still(&self, model: &str) -> bool {
        let events = self.cluster.json(&["get", "events.events.k8s.io"]);
        let mut events = events["items"].as_array().expect("events").iter();
        events.any(|event| {
            let reasons = ["NotReached", "Connecting"];
            event["regarding"]["name"] == model
                && reasons.iter().any(|reason| event["reason"] == *reason)
        })
    }

    /// The node of the operator that leads. The Lease may name none, or a pod that is gone, until another one takes it.
    fn leader(&self) -> String {
        wait_for("an operator leads", || {
            let lease = self
                .cluster
                .json(&["get", "lease", "prima-operator", "-n", "prima"]);
            let pod = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
            let node = "jsonpath={.spec.nodeName}";
            let get = ["get", "pod", pod, "-n", "prima", "-o", node];
            self.cluster.kubectl(&get)
        })
    }
}

/// Of each time that a Model has said something: the generation of its plan, and the condition `Ready`. `printed`: by what [`Test::watch`] follows.
fn said_of_ring(printed: &str) -> Vec<(i64, Value)> {
    let said = printed.lines().filter_map(|line| {
        let (generation, ready) = line.split_once(' ')?;
        Some((generation.parse().ok()?, serde_json::from_str(ready).ok()?))
    });
    said.collect()
}

/// What was said when a ring of a plan up to this generation ceased to be ready for the last time. Before all that was said, there was one.
fn last_withdrawn(said: &[(i64, Value)], newest: i64) -> Option<&Value> {
    let (mut was_ready, mut withdrawn) = (true, None);
    for (generation, ready) in said {
        match ready["status"].as_str() {
            Some("True") => was_ready = *generation <= newest,
            // It may name the next plan already.
            Some("False") if was_ready => (was_ready, withdrawn) = (false, Some(ready)),
            _ => {}
        }
    }
    withdrawn
}
