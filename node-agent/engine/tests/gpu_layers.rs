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

use prima_engine::{Compute, Gpu, GpuApi, LayerDevices, Model, OutputHead, Residency};
use prima_gguf::GgmlType;

use prima_test_models::{MadeUpModel, Runner, difference};

const API: GpuApi = GpuApi::Vulkan;

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
    let cause = std::error::Error::source(&refused).unwrap().to_string();
    assert_eq!(cause, "a GPU has no kernels for 1000 logits at once");
}
