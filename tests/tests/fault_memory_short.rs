//! Another program needs the memory that weights take, and ends. Real memory limits, so this takes root and a writable memory cgroup; `make test`
//! leaves it out elsewhere, and says so.

use std::path::Path;
use std::thread;
use std::time::Duration;

use prima_gguf::GgmlType;
use prima_test_models::MadeUpModel;
use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::machine::{Limits, Machine, cold_copy};
use prima_tests::stopwatch::Stopwatch;
use prima_tests::{Endpoint, http, wait_until};

const MB: u64 = 1 << 20;
const LIMIT: u64 = 320 * MB;
/// From the moment when the other program starts. A second is promised; the rest is for that program, and for a slow machine.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(10);

#[test]
fn weights_make_room_within_seconds_and_answers_stay_the_same() {
    make_room(&smollm2(), "Once upon a time", &[]);
}

/// Of a mixture, experts give way.
#[test]
fn experts_make_room_within_seconds_and_answers_stay_the_same() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("mixture.gguf");
    // 102 MB, 2.7 of which are no experts.
    let mixture = MadeUpModel {
        layers: 3,
        experts: 84,
        feed_forward: 256,
        formats: vec![GgmlType::F16],
        ..MadeUpModel::of("qwen3moe")
    };
    mixture.write_for_ring(&path);
    let counted = [
        "prima_member_expert_hits_total",
        "prima_member_expert_misses_total",
    ];
    make_room(&path, "Once", &counted);
}

/// `counted` are metrics that grow while memory is short.
fn make_room(model: &Path, prompt: &str, counted: &[&str]) {
    let machine = Machine::new("short", &Limits::of_memory(LIMIT), model).unwrap();
    // Other tests may have the model in memory, where it would not count on this machine.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = cold_copy(model, folder.path()).unwrap();
    let ring = LocalRing::builder()
        .model(&model)
        .members(1)
        .arg("--context")
        .arg("512")
        .start_on(&machine);
    let answer = ring.complete(prompt, 24);
    assert!(answer.len() >= 24, "{answer:?}");
    // Other tests may have programs wait for memory, and then members give up some.
    wait_until("all is in memory", || {
        ring.complete(prompt, 24);
        metric(&ring, "prima_member_streamed_weight_bytes") == 0.0
    });

    // Leaves less than the models' 98 MB or more, and what the ring's processes take besides.
    let other = machine.take_memory(LIMIT - 110 * MB).unwrap();
    // With every token, members tell how much they stream.
    let streams = || {
        assert_eq!(ring.complete(prompt, 24), answer);
        metric(&ring, "prima_member_streamed_weight_bytes") > 0.0
    };
    let begun = Stopwatch::start();
    while !streams() {
        assert!(begun.elapsed() < GIVEN_BACK_WITHIN, "nothing given back");
        thread::sleep(Duration::from_millis(500));
    }
    // At first, what a token streams may still be in the buffers. Of a mixture, the experts that are asked for most have stayed: others
    // are asked for by other texts.
    let mut asked = 0;
    wait_until("something is read", || {
        asked += 1;
        ring.complete(&format!("{asked}: {prompt}"), 24);
        let read = ["prima_member_read_bytes_total"];
        let mut counts = counted.iter().chain(&read);
        streams() && counts.all(|name| metric(&ring, name) > 0.0)
    });

    drop(other);
    wait_until("all is taken again", || !streams());
    ring.stop();
}

fn metric(ring: &LocalRing, name: &str) -> f64 {
    http::metric(ring.address(), name).unwrap()
}
