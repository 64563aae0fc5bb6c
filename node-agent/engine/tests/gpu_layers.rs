//! Layers on a driver of Vulkan that computes on the CPU (lavapipe).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

mod on_gpu;
mod support;

use prima_engine::{Compute, Gpu, Model, OutputHead, Residency};
use prima_gguf::GgmlType;

use crate::support::{MadeUpModel, difference};

fn emulated() -> Gpu {
    Gpu::software()
        .expect("a driver of Vulkan that computes on the CPU: Debian's mesa-vulkan-drivers")
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
