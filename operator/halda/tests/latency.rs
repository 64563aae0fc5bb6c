//! The latency model against numbers that were worked out by hand, one case for each term. Every expected value is written as the
//! arithmetic that a person does from the documentation of `latency.rs`, with plain numbers, so that it shares nothing with the code.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

#[path = "latency/first_token.rs"]
mod first_token;

use prima_halda::input::{
    Device, ExpertWeights, GpuCost, HopCost, LayerCost, MemoryRule, ModelSizes, Overlap,
    PlanningInput, StreamedCost, Workload,
};
use prima_halda::latency::{
    Assignment, Latency, LayerShare, SLACK_BYTES, Violation, chunks, predict, request_seconds,
};

const GB: f64 = 1e9;
/// Reading waits for computing, and computing for reading.
const IN_TURNS: Overlap = Overlap {
    hidden: 0.0,
    slowdown: 1.0,
};
/// Reading costs computing nothing.
const FREE: Overlap = Overlap {
    hidden: 1.0,
    slowdown: 0.0,
};

/// A layer takes `decode` seconds for a token, and a tenth of that for one of many positions. Ample memory, no disk, no GPU, no head.
fn device(decode: f64) -> Device {
    Device {
        name: format!("{decode}"),
        required: false,
        memory_bytes: 1000.0 * GB,
        memory_rule: MemoryRule::Overflow,
        disk_bytes_per_second: None,
        expert_read_bytes_per_second: None,
        overlap: IN_TURNS,
        cpu: LayerCost {
            decode_seconds: decode,
            prefill_seconds: decode / 10.0,
        },
        head_seconds: 0.0,
        gpu: None,
        gpus: Vec::new(),
        gpu_split_bytes: 0.0,
        gpu_unused: None,
    }
}

/// A layer has 1 GB of weights, and nothing else takes memory. Prompts of 256 tokens in chunks of 64, answers of 100.
fn input(devices: Vec<Device>) -> PlanningInput {
    let none = HopCost {
        decode_seconds: 0.0,
        chunk_seconds: 0.0,
    };
    PlanningInput {
        model: ModelSizes {
            name: "by hand".into(),
            layers: 8,
            layer_bytes: GB,
            experts: ExpertWeights::default(),
            layer_kv_bytes: 0.0,
            kv_of_layers: Vec::new(),
            head_bytes: 0.0,
            output_bytes: 0.0,
            gpu_output_bytes: 0.0,
            rank0_bytes: 0.0,
            draft_moved_bytes: 0.0,
            gpu_draft_bytes: 0.0,
            buffer_bytes: 0.0,
            gpu_layer_kv_bytes: 0.0,
            gpu_buffer_bytes: 0.0,
            activation_bytes: 0.0,
        },
        kv_contexts: 1,
        windowed_sequences: 4,
        chunk_positions: 64,
        workload: Workload {
            prompt_tokens: 256,
            answer_tokens: 100,
            chunk_tokens: 64,
        },
        hops: vec![vec![none; devices.len()]; devices.len()],
        devices,
        rank0: None,
        rounds: None,
        first_token_seconds: None,
        fewest: 1,
        left_out: Vec::new(),
    }
}

/// All devices in their order; `shares`: layers on the CPU and on the GPU.
fn assignment(rounds: usize, shares: &[(usize, usize)]) -> Assignment {
    Assignment {
        rounds,
        ring: (0..shares.len()).collect(),
        shares: shares
            .iter()
            .map(|&(cpu_layers, gpu_layers)| LayerShare {
                cpu_layers,
                gpu_layers,
            })
            .collect(),
    }
}

fn latency(input: &PlanningInput, rounds: usize, shares: &[(usize, usize)]) -> Latency {
    predict(input, &assignment(rounds, shares)).unwrap()
}

fn violation(input: &PlanningInput, shares: &[(usize, usize)]) -> Violation {
    predict(input, &assignment(1, shares)).unwrap_err()
}

#[track_caller]
fn equal(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() <= 1e-9 * expected.abs().max(1e-3),
        "{found}, by hand {expected}"
    );
}

#[test]
fn a_share_is_of_all_its_layers() {
    let share = LayerShare {
        cpu_layers: 3,
        gpu_layers: 2,
    };
    assert_eq!(share.layers(), 5);
}

#[test]
fn one_machine_computes_its_layers_and_the_head() {
    let mut input = input(vec![device(0.010)]);
    input.devices[0].head_seconds = 0.005;
    let found = latency(&input, 1, &[(8, 0)]);
    equal(found.token_seconds, 8.0 * 0.010 + 0.005);
    // Four chunks of 64 positions, 0.001 s each and layer; the head comes once.
    equal(found.prompt_seconds, 4.0 * (64.0 * 8.0 * 0.001) + 0.005);
    equal(
        request_seconds(&input, &found),
        found.prompt_seconds + 100.0 * found.token_seconds,
    );
    let member = found.members[0];
    equal(member.cpu_seconds, 0.080);
    equal(member.head_seconds, 0.005);
    equal(member.busy_seconds(), 0.085);
    assert_eq!(
        (member.gpu_seconds, member.copy_seconds, member.hop_seconds),
        (0.0, 0.0, 0.0)
    );
    assert_eq!(
        (
            member.disk_seconds,
            member.overflow_bytes,
            member.read_bytes()
        ),
        (0.0, 0.0, 0.0)
    );
}

#[test]
fn a_prompt_of_less_than_a_chunk_takes_one() {
    let mut input = input(vec![device(0.010)]);
    input.workload.prompt_tokens = 16;
    equal(chunks(&input), 1.0);
    input.workload.prompt_tokens = 96;
    equal(chunks(&input), 1.5);
    equal(
        latency(&input, 1, &[(8, 0)]).prompt_seconds,
        1.5 * 64.0 * 8.0 * 0.001,
    );
}

#[test]
fn hops_count_in_every_round_and_chunks_follow_the_slowest() {
    let mut input = input(vec![device(0.010), device(0.020)]);
    input.devices[0].head_seconds = 0.005;
    // The second machine's time for the head does not count: it is not rank 0.
    input.devices[1].head_seconds = 7.0;
    let hop = |decode_seconds, chunk_seconds| HopCost {
        decode_seconds,
        chunk_seconds,
    };
    input.hops[0][1] = hop(0.003, 0.02);
    input.hops[1][0] = hop(0.004, 0.03);
    let found = latency(&input, 2, &[(3, 0), (5, 0)]);
    equal(
        found.token_seconds,
        3.0 * 0.010 + 5.0 * 0.020 + 0.005 + 2.0 * 0.003 + 2.0 * 0.004,
    );
    let (first, second) = (
        64.0 * 3.0 * 0.001 + 2.0 * 0.02,
        64.0 * 5.0 * 0.002 + 2.0 * 0.03,
    );
    equal(found.members[0].chunk_seconds, first);
    equal(found.members[1].chunk_seconds, second);
    equal(found.members[0].hop_seconds, 0.006);
    equal(found.members[1].hop_seconds, 0.008);
    // The first chunk visits both, the other three come out behind the slower one.
    equal(found.prompt_seconds, first + second + 3.0 * second + 0.005);
}

#[test]
fn a_ring_goes_in_its_own_order() {
    let mut input = input(vec![device(0.010), device(0.020), device(0.030)]);
    for (from, row) in input.hops.iter_mut().enumerate() {
        for (to, hop) in row.iter_mut().enumerate() {
            hop.decode_seconds = (10 * from + to) as f64 / 1000.0;
        }
    }
    input.devices[2].head_seconds = 0.5;
    let mut assignment = assignment(1, &[(2, 0), (3, 0), (3, 0)]);
    assignment.ring = vec![2, 0, 1];
    let found = predict(&input, &assignment).unwrap();
    // From 2 to 0, from 0 to 1, from 1 to 2; the head is computed by 2.
    equal(
        found.token_seconds,
        0.090 + 0.020 + 0.060 + 0.5 + 0.020 + 0.001 + 0.012,
    );
    equal(found.members[0].head_seconds, 0.5);
    equal(found.members[1].cpu_seconds, 0.020);
}

fn gpu(memory_bytes: Option<f64>) -> GpuCost {
    GpuCost {
        layer: LayerCost {
            decode_seconds: 0.001,
            prefill_seconds: 0.00002,
        },
        memory_bytes,
        lent_bytes: None,
        copy_seconds: 0.0004,
        head_seconds: None,
        guess_gained: None,
        streamed: None,
    }
}

#[test]
fn a_gpu_computes_its_layers_and_copies_in_every_round() {
    let mut input = input(vec![device(0.010)]);
    input.model.layer_kv_bytes = 0.1 * GB;
    input.model.buffer_bytes = 0.2 * GB;
    input.model.gpu_layer_kv_bytes = 0.15 * GB;
    input.model.gpu_buffer_bytes = 0.25 * GB;
    input.model.head_bytes = 0.5 * GB;
    input.devices[0].gpu = Some(gpu(Some(6.0 * GB)));
    let found = latency(&input, 2, &[(3, 5)]);
    equal(
        found.token_seconds,
        3.0 * 0.010 + 5.0 * 0.001 + 2.0 * 0.0004,
    );
    let member = found.members[0];
    equal(
        member.chunk_seconds,
        64.0 * (3.0 * 0.001 + 5.0 * 0.00002) + 2.0 * 0.0004,
    );
    equal(member.gpu_memory_bytes, (5.0 * 1.15 + 0.25) * GB);
    equal(member.memory_bytes, (3.0 * 1.1 + 0.2 + 0.5) * GB);
    equal(member.busy_seconds(), 0.030 + 0.005 + 0.0008);

    // A GPU that has no layer copies nothing.
    let idle = latency(&input, 2, &[(8, 0)]);
    equal(idle.token_seconds, 0.080);
    assert_eq!(idle.members[0].gpu_memory_bytes, 0.0);
}

#[test]
fn the_head_is_on_rank_0s_gpu_where_layers_leave_room() {
    let mut input = input(vec![device(0.010), device(0.010)]);
    input.model.head_bytes = 0.5 * GB;
    input.model.output_bytes = 0.375 * GB;
    input.model.gpu_output_bytes = 0.5 * GB;
    input.model.gpu_buffer_bytes = 0.25 * GB;
    for device in &mut input.devices {
        device.head_seconds = 0.004;
        device.gpu = Some(GpuCost {
            head_seconds: Some(0.0005),
            ..gpu(Some(3.75 * GB))
        });
    }
    let found = latency(&input, 1, &[(1, 3), (4, 0)]);
    let rank0 = found.members[0];
    assert!(rank0.output_head_on_gpu);
    equal(rank0.head_seconds, 0.0005);
    equal(rank0.gpu_memory_bytes, (3.0 + 0.25 + 0.5) * GB);
    equal(rank0.memory_bytes, (1.0 + 0.5 - 0.375) * GB);
    let expected = 5.0 * 0.010 + 3.0 * 0.001 + 0.0004 + 0.0005;
    equal(found.token_seconds, expected);
    assert!(!found.members[1].output_head_on_gpu);

    // A byte less is too little, without layers the GPU is not used, and others than rank 0 have no head.
    let mut less = input.clone();
    less.devices[0].gpu = Some(GpuCost {
        head_seconds: Some(0.0005),
        ..gpu(Some(3.75 * GB - 1.0))
    });
    for (input, shares) in [
        (&less, [(1, 3), (4, 0)]),
        (&input, [(4, 0), (4, 0)]),
        (&input, [(4, 0), (1, 3)]),
    ] {
        let found = latency(input, 1, &shares);
        assert!(found.members.iter().all(|one| !one.output_head_on_gpu));
        equal(found.members[0].head_seconds, 0.004);
        let layers = shares[0].0 as f64;
        equal(found.members[0].memory_bytes, (layers + 0.5) * GB);
    }
}

#[test]
fn a_draft_model_is_on_rank_0s_gpu_where_layers_leave_room() {
    let mut input = input(vec![device(0.010), device(0.010)]);
    input.model.rank0_bytes = 0.75 * GB;
    input.model.draft_moved_bytes = 0.625 * GB;
    input.model.gpu_draft_bytes = 0.5 * GB;
    input.model.gpu_buffer_bytes = 0.25 * GB;
    let with = |available| {
        let mut input = input.clone();
        for device in &mut input.devices {
            device.head_seconds = 0.004;
            device.gpu = Some(GpuCost {
                guess_gained: Some(0.003),
                ..gpu(Some(available))
            });
        }
        input
    };
    let found = latency(&with(3.75 * GB), 1, &[(1, 3), (4, 0)]);
    let rank0 = found.members[0];
    assert!(rank0.draft_on_gpu && !found.members[1].draft_on_gpu);
    equal(rank0.head_seconds, 0.001);
    equal(rank0.gpu_memory_bytes, (3.0 + 0.25 + 0.5) * GB);
    equal(rank0.memory_bytes, (1.0 + 0.125) * GB);
    equal(
        found.token_seconds,
        5.0 * 0.010 + 3.0 * 0.001 + 0.0004 + 0.001,
    );

    // A byte less is too little, and without layers the GPU is not used.
    for (available, shares) in [
        (3.75 * GB - 1.0, [(1, 3), (4, 0)]),
        (3.75 * GB, [(4, 0), (1, 3)]),
    ] {
        let found = latency(&with(available), 1, &shares);
        assert!(found.members.iter().all(|one| !one.draft_on_gpu));
        equal(found.members[0].head_seconds, 0.004);
        let layers = shares[0].0 as f64;
        equal(found.members[0].memory_bytes, (layers + 0.75) * GB);
    }
}

#[test]
fn rank_0s_gpu_has_what_gains_most_where_not_all_has_room() {
    let mut input = input(vec![device(0.010)]);
    input.model.gpu_output_bytes = 0.5 * GB;
    input.model.gpu_draft_bytes = 0.5 * GB;
    input.devices[0].head_seconds = 0.004;
    // Of 7 layers for 4 chunks, a GPU that computes them in 60 ms each saves 0.11 s; of 100 tokens, a millisecond less saves 0.1 s.
    let with = |head_gained: f64, guess_gained, room| {
        let mut input = input.clone();
        input.devices[0].gpu = Some(GpuCost {
            head_seconds: Some(0.004 - head_gained),
            guess_gained: Some(guess_gained),
            streamed: Some(StreamedCost {
                chunk_seconds: 0.060,
                room_bytes: 0.5 * GB,
                copying_bytes: 0.0,
                from_rows: 2,
            }),
            ..gpu(Some((1.0 + room) * GB))
        });
        let rank0 = latency(&input, 1, &[(7, 1)]).members[0];
        (
            rank0.gpu_from_rows.is_some(),
            rank0.output_head_on_gpu,
            rank0.draft_on_gpu,
        )
    };
    assert_eq!(with(0.0005, 0.0005, 0.5), (true, false, false));
    assert_eq!(with(0.002, 0.0015, 0.5), (false, true, false));
    assert_eq!(with(0.0015, 0.002, 0.5), (false, false, true));
    assert_eq!(with(0.0005, 0.002, 1.0), (true, false, true));
    assert_eq!(with(0.002, 0.0015, 1.0), (false, true, true));
    assert_eq!(with(0.0005, 0.0005, 1.5), (true, true, true));
}

#[test]
fn a_gpu_with_room_computes_chunks_through_all_layers() {
    let mut input = input(vec![device(0.010), device(0.010)]);
    input.model.gpu_buffer_bytes = 0.25 * GB;
    for device in &mut input.devices {
        device.gpu = Some(GpuCost {
            streamed: Some(StreamedCost {
                chunk_seconds: 0.016,
                room_bytes: 2.5 * GB,
                copying_bytes: 0.125 * GB,
                from_rows: 16,
            }),
            ..gpu(Some(3.75 * GB))
        });
    }
    let found = latency(&input, 1, &[(3, 1), (4, 0)]);
    for (member, on_gpu) in found.members.iter().zip([64.0 * 0.00002 + 0.0004, 0.0]) {
        assert_eq!(member.gpu_from_rows, Some(16));
        let layers = if on_gpu > 0.0 { 3.0 } else { 4.0 };
        equal(member.chunk_seconds, layers * 0.016 + on_gpu);
        equal(member.cpu_seconds, layers * 0.010);
    }
    equal(found.members[0].gpu_memory_bytes, (1.0 + 0.25 + 2.5) * GB);
    equal(found.members[1].gpu_memory_bytes, (0.25 + 2.5) * GB);
    equal(found.members[0].memory_bytes, (3.0 + 0.125) * GB);

    // Another layer on the GPU takes the room, and without layers on the processor there is nothing to copy.
    let found = latency(&input, 1, &[(2, 2), (1, 3)]);
    assert!(found.members.iter().all(|one| one.gpu_from_rows.is_none()));
    equal(
        found.members[0].chunk_seconds,
        64.0 * (2.0 * 0.001 + 2.0 * 0.00002) + 0.0004,
    );
    input.model.layers = 1;
    assert_eq!(
        latency(&input, 1, &[(0, 1), (0, 0)]).members[0].gpu_from_rows,
        None
    );
}

#[test]
fn what_is_better_comes_first_where_a_gpu_has_room_for_either() {
    let mut input = input(vec![device(0.010)]);
    input.model.output_bytes = 0.375 * GB;
    input.model.gpu_output_bytes = 0.5 * GB;
    input.devices[0].head_seconds = 0.004;
    let with = |chunk_seconds, available| {
        let mut input = input.clone();
        input.devices[0].gpu = Some(GpuCost {
            head_seconds: Some(0.0005),
            streamed: Some(StreamedCost {
                chunk_seconds,
                room_bytes: 2.0 * GB,
                copying_bytes: 0.0,
                from_rows: 2,
            }),
            ..gpu(Some(available))
        });
        let rank0 = latency(&input, 1, &[(7, 1)]).members[0];
        (rank0.gpu_from_rows.is_some(), rank0.output_head_on_gpu)
    };
    // Without a disk to read from, the head has to leave the machine's memory.
    let mut full = input.clone();
    full.model.head_bytes = 0.5 * GB;
    full.devices[0].disk_bytes_per_second = None;
    full.devices[0].memory_bytes = (7.0 + 0.5 - 0.375) * GB;
    full.devices[0].gpu = Some(GpuCost {
        head_seconds: Some(0.0005),
        streamed: Some(StreamedCost {
            chunk_seconds: 0.016,
            room_bytes: 2.0 * GB,
            copying_bytes: 0.0,
            from_rows: 2,
        }),
        ..gpu(Some(3.0 * GB))
    });
    let rank0 = latency(&full, 1, &[(7, 1)]).members[0];
    assert!(rank0.output_head_on_gpu && rank0.gpu_from_rows.is_none());
    // Of 100 tokens, the head saves 0.35 s; of 4 chunks through 7 layers on the processor, 64 ms each.
    assert_eq!(with(0.060, 3.0 * GB), (false, true));
    assert_eq!(with(0.016, 3.0 * GB), (true, false));
    assert_eq!(with(0.060, 3.5 * GB), (true, true));
}

#[test]
fn layers_of_a_unified_gpu_lie_in_the_machines_memory() {
    let mut input = input(vec![device(0.010)]);
    input.model.layer_kv_bytes = 0.125 * GB;
    input.model.gpu_layer_kv_bytes = 0.25 * GB;
    input.model.gpu_buffer_bytes = 0.125 * GB;
    input.devices[0].gpu = Some(gpu(None));
    let member = latency(&input, 1, &[(3, 5)]).members[0];
    assert_eq!(member.gpu_memory_bytes, 0.0);
    equal(member.memory_bytes, (3.0 * 1.125 + 5.0 * 1.25 + 0.125) * GB);
    // A GPU without layers takes nothing.
    let idle = latency(&input, 1, &[(8, 0)]).members[0];
    equal(idle.memory_bytes, 8.0 * 1.125 * GB);

    // What was copied for the GPU and what its passes take cannot be read again; others' weights can, experts first.
    input.devices[0].memory_bytes = 7.0 * GB;
    input.devices[0].disk_bytes_per_second = Some(GB);
    input.model.experts.layer_bytes = 0.5 * GB;
    input.model.experts.share = 0.25;
    let member = latency(&input, 1, &[(3, 5)]).members[0];
    equal(member.weight_room_bytes, 0.25 * GB);
    equal(member.missing_expert_bytes, 1.5 * GB);
    equal(member.overflow_bytes, 1.25 * GB);
    input.devices[0].memory_bytes = 5.0 * GB;
    assert_eq!(
        violation(&input, &[(3, 5)]),
        Violation::Memory {
            device: 0,
            missing_bytes: 1.75 * GB,
        }
    );
    // Metal maps them.
    input.devices[0].memory_rule = MemoryRule::AllOrNothing;
    equal(
        latency(&input, 1, &[(3, 5)]).members[0].overflow_bytes,
        8.0 * GB,
    );
}

/// All layers would fit the machine's memory, wherever they are computed.
#[test]
fn a_gpu_that_shares_memory_has_no_more_than_it_is_lent() {
    let mut input = input(vec![device(0.010)]);
    input.model.gpu_layer_kv_bytes = 0.25 * GB;
    input.model.gpu_buffer_bytes = 0.125 * GB;
    let lent = |input: &PlanningInput, bytes: f64| {
        let mut input = input.clone();
        input.devices[0].gpu = Some(GpuCost {
            lent_bytes: Some(bytes),
            ..gpu(None)
        });
        input
    };
    let full = (5.0 * 1.25 + 0.125) * GB;
    let member = latency(&lent(&input, full), 1, &[(3, 5)]).members[0];
    assert_eq!(member.gpu_memory_bytes, 0.0);
    equal(member.memory_bytes, 3.0 * GB + full);
    assert_eq!(
        violation(&lent(&input, full - 0.5 * GB), &[(3, 5)]),
        Violation::GpuMemory {
            device: 0,
            missing_bytes: 0.5 * GB,
        }
    );
    // Without layers there, nothing of it is needed.
    latency(&lent(&input, 0.0), 1, &[(8, 0)]);

    // A layer has the KV cache that it has, not the mean.
    input.model.kv_of_layers = vec![0.5, 0.5, 0.5, 2.5, 0.5, 0.5, 0.5, 2.5];
    let last = (1.125 + 2.5 * 0.25) * GB;
    latency(&lent(&input, last), 1, &[(7, 1)]);
    assert!(matches!(
        violation(&lent(&input, last - 0.25 * GB), &[(7, 1)]),
        Violation::GpuMemory { device: 0, .. }
    ));
}

/// Layers 3 and 7 see all positions: their KV caches are 2.5 times the mean, the others' half of it.
#[test]
fn a_member_has_the_kv_caches_of_the_layers_that_it_gets() {
    let mut input = input(vec![device(0.010), device(0.010)]);
    input.model.layer_kv_bytes = 0.125 * GB;
    input.model.gpu_layer_kv_bytes = 0.25 * GB;
    input.model.kv_of_layers = vec![0.5, 0.5, 0.5, 2.5, 0.5, 0.5, 0.5, 2.5];
    let kv = |found: &Latency| [found.members[0].kv_bytes, found.members[1].kv_bytes];
    let half = 0.125 * (2.5 + 3.0 * 0.5) * GB;
    let once = latency(&input, 1, &[(4, 0), (4, 0)]);
    assert_eq!(kv(&once), [half, half]);
    // Windows of two layers: both large ones are the second member's.
    let large = 0.125 * (2.0 * 2.5 + 2.0 * 0.5) * GB;
    let twice = latency(&input, 2, &[(4, 0), (4, 0)]);
    assert_eq!(kv(&twice), [0.125 * 4.0 * 0.5 * GB, large]);
    equal(twice.members[0].memory_bytes, 4.25 * GB);
    equal(twice.members[1].memory_bytes, 4.75 * GB);

    // The last layer of each window is on the GPU.
    let mut with_gpu = input.clone();
    with_gpu.devices[1].gpu = Some(gpu(Some(4.0 * GB)));
    let found = latency(&with_gpu, 2, &[(4, 0), (2, 2)]);
    let second = found.members[1];
    equal(second.memory_bytes, (2.0 + 0.125) * GB);
    equal(second.gpu_memory_bytes, (2.0 + 1.25) * GB);
    equal(second.kv_bytes, (0.125 + 1.25) * GB);

    // Memory is enough for four means, but not for these.
    input.devices[1].memory_bytes = 0.625 * GB;
    input.devices[1].disk_bytes_per_second = Some(GB);
    latency(&input, 1, &[(4, 0), (4, 0)]);
    assert_eq!(
        predict(&input, &assignment(2, &[(4, 0), (4, 0)])).unwrap_err(),
        Violation::Memory {
            device: 1,
            missing_bytes: 0.125 * GB,
        }
    );
}

/// As above: a window of layers exceeds the mean by no more than its one large layer does.
#[test]
fn the_reserve_for_kv_caches_is_that_of_the_largest_windows() {
    let mut model = input(vec![device(0.010)]).model;
    assert_eq!(model.kv_excess(3), 0.0);
    model.kv_of_layers = vec![0.5, 0.5, 0.5, 2.5, 0.5, 0.5, 0.5, 2.5];
    equal(model.kv_excess(1), 1.5);
    equal(model.kv_excess(2), 3.0);
    // There are two large ones.
    equal(model.kv_excess(5), 3.0);
    // Two that are next to each other are in one window.
    model.kv_of_layers = vec![0.5, 0.5, 2.5, 2.5, 0.5, 0.5, 0.5, 0.5];
    equal(model.kv_excess(1), 3.0);

    // In bytes: where a GPU has memory of its own, the machine holds the processor's layers only.
    model.layer_kv_bytes = 0.125 * GB;
    model.gpu_layer_kv_bytes = 0.25 * GB;
    let mut device = device(0.010);
    equal(model.gpu_kv_reserve_bytes(1), 0.75 * GB);
    equal(model.kv_reserve_bytes(&device, 1), 0.375 * GB);
    device.gpu = Some(gpu(Some(GB)));
    equal(model.kv_reserve_bytes(&device, 1), 0.375 * GB);
    device.gpu = Some(gpu(None));
    equal(model.kv_reserve_bytes(&device, 1), 0.75 * GB);
}

#[test]
fn what_there_is_no_room_for_is_named_with_its_bytes() {
    let mut input = input(vec![device(0.010)]);
    assert_eq!(violation(&input, &[(7, 1)]), Violation::NoGpu { device: 0 });

    input.model.layer_kv_bytes = 0.5 * GB;
    input.model.buffer_bytes = 0.25 * GB;
    input.model.gpu_layer_kv_bytes = 0.625 * GB;
    input.model.gpu_buffer_bytes = 0.375 * GB;
    input.devices[0].gpu = Some(gpu(Some(4.0 * GB)));
    assert_eq!(
        violation(&input, &[(5, 3)]),
        Violation::GpuMemory {
            device: 0,
            missing_bytes: (3.0 * 1.625 + 0.375 - 4.0) * GB,
        }
    );

    // The KV cache and the buffers of 8 layers, in 4 GB.
    input.devices[0].memory_bytes = 4.0 * GB;
    assert_eq!(
        violation(&input, &[(8, 0)]),
        Violation::Memory {
            device: 0,
            missing_bytes: 0.25 * GB,
        }
    );
    // They fit, and so do 4.75 GB of the weights.
    input.devices[0].memory_bytes = 9.0 * GB;
    assert_eq!(
        violation(&input, &[(8, 0)]),
        Violation::Disk {
            device: 0,
            missing_bytes: (8.0 - 4.75) * GB,
        }
    );
}

#[test]
fn a_draft_model_stays_in_the_memory_of_rank_0() {
    let mut input = input(vec![device(0.010), device(0.010)]);
    input.model.rank0_bytes = 2.0 * GB;
    let found = latency(&input, 1, &[(4, 0), (4, 0)]);
    equal(found.members[0].memory_bytes, 6.0 * GB);
    equal(found.members[1].memory_bytes, 4.0 * GB);
    // It is not read again for every token: the layers are.
    for device in &mut input.devices {
        device.memory_bytes = 4.0 * GB;
        device.disk_bytes_per_second = Some(GB);
    }
    let found = latency(&input, 1, &[(4, 0), (4, 0)]);
    equal(found.members[0].overflow_bytes, 2.0 * GB);
    equal(found.members[1].overflow_bytes, 0.0);
    input.devices[0].memory_bytes = 1.5 * GB;
    let lacking = Violation::Memory {
        device: 0,
        missing_bytes: 0.5 * GB,
    };
    assert_eq!(violation(&input, &[(4, 0), (4, 0)]), lacking);
}

#[test]
fn of_experts_a_token_reads_what_it_uses_and_lacks() {
    let mut input = input(vec![device(0.100)]);
    input.model.experts = ExpertWeights {
        layer_bytes: 0.75 * GB,
        share: 0.125,
        misses: 1.0,
    };
    input.devices[0].memory_bytes = 5.0 * GB;
    input.devices[0].disk_bytes_per_second = Some(2.0 * GB);
    // Half of the experts are there.
    let found = latency(&input, 1, &[(8, 0)]);
    let member = found.members[0];
    equal(member.missing_expert_bytes, 3.0 * GB);
    equal(member.overflow_bytes, 0.0);
    equal(member.read_bytes(), 3.0 / 8.0 * GB);
    equal(member.disk_seconds, 3.0 / 16.0);
    equal(found.token_seconds, 0.8 + 3.0 / 16.0);
    // A chunk of 64 positions reads them all.
    equal(member.chunk_seconds, 64.0 * 8.0 * 0.01 + 1.5);
    // Tokens that come back to the same experts read fewer; a chunk does not.
    input.model.experts.misses = 0.6;
    let (alike, found) = (found, latency(&input, 1, &[(8, 0)]));
    equal(found.members[0].read_bytes(), 0.6 * 3.0 / 8.0 * GB);
    equal(found.token_seconds, 0.8 + 0.6 * 3.0 / 16.0);
    equal(
        found.members[0].chunk_seconds,
        alike.members[0].chunk_seconds,
    );
    input.model.experts.misses = 1.0;
    // Where none is, other weights are read for each token, too.
    input.devices[0].memory_bytes = GB;
    let member = latency(&input, 1, &[(8, 0)]).members[0];
    equal(member.missing_expert_bytes, 6.0 * GB);
    equal(member.overflow_bytes, 1.0 * GB);
    equal(member.read_bytes(), 1.75 * GB);
    equal(member.disk_seconds, 1.75 / 2.0);
    // Their parts lie apart: this disk reads them half as fast, but not the others.
    input.devices[0].expert_read_bytes_per_second = Some(GB);
    let apart = latency(&input, 1, &[(8, 0)]).members[0];
    equal(apart.disk_seconds, 0.75 + 1.0 / 2.0);
    equal(apart.chunk_seconds, member.chunk_seconds + 6.0 / 2.0);
}

#[test]
fn what_lacks_less_than_rounding_fits() {
    let mut input = input(vec![device(0.010)]);
    input.devices[0].memory_bytes = 8.0 * GB - SLACK_BYTES;
    assert_eq!(latency(&input, 1, &[(8, 0)]).members[0].overflow_bytes, 0.0);
    input.devices[0].memory_bytes -= 1.0;
    assert!(matches!(
        violation(&input, &[(8, 0)]),
        Violation::Disk { missing_bytes, .. } if missing_bytes == SLACK_BYTES + 1.0
    ));
}

#[test]
fn in_one_round_the_overflow_is_read_beside_own_work() {
    let mut input = input(vec![device(0.100)]);
    input.devices[0].memory_bytes = 6.0 * GB;
    input.devices[0].disk_bytes_per_second = Some(2.0 * GB);
    // Two of eight GB are read, in a second. After computing (the paper's equation 15):
    let found = latency(&input, 1, &[(8, 0)]);
    equal(found.token_seconds, 0.8 + 1.0);
    let member = found.members[0];
    equal(member.weight_room_bytes, 6.0 * GB);
    equal(member.overflow_bytes, 2.0 * GB);
    equal(member.read_bytes(), 2.0 * GB);
    equal(member.disk_seconds, 1.0);
    // A chunk computes for 64 x 8 x 0.01 s and reads as much.
    equal(member.chunk_seconds, 5.12 + 1.0);

    // Hidden as far as the work lasts:
    input.devices[0].overlap = FREE;
    let found = latency(&input, 1, &[(8, 0)]);
    equal(found.token_seconds, 1.0);
    equal(found.members[0].chunk_seconds, 5.12);

    // A second of work gains half a second of reading, and a second of reading costs work 0.3 s:
    input.devices[0].overlap = Overlap {
        hidden: 0.5,
        slowdown: 0.3,
    };
    let found = latency(&input, 1, &[(8, 0)]);
    equal(found.token_seconds, 0.8 + (1.0 - 0.5 * 0.8));
    // The chunk's whole second of reading is gained, except for what it costs the work.
    equal(found.members[0].chunk_seconds, 5.12 + 0.3);
}

#[test]
fn measured_shares_become_gains_and_losses() {
    let half = Overlap::new(0.8, 0.5);
    equal(half.hidden, (0.8 + 0.5 - 1.0) / 0.8);
    equal(half.slowdown, (1.0 - 0.8) / 0.5);
    // What gains nothing is done in turns.
    assert_eq!(Overlap::new(0.5, 0.5), IN_TURNS);
    assert_eq!(Overlap::new(0.3, 0.2), IN_TURNS);
    assert_eq!(Overlap::new(1.0, 1.0), FREE);
    // Two seconds of work, three of reading, of which 0.375 x 2 are gained.
    equal(half.stall(2.0, 3.0), 3.0 - 0.375 * 2.0);
    equal(half.stall(10.0, 3.0), 0.4 * 3.0);
    equal(half.stall(1.0, -2.0), 0.0);
}

/// Two machines; the first lacks room for some of its 4 layers. A token takes 0.2 s of its work and 1.0 s of the other's.
fn short_of_memory(bytes: f64, disk: f64) -> PlanningInput {
    let mut input = input(vec![device(0.050), device(0.250)]);
    input.devices[0].memory_bytes = 4.0 * GB - bytes;
    input.devices[0].disk_bytes_per_second = Some(disk);
    input
}

#[test]
fn with_several_rounds_others_work_hides_reading() {
    // 0.7 GB at 1 GB/s, in two rounds of 0.6 s of work. While the other works for 0.5 s, 0.5 GB come; the last 0.2 GB of a token would be
    // read in 0.2 s of own work, which waits: z = r = 0.7 - (C - 0.1), and C = 0.6 + z, so z = 0.1 and C = 0.7.
    let found = latency(&short_of_memory(0.7 * GB, GB), 2, &[(4, 0), (4, 0)]);
    equal(found.token_seconds, 2.0 * 0.7);
    let member = found.members[0];
    equal(member.disk_seconds, 2.0 * 0.1);
    equal(member.overflow_bytes, 0.7 * GB);
    // Ahead: what the disk gives in the 0.5 s in which the member neither computes (0.1 s) nor waits (0.1 s).
    equal(member.read_ahead_bytes, 0.5 * GB);
    equal(member.read_bytes(), 1.2 * GB);
    assert_eq!(found.members[1].disk_seconds, 0.0);

    // All 0.4 GB come while the other works; all that does not fit is read ahead.
    let found = latency(&short_of_memory(0.4 * GB, GB), 2, &[(4, 0), (4, 0)]);
    equal(found.token_seconds, 1.2);
    equal(found.members[0].read_ahead_bytes, 0.4 * GB);

    // With one round nothing is read ahead.
    let found = latency(&short_of_memory(0.4 * GB, GB), 1, &[(4, 0), (4, 0)]);
    equal(found.token_seconds, 1.2 + 0.4);
    assert_eq!(found.members[0].read_ahead_bytes, 0.0);
}

#[test]
fn a_buffer_is_no_larger_than_the_room_for_it() {
    // 3.8 of 4 GB do not fit, so at most 0.2 GB are read ahead: the member waits for 3.6 GB per token, 1.8 s per round.
    let found = latency(&short_of_memory(3.8 * GB, GB), 2, &[(4, 0), (4, 0)]);
    equal(found.members[0].disk_seconds, 2.0 * 1.8);
    equal(found.members[0].read_ahead_bytes, 0.2 * GB);
    equal(found.token_seconds, 1.2 + 3.6);
}

#[test]
fn what_passes_behind_own_work_is_not_read_ahead() {
    // Reading costs nothing: 0.2 s of own work hide 0.2 GB; the other 0.3 GB are read ahead.
    let mut input = short_of_memory(0.5 * GB, GB);
    input.devices[0].overlap = FREE;
    let found = latency(&input, 2, &[(4, 0), (4, 0)]);
    equal(found.token_seconds, 1.2);
    equal(found.members[0].read_ahead_bytes, 0.3 * GB);

    // If reading costs a twentieth or more, all are read ahead.
    input.devices[0].overlap = Overlap {
        hidden: 1.0,
        slowdown: 0.05,
    };
    let found = latency(&input, 2, &[(4, 0), (4, 0)]);
    equal(found.members[0].read_ahead_bytes, 0.5 * GB);
}

#[test]
fn own_work_that_reading_slows_down_waits_by_that() {
    // By the first formula, all is read in time (r - h busy = 0.8 - C - 0.2 < 0); what is read during own work still slows it: z = l r / (k
    // - l (k-1)), r = 0.7 - (C - 0.1), with k = 2 and l = 0.5, and C = 0.6 + z.
    let mut input = short_of_memory(0.7 * GB, GB);
    input.devices[0].overlap = Overlap {
        hidden: 1.0,
        slowdown: 0.5,
    };
    let found = latency(&input, 2, &[(4, 0), (4, 0)]);
    // z = (0.8 - C) / 3, so C = 0.6 + 0.8 / 3 - C / 3.
    let cycle = (0.6 + 0.8 / 3.0) / (4.0 / 3.0);
    equal(found.token_seconds, 2.0 * cycle);
    equal(found.members[0].disk_seconds, 2.0 * (cycle - 0.6));
}

#[test]
fn macos_with_metal_reads_everything_again() {
    let mut input = input(vec![device(0.100)]);
    input.devices[0].memory_bytes = 7.9 * GB;
    input.devices[0].disk_bytes_per_second = Some(4.0 * GB);
    input.devices[0].memory_rule = MemoryRule::AllOrNothing;
    input.devices[0].overlap = FREE;
    // A tenth of a GB is short, and all eight are read: 2 s in a token, whatever the rounds, and in a chunk.
    for rounds in [1, 2, 4] {
        let found = latency(&input, rounds, &[(8, 0)]);
        equal(found.token_seconds, 0.8 + 2.0);
        let member = found.members[0];
        equal(member.overflow_bytes, 8.0 * GB);
        equal(member.disk_seconds, 2.0);
        equal(member.chunk_seconds, 5.12 + 2.0);
        assert_eq!(member.read_ahead_bytes, 0.0);
    }
}
