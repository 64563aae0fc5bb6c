//! How fast the models' disk is read: sequentially, as the engine streams weights, also while the processor computes; by parts of experts;
//! and by single pages, through the engine's map of a file.
//!
//! Decides what is read: its own file on the models' volume, which is gone however this process ends, or a model if no file can be written
//! or a large enough one is named.
//! The file's pages are dropped from the page cache first. Afterwards the kernel says how much of what was read came from the disk; the
//! profile reports the rest. What a virtual machine's host or a file server keeps in memory cannot be seen from here. So that one run does not
//! read from there what another has read, each reads another part of the file. A model is large enough for that: its parts together tell how
//! much of it is kept there now. A file of the profile's own is not: it was written just before, and is kept there most likely.

use std::cell::Cell;
use std::f64::consts::GOLDEN_RATIO;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use prima_crds::v1alpha1::node_profile::DiskProfile;
use prima_engine::kernels::ThreadPool;
use prima_engine::{EngineError, MappedFile, drop_pages, expert_reading_rate, streaming_rate};

use super::samples::RunTimes;

#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("cannot find the models {}; give a folder or a GGUF file with --models", path.display())]
    Models {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot write a file into {} to measure its disk, and no .gguf file is there to read instead: make the folder writable for this user, put a model there, or name another folder with --models",
        folder.display()
    )]
    NotWritable {
        folder: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} has room for {free} bytes; measuring its disk takes a file of {MIN_BYTES} and leaves three quarters free: free some, or name a GGUF file with --models",
        folder.display()
    )]
    Full { folder: PathBuf, free: u64 },
    #[error("cannot write a file into {} to measure its disk", folder.display())]
    Write {
        folder: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} has {found} bytes; measuring a disk takes a file of {MIN_BYTES} at least: name a larger one, or a folder that this user may write to, with --models",
        path.display()
    )]
    Small { path: PathBuf, found: u64 },
    #[error("cannot read a file as the engine reads weights")]
    Engine(#[source] Box<EngineError>),
}

/// The most and the fewest bytes that one run reads.
const MAX_BYTES: u64 = 256 << 20;
const MIN_BYTES: u64 = 16 << 20;

/// Measures the disk of `models`, a folder or a GGUF file, with all threads of the pool; `compute` is a small piece of their usual work
/// with weights in memory.
///
/// # Errors
/// A path that does not exist, a folder that cannot be written to and holds no model, or only one that is too small.
pub fn measure(
    models: &Path,
    pool: &ThreadPool,
    compute: &(dyn Fn() + Sync),
) -> Result<DiskProfile, DiskError> {
    let subject = Subject::of(models)?;
    // First, since it reads least.
    let experts = subject.experts()?;
    let sequential = subject.sequential()?;
    let both = subject.while_computing(&sequential, compute)?;
    let random = subject.random(pool)?;
    Ok(DiskProfile {
        path: folder(models).display().to_string(),
        sequential_read_bytes_per_second: sequential.rate as i64,
        random_read_bytes_per_second: random as i64,
        expert_read_bytes_per_second: Some(experts as i64),
        read_while_computing_percent: both.read_percent,
        compute_while_reading_percent: both.compute_percent,
        caveat: sequential.caveat(),
    })
}

/// `models` itself if it is a folder, else the folder of this file.
pub fn folder(models: &Path) -> &Path {
    match models.is_dir() {
        true => models,
        false => models.parent().unwrap_or(Path::new("/")),
    }
}

/// The file that is read.
struct Subject {
    file: File,
    /// For errors.
    path: PathBuf,
    /// Path to open it again, even if it has no name.
    open_again: PathBuf,
    bytes: u64,
    places: Places,
}

/// Where runs read. Shares of the file, from 0 to 1.
struct Places {
    /// Other profiles, before and after this one, read elsewhere.
    first: f64,
    runs: Cell<u32>,
}

/// Bytes a second, and how much came from the disk.
struct Sequential {
    rate: f64,
    /// Share of the bytes that were read; `None` where the kernel does not say.
    from_disk: Option<f64>,
    /// Read in one run.
    bytes: u64,
}

/// Both at once, in percent of what each reaches alone.
struct Together {
    read_percent: i32,
    compute_percent: i32,
}

const PIECE: usize = 1 << 20;
/// By which the ways of reading are compared.
const TRIAL_BYTES: u64 = MIN_BYTES;
/// Time limits for runs of one kind: for each, and for all together.
const RUN_LIMIT: Duration = Duration::from_secs(2);
const ALL_LIMIT: Duration = Duration::from_secs(3);
/// Several of the 100 ms periods over which a container's CPU quota is counted.
const COMPUTE_ALONE: Duration = Duration::from_millis(500);
const RANDOM_LIMIT: Duration = Duration::from_secs(1);
const EXPERTS_LIMIT: Duration = Duration::from_secs(1);
/// About a part of an expert (gate, up or down) of a model of 30 billion weights in 128 experts, in 4 bits.
const EXPERT_PART_BYTES: u64 = 1 << 20;
const WRITE_LIMIT: Duration = Duration::from_secs(3);

impl Subject {
    fn of(models: &Path) -> Result<Subject, DiskError> {
        let metadata = fs::metadata(models).map_err(|source| DiskError::Models {
            path: models.to_owned(),
            source,
        })?;
        // A model that is too small still tells which disk is meant.
        let too_small = metadata.is_file() && metadata.len() < MIN_BYTES;
        match metadata.is_dir() || too_small {
            true => Subject::in_folder(folder(models)),
            false => Subject::existing(models),
        }
    }

    /// A new file without a name, or the folder's largest model where none can be written.
    fn in_folder(folder: &Path) -> Result<Subject, DiskError> {
        match tempfile::tempfile_in(folder) {
            Ok(file) => Subject::written(file, folder),
            Err(source) => match largest_model(folder)? {
                Some(model) => Subject::existing(&model),
                None => Err(DiskError::NotWritable {
                    folder: folder.to_owned(),
                    source,
                }),
            },
        }
    }

    fn existing(path: &Path) -> Result<Subject, DiskError> {
        let read = |source| DiskError::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(read)?;
        let found = file.metadata().map_err(read)?.len();
        if found < MIN_BYTES {
            return Err(DiskError::Small {
                path: path.to_owned(),
                found,
            });
        }
        Ok(Subject {
            file,
            path: path.to_owned(),
            open_again: path.to_owned(),
            bytes: found,
            places: Places::random(),
        })
    }

    /// Fills the file with at most a quarter of the free space, and not for long on a slow disk.
    fn written(mut file: File, folder: &Path) -> Result<Subject, DiskError> {
        let write = |source| DiskError::Write {
            folder: folder.to_owned(),
            source,
        };
        let volume = rustix::fs::fstatvfs(&file).map_err(|error| write(error.into()))?;
        let free = volume.f_bavail.saturating_mul(volume.f_frsize);
        let wanted = (free / 4).min(MAX_BYTES);
        if wanted < MIN_BYTES {
            return Err(DiskError::Full {
                folder: folder.to_owned(),
                free,
            });
        }
        let begun = Instant::now();
        let mut random = Random(0x2545_f491_4f6c_dd1d);
        let mut chunk = vec![0; PIECE];
        let mut bytes = 0;
        while bytes < wanted && (bytes < MIN_BYTES || begun.elapsed() < WRITE_LIMIT) {
            // Data that a file system cannot compress or deduplicate.
            for word in chunk.as_chunks_mut::<8>().0 {
                *word = random.next().to_le_bytes();
            }
            file.write_all(&chunk).map_err(write)?;
            bytes += chunk.len() as u64;
            if bytes.is_multiple_of(MIN_BYTES) {
                file.sync_data().map_err(write)?;
            }
        }
        file.sync_all().map_err(write)?;
        Ok(Subject {
            open_again: format!("/dev/fd/{}", file.as_raw_fd()).into(),
            file,
            path: folder.to_owned(),
            bytes,
            places: Places::random(),
        })
    }

    /// In the order of the file, as weights are streamed: the mean of up to three runs, since each reads another part.
    fn sequential(&self) -> Result<Sequential, DiskError> {
        let begun = Instant::now();
        let (mut runs, mut seconds, mut read, mut from_disk) = (0, 0.0, 0, Some(0));
        // A slow disk need not read all of it.
        let most = MAX_BYTES.min(self.bytes);
        let mut bytes = MIN_BYTES;
        while runs < 3 && begun.elapsed() < ALL_LIMIT {
            let before = bytes_from_disk();
            let start = Instant::now();
            let rate = self.stream(bytes, || {})?;
            let growth = sum_of_growth(Some(0), before, bytes_from_disk());
            if bytes < most && start.elapsed() < RUN_LIMIT / 8 {
                bytes = (bytes * 8).min(most);
                continue;
            }
            runs += 1;
            seconds += bytes as f64 / rate;
            read += bytes;
            from_disk = from_disk
                .zip(growth)
                .map(|(sum, more): (u64, u64)| sum + more);
        }
        Ok(Sequential {
            rate: read as f64 / seconds.max(1e-9),
            // What was read to compare ways comes on top, where there are two.
            from_disk: from_disk.map(|found| (found as f64 / read as f64).min(1.0)),
            bytes,
        })
    }

    /// Streams and computes, in turns alone and both at once. Returns the share of its rate that each keeps, of three runs: of reading, whose
    /// runs read other parts, all together; of computing, the median.
    fn while_computing(
        &self,
        sequential: &Sequential,
        compute: &(dyn Fn() + Sync),
    ) -> Result<Together, DiskError> {
        let (mut alone_seconds, mut both_seconds, mut computed) = (0.0, 0.0, Vec::new());
        let begun = Instant::now();
        while computed.len() < 3 && begun.elapsed() < ALL_LIMIT {
            let alone = {
                let (start, mut count) = (Instant::now(), 0);
                while start.elapsed() < COMPUTE_ALONE {
                    compute();
                    count += 1;
                }
                f64::from(count) / start.elapsed().as_secs_f64()
            };
            let read_alone = self.stream(sequential.bytes, || {})?;
            let (done, count) = (AtomicBool::new(false), AtomicU32::new(0));
            // Counts only what is computed while the disk's own clock runs.
            let mut clock = (Instant::now(), 0);
            let (read_both, both) = thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        compute();
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
                let read_both = self.stream(sequential.bytes, || {
                    clock = (Instant::now(), count.load(Ordering::Relaxed));
                });
                let (start, before) = clock;
                let counted = count.load(Ordering::Relaxed) - before;
                let both = f64::from(counted) / start.elapsed().as_secs_f64().max(1e-9);
                done.store(true, Ordering::Relaxed);
                (read_both, both)
            });
            computed.push(both / alone);
            alone_seconds += 1.0 / read_alone;
            both_seconds += 1.0 / read_both?;
        }
        let percent = |share: f64| (100.0 * share).round().clamp(1.0, 100.0) as i32;
        Ok(Together {
            read_percent: percent(alone_seconds / both_seconds),
            compute_percent: percent(RunTimes::from(computed).median()),
        })
    }

    /// Bytes per second at which so many `bytes` stream, none of them in the page cache before; `started` as in `streaming_rate`.
    fn stream(&self, bytes: u64, started: impl FnMut()) -> Result<f64, DiskError> {
        self.drop_pages()?;
        let trial = self.places.next(self.bytes, TRIAL_BYTES);
        let part = self.places.next(self.bytes, bytes);
        streaming_rate(&self.open_again, trial, part, started)
            .map_err(|source| DiskError::Engine(Box::new(source)))
    }

    /// Parts of experts, in random order from all over the file.
    fn experts(&self) -> Result<f64, DiskError> {
        self.drop_pages()?;
        let mut parts = self.places.all_over(self.bytes);
        Random(0x6a09_e667_f3bc_c908).shuffle(&mut parts);
        expert_reading_rate(&self.open_again, &parts, EXPERTS_LIMIT)
            .map_err(|source| DiskError::Engine(Box::new(source)))
    }

    /// Single pages in random order, each once, without read-ahead.
    fn random(&self, pool: &ThreadPool) -> Result<f64, DiskError> {
        let map = self.cold()?;
        let part = self.places.next(self.bytes, MAX_BYTES.min(self.bytes));
        map.expect_random_reads(part.clone())
            .map_err(|source| DiskError::Engine(Box::new(source)))?;
        let bytes = &map.bytes()[part.start as usize..part.end as usize];
        // 16 KiB on a Raspberry Pi 5: smaller steps would touch what was read already.
        let page = rustix::param::page_size();
        let mut pages: Vec<usize> = (0..bytes.len() / page).collect();
        Random(0x9e37_79b9_7f4a_7c15).shuffle(&mut pages);
        let start = Instant::now();
        let mut read = 0;
        // Few at a time: a hard disk reads a hundred pages a second.
        for pages in pages.chunks(16 * pool.threads()) {
            pool.run(pages.len(), &|index| {
                touch(bytes[pages[index] * page..].iter().take(1));
            });
            read += pages.len() * page;
            if start.elapsed() > RANDOM_LIMIT {
                break;
            }
        }
        Ok(read as f64 / start.elapsed().as_secs_f64().max(1e-9))
    }

    /// A map of the file, with none of its pages in memory.
    fn cold(&self) -> Result<MappedFile, DiskError> {
        self.drop_pages()?;
        MappedFile::map(&self.file, &self.path)
            .map_err(|source| DiskError::Engine(Box::new(source)))
    }

    /// Drops the file from the page cache, as far as no other process uses it.
    fn drop_pages(&self) -> Result<(), DiskError> {
        drop_pages(&self.file, 0..u64::MAX >> 1).map_err(|source| DiskError::Read {
            path: self.path.clone(),
            source,
        })
    }
}

impl Places {
    fn random() -> Places {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanoseconds = now.map_or(0, |now| now.subsec_nanos());
        Places {
            first: f64::from(nanoseconds) / 1e9,
            runs: Cell::default(),
        }
    }

    /// Where the next run reads so many `bytes` of a file of `all`: far from the runs before, however many there will be.
    fn next(&self, all: u64, bytes: u64) -> Range<u64> {
        let run = self.runs.replace(self.runs.get() + 1);
        let place = (self.first + f64::from(run) * GOLDEN_RATIO).fract();
        let start = all.saturating_sub(bytes) as f64 * place;
        let start = start as u64 / PIECE as u64 * PIECE as u64;
        start..start + bytes
    }

    /// Parts of experts from a file of `all` bytes, as far from each other as it allows.
    fn all_over(&self, all: u64) -> Vec<Range<u64>> {
        let slots = all / EXPERT_PART_BYTES;
        let parts = slots.min(MAX_BYTES / EXPERT_PART_BYTES);
        let first = (self.first * slots as f64) as u64;
        let part = |index: u64| {
            let slot = (first + index * slots / parts) % slots;
            slot * EXPERT_PART_BYTES..(slot + 1) * EXPERT_PART_BYTES
        };
        (0..parts).map(part).collect()
    }
}

impl Sequential {
    fn caveat(&self) -> Option<String> {
        match self.from_disk {
            Some(share) if share >= 0.9 => None,
            Some(share) => Some(format!(
                "{:.0} % of what was read was in memory already: the folder is in memory, or another process uses the file",
                (1.0 - share) * 100.0
            )),
            None => Some("the system does not say how much came from the disk".to_owned()),
        }
    }
}

fn touch<'a>(bytes: impl Iterator<Item = &'a u8>) {
    black_box(bytes.fold(0_u8, |sum, byte| sum.wrapping_add(*byte)));
}

fn largest_model(folder: &Path) -> Result<Option<PathBuf>, DiskError> {
    let entries = fs::read_dir(folder).map_err(|source| DiskError::Read {
        path: folder.to_owned(),
        source,
    })?;
    let models = entries.flatten().map(|entry| entry.path()).filter(|path| {
        path.extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    });
    let size = |path: &PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
    Ok(models.max_by_key(size))
}

/// Bytes that this process has had read from storage so far; `None` where the kernel does not count it.
fn bytes_from_disk() -> Option<u64> {
    read_bytes(&fs::read_to_string("/proc/self/io").ok()?)
}

/// The line `read_bytes: 1234` of /proc/PID/io (proc(5)).
fn read_bytes(io: &str) -> Option<u64> {
    let line = io
        .lines()
        .find_map(|line| line.strip_prefix("read_bytes:"))?;
    line.trim().parse().ok()
}

fn sum_of_growth(sum: Option<u64>, before: Option<u64>, after: Option<u64>) -> Option<u64> {
    Some(sum? + after?.saturating_sub(before?))
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Fisher and Yates.
    fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            all.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prima_engine::kernels::IsaLevel;

    const PIECE_OF_WORK: Duration = Duration::from_millis(1);

    fn pool() -> ThreadPool {
        ThreadPool::new(2, IsaLevel::SCALAR).unwrap()
    }

    #[test]
    fn a_folder_is_measured_and_left_as_it_was() {
        // Beside the build, which lies on a disk wherever it is built.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        // Sleeping is not slowed down by reading, nor reading by sleeping; other tests may be at work, and are not all the time.
        let mut tries = (0..5).map(|_| {
            let disk = measure(folder.path(), &pool(), &|| thread::sleep(PIECE_OF_WORK)).unwrap();
            assert!(
                disk.sequential_read_bytes_per_second > 0
                    && disk.random_read_bytes_per_second > 0
                    && disk.expert_read_bytes_per_second > Some(0),
                "{disk:?}"
            );
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
            eprintln!("{disk:?}");
            (
                disk.compute_while_reading_percent,
                disk.read_while_computing_percent,
            )
        });
        assert!(tries.any(|(computed, read)| computed > 20 && read > 5));
    }

    #[test]
    fn beside_a_model_that_is_too_small_a_file_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("small.gguf");
        fs::write(&model, "GGUF").unwrap();
        let subject = Subject::of(&model).unwrap();
        assert!(subject.bytes >= MIN_BYTES, "{} bytes", subject.bytes);
        assert_eq!(subject.path, folder.path());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn runs_read_parts_that_lie_apart_in_the_file() {
        const MIB: u64 = 1 << 20;
        for (first, all) in [(0.0, 16 * MIB), (0.7, 511 * MIB + 77), (0.999, 100 << 30)] {
            let places = || Places {
                first,
                runs: Cell::default(),
            };
            let run = MAX_BYTES.min(all);
            let (runs, own) = (8, places());
            let mut starts: Vec<u64> = (0..runs)
                .map(|_| {
                    let part = own.next(all, run);
                    assert!(part.end <= all && part.end - part.start == run, "{part:?}");
                    assert_eq!(part.start % MIB, 0);
                    part.start
                })
                .collect();
            starts.sort_unstable();
            // Evenly: none is nearer to another than a third of what it could be.
            let nearest = starts.windows(2).map(|two| two[1] - two[0]).min();
            let even = (all - run) / runs / 3 / MIB * MIB;
            assert!(nearest >= Some(even), "{starts:?} of {all}");

            let mut parts = places().all_over(all);
            assert_eq!(parts.len() as u64, (all / MIB).min(256));
            parts.sort_unstable_by_key(|part| part.start);
            let apart = all / MIB / parts.len() as u64 * MIB;
            for two in parts.windows(2) {
                assert!(two[1].start - two[0].start >= apart.max(MIB), "{two:?}");
            }
            assert!(
                parts
                    .iter()
                    .all(|part| part.end <= all && part.end - part.start == MIB)
            );
            assert!(parts.last().unwrap().end + 2 * apart > all, "{all}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_folder_in_memory_is_told() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, vec![1; MIN_BYTES as usize]).unwrap();
        let disk = measure(&path, &pool(), &|| thread::sleep(PIECE_OF_WORK)).unwrap();
        let caveat = disk.caveat.expect("a caveat");
        // The kernel counts what the whole process reads: pages of the program itself come from a disk now and then.
        let percent: u32 = caveat.split(" %").next().unwrap().parse().unwrap();
        assert!(percent >= 95, "{caveat}");
        assert_eq!(Path::new(&disk.path), folder.path());
    }

    #[test]
    fn what_cannot_be_measured_is_named_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("none");
        let error = measure(&missing, &pool(), &|| ()).unwrap_err();
        assert!(matches!(error, DiskError::Models { .. }), "{error}");
        assert!(error.to_string().contains("none") && error.to_string().contains("--models"));
        // Where no other file can be written.
        let small = folder.path().join("small.gguf");
        fs::write(&small, "GGUF").unwrap();
        let error = Subject::existing(&small).err().unwrap();
        assert!(
            matches!(error, DiskError::Small { found: 4, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("--models"), "{error}");
    }

    #[test]
    fn the_kernels_count_is_read() {
        assert_eq!(
            read_bytes("rchar: 5\nread_bytes: 4096\nwrite_bytes: 0\n"),
            Some(4096)
        );
        assert_eq!(read_bytes("rchar: 5\n"), None);
    }
}
