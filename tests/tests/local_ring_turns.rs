//! One client asks for much at once, another for a little: the second need not wait for all of the first's.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use prima_tests::local_ring::smollm2;
use prima_tests::machine_ring::{CONTEXT, MachineRing, cut};
use prima_tests::{Endpoint, http};
use serde_json::{Value, json};

/// Of the client that asks for much, which takes them all at once.
const REQUESTS: usize = 50;
/// That the ring runs at once.
const PLACES: usize = 16;
const TOKENS: usize = 25;

#[test]
fn a_small_request_does_not_wait_for_a_flood() {
    let plan = cut(&smollm2(), CONTEXT, 2, 1);
    assert_eq!(plan.spec.max_concurrent_requests, PLACES as i32);
    let ring = MachineRing::start_here(plan, &[]);
    // Without API keys, clients are known by their addresses.
    let [much, little] = [Ipv4Addr::new(127, 0, 0, 1), Ipv4Addr::new(127, 0, 0, 2)];
    let ask = |client: Ipv4Addr, number: usize, tokens: usize| {
        let body = json!({
            "prompt": format!("Story number {number}: once upon a time"),
            "max_tokens": tokens,
            "temperature": 0,
            "logit_bias": {"2": -100},
        });
        http::post_from(client, ring.address(), "/v1/completions", &body).unwrap()
    };
    let answered = AtomicUsize::new(0);
    thread::scope(|threads| {
        for number in 0..REQUESTS {
            let (ask, answered) = (&ask, &answered);
            threads.spawn(move || {
                // More than may wait are told to come again.
                while ask(much, number, TOKENS).status == 429 {
                    thread::sleep(Duration::from_millis(200));
                }
                answered.fetch_add(1, Ordering::Relaxed);
            });
        }
        while running(&ring) < PLACES as u64 {
            thread::sleep(Duration::from_millis(10));
        }
        let before = answered.load(Ordering::Relaxed);
        let answer = ask(little, 0, 4);
        let meanwhile = answered.load(Ordering::Relaxed) - before;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert!(
            meanwhile <= PLACES,
            "{meanwhile} of {REQUESTS} came before it"
        );
        assert!(before + meanwhile < REQUESTS - PLACES, "all had come");
    });
    assert_eq!(answered.into_inner(), REQUESTS);
    ring.stop();
}

/// Requests that the ring runs now.
fn running(ring: &impl Endpoint) -> u64 {
    let told = http::get(ring.address(), "/ring").unwrap();
    let running = told.json().pointer("/ring/running_requests").cloned();
    running.as_ref().and_then(Value::as_u64).expect("a number")
}
