//! Weights that do not stay in memory: the same bits under every budget, no more reading than the overflow, and errors instead of
//! crashes when the file cannot be read.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use prima_engine::{BatchEntry, Embedding, EngineError, KvCache, Model};
use prima_gguf::writer::split;
use prima_gguf::{GgmlType, part_paths};

use prima_test_models::{MadeUpModel, Random, Runner, mixture};

const PIECE_BYTES: usize = 16 << 10;
/// Matrices of several pieces each, so that resident and streamed rows meet within one.
fn file(folder: &Path) -> PathBuf {
    let model = MadeUpModel {
        layers: 3,
        hidden: 256,
        heads: 4,
        kv_heads: 2,
        feed_forward: 512,
        vocabulary: 512,
        formats: vec![GgmlType::Q4K, GgmlType::Q6K, GgmlType::F16],
        ..MadeUpModel::default()
    };
    model.write(folder)
}

/// The same with matrices of heads, several pieces for each of some, and several of others in a piece.
fn file_with_latents(folder: &Path) -> PathBuf {
    let model = MadeUpModel {
        layers: 3,
        experts: 0,
        vocabulary: 512,
        formats: vec![GgmlType::Q4K, GgmlType::Q6K, GgmlType::F16],
        ..MadeUpModel::of("deepseek2")
    };
    model.write(folder)
}

/// A whole model in windows that end at `ends`. Memory holds `percent` of its weights; the others are streamed.
fn streaming(path: &Path, ends: &[usize], percent: u64) -> Runner {
    Runner::limited(path, ends, percent, Some(PIECE_BYTES))
}

/// A prompt, then token by token.
fn answer(runner: &Runner, tokens: &[u32]) -> Vec<Vec<f32>> {
    let (prompt, rest) = tokens.split_at(tokens.len() / 2);
    let mut kv = runner.kv_cache();
    let mut logits = runner.logits(&mut kv, prompt);
    for token in rest {
        logits.extend(runner.logits(&mut kv, &[*token]));
    }
    logits
}

fn tokens(count: usize) -> Vec<u32> {
    let mut random = Random(count as u64);
    (0..count).map(|_| random.within(0..512) as u32).collect()
}

#[test]
fn every_budget_gives_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for path in [file(folder.path()), file_with_latents(folder.path())] {
        let expected = answer(&Runner::new(&path, 1), &tokens(40));
        for percent in [0, 10, 33, 50, 75, 99, 100] {
            let runner = streaming(&path, &[2, 3], percent);
            assert!(answer(&runner, &tokens(40)) == expected, "{percent} %");
            let status = runner.residency.status();
            let all = runner.residency.weight_bytes();
            assert_eq!(status.resident_bytes + status.streamed_bytes, all);
            assert_eq!(status.streamed_bytes == 0, percent == 100, "{percent} %");
            assert_eq!(status.read_bytes == 0, percent == 100, "{percent} %");
        }
    }
}

/// The model at `path` in three files, of which the first has no tensors; returns their paths. Of the mixture, gate and up of the first layer's
/// experts are in another file than down.
fn in_three_files(path: &Path) -> Vec<PathBuf> {
    let bytes = fs::read(path).unwrap();
    let tensors = Model::open(path).unwrap().gguf().tensors.len();
    let counts = [0, tensors / 3, tensors - tensors / 3];
    let first = path.with_file_name("split-00001-of-00003.gguf");
    let paths = part_paths(&first);
    for (path, part) in paths.iter().zip(split(&bytes, &counts).unwrap()) {
        fs::write(path, part).unwrap();
    }
    paths
}

#[test]
fn a_model_in_several_files_gives_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (dense, experts) = (file(folder.path()), mixture::write(folder.path()));
    for (path, has_experts) in [(dense, false), (experts, true)] {
        let expected = answer(&Runner::new(&path, 1), &tokens(40));
        let parts = in_three_files(&path);
        fs::remove_file(path).unwrap();
        assert!(answer(&Runner::new(&parts[0], 2), &tokens(40)) == expected);
        for percent in [0, 50] {
            let runner = streaming(&parts[0], &[1, 3], percent);
            assert!(answer(&runner, &tokens(40)) == expected, "{percent} %");
            let status = runner.residency.status();
            assert!(status.read_bytes > 0);
            assert_eq!(status.expert_misses > 0, has_experts, "{percent} %");
        }
    }
}

#[test]
fn a_token_reads_what_does_not_stay_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let runner = streaming(&file(folder.path()), &[3], 60);
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &tokens(7));
    let before = runner.residency.status();
    for _ in 0..20 {
        runner.logits(&mut kv, &[5]);
    }
    let after = runner.residency.status();
    let read = after.read_bytes - before.read_bytes;
    // Reads are whole pages, and what is read ahead at the end is more or less than at the start.
    let least = 20 * after.streamed_bytes - after.buffer_bytes;
    let most = 20 * after.streamed_bytes * 3 / 2 + after.buffer_bytes;
    assert!((least..most).contains(&read), "{read} of {after:?}");
}

#[test]
fn a_budget_that_changes_meanwhile_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path());
    let expected = answer(&Runner::new(&path, 1), &tokens(60));
    let runner = streaming(&path, &[3], 100);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(1);
            while !ended.load(Ordering::Relaxed) {
                let percent = random.within(0..110) as u64;
                let residency = &runner.residency;
                residency.set_budget(residency.weight_bytes() * percent / 100);
                residency.warm(Duration::from_micros(100));
                thread::sleep(Duration::from_micros(300));
            }
        });
        for _ in 0..5 {
            let found = answer(&runner, &tokens(60));
            assert!(found == expected);
        }
        ended.store(true, Ordering::Relaxed);
    });
}

/// As the chunks of several prompts do in a ring of several rounds.
#[test]
fn windows_that_run_out_of_order_give_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path());
    let prompts = [tokens(9), tokens(5)];
    let whole = Runner::new(&path, 1);
    let runner = streaming(&path, &[1, 3], 40);
    let hidden = runner.model.spec().hidden;
    let mut passes = prompts.clone().map(|prompt| {
        let mut activation = vec![0.0; prompt.len() * hidden];
        let embedding = Embedding::open(&runner.model, &runner.residency).unwrap();
        embedding.embed(&prompt, &mut activation).unwrap();
        (runner.kv_cache(), activation, prompt.len())
    });
    for window in &runner.windows {
        for (kv, activation, rows) in &mut passes {
            let entry = BatchEntry {
                kv,
                first_position: 0,
                rows: *rows,
            };
            window
                .forward(&runner.compute, activation, &mut [entry])
                .unwrap();
        }
    }
    for (prompt, (_, activation, _)) in prompts.iter().zip(&passes) {
        let expected = whole.run(&mut [(&mut whole.kv_cache(), prompt)]);
        assert!(*activation == expected);
    }
}

/// Why the first window cannot take one more row.
fn failing_pass(runner: &Runner, kv: &mut KvCache) -> EngineError {
    let mut activation = vec![0.0; runner.model.spec().hidden];
    let entry = BatchEntry {
        first_position: kv.len(),
        kv,
        rows: 1,
    };
    runner.windows[0]
        .forward(&runner.compute, &mut activation, &mut [entry])
        .unwrap_err()
}

#[test]
fn a_cut_file_is_an_error_until_it_is_whole_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path());
    let bytes = fs::read(&path).unwrap();
    let runner = streaming(&path, &[3], 0);
    let mut kv = runner.kv_cache();
    let expected = runner.logits(&mut kv, &tokens(5));
    kv.truncate(0);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    // Within the last layer: what the embedding needs is before it.
    file.set_len(bytes.len() as u64 / 2).unwrap();

    let error = failing_pass(&runner, &mut kv);
    assert!(matches!(error, EngineError::ReadWeights { .. }), "{error}");
    assert!(error.to_string().contains(&path.display().to_string()));
    assert_eq!(kv.len(), 0);

    fs::write(&path, &bytes).unwrap();
    assert!(runner.logits(&mut kv, &tokens(5)) == expected);
}

#[test]
fn of_several_files_the_one_that_was_cut_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let parts = in_three_files(&file(folder.path()));
    let (streaming, mapped) = (streaming(&parts[0], &[3], 0), Runner::new(&parts[0], 1));
    let cut = OpenOptions::new().write(true).open(&parts[2]).unwrap();
    cut.set_len(4096).unwrap();
    for runner in [streaming, mapped] {
        let error = failing_pass(&runner, &mut runner.kv_cache()).to_string();
        assert!(error.contains(&parts[2].display().to_string()), "{error}");
    }
}

#[test]
fn a_cut_mapped_file_is_an_error_and_the_process_lives() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path());
    let runner = Runner::new(&path, 2);
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &tokens(5));
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(4096).unwrap();

    let error = failing_pass(&runner, &mut kv);
    assert!(matches!(error, EngineError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains(&path.display().to_string()));
    assert_eq!(kv.len(), 5);
    // Another model is not concerned.
    let other = Runner::new(&self::file(tempfile::tempdir().unwrap().path()), 2);
    other.logits(&mut other.kv_cache(), &tokens(5));
}
