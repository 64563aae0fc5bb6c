//! A ring whose clients want too much of it: rank 0 stays within its memory, goes on with what it has begun, and serves on. How fast it
//! does so meanwhile is for the benchmark.

use prima_tests::Endpoint;
use prima_tests::local_ring::smollm2;
use prima_tests::machine_ring::{CONTEXT, MachineRing, cut};
use prima_tests::process::peak_memory;
use prima_tests::siege::{allow_open_files, hostile_bodies, siege, status_of, streams};

#[test]
fn a_siege_takes_little_memory_and_changes_no_answer() {
    let ring = MachineRing::start_here(cut(&smollm2(), CONTEXT, 2, 1), &[]);
    // Behind the ring's start, which has the usual limit.
    allow_open_files(4096);
    let rank_0 = ring.pids()[0];
    let in_peace = streams(&ring, || {}).0;
    let before = peak_memory(rank_0);

    let bodies = hostile_bodies();
    let (under_siege, (answers, slow)) = streams(&ring, || siege(ring.address(), &bodies));
    assert_eq!(under_siege, in_peace);
    // Too much for the context or for a body, or to be asked again; or cut off to make room for another connection.
    let expected = [Some(400), Some(413), Some(429), None];
    assert!(
        answers.iter().all(|status| expected.contains(status)),
        "{answers:?}"
    );
    assert!(answers.contains(&Some(413)), "{answers:?}");

    // The slow ones are still there.
    let refusals = [400, 400, 400, 413, 413, 413, 400];
    for ((path, body), refusal) in bodies.iter().zip(refusals) {
        let found = status_of(ring.address(), path, body);
        assert_eq!(found, Some(refusal), "{path} {}", &body[..40]);
    }
    let grown = peak_memory(rank_0) - before;
    assert!(grown < 512 << 20, "{} MiB more", grown >> 20);
    assert!(
        ring.complete("The capital of France is", 8)
            .contains("Paris")
    );
    drop(slow);
    ring.stop();
}
