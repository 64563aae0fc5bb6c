//! Downloads whose hub breaks off or wants a licence accepted first, and disks without room for them.

use std::fs;
use std::path::Path;

use prima_test_hub::Cut;
use prima_tests::api_server::condition;
use prima_tests::local_ring::smollm2;
use prima_tests::wait_until;
use sha2::{Digest, Sha256};

use crate::harness::{HEADER, Test};

#[test]
fn a_download_survives_its_hub_and_a_full_disk() {
    let test = Test::start();
    test.install(&[]);
    test.cluster.wait_until_measured();
    test.limit_memory();

    // Every answer ends early, for a while.
    test.hub.control(|hub| {
        hub.cut = Some(Cut {
            after_bytes: 3 << 20,
            times: 12,
        })
    });
    test.cluster.apply_model("smollm2", &test.hub_source(), "");
    test.cluster.wait_until_ready("smollm2");
    let whole = fs::metadata(smollm2()).expect("a model").len();
    let sent: u64 = test.sent_by_node().iter().map(|(_, bytes)| bytes).sum();
    assert!(
        sent < whole + 3 * HEADER,
        "{sent} of {whole}: what was there is not fetched again"
    );

    // A repository that asks for its licence to be accepted first says so where people look.
    test.hub
        .control(|hub| hub.gated = vec!["people/models".to_owned()]);
    test.cluster.apply_model("gated", &test.hub_source(), "");
    wait_until("it says why", || {
        let (status, message) = test.cluster.condition("gated", "Ready");
        status == "False" && message.contains("licence")
    });
    test.hub.control(|hub| hub.gated.clear());
    test.cluster.wait_until_ready("gated");
    for model in ["smollm2", "gated"] {
        test.cluster.delete_model(model);
    }

    // A disk without room for a node's part, from an address that is no hub.
    let full = 0;
    test.cluster
        .node(full)
        .mount_disk("lib/prima/cache", HEADER + (8 << 20));
    test.delete_agent("node-0");
    wait_until("its next agent has told of the disk", || {
        let pods = test.agents();
        let mut pods = pods.iter();
        pods.any(|pod| {
            pod["spec"]["nodeName"] == "node-0" && condition(pod, "Ready")["status"] == "True"
        })
    });
    let file = format!("{}/_files/people/models/smollm2.gguf", test.hub.endpoint());
    let source = format!("url: {{url: '{file}', sha256: {}}}", sha256(&smollm2()));
    test.cluster
        .apply_model("by-url", &source, ", rank0: node-0");
    wait_until("it says that the disk is full", || {
        let (status, message) = test.cluster.condition("by-url", "Planned");
        status == "False" && message.contains("node-0") && message.contains("the disk has room for")
    });
    let on_any = r#"{"spec":{"rank0":null}}"#;
    test.kubectl(&["patch", "model/by-url", "--type=merge", "-p", on_any]);
    test.cluster.wait_until_ready("by-url");
    assert!(!test.members("by-url").contains(&"node-0".to_owned()));
    let nodes = test.cluster.json(&["get", "model", "by-url"])["status"]["nodes"].clone();
    let nodes = nodes.as_array().expect("nodes");
    let out = nodes.iter().find(|node| node["name"] == "node-0");
    let why = out.expect("the node with the full disk")["why"].clone();
    assert!(
        why.as_str()
            .is_some_and(|why| why.contains("the disk has room for")),
        "{why}"
    );
    test.cluster.first_answer_from(1, "by-url");
}

fn sha256(file: &Path) -> String {
    format!("{:x}", Sha256::digest(fs::read(file).expect("a file")))
}
