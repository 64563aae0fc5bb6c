//! Weights stay in the map: anonymous memory hardly grows when a model runs, but for buffers where memory does not hold all. Each test is in a
//! process of its own, as nextest runs them, so that no other test's memory is counted.

#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

use std::path::Path;

use prima_engine::{Compute, Embedding, Model};
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

/// Experts that stay are in the page cache, as other weights are.
#[test]
fn a_limited_mixture_owns_its_buffers_and_little_more() {
    /// Of threads and activations, and to keep account of experts.
    const OTHERS: u64 = 4 << 20;
    let directory = tempfile::tempdir().unwrap();
    let large = MadeUpModel {
        layers: 4,
        hidden: 512,
        feed_forward: 512,
        experts: 24,
        formats: vec![GgmlType::Q8_0],
        ..MadeUpModel::of("qwen3moe")
    };
    let path = large.write(directory.path());
    // For what is allocated only once.
    let small = MadeUpModel::of("qwen3moe").write(directory.path());
    growth_of(|| Runner::limited(&small, &[5], 0, None));
    for percent in [0, 20, 50] {
        let (grown, runner) = growth_of(|| Runner::limited(&path, &[2, 4], percent, None));
        let (status, weights) = (runner.residency.status(), runner.residency.weight_bytes());
        let most = status.own_bytes + OTHERS;
        println!("{percent} %: {grown} of {most} bytes");
        assert!(grown <= most, "{percent} %: {grown} bytes: {status:?}");
        // Much less than all that passed through, and than what stays where half of it may.
        assert!(status.own_bytes <= status.buffer_bytes);
        assert!(most < weights / 4, "{most} of {weights} bytes");
        assert!(status.read_bytes > weights / 4, "{status:?}");
        assert!(
            percent < 50 || status.resident_bytes > 2 * most,
            "{status:?}"
        );
    }
}

/// What is not in memory there would count as weights that the system has taken.
#[test]
fn an_embedding_is_not_touched_in_the_map_while_weights_stream() {
    let directory = tempfile::tempdir().unwrap();
    for tied in [false, true] {
        let model = MadeUpModel {
            layers: 2,
            vocabulary: 4096,
            formats: vec![GgmlType::F16],
            tied,
            seed: 1 + u64::from(tied),
            ..MadeUpModel::default()
        };
        let path = model.write(directory.path());
        let runner = Runner::limited(&path, &[2], 0, None);
        let embedding = Embedding::open(&runner.model, &runner.residency).unwrap();
        let tokens: Vec<u32> = (0..4096).collect();
        let mut streamed = vec![0.0; tokens.len() * runner.model.spec().hidden];
        let before = touched_in_map(&path);
        embedding.embed(&tokens, &mut streamed).unwrap();
        let touched = touched_in_map(&path);
        assert!(touched <= before, "tied {tied}: {touched} after {before}");

        // Where all weights stay, rows are read there.
        runner.residency.set_budget(u64::MAX);
        let mut mapped = vec![0.0; streamed.len()];
        embedding.embed(&tokens, &mut mapped).unwrap();
        assert!(touched_in_map(&path) > before, "tied {tied}");
        assert!(mapped == streamed, "tied {tied}");
    }
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

/// How much anonymous memory grows when an open model runs.
fn growth(path: &Path) -> u64 {
    let model = Model::open(path).unwrap();
    let (grown, _) = growth_of(|| Runner::split(&model, &[model.spec().layers.len()], 2));
    grown
}

/// How much anonymous memory grows while a model is made ready and runs a prompt and some tokens through all layers. Does not count the KV cache,
/// which is not weights.
fn growth_of(start: impl FnOnce() -> Runner) -> (u64, Runner) {
    let before = anonymous_memory();
    let runner = start();
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &[1, 2, 3, 4, 5, 6, 7]);
    for token in 8..16 {
        runner.logits(&mut kv, &[token]);
    }
    let after = anonymous_memory();
    let grown = after.saturating_sub(before).saturating_sub(kv.bytes());
    (grown, runner)
}

/// Bytes, from the kernel's accounting.
fn anonymous_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("RssAnon:"));
    bytes(line.unwrap())
}

/// Bytes of the maps of the file at `path` that this process has touched, from the kernel's accounting.
fn touched_in_map(path: &Path) -> u64 {
    let path = path.canonicalize().unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines();
    let mut touched = 0;
    while let Some(line) = lines.next() {
        if line.ends_with(path.to_str().unwrap()) {
            let line = lines.find_map(|line| line.strip_prefix("Rss:"));
            touched += bytes(line.unwrap());
        }
    }
    touched
}

/// Of `1234 kB`.
fn bytes(kilobytes: &str) -> u64 {
    let number = kilobytes.trim().strip_suffix(" kB").unwrap();
    number.trim().parse::<u64>().unwrap() * 1024
}
