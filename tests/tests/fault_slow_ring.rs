//! A ring as a household may have it: far apart, with links of 300 ms, and one member ten times slower than the others. It answers as any
//! other, and a member that is lost is noticed and named. Real limits of processor time, so this takes root and writable cgroups; `make
//! test` leaves it out elsewhere, and says so.

use std::time::{Duration, Instant};

use prima_tests::Endpoint;
use prima_tests::http::{self, EventStream};
use prima_tests::local_ring::smollm2;
use prima_tests::machine::{Limits, Machine};
use prima_tests::machine_ring::{MachineRing, Node, cut};
use prima_tests::process::send_signal;
use prima_tests::stopwatch::Stopwatch;
use rustix::process::Signal;
use serde_json::{Value, json};

const LINK: Duration = Duration::from_millis(300);
/// Processors of each machine: the second is the slow one.
const CPUS: [f64; 3] = [1.0, 0.1, 1.0];
const SLOW: &str = "m1";
/// From the signal that ends or stops it until the client knows who is lost. Of a silent one, pings find it out within 8 s, and what it had
/// written is on the link for 0.3 s more.
const TOLD_WITHIN: Duration = Duration::from_secs(10);
const PROMPT: &str = "The capital of France is";
const CONTEXT: i32 = 512;

#[test]
fn a_slow_ring_answers_as_any_other() {
    const TOKENS: usize = 12;
    let usual = MachineRing::start_here(cut(&smollm2(), CONTEXT, 1, 1), &[]);
    let expected = usual.complete(PROMPT, TOKENS);
    usual.stop();
    let machines = machines();
    let ring = SlowRing::start(&machines);
    let begun = Instant::now();
    let answer: String = ring.stream(TOKENS).map_while(text).collect();
    assert_eq!(answer, expected);
    // Else the links are not what this is about.
    let trips = CPUS.len() as u32 * TOKENS as u32;
    assert!(begun.elapsed() >= trips * LINK, "{:?}", begun.elapsed());
}

#[test]
fn a_killed_member_of_a_slow_ring_is_named() {
    let machines = machines();
    let ring = SlowRing::start(&machines);
    let events = ring.stream_in_the_middle();
    let signal = Stopwatch::start();
    send_signal(ring.slow, Signal::KILL);
    assert_told(events, &signal);
}

/// Its connections stay, only its silence can give it away.
#[test]
fn a_silent_member_of_a_slow_ring_is_named() {
    let machines = machines();
    let ring = SlowRing::start(&machines);
    let events = ring.stream_in_the_middle();
    let signal = Stopwatch::start();
    send_signal(ring.slow, Signal::STOP);
    assert_told(events, &signal);
    // So that it can be ended.
    send_signal(ring.slow, Signal::CONT);
}

/// The client is told who is lost.
fn assert_told(events: EventStream, signal: &Stopwatch) {
    let error = events.error_at_end();
    let told = signal.elapsed();
    eprintln!("told after {told:?}: {error}");
    assert!(told < TOLD_WITHIN, "told after {told:?}: {error}");
    assert!(
        error.contains(SLOW) && error.contains("lost"),
        "expected an error that names {SLOW}, found {error:?}"
    );
}

fn machines() -> Vec<Machine> {
    CPUS.iter()
        .enumerate()
        .map(|(index, cpus)| {
            let limits = Limits {
                cpus: Some(*cpus),
                ..Limits::of_memory(1 << 30)
            };
            Machine::new(&format!("slow{index}"), &limits, &smollm2()).unwrap()
        })
        .collect()
}

struct SlowRing {
    ring: MachineRing,
    /// The slow member's process.
    slow: u32,
}

impl SlowRing {
    /// Waits until it is ready.
    fn start(machines: &[Machine]) -> SlowRing {
        let model = smollm2();
        let mut plan = cut(&model, CONTEXT, CPUS.len(), 1);
        for member in &mut plan.spec.members {
            member.members_on_machine = 1;
        }
        let slow = plan.spec.rank_of(SLOW).expect("a slow member");
        let nodes: Vec<Node> = machines
            .iter()
            .map(|machine| Node {
                machine,
                model: model.clone(),
            })
            .collect();
        let ring = MachineRing::start_apart(plan, &nodes, &["--threads", "1"], LINK);
        SlowRing {
            slow: ring.pids()[slow],
            ring,
        }
    }

    fn stream(&self, tokens: usize) -> EventStream {
        let body = json!({
            "model": self.ring.model(),
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": true,
        });
        let events = http::post_streaming(self.ring.address(), "/v1/completions", &body).unwrap();
        assert_eq!(events.status, 200);
        events
    }

    /// An answer that has begun and is far from its end.
    fn stream_in_the_middle(&self) -> EventStream {
        let mut events = self.stream(400);
        for _ in 0..3 {
            let event = events.next().expect("an event").unwrap();
            assert!(event.contains("choices"), "{event}");
        }
        events
    }
}

/// What an event adds to the answer; none at its end.
fn text(event: std::io::Result<String>) -> Option<String> {
    let event: Value = serde_json::from_str(&event.unwrap()).ok()?;
    Some(event["choices"][0]["text"].as_str()?.to_owned())
}
