//! Layers on a driver of Vulkan that computes on the CPU (lavapipe).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

#[path = "on_gpu/in_software.rs"]
mod in_software;
#[path = "on_gpu/many_rows.rs"]
mod many_rows;
mod on_gpu;

use std::error::Error as _;

use prima_engine::{
    EngineError, Gpu, GpuApi, KvPositions, LayerDevices, LayerWindow, Model, Residency,
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
    let other = on_gpu::open();
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

fn cause(error: &EngineError) -> String {
    error.source().expect("a cause").to_string()
}
