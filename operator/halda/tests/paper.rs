//! The paper's home clusters (Table 2), from documents whose sources they name: the shape of the answers and the latencies
//! of Table 3. Golden: what is planned for each is kept in `paper/plans.txt`, to be read and compared.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

#[path = "paper/chunks.rs"]
mod chunks;
#[path = "paper/gpus.rs"]
mod gpus;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::{NodeProfile, Os};
use prima_crds::v1alpha1::ring_plan::{ActivationDtype, KvDtype};
use prima_halda::check::check;
use prima_halda::search::{Effort, search};
use prima_halda::{Options, Plan, PlanError, PlanningInput, plan};

const CONTEXT: usize = 1024;
const MODELS: [&str; 4] = ["llama-3-8b", "llama-1-13b", "llama-1-30b", "llama-3-70b"];
const D1_TO_D4: [&str; 4] = ["d1", "d2", "d3", "d4"];
const ALL: [&str; 6] = ["d1", "d2", "d3", "d4", "d5", "d6"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/paper")
}

fn text(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

fn model(name: &str) -> ModelProfile {
    ModelProfile::from_yaml(name, &text(&format!("{name}.yaml"))).unwrap()
}

fn nodes(names: &[&str]) -> Vec<NodeProfile> {
    names
        .iter()
        .map(|name| NodeProfile::from_yaml(name, &text(&format!("{name}.yaml"))).unwrap())
        .collect()
}

fn options() -> Options {
    Options {
        context_tokens: CONTEXT,
        prompt_tokens: 64,
        answer_tokens: 128,
        ..Options::default()
    }
}

fn planned(model: &ModelProfile, nodes: &[NodeProfile], options: &Options) -> Plan {
    let input = PlanningInput::new(model, nodes, options).unwrap();
    let plan = plan(&input).unwrap();
    let findings = check(&plan, model, nodes, options);
    assert!(findings.is_empty(), "{findings:?}");
    plan
}

fn described(title: &str, plan: &Plan) -> String {
    let report = &plan.report;
    let mut text = format!(
        "{title}: {} round(s), {:.0} ms per token, {:.0} ms to the first\n",
        report.rounds, report.tpot_milliseconds, report.ttft_milliseconds
    );
    for member in &report.members {
        let _ = writeln!(
            text,
            "  {}: {} layers, {} of them{} on the GPU; {:.1} GiB in memory, {:.1} GiB read per token",
            member.name,
            member.layers,
            member.gpu_layers,
            match member.output_head_on_gpu {
                true => " and the output head",
                false => "",
            },
            member.memory_bytes as f64 / f64::from(1 << 30),
            member.overflow_bytes as f64 / f64::from(1 << 30),
        );
    }
    for out in &report.left_out {
        let _ = writeln!(text, "  out: {}", out.name);
    }
    text
}

#[test]
fn plans_are_those_that_were_read_and_found_good() {
    let mut plans = String::new();
    for name in MODELS {
        let model = model(name);
        for (title, names) in [("D1 to D4", &D1_TO_D4[..]), ("D1 to D6", &ALL[..])] {
            let plan = planned(&model, &nodes(names), &options());
            plans += &described(&format!("{name} on {title}"), &plan);
        }
    }
    let path = folder().join("plans.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &plans).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        plans == golden,
        "plans differ from {}; if the new ones are better, write them with UPDATE_GOLDEN=1\n{plans}",
        path.display()
    );
}

#[test]
fn latencies_are_near_those_of_table_3() {
    let cluster = nodes(&D1_TO_D4);
    // 8B on one device: the later version of the paper, and llama.cpp on D3.
    let measured = [
        ("llama-3-8b", 15.0),
        ("llama-1-30b", 72.0),
        ("llama-3-70b", 674.0),
    ];
    let mut before = 0.0;
    for (name, milliseconds) in measured {
        let predicted = planned(&model(name), &cluster, &options())
            .report
            .tpot_milliseconds;
        let factor = predicted / milliseconds;
        assert!(
            (1.0 / 1.5..=1.5).contains(&factor),
            "{name}: predicted {predicted:.0} ms, measured {milliseconds} ms"
        );
        assert!(predicted > before, "the order of rows");
        before = predicted;
    }
}

#[test]
fn a_model_that_fits_one_gpu_runs_on_one_device() {
    let plan = planned(&model("llama-3-8b"), &nodes(&D1_TO_D4), &options());
    let [only] = &plan.report.members[..] else {
        panic!("{:#?}", plan.report);
    };
    assert_eq!(
        (only.name.as_str(), only.layers, only.gpu_layers),
        ("d3", 32, 32)
    );
    assert_eq!(plan.rounds, 1);
}

#[test]
fn a_strong_device_does_nearly_all_among_weak_ones() {
    let options = Options {
        use_all: true,
        ..options()
    };
    let plan = planned(&model("llama-3-8b"), &nodes(&D1_TO_D4), &options);
    let layers = |name: &str| {
        let member = plan
            .report
            .members
            .iter()
            .find(|member| member.name == name);
        member.unwrap().layers
    };
    // The paper's 1:1:29:1.
    assert_eq!(D1_TO_D4.map(layers), [1, 1, 29, 1]);
}

/// Powerful GPU, then weak GPU, then CPU, then disk.
#[test]
fn gpus_fill_before_cpus_and_cpus_before_disks() {
    let cluster = nodes(&D1_TO_D4);
    let eight = planned(&model("llama-3-8b"), &cluster, &options());
    let thirty = planned(&model("llama-1-30b"), &cluster, &options());
    let seventy = planned(&model("llama-3-70b"), &cluster, &options());
    let sums = |plan: &Plan| {
        let members = &plan.report.members;
        let gpu: usize = members.iter().map(|member| member.gpu_layers).sum();
        let cpu: usize = members
            .iter()
            .map(|member| member.layers - member.gpu_layers)
            .sum();
        let read: u64 = members.iter().map(|member| member.overflow_bytes).sum();
        (gpu, cpu, read)
    };
    assert_eq!(sums(&eight), (32, 0, 0));
    let (gpu, cpu, read) = sums(&thirty);
    assert!(gpu > 50 && cpu < 10 && read == 0, "{gpu} {cpu} {read}");
    let (gpu, cpu, read) = sums(&seventy);
    assert!(gpu > 40 && cpu > 20 && read > 0, "{gpu} {cpu} {read}");
}

#[test]
fn of_six_devices_a_seventy_billion_model_leaves_some_out() {
    let plan = planned(&model("llama-3-70b"), &nodes(&ALL), &options());
    assert!(plan.report.members.len() < 6, "{:#?}", plan.report.members);
    assert!(!plan.report.left_out.is_empty());
}

/// Figure 2 of the paper: four CPU machines of 8 GiB with disks of 2 GB/s.
fn four_equal_machines() -> Vec<NodeProfile> {
    let one = text("d3.yaml")
        .replace("availableBytes: 10415295692", "availableBytes: 8589934592")
        .replace(
            "sequentialReadBytesPerSecond: 3170000000",
            "sequentialReadBytesPerSecond: 2000000000",
        );
    let gpus = one.find("  gpus:").unwrap();
    let links = one.find("  links:").unwrap();
    let one = format!("{}{}", &one[..gpus], &one[links..]);
    (1..=4)
        .map(|i| {
            let name = format!("d{i}");
            let other = one
                .replace("to: d4", "to: d3")
                .replace("name: d3", &format!("name: {name}"));
            let mut node = NodeProfile::from_yaml(&name, &other).unwrap();
            let status = node.status.as_mut().unwrap();
            let link = status.links[0].clone();
            status.links = (1..=4)
                .map(|to| {
                    let mut link = link.clone();
                    link.to = format!("d{to}");
                    link
                })
                .collect();
            node
        })
        .collect()
}

#[test]
fn several_rounds_win_only_when_memory_is_short() {
    let cluster = four_equal_machines();
    assert_eq!(
        cluster[0].status.as_ref().unwrap().memory.available_bytes,
        8 << 30
    );
    let seventy = planned(&model("llama-3-70b"), &cluster, &options());
    assert!(seventy.rounds > 1, "{:#?}", seventy.report);
    let one_round = Options {
        rounds: Some(1),
        ..options()
    };
    let once = planned(&model("llama-3-70b"), &cluster, &one_round);
    assert!(
        once.report.tpot_milliseconds > 1.2 * seventy.report.tpot_milliseconds,
        "{} {}",
        once.report.tpot_milliseconds,
        seventy.report.tpot_milliseconds
    );
    let all = Options {
        use_all: true,
        ..options()
    };
    assert_eq!(planned(&model("llama-3-8b"), &cluster, &all).rounds, 1);
    assert_eq!(
        planned(&model("llama-3-8b"), &cluster, &options()).rounds,
        1
    );
}

#[test]
fn what_does_not_fit_is_told_with_what_would_help() {
    let mut cluster = nodes(&["d4"]);
    cluster[0].spec.disk_allowed = Some(false);
    let model = model("llama-3-8b");
    let input = PlanningInput::new(&model, &cluster, &options()).unwrap();
    let error = plan(&input).unwrap_err();
    let PlanError::Infeasible(infeasible) = &error else {
        panic!("{error}");
    };
    let text = error.to_string();
    assert!(text.contains("disk"), "{text}");
    assert!(text.contains("more memory in d4 would do"), "{text}");
    // This much more memory is enough, and a little less is not.
    let missing = infeasible.missing_bytes.unwrap();
    let with = |bytes: u64| {
        let mut input = input.clone();
        input.devices[0].memory_bytes += bytes as f64;
        plan(&input).is_ok()
    };
    assert!(
        with(missing) && !with(missing - (missing >> 7)),
        "{missing}"
    );

    // That the first token is to come soon changes nothing of it.
    let mut soon = input.clone();
    soon.first_token_seconds = Some(1e-3);
    assert_eq!(plan(&soon).unwrap_err().to_string(), text);
}

#[test]
fn a_long_context_is_what_does_not_fit() {
    let cluster = nodes(&["d2"]);
    let model = model("llama-1-30b");
    let options = Options {
        context_tokens: 12_000,
        ..options()
    };
    let input = PlanningInput::new(&model, &cluster, &options).unwrap();
    let text = plan(&input).unwrap_err().to_string();
    assert!(
        text.contains("KV cache") && text.contains("% as long would fit"),
        "{text}"
    );
    let three = Options {
        context_tokens: 4000,
        kv_contexts: 3,
        ..options.clone()
    };
    let input = PlanningInput::new(&model, &cluster, &three).unwrap();
    let text = plan(&input).unwrap_err().to_string();
    let helps = "% as long, or that share of the whole contexts, would fit";
    assert!(text.contains(helps), "{text}");

    // Where most layers see only the last positions, it fits.
    let mut windowed = model.clone();
    windowed.spec.windowed_layers = 55;
    windowed.spec.attention_window = 128;
    let memory = planned(&windowed, &cluster, &options).report.members[0].memory_bytes;
    let kv = windowed.spec.kv_bytes_per_position_and_layer as u64 * 12_000;
    assert!(memory > 5 * kv, "{memory}: 5 layers see all positions");
}

#[test]
fn experts_have_a_rate_of_their_own_where_it_was_of_the_disk() {
    let mut cluster = nodes(&["d2"]);
    let model = model("llama-3-8b");
    for (os, measured, expected) in [
        (Os::Linux, None, None),
        (Os::Linux, Some(700_000_000), Some(7e8)),
        (Os::Linux, Some(10), Some(1e6)),
        (Os::MacOs, Some(700_000_000), None),
    ] {
        let status = cluster[0].status.as_mut().unwrap();
        status.system.os = os;
        status.disk.expert_read_bytes_per_second = measured;
        let input = PlanningInput::new(&model, &cluster, &options()).unwrap();
        assert_eq!(input.devices[0].expert_read_bytes_per_second, expected);
    }
}

#[test]
fn q8_0_fits_a_context_1_88_times_as_long() {
    let mut cluster = nodes(&["d2"]);
    cluster[0].spec.disk_allowed = Some(false);
    let status = cluster[0].status.as_mut().unwrap();
    status.gpus.clear();
    status.memory.available_bytes = 16 << 30;
    let mut model = model("llama-3-8b");
    let f16 = model.spec.kv_bytes_per_position_and_layer;
    model.spec.quantized_kv_bytes_per_position_and_layer = f16 * 17 / 32;
    // By the planner, whose plans are checked.
    let longest = |kv_dtype| {
        let fits = |context_tokens: &usize| {
            let options = Options {
                context_tokens: *context_tokens,
                kv_dtype,
                ..options()
            };
            let input = PlanningInput::new(&model, &cluster, &options).unwrap();
            let plan = plan(&input).ok();
            let findings = plan.map(|plan| check(&plan, &model, &cluster, &options));
            findings.map(|findings| assert_eq!(findings, [])).is_some()
        };
        let lengths: Vec<usize> = (1..2000).map(|step| step * 256).collect();
        lengths.partition_point(fits) * 256
    };
    let (f16, q8_0) = (longest(KvDtype::F16), longest(KvDtype::Q8_0));
    let times = q8_0 as f64 / f16 as f64;
    assert!(
        (times - 32.0 / 17.0).abs() < 0.03,
        "{q8_0} and {f16} positions"
    );
}

#[test]
fn a_member_has_the_kv_cache_of_its_layers() {
    let model = model("llama-3-70b");
    let plan = planned(&model, &nodes(&D1_TO_D4), &options());
    let layer = model.spec.kv_bytes_per_position_and_layer * CONTEXT as i64;
    assert!(plan.report.members.len() > 1);
    for member in &plan.report.members {
        assert_eq!(member.kv_bytes as i64, member.layers as i64 * layer);
        let all = member.memory_bytes + member.gpu_memory_bytes;
        assert!(member.kv_bytes < all, "{}", member.name);
    }
}

#[test]
fn owners_and_commands_leave_machines_out() {
    let mut cluster = nodes(&D1_TO_D4);
    cluster[2].spec.exclude = true;
    let options = Options {
        exclude: vec!["d2".into()],
        ..options()
    };
    let plan = planned(&model("llama-3-8b"), &cluster, &options);
    let out: Vec<_> = plan
        .report
        .left_out
        .iter()
        .map(|out| (out.name.as_str(), out.why.as_str()))
        .collect();
    assert!(
        out.contains(&("d3", "excluded by its owner (spec.exclude)")),
        "{out:?}"
    );
    assert!(out.contains(&("d2", "excluded by the command")), "{out:?}");
}

/// Agents of the first version do not say what they run: they run llama and qwen2.
#[test]
fn an_agent_that_cannot_run_the_model_is_left_out() {
    let mut cluster = nodes(&D1_TO_D4);
    let mut model = model("llama-3-8b");
    model.spec.architecture = "gemma3".to_owned();
    let newer = cluster[1].status.as_mut().unwrap();
    newer.architectures.push("gemma3".to_owned());
    let plan = planned(&model, &cluster, &options());
    assert_eq!(plan.members[0].name, "d2");
    let left_out = &plan.report.left_out;
    let why = left_out.iter().map(|out| out.why.as_str());
    let why: Vec<_> = why.collect();
    let expected = "cannot run gemma3 models: update it";
    assert!(
        why.len() == 3 && why.iter().all(|why| why.contains(expected)),
        "{why:?}"
    );

    let error = PlanningInput::new(&model, &cluster[..1], &options()).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("d1: its agent") && message.contains(expected),
        "{message}"
    );
}

#[test]
fn an_agent_without_experts_gets_no_layers_with_experts() {
    let mut cluster = nodes(&D1_TO_D4);
    let mut model = model("llama-3-8b");
    (model.spec.experts, model.spec.experts_per_token) = (8, 2);
    model.spec.expert_weights = model.spec.layer_weights.clone();
    let newer = cluster[1].status.as_mut().unwrap();
    newer.parts.push("experts".to_owned());
    let plan = planned(&model, &cluster, &options());
    assert_eq!(plan.members.len(), 1);
    assert_eq!(plan.members[0].name, "d2");
    let all: i64 = model.spec.expert_weights.iter().map(|one| one.bytes).sum();
    let member = &plan.report.members[0];
    let missing = 100.0 * member.overflow_bytes as f64 / all as f64;
    let hits = member.expert_hit_percent.unwrap();
    assert!((hits + missing - 100.0).abs() < 1e-3, "{member:?}");
    let error = PlanningInput::new(&model, &cluster[..1], &options()).unwrap_err();
    let expected = "cannot compute experts, a part of the model: update it";
    assert!(error.to_string().contains(expected), "{error}");
}

/// A quarter of the model's layers guess, beside its whole head.
#[test]
fn a_draft_model_costs_memory_and_time_at_rank_0() {
    let (model, cluster) = (model("llama-3-8b"), nodes(&D1_TO_D4));
    let mut draft = model.spec.clone();
    draft.layers /= 4;
    for weights in &mut draft.layer_weights {
        (weights.weights, weights.bytes) = (weights.weights / 4, weights.bytes / 4);
    }
    draft.size_bytes /= 4;
    let options = |draft| Options { draft, ..options() };
    let input = |draft| PlanningInput::new(&model, &cluster, &options(draft)).unwrap();
    let (without, with) = (input(None), input(Some(draft.clone())));
    let positions = CONTEXT as i64;
    let expected = draft.size_bytes
        + positions * i64::from(draft.layers) * draft.kv_bytes_per_position_and_layer;
    // Logits of 64 rows of drafts and one of each of 16 sequences.
    let logits = 80 * 4 * i64::from(model.spec.vocabulary_size);
    assert_eq!(without.model.rank0_bytes, logits as f64);
    assert_eq!(with.model.rank0_bytes, (logits + expected) as f64);
    let layers = model.spec.layers as f64 / 4.0;
    for (without, with) in without.devices.iter().zip(&with.devices) {
        let guess = layers * without.cpu.decode_seconds + without.head_seconds;
        let found = with.head_seconds - without.head_seconds;
        assert!((found / guess - 1.0).abs() < 1e-9, "{found} {guess}");
    }
    let rank_0 = |draft| planned(&model, &cluster, &options(draft)).report.members[0].clone();
    let (before, after) = (rank_0(None), rank_0(Some(draft.clone())));
    assert!(after.head_milliseconds > before.head_milliseconds);

    // Who cannot run it takes no part.
    draft.architecture = "gemma3".to_owned();
    let error = PlanningInput::new(&model, &cluster, &options(Some(draft))).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("cannot run gemma3 models"), "{said}");
}

/// What is said of each machine is what a plan without it takes; and no change for the better makes a ring slower.
#[test]
fn reasons_are_what_other_machines_would_take() {
    let (model, cluster) = (model("llama-3-70b"), nodes(&D1_TO_D4));
    let report = planned(&model, &cluster, &options()).report;
    assert!(report.members.len() > 1, "{report:#?}");
    for member in &report.members {
        let others: Vec<NodeProfile> = cluster
            .iter()
            .filter(|node| node.metadata.name.as_deref() != Some(&member.name))
            .cloned()
            .collect();
        let input = PlanningInput::new(&model, &others, &options()).unwrap();
        let Some(found) = search(&input, Effort::default()) else {
            assert_eq!(member.why, "without it the model does not fit");
            continue;
        };
        let said = member.why.split_once('(').unwrap().1;
        let said: f64 = said.split_once(" ms a token").unwrap().0.parse().unwrap();
        let taken = found.latency.token_seconds * 1e3;
        assert!(
            (said / taken - 1.0).abs() < 0.05,
            "{}: {}, {taken} ms",
            member.name,
            member.why
        );
    }
    let names: Vec<&str> = report.members.iter().map(|one| one.name.as_str()).collect();
    let next = report.next_best.unwrap();
    assert_ne!(next.members, names);
    assert!(next.slower_percent > 0.0, "{next:?}");
    let gains: Vec<f64> = report
        .what_if
        .iter()
        .map(|change| change.faster_percent)
        .collect();
    assert!(
        gains.iter().all(|gain| *gain >= 0.0) && gains.iter().any(|gain| *gain > 1.0),
        "{:#?}",
        report.what_if
    );
}

#[test]
fn planning_again_changes_nothing() {
    let (model, cluster) = (model("llama-3-70b"), nodes(&D1_TO_D4));
    let first = planned(&model, &cluster, &options());
    let second = planned(&model, &cluster, &options());
    assert_eq!(first.members, second.members);
}

#[test]
fn a_hop_carries_numbers_of_the_plans_type() {
    let (model, cluster) = (model("llama-3-8b"), nodes(&["d1", "d2"]));
    let links = &cluster[0].status.as_ref().unwrap().links;
    let link = links.iter().find(|link| link.to == "d2").unwrap();
    for (activation_dtype, bytes) in [
        (ActivationDtype::F32, 4.0),
        (ActivationDtype::BF16, 2.0),
        (ActivationDtype::F16, 2.0),
    ] {
        let options = Options {
            activation_dtype,
            ..options()
        };
        let input = PlanningInput::new(&model, &cluster, &options).unwrap();
        let latency = link.latency_nanoseconds as f64 / 1e9;
        let payload = bytes * f64::from(model.spec.hidden_size) / link.bytes_per_second as f64;
        let hop = &input.hops[0][1];
        assert!((hop.decode_seconds - latency - payload).abs() < 1e-12);
        // The prompt of 64 positions is one chunk.
        assert!((hop.chunk_seconds - latency - 64.0 * payload).abs() < 1e-12);
    }
}
