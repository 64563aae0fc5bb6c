//! A GPU's pass compared with the CPU's own: the same results up to rounding, and the same sessions, however many of a window's layers
//! it takes. The test program says which GPU; on a machine with one, `PRIMA_TEST_GPU=1` runs the same on it.

use std::sync::LazyLock;

use prima_engine::{
    BatchEntry, EngineError, Gpu, GpuApi, KvCache, LayerDevices, LayerWindow, Model, OutputHead,
    Residency,
};
use prima_gguf::GgmlType;
use prima_model::ModelPart;

use crate::{API, BF16, F16, emulated};
use prima_test_models::options::{Variant, options};
use prima_test_models::{
    FAMILIES, MadeUpModel, Runner, difference, greedy, layers_of_each_kind, smollm2,
};

/// How far logits may differ, in units of their spread. With float weights, both only round (and with weights of 16 bits, the test program says
/// how); with quantized ones, both also round activations to 8 bits, each in its own way.
pub const FLOAT: f32 = 1e-3;
pub const QUANTIZED: f32 = 5e-2;

/// The width of networks where every family is computed, or of each expert: two of the kernels' tiles and a half. Wider ones are computed in no
/// other way, and took most of the time.
pub const NARROW: usize = 160;

/// One for all tests: its kernels are compiled once.
static GPU: LazyLock<Gpu> = LazyLock::new(open);

pub fn gpu() -> Gpu {
    GPU.clone()
}

/// The GPU that is tested, opened anew.
pub fn open() -> Gpu {
    match std::env::var_os("PRIMA_TEST_GPU") {
        Some(_) => Gpu::open().expect("a GPU"),
        None => emulated(),
    }
}

fn last_on_gpu(model: &Model, gpu_layers: usize, ends: &[usize]) -> Runner {
    let devices = LayerDevices::last_on(gpu_layers, gpu());
    Runner::on(&devices, model, ends, 2)
}

fn tokens(count: u32, step: u32) -> Vec<u32> {
    (0..count).map(|i| i * step % 96).collect()
}

#[test]
fn any_number_of_gpu_layers_computes_the_same_model() {
    let directory = tempfile::tempdir().unwrap();
    let float = vec![GgmlType::F32, GgmlType::F16, GgmlType::BF16];
    let variants = [
        (
            BF16,
            MadeUpModel {
                formats: float.clone(),
                ..MadeUpModel::default()
            },
        ),
        (
            BF16,
            MadeUpModel {
                formats: float,
                rope_factors: true,
                ..MadeUpModel::qwen2()
            },
        ),
        (QUANTIZED, MadeUpModel::default()),
        (
            QUANTIZED,
            MadeUpModel {
                formats: vec![GgmlType::Q4_0, GgmlType::Q6K],
                ..MadeUpModel::qwen2()
            },
        ),
    ];
    for (seed, (tolerance, made_up)) in variants.into_iter().enumerate() {
        let path = MadeUpModel {
            seed: seed as u64,
            ..made_up
        }
        .write(directory.path());
        let model = Model::open(&path).unwrap();
        let cpu = Runner::new(&path, 2);
        let prompt = tokens(70, 7);
        let expected = cpu.logits(&mut cpu.kv_cache(), &prompt);
        for (gpu_layers, ends) in [
            (1, vec![5]),
            (3, vec![5]),
            (99, vec![5]),
            (1, vec![2, 3, 5]),
        ] {
            let runner = last_on_gpu(&model, gpu_layers, &ends);
            let mut kv = runner.kv_cache();
            // Many rows, few, which go on in another block of keys and values, and one by one.
            let mut found = runner.logits(&mut kv, &prompt[..62]);
            found.extend(runner.logits(&mut kv, &prompt[62..68]));
            found.extend(runner.logits(&mut kv, &prompt[68..69]));
            found.extend(runner.logits(&mut kv, &prompt[69..]));
            for (position, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let difference = difference(found, expected);
                assert!(
                    difference < tolerance,
                    "variant {seed}, {gpu_layers} GPU layers, position {position}: {difference}"
                );
            }
        }
    }
}

#[test]
fn the_output_head_computes_the_same_there() {
    let directory = tempfile::tempdir().unwrap();
    let q6k = GgmlType::Q6K;
    let variants = [
        (FLOAT, "llama", GgmlType::F32),
        (QUANTIZED, "llama", GgmlType::Q8_0),
        // A head of its own.
        (F16, "qwen2", GgmlType::F16),
        (QUANTIZED, "qwen2", q6k),
        // Logits that are scaled, and logits that are capped.
        (FLOAT, "granite", GgmlType::F32),
        (FLOAT, "gemma2", GgmlType::F32),
    ];
    for (seed, (tolerance, family, format)) in variants.into_iter().enumerate() {
        let made_up = MadeUpModel {
            formats: vec![format],
            vocabulary: 1000,
            seed: seed as u64,
            ..MadeUpModel::of(family)
        };
        let cpu = Runner::new(&made_up.write(directory.path()), 1);
        let model = &cpu.model;
        let on_cpu = OutputHead::open(model, &cpu.residency).unwrap();
        let on_gpu = OutputHead::open_on(&gpu(), model, &cpu.residency).unwrap();
        // One row, some, and more than go through it at once.
        for rows in [1, 3, 70] {
            let activation = cpu.run(&mut [(&mut cpu.kv_cache(), &tokens(rows, 7))]);
            let logits = |head: &OutputHead| {
                let mut logits = Vec::new();
                let done = head.logits(&cpu.compute, &activation, &mut logits);
                done.unwrap();
                logits
            };
            let difference = difference(&logits(&on_gpu), &logits(&on_cpu));
            assert!(
                difference < tolerance,
                "{family} {format}, {rows} rows: {difference}"
            );
        }
        let state = vec![0.5; model.spec().hidden];
        let states = |head: &OutputHead| head.states(&cpu.compute, &state).unwrap();
        assert_eq!(states(&on_gpu), states(&on_cpu));
    }
}

#[test]
fn every_family_computes_the_same_there() {
    let directory = tempfile::tempdir().unwrap();
    for architecture in FAMILIES {
        let made_up = MadeUpModel {
            formats: vec![GgmlType::F32],
            feed_forward: NARROW,
            layers: layers_of_each_kind(architecture),
            ..MadeUpModel::of(architecture)
        };
        let path = made_up.write(directory.path());
        let cpu = Runner::new(&path, 1);
        let layers = cpu.model.spec().layers.len();
        let parts = cpu.model.spec().parts();
        let left = parts.iter().find(|part| !API.computes(**part));
        let expected = match API {
            GpuApi::Vulkan => false,
            _ => made_up.experts > 0,
        };
        assert_eq!(left.is_some(), expected, "{architecture}");
        if let Some(part) = left {
            let devices = LayerDevices::last_on(1, gpu());
            let mapped = Residency::mapped();
            let refused = LayerWindow::open(&cpu.model, 0..layers, &devices, &mapped);
            let message = refused.err().unwrap().to_string();
            let last = layers - 1;
            let expected = format!("layer {last} has {part}, which prima does not compute on GPUs");
            assert!(message.contains(&expected), "{message}");
            continue;
        }
        all_layers_compute_the_same(architecture, &cpu);
    }
}

/// What only some files of a family have.
#[test]
fn every_option_computes_the_same_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("made-up.gguf");
    let partly_rotated = [MadeUpModel::default(), MadeUpModel::qwen2()].map(|model| Variant {
        name: "a part of a head rotated",
        model,
        keys: vec![("rope.dimension_count", 16_u32.into())],
        ..Variant::of("llama")
    });
    for mut variant in options().into_iter().chain(partly_rotated) {
        variant.model.formats = vec![GgmlType::F32];
        variant.model.feed_forward = NARROW;
        variant.model.layers = layers_of_each_kind(variant.name);
        variant.write(&path, |_| {});
        let cpu = Runner::new(&path, 1);
        // The GPU leaves some to the processor.
        let parts = cpu.model.spec().parts();
        if parts.iter().any(|part| !API.computes(*part)) {
            let devices = LayerDevices::last_on(1, gpu());
            let layers = 0..cpu.model.spec().layers.len();
            let refused = LayerWindow::open(&cpu.model, layers, &devices, &Residency::mapped());
            let message = refused.err().unwrap().to_string();
            assert!(
                message.contains("which prima does not compute on GPUs"),
                "{}: {message}",
                variant.name
            );
            continue;
        }
        all_layers_compute_the_same(variant.name, &cpu);
    }
}

fn all_layers_compute_the_same(name: &str, cpu: &Runner) {
    let layers = cpu.model.spec().layers.len();
    let gpu = last_on_gpu(&cpu.model, layers, &[layers]);
    let (mut cpu_kv, mut gpu_kv) = (cpu.kv_cache(), gpu.kv_cache());
    // In a batch that is longer than windows and original contexts, and token by token.
    for rows in [tokens(29, 5), tokens(1, 3), tokens(1, 4)] {
        let expected = cpu.logits(&mut cpu_kv, &rows);
        let found = gpu.logits(&mut gpu_kv, &rows);
        for (found, expected) in found.iter().zip(&expected) {
            let difference = difference(found, expected);
            assert!(difference < FLOAT, "{name}: {difference}");
        }
    }
}

/// Of seven layers, one has all positions, six have windows.
pub fn small_with_windows() -> MadeUpModel {
    MadeUpModel {
        formats: vec![GgmlType::F32],
        context_length: 2048,
        hidden: 64,
        heads: 2,
        head_dim: Some(64),
        feed_forward: 64,
        ..MadeUpModel::of("gemma3")
    }
}

#[test]
fn layers_with_windows_keep_what_is_seen() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = small_with_windows();
    let cpu = Runner::new(&made_up.write(directory.path()), 2);
    let gpu = last_on_gpu(&cpu.model, 7, &[7]);
    let (mut cpu_kv, mut gpu_kv) = (cpu.kv_cache(), gpu.kv_cache());
    let prompt = tokens(1500, 5);
    // Each call is far longer than the window, and the last ends where room was left.
    for rows in [&prompt[..700], &prompt[700..1399], &prompt[1399..]] {
        let expected = cpu.logits(&mut cpu_kv, rows);
        let found = gpu.logits(&mut gpu_kv, rows);
        for (found, expected) in found.iter().zip(&expected).rev().take(20) {
            let difference = difference(found, expected);
            assert!(difference < FLOAT, "{difference}");
        }
    }
    // Keys and values of a head of 64, in F16: one layer has all positions, six have those of a pass.
    let position = 2 * 64 * 2;
    let one_by_one = |kv: &mut KvCache| {
        for token in tokens(300, 7) {
            gpu.logits(kv, &[token]);
        }
        kv.bytes()
    };
    let bytes = one_by_one(&mut gpu_kv);
    assert!(
        (1800 * position..(2048 + 6 * 720) * position).contains(&bytes),
        "{} positions",
        bytes / position
    );
    let mut fork = gpu_kv.fork();
    fork.truncate(1799);
    assert_eq!(fork.len(), 1799);
    let found = gpu.logits(&mut fork, &[5]);
    cpu_kv.truncate(1500);
    for token in tokens(299, 7) {
        cpu.logits(&mut cpu_kv, &[token]);
    }
    let expected = cpu.logits(&mut cpu_kv, &[5]);
    assert!(difference(&found[0], &expected[0]) < FLOAT);
    fork.truncate(1000);
    assert_eq!(fork.len(), 0, "what the next row would see is gone");
}

#[test]
fn sequences_of_a_batch_do_not_see_each_other() {
    let directory = tempfile::tempdir().unwrap();
    // Where weights are quantized, few rows are rounded, and many are not.
    let few = [tokens(2, 7), tokens(1, 11), tokens(3, 13)];
    let many = [tokens(20, 7), tokens(1, 11), tokens(33, 13)];
    let quantized = MadeUpModel::qwen2();
    let float = MadeUpModel {
        formats: vec![GgmlType::F16],
        ..MadeUpModel::qwen2()
    };
    for (made_up, prompts, bound) in [
        (&float, &many, F16),
        (&quantized, &few, FLOAT),
        (&quantized, &many, QUANTIZED),
    ] {
        let model = Model::open(&made_up.write(directory.path())).unwrap();
        let off = off_in_a_batch(&last_on_gpu(&model, 2, &[5]), prompts);
        assert!(off < bound, "{off}");
    }
    for made_up in [mixture(), with_latents()].into_iter().flatten() {
        let model = Model::open(&made_up.write(directory.path())).unwrap();
        let off = off_in_a_batch(&last_on_gpu(&model, 2, &[made_up.layers]), &many);
        assert!(off < FLOAT, "{off}");
    }
}

/// How far logits of prompts that are computed together are from those of each alone.
fn off_in_a_batch(runner: &Runner, prompts: &[Vec<u32>]) -> f32 {
    let alone: Vec<Vec<f32>> = prompts
        .iter()
        .map(|prompt| runner.run(&mut [(&mut runner.kv_cache(), prompt)]))
        .collect();
    let mut caches: Vec<KvCache> = prompts.iter().map(|_| runner.kv_cache()).collect();
    let mut batch: Vec<_> = caches
        .iter_mut()
        .zip(prompts)
        .map(|(kv, prompt)| (kv, &prompt[..]))
        .collect();
    let together = runner.run(&mut batch);
    difference(&together, &alone.concat())
}

#[test]
fn sessions_truncate_and_fork_on_the_device() {
    for made_up in [Some(MadeUpModel::default()), mixture(), with_latents()]
        .into_iter()
        .flatten()
    {
        sessions_truncate_and_fork(&MadeUpModel {
            layers: 3,
            ..made_up
        });
    }
}

/// A model with experts, where the GPU computes them.
fn mixture() -> Option<MadeUpModel> {
    API.computes(ModelPart::Experts).then(|| MadeUpModel {
        formats: vec![GgmlType::F16],
        ..MadeUpModel::of("qwen3moe")
    })
}

/// A model with latents, without experts, where the GPU computes them.
fn with_latents() -> Option<MadeUpModel> {
    API.computes(ModelPart::LatentAttention)
        .then(|| MadeUpModel {
            formats: vec![GgmlType::F16],
            experts: 0,
            ..MadeUpModel::of("deepseek2")
        })
}

fn sessions_truncate_and_fork(made_up: &MadeUpModel) {
    let directory = tempfile::tempdir().unwrap();
    let model = Model::open(&made_up.write(directory.path())).unwrap();
    let runner = last_on_gpu(&model, 2, &[made_up.layers]);
    // Three blocks of keys and values; a fork leaves the last, and goes on from the second to a third of its own.
    let (prompt, other) = (tokens(140, 7), tokens(20, 11));
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &prompt);
    let bytes = kv.bytes();
    let mut fork = kv.fork();
    fork.truncate(115);
    let found = runner.logits(&mut fork, &other);
    let mut fresh = runner.kv_cache();
    runner.logits(&mut fresh, &prompt[..115]);
    let expected = runner.logits(&mut fresh, &other);
    assert!(difference(&found.concat(), &expected.concat()) < FLOAT);

    // The original has not seen what its fork wrote.
    let found = runner.logits(&mut kv, &other);
    let mut fresh = runner.kv_cache();
    runner.logits(&mut fresh, &prompt);
    let expected = runner.logits(&mut fresh, &other);
    assert!(difference(&found.concat(), &expected.concat()) < FLOAT);
    assert!(bytes > 0 && kv.bytes() >= bytes);
}

#[test]
fn a_cache_does_not_move_between_devices() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F32],
        ..MadeUpModel::default()
    };
    let cpu = Runner::new(&made_up.write(directory.path()), 1);
    let gpu = last_on_gpu(&cpu.model, 2, &[5]);
    for (first, second) in [(&cpu, &gpu), (&gpu, &cpu)] {
        let mut kv = first.kv_cache();
        first.logits(&mut kv, &[1, 2, 3]);
        let continue_on = |runner: &Runner, kv: &mut KvCache, first_position| {
            let entry = BatchEntry {
                kv,
                first_position,
                rows: 1,
            };
            runner.windows[0].forward(&runner.compute, &mut [0.5; 256], &mut [entry])
        };
        let error = continue_on(second, &mut kv, 3).unwrap_err();
        assert!(matches!(error, EngineError::KvLayers { .. }), "{error}");
        kv.truncate(0);
        continue_on(second, &mut kv, 0).unwrap();
    }
}

#[test]
fn smollm2_picks_the_same_tokens() {
    let path = smollm2();
    let cpu = Runner::new(&path, 2);
    let gpu = last_on_gpu(&cpu.model, 12, &[30]);
    assert_eq!(gpu.windows[0].gpu_layers(), 12);
    let mut prompt = vec![1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198];
    let (mut cpu_kv, mut gpu_kv) = (cpu.kv_cache(), gpu.kv_cache());
    let mut chosen = 0;
    for _ in 0..16 {
        let expected = cpu.logits(&mut cpu_kv, &prompt).pop().unwrap();
        let found = gpu.logits(&mut gpu_kv, &prompt).pop().unwrap();
        let difference = difference(&found, &expected);
        assert!(
            difference < QUANTIZED,
            "logits differ by {difference} of their spread"
        );
        let mut sorted = expected.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        if sorted[0] - sorted[1] > 0.5 {
            chosen += 1;
            assert_eq!(greedy(&found), greedy(&expected));
        }
        prompt = vec![greedy(&expected)];
    }
    assert!(chosen > 8, "only {chosen} tokens were a clear choice");
}
