//! Reads parts of experts on several threads: into the page cache and this process's map what stays, into buffers what passes through. Also
//! gives their memory up. Does not decide which stay (`experts`).

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use memmap2::MmapMut;

use super::source::{ModelFiles, slot};
use super::threads;
use crate::error::EngineError;
use crate::mapped_weights::MappedModel;

/// The threads. They end when it is dropped.
pub struct ExpertReader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// One part of an expert that is to be read.
pub struct Job {
    /// Which expert and which part of it: for who is told.
    pub index: usize,
    pub part: usize,
    pub range: Range<u64>,
    pub memory: Memory,
    pub reply: Sender<PartRead>,
}

/// What is read into.
pub enum Memory {
    /// The page cache, in place of this part of the file.
    Kept { leaves: Option<Range<u64>> },
    /// This buffer, or a new one of so many bytes.
    Passing {
        buffer: Option<MmapMut>,
        bytes: usize,
    },
}

/// What became of a job.
pub struct PartRead {
    pub index: usize,
    pub part: usize,
    /// The buffer, if it passes through one, and how many bytes were read.
    pub result: io::Result<(Option<MmapMut>, usize)>,
}

struct Shared {
    source: ModelFiles,
    map: MappedModel,
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    stop: bool,
}

/// Reads at a time: enough for a disk of flash memory, where one read of a part would leave it half idle.
const THREADS: usize = 8;
/// Groups of reads that make a rate of which the slowest is left out.
const ENOUGH_GROUPS: usize = 8;

impl ExpertReader {
    /// # Errors
    /// [`EngineError::ReadAhead`] when a file cannot be opened again or the system refuses a thread.
    pub fn start(map: MappedModel) -> Result<ExpertReader, EngineError> {
        let source = ModelFiles::open(map.paths())?;
        let path = source.path();
        let mut reader = ExpertReader {
            shared: Arc::new(Shared {
                source,
                map,
                queue: Mutex::default(),
                work: Condvar::new(),
            }),
            threads: Vec::new(),
        };
        let shared = reader.shared.clone();
        threads::start(&mut reader.threads, THREADS, "experts", &path, move || {
            shared.run();
        })?;
        Ok(reader)
    }

    /// As [`ModelFiles::compare`].
    pub fn compare(&self, ranges: &[Range<u64>], slot_bytes: usize) {
        self.shared.source.compare(ranges, slot_bytes);
    }

    /// Has the threads do this.
    pub fn begin(&self, jobs: impl IntoIterator<Item = Job>) {
        self.shared.lock().jobs.extend(jobs);
        self.shared.work.notify_all();
    }

    /// Whether the page cache has all of a part of the file; `None` where the system does not tell.
    pub fn is_cached(&self, range: Range<u64>) -> Option<bool> {
        self.shared.map.is_cached(range)
    }

    /// Maps a part of the file that is cached, so that reading beside it does not drop it.
    pub fn keep_cached(&self, range: Range<u64>) {
        // What cannot be mapped now is when it is computed with.
        let _ = self.shared.map.populate(range);
    }

    /// Gives up the memory of a part of the file. Pages that it shares with what is beside it stay in the page cache.
    pub fn release(&self, range: Range<u64>) {
        self.shared.release(range);
    }
}

impl Drop for ExpertReader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        threads::join(&mut self.threads);
    }
}

impl Shared {
    /// A thread: reads part after part, until it is told to stop.
    fn run(&self) {
        let mut queue = self.lock();
        while !queue.stop {
            let Some(job) = queue.jobs.pop_front() else {
                let woken = self.work.wait(queue);
                queue = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            let result = threads::caught(|| self.read(&job.range, job.memory));
            // Nobody waits for it any more: then it is nobody's.
            let _ = job.reply.send(PartRead {
                index: job.index,
                part: job.part,
                result,
            });
            queue = self.lock();
        }
    }

    fn read(&self, range: &Range<u64>, memory: Memory) -> io::Result<(Option<MmapMut>, usize)> {
        match memory {
            Memory::Kept { leaves } => {
                if let Some(part) = leaves {
                    self.release(part);
                }
                let read = self.source.cache(range)?;
                // All at once, as computing would touch it page by page.
                let _ = self.map.populate(range.clone());
                Ok((None, read))
            }
            Memory::Passing { buffer, bytes } => {
                let mut buffer = buffer.map_or_else(|| slot(bytes), Ok)?;
                let read = self.source.read(range, &mut buffer)?;
                Ok((Some(buffer), read))
            }
        }
    }

    fn release(&self, range: Range<u64>) {
        // If these calls fail, the system takes the pages back when it needs them.
        let _ = self.map.unmap_pages(range.clone());
        let _ = self.source.drop_pages(&range);
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rate, in bytes a second, at which `parts` of the file at `path` are read into the page cache as those of experts are that a layer lacks:
/// several at once, and all of them waited for before the next. Ends after the last, or about when `limit` has passed. Of eight such groups or
/// more, the slowest does not count: a disk that pauses once is not a slow disk. Drops the pages afterwards.
///
/// # Errors
/// [`EngineError::ReadAhead`] when the file cannot be opened or the system refuses a thread, [`EngineError::ReadWeights`] when it cannot be
/// read.
pub fn expert_reading_rate(
    path: &Path,
    parts: &[Range<u64>],
    limit: Duration,
) -> Result<f64, EngineError> {
    let source = ModelFiles::open([(0, path)])?;
    let mut groups = Vec::new();
    for group in parts.chunks(THREADS) {
        let start = Instant::now();
        let bytes = read_at_once(&source, path, group)?;
        groups.push((start.elapsed(), bytes));
        if are_enough(&groups, limit) {
            break;
        }
    }
    let rate = usual_rate(groups);
    for part in parts {
        // Nobody needs them now; the system would find that out by itself.
        let _ = source.drop_pages(part);
    }
    Ok(rate)
}

/// Whether these groups of reads, with the time and the bytes of each, took so long; of few, three times as long. The slowest does not count.
fn are_enough(groups: &[(Duration, usize)], limit: Duration) -> bool {
    let times = || groups.iter().map(|(time, _)| *time);
    let usual = times().sum::<Duration>() - times().max().unwrap_or_default();
    match groups.len() >= ENOUGH_GROUPS {
        true => usual > limit,
        false => usual > 3 * limit,
    }
}

/// In bytes a second. Of enough groups, the slowest does not count.
fn usual_rate(mut groups: Vec<(Duration, usize)>) -> f64 {
    groups.sort_unstable();
    if groups.len() >= ENOUGH_GROUPS {
        groups.pop();
    }
    let time: Duration = groups.iter().map(|(time, _)| time).sum();
    let bytes: usize = groups.iter().map(|(_, bytes)| bytes).sum();
    bytes as f64 / time.as_secs_f64().max(1e-9)
}

/// How many bytes are read of all `parts`, each by a thread of its own.
fn read_at_once(
    source: &ModelFiles,
    path: &Path,
    parts: &[Range<u64>],
) -> Result<usize, EngineError> {
    thread::scope(|scope| {
        let start = |part| thread::Builder::new().spawn_scoped(scope, move || source.cache(part));
        let readers: Vec<_> = parts.iter().map(start).collect();
        let mut bytes = 0;
        for (part, reader) in parts.iter().zip(readers) {
            let reader = reader.map_err(|source| EngineError::ReadAhead {
                path: path.to_owned(),
                source,
            })?;
            let panicked = |_| Err(io::Error::other("the thread that reads panicked"));
            let read = reader.join().unwrap_or_else(panicked);
            bytes += read.map_err(|source| EngineError::ReadWeights {
                path: path.to_owned(),
                offset: part.start,
                source,
            })?;
        }
        Ok(bytes)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc;
    use std::time::Duration;

    use prima_gguf::Gguf;
    use prima_gguf::writer::GgufWriter;

    use super::super::plan::PAGE;
    use super::*;
    use crate::mapped_weights::MappedFile;

    #[test]
    fn a_read_that_panics_is_answered_and_its_thread_goes_on() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let header = GgufWriter::new().write_header(Vec::new()).unwrap();
        let mut bytes = header.finish().unwrap();
        bytes.resize(2 * PAGE, 0);
        fs::write(file.path(), &bytes).unwrap();
        let length = bytes.len() as u64;
        let gguf = Gguf::parse("two pages", &bytes, length).unwrap();
        let mapped = MappedFile::open(file.path()).unwrap();
        let reader = ExpertReader::start(MappedModel::new(&gguf, vec![mapped])).unwrap();

        let (reply, replies) = mpsc::channel();
        let read = |index, range| {
            let memory = Memory::Kept { leaves: None };
            let reply = reply.clone();
            reader.begin([Job {
                index,
                part: 0,
                range,
                memory,
                reply,
            }]);
        };
        let answer = || {
            let answer = replies.recv_timeout(Duration::from_secs(60));
            answer.expect("an answer")
        };
        // A range that ends before it begins has fewer bytes than none, and tests panic at that. One more read than there are threads.
        (0..=THREADS).for_each(|index| read(index, length..0));
        let mut failed: Vec<usize> = (0..=THREADS)
            .map(|_| {
                let PartRead { index, result, .. } = answer();
                let error = result.unwrap_err();
                assert!(error.to_string().contains("panicked"), "{error}");
                index
            })
            .collect();
        failed.sort_unstable();
        assert!(failed.into_iter().eq(0..=THREADS));
        read(0, 0..length);
        assert_eq!(answer().result.unwrap().1, bytes.len());
    }

    #[test]
    fn a_disk_that_pauses_once_is_not_a_slow_one() {
        let read = |seconds| (Duration::from_secs(seconds), 100);
        let paused: Vec<_> = [1, 1, 1, 9, 1, 1, 1, 1].map(read).into();
        assert_eq!(usual_rate(paused), 100.0);
        // Of few, there is no telling.
        assert_eq!(usual_rate(vec![read(1), read(9)]), 20.0);
        assert_eq!(usual_rate(Vec::new()), 0.0);
    }

    #[test]
    fn a_pause_does_not_end_a_measurement() {
        let enough = |seconds: &[u64]| {
            let groups: Vec<_> = seconds
                .iter()
                .map(|&one| (Duration::from_secs(one), 1))
                .collect();
            are_enough(&groups, Duration::from_secs(6))
        };
        assert!(!enough(&[99]));
        assert!(!enough(&[99, 1, 1, 1, 1, 1, 1]));
        assert!(!enough(&[99, 1, 1, 1, 1, 1, 1, 0]));
        assert!(enough(&[99, 1, 1, 1, 1, 1, 1, 1]));
        // A disk that is slow all the time.
        assert!(!enough(&[9, 9, 9]));
        assert!(enough(&[9, 9, 9, 9]));
    }

    #[test]
    fn a_rate_is_of_what_was_read_and_no_file_ends_unnoticed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let part = 4 * PAGE as u64;
        fs::write(file.path(), vec![1; 11 * part as usize]).unwrap();
        let parts = |count| -> Vec<_> { (0..count).map(|i| i * part..(i + 1) * part).collect() };
        let rate = |count| expert_reading_rate(file.path(), &parts(count), Duration::from_secs(9));
        assert_eq!(rate(0).unwrap(), 0.0);
        assert!(rate(1).unwrap() > 0.0);
        // More than are read at once.
        assert!(rate(11).unwrap() > 0.0);
        let error = rate(13).unwrap_err();
        assert!(
            matches!(error, EngineError::ReadWeights { offset, .. } if offset == 11 * part),
            "{error}"
        );
        let missing = expert_reading_rate(Path::new("/none"), &parts(1), Duration::ZERO);
        assert!(matches!(missing, Err(EngineError::ReadAhead { .. })));
    }
}
