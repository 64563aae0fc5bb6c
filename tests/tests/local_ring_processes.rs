//! How `prima run` begins and ends: what it refuses, what it prints, and that it leaves nothing behind.

use std::fs;
use std::net::TcpListener;

use prima_tests::Endpoint;
use prima_tests::http;
use prima_tests::local_ring::{LocalRing, LocalRingBuilder, assert_none_left, smollm2};
use prima_tests::process::send_signal;
use prima_tests::split_model;
use rustix::process::Signal;
use serde_json::json;

#[test]
fn bad_arguments_are_refused_with_what_was_expected_and_found() {
    let model = smollm2();
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let busy_port = busy.local_addr().unwrap().port().to_string();
    let folder = tempfile::tempdir().unwrap();
    let text_file = folder.path().join("notes.txt");
    fs::write(&text_file, "no model").unwrap();
    let truncated = folder.path().join("truncated.gguf");
    fs::write(&truncated, &fs::read(&model).unwrap()[..100_000]).unwrap();

    let with_model = || LocalRing::builder().model(&model);
    let cases: Vec<(LocalRingBuilder, &[&str])> = vec![
        (
            LocalRing::builder().model("no/such.gguf".as_ref()),
            &["no/such.gguf", "No such file"],
        ),
        (
            LocalRing::builder().model(&text_file),
            &["notes.txt", "not a GGUF file"],
        ),
        (
            LocalRing::builder().model(&truncated),
            &["truncated.gguf", "98893 bytes left"],
        ),
        (
            with_model().members(31),
            &["--members 31", "only 30 layers"],
        ),
        (with_model().members(0), &["--members", "1..=1024"]),
        (
            with_model().split(&[10, 12, 9]),
            &["--split 10,12,9", "30 layers", "found a sum of 31"],
        ),
        (
            with_model().split(&[10, 20]).members(3),
            &["--split 10,20", "expected 3", "found 2"],
        ),
        (with_model().arg("--split").arg("10,x"), &["--split", "'x'"]),
        (with_model().rounds(31), &["--rounds", "1..=30", "31"]),
        (
            with_model().split(&[10, 10, 10]).rounds(11),
            &["--rounds 11", "at most 10 rounds"],
        ),
        (
            with_model().arg("--profile").arg("no/such.yaml"),
            &["no/such.yaml", "No such file"],
        ),
        (
            with_model().arg("--port").arg(&busy_port),
            &["--port", "in use"],
        ),
        (with_model().arg("--context").arg("0"), &["--context", "0"]),
    ];
    for (builder, expected) in cases {
        let ended = builder.run_to_end();
        assert!(!ended.status.success(), "{ended:#?}");
        assert_eq!(ended.stdout, "", "nothing to paste from a failure");
        for part in expected {
            assert!(ended.stderr.contains(part), "no {part:?} in {ended:#?}");
        }
    }
}

#[test]
fn the_printed_ring_is_the_running_ring() {
    let ring = LocalRing::builder()
        .model(&smollm2())
        .split(&[12, 8, 10])
        .rounds(2)
        .start();
    let names: Vec<&str> = ring.members().iter().map(|m| m.name.as_str()).collect();
    assert_eq!(names, ["m0", "m1", "m2"]);
    let members = ring.members().to_vec();
    let ended = ring.end_by(Signal::TERM);
    assert!(ended.status.success(), "{ended:#?}");
    assert_none_left(&members);
    let row = |rank: usize| {
        let pid = members[rank].pid.to_string();
        ended
            .stdout
            .lines()
            .find(|line| line.contains(&members[rank].name) && line.contains(&pid))
            .unwrap_or_else(|| panic!("no row of {:?} in {ended:#?}", members[rank]))
    };
    assert!(
        row(0).contains("embedding, 0-5, 15-20, output"),
        "{}",
        row(0)
    );
    assert!(row(1).contains("6-9, 21-24"), "{}", row(1));
    assert!(row(2).contains("10-14, 25-29"), "{}", row(2));
}

/// Runs the line as printed, in a shell, with the curl that people have.
#[test]
fn the_printed_curl_line_works() {
    let ring = LocalRing::builder().model(&smollm2()).members(2).start();
    let line = ring.curl_line();
    let output = std::process::Command::new("sh")
        .args(["-c", &line])
        .output()
        .expect("a shell");
    let answer: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{line}: {output:?}"));
    let content = answer.pointer("/choices/0/message/content").unwrap();
    assert!(!content.as_str().unwrap().is_empty(), "{answer}");
    ring.stop();
}

#[test]
fn an_api_key_is_asked_for_and_is_neither_argument_nor_output() {
    let ring = LocalRing::builder()
        .model(&smollm2())
        .members(2)
        .arg("--api-key")
        .arg("open,sesame")
        .start();
    let response = http::get(ring.address(), "/v1/models").unwrap();
    assert_eq!(response.status, 401, "{}", response.body);
    let question = json!({
        "model": ring.model(),
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
    });
    // A key is one key, whatever is in it.
    for (key, status) in [("close-sesame", 401), ("open", 401), ("open,sesame", 200)] {
        let asked = http::post_with_key(ring.address(), "/v1/completions", key, &question);
        let response = asked.unwrap();
        assert_eq!(response.status, status, "{}", response.body);
        assert_eq!(response.body.contains("Paris"), status == 200);
        assert!(!response.body.contains("sesame"), "{}", response.body);
    }
    for member in ring.members() {
        let arguments = fs::read_to_string(format!("/proc/{}/cmdline", member.pid)).unwrap();
        assert!(!arguments.contains("open,sesame"), "{arguments}");
    }
    let ended = ring.end_by(Signal::INT);
    assert!(ended.status.success(), "{ended:#?}");
    assert!(!ended.stdout.contains("open,sesame"), "{}", ended.stdout);
    assert!(!ended.stderr.contains("open,sesame"), "{}", ended.stderr);
}

#[test]
fn ctrl_c_in_mid_stream_leaves_no_process_and_tells_the_client() {
    let ring = LocalRing::builder().model(&smollm2()).members(3).start();
    let body = json!({
        "model": ring.model(),
        "prompt": "Once upon a time",
        "max_tokens": 4000,
        "temperature": 0,
        "stream": true,
    });
    let mut events = http::post_streaming(ring.address(), "/v1/completions", &body).unwrap();
    assert_eq!(events.status, 200);
    events.next().expect("a first event").unwrap();
    ring.stop();
    let error = events.error_at_end();
    assert!(
        !error.is_empty(),
        "an unfinished answer must not look finished"
    );
}

#[test]
fn a_ring_that_nohup_started_outlives_its_terminal() {
    let ring = LocalRing::builder()
        .model(&smollm2())
        .members(2)
        .start_by_nohup();
    send_signal(ring.pid(), Signal::HUP);
    assert!(!ring.complete("Once upon a time", 4).is_empty());
    // A ring that was asked to end still answers for a moment. One that never hears the signal was not.
    let status = fs::read_to_string(format!("/proc/{}/status", ring.pid())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
    assert_eq!(ignored & 1, 1, "{status}");
    ring.stop();
}

#[test]
fn agents_die_with_a_prima_that_is_killed() {
    let ring = LocalRing::builder().model(&smollm2()).members(3).start();
    let members = ring.members().to_vec();
    assert_eq!(members.len(), 3);
    ring.end_by(Signal::KILL);
    assert_none_left(&members);
}

#[test]
fn a_member_that_hangs_does_not_keep_the_ring_from_ending() {
    let ring = LocalRing::builder().model(&smollm2()).members(2).start();
    send_signal(ring.members()[1].pid, Signal::STOP);
    ring.stop();
}

#[test]
fn without_a_split_the_ring_is_planned() {
    let folder = tempfile::tempdir().unwrap();
    // Of the files the first is too small to measure a disk with.
    let ring = LocalRing::builder()
        .model(&split_model::in_three_files(&smollm2(), folder.path()))
        .measured()
        .members(2)
        .start();
    assert_eq!(ring.members().len(), 2);
    let printed = ring.printed();
    let predicted = printed.split_once("Predicted: ").expect("a prediction").1;
    let rate = predicted
        .split(' ')
        .next()
        .and_then(|rate| rate.parse::<f64>().ok());
    assert!(rate.is_some_and(|rate| rate > 0.1), "{predicted}");
    assert!(!ring.complete("Once upon a time", 4).is_empty());
}

#[test]
fn members_know_no_tokens() {
    let ring = LocalRing::builder().model(&smollm2()).members(2);
    let ring = ring
        .env("HF_TOKEN", "a-secret-of-the-hub")
        .env("HTTPS_PROXY", "http://user:password@proxy.invalid:3128")
        .env("OTEL_TRACES_SAMPLER", "always_off")
        .start();
    for member in ring.members() {
        let environment = fs::read(format!("/proc/{}/environ", member.pid)).unwrap();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        assert!(environment.contains("OTEL_TRACES_SAMPLER=always_off"));
        for secret in ["a-secret-of-the-hub", "password"] {
            assert!(!environment.contains(secret), "{member:?}: {environment:?}");
        }
    }
    ring.stop();
}
