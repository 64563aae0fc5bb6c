//! Which experts passes need: as rings trace it and count it, and as a replay of traces finds in memory what the cache found.

use std::fs;

use prima_gguf::GgmlType;
use prima_test_models::mixture::{self, EXPERT_BYTES, EXPERTS, LAYERS, VOCABULARY};
use prima_test_models::options::Variant;
use prima_test_models::{
    EXPERTS_PER_TOKEN, FAMILIES, MadeUpModel, Random, Runner, characters_as_tokens,
};
use prima_tests::expert_replay::{Policy, Trace};
use prima_tests::local_ring::LocalRing;
use prima_tests::machine_ring::{MachineRing, Node, ThisMachine, plan, usual_profile};
use prima_tests::{Endpoint, http, wait_until};
use serde_json::{Value, json};

#[test]
fn a_ring_traces_what_its_passes_need() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("mixture.gguf");
    let made_up = Variant::of("qwen3moe");
    made_up.write(&model, characters_as_tokens);
    let layers = made_up.model.layers;
    let ring = LocalRing::builder()
        .model(&model)
        .split(&[layers - 1, 1])
        .arg("--no-speculation")
        .env("PRIMA_ROUTING_TRACE", folder.path())
        .start();
    // The prompt is one pass, and the last token is computed no more.
    const PASSES: usize = 12;
    answer(&ring, PASSES, 1);
    wait_until("all is written", || {
        let of_layers: Vec<_> = ["m0", "m1"]
            .iter()
            .filter_map(|member| {
                fs::read_to_string(folder.path().join(format!("{member}.routing"))).ok()
            })
            // What is being written may end inside of a number.
            .filter(|text| text.ends_with('\n'))
            .flat_map(|text| Trace::parse(&text).unwrap().layers)
            .collect();
        let numbers = of_layers.iter().map(|(number, _)| *number);
        numbers.eq(0..layers)
            && of_layers
                .iter()
                .all(|(_, passes)| ends_with_answer(passes, PASSES))
    });
    ring.stop();
}

/// So many tokens from a ring, none of which may end the answer, with the log probabilities at each.
fn answer(ring: &impl Endpoint, tokens: usize, temperature: u8) -> Value {
    let body = json!({
        "model": ring.model(), "prompt": "Once", "max_tokens": tokens, "temperature": temperature, "logprobs": 3, "logit_bias": {"95": -100},
    });
    let answer = http::post(ring.address(), "/v1/completions", &body).unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    assert_eq!(answer["usage"]["completion_tokens"], tokens);
    answer["choices"].clone()
}

/// Whether the last `count` of the passes are that of a prompt and of single tokens.
fn ends_with_answer(passes: &[Vec<u32>], count: usize) -> bool {
    let begun = passes.len().saturating_sub(count);
    match &passes[begun..] {
        [prompt, tokens @ ..] if tokens.len() + 1 == count => {
            let each = tokens
                .iter()
                .all(|needed| needed.len() == EXPERTS_PER_TOKEN);
            each && prompt.len() > EXPERTS_PER_TOKEN
        }
        _ => false,
    }
}

#[test]
fn a_ring_counts_experts_found_and_missing() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("mixture.gguf");
    mixture::write_for_ring(&model);
    let planned = plan(&model, vec![usual_profile(); 2], &[]).plan;
    let node = || Node {
        machine: &ThisMachine,
        model: model.clone(),
    };
    // Less than a layer takes, but enough for some experts beside what every token uses.
    let memory = (EXPERTS as u64 * EXPERT_BYTES).to_string();
    let arguments = ["--weights-memory", &memory];
    let ring = MachineRing::start(planned, &[node(), node()], &arguments);
    // The memory is given back a moment after the start.
    for told in [
        "prima_member_expert_hits_total",
        "prima_member_expert_misses_total",
    ] {
        wait_until(told, || {
            answer(&ring, 12, 1);
            let counts = http::metrics(ring.address(), told).unwrap();
            counts.len() == 2 && counts.iter().all(|count| *count > 0.0)
        });
    }
}

/// The last of them has memory for 30 % of the weights.
#[test]
fn mixtures_answer_the_same_in_rings_of_one_two_and_three() {
    let folder = tempfile::tempdir().unwrap();
    let families = FAMILIES.into_iter();
    let mixtures: Vec<_> = families
        .filter(|family| MadeUpModel::of(family).experts > 0)
        .collect();
    assert_eq!(mixtures.len(), 8);
    for family in mixtures {
        let path = folder.path().join(format!("{family}.gguf"));
        let model = MadeUpModel {
            formats: vec![GgmlType::F16],
            ..MadeUpModel::of(family)
        };
        model.write_for_ring(&path);
        let bytes = fs::metadata(&path).unwrap().len();
        let [one, two, three] = [1, 2, 3].map(|count| {
            let planned = plan(&path, vec![usual_profile(); count], &["--context", "128"]).plan;
            assert_eq!(planned.spec.members.len(), count);
            let nodes = (0..count).map(|_| Node {
                machine: &ThisMachine,
                model: path.clone(),
            });
            let nodes: Vec<_> = nodes.collect();
            let memory = (bytes * 30 / 100 / count as u64).to_string();
            let short = ["--weights-memory", &memory];
            let is_short = count == 3;
            let ring = MachineRing::start(planned, &nodes, if is_short { &short } else { &[] });
            let greedy = answer(&ring, 12, 0);
            if is_short {
                // The memory is given back a moment after the start.
                wait_until("experts are missed", || {
                    assert_eq!(answer(&ring, 12, 0), greedy, "{family}");
                    let told = "prima_member_expert_misses_total";
                    http::metric(ring.address(), told).unwrap() > 0.0
                });
            }
            greedy
        });
        assert_eq!(one, two, "{family}");
        assert_eq!(one, three, "{family}");
    }
}

/// The memory that an expert takes: three parts of 16 pages, which may begin and end inside of a page.
const EXPERT_MEMORY: u64 = 3 * (68 << 10);

#[test]
fn the_replay_finds_what_the_cache_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = mixture::write(folder.path());
    let mut sizes = Vec::new();
    for percent in [35, 50, 80] {
        let runner = Runner::limited(&path, &[LAYERS], percent, None);
        // The replay begins with nothing in memory, and so must the cache: it would keep what the system has read around the file's header.
        runner.residency.set_budget(0);
        let budget = runner.residency.weight_bytes() * percent / 100;
        runner.residency.set_budget(budget);
        let uses = runner.residency.watch_experts().unwrap();
        assert!(
            runner.residency.watch_experts().is_none(),
            "they are for one"
        );
        let mut kv = runner.kv_cache();
        let mut random = Random(percent);
        let tokens: Vec<u32> = (0..40)
            .map(|_| random.within(0..VOCABULARY) as u32)
            .collect();
        let (prompt, rest) = tokens.split_at(20);
        runner.logits(&mut kv, prompt);
        for token in rest {
            runner.logits(&mut kv, &[*token]);
        }

        let written: String = uses.try_iter().map(|used| format!("{used}\n")).collect();
        let trace = Trace::parse(&written).unwrap();
        assert_eq!(trace.layers.len(), LAYERS);
        let status = runner.residency.status();
        let dense = runner.residency.weight_bytes() - (LAYERS * EXPERTS) as u64 * EXPERT_BYTES;
        let experts = status.resident_bytes - dense;
        assert_eq!(experts % EXPERT_MEMORY, 0, "{status:?}");
        let room = (experts / EXPERT_MEMORY) as usize;
        let counts = trace.replay(Policy::ProtectedLru, room, 0);
        println!("{percent} %: room for {room} in all, {counts:?}");
        let found = [status.expert_hits, status.expert_misses];
        assert_eq!([counts.hits as u64, counts.misses as u64], found);
        sizes.push(room);
    }
    // Of the smallest, a token needs more than there is room for.
    assert!(
        0 < sizes[0] && sizes[0] < LAYERS * EXPERTS_PER_TOKEN,
        "{sizes:?}"
    );
    assert!(sizes[0] < sizes[1] && sizes[1] < sizes[2], "{sizes:?}");
}
