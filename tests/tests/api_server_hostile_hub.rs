//! Model servers that are slow, limit rates, lie about sizes, send what no model has, or are none of anybody's business: the operator goes on.

use std::fs;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::Duration;

use prima_test_hub::{Control, Fail, TestHub};
use prima_tests::api_server::{self, ApiServer, Backend};
use prima_tests::declared_machines::{DeclaredMachines, FILE, made_up};
use prima_tests::operator::{Operator, install_chart};
use prima_tests::stopwatch::Stopwatch;
use prima_tests::wait_until;
use serde_json::{Value, json};

/// Promises to users.
const OPERATOR_BYTES: u64 = 300 << 20;
const FAILOVER: Duration = Duration::from_secs(45);

#[test]
fn hostile_servers_stop_neither_operator_nor_models() {
    let mut api = ApiServer::start(Backend::Etcd);
    api.start_controller_manager();
    install_chart(&api);
    let machines = [("desk", 9), ("laptop", 9), ("pi4", 9)];
    let machines = DeclaredMachines::start(&api, &machines, &made_up());
    let operator = Operator::start(&api, "one");
    apply(&api, "good", json!({"hostPath": {"path": FILE}}));
    wait_until("a ring answers", || {
        condition(&api, "good", "Ready")["status"] == "True"
    });

    let folder = tempfile::tempdir().expect("a folder");
    let repo = folder.path().join("people/models");
    fs::create_dir_all(&repo).expect("a folder");
    fs::write(repo.join("huge.gguf"), many_short_texts(31 << 20)).expect("a file");
    fs::write(repo.join("larger.gguf"), many_short_texts(40 << 20)).expect("a file");
    fs::write(repo.join("cut.gguf"), &many_short_texts(1 << 20)[..600_000]).expect("a file");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let hub = |control: Control| {
        let hub = runtime.block_on(TestHub::start(folder.path()));
        let hub = hub.expect("a hub");
        hub.control(|now| *now = control);
        hub
    };
    let plain = hub(Control::default());
    let drips = hub(Control {
        bytes_per_second: Some(1000),
        ..Control::default()
    });
    // The beginning comes, and then too little: others with large headers wait for it.
    let slow = hub(Control {
        bytes_per_second: Some(200_000),
        ..Control::default()
    });
    let limits_rates = hub(Control {
        fail: Some(Fail {
            status: 429,
            retry_after_seconds: Some(900),
            times: u32::MAX,
        }),
        ..Control::default()
    });
    // Of what is sent, and of what the hub itself says of the file.
    let claims = |size: u64, linked: bool| {
        hub(Control {
            claims: Some(size),
            linked,
            ..Control::default()
        })
    };
    let claims_more = claims(1 << 40, false);
    let claims_less = claims(1000, false);
    let contradicts = claims(1 << 40, true);
    // Only what runs on this machine may reach it.
    let internal = TcpListener::bind("127.0.0.2:0").expect("a port");
    internal.set_nonblocking(true).expect("a listener");
    let internal_url = format!("http://{}/secret", internal.local_addr().expect("a port"));
    // It sends clients on to there.
    let sends_on = hub(Control {
        renamed: [(
            "people/models".to_owned(),
            format!("/{}", internal.local_addr().expect("a port")),
        )]
        .into(),
        ..Control::default()
    });

    let file = |hub: &TestHub, file: &str| json!({"huggingFace": {"repo": "people/models", "file": file, "endpoint": hub.endpoint()}});
    let mut refused = Vec::new();
    let mut refuse = |name: String, source: Value, said: &'static str| {
        apply(&api, &name, source);
        refused.push((name, said));
    };
    refuse(
        "slow".into(),
        file(&slow, "huge.gguf"),
        "did not come within 60 s",
    );
    wait_until("others wait for it", || slow.body_bytes() > 5 << 19);
    for number in 0..3 {
        let name = |what: &str| format!("{what}-{number}");
        refuse(
            name("drips"),
            file(&drips, "huge.gguf"),
            "did not come within 60 s",
        );
        refuse(
            name("huge"),
            file(&plain, "huge.gguf"),
            "general.architecture",
        );
        refuse(
            name("larger"),
            file(&plain, "larger.gguf"),
            "a header of at most 33554432 bytes",
        );
        refuse(
            name("limits-rates"),
            file(&limits_rates, "huge.gguf"),
            "429",
        );
    }
    refuse(
        "claims-more".into(),
        file(&claims_more, "cut.gguf"),
        "the connection ended after 0",
    );
    refuse(
        "claims-less".into(),
        file(&claims_less, "huge.gguf"),
        "bytes left), found",
    );
    refuse(
        "contradicts".into(),
        file(&contradicts, "huge.gguf"),
        "size in bytes was",
    );
    refuse(
        "internal".into(),
        json!({"url": {"url": internal_url}}),
        "not on the internet",
    );
    refuse(
        "sends-on".into(),
        file(&sends_on, "huge.gguf"),
        "not on the internet",
    );

    // A machine of another Model's ring fails meanwhile.
    let plan = get(&api, "ringplan", "good-1");
    let lost = plan["spec"]["members"][0]["name"].as_str().expect("a name");
    wait_until("servers are asked", || {
        plain.requests() > 0 && drips.requests() > 0
    });
    machines.silence(lost);
    let begun = Stopwatch::start();
    wait_until("the other machines answer", || {
        let model = get(&api, "model", "good");
        let nodes = model["status"]["nodes"].as_array().into_iter().flatten();
        let mut of_ring = nodes.filter(|node| node["inRing"] == true);
        of_ring.all(|node| node["name"] != lost)
            && condition(&api, "good", "Ready")["status"] == "True"
    });
    let took = begun.elapsed();
    println!(
        "{lost} fell silent: the others answered after {:.0} s",
        took.as_secs_f64()
    );
    assert!(took < FAILOVER, "{took:?}");

    for (name, said) in &refused {
        wait_until(name, || {
            condition(&api, name, "Resolved")["reason"] == "ResolveFailed"
        });
        let message = condition(&api, name, "Resolved")["message"].clone();
        let message = message.as_str().expect("a message");
        assert!(
            message.contains(said),
            "{name}: {said} is not in: {message}"
        );
    }
    let refusal = internal
        .accept()
        .expect_err("somebody asked an internal server");
    assert_eq!(refusal.kind(), ErrorKind::WouldBlock);
    let peak = operator.peak_bytes();
    println!("the operator took {} MiB at most", peak >> 20);
    assert!(peak < OPERATOR_BYTES, "{peak}");
}

/// A header of `bytes` that describes no model.
fn many_short_texts(bytes: usize) -> Vec<u8> {
    const TEXTS: u32 = 8;
    const ARRAY: u32 = 9;
    let count = bytes / 9;
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    for number in [0, 1, 1] {
        file.extend(u64::to_le_bytes(number));
    }
    file.push(b'a');
    file.extend([ARRAY.to_le_bytes(), TEXTS.to_le_bytes()].concat());
    file.extend((count as u64).to_le_bytes());
    for _ in 0..count {
        file.extend(*b"\x01\0\0\0\0\0\0\0x");
    }
    file
}

fn apply(api: &ApiServer, name: &str, source: Value) {
    let document = json!({
        "apiVersion": "prima.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": name},
        "spec": {"source": source},
    });
    api.apply(&document.to_string()).expect("a Model");
}

fn get(api: &ApiServer, kind: &str, name: &str) -> Value {
    let found = api.object("default", &format!("{kind}/{name}"));
    found.unwrap_or_else(|error| panic!("{error}"))
}

fn condition(api: &ApiServer, model: &str, kind: &str) -> Value {
    api_server::condition(&get(api, "model", model), kind)
}
