//! Weights stay in the map: anonymous memory hardly grows when a model runs. One test in a process of its own, so that no other
//! test's memory is counted.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

use std::path::Path;

use prima_engine::{Compute, Model};
use prima_gguf::GgmlType;

use prima_test_models::{MadeUpModel, Runner, smollm2};

#[test]
fn a_pass_allocates_under_2_percent_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let large = MadeUpModel {
        layers: 6,
        hidden: 2048,
        heads: 32,
        kv_heads: 8,
        feed_forward: 8192,
        vocabulary: 4096,
        formats: vec![GgmlType::Q4K, GgmlType::Q6K],
        ..MadeUpModel::default()
    };
    // For what is allocated only once.
    Compute::new(2).unwrap();
    growth(&MadeUpModel::default().write(directory.path()));
    for path in [smollm2(), large.write(directory.path())] {
        let file_len = path.metadata().unwrap().len();
        let grown = growth(&path);
        println!("{}: {grown} of {file_len} bytes", path.display());
        assert!(
            grown < file_len / 50,
            "{}: {grown} bytes of anonymous memory for {file_len} bytes of weights",
            path.display()
        );
    }
    assert_a_copy_would_be_seen(&smollm2());
}

fn assert_a_copy_would_be_seen(path: &Path) {
    let before = anonymous_memory();
    let copy = std::fs::read(path).unwrap();
    let seen = anonymous_memory() - before;
    assert!(
        seen > copy.len() as u64 * 9 / 10,
        "{seen} of {} bytes",
        copy.len()
    );
}

/// How much anonymous memory grows when an open model runs a prompt and a token through all layers. Does not count the KV cache,
/// which is not weights.
fn growth(path: &Path) -> u64 {
    let model = Model::open(path).unwrap();
    let before = anonymous_memory();
    let runner = Runner::split(&model, &[model.spec().layers.len()], 2);
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &[1, 2, 3, 4, 5, 6, 7]);
    runner.logits(&mut kv, &[8]);
    let after = anonymous_memory();
    after.saturating_sub(before).saturating_sub(kv.bytes())
}

/// Bytes, from the kernel's accounting.
fn anonymous_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .unwrap();
    line.trim()
        .strip_suffix(" kB")
        .unwrap()
        .trim()
        .parse::<u64>()
        .unwrap()
        * 1024
}
