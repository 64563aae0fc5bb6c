//! Layers on a driver of Vulkan that computes on the CPU (lavapipe).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

#[path = "on_gpu/many_rows.rs"]
mod many_rows;
mod on_gpu;

use std::error::Error as _;

use prima_engine::kernels::BLOCK_POSITIONS;
use prima_engine::{
    BatchEntry, Compute, EngineError, Gpu, GpuApi, KvCache, KvFormat, KvPositions, LayerDevices,
    LayerWindow, Model, OutputHead, Residency,
};
use prima_gguf::GgmlType;

use prima_test_models::{MadeUpModel, Runner, difference};

const API: GpuApi = GpuApi::Vulkan;

/// How far logits may differ where weights are F16 or BF16: they are widened.
const F16: f32 = on_gpu::FLOAT;
const BF16: f32 = on_gpu::FLOAT;

fn emulated() -> Gpu {
    Gpu::software()
        .expect("a driver of Vulkan that computes on the CPU: Debian's mesa-vulkan-drivers")
}

/// In passes of rows that are many for each expert, many in all, few, and one. Where both sides round activations, each in its own way, some rows go to other experts, by a hair;
/// the others compute the same.
#[test]
fn quantized_experts_compute_the_same_but_for_close_choices() {
    let directory = tempfile::tempdir().unwrap();
    for (family, formats) in [
        ("qwen3moe", vec![GgmlType::Q4K, GgmlType::Q6K]),
        ("gpt-oss", vec![GgmlType::Mxfp4]),
        ("mixtral", vec![GgmlType::Q8_0]),
    ] {
        let made_up = MadeUpModel {
            formats,
            layers: 2,
            ..MadeUpModel::of(family)
        };
        let path = made_up.write(directory.path());
        let cpu = Runner::new(&path, 2);
        let devices = LayerDevices::last_on(2, on_gpu::gpu());
        let gpu = Runner::on(&devices, &cpu.model, &[2], 2);
        let (mut on_cpu, mut on_gpu) = (cpu.kv_cache(), gpu.kv_cache());
        let tokens: Vec<u32> = (0..140).map(|i| i * 7 % 96).collect();
        for (rows, passes) in [(60, 1), (30, 1), (5, 5), (1, 25)] {
            let mut same = 0;
            for _ in 0..passes {
                let first = on_cpu.len();
                let own = &tokens[first..first + rows];
                let expected = cpu.logits(&mut on_cpu, own);
                let found = gpu.logits(&mut on_gpu, own);
                let pairs = found.iter().zip(&expected);
                same += pairs.filter(|(a, b)| difference(a, b) < 5e-2).count();
            }
            let all = rows * passes;
            assert!(2 * same > all, "{family}: {same} of {all}, {rows} at once");
        }
    }
}

/// The same GPU opened twice, each time with layers, keys and values of its own.
#[test]
fn layers_split_among_gpus_compute_the_same_model() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F16],
        layers: 5,
        ..MadeUpModel::default()
    };
    let path = made_up.write(directory.path());
    let cpu = Runner::new(&path, 2);
    let prompt: Vec<u32> = (0..70).map(|i| i * 7 % 96).collect();
    let expected = cpu.logits(&mut cpu.kv_cache(), &prompt);
    let other = emulated();
    for (counts, on_gpus) in [([2, 2], 4), ([1, 4], 5), ([3, 0], 3), ([9, 1], 5)] {
        let gpus = [on_gpu::gpu(), other.clone()];
        let devices = LayerDevices::last_on_each(gpus.into_iter().zip(counts));
        let runner = Runner::on(&devices, &cpu.model, &[5], 2);
        assert_eq!(runner.windows[0].gpu_layers(), on_gpus);
        let mut kv = runner.kv_cache();
        let mut found = runner.logits(&mut kv, &prompt[..69]);
        found.extend(runner.logits(&mut kv, &prompt[69..]));
        for (position, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let difference = difference(found, expected);
            assert!(
                difference < on_gpu::FLOAT,
                "{counts:?}, position {position}: {difference}"
            );
        }
    }
}

/// What windows have passed makes room for the next rows, so that what a plan sets aside is enough wherever chunks begin.
#[test]
fn windows_take_no_more_than_is_set_aside() {
    const SEQUENCES: usize = 4;
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        layers: 5,
        heads: 1,
        ..on_gpu::small_with_windows()
    };
    let cpu = Runner::new(&made_up.write(directory.path()), 2);
    let layers = &cpu.model.spec().layers;
    assert!(layers.iter().all(|layer| layer.attention.window.is_some()));
    // 100 rows and the windows before them are in three blocks at most. More than that the GPU does not take.
    let positions = SEQUENCES * 3 * BLOCK_POSITIONS;
    let bytes = positions * layers[0].attention.kv_bytes(KvFormat::F16);
    let small = Gpu::software_with_most_bound_bytes(bytes as u64).unwrap();
    let set_aside = KvPositions {
        full: 0,
        windowed: positions,
    };
    let devices = LayerDevices::last_on(5, small).with_kv_positions(set_aside);
    let gpu = Runner::on(&devices, &cpu.model, &[5], 2);
    let caches = |runner: &Runner| [(); SEQUENCES].map(|()| runner.kv_cache());
    let (mut of_cpu, mut of_gpu) = (caches(&cpu), caches(&gpu));
    for rows in [70, 100, 100, 100] {
        let chunk: Vec<u32> = (0..rows).map(|i| i * 7 % 96).collect();
        let run = |runner: &Runner, caches: &mut [KvCache]| {
            let batch = caches.iter_mut().map(|kv| (kv, &chunk[..]));
            runner.run(&mut batch.collect::<Vec<_>>())
        };
        let difference = difference(&run(&gpu, &mut of_gpu), &run(&cpu, &mut of_cpu));
        assert!(difference < on_gpu::FLOAT, "{difference}");
    }
}

#[test]
fn an_output_head_is_computed_in_parts() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F32],
        vocabulary: 1000,
        ..MadeUpModel::default()
    };
    let model = Model::open(&made_up.write(directory.path())).unwrap();
    let (compute, mapped) = (Compute::new(1).unwrap(), Residency::mapped());
    let hidden: Vec<f32> = (0..20 * 256)
        .map(|index| ((index * 37 % 101) as f32 - 50.0) / 50.0)
        .collect();
    let logits = |head: OutputHead| {
        let mut logits = Vec::new();
        head.logits(&compute, &hidden, &mut logits).unwrap();
        logits
    };
    let on = |bytes| {
        let gpu = Gpu::software_with_most_bound_bytes(bytes).unwrap();
        OutputHead::open_on(&gpu, &model, &mapped)
    };
    let expected = logits(OutputHead::open(&model, &mapped).unwrap());
    // Logits of 7 rows, and 28 rows of the matrix.
    let found = logits(on(28 << 10).unwrap());
    assert!(difference(&found, &expected) < 1e-3);
    let refused = on(3 << 10).err().unwrap();
    assert_eq!(
        cause(&refused),
        "a GPU has no kernels for 1000 logits at once"
    );
}

fn cause(error: &EngineError) -> String {
    error.source().expect("a cause").to_string()
}

/// Whoever has it open is told, in whatever it has there: layers that stay, layers that are copied, the output head.
#[test]
fn a_gpu_that_hangs_ends_all_that_is_computed_there() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F32],
        ..MadeUpModel::default()
    };
    let model = Model::open(&made_up.write(directory.path())).unwrap();
    let layers = model.spec().layers.len();
    let hidden = model.spec().hidden;
    let (gpu, hangs) = Gpu::software_that_hangs().unwrap();
    let on = |devices: LayerDevices| Runner::on(&devices, &model, &[layers], 1);
    let staying = on(LayerDevices::last_on(layers, gpu.clone()));
    let copied = on(LayerDevices::cpu().with_many_rows_on(gpu.clone(), 2));
    let head = OutputHead::open_on(&gpu, &model, &staying.residency).unwrap();
    let forward = |runner: &Runner| {
        let mut kv = runner.kv_cache();
        let entry = BatchEntry {
            kv: &mut kv,
            first_position: 0,
            rows: 3,
        };
        let mut activation = vec![0.5; 3 * hidden];
        runner.windows[0].forward(&runner.compute, &mut activation, &mut [entry])
    };
    let logits = || {
        let mut logits = Vec::new();
        head.logits(&staying.compute, &vec![0.5; hidden], &mut logits)
    };
    forward(&staying).unwrap();
    forward(&copied).unwrap();
    logits().unwrap();

    let first = hangs.copy_rows(&[0.5; 4], 1).err().unwrap();
    let later = [
        forward(&staying).unwrap_err(),
        forward(&copied).unwrap_err(),
        logits().unwrap_err(),
        gpu.copy_rows(&[0.5; 4], 1).err().unwrap(),
    ];
    for error in later.iter().chain([&first]) {
        assert!(error.is_lasting() && error.is_without_gpu(), "{error:?}");
        let cause = cause(error);
        assert!(cause.contains("is given up"), "{cause}");
    }
}

#[test]
fn a_gpu_without_room_says_how_much_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let model = Model::open(&MadeUpModel::default().write(directory.path())).unwrap();
    let layers = 0..model.spec().layers.len();
    let set_aside = KvPositions {
        full: 1 << 40,
        windowed: 0,
    };
    let devices = LayerDevices::last_on(1, on_gpu::gpu()).with_kv_positions(set_aside);
    let refused = LayerWindow::open(&model, layers, &devices, &Residency::mapped());
    let refused = refused.err().unwrap();
    let message = cause(&refused);
    let bytes = message
        .strip_prefix("the GPU's memory is full: ")
        .and_then(|rest| rest.split(' ').next()?.parse().ok());
    // At least a byte for each position.
    assert!(bytes.is_some_and(|bytes: u64| bytes > 1 << 40), "{message}");
    // It is there, and a smaller plan may have it.
    assert!(!refused.is_lasting());
}
