//! The compute threads of a process: runs a job of many small pieces on all of them and returns when
//! the last piece is done. Decides how idle threads wait (a short spin, then parked: a member that
//! waits for its neighbours costs no CPU). Knows nothing of what the pieces compute.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::isa_level::IsaLevel;
use super::placement::{self, Placement};

/// How long an idle worker watches for the next job before it parks. Long enough for the serial
/// steps between two matrix products of a layer, short against a hop of the ring (about 75 µs).
const SPIN: Duration = Duration::from_micros(15);

/// Threads that share the work of one job at a time, and the kernels' instruction set.
pub struct ThreadPool {
    level: IsaLevel,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    placement: Placement,
    /// Held for the length of a run: jobs from several callers follow one another.
    turn: Mutex<()>,
}

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ThreadPoolError {
    #[error("starting compute thread {index} of {threads}")]
    Spawn {
        index: usize,
        threads: usize,
        source: std::io::Error,
    },
}

impl ThreadPool {
    /// A pool in which `threads` threads compute (at least one; the caller of [`run`](Self::run) is
    /// one of them, so `threads - 1` are started), with the kernels of `level`.
    ///
    /// # Errors
    /// [`ThreadPoolError::Spawn`] when the system refuses a thread.
    pub fn new(threads: usize, level: IsaLevel) -> Result<ThreadPool, ThreadPoolError> {
        let threads = threads.max(1);
        let mut pool = ThreadPool {
            level,
            shared: Arc::new(Shared::new(threads - 1)),
            workers: Vec::with_capacity(threads - 1),
            placement: Placement::default(),
            turn: Mutex::new(()),
        };
        for index in 0..threads - 1 {
            let shared = Arc::clone(&pool.shared);
            let (tell, told) = std::sync::mpsc::channel();
            let worker = thread::Builder::new()
                .name(format!("compute-{}", index + 1))
                .spawn(move || {
                    let _ = tell.send(placement::this_thread());
                    shared.work(index)
                })
                .map_err(|source| ThreadPoolError::Spawn {
                    index: index + 1,
                    threads,
                    source,
                })?;
            pool.workers.push(worker);
            pool.placement.add(told.recv().ok());
        }
        Ok(pool)
    }

    /// How many threads compute, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The instruction set of the kernels that run on this pool.
    pub fn level(&self) -> IsaLevel {
        self.level
    }

    /// Calls `work(piece)` once for every piece in `0..pieces`, on this thread and the workers, and
    /// returns when all are done. Every thread goes through its own share of consecutive pieces, which
    /// read memory in order, and then helps with the others' shares; pieces are taken one by one, so a
    /// slow thread holds up the others by one piece at most. A panic in a piece is raised again here
    /// once no thread is at work.
    /// `work` must not call `run` of the same pool.
    pub fn run(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || pieces <= 1 {
            (0..pieces).for_each(work);
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.open(pieces, work);
        self.wake(pieces - 1);
        let job = Job { work, pieces };
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.take_pieces(&job, 0)));
        if own.is_err() {
            self.shared.abandon();
        }
        self.shared.close_and_wait();
        let theirs = self.shared.take_panic();
        drop(turn);
        match (own, theirs) {
            (Err(payload), _) | (Ok(()), Some(payload)) => resume_unwind(payload),
            (Ok(()), None) => {}
        }
    }

    /// Has all of `out` written by `fill`, part by part of `len` each (the last may be shorter). `fill` is given a part's number.
    pub fn fill<T: Send>(&self, out: &mut [T], len: usize, fill: impl Fn(usize, &mut [T]) + Sync) {
        let count = out.len().div_ceil(len);
        let parts = Mutex::new(out.chunks_mut(len).enumerate());
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        self.run(count, &|_| {
            if let Some((number, part)) = next() {
                fill(number, part);
            }
        });
    }

    fn wake(&self, helpers: usize) {
        let mut placed = false;
        for (worker, parked) in self.workers.iter().zip(&self.shared.parked).take(helpers) {
            if parked.0.swap(false, Ordering::SeqCst) {
                if !placed {
                    self.placement.keep_off_this_core();
                    placed = true;
                }
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its pieces, so joining cannot fail in a way to report.
            let _ = worker.join();
        }
    }
}

/// `gate` holds, from the top: the job's number (32 bits), whether threads may still join it (1 bit),
/// and how many workers are in it (31 bits). One word, so that joining checks all three at once.
const JOB: u64 = 1 << 32;
const OPEN: u64 = 1 << 31;
const WORKERS: u64 = OPEN - 1;

/// Keeps words that different threads write off each other's cache lines (128: two lines are
/// fetched together on x86).
#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    gate: Padded<AtomicU64>,
    /// For each thread's share of the pieces, the caller's first: the next piece to be taken.
    next: Vec<Padded<AtomicUsize>>,
    parked: Vec<Padded<AtomicBool>>,
    job: UnsafeCell<Option<ErasedJob>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

// SAFETY: everything but `job` is Sync by itself. `job` is written only by the thread that holds
// `turn`, while the gate is closed and no worker is in the job; workers read it only after joining
// through the gate, which synchronises with the write (release on opening, acquire on joining).
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` points to a `Sync` closure.
unsafe impl Send for Shared {}

struct Job<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    pieces: usize,
}

/// A job whose closure's lifetime is that of the call of `run` that opened it.
#[derive(Clone, Copy)]
struct ErasedJob {
    work: *const (dyn Fn(usize) + Sync + 'static),
    pieces: usize,
}

impl Shared {
    fn new(workers: usize) -> Self {
        Shared {
            gate: Padded(AtomicU64::new(0)),
            next: (0..=workers).map(|_| Padded(AtomicUsize::new(0))).collect(),
            parked: (0..workers)
                .map(|_| Padded(AtomicBool::new(false)))
                .collect(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        }
    }

    fn open(&self, pieces: usize, work: &(dyn Fn(usize) + Sync)) {
        let work: *const (dyn Fn(usize) + Sync + '_) = work;
        // SAFETY: only the lifetime changes. The pointer is dereferenced only by workers that are in
        // the job, and `run` does not return (nor unwind) before they have left it.
        let work: *const (dyn Fn(usize) + Sync + 'static) = unsafe { std::mem::transmute(work) };
        // SAFETY: the caller holds `turn`, the gate is closed and nobody is in the job: no reader.
        unsafe { *self.job.get() = Some(ErasedJob { work, pieces }) };
        for (thread, next) in self.next.iter().enumerate() {
            next.0
                .store(self.share_start(thread, pieces), Ordering::Relaxed);
        }
        let before = self.gate.0.load(Ordering::Relaxed);
        let opened = (before & !(OPEN | WORKERS)).wrapping_add(JOB) | OPEN;
        // SeqCst: a worker that is about to park either sees this or is seen parked by `wake`.
        self.gate.0.store(opened, Ordering::SeqCst);
    }

    fn close_and_wait(&self) {
        let mut gate = self.gate.0.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0_u32;
        while gate & WORKERS != 0 {
            spins += 1;
            if spins.is_multiple_of(4096) {
                // A worker lost its core in mid-piece: let it have this one.
                thread::yield_now();
            }
            std::hint::spin_loop();
            gate = self.gate.0.load(Ordering::Acquire);
        }
    }

    fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Takes the pieces of thread `thread`'s share, then of the shares after it, in a circle.
    fn take_pieces(&self, job: &Job<'_>, thread: usize) {
        let threads = self.next.len();
        for share in (thread..threads).chain(0..thread) {
            let end = self.share_start(share + 1, job.pieces);
            loop {
                let piece = self.next[share].0.fetch_add(1, Ordering::Relaxed);
                if piece >= end {
                    break;
                }
                (job.work)(piece);
            }
        }
    }

    /// The first piece of a thread's share.
    fn share_start(&self, thread: usize, pieces: usize) -> usize {
        let threads = self.next.len();
        thread * (pieces / threads) + thread.min(pieces % threads)
    }

    /// Leaves no piece to be taken.
    fn abandon(&self) {
        for next in &self.next {
            next.0.store(usize::MAX / 2, Ordering::Relaxed);
        }
    }

    /// The life of a worker thread.
    fn work(&self, index: usize) {
        let mut done = 0;
        while let Some(number) = self.next_job(index, done) {
            done = number;
            if !self.join(number) {
                continue;
            }
            // SAFETY: joined: the job was written before the gate opened, and stays until it is
            // closed and this worker has left.
            let job = unsafe { *self.job.get() };
            if let Some(ErasedJob { work, pieces }) = job {
                // SAFETY: `run` keeps the closure alive until this worker has left the job.
                let work = unsafe { &*work };
                let job = Job { work, pieces };
                let taken = catch_unwind(AssertUnwindSafe(|| self.take_pieces(&job, index + 1)));
                if let Err(payload) = taken {
                    self.abandon();
                    *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
                }
            }
            self.gate.0.fetch_sub(1, Ordering::Release);
        }
    }

    /// The number of an open job other than `done`, or `None` when the pool is being dropped.
    fn next_job(&self, index: usize, done: u64) -> Option<u64> {
        let waiting = |gate: u64| gate & OPEN == 0 || gate / JOB == done;
        loop {
            let start = Instant::now();
            loop {
                for _ in 0..16 {
                    let gate = self.gate.0.load(Ordering::Acquire);
                    if !waiting(gate) {
                        return Some(gate / JOB);
                    }
                    std::hint::spin_loop();
                }
                if start.elapsed() >= SPIN {
                    break;
                }
            }
            self.parked[index].0.store(true, Ordering::SeqCst);
            while waiting(self.gate.0.load(Ordering::SeqCst)) {
                if self.stop.load(Ordering::SeqCst) {
                    return None;
                }
                if !self.parked[index].0.load(Ordering::SeqCst) {
                    // Woken for a job that is over already.
                    break;
                }
                thread::park();
            }
            self.parked[index].0.store(false, Ordering::SeqCst);
        }
    }

    /// Enters job `number`; false when it is closed by now.
    fn join(&self, number: u64) -> bool {
        self.gate
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |gate| {
                (gate & OPEN != 0 && gate / JOB == number).then_some(gate + 1)
            })
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn pool(threads: usize) -> ThreadPool {
        ThreadPool::new(threads, IsaLevel::SCALAR).unwrap()
    }

    #[test]
    fn every_piece_runs_exactly_once() {
        for threads in [1, 2, 3, 8] {
            let pool = pool(threads);
            for pieces in [0, 1, 2, 7, 1000] {
                let seen: Vec<AtomicU32> = (0..pieces).map(|_| AtomicU32::new(0)).collect();
                pool.run(pieces, &|piece| {
                    seen[piece].fetch_add(1, Ordering::Relaxed);
                });
                assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn every_part_is_filled_once() {
        for threads in [1, 3] {
            let pool = pool(threads);
            for (count, len) in [(0, 5), (4, 5), (10, 5), (1003, 10)] {
                let mut out = vec![0_usize; count];
                pool.fill(&mut out, len, |part, own| {
                    for (place, number) in own.iter_mut().enumerate() {
                        *number += 1 + part * len + place;
                    }
                });
                assert!(out.into_iter().eq(1..=count), "{count} by {len}");
            }
        }
    }

    #[test]
    fn many_short_jobs_follow_one_another_without_losing_a_piece() {
        let pool = pool(4);
        let total = AtomicUsize::new(0);
        for job in 0..20_000 {
            pool.run(1 + job % 5, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(total.load(Ordering::Relaxed), 20_000 * 3);
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = pool(3);
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(6, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 500 * 6);
    }

    #[test]
    fn a_panic_in_a_piece_reaches_the_caller_and_the_pool_works_on() {
        for threads in [1, 2, 4] {
            let pool = pool(threads);
            for bad in [0, 5, 31] {
                let payload = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(32, &|piece| assert!(piece != bad, "piece {piece} failed"));
                }))
                .unwrap_err();
                let message = payload.downcast_ref::<String>().unwrap();
                assert_eq!(message, &format!("piece {bad} failed"));
            }
            let count = AtomicUsize::new(0);
            pool.run(32, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.load(Ordering::Relaxed), 32);
        }
    }
}
