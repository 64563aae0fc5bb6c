//! Another program needs the memory that weights take. Real memory limits, so this takes root and a writable memory cgroup; `make test`
//! leaves it out elsewhere, and says so.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use prima_tests::http;
use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::memory_group::{MemoryGroup, drop_page_cache};

const MB: u64 = 1 << 20;
const PROMPT: &str = "Once upon a time";

#[test]
fn weights_make_room_within_seconds_and_answers_stay_the_same() {
    let group = MemoryGroup::new("short", 320 * MB).unwrap();
    // A page counts in the group that touches it first.
    drop_page_cache().unwrap();
    let ring = LocalRing::builder()
        .model(&smollm2())
        .members(1)
        .arg("--context")
        .arg("512")
        .start_in(&group);
    let answer = ring.complete(PROMPT, 24);
    assert_eq!(metric(&ring, "prima_member_streamed_weight_bytes"), 0.0);

    let other = Other::takes(&group, 170 * MB);
    let short = Instant::now();
    while metric(&ring, "prima_member_streamed_weight_bytes") == 0.0 {
        assert!(
            short.elapsed() < Duration::from_secs(30),
            "nothing given back"
        );
        assert_eq!(ring.complete(PROMPT, 24), answer);
    }
    assert_eq!(ring.complete(PROMPT, 24), answer);
    assert!(metric(&ring, "prima_member_read_bytes_total") > 0.0);
    drop(other);
    ring.stop();
}

fn metric(ring: &LocalRing, name: &str) -> f64 {
    http::metric(ring.address(), name).unwrap()
}

/// A program that takes memory and keeps it until it is dropped.
struct Other(Child);

impl Other {
    fn takes(group: &MemoryGroup, bytes: u64) -> Other {
        let mut python = Command::new("python3");
        let script = format!("import time; taken = b'x' * {bytes}; time.sleep(600)");
        python.args(["-c", &script]);
        let mut inside = group.enter(python);
        Other(inside.stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
