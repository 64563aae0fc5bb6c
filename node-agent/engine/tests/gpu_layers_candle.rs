//! Layers on candle's CPU device: the code that computes on CUDA and Metal in builds for these.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod on_gpu;
use prima_engine::kernels::{Matrix, supported};
use prima_engine::{Gpu, GpuApi};
use prima_gguf::GgmlType;

/// What candle computes is the same on all GPUs.
const API: GpuApi = GpuApi::Cuda;

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

    let all = GgmlType::ALL.iter().copied();
    let refused = all.filter(|format| supported(*format)).filter(|format| {
        let bytes = vec![0; ROWS * COLUMNS / format.block_len() * format.block_bytes()];
        let matrix = Matrix::new(*format, ROWS, COLUMNS, &bytes).unwrap();
        match gpu.copy_matrix(matrix) {
            Ok(matrix) => {
                gpu.multiply(&[&matrix], &rows).unwrap();
                false
            }
            Err(_) => true,
        }
    });
    assert_eq!(refused.count(), 10, "formats without kernels there");
}
