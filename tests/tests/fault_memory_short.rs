//! Another program needs the memory that weights take, and ends. Real memory limits, so this takes root and a writable memory cgroup; `make test`
//! leaves it out elsewhere, and says so.

use std::thread;
use std::time::{Duration, Instant};

use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::machine::{Limits, Machine, cold_copy};
use prima_tests::{Endpoint, http, wait_until};

const MB: u64 = 1 << 20;
const LIMIT: u64 = 320 * MB;
const PROMPT: &str = "Once upon a time";
/// From the moment when the other program begins to take memory.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(30);

#[test]
fn weights_make_room_within_seconds_and_answers_stay_the_same() {
    let machine = Machine::new("short", &Limits::of_memory(LIMIT), &smollm2()).unwrap();
    // Other tests may have the model in memory, where it would not count on this machine.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = cold_copy(&smollm2(), folder.path()).unwrap();
    let ring = LocalRing::builder()
        .model(&model)
        .members(1)
        .arg("--context")
        .arg("512")
        .start_on(&machine);
    let answer = ring.complete(PROMPT, 24);
    assert_eq!(metric(&ring, "prima_member_streamed_weight_bytes"), 0.0);

    // Leaves less than the model's 98 MB and what the ring's processes take besides.
    let other = machine.take_memory(LIMIT - 110 * MB).unwrap();
    // With every token, members tell how much they stream.
    let streams = || {
        assert_eq!(ring.complete(PROMPT, 24), answer);
        metric(&ring, "prima_member_streamed_weight_bytes") > 0.0
    };
    let begun = Instant::now();
    while !streams() {
        assert!(begun.elapsed() < GIVEN_BACK_WITHIN, "nothing given back");
        thread::sleep(Duration::from_millis(500));
    }
    // At first, what a token streams may still be in the buffers.
    wait_until("something is read", || {
        streams() && metric(&ring, "prima_member_read_bytes_total") > 0.0
    });

    drop(other);
    wait_until("all is taken again", || !streams());
    ring.stop();
}

fn metric(ring: &LocalRing, name: &str) -> f64 {
    http::metric(ring.address(), name).unwrap()
}
