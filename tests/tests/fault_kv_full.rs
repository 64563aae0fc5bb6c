//! More conversations at once than the KV cache holds, on machines that have as much memory as was planned and no more: all are
//! answered, no member ever holds more than the plan pays for, and the kernel kills nobody. The same of a model whose layers mostly have windows.
//! And clients that want far too much of such a machine, which has a little more memory for them. Real memory limits, so this takes root and a
//! writable memory cgroup; `make test` leaves it out elsewhere, and says so.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::RingPlan;
use prima_test_models::MadeUpModel;
use prima_tests::local_ring::smollm2;
use prima_tests::machine::{Limits, Machine, cold_copy};
use prima_tests::machine_ring::{MachineRing, Node, ThisMachine, plan, usual_profile};
use prima_tests::one_process::{OneProcess, end_tokens};
use prima_tests::siege::{allow_open_files, hostile_bodies, siege, streams};
use prima_tests::{Endpoint, http};
use serde_json::{Map, Value, json};

/// Requests that a plan runs at once where nobody says how many.
const AT_ONCE: usize = 16;
/// An agent leaves a twentieth of a machine to its owner.
const OWNERS_SHARE: u64 = 20;
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// What clients may take of rank 0 before they are admitted.
const BESIEGERS_SHARE: u64 = 512 << 20;

/// A model, and what it is asked.
struct Case {
    model: PathBuf,
    context: usize,
    /// The tokens of prompts.
    tokens: Range<usize>,
}

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
    let case = Case {
        model: smollm2(),
        context: 512,
        tokens: 100..40_100,
    };
    let one = case.plan();
    // Other tests may have the model in memory, where it would not count on these machines.
    let folders = [(); 2].map(|()| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    let machines: Vec<Machine> = memory(&one)
        .into_iter()
        .enumerate()
        .map(|(rank, bytes)| {
            let limits = Limits::of_memory(bytes + bytes / (OWNERS_SHARE - 1));
            Machine::new(&format!("full{rank}"), &limits, &case.model).unwrap()
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
            model: cold_copy(&case.model, folder.path()).unwrap(),
        })
        .collect();
    let planned_bytes = kv_bytes(&one);
    let mut ring = MachineRing::start(one, &nodes, &[]);
    let most = case.fill(&ring);
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

/// Of seven layers, one sees all positions. The others keep the ends of conversations, for which there is less memory than for the context.
#[test]
fn conversations_of_16_contexts_fit_into_windows() {
    let folder = tempfile::tempdir().unwrap();
    let case = Case {
        model: folder.path().join("gemma3.gguf"),
        context: 4096,
        tokens: 0..95,
    };
    let made_up = MadeUpModel {
        context_length: case.context as u32,
        ..MadeUpModel::of("gemma3")
    };
    made_up.write_for_ring(&case.model);
    let planned = case.plan();
    assert_eq!(planned.spec.windowed_sequences, AT_ONCE as i32);
    let planned_bytes = kv_bytes(&planned);
    // Keys and values in F16.
    let position = 2 * 2 * made_up.kv_heads * made_up.head_dim();
    let whole = (made_up.layers * case.context * position) as u64;
    assert!(planned_bytes < whole, "{planned_bytes} of {whole}");
    let nodes = [(); 2].map(|()| Node {
        machine: &ThisMachine,
        model: case.model.clone(),
    });
    let mut ring = MachineRing::start(planned, &nodes, &[]);
    let most = case.fill(&ring);
    // Between chunks of prompts, windows hold half of what these take, and less.
    assert!(
        most.bytes > planned_bytes / 4,
        "never full: {most:?} of {planned_bytes}"
    );
    ring.expect_all_running();
}

#[test]
fn a_siege_fits_into_half_a_gigabyte_beside_the_plan() {
    let model = smollm2();
    let planned = plan(&model, vec![usual_profile(); 2], &["--context", "512"]).plan;
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

/// Bytes that the plan counts on for the KV caches of all members.
fn kv_bytes(plan: &RingPlan) -> u64 {
    let members = plan.spec.members.iter();
    members
        .map(|member| member.kv_bytes.expect("a planned KV cache") as u64)
        .sum()
}

impl Case {
    fn plan(&self) -> RingPlan {
        let context = self.context.to_string();
        let profiles = vec![usual_profile(); 2];
        plan(&self.model, profiles, &["--context", &context]).plan
    }

    /// Asks for short answers that fill the context together, then for long ones of which each fills it. All must be answered, and what had to
    /// make room and was computed again as before.
    fn fill(&self, ring: &MachineRing) -> Most {
        let short = Tokens {
            prompt: 16,
            answer: self.context / AT_ONCE - 16,
        };
        let long = Tokens {
            prompt: self.context - 16,
            answer: 16,
        };
        let never = end_tokens(&OneProcess::open(&self.model, 1).unwrap());
        let requests = Requests {
            address: ring.address(),
            tokens: self.tokens.clone(),
            never: never
                .iter()
                .map(|token| (token.to_string(), json!(-100)))
                .collect(),
        };
        let (answers, most) = thread::scope(|scope| {
            let clients = scope.spawn(|| [short, long].map(|tokens| requests.ask_all(tokens)));
            let most = watch(requests.address, self.context, || !clients.is_finished());
            (clients.join().unwrap(), most)
        });
        for (tokens, answers) in [short, long].into_iter().zip(answers) {
            assert_eq!(requests.ask(AT_ONCE - 1, tokens), answers[AT_ONCE - 1]);
        }
        assert!(
            most.positions > self.context as u64 / 2,
            "never full: {most:?}"
        );
        most
    }
}

/// Reads what the ring tells while requests run; panics when it is more than it says was planned, of all members or of one.
fn watch(address: SocketAddr, context: usize, run: impl Fn() -> bool) -> Most {
    let mut most = Most::default();
    while run() {
        let told = http::get(address, "/ring").unwrap().json();
        let number = |at: &str| told.pointer(at).and_then(Value::as_u64).expect(at);
        let used = number("/ring/kv/used_positions");
        let planned = number("/ring/kv/planned_positions");
        assert!(used <= planned, "{used} positions of {planned}");
        assert_eq!(planned, context as u64);
        let members = told.pointer("/ring/members").and_then(Value::as_array);
        for member in members.expect("members") {
            let bytes = |field: &str| member[field].as_f64().expect(field);
            let (held, planned) = (bytes("kv_cache_bytes"), bytes("planned_kv_bytes"));
            assert!(held <= planned, "{held} bytes of {planned}: {member}");
        }
        most.positions = most.positions.max(used);
        most.bytes = most.bytes.max(number("/ring/kv_bytes"));
        thread::sleep(SAMPLE_INTERVAL);
    }
    most
}

struct Requests {
    address: SocketAddr,
    /// Those of prompts.
    tokens: Range<usize>,
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
            .map(|position| {
                let place = (number * 6151 + position * 7919) % self.tokens.len();
                self.tokens.start + place
            })
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
