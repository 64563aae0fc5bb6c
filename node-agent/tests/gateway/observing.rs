//! The model list, the metrics, the ring's state and the page.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use prima_node_agent::generation::{FinishReason, GenerationError, Readiness};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::client::{get, post};
use crate::server::{MODEL, Server};

/// Its last word was that it is ready.
#[tokio::test]
async fn a_ring_whose_decoding_has_ended_is_not_ready() {
    let mut server = Server::start().await;
    let status = async |address| get("/health").send(address).await.status;
    assert_eq!(status(server.address).await, 200);
    let last = server.status.borrow().clone();
    server.status = watch::channel(last).0;
    assert_eq!(status(server.address).await, 503);
    let asked = post("/v1/completions", &json!({"prompt": "a"}));
    let reply = asked.send(server.address).await;
    assert_eq!(reply.status, 503);
    assert!(reply.text().await.contains("its decoding has ended"));
}

#[tokio::test]
async fn health_says_where_the_ring_fails() {
    let server = Server::start().await;
    let mut broken = server.status.borrow().clone();
    broken.readiness = Readiness::Loading("waiting for laptop".to_owned());
    for (member, missed_by) in [
        (Some("laptop"), None),
        (Some("laptop"), Some("desk\"top")),
        (None, Some("desk\"top")),
    ] {
        broken.fails_at = member.map(str::to_owned);
        broken.missed_by = missed_by.map(str::to_owned);
        server.status.send_replace(broken.clone());
        let reply = get("/health").send(server.address).await;
        assert_eq!(reply.status, 503);
        let body = reply.json().await;
        let said = (&body["failsAt"], &body["missedBy"]);
        assert_eq!(said, (&json!(member), &json!(member.and(missed_by))));
        assert!(
            body["error"]["message"]
                .as_str()
                .unwrap()
                .contains("laptop")
        );
    }
}

/// Requests still wait for it: it may go on.
#[tokio::test]
async fn a_ring_that_stands_still_is_not_ready_and_refuses_nobody() {
    let mut server = Server::start().await;
    let ready = async |address| {
        let health = get("/health").send(address).await;
        let metrics = get("/metrics").send(address).await.text().await;
        let metrics = parse_open_metrics(&metrics);
        (health, metrics["prima_ring_ready"])
    };
    // What the chat page shows.
    let shown = async |address| {
        let shown = get("/ring").send(address).await.json().await;
        shown["standing_still"].clone()
    };
    assert_eq!(shown(server.address).await, json!(null));
    let is_silent = |silent: Option<&str>| {
        let silent = silent.map(str::to_owned);
        server.status.send_modify(|status| status.silent = silent);
    };
    is_silent(Some("laptop"));
    let (health, metric) = ready(server.address).await;
    assert_eq!((health.status, metric), (503, 0.0));
    assert_eq!(health.header("retry-after"), Some("2"));
    let body = health.json().await;
    assert_eq!(body["failsAt"], json!("laptop"));
    let said = "the ring cannot serve: no sign of life from member laptop for some seconds";
    assert_eq!(body["error"]["message"], json!(said));
    assert_eq!(get("/readyz").send(server.address).await.status, 503);
    let why = "no sign of life from member laptop for some seconds";
    assert_eq!(shown(server.address).await, json!(why));
    let ring = get("/ring").send(server.address).await.json().await;
    assert_eq!(ring["ring"]["silent"], json!("laptop"));
    is_silent(None);
    let (health, metric) = ready(server.address).await;
    assert_eq!((health.status, metric), (200, 1.0));
    // All are heard of, but nothing comes home. Nobody knows where it is.
    server.status.send_modify(|status| status.late = true);
    let (health, metric) = ready(server.address).await;
    assert_eq!((health.status, metric), (503, 0.0));
    let body = health.json().await;
    assert_eq!(body["failsAt"], json!(null));
    let said = body["error"]["message"].as_str().unwrap();
    let why = said.strip_prefix("the ring cannot serve: ").unwrap();
    assert!(why.starts_with("what goes round it is late"), "{said}");
    assert_eq!(shown(server.address).await, json!(why));
    // All of that was said long ago: rank 0 itself comes to nothing.
    let looked = |at: Option<Instant>| {
        server.status.send_modify(|status| {
            status.late = false;
            status.looked = Some(at.unwrap());
        });
    };
    looked(Instant::now().checked_sub(Duration::from_secs(3)));
    let (health, metric) = ready(server.address).await;
    assert_eq!((health.status, metric), (503, 0.0));
    let body = health.json().await;
    assert_eq!(body["failsAt"], json!("desk\"top"));
    let said = body["error"]["message"].as_str().unwrap();
    let why = said.strip_prefix("the ring cannot serve: ").unwrap();
    assert!(why.starts_with("its first member stands still"), "{said}");
    assert_eq!(shown(server.address).await, json!(why));
    // It looks again, for as long as this test may take.
    looked(Instant::now().checked_add(Duration::from_secs(600)));
    let (health, metric) = ready(server.address).await;
    assert_eq!((health.status, metric), (200, 1.0));
    assert_eq!(shown(server.address).await, json!(null));
    is_silent(Some("laptop"));
    let completion = post("/v1/completions", &json!({"prompt": "a"}));
    let (reply, ()) = tokio::join!(completion.send(server.address), async {
        let accepted = server.accept().await;
        accepted.token(0, "x").await;
        accepted.finish(0, FinishReason::Stop, "").await;
        accepted.usage(2, 0).await;
    });
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn health_says_how_often_experts_are_missed() {
    let server = Server::start().await;
    let mut ring = server.status.borrow().clone();
    ring.readiness = Readiness::Ready;
    for percent in [None, Some(61)] {
        ring.expert_miss_percent = percent;
        server.status.send_replace(ring.clone());
        let reply = get("/health").send(server.address).await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.json().await["expertMissPercent"], json!(percent));
    }
}

#[tokio::test]
async fn the_model_is_listed_under_its_name() {
    let server = Server::start().await;
    let list = get("/v1/models").send(server.address).await.json().await;
    assert_eq!(
        (&list["object"], list["data"].as_array().unwrap().len()),
        (&json!("list"), 1)
    );
    let model = &list["data"][0];
    assert_eq!(
        (&model["id"], &model["object"]),
        (&json!(MODEL), &json!("model"))
    );
    assert!(model["created"].is_u64() && model["owned_by"].is_string());
    let one = get(format!("/v1/models/{MODEL}"))
        .send(server.address)
        .await;
    assert_eq!(&one.json().await, model);
}

#[tokio::test]
async fn each_outcome_is_counted_before_its_first_answer() {
    let server = Server::start().await;
    let reply = get("/metrics").send(server.address).await;
    let samples = parse_open_metrics(&reply.text().await);
    for outcome in ["stop", "length", "failed", "cancelled"] {
        let series = format!("prima_generations_total{{outcome=\"{outcome}\"}}");
        assert_eq!(samples.get(&series), Some(&0.0), "{series}");
    }
}

#[tokio::test]
async fn metrics_count_what_happened() {
    let mut server = Server::start().await;
    for path in ["/v1/nothing", "/scan/1", "/scan/2"] {
        get(path).send(server.address).await;
    }
    let completion = post("/v1/completions", &json!({"prompt": "abc", "n": 2}));
    let (reply, ()) = tokio::join!(completion.send(server.address), async {
        let accepted = server.accept().await;
        for _ in 0..3 {
            accepted.token(0, "x").await;
        }
        accepted.token(1, "x").await;
        accepted.finish(0, FinishReason::Length, "").await;
        accepted.finish(1, FinishReason::Stop, "").await;
        // Of which two were there.
        accepted.usage(10, 4).await;
    });
    assert_eq!(reply.status, 200);
    let failing = post("/v1/completions", &json!({"prompt": "a"}));
    tokio::join!(failing.send(server.address), async {
        server
            .accept()
            .await
            .fail(GenerationError::Deadline { seconds: 1 })
            .await;
    });
    let streaming = post("/v1/completions", &json!({"prompt": "a", "stream": true}));
    let (reply, accepted) = tokio::join!(streaming.send(server.address), server.accept());
    drop(reply);
    accepted.cancelled().await;

    let reply = get("/metrics").send(server.address).await;
    assert!(
        reply
            .header("content-type")
            .unwrap()
            .starts_with("application/openmetrics-text")
    );
    let samples = parse_open_metrics(&reply.text().await);
    let value = |name: &str| {
        *samples
            .get(name)
            .unwrap_or_else(|| panic!("no {name} in {:#?}", samples.keys()))
    };
    assert_eq!(
        value("prima_requests_total{route=\"none\",status=\"404\"}"),
        3.0
    );
    assert_eq!(
        value("prima_requests_total{route=\"/v1/completions\",status=\"200\"}"),
        2.0
    );
    assert_eq!(
        value("prima_requests_total{route=\"/v1/completions\",status=\"504\"}"),
        1.0
    );
    for outcome in ["stop", "length", "failed", "cancelled"] {
        assert_eq!(
            value(&format!("prima_generations_total{{outcome=\"{outcome}\"}}")),
            1.0
        );
    }
    // Four tokens of the prompt `abc` with its beginning of sequence; the others were not computed.
    assert_eq!(value("prima_prompt_tokens_total"), 4.0);
    assert_eq!(value("prima_cached_prompt_tokens_total"), 2.0);
    assert_eq!(value("prima_generated_tokens_total"), 4.0);
    assert_eq!(value("prima_time_to_first_token_seconds_count"), 1.0);
    // Only choice 0 has two tokens to measure between.
    assert_eq!(value("prima_time_per_output_token_seconds_count"), 1.0);
    assert_eq!(value("prima_requests_running"), 2.0);
    assert_eq!(value("prima_requests_waiting"), 1.0);
    assert_eq!(value("prima_kv_cache_bytes"), 4096.0);
    assert_eq!(value("prima_kv_planned_positions"), 8192.0);
    assert_eq!(value("prima_drafted_tokens_total"), 60.0);
    assert_eq!(value("prima_accepted_tokens_total"), 45.0);
    assert_eq!(value("prima_kv_used_positions"), 640.0);
    assert_eq!(value("prima_kv_kept_positions"), 512.0);
    assert_eq!(value("prima_ring_ready"), 1.0);
    assert_eq!(
        value("prima_member_compute_seconds_total{member=\"laptop\"}"),
        8.0
    );
    assert_eq!(
        value("prima_member_network_seconds_total{member=\"laptop\"}"),
        4.0
    );
    assert_eq!(
        value("prima_member_disk_seconds_total{member=\"laptop\"}"),
        0.5
    );
    assert_eq!(
        value("prima_member_memory_pressure_ratio{member=\"laptop\"}"),
        0.25
    );
    for (name, expected) in [
        ("read_bytes_total", 1 << 20),
        ("resident_weight_bytes", 3 << 20),
        ("streamed_weight_bytes", 1 << 18),
        ("planned_read_bytes", 1 << 17),
        ("planned_kv_bytes", 1 << 19),
    ] {
        let value = value(&format!("prima_member_{name}{{member=\"laptop\"}}"));
        assert_eq!(value, f64::from(expected), "{name}");
    }
    assert_eq!(
        value("prima_member_frames_total{member=\"desk\\\"top\"}"),
        12.0
    );
    for (alias, expected) in [
        ("num_requests_running", 2.0),
        ("num_requests_waiting", 1.0),
        ("time_to_first_token_seconds_count", 1.0),
        ("time_per_output_token_seconds_count", 1.0),
        ("prompt_tokens_total", 4.0),
        ("generation_tokens_total", 4.0),
    ] {
        assert_eq!(
            value(&format!("vllm:{alias}{{model_name=\"{MODEL}\"}}")),
            expected
        );
    }
}

/// Every sample by name and labels, after checking the exposition as the OpenMetrics text format 1.0 defines it:
/// one TYPE per family before its samples, families not interleaved, suffixes by type, `# EOF` last.
fn parse_open_metrics(text: &str) -> BTreeMap<String, f64> {
    let body = text.strip_suffix("# EOF\n").expect("# EOF at the end");
    let (mut samples, mut seen) = (BTreeMap::new(), BTreeSet::new());
    let (mut family, mut kind) = (String::new(), String::new());
    for line in body.lines() {
        if let Some(described) = line.strip_prefix("# TYPE ") {
            let (name, of_kind) = described.split_once(' ').unwrap();
            assert!(seen.insert(name.to_string()), "{name} is described twice");
            (family, kind) = (name.into(), of_kind.into());
            continue;
        }
        if let Some(help) = line.strip_prefix("# HELP ") {
            assert!(
                help.split_once(' ')
                    .is_some_and(|(_, words)| !words.is_empty()),
                "{line}"
            );
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        let name_is_legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        assert!(name.chars().all(name_is_legal), "{line}");
        let suffix = name
            .strip_prefix(&family)
            .unwrap_or_else(|| panic!("{line} in {family}"));
        let suffixes: &[&str] = match kind.as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "histogram" => &["_sum", "_count", "_bucket"],
            other => panic!("type {other}"),
        };
        assert!(suffixes.contains(&suffix), "{line} is no {kind}");
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(value >= 0.0, "{line}");
        assert!(
            samples.insert(series.to_string(), value).is_none(),
            "{line} twice"
        );
    }
    samples
}

#[tokio::test]
async fn the_rings_state_is_shown_as_it_is_now() {
    let server = Server::start().await;
    let shown = get("/ring").send(server.address).await.json().await;
    assert_eq!(
        (&shown["model"], &shown["tokens"]),
        (&json!(MODEL), &json!({"prompt": 0, "generated": 0}))
    );
    assert_eq!(shown["ring"]["members"][1]["windows"], json!([[20, 30]]));
    assert_eq!(shown["ring"]["readiness"], json!({"state": "ready"}));
    server
        .status
        .send_modify(|status| status.running_requests = 7);
    let shown = get("/ring").send(server.address).await.json().await;
    assert_eq!(shown["ring"]["running_requests"], 7);
}

#[tokio::test]
async fn the_page_needs_nothing_from_elsewhere() {
    let server = Server::start().await;
    let reply = get("/").send(server.address).await;
    assert_eq!(
        reply.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = reply.header("content-security-policy").unwrap();
    assert!(
        policy.starts_with("default-src 'none'") && policy.contains("connect-src 'self'"),
        "{policy}"
    );
    let mut page = reply.text().await;
    assert!(page.contains("<title>prima"));
    let named: Vec<_> = page.split("page/").skip(1).collect();
    let named = named.iter().map(|rest| rest.split('"').next().unwrap());
    let mut parts: Vec<String> = named.map(str::to_owned).collect();
    assert!(parts.contains(&"chat.js".to_owned()), "{parts:?}");
    let mut read = 0;
    while let Some(part) = parts.get(read).cloned() {
        read += 1;
        let reply = get(format!("/page/{part}")).send(server.address).await;
        assert_eq!(reply.status, 200, "{part}");
        assert_eq!(reply.header("cache-control"), Some("no-cache"));
        let kind = reply.header("content-type").unwrap().to_owned();
        let text = reply.text().await;
        if let Some(hash) = vendored(&part) {
            assert_eq!(format!("{:x}", Sha256::digest(&text)), hash, "{part}");
            continue;
        }
        let script = part.ends_with(".js");
        assert!(kind.starts_with(if script {
            "text/javascript"
        } else {
            "text/css"
        }));
        for import in text.split("from \"./").skip(1) {
            let import = import.split('"').next().unwrap().to_owned();
            if !parts.contains(&import) {
                parts.push(import);
            }
        }
        page += &text;
    }
    assert!(parts.len() >= 10, "{parts:?}");
    for foreign in [
        "http://",
        "https://",
        "//cdn",
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ] {
        assert!(!page.contains(foreign), "{foreign} in the page");
    }
}

/// The SHA-256 that the page's list of others' files has for `part`.
fn vendored(part: &str) -> Option<&'static str> {
    let list = include_str!("../../src/gateway/page/vendored/README.md");
    let line = list
        .lines()
        .find(|line| line.starts_with(&format!("| `{part}` |")))?;
    line.split('`').nth(5)
}

#[tokio::test]
async fn an_unknown_part_of_the_page_is_told() {
    let server = Server::start().await;
    for path in ["/page/other.js", "/page/..%2fpage.rs", "/page/"] {
        let reply = get(path).send(server.address).await;
        assert_eq!(reply.status, 404, "{path}");
    }
}
