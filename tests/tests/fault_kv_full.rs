//! More conversations at once than the KV cache holds, on machines that have as much memory as was planned and no more: all are
//! answered, members never hold more than the plan pays for, and the kernel kills nobody. And clients that want far too much of such a machine,
//! which has a little more memory for them. Real memory limits, so this takes root and a writable memory cgroup; `make test` leaves it out
//! elsewhere, and says so.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::RingPlan;
use prima_tests::local_ring::smollm2;
use prima_tests::machine::{Limits, Machine, cold_copy};
use prima_tests::machine_ring::{MachineRing, Node, ThisMachine, plan, usual_profile};
use prima_tests::one_process::{OneProcess, end_tokens};
use prima_tests::siege::{allow_open_files, hostile_bodies, siege, streams};
use prima_tests::{Endpoint, http};
use serde_json::{Map, Value, json};

const CONTEXT: usize = 512;
const AT_ONCE: usize = 16;
/// Requests that fill the context together.
const SHORT: Tokens = Tokens {
    prompt: 16,
    answer: CONTEXT / AT_ONCE - 16,
};
/// Requests of which each fills it.
const LONG: Tokens = Tokens {
    prompt: CONTEXT - 16,
    answer: 16,
};
/// An agent leaves a twentieth of a machine to its owner.
const OWNERS_SHARE: u64 = 20;
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// What clients may take of rank 0 before they are admitted.
const BESIEGERS_SHARE: u64 = 512 << 20;

/// Of a request.
#[derive(Clone, Copy)]
struct Tokens {
    prompt: usize,
    answer: usize,
}

/// The most that the ring told of its KV caches.
#[derive(Debug, Default)]
struct Most {
    positions: u64,
    bytes: u64,
}

#[test]
fn conversations_of_16_contexts_fit_into_the_memory_of_one() {
    let model = smollm2();
    let context = CONTEXT.to_string();
    let arguments = ["--context", &context, "--concurrency", "1"];
    let mut one = plan(&model, vec![usual_profile(); 2], &arguments).plan;
    let members = one.spec.members.iter();
    let planned_bytes: u64 = members
        .map(|member| member.kv_bytes.expect("a planned KV cache") as u64)
        .sum();
    one.spec.max_concurrent_requests = AT_ONCE as i32;

    // Other tests may have the model in memory, where it would not count on these machines.
    let folders = [(); 2].map(|()| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    let machines: Vec<Machine> = memory(&one)
        .into_iter()
        .enumerate()
        .map(|(rank, bytes)| {
            let limits = Limits::of_memory(bytes + bytes / (OWNERS_SHARE - 1));
            Machine::new(&format!("full{rank}"), &limits, &model).unwrap()
        })
        .collect();
    // Of the machines above, each is its member's.
    let names: Vec<&str> = one
        .spec
        .members
        .iter()
        .map(|member| member.name.as_str())
        .collect();
    assert_eq!(names, ["m0", "m1"]);
    let nodes: Vec<Node> = machines
        .iter()
        .zip(&folders)
        .map(|(machine, folder)| Node {
            machine,
            model: cold_copy(&model, folder.path()).unwrap(),
        })
        .collect();
    let mut ring = MachineRing::start(one, &nodes, &[]);

    let never = end_tokens(&OneProcess::open(&model, 1).unwrap());
    let requests = Requests {
        address: ring.address(),
        never: never
            .iter()
            .map(|token| (token.to_string(), json!(-100)))
            .collect(),
    };
    let (answers, most) = thread::scope(|scope| {
        let clients = scope.spawn(|| [SHORT, LONG].map(|tokens| requests.ask_all(tokens)));
        let most = watch(requests.address, || !clients.is_finished());
        (clients.join().unwrap(), most)
    });

    // What had to make room and was computed again is still the same.
    for (tokens, answers) in [SHORT, LONG].into_iter().zip(answers) {
        assert_eq!(requests.ask(AT_ONCE - 1, tokens), answers[AT_ONCE - 1]);
    }
    assert!(most.positions > CONTEXT as u64 / 2, "never full: {most:?}");
    assert!(
        most.bytes > planned_bytes / 2,
        "never full: {most:?} of {planned_bytes}"
    );
    assert!(most.bytes <= planned_bytes, "{most:?} of {planned_bytes}");
    ring.expect_all_running();
    for machine in &machines {
        assert_eq!(machine.killed_for_memory().unwrap(), 0);
    }
}

#[test]
fn a_siege_fits_into_half_a_gigabyte_beside_the_plan() {
    let model = smollm2();
    let context = CONTEXT.to_string();
    let planned = plan(&model, vec![usual_profile(); 2], &["--context", &context]).plan;
    let limits = Limits::of_memory(memory(&planned)[0] + BESIEGERS_SHARE);
    let machine = Machine::new("siege", &limits, &model).unwrap();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let rank_0 = Node {
        machine: &machine,
        model: cold_copy(&model, folder.path()).unwrap(),
    };
    let other = Node {
        machine: &ThisMachine,
        model: model.clone(),
    };
    assert_eq!(planned.spec.members[0].name, "m0");
    let mut ring = MachineRing::start(planned, &[rank_0, other], &[]);
    // Behind the ring's start, which has the usual limit.
    allow_open_files(4096);
    let in_peace = streams(&ring, || {}).0;
    let bodies = hostile_bodies();
    let (under_siege, (answers, slow)) = streams(&ring, || siege(ring.address(), &bodies));
    assert_eq!(under_siege, in_peace);
    assert!(answers.contains(&Some(413)), "{answers:?}");
    drop(slow);
    ring.expect_all_running();
    assert_eq!(machine.killed_for_memory().unwrap(), 0);
}

/// Bytes that the plan counts on at each member.
fn memory(plan: &RingPlan) -> Vec<u64> {
    let members = plan.spec.members.iter();
    members
        .map(|member| member.memory_bytes.expect("a planned memory") as u64)
        .collect()
}

/// Reads what the ring tells while requests run; panics when it is more than it says was planned.
fn watch(address: SocketAddr, run: impl Fn() -> bool) -> Most {
    let mut most = Most::default();
    while run() {
        let told = http::get(address, "/ring").unwrap().json();
        let number = |at: &str| told.pointer(at).and_then(Value::as_u64).expect(at);
        let used = number("/ring/kv/used_positions");
        let planned = number("/ring/kv/planned_positions");
        assert!(used <= planned, "{used} positions of {planned}");
        assert_eq!(planned, CONTEXT as u64);
        most.positions = most.positions.max(used);
        most.bytes = most.bytes.max(number("/ring/kv_bytes"));
        thread::sleep(SAMPLE_INTERVAL);
    }
    most
}

struct Requests {
    address: SocketAddr,
    /// Tokens that would end an answer early.
    never: Map<String, Value>,
}

impl Requests {
    /// The answers to as many requests as run at once, none of which begins as another does.
    fn ask_all(&self, tokens: Tokens) -> Vec<String> {
        thread::scope(|scope| {
            let clients: Vec<_> = (0..AT_ONCE)
                .map(|number| scope.spawn(move || self.ask(number, tokens)))
                .collect();
            let answers = clients.into_iter().map(|client| client.join().unwrap());
            answers.collect()
        })
    }

    fn ask(&self, number: usize, tokens: Tokens) -> String {
        let prompt: Vec<usize> = (1..=tokens.prompt)
            .map(|position| 100 + (number * 6151 + position * 7919) % 40_000)
            .collect();
        let body = json!({
            "prompt": prompt,
            "max_tokens": tokens.answer,
            "temperature": 0,
            "logit_bias": self.never,
        });
        let response = http::post(self.address, "/v1/completions", &body).unwrap();
        assert_eq!(response.status, 200, "{}", response.body);
        let answer = response.json();
        let found = answer
            .pointer("/usage/completion_tokens")
            .and_then(Value::as_u64);
        assert_eq!(found, Some(tokens.answer as u64), "{answer}");
        let text = answer.pointer("/choices/0/text").and_then(Value::as_str);
        text.expect("a text").to_owned()
    }
}
