//! Passes of many rows through layers whose weights are not on the GPU: the same results up to rounding as on the processor, which computes
//! passes of few rows with the same keys and values.

use std::fs::{self, OpenOptions};

use prima_engine::kernels::{IsaLevel, ThreadPool};
use prima_engine::{BatchEntry, EngineError, KvCache, KvFormat, LayerDevices, Model};
use prima_gguf::GgmlType;
use prima_test_models::{FAMILIES, MadeUpModel, Runner, difference, layers_of_each_kind};

use crate::on_gpu::{FLOAT, NARROW, QUANTIZED, gpu, open, small_with_windows};

/// Passes of at least so many rows go to the GPU.
pub const MANY: usize = 8;

fn devices() -> LayerDevices {
    LayerDevices::cpu().with_many_rows_on(gpu(), MANY)
}

pub fn tokens(count: usize, step: usize) -> Vec<u32> {
    (0..count).map(|i| (i * step % 96) as u32).collect()
}

/// What passes of `passes` rows make, one after the other, beside the processor.
pub fn compare(name: &str, cpu: &Runner, found: &Runner, passes: &[usize], bound: f32) {
    let (mut expected_kv, mut found_kv) = (cpu.kv_cache(), found.kv_cache());
    for (step, rows) in passes.iter().enumerate() {
        let rows = tokens(*rows, 5 + 2 * step);
        let copied = found.compute.copied_bytes();
        let expected = cpu.logits(&mut expected_kv, &rows);
        let found_logits = found.logits(&mut found_kv, &rows);
        let on_gpu = found.compute.copied_bytes() > copied;
        assert_eq!(on_gpu, rows.len() >= MANY, "{name}: {} rows", rows.len());
        for (row, (a, b)) in found_logits.iter().zip(&expected).enumerate() {
            let difference = difference(a, b);
            assert!(
                difference < bound,
                "{name}, pass {step}, row {row}: {difference}"
            );
        }
    }
    assert_eq!(found_kv.bytes(), expected_kv.bytes());
}

#[test]
fn every_family_goes_there_and_back() {
    let directory = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let made_up = MadeUpModel {
            formats: vec![GgmlType::F32],
            feed_forward: NARROW,
            // The third waits for the first: two are on their way at a time.
            layers: layers_of_each_kind(family).max(3),
            ..MadeUpModel::of(family)
        };
        let cpu = Runner::new(&made_up.write(directory.path()), 2);
        let layers = cpu.model.spec().layers.len();
        // One of them in two windows, which share the room for matrices.
        let ends = match family {
            "llama" => vec![layers / 2, layers],
            _ => vec![layers],
        };
        let found = Runner::on(&devices(), &cpu.model, &ends, 2);
        // The processor begins, and goes on with what the GPU has added.
        compare(family, &cpu, &found, &[7, 29, 1], FLOAT);
    }
}

#[test]
fn quantized_weights_and_keys_go_there_and_back() {
    let directory = tempfile::tempdir().unwrap();
    let qwen2 = MadeUpModel {
        formats: vec![GgmlType::Q4_0, GgmlType::Q6K],
        seed: 3,
        ..MadeUpModel::qwen2()
    };
    let with_latents = MadeUpModel {
        formats: vec![GgmlType::Q8_0],
        experts: 0,
        ..MadeUpModel::of("deepseek2")
    };
    // Each kind of matrix in each format; of latents fewer, since a layer rounds twice as often.
    let made_up = [(MadeUpModel::default(), 4), (qwen2, 4), (with_latents, 2)];
    for (made_up, layers) in made_up {
        let made_up = MadeUpModel { layers, ..made_up };
        let mut cpu = Runner::new(&made_up.write(directory.path()), 2);
        let mut found = Runner::on(&devices(), &cpu.model, &[layers], 2);
        for kv_format in [KvFormat::F16, KvFormat::Q8_0] {
            (cpu.kv_format, found.kv_format) = (kv_format, kv_format);
            // The second goes on in another block.
            let passes = [62, 3, 20, 1];
            compare(
                &format!("{} {kv_format:?}", made_up.architecture),
                &cpu,
                &found,
                &passes,
                QUANTIZED,
            );
        }
    }
}

/// Of the layers on the processor, under every budget of memory; the last layers stay on the GPU.
#[test]
fn weights_come_from_wherever_they_are() {
    let directory = tempfile::tempdir().unwrap();
    for family in ["llama", "qwen3moe"] {
        let made_up = MadeUpModel {
            formats: vec![GgmlType::F16],
            layers: 4,
            ..MadeUpModel::of(family)
        };
        let path = made_up.write(directory.path());
        let cpu = Runner::new(&path, 2);
        let layers = cpu.model.spec().layers.len();
        let devices = LayerDevices::last_on(1, gpu()).with_many_rows_on(gpu(), MANY);
        for percent in [0, 30, 100] {
            let found = Runner::limited_on(&devices, &path, &[layers], percent, Some(64 << 10));
            let name = format!("{family}, {percent} %");
            compare(&name, &cpu, &found, &[40, 1, 12], FLOAT);
            let read = found.residency.status().read_bytes;
            assert_eq!(read > 0, percent < 100, "{name}: {read} bytes read");
        }
    }
}

/// Memory is filled from which a matrix is copied while the GPU may still compute with the one before: nobody waits for that. (Whether it still does
/// depends on its speed; `make check-gpu` tells.)
#[test]
fn matrices_are_on_their_way_while_the_gpu_computes() {
    let directory = tempfile::tempdir().unwrap();
    // Matrices of several pieces of memory.
    let made_up = MadeUpModel {
        formats: vec![GgmlType::BF16],
        layers: 1,
        hidden: 1024,
        heads: 16,
        feed_forward: 4096,
        ..MadeUpModel::default()
    };
    let model = Model::open(&made_up.write(directory.path())).unwrap();
    let found = Runner::on(&devices(), &model, &[1], 2);
    let rows = tokens(MANY, 7);
    let pass = || drop(found.run(&mut [(&mut found.kv_cache(), &rows)]));
    // The first makes kernels ready.
    pass();
    gpu().start_timeline().unwrap();
    pass();
    let timeline = gpu().end_timeline().unwrap();
    let noted = [&timeline.computed, &timeline.copied, &timeline.filled];
    assert!(noted.iter().all(|spans| spans.len() >= 7), "{timeline:?}");
    // At least a piece of each matrix but the first. (Passes of other tests only add to it.)
    assert!(timeline.filled_ahead >= 6, "{timeline:?}");
    // Nobody asks any more.
    pass();
    assert!(gpu().end_timeline().unwrap().computed.is_empty());
}

/// What a profile measures: copies to one place, in the pieces and on the queue of passes.
#[test]
fn weights_are_measured_on_the_way_that_they_go() {
    const PIECE: usize = 2 << 20;
    let gpu = open();
    let pool = ThreadPool::new(2, IsaLevel::detect()).unwrap();
    gpu.copy_weights(&pool, &vec![1; 5 * PIECE / 2]).unwrap();
    let held = gpu.allocated_bytes();
    assert!(held >= Some(5 * PIECE as u64 / 2), "{held:?}");
    for (bytes, pieces) in [(5 * PIECE / 2, 3), (PIECE, 1)] {
        gpu.start_timeline().unwrap();
        gpu.copy_weights(&pool, &vec![2; bytes]).unwrap();
        let timeline = gpu.end_timeline().unwrap();
        assert_eq!(timeline.copied.len(), pieces, "{timeline:?}");
        assert_eq!(timeline.filled.len(), pieces, "{timeline:?}");
        assert_eq!(gpu.allocated_bytes(), held);
    }
}

#[test]
fn all_weights_are_copied_once_for_a_pass() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::Q8_0],
        layers: 3,
        ..MadeUpModel::default()
    };
    let model = Model::open(&made_up.write(directory.path())).unwrap();
    let layers = model.spec().layers.len();
    let found = Runner::on(&devices(), &model, &[layers], 2);
    let weights: u64 = model
        .spec()
        .layers
        .iter()
        .flat_map(|layer| layer.matrices())
        .map(|matrix| matrix.bytes.end - matrix.bytes.start)
        .sum();
    let mut kv = found.kv_cache();
    // The fewest rows of a sequence that begins, and one less.
    for (rows, is_copied) in [(MANY - 1, false), (MANY, true)] {
        let before = found.compute.copied_bytes();
        found.logits(&mut found.kv_cache(), &tokens(rows, 7));
        assert_eq!(found.compute.copied_bytes() > before, is_copied, "{rows}");
    }
    let mut copied = |rows: usize| {
        let before = found.compute.copied_bytes();
        found.logits(&mut kv, &tokens(rows, 7));
        (found.compute.copied_bytes() - before, kv.bytes())
    };
    assert_eq!(copied(70).0, weights);
    assert_eq!(copied(1).0, 0);
    // With what was there before of keys and values: two blocks of 64 positions.
    let (later, bytes) = copied(30);
    assert_eq!(later, weights + bytes);
}

/// Of a prompt that goes there in one chunk, weights cross once, and what comes of it is what comes of smaller ones.
#[test]
fn one_large_chunk_makes_what_smaller_ones_make() {
    const ROWS: usize = 300;
    let directory = tempfile::tempdir().unwrap();
    for family in ["llama", "qwen3moe"] {
        let made_up = MadeUpModel {
            formats: vec![GgmlType::F32],
            layers: 3,
            context_length: 512,
            ..MadeUpModel::of(family)
        };
        let model = Model::open(&made_up.write(directory.path())).unwrap();
        let found = Runner::on(&devices(), &model, &[made_up.layers], 2);
        let prompt = tokens(ROWS, 7);
        let in_chunks = |rows: usize| {
            let mut kv = found.kv_cache();
            let before = found.compute.copied_bytes();
            let chunks = prompt.chunks(rows);
            let mut logits: Vec<_> = chunks
                .flat_map(|chunk| found.logits(&mut kv, chunk))
                .collect();
            let copied = found.compute.copied_bytes() - before;
            // The processor goes on with what there is.
            logits.extend(found.logits(&mut kv, &[5]));
            (logits, copied)
        };
        let (large, copied_once) = in_chunks(ROWS);
        for rows in [128, 50] {
            let (small, copied) = in_chunks(rows);
            assert_eq!(small.len(), large.len());
            for (row, (small, large)) in small.iter().zip(&large).enumerate() {
                let difference = difference(small, large);
                assert!(difference < FLOAT, "{family}, row {row}: {difference}");
            }
            let times = ROWS.div_ceil(rows) as u64;
            assert!(copied >= times * copied_once, "{copied} {copied_once}");
        }
    }
}

#[test]
fn sequences_of_a_batch_fork_and_go_back() {
    let directory = tempfile::tempdir().unwrap();
    // Layers with windows keep less than others.
    let made_up = small_with_windows();
    let cpu = Runner::new(&made_up.write(directory.path()), 2);
    // Such small layers cross with more keys and values than weights, which pays for no pass if few rows do not.
    let devices = LayerDevices::cpu().with_many_rows_on(gpu(), 1);
    let found = Runner::on(&devices, &cpu.model, &[7], 2);
    let run = |runner: &Runner| {
        let mut copied = 0;
        let mut goes_there = || {
            let before = std::mem::replace(&mut copied, runner.compute.copied_bytes());
            before < copied
        };
        let mut made = Vec::new();
        let mut caches: Vec<KvCache> = (0..3).map(|_| runner.kv_cache()).collect();
        // More rows than go through the layers at once, among those of two others.
        let prompts = [tokens(100, 7), tokens(600, 11), tokens(3, 13)];
        let mut batch: Vec<_> = caches
            .iter_mut()
            .zip(&prompts)
            .map(|(kv, prompt)| (kv, &prompt[..]))
            .collect();
        made.extend(runner.run(&mut batch));
        let mut there = vec![goes_there()];
        let mut fork = caches[1].fork();
        fork.truncate(570);
        let [first, second, _] = &mut caches[..] else {
            panic!("three caches");
        };
        for (kv, rows) in [(&mut fork, 20), (second, 9), (first, 130)] {
            made.extend(runner.run(&mut [(kv, &tokens(rows, 3))]));
            there.push(goes_there());
        }
        (made, there)
    };
    let ((made, there), (expected, _)) = (run(&found), run(&cpu));
    assert_eq!(there, [true; 4]);
    let difference = difference(&made, &expected);
    assert!(difference < FLOAT, "{difference}");

    // What crosses beside the weights is half as much again, so that half as many rows again have to come.
    let devices = LayerDevices::cpu().with_many_rows_on(gpu(), MANY);
    let found = Runner::on(&devices, &cpu.model, &[7], 2);
    let mut kv = found.kv_cache();
    let mut goes_there = |rows| {
        let before = found.compute.copied_bytes();
        found.logits(&mut kv, &tokens(rows, 3));
        found.compute.copied_bytes() > before
    };
    assert_eq!(
        [600, MANY, 4 * MANY].map(&mut goes_there),
        [true, false, true]
    );
}

#[test]
fn a_pass_that_fails_leaves_no_rows_behind() {
    let directory = tempfile::tempdir().unwrap();
    let made_up = MadeUpModel {
        formats: vec![GgmlType::F16],
        ..MadeUpModel::default()
    };
    let path = made_up.write(directory.path());
    let bytes = fs::read(&path).unwrap();
    let layers = made_up.layers;
    let found = Runner::limited_on(&devices(), &path, &[layers], 0, Some(64 << 10));
    let mut kv = found.kv_cache();
    found.logits(&mut kv, &tokens(30, 7));
    let mut fork = kv.fork();
    let copied = found.compute.copied_bytes();
    let expected = found.logits(&mut fork, &tokens(40, 5));
    assert!(found.compute.copied_bytes() > copied);
    let cut = OpenOptions::new().write(true).open(&path).unwrap();
    // Within the layers.
    cut.set_len(bytes.len() as u64 / 2).unwrap();
    for _ in 0..2 {
        let entry = BatchEntry {
            kv: &mut kv,
            first_position: 30,
            rows: 40,
        };
        let mut activation = vec![0.5; 40 * 256];
        let failed = found.windows[0].forward(&found.compute, &mut activation, &mut [entry]);
        let error = failed.unwrap_err();
        assert!(matches!(error, EngineError::ReadWeights { .. }), "{error}");
        assert_eq!(kv.len(), 30);
    }
    fs::write(&path, &bytes).unwrap();
    let again = found.logits(&mut kv, &tokens(40, 5));
    assert!(difference(&again.concat(), &expected.concat()) < FLOAT);
}
