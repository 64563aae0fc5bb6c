//! What a session may do with its KV cache: go back, fork, fill up; and what a batch may not.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]
#![allow(
    clippy::single_range_in_vec_init,
    reason = "one range of layers is meant"
)]

use std::error::Error;

use prima_engine::{BatchEntry, Embedding, EngineError, KvCache, KvFormat};
use prima_gguf::GgmlType;

use prima_test_models::{MadeUpModel, Runner};

fn runner() -> (tempfile::TempDir, Runner) {
    runner_of(&MadeUpModel::default())
}

fn runner_of(model: &MadeUpModel) -> (tempfile::TempDir, Runner) {
    let directory = tempfile::tempdir().unwrap();
    let runner = Runner::new(&model.write(directory.path()), 2);
    (directory, runner)
}

/// Keys and values apart, and latents; and bytes of a position in a layer as F16, and as Q8_0: 2 heads of 32 numbers, and one row of 576.
fn kinds() -> [(MadeUpModel, [usize; 2]); 2] {
    [
        (MadeUpModel::default(), [256, 136]),
        (MadeUpModel::of("deepseek2"), [1152, 612]),
    ]
}

const FORMATS: [KvFormat; 2] = [KvFormat::F16, KvFormat::Q8_0];

fn tokens(count: u32, step: u32) -> Vec<u32> {
    (0..count).map(|i| i * step % 96).collect()
}

#[test]
fn a_truncated_session_has_forgotten_the_rest() {
    let (prompt, other) = (tokens(150, 7), tokens(40, 11));
    for (model, bytes) in kinds() {
        let (_directory, mut runner) = runner_of(&model);
        for (format, bytes) in FORMATS.into_iter().zip(bytes) {
            runner.kv_format = format;
            for keep in [0, 1, 63, 64, 65, 128, 149, 150] {
                let mut kv = runner.kv_cache();
                runner.logits(&mut kv, &prompt);
                kv.truncate(keep);
                assert_eq!(kv.len(), keep);
                let found = runner.logits(&mut kv, &other);

                let mut fresh = runner.kv_cache();
                runner.logits(&mut fresh, &prompt[..keep]);
                // 5 layers, in blocks of 64 positions.
                let blocks = (keep + other.len()).div_ceil(64);
                assert_eq!(kv.bytes(), (blocks * 64 * 5 * bytes) as u64);
                let expected = runner.logits(&mut fresh, &other);
                assert_eq!(found, expected, "{format:?}, after keeping {keep}");
            }
        }
    }
}

#[test]
fn the_planners_bytes_are_those_of_the_cache() {
    let directory = tempfile::tempdir().unwrap();
    let with_heads = |head_dim| MadeUpModel {
        head_dim: Some(head_dim),
        ..MadeUpModel::default()
    };
    for (made_up, f16, q8_0) in [
        (with_heads(32), 256, 136),
        (with_heads(48), 384, 384),
        (with_heads(64), 512, 272),
        (MadeUpModel::of("deepseek2"), 1152, 612),
    ] {
        let made_up = MadeUpModel {
            formats: vec![GgmlType::F32],
            ..made_up
        };
        let mut runner = Runner::new(&made_up.write(directory.path()), 1);
        for (format, bytes) in FORMATS.into_iter().zip([f16, q8_0]) {
            runner.kv_format = format;
            let mut kv = runner.kv_cache();
            runner.logits(&mut kv, &tokens(64, 3));
            assert_eq!(
                kv.bytes(),
                5 * 64 * bytes,
                "heads of {}, {format:?}",
                made_up.head_dim()
            );
            let attention = &runner.model.spec().layers[0].attention;
            assert_eq!(attention.kv_bytes(format) as u64, bytes);
        }
    }
}

#[test]
fn truncating_to_more_than_is_held_changes_nothing() {
    let (_directory, runner) = runner();
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &tokens(10, 3));
    kv.truncate(1000);
    assert_eq!(kv.len(), 10);
}

#[test]
fn forks_go_their_own_ways() {
    let prompt = tokens(100, 5);
    for ((model, _), format) in kinds().iter().flat_map(|kind| FORMATS.map(|f| (kind, f))) {
        let (_directory, mut runner) = runner_of(model);
        runner.kv_format = format;
        let mut kv = runner.kv_cache();
        runner.logits(&mut kv, &prompt);
        let mut forks: Vec<KvCache> = (0..3).map(|_| kv.fork()).collect();
        // In turns, so that a write into a shared block would show in the others.
        let continuations = [tokens(40, 7), tokens(40, 11), tokens(40, 13)];
        let mut found = vec![Vec::new(); 3];
        for step in 0..40 {
            for ((kv, tokens), found) in forks.iter_mut().zip(&continuations).zip(&mut found) {
                found.extend(runner.logits(kv, &tokens[step..=step]));
            }
        }
        for (continuation, found) in continuations.iter().zip(found) {
            let mut alone = runner.kv_cache();
            runner.logits(&mut alone, &prompt);
            assert_eq!(found, runner.logits(&mut alone, continuation), "{format:?}");
        }
        assert_eq!(kv.len(), 100);
    }
}

#[test]
fn a_cache_ends_at_its_context_length_and_says_so() {
    let (_directory, runner) = runner();
    let mut kv = KvCache::new(&runner.model, &[0..5], 20, KvFormat::F16);
    runner.logits(&mut kv, &tokens(19, 3));
    let error = forward(&runner, &mut kv, 19, 2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "batch entry 0: positions 19..21 exceed the context length of 20"
    );
    assert_eq!(kv.len(), 19, "a refused batch leaves no trace");
    forward(&runner, &mut kv, 19, 1).unwrap();
    assert_eq!(kv.len(), 20);
}

#[test]
fn gaps_and_overwriting_are_refused() {
    let (_directory, runner) = runner();
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &tokens(10, 3));
    for first_position in [0, 9, 11, usize::MAX] {
        let error = forward(&runner, &mut kv, first_position, 1).unwrap_err();
        assert!(
            matches!(
                error,
                EngineError::Position { held: 10, .. } | EngineError::ContextFull { .. }
            ),
            "{error}"
        );
    }
    assert_eq!(kv.len(), 10);
}

#[test]
fn a_cache_of_other_layers_is_refused() {
    let (_directory, runner) = runner();
    for layers in [vec![0..4], vec![1..5], vec![0..2, 3..5], vec![]] {
        let mut kv = KvCache::new(&runner.model, &layers, 20, KvFormat::F16);
        let error = forward(&runner, &mut kv, 0, 1).unwrap_err();
        assert!(
            matches!(error, EngineError::KvLayers { .. }),
            "{layers:?}: {error}"
        );
    }
    let mut kv = KvCache::new(&runner.model, &[3..5, 0..3, 1..2], 20, KvFormat::F16);
    forward(&runner, &mut kv, 0, 1).unwrap();
}

#[test]
fn an_activation_of_another_size_than_the_batch_is_refused() {
    let (_directory, runner) = runner();
    let mut kv = runner.kv_cache();
    for rows in [0, 2, usize::MAX] {
        let entry = BatchEntry {
            kv: &mut kv,
            first_position: 0,
            rows,
        };
        let error = runner.windows[0]
            .forward(&runner.compute, &mut [0.0; 256], &mut [entry])
            .unwrap_err();
        assert!(
            matches!(error, EngineError::Length { found: 256, .. }),
            "{error}"
        );
        assert!(error.source().is_none());
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let (_directory, runner) = runner();
    let error = Embedding::open(&runner.model, &runner.residency)
        .unwrap()
        .embed(&[95, 96], &mut [0.0; 512])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot embed token 96: the vocabulary has 96"
    );
}

fn forward(
    runner: &Runner,
    kv: &mut KvCache,
    first_position: usize,
    rows: usize,
) -> Result<(), EngineError> {
    let mut activation = vec![0.5; rows * 256];
    let entry = BatchEntry {
        kv,
        first_position,
        rows,
    };
    runner.windows[0].forward(&runner.compute, &mut activation, &mut [entry])
}
