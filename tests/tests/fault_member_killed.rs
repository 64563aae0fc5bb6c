//! A member that dies or hangs in mid-stream: the client is told which one, at once if it died, and else within eight seconds. If it died, `prima run`
//! ends with an error that says so. One that stands still is named before it counts as lost. Nothing hangs or stays behind.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use prima_tests::http::{self, EventStream};
use prima_tests::local_ring::{LocalRing, Member, assert_none_left, smollm2};
use prima_tests::process::send_signal;
use prima_tests::stopwatch::Stopwatch;
use prima_tests::{Endpoint, wait_for, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};

/// From its end until the client knows who is lost, where it is noticed at once; the rest is for a slow machine.
const END_TOLD_WITHIN: Duration = Duration::from_secs(5);
/// The same from when it falls silent, which is noticed within eight seconds.
const SILENCE_TOLD_WITHIN: Duration = Duration::from_secs(15);

#[test]
fn killing_rank_1_fails_the_stream_and_ends_the_ring() {
    kill_and_be_told(1);
}

#[test]
fn killing_the_last_rank_fails_the_stream_and_ends_the_ring() {
    kill_and_be_told(2);
}

/// Only rank 0 could tell the client; when it dies, the client just sees the answer break off.
#[test]
fn killing_rank_0_breaks_the_stream_off_and_ends_the_ring() {
    let (ring, events) = ring_in_mid_stream();
    let victim = ring.members()[0].clone();
    let lost = Stopwatch::start();
    send_signal(victim.pid, Signal::KILL);
    let rest: Vec<String> = events.map_while(Result::ok).collect();
    let told = lost.elapsed();
    assert!(told < END_TOLD_WITHIN, "after {told:?}");
    assert_ne!(rest.last().map(String::as_str), Some("[DONE]"));
    assert_ring_names(ring, &victim);
}

/// A stopped process keeps its connections: only its silence can give it away.
#[test]
fn a_member_that_hangs_is_lost_and_named() {
    let (ring, events) = ring_in_mid_stream();
    let victim = ring.members()[1].clone();
    let lost = Stopwatch::start();
    send_signal(victim.pid, Signal::STOP);
    assert_told(events, &victim, &lost, SILENCE_TOLD_WITHIN);
    ring.stop();
}

/// Like a laptop whose lid was shut for a moment: shorter than the silence that counts as a loss.
#[test]
fn a_member_that_pauses_and_goes_on_changes_no_answer() {
    const PAUSE: Duration = Duration::from_secs(4);
    const TOKENS: usize = 250;
    let ring = LocalRing::builder().model(&smollm2()).members(3).start();
    let expected = ring.complete("Once upon a time", TOKENS);
    // Read as they come, so that unread events are not taken for events after the pause.
    let events = stream(&ring, TOKENS);
    let (sender, received) = mpsc::channel();
    thread::spawn(move || {
        for event in events {
            let _ = sender.send((Instant::now(), event.unwrap()));
        }
    });
    let mut answer = String::new();
    let mut last = (Instant::now(), String::new());
    let mut longest = Duration::ZERO;
    for (count, (came, event)) in received.into_iter().enumerate() {
        longest = longest.max(came - last.0);
        if let Ok(event) = serde_json::from_str::<Value>(&event) {
            answer += event["choices"][0]["text"].as_str().unwrap_or_default();
        }
        last = (came, event);
        if count == 5 {
            let member = ring.members()[1].pid;
            send_signal(member, Signal::STOP);
            thread::sleep(PAUSE);
            send_signal(member, Signal::CONT);
        }
    }
    assert!(longest > PAUSE - Duration::from_secs(1), "{longest:?}");
    assert_eq!((answer, last.1.as_str()), (expected, "[DONE]"));
    ring.stop();
}

/// Whoever has the choice is told to ask elsewhere, long before the member counts as lost; and whoever asks here waits until it goes on.
#[test]
fn a_ring_that_stands_still_says_so_until_it_goes_on() {
    /// It is said after 2.75 s; after 7.5 s at least the member is lost. The rest is for a slow machine.
    const SAID_WITHIN: Duration = Duration::from_millis(6500);
    const TRIES: usize = 5;
    const PROMPT: &str = "Once upon a time";
    const TOKENS: usize = 20;
    let ring = LocalRing::builder().model(&smollm2()).members(3).start();
    let expected = ring.complete(PROMPT, TOKENS);
    let health = || http::get(ring.address(), "/health").unwrap();
    let victim = ring.members()[1].clone();
    let who = format!("member {}", victim.name);
    let why = format!("no sign of life from {who}");
    // A rank 0 that gets no processor for a second begins to listen anew. Where it does so often, the member is lost before that is said.
    let said = (0..TRIES).find_map(|_| {
        // A rank 0 that gets no processor for seconds says so, too.
        wait_until("/health is well", || health().status == 200);
        let stopped = Stopwatch::start();
        send_signal(victim.pid, Signal::STOP);
        let said = wait_for("/health names it", || match health() {
            answer if answer.body.contains(&who) => Ok(answer),
            answer => Err(answer.body),
        });
        let after = stopped.elapsed();
        if said.body.contains(&why) {
            return Some((after, said));
        }
        eprintln!("lost after {after:?}: {}", said.body);
        send_signal(victim.pid, Signal::CONT);
        None
    });
    let (after, said) = said.expect("it is said before the member is lost");
    eprintln!("said after {after:?}: {}", said.body);
    assert!(after < SAID_WITHIN, "said after {after:?}");
    assert_eq!(said.status, 503);
    assert_eq!(said.json()["failsAt"], json!(victim.name));
    let ready = http::metric(ring.address(), "prima_ring_ready").unwrap();
    assert!(ready < 0.5, "{ready}");
    let answer = thread::scope(|scope| {
        let answer = scope.spawn(|| ring.complete(PROMPT, TOKENS));
        // Else it would be asked afterwards.
        thread::sleep(Duration::from_millis(300));
        send_signal(victim.pid, Signal::CONT);
        answer.join().unwrap()
    });
    assert_eq!(answer, expected);
    wait_until("/health is well again", || health().status == 200);
    ring.stop();
}

fn kill_and_be_told(rank: usize) {
    let (ring, events) = ring_in_mid_stream();
    let victim = ring.members()[rank].clone();
    let lost = Stopwatch::start();
    send_signal(victim.pid, Signal::KILL);
    assert_told(events, &victim, &lost, END_TOLD_WITHIN);
    assert_ring_names(ring, &victim);
}

/// A ring of three members, and a stream that is far from its end.
fn ring_in_mid_stream() -> (LocalRing, EventStream) {
    let ring = LocalRing::builder().model(&smollm2()).members(3).start();
    let mut events = stream(&ring, 8000);
    for _ in 0..5 {
        let event = events.next().expect("an event").unwrap();
        assert!(event.contains("choices"), "{event}");
    }
    (ring, events)
}

fn stream(ring: &LocalRing, tokens: usize) -> EventStream {
    let body = json!({
        "model": ring.model(),
        "prompt": "Once upon a time",
        "max_tokens": tokens,
        "temperature": 0,
        "stream": true,
    });
    let events = http::post_streaming(ring.address(), "/v1/completions", &body).unwrap();
    assert_eq!(events.status, 200);
    events
}

/// The stream ends with an error event that names the lost member, and never with `[DONE]`.
fn assert_told(events: EventStream, victim: &Member, lost: &Stopwatch, within: Duration) {
    let error = events.error_at_end();
    let told = lost.elapsed();
    assert!(told < within, "told after {told:?}: {error}");
    assert!(
        error.contains(&victim.name) && error.contains("lost"),
        "expected an error that names {}, found {error:?}",
        victim.name
    );
}

/// `prima run` ends by itself, with an error that names the member and the signal, and nothing is left.
fn assert_ring_names(ring: LocalRing, victim: &Member) {
    let members = ring.members().to_vec();
    let ended = ring.wait_for_end();
    assert_eq!(ended.status.code(), Some(1), "{ended:#?}");
    let expected = format!("member {} (rank", victim.name);
    let line = ended
        .stderr
        .lines()
        .find(|line| line.contains(&expected))
        .unwrap_or_else(|| panic!("no {expected:?} in {ended:#?}"));
    assert!(line.contains("SIGKILL"), "{line}");
    assert_none_left(&members);
}
