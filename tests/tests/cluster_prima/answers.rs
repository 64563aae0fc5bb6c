//! What people do with a cluster: they install prima, apply Models, ask them, upgrade, drain a node and uninstall.

use std::fs;
use std::net::SocketAddr;

use prima_tests::cluster::{MAX_TOKENS, ON_DISK, PROMPT, TRY, chart, chart_to_upgrade_from};
use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::{Endpoint as _, assets, http, timeout_argument, wait_until};

use crate::harness::{HEADER, NODES, Test};
use crate::upgrades::Runs;

#[test]
fn models_from_hub_and_disk_answer_as_on_one_machine() {
    let test = Test::start();
    let before = chart_to_upgrade_from();
    let before = before
        .as_ref()
        .map(|folder| folder.path().join("charts/prima"));
    test.cluster.enforcing_policies(|| {
        test.install_chart(&before.unwrap_or_else(chart), &[
            "--set-json",
            r#"networkPolicy.apiFrom=[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}]"#,
        ]);
        test.cluster.wait_until_measured();
    });
    test.limit_memory();

    test.cluster.apply_model("smollm2", &test.hub_source(), "");
    test.cluster.wait_until_ready("smollm2");
    test.strangers_are_kept_out("smollm2");
    let model = test.cluster.json(&["get", "model", "smollm2"]);
    // Two are enough. The third takes part if one of them was measured as slow, which may happen, as they share processors.
    let ring_nodes = model["status"]["ringNodes"].as_u64();
    assert!(
        ring_nodes == Some(2) || ring_nodes == Some(3),
        "{}",
        model["status"]
    );
    let here = LocalRing::builder().model(&smollm2()).members(1).start();
    let expected = here.chat(PROMPT, MAX_TOKENS);
    here.stop();
    for node in 0..NODES {
        assert_eq!(
            test.cluster.first_answer_from(node, "smollm2"),
            expected,
            "from node {node}"
        );
    }
    test.openai_client_answers("smollm2", &expected);

    // Each node fetched its part and, to know it, the header; one that is not in the ring fetched nothing.
    let whole = fs::metadata(smollm2()).expect("a model").len();
    let sent = test.sent_by_node();
    for node in model["status"]["nodes"].as_array().expect("nodes") {
        let name = node["name"].as_str().expect("a name");
        let bytes = sent
            .iter()
            .find(|(node, _)| node == name)
            .map_or(0, |(_, bytes)| *bytes);
        match node["totalBytes"].as_u64() {
            Some(total) => {
                assert_eq!(node["fetchedBytes"], node["totalBytes"]);
                assert!(
                    (total..total + HEADER).contains(&bytes),
                    "{name}: {bytes} for {total}"
                );
                assert!(total < whole, "{total} of {whole}");
            }
            None => assert_eq!(bytes, 0, "{name} is not in the ring"),
        }
    }

    let first = test.plans("smollm2");

    // What people look at, as charts/docs/running.md shows it.
    println!(
        "{}",
        test.kubectl(&["get", "models,nodeprofiles,ringplans"])
    );
    println!("{}", test.kubectl(&["describe", "model", "smollm2"]));

    test.cluster.delete_model("smollm2");
    wait_until("nothing is left", || {
        test.kubectl(&[
            "get",
            "ringplans,services,endpointslices",
            "-o",
            "name",
            "-l",
            "app.kubernetes.io/managed-by=prima-operator",
        ])
        .is_empty()
    });

    // The same file on the disks of two nodes.
    for node in 0..2 {
        test.cluster.put_model_on(node);
    }
    let source = format!("hostPath: {{path: {ON_DISK}}}");
    test.cluster.apply_model("from-disk", &source, "");
    test.cluster.wait_until_ready("from-disk");
    assert_eq!(test.cluster.first_answer_from(2, "from-disk"), expected);
    let model = test.cluster.json(&["get", "model", "from-disk"]);
    let nodes = model["status"]["nodes"].as_array().expect("nodes");
    let third = nodes
        .iter()
        .find(|node| node["name"] == "node-2")
        .expect("a node");
    assert!(
        third["why"]
            .as_str()
            .expect("a reason")
            .contains("it has no file"),
        "{third}"
    );

    // The caches are still there.
    let mut runs = Runs::default();
    runs.note(&first);
    test.hub.clear();
    test.cluster.apply_model("smollm2", &test.hub_source(), "");
    test.cluster.wait_until_ready("smollm2");
    let new = runs.note(&test.plans("smollm2"));
    test.assert_fetched(&new, whole);

    // What all machines have on their disks, with memory for two rings, need not stand still in an upgrade.
    test.cluster.put_model_on(2);
    test.lift_memory_limit();

    // From the chart before, while Models run. The policies follow the pods.
    test.hub.clear();
    test.cluster.enforcing_policies(|| {
        let new = test.upgrade(&mut runs, &expected);
        test.assert_fetched(&new, whole);

        // The chart's own test asks the operator and the Model.
        let timeout = timeout_argument();
        let said = test.helm(&["test", "prima", "--namespace", "prima", &timeout]);
        assert!(said.contains("Succeeded"), "{said}");

        test.drain_under_load("from-disk");
    });

    // Uninstalled, Models stay as they are, and what answered is gone.
    test.helm(&["uninstall", "prima", "--namespace", "prima", "--wait"]);
    let left = test.kubectl(&["get", "models", "-o", "name"]);
    assert_eq!(left, "model.prima.dev/from-disk\nmodel.prima.dev/smollm2\n");
    wait_until("the agents' pods are gone", || test.agents().is_empty());
    assert!(test.cluster.ask_from(0, "smollm2", TRY).is_err());
}

impl Test {
    /// OpenAI's client, through a port that kubectl forwards to rank 0.
    fn openai_client_answers(&self, model: &str, expected: &str) {
        let slice = self
            .cluster
            .json(&["get", "endpointslice", &format!("{model}-ipv4")]);
        let node = slice["endpoints"][0]["nodeName"].as_str().expect("a node");
        let port = slice["ports"][0]["port"].as_u64().expect("a port") as u16;
        let on_node = format!("spec.nodeName={node}");
        let pods = [
            "get",
            "pods",
            "-n",
            "prima",
            "-l",
            "app.kubernetes.io/component=agent",
            "-o",
            "name",
            "--field-selector",
        ];
        let pod = self.kubectl(&[&pods[..], &[&on_node]].concat());
        let forward = self.cluster.port_forward("prima", pod.trim(), port);
        let address: SocketAddr = forward.address;
        let models = self
            .cluster
            .within(|| http::get(address, "/v1/models"))
            .expect("an answer");
        assert_eq!(models.json()["data"][0]["id"], model);
        let python = assets::path("venv/bin/python").expect("Python");
        let script = format!(
            "import openai\nclient = openai.OpenAI(base_url='http://{address}/v1', api_key='none')\nanswer = client.chat.completions.create(model='{model}', messages=[{{'role': 'user', 'content': '{PROMPT}'}}], max_tokens={MAX_TOKENS}, temperature=0)\nprint(answer.choices[0].message.content, end='')"
        );
        let mut command = self.cluster.command(python);
        command.args(["-c", &script]);
        let output = command.output().expect("Python");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            printed,
            expected,
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
