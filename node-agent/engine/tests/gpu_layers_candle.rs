//! Layers on candle's CPU device: the code that computes on CUDA and Metal in builds for these.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod on_gpu;

use std::error::Error as _;

use prima_engine::kernels::{IsaLevel, Matrix, ThreadPool, supported};
use prima_engine::{Gpu, GpuApi, LayerDevices, LayerWindow, Model, Residency};
use prima_gguf::GgmlType;
use prima_test_models::MadeUpModel;

/// What candle computes is the same on all GPUs.
const API: GpuApi = GpuApi::Cuda;

/// How far logits may differ, in units of their spread, where weights are F16. Candle multiplies them in F16: rows are rounded to its 11 bits before
/// a product, and what comes out after it. Three models of five layers, made up as these are and computed plainly with these roundings (and with the
/// same in attention), are off by up to 1.5e-3. This is twice that.
const F16: f32 = 3e-3;
/// The same where some are BF16, which candle's GPUs multiply in BF16, of 8 bits: up to 9e-3 where all are. Its CPU widens them.
const BF16: f32 = 2e-2;

fn emulated() -> Gpu {
    Gpu::candle_on_cpu()
}

/// What an agent measures a GPU by: rows go there and back, and products are computed in every format that candle has.
#[test]
fn what_is_measured_is_done_there() {
    const COLUMNS: usize = 256;
    const ROWS: usize = 16;
    let gpu = Gpu::candle_on_cpu();
    let numbers: Vec<f32> = (0..2 * COLUMNS).map(|i| i as f32).collect();
    let rows = gpu.copy_rows(&numbers, 2).unwrap();
    let others = gpu.copy_rows(&vec![0.5; 2 * COLUMNS], 2).unwrap();
    gpu.read(&rows).unwrap();
    gpu.append(&rows, &others).unwrap();
    assert_eq!(gpu.copy_back(&rows).unwrap(), numbers);
    assert_eq!(gpu.copy_back(&others).unwrap(), numbers);
    let pool = ThreadPool::new(1, IsaLevel::detect()).unwrap();
    gpu.copy_weights(&pool, &[1; 100]).unwrap();

    let all = GgmlType::ALL.iter().copied();
    let refused = all
        .filter(|format| supported(*format))
        .filter_map(|format| {
            let bytes = vec![0; ROWS * COLUMNS / format.block_len() * format.block_bytes()];
            let matrix = Matrix::new(format, ROWS, COLUMNS, &bytes).unwrap();
            match gpu.copy_matrix(matrix) {
                Ok(matrix) => {
                    gpu.multiply(&[&matrix], &rows).unwrap();
                    None
                }
                Err(error) => {
                    let cause = error.source().unwrap().to_string();
                    let expected = format!("no GPU kernels for weights of format {format}");
                    assert_eq!(cause, expected);
                    Some(format.name())
                }
            }
        });
    let without_kernels = [
        "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M",
        "MXFP4",
    ];
    assert_eq!(refused.collect::<Vec<_>>(), without_kernels);
}

/// So `on_gpu/many_rows.rs` and `on_gpu/in_software.rs` are parts of the tests of Vulkan alone. So are, in `gpu_layers.rs`, experts (candle's refusal
/// of them is among what is shared), layers split among GPUs, and memory that is set aside: candle has none of these, nor GPUs that hang, nor buffers
/// that kernels see a part of.
#[test]
fn what_only_vulkan_does_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F32],
        layers: 1,
        ..MadeUpModel::default()
    };
    let model = Model::open(&made_up.write(directory.path())).unwrap();
    let gpu = emulated();
    let devices = LayerDevices::cpu().with_many_rows_on(gpu.clone(), 8);
    let many_rows = LayerWindow::open(&model, 0..1, &devices, &Residency::mapped());
    let refused = [
        (many_rows.err(), "that is done through Vulkan only"),
        (
            gpu.start_timeline().err(),
            "that is known through Vulkan only",
        ),
    ];
    for (error, expected) in refused {
        assert_eq!(error.unwrap().source().unwrap().to_string(), expected);
    }
    assert!(gpu.end_timeline().unwrap().computed.is_empty());
    assert_eq!(gpu.allocated_bytes(), None);
}
