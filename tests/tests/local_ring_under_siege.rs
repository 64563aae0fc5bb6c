//! A ring whose clients want too much of it: rank 0 stays within its memory, goes on with what it has begun, and serves on. How fast it
//! does so meanwhile is for the benchmark.

use std::thread;

use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::process::peak_memory;
use prima_tests::siege::{allow_open_files, hostile_bodies, siege, status_of};
use prima_tests::{Endpoint, http};
use serde_json::{Value, json};

const PROMPTS: [&str; 3] = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
];
const TOKENS: usize = 150;

#[test]
fn a_siege_takes_little_memory_and_changes_no_answer() {
    let ring = LocalRing::builder().model(&smollm2()).members(2).start();
    // Behind the ring's start, which has the usual limit.
    allow_open_files(4096);
    let rank_0 = ring.members()[0].pid;
    let in_peace = streams(&ring, || {}).0;
    let before = peak_memory(rank_0);

    let bodies = hostile_bodies();
    let (under_siege, (answers, slow)) = streams(&ring, || siege(ring.address(), &bodies));
    assert_eq!(under_siege, in_peace);
    // Too much, or to be asked again; or cut off to make room for another connection.
    let expected = [Some(413), Some(429), None];
    assert!(
        answers.iter().all(|status| expected.contains(status)),
        "{answers:?}"
    );
    assert!(answers.contains(&Some(413)), "{answers:?}");

    // The slow ones are still there.
    for (path, body) in &bodies {
        let found = status_of(ring.address(), path, body);
        assert_eq!(found, Some(413), "{path} {}", &body[..40]);
    }
    let grown = peak_memory(rank_0) - before;
    assert!(grown < 512 << 20, "{} MiB more", grown >> 20);
    assert!(ring.complete(PROMPTS[0], 8).contains("Paris"));
    drop(slow);
    ring.stop();
}

/// The answers to all prompts, which are streamed at once, and what `meanwhile` returns, which begins when each has begun.
fn streams<T>(ring: &LocalRing, meanwhile: impl FnOnce() -> T) -> (Vec<String>, T) {
    let begun = PROMPTS.map(|prompt| {
        let body = json!({
            "model": ring.model(),
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": true,
        });
        let mut events = http::post_streaming(ring.address(), "/v1/completions", &body).unwrap();
        assert_eq!(events.status, 200);
        let first = events.next();
        first.into_iter().chain(events)
    });
    thread::scope(|threads| {
        let reading: Vec<_> = begun
            .into_iter()
            .map(|events| threads.spawn(|| text_of(events)))
            .collect();
        let meanwhile = meanwhile();
        let read = reading.into_iter().map(|one| one.join().unwrap());
        (read.collect(), meanwhile)
    })
}

fn text_of(events: impl Iterator<Item = std::io::Result<String>>) -> String {
    let events: Vec<String> = events.map(Result::unwrap).collect();
    let (done, chunks) = events.split_last().expect("events");
    assert_eq!(done, "[DONE]");
    let text = |chunk: &String| {
        let chunk: Value = serde_json::from_str(chunk).unwrap();
        chunk["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    chunks.iter().map(text).collect()
}
