//! The checker finds each way in which a plan can be wrong, at its bound and not before. The plan and the numbers are made up by hand.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::{GpuBackend, NodeProfile, NodeProfileStatus};
use prima_crds::v1alpha1::ring_plan::PlannedGpu;
use prima_halda::check::{Finding, check};
use prima_halda::plan::{Bottleneck, MemberReport, PlanReport, PlannedMember};
use prima_halda::windows::Window;
use prima_halda::{Options, Plan};

/// Of llama-3-8b: bytes of a layer, of its KV cache at 1024 positions, and of the output head.
const LAYER: i64 = 3_925_868_544 / 32;
const KV: i64 = 4096 * 1024;
const HEAD: i64 = 295_501_824;
/// What rank 0 holds of 64 rows of drafts, and of one of each of 16 sequences: a number for each of 128,256 tokens.
const LOGITS: i64 = 80 * 4 * 128_256;
const POSITIONS: usize = 1024;
/// Milliseconds of a layer at 1 GB/s, which every processor reads here.
const LAYER_MILLISECONDS: f64 = 122.683392;

fn model() -> ModelProfile {
    let text = include_str!("paper/llama-3-8b.yaml");
    ModelProfile::from_yaml("llama-3-8b.yaml", text).unwrap()
}

/// `desk` has a GPU for 12 layers and memory for the other 4, the head and logits, `laptop` for 16; not a byte more.
fn nodes() -> Vec<NodeProfile> {
    let text = include_str!("paper/d3.yaml");
    ["desk", "laptop"]
        .map(|name| {
            let mut node = NodeProfile::from_yaml("d3.yaml", text).unwrap();
            node.metadata.name = Some(name.to_owned());
            node.spec.disk_allowed = Some(false);
            let status = node.status.as_mut().unwrap();
            status.cpu.throughput[0].decode_bytes_per_second = 1_000_000_000;
            match name {
                "desk" => {
                    gpu_memory(status, 12 * (LAYER + KV));
                    status.memory.available_bytes = 4 * (LAYER + KV) + HEAD + LOGITS;
                }
                _ => {
                    status.gpus.clear();
                    status.memory.available_bytes = 16 * (LAYER + KV);
                }
            }
            node
        })
        .into()
}

fn gpu_memory(status: &mut NodeProfileStatus, bytes: i64) {
    let gpu = status.gpus[0].measured.as_mut().unwrap();
    gpu.available_bytes = bytes;
}

fn window(first: usize, last: usize, gpu_layers: usize) -> Window {
    Window {
        first,
        last,
        gpu_layers,
    }
}

/// 32 layers in two rounds; each member's terms are different, and sum up.
fn plan() -> Plan {
    let members = [
        ("desk", [window(0, 4, 2), window(8, 20, 10)]),
        ("laptop", [window(4, 8, 0), window(20, 32, 0)]),
    ];
    let reports = [
        ("desk", 4.0 * LAYER_MILLISECONDS),
        ("laptop", 16.0 * LAYER_MILLISECONDS),
    ]
    .map(|(name, cpu)| report(name, cpu));
    let terms = 20.0 * LAYER_MILLISECONDS + 2.0 * (1.0 + 2.0 + 3.0 + 4.0 + 5.0);
    Plan {
        rounds: 2,
        windowed_sequences: 4,
        members: members
            .map(|(name, windows)| PlannedMember {
                name: name.to_owned(),
                windows: windows.to_vec(),
            })
            .into(),
        report: PlanReport {
            model: "llama-3-8b".to_owned(),
            layers: 32,
            rounds: 2,
            tpot_milliseconds: terms,
            ttft_milliseconds: 1.0,
            prompt_tokens: 1,
            answer_tokens: 1,
            chunk_positions: 128,
            proven_gap_percent: 0.0,
            members: reports.into(),
            bottleneck: Bottleneck {
                member: "laptop".to_owned(),
                term: "cpu",
                share_percent: 50.0,
            },
            left_out: Vec::new(),
            next_best: None,
            what_if: Vec::new(),
        },
    }
}

fn report(name: &str, cpu_milliseconds: f64) -> MemberReport {
    MemberReport {
        name: name.to_owned(),
        layers: 16,
        gpu_layers: 0,
        output_head_on_gpu: false,
        draft_on_gpu: false,
        gpu_from_rows: None,
        cpu_milliseconds,
        gpu_milliseconds: 1.0,
        copy_milliseconds: 2.0,
        head_milliseconds: 3.0,
        disk_milliseconds: 4.0,
        hop_milliseconds: 5.0,
        chunk_milliseconds: 6.0,
        memory_bytes: 0,
        memory_budget_bytes: 0,
        gpu_memory_bytes: 0,
        gpus: Vec::new(),
        kv_bytes: 0,
        overflow_bytes: 0,
        read_bytes_per_token: 0,
        expert_hit_percent: None,
        read_ahead_bytes: 0,
        why: String::new(),
    }
}

fn findings(change: impl FnOnce(&mut Plan, &mut Vec<NodeProfile>)) -> Vec<Finding> {
    let (mut plan, mut nodes) = (plan(), nodes());
    change(&mut plan, &mut nodes);
    let options = Options {
        context_tokens: POSITIONS,
        ..Options::default()
    };
    check(&plan, &model(), &nodes, &options)
}

fn of_plan(change: impl FnOnce(&mut Plan)) -> Vec<Finding> {
    findings(|plan, _| change(plan))
}

fn of_desk(change: impl FnOnce(&mut NodeProfile)) -> Vec<Finding> {
    findings(|_, nodes| change(&mut nodes[0]))
}

fn memory(member: &str, what: &'static str, found: i64, limit: i64) -> Vec<Finding> {
    vec![Finding::Memory {
        member: member.to_owned(),
        what,
        found,
        limit,
    }]
}

const WITHOUT_DISK: &str = "weights and KV cache, as the disk may not be used,";
const ON_GPU: &str = "GPU memory for layers and KV cache";
const LENT: &str = "layers and KV cache in the memory that the GPU's driver lends it";

#[test]
fn a_plan_that_uses_every_byte_is_right() {
    assert_eq!(of_plan(|_| ()), []);
}

#[test]
fn windows_must_follow_one_another_to_the_last_layer() {
    let coverage = |member: &str, round, first, last, expected| {
        vec![Finding::Coverage {
            member: member.to_owned(),
            round,
            first,
            last,
            expected,
        }]
    };
    let moved = of_plan(|plan| plan.members[1].windows[0] = window(5, 8, 0));
    assert_eq!(moved, coverage("laptop", 0, 5, 8, 4));
    let overlapping = of_plan(|plan| plan.members[0].windows[1] = window(7, 20, 11));
    assert_eq!(overlapping[0], coverage("desk", 1, 7, 20, 8)[0]);
    let backwards = of_plan(|plan| plan.members[1].windows[0] = window(4, 3, 0));
    assert_eq!(backwards[0], coverage("laptop", 0, 4, 3, 4)[0]);

    let end = |found| Finding::End {
        found,
        expected: 32,
    };
    let short = of_plan(|plan| plan.members[1].windows[1] = window(20, 31, 0));
    assert_eq!(short, [end(31)]);
    let long = of_plan(|plan| plan.members[1].windows[1] = window(20, 33, 0));
    assert!(long.contains(&end(33)), "{long:?}");

    let rounds = of_plan(|plan| plan.members[1].windows.truncate(1));
    let expected = Finding::Rounds {
        member: "laptop".to_owned(),
        found: 1,
        expected: 2,
    };
    assert!(rounds.contains(&expected), "{rounds:?}");
}

#[test]
fn an_empty_window_is_a_window() {
    let found = of_plan(|plan| {
        plan.members[0].windows = vec![window(0, 4, 0), window(20, 20, 0)];
        plan.members[1].windows = vec![window(4, 20, 0), window(20, 32, 0)];
    });
    assert!(
        found
            .iter()
            .all(|one| matches!(one, Finding::Memory { .. } | Finding::TooFast { .. })),
        "{found:?}"
    );
}

#[test]
fn layers_of_a_gpu_are_within_their_window_and_there_is_a_gpu() {
    let all = of_plan(|plan| plan.members[0].windows[0].gpu_layers = 4);
    // Two more than the GPU holds, but they are in the window.
    assert_eq!(
        all,
        memory("desk", ON_GPU, 14 * (LAYER + KV), 12 * (LAYER + KV))
    );
    let more = of_plan(|plan| plan.members[0].windows[0].gpu_layers = 5);
    let expected = Finding::GpuLayers {
        member: "desk".to_owned(),
        gpu_layers: 5,
        layers: 4,
    };
    assert_eq!(more[0], expected);

    let without = of_plan(|plan| plan.members[1].windows[0].gpu_layers = 1);
    let expected = Finding::GpuLayers {
        member: "laptop".to_owned(),
        gpu_layers: 1,
        layers: 0,
    };
    assert_eq!(without, [expected]);
}

#[test]
fn an_output_head_on_a_gpu_is_rank_0s_and_takes_its_memory() {
    let on_gpu = |rank: usize, gpu_bytes, change: fn(&mut NodeProfileStatus)| {
        findings(|plan, nodes| {
            plan.report.members[rank].output_head_on_gpu = true;
            let status = nodes[0].status.as_mut().unwrap();
            status.memory.available_bytes -= HEAD;
            gpu_memory(status, gpu_bytes);
            change(status);
        })
    };
    let full = 12 * (LAYER + KV) + HEAD;
    assert_eq!(on_gpu(0, full, |_| ()), []);
    let what = "GPU memory for layers, KV cache and output head";
    assert_eq!(
        on_gpu(0, full - 1, |_| ()),
        memory("desk", what, full, full - 1)
    );
    let head = |member: &str| Finding::OutputHead {
        member: member.to_owned(),
    };
    assert!(on_gpu(1, full, |_| ()).contains(&head("laptop")));
    let without_kernels = on_gpu(0, full, |status| {
        let gpu = status.gpus[0].measured.as_mut().unwrap();
        let format = &model().spec.output_weights[0].format;
        gpu.throughput.retain(|one| one.format != *format);
    });
    assert!(
        without_kernels.contains(&head("desk")),
        "{without_kernels:?}"
    );
}

#[test]
fn a_member_is_a_measured_machine_that_may_be_used_once() {
    let machine = |name: &str| Finding::Machine {
        member: name.to_owned(),
    };
    assert_eq!(
        of_plan(|plan| plan.members[1].name = "nas".to_owned()),
        [machine("nas")]
    );
    assert_eq!(
        of_plan(|plan| plan.members[1].name = "desk".to_owned()),
        [machine("desk")]
    );
    assert_eq!(of_desk(|node| node.spec.exclude = true), [machine("desk")]);
    assert_eq!(of_desk(|node| node.status = None), [machine("desk")]);
    let runs_others = |node: &mut NodeProfile| {
        let status = node.status.as_mut().unwrap();
        status.architectures = vec!["qwen2".to_owned()];
    };
    assert_eq!(of_desk(runs_others), [machine("desk")]);
}

#[test]
fn agents_that_count_on_other_windows_are_no_members() {
    let told = |agents: usize| {
        findings(|plan, nodes| {
            plan.windowed_sequences = 16;
            for node in &mut nodes[..agents] {
                node.status.as_mut().unwrap().reads_windowed_sequences = true;
            }
        })
    };
    let member = "laptop".to_owned();
    assert_eq!(told(1), [Finding::Machine { member }]);
    assert_eq!(told(2), []);
}

#[test]
fn agents_that_do_not_read_of_larger_chunks_are_no_members() {
    let told = |agents: usize| {
        findings(|plan, nodes| {
            plan.report.chunk_positions = 256;
            for node in &mut nodes[..agents] {
                node.status.as_mut().unwrap().reads_chunk_positions = true;
            }
        })
    };
    let member = "laptop".to_owned();
    assert_eq!(told(1), [Finding::Machine { member }]);
    assert_eq!(told(2), []);
}

#[test]
fn agents_that_do_not_read_which_gpus_are_no_members() {
    let told = |agents: usize, change: fn(&mut MemberReport)| {
        findings(|plan, nodes| {
            for node in &mut nodes[..agents] {
                node.status.as_mut().unwrap().reads_gpus = true;
            }
            change(&mut plan.report.members[0]);
        })
    };
    let machine = |name: &str| Finding::Machine {
        member: name.to_owned(),
    };
    let names_one = |desk: &mut MemberReport| {
        desk.gpus = vec![PlannedGpu {
            name: "RTX 2080 Ti".to_owned(),
            beside_layers_bytes: 0,
        }];
    };
    assert_eq!(told(0, names_one), [machine("desk"), machine("laptop")]);
    // The laptop's agent reads what is said of the desk, too.
    assert_eq!(told(1, names_one), [machine("laptop")]);
    assert_eq!(told(2, names_one), []);
    // There is none.
    let on_gpu = |desk: &mut MemberReport| desk.draft_on_gpu = true;
    let draft = || Finding::Draft {
        member: "desk".to_owned(),
    };
    assert_eq!(told(0, on_gpu), [machine("desk"), machine("laptop")]);
    assert_eq!(told(1, on_gpu), [draft(), machine("laptop")]);
    assert_eq!(told(2, on_gpu), [draft()]);
}

#[test]
fn memory_is_counted_to_the_byte() {
    let status = |node: &mut NodeProfile| node.status.take().unwrap();
    let full = 4 * (LAYER + KV) + HEAD + LOGITS;
    let short = of_desk(|node| {
        let mut status = status(node);
        status.memory.available_bytes -= 1;
        node.status = Some(status);
    });
    assert_eq!(short, memory("desk", WITHOUT_DISK, full, full - 1));
    // Only rank 0 has the head.
    let short = findings(|_, nodes| nodes[1].status.as_mut().unwrap().memory.available_bytes -= 1);
    let without_head = 16 * (LAYER + KV);
    assert_eq!(
        short,
        memory("laptop", WITHOUT_DISK, without_head, without_head - 1)
    );
    // What can be swapped out counts as available.
    let swapped = of_desk(|node| {
        let memory = &mut node.status.as_mut().unwrap().memory;
        (memory.available_bytes, memory.swappable_bytes) = (full - 7, 7);
    });
    assert_eq!(swapped, []);

    let reserved = of_desk(|node| node.spec.reserved_memory_bytes = Some(1));
    assert_eq!(reserved, memory("desk", WITHOUT_DISK, full, full - 1));
    let capped = of_desk(|node| node.spec.memory_cap_bytes = Some(full - 2));
    assert_eq!(capped, memory("desk", WITHOUT_DISK, full, full - 2));
    assert_eq!(of_desk(|node| node.spec.memory_cap_bytes = Some(full)), []);

    // With a disk to read from, the KV cache alone must fit.
    for allowed in [None, Some(true)] {
        let cache = |bytes| {
            of_desk(|node| {
                node.spec.disk_allowed = allowed;
                node.spec.memory_cap_bytes = Some(bytes);
            })
        };
        let stays = 4 * KV + LOGITS;
        assert_eq!(cache(stays), []);
        assert_eq!(
            cache(stays - 1),
            memory("desk", "the KV cache and logits", stays, stays - 1)
        );
    }
}

/// Of the layers that see all positions, 0 is on the desk's processor, 15 on its GPU, and 5 and 31 are the laptop's.
#[test]
fn kv_caches_are_counted_layer_by_layer() {
    let mut model = model();
    model.spec.windowed_layers = 28;
    model.spec.attention_window = 16;
    model.spec.full_attention_layers = vec![0, 5, 15, 31];
    // Of a sequence: two windows, a chunk and a block. Sixteen would be more than all.
    let sequence = |chunk: i64| 4096 * (2 * 16 + chunk + 64);
    for (windowed_sequences, chunk_positions, windowed) in [
        (4, 128, 4 * sequence(128)),
        (16, 128, KV),
        (2, 256, 2 * sequence(256)),
    ] {
        let processor = 4 * LAYER + KV + 3 * windowed + HEAD + LOGITS;
        let gpu = 12 * LAYER + KV + 11 * windowed;
        let laptop = 16 * LAYER + 2 * KV + 14 * windowed;
        let options = Options {
            context_tokens: POSITIONS,
            ..Options::default()
        };
        let mut plan = Plan {
            windowed_sequences,
            ..plan()
        };
        plan.report.chunk_positions = chunk_positions;
        let with = |processor, gpu, laptop| {
            let mut nodes = nodes();
            for node in &mut nodes {
                let status = node.status.as_mut().unwrap();
                (
                    status.reads_windowed_sequences,
                    status.reads_chunk_positions,
                ) = (true, true);
            }
            let status = nodes[0].status.as_mut().unwrap();
            status.memory.available_bytes = processor;
            gpu_memory(status, gpu);
            nodes[1].status.as_mut().unwrap().memory.available_bytes = laptop;
            check(&plan, &model, &nodes, &options)
        };
        assert_eq!(with(processor, gpu, laptop), []);
        assert_eq!(
            with(processor - 1, gpu, laptop),
            memory("desk", WITHOUT_DISK, processor, processor - 1)
        );
        assert_eq!(
            with(processor, gpu - 1, laptop),
            memory("desk", ON_GPU, gpu, gpu - 1)
        );
        assert_eq!(
            with(processor, gpu, laptop - 1),
            memory("laptop", WITHOUT_DISK, laptop, laptop - 1)
        );
    }
}

#[test]
fn a_draft_model_counts_at_rank_0() {
    let mut draft = model().spec;
    (draft.layers, draft.size_bytes) = (2, 1000);
    let needs = 1000 + 2 * KV + LOGITS;
    let options = Options {
        context_tokens: POSITIONS,
        draft: Some(draft),
        ..Options::default()
    };
    let full = 4 * (LAYER + KV) + HEAD + needs;
    for (bytes, disk_allowed, expected) in [
        (full, false, vec![]),
        (
            full - 1,
            false,
            memory("desk", WITHOUT_DISK, full, full - 1),
        ),
        (4 * KV + needs, true, vec![]),
        (
            4 * KV + needs - 1,
            true,
            memory(
                "desk",
                "the KV cache, logits and the draft model",
                4 * KV + needs,
                4 * KV + needs - 1,
            ),
        ),
    ] {
        let mut nodes = nodes();
        nodes[0].spec.disk_allowed = Some(disk_allowed);
        let status = nodes[0].status.as_mut().unwrap();
        status.memory.available_bytes = bytes;
        assert_eq!(check(&plan(), &model(), &nodes, &options), expected);
    }
}

#[test]
fn a_gpus_memory_is_counted_where_it_is() {
    let full = 12 * (LAYER + KV);
    let short = of_desk(|node| gpu_memory(node.status.as_mut().unwrap(), full - 1));
    assert_eq!(short, memory("desk", ON_GPU, full, full - 1));

    // One memory for both: all 16 layers lie in it. Metal says how much of it there is; of others the machine does.
    let unified = |backend, of_gpu, of_machine| {
        of_desk(|node| {
            let status = node.status.as_mut().unwrap();
            status.gpus[0].backend = backend;
            status.gpus[0].measured.as_mut().unwrap().unified_memory = true;
            gpu_memory(status, of_gpu);
            status.memory.available_bytes = of_machine;
        })
    };
    let all = 16 * (LAYER + KV) + HEAD + LOGITS;
    let short = memory("desk", WITHOUT_DISK, all, all - 1);
    assert_eq!(unified(GpuBackend::Metal, all, 1), []);
    assert_eq!(unified(GpuBackend::Metal, all - 1, all), short);
    assert_eq!(unified(GpuBackend::Vulkan, 1, all), []);
    assert_eq!(unified(GpuBackend::Vulkan, all, all - 1), short);

    // Of that memory, a driver lends a part. Metal's bound is the one above.
    let lent = |backend, bytes| {
        of_desk(|node| {
            let status = node.status.as_mut().unwrap();
            status.memory.available_bytes = all;
            let gpu = &mut status.gpus[0];
            gpu.backend = backend;
            let measured = gpu.measured.as_mut().unwrap();
            measured.unified_memory = true;
            (measured.total_bytes, measured.available_bytes) = (bytes, all);
        })
    };
    assert_eq!(lent(GpuBackend::Vulkan, full), []);
    let short = memory("desk", LENT, full, full - 1);
    assert_eq!(lent(GpuBackend::Vulkan, full - 1), short);
    assert_eq!(lent(GpuBackend::Metal, full - 1), []);
}

#[test]
fn the_terms_sum_up_to_what_is_predicted() {
    let sum = plan().report.tpot_milliseconds;
    for (factor, right) in [
        (1.0 + 0.9e-6, true),
        (1.0 - 0.9e-6, true),
        (1.0 + 1.1e-6, false),
        (1.0 - 1.1e-6, false),
    ] {
        let found = of_plan(|plan| plan.report.tpot_milliseconds = sum * factor);
        assert_eq!(found.is_empty(), right, "{factor}: {found:?}");
        assert!(
            found.iter().all(|one| matches!(one, Finding::Sum { .. })),
            "{found:?}"
        );
    }
    // Every term counts.
    let terms: [fn(&mut MemberReport) -> &mut f64; 6] = [
        |member| &mut member.cpu_milliseconds,
        |member| &mut member.gpu_milliseconds,
        |member| &mut member.copy_milliseconds,
        |member| &mut member.head_milliseconds,
        |member| &mut member.disk_milliseconds,
        |member| &mut member.hop_milliseconds,
    ];
    for (index, term) in terms.into_iter().enumerate() {
        let found = of_plan(|plan| *term(&mut plan.report.members[1]) += 1.0);
        assert!(
            matches!(found[..], [Finding::Sum { .. }]),
            "term {index}: {found:?}"
        );
    }
}

#[test]
fn nothing_computes_faster_than_it_was_measured_to() {
    let with = |milliseconds: f64| {
        of_plan(|plan| {
            plan.report.tpot_milliseconds += milliseconds - 4.0 * LAYER_MILLISECONDS;
            plan.report.members[0].cpu_milliseconds = milliseconds;
        })
    };
    assert_eq!(with(4.0 * LAYER_MILLISECONDS * (1.0 + 1e-8)), []);
    let found = with(4.0 * LAYER_MILLISECONDS * (1.0 - 1e-8));
    let [Finding::TooFast { member, least, .. }] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!(member, "desk");
    assert!((least / (4.0 * LAYER_MILLISECONDS) - 1.0).abs() < 1e-12);

    // A format without a measured rate has no least time to check.
    let other = of_desk(|node| {
        let status = node.status.as_mut().unwrap();
        status.cpu.throughput[0].format = "F32".to_owned();
    });
    assert_eq!(other, []);
}

#[test]
fn a_first_token_that_comes_too_late_is_found() {
    let within = |seconds| {
        let options = Options {
            context_tokens: POSITIONS,
            first_token_seconds: Some(seconds),
            ..Options::default()
        };
        check(&plan(), &model(), &nodes(), &options)
    };
    // The plan has it after a millisecond.
    assert_eq!(within(1e-3), []);
    let found = within(0.5e-3);
    assert!(
        matches!(&found[..], [Finding::FirstToken { .. }]),
        "{found:?}"
    );
}

#[test]
fn a_ring_with_fewer_members_than_asked_for_is_found() {
    let least = |min_nodes: usize| {
        let options = Options {
            context_tokens: POSITIONS,
            min_nodes,
            ..Options::default()
        };
        check(&plan(), &model(), &nodes(), &options)
    };
    assert_eq!(least(2), []);
    assert_eq!(least(3), [Finding::TooFew { found: 2, least: 3 }]);
}

#[test]
fn keys_and_values_of_a_layer_fit_one_buffer_of_a_gpu() {
    let with = |limit| {
        of_desk(|node| {
            let gpu = &mut node.status.as_mut().unwrap().gpus[0];
            gpu.measured.as_mut().unwrap().most_buffer_bytes = Some(limit);
        })
    };
    assert_eq!(with(KV), []);
    let kv = "the KV cache of a layer on the GPU";
    assert_eq!(with(KV - 1), memory("desk", kv, KV, KV - 1));
}

#[test]
fn prompts_on_a_gpu_through_all_layers_take_room_for_two_parts() {
    let with = |gpu_bytes, streams_weights| {
        findings(|plan, nodes| {
            plan.report.members[0].gpu_from_rows = Some(32);
            let status = nodes[0].status.as_mut().unwrap();
            gpu_memory(status, gpu_bytes);
            let gpu = status.gpus[0].measured.as_mut().unwrap();
            gpu.streams_weights = streams_weights;
        })
    };
    // The document does not say how large the largest matrix is.
    let room = 2 * (LAYER / 4 * 5 + KV);
    let full = 12 * (LAYER + KV) + room;
    assert_eq!(with(full, true), []);
    assert_eq!(with(full - 1, true), memory("desk", ON_GPU, full, full - 1));
    let none = Finding::Streaming {
        member: "desk".to_owned(),
    };
    assert_eq!(with(full, false), [none]);
}
