//! What layers take of a GPU's memory, and what plans count: here on Vulkan on the processor (lavapipe), which says as any driver does what a
//! buffer needs.

use std::path::Path;

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::{CHUNK_POSITIONS, MOST_BATCH_ROWS, MOST_CHUNK_POSITIONS};
use prima_engine::{
    BatchEntry, GPU_HEAD_ROWS, Gpu, KvFormat, KvPositions, LayerDevices, Model, OutputHead,
    WholeModel,
};
use prima_gguf::GgmlType;
use prima_halda::input::{GpuCost, StreamedCost, streaming_room};
use prima_halda::latency::{Assignment, LayerShare, MemberLatency, predict};
use prima_halda::{Options, PlanningInput};
use prima_test_models::{MadeUpModel, Runner};
use prima_tests::inputs;
use prima_tests::machine_ring::usual_profile;
use prima_weights::model_profile;
use serde_json::json;

const LAYERS: usize = 2;
const CONTEXT: usize = 1024;
/// From so many rows on, layers on the processor are copied to the GPU.
const MANY_ROWS: usize = 32;

/// What a member has on its GPU.
#[derive(Clone, Copy, Debug)]
struct Share {
    gpu_layers: usize,
    head: bool,
    /// A draft model: here as large as the model.
    draft: bool,
    /// Other layers, for passes of many rows.
    streams: bool,
}

const SHARES: [Share; 4] = [
    Share {
        gpu_layers: 1,
        head: false,
        draft: false,
        streams: false,
    },
    Share {
        gpu_layers: LAYERS,
        head: true,
        draft: false,
        streams: false,
    },
    Share {
        gpu_layers: LAYERS,
        head: true,
        draft: true,
        streams: false,
    },
    Share {
        gpu_layers: 1,
        head: true,
        draft: false,
        streams: true,
    },
];

/// A row has many numbers and a layer few weights: what passes take is most of what is counted.
fn with_wide_rows(family: &'static str, feed_forward: usize) -> MadeUpModel {
    MadeUpModel {
        layers: LAYERS,
        hidden: 64,
        heads: 2,
        kv_heads: 1,
        head_dim: Some(64),
        feed_forward,
        context_length: CONTEXT as u32,
        formats: vec![GgmlType::Q8_0],
        ..MadeUpModel::of(family)
    }
}

/// The usual machine, with a GPU that computes all that its processor does.
fn machine() -> NodeProfile {
    let mut profile = usual_profile();
    let status = profile.status.as_mut().expect("a status");
    let gpu = json!({
        "name": "large", "backend": "Vulkan",
        "measured": {
            "unifiedMemory": false, "totalBytes": 1_i64 << 40, "availableBytes": 1_i64 << 40,
            "readBytesPerSecond": 200_000_000_000_i64, "kvAppendBytesPerSecond": 200_000_000_000_i64,
            "toGpuBytesPerSecond": 10_000_000_000_i64, "fromGpuBytesPerSecond": 10_000_000_000_i64,
            "copyOverheadNanoseconds": 10_000, "layerOverheadNanoseconds": 10_000,
            "throughput": status.cpu.throughput.clone(), "parts": status.parts.clone(),
        },
    });
    status.gpus = vec![serde_json::from_value(gpu).expect("a GPU")];
    profile
}

/// What the planner says of a member with this share of the model and chunks of so many positions, and the positions that layers have memory for.
fn planned(model: &Model, share: Share, chunk: usize) -> (MemberLatency, KvPositions) {
    let spec = model_profile("made-up", model.gguf()).expect("a model that prima runs");
    let options = Options {
        context_tokens: CONTEXT,
        draft: share.draft.then(|| spec.clone()),
        ..Options::default()
    };
    let profile = ModelProfile::new("made-up", spec.clone());
    let input = PlanningInput::with_chunks_of(chunk, &profile, &[machine()], &options);
    let mut input = input.expect("documents");
    let gpu = input.devices[0].gpu.take().expect("a GPU for the model");
    // Whether these pay is not asked here.
    input.devices[0].gpu = Some(GpuCost {
        head_seconds: share.head.then_some(0.0),
        guess_gained: share.draft.then_some(0.0),
        streamed: share.streams.then_some(StreamedCost {
            chunk_seconds: 0.0,
            room_bytes: streaming_room(&spec, &options) as f64,
            copying_bytes: 0.0,
            from_rows: MANY_ROWS,
        }),
        ..gpu
    });
    let assignment = Assignment {
        rounds: 1,
        ring: vec![0],
        shares: vec![LayerShare {
            cpu_layers: LAYERS - share.gpu_layers,
            gpu_layers: share.gpu_layers,
        }],
    };
    let member = predict(&input, &assignment).expect("room for all").members[0];
    let planned = [
        member.output_head_on_gpu,
        member.draft_on_gpu,
        member.gpu_from_rows.is_some(),
    ];
    assert_eq!(planned, [share.head, share.draft, share.streams]);
    // Of these families, either all of so few layers have windows or none has.
    let kept = spec.kept_positions(CONTEXT, input.windowed_sequences, chunk);
    let positions = KvPositions {
        full: CONTEXT,
        windowed: kept[0],
    };
    (member, positions)
}

/// Bytes that the same takes on a GPU, after the largest pass and after a small one.
fn taken(model: &Model, share: Share, chunk: usize, positions: KvPositions) -> u64 {
    let gpu = Gpu::software().expect("lavapipe: Debian's mesa-vulkan-drivers");
    let allocated = || gpu.allocated_bytes().expect("counted");
    assert_eq!(allocated(), 0);
    let devices = LayerDevices::last_on(share.gpu_layers, gpu.clone());
    let devices = devices
        .with_kv_positions(positions)
        .with_passes_of(MOST_BATCH_ROWS.max(chunk));
    let devices = match share.streams {
        true => devices.with_many_rows_on(gpu.clone(), MANY_ROWS),
        false => devices,
    };
    let runner = Runner::on(&devices, model, &[LAYERS], 2);
    let head = share
        .head
        .then(|| OutputHead::open_on(&gpu, model, &runner.residency).expect("room for the head"));
    let draft = share.draft.then(|| {
        let draft = WholeModel::open_on(&gpu, model.clone(), CONTEXT);
        draft.expect("room for the draft model")
    });
    // As many as come together at a member: usual ones of two sequences, or a larger one alone.
    let text: Vec<u32> = (0..chunk as u32).map(|i| i * 7 % 96).collect();
    let sequences = (MOST_BATCH_ROWS / chunk).max(1);
    let mut caches: Vec<_> = (0..sequences).map(|_| runner.kv_cache()).collect();
    let mut batch: Vec<_> = caches.iter_mut().map(|kv| (kv, &text[..])).collect();
    let activation = runner.run(&mut batch);
    if let Some(head) = &head {
        let rows = &activation[..GPU_HEAD_ROWS * model.spec().hidden];
        let made = head.logits(&runner.compute, rows, &mut Vec::new());
        made.expect("logits");
    }
    if let Some(draft) = &draft {
        let mut guesses = draft.sequence(CONTEXT, KvFormat::F16);
        // A draft model takes in a text in usual chunks.
        let chunk = &text[..CHUNK_POSITIONS];
        let entry = BatchEntry {
            kv: &mut guesses,
            first_position: 0,
            rows: chunk.len(),
        };
        let activation = draft.forward(&runner.compute, chunk, &mut [entry]);
        let activation = activation.expect("a pass");
        let row = &activation[..model.spec().hidden];
        draft.logits(&runner.compute, row).expect("logits");
    }
    runner.run(&mut [(&mut caches[0], &text[..1])]);
    let taken = allocated();
    drop((runner, head, draft));
    assert!(allocated() < taken, "what is closed gives its memory back");
    taken
}

fn takes_what_is_planned(made_up: &MadeUpModel, shares: &[Share]) {
    inputs::need("vulkan");
    let folder = tempfile::tempdir().unwrap();
    let path: &Path = &folder.path().join("made-up.gguf");
    made_up.write_for_ring(path);
    let model = Model::open(path).unwrap();
    for &share in shares {
        for chunk in [CHUNK_POSITIONS, MOST_CHUNK_POSITIONS] {
            let (member, positions) = planned(&model, share, chunk);
            let planned = member.gpu_memory_bytes as u64;
            let taken = taken(&model, share, chunk, positions);
            assert!(
                taken <= planned,
                "{}, {share:?}, {chunk} positions: {taken} bytes are taken, {planned} planned",
                made_up.architecture
            );
        }
    }
}

#[test]
fn dense_layers_take_no_more_than_is_planned() {
    takes_what_is_planned(&with_wide_rows("llama", 1 << 14), &SHARES);
}

#[test]
fn layers_with_experts_take_no_more_than_is_planned() {
    takes_what_is_planned(&with_wide_rows("qwen3moe", 1 << 12), &SHARES[2..]);
}

#[test]
fn layers_with_latents_take_no_more_than_is_planned() {
    let latents = MadeUpModel {
        layers: LAYERS,
        experts: 0,
        context_length: CONTEXT as u32,
        formats: vec![GgmlType::Q8_0],
        ..MadeUpModel::of("deepseek2")
    };
    takes_what_is_planned(&latents, &SHARES[2..]);
}

#[test]
fn layers_with_windows_take_no_more_than_is_planned() {
    takes_what_is_planned(&with_wide_rows("gemma3", 1 << 14), &SHARES[2..]);
}
