//! Experts that do not all fit in memory: the same bits under every budget, what was used lately stays, in the page cache and nowhere else, a
//! prompt displaces nothing, and what is missing is read once, and no more than it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "these are tests")]

#[cfg(target_os = "linux")]
use std::fs::File;
use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

#[cfg(target_os = "linux")]
use prima_engine::MappedFile;
use prima_engine::{BatchEntry, EngineError, KvCache};
use prima_gguf::GgmlType;
use prima_test_models::mixture::{self, EXPERT_BYTES, EXPERTS, LAYERS, VOCABULARY};
use prima_test_models::options::{Variant, experts_in_mxfp4};
use prima_test_models::{EXPERTS_PER_TOKEN, FAMILIES, MadeUpModel, Random, Runner};

/// A whole model in windows that end at `ends`. Memory holds `percent` of its weights.
fn limited(path: &Path, ends: &[usize], percent: u64) -> Runner {
    Runner::limited(path, ends, percent, None)
}

fn tokens(count: usize) -> Vec<u32> {
    let mut random = Random(count as u64);
    (0..count).map(|_| random.within(0..512) as u32).collect()
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

/// Hits and misses of a text that begins anew.
fn count(runner: &Runner, tokens: &[u32]) -> (u64, u64) {
    let before = runner.residency.status();
    runner.logits(&mut runner.kv_cache(), tokens);
    let after = runner.residency.status();
    (
        after.expert_hits - before.expert_hits,
        after.expert_misses - before.expert_misses,
    )
}

#[test]
fn every_budget_gives_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = mixture::write(folder.path());
    let expected = answer(&Runner::new(&path, 1), &tokens(40));
    for percent in [0, 5, 15, 30, 50, 75, 99, 100] {
        let runner = limited(&path, &[1, 3], percent);
        assert!(answer(&runner, &tokens(40)) == expected, "{percent} %");
        let status = runner.residency.status();
        let all = runner.residency.weight_bytes();
        assert_eq!(status.resident_bytes + status.streamed_bytes, all);
        assert_eq!(status.read_bytes == 0, percent == 100, "{percent} %");
        assert_eq!(status.expert_misses == 0, percent == 100, "{percent} %");
        let within = status.resident_bytes + status.buffer_bytes <= all * percent / 100;
        assert!(within || percent < 30, "{percent} %: {status:?}");
        assert!(status.own_bytes <= status.buffer_bytes);
    }
}

/// Of quantized matrices, and with memory for nothing, for few experts or only a part of the dense weights, for some experts, and for all; each
/// in windows of its own.
#[test]
fn every_family_has_the_same_bits_under_budgets() {
    const SOME: u64 = 60;
    const CASES: [(u64, &[usize]); 4] =
        [(0, &[4]), (30, &[1, 4]), (SOME, &[2, 3, 4]), (100, &[3, 4])];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mixture.gguf");
    let families = FAMILIES.into_iter().map(Variant::of);
    let mixtures = families.filter(|family| family.model.experts > 0);
    for variant in mixtures.chain([experts_in_mxfp4()]) {
        let name = variant.name;
        let variant = Variant {
            model: MadeUpModel {
                layers: 4,
                // So many that those that pass through take little of the memory.
                experts: 32,
                vocabulary: VOCABULARY,
                formats: vec![GgmlType::Q4K, GgmlType::Q8_0, GgmlType::Q4_1],
                ..variant.model
            },
            ..variant
        };
        variant.write(&path, |_| {});
        let expected = answer(&Runner::new(&path, 1), &tokens(8));
        for (percent, ends) in CASES {
            let case = format!("{name}, {percent} %");
            let runner = limited(&path, ends, percent);
            assert!(answer(&runner, &tokens(8)) == expected, "{case}");
            let status = runner.residency.status();
            assert_eq!(status.read_bytes == 0, percent == 100, "{case}");
            assert_eq!(status.expert_misses == 0, percent == 100, "{case}");
            assert!(status.expert_hits > 0 || percent != SOME, "{case}");
        }
    }
}

#[test]
fn what_is_read_is_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let runner = limited(&mixture::write(folder.path()), &[LAYERS], 50);
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &tokens(30));
    let before = runner.residency.status();
    for token in tokens(40) {
        runner.logits(&mut kv, &[token]);
    }
    let after = runner.residency.status();
    let misses = after.expert_misses - before.expert_misses;
    let used = (40 * LAYERS * EXPERTS_PER_TOKEN) as u64;
    assert_eq!(misses + after.expert_hits - before.expert_hits, used);
    // Random routing finds about what is there.
    assert!(
        (used / 5..used * 4 / 5).contains(&misses),
        "{misses} of {used}"
    );
    // Parts begin and end inside of pages.
    let (read, needed) = (after.read_bytes - before.read_bytes, misses * EXPERT_BYTES);
    assert!(
        (needed..needed * 11 / 10).contains(&read),
        "{read} of {needed}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn what_stays_is_in_the_page_cache() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = mixture::write(folder.path());
    let (file, runner) = cold(&path);
    use_tokens(&runner);
    let experts = (LAYERS * EXPERTS) as u64;
    let weights = runner.residency.weight_bytes();
    let status = runner.residency.status();
    let held = status.resident_bytes - (weights - experts * EXPERT_BYTES);
    assert!(held > weights / 5, "{status:?}");
    let cached = cached_bytes(&file);
    assert!(cached > held, "{cached} bytes: {status:?}");

    // Besides experts, the pages that each of their parts shares with the next one, and what the system has read around other weights.
    let others = file.metadata().unwrap().len() - experts * EXPERT_BYTES;
    let others = others + experts * 3 * rustix::param::page_size() as u64 + (1 << 20);
    assert!(cached < held + others, "{cached} bytes: {status:?}");
    runner.residency.set_budget(0);
    let left = cached_bytes(&file);
    assert!(left < others, "{left} of {cached} bytes are left");
}

/// As when a member starts again, since the ring is another.
#[cfg(target_os = "linux")]
#[test]
fn what_an_earlier_process_used_is_still_there() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = mixture::write(folder.path());
    let (file, runner) = cold(&path);
    use_tokens(&runner);
    let (held, misses) = (cached_bytes(&file), runner.residency.status().expert_misses);
    drop(runner);
    for _ in 0..2 {
        let runner = limited(&path, &[LAYERS], 50);
        let before = cached_bytes(&file);
        use_tokens(&runner);
        let (after, fewer) = (cached_bytes(&file), runner.residency.status().expert_misses);
        let case = format!("{before}, then {after} of {held} bytes; {fewer} of {misses} misses");
        assert!(held * 3 / 4 < before && after < held * 11 / 10, "{case}");
        assert!(fewer < misses, "{case}");
    }
}

/// As when another program needs memory for a moment.
#[cfg(target_os = "linux")]
#[test]
fn experts_that_the_system_has_taken_are_read_again() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = mixture::write(folder.path());
    let (file, runner) = cold(&path);
    let expected = answer(&Runner::new(&path, 1), &tokens(40));
    let each = (LAYERS * EXPERTS_PER_TOKEN) as u64;
    use_tokens(&runner);
    count(&runner, &[7]);
    assert_eq!(count(&runner, &[7]), (each, 0));
    // It does not drop what is mapped, but for a file that ends before.
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes).unwrap();
    drop_cached(&file);
    let residency = &runner.residency;
    residency.set_budget(residency.weight_bytes() / 2 - 1);
    while residency.warm(Duration::from_millis(1)) {}
    assert_eq!(count(&runner, &[7]), (0, each));
    assert_eq!(count(&runner, &[7]), (each, 0));
    assert!(answer(&runner, &tokens(40)) == expected);
}

/// One at a time.
#[cfg(target_os = "linux")]
fn use_tokens(runner: &Runner) {
    let mut kv = runner.kv_cache();
    for token in tokens(100) {
        runner.logits(&mut kv, &[token]);
    }
}

/// A model on a disk (of one in memory, the page cache is all there is) and half of the memory that it needs, with no expert in it.
#[cfg(target_os = "linux")]
fn cold(path: &Path) -> (File, Runner) {
    let file = File::open(path).unwrap();
    drop_cached(&file);
    // Nor can what the system is still busy with.
    for _ in 0..100 {
        if cached_bytes(&file) == 0 {
            break;
        }
        thread::sleep(Duration::from_millis(20));
        drop_cached(&file);
    }
    assert_eq!(cached_bytes(&file), 0);
    let runner = limited(path, &[LAYERS], 0);
    let residency = &runner.residency;
    residency.set_budget(residency.weight_bytes() / 2);
    while residency.warm(Duration::from_millis(1)) {}
    (file, runner)
}

#[cfg(target_os = "linux")]
fn drop_cached(file: &File) {
    // What has just been written cannot be dropped.
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// What the page cache has of it.
#[cfg(target_os = "linux")]
fn cached_bytes(file: &File) -> u64 {
    let map = MappedFile::map(file, Path::new("a model")).unwrap();
    let page = rustix::param::page_size();
    let mut pages = vec![0_u8; map.bytes().len().div_ceil(page)];
    // SAFETY: it writes a byte for each page of a map that lives until then.
    let status = unsafe {
        let start = map.bytes().as_ptr().cast_mut().cast();
        libc::mincore(start, map.bytes().len(), pages.as_mut_ptr())
    };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    let cached = pages.iter().filter(|page| **page & 1 == 1);
    (cached.count() * page) as u64
}

#[test]
fn what_was_used_lately_stays() {
    let folder = tempfile::tempdir().unwrap();
    let runner = limited(&mixture::write(folder.path()), &[LAYERS], 50);
    let each = (LAYERS * EXPERTS_PER_TOKEN) as u64;
    for token in 0..60 {
        count(&runner, &[token]);
        assert_eq!(count(&runner, &[token]), (each, 0), "token {token}");
    }
}

#[test]
fn a_prompt_displaces_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let runner = limited(&mixture::write(folder.path()), &[LAYERS], 50);
    // Fills the memory that there is.
    count(&runner, &tokens(60));
    count(&runner, &[7]);
    let (hits, misses) = count(&runner, &tokens(100));
    // Each expert once, whatever the number of rows.
    assert!(hits + misses <= (LAYERS * EXPERTS) as u64);
    assert!(misses > 0);
    let each = (LAYERS * EXPERTS_PER_TOKEN) as u64;
    assert_eq!(count(&runner, &[7]), (each, 0));
}

#[test]
fn a_budget_that_changes_meanwhile_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = mixture::write(folder.path());
    let expected = answer(&Runner::new(&path, 1), &tokens(30));
    let runner = limited(&path, &[LAYERS], 100);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(1);
            while !ended.load(Ordering::Relaxed) {
                let percent = random.within(0..110) as u64;
                let residency = &runner.residency;
                residency.set_budget(residency.weight_bytes() * percent / 100);
                thread::sleep(Duration::from_micros(500));
            }
        });
        for _ in 0..4 {
            let found = answer(&runner, &tokens(30));
            assert!(found == expected);
        }
        ended.store(true, Ordering::Relaxed);
    });
    // All that passed through is given back.
    runner.residency.set_budget(u64::MAX);
    assert_eq!(runner.residency.status().own_bytes, 0);
}

#[test]
fn a_cut_file_is_an_error_until_it_is_whole_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = mixture::write(folder.path());
    let bytes = fs::read(&path).unwrap();
    let runner = limited(&path, &[LAYERS], 0);
    let mut kv = runner.kv_cache();
    let expected = runner.logits(&mut kv, &tokens(20));
    kv.truncate(0);
    let cut = OpenOptions::new().write(true).open(&path).unwrap();
    cut.set_len(bytes.len() as u64 / 2).unwrap();
    // More often than there is memory for experts that pass through.
    for _ in 0..4 {
        let error = forward_fails(&runner, &mut kv);
        assert!(matches!(error, EngineError::ReadWeights { .. }), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()));
        assert_eq!(kv.len(), 0);
    }
    fs::write(&path, &bytes).unwrap();
    assert!(runner.logits(&mut kv, &tokens(20)) == expected);
}

/// Weights that stay are in the map, which is damaged from then on.
#[test]
fn a_file_that_is_cut_under_what_stays_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = mixture::write(folder.path());
    let runner = limited(&path, &[LAYERS], 50);
    let mut kv = runner.kv_cache();
    runner.logits(&mut kv, &tokens(20));
    let cut = OpenOptions::new().write(true).open(&path).unwrap();
    cut.set_len(fs::metadata(&path).unwrap().len() / 2).unwrap();
    for _ in 0..4 {
        kv.truncate(0);
        let error = forward_fails(&runner, &mut kv);
        let expected = matches!(
            error,
            EngineError::ReadWeights { .. } | EngineError::Damaged { .. }
        );
        assert!(expected, "{error}");
    }
}

/// Why all layers cannot compute 20 rows.
fn forward_fails(runner: &Runner, kv: &mut KvCache) -> EngineError {
    let mut activation = vec![0.5; 20 * 256];
    let entry = BatchEntry {
        kv,
        first_position: 0,
        rows: 20,
    };
    let computed = runner.windows[0].forward(&runner.compute, &mut activation, &mut [entry]);
    computed.unwrap_err()
}
