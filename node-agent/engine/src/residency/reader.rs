//! Reads streamed weights ahead of their use: two threads, a few buffers, and the order of the cycle.
//!
//! Two reads are in flight, so that the disk has work while a thread waits for a busy processor. Never reads further ahead than its buffers reach. When weights are asked for
//! in another order than the cycle's, it starts over from there.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memmap2::MmapMut;

use super::plan::{PAGE, ResidencyPlan, WeightPiece};
use super::source::{ModelFiles, slot};
use super::threads;
use crate::error::EngineError;

/// A reader at work, until it is dropped.
pub struct Reader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// A piece in memory. Its buffer is read into again when this is dropped.
pub struct BufferedPiece<'a> {
    shared: &'a Shared,
    slot: Option<MmapMut>,
    /// Where in the buffer the piece begins.
    skip: usize,
    bytes: usize,
}

/// Sums since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readings {
    pub bytes: u64,
    /// How long computing waited for pieces.
    pub waited: Duration,
}

struct Shared {
    source: ModelFiles,
    state: Mutex<State>,
    /// A buffer is free, or another piece is next.
    work: Condvar,
    /// A piece was read, or could not be.
    done: Condvar,
}

#[derive(Default)]
struct State {
    plan: Arc<ResidencyPlan>,
    /// The piece to be read next.
    next: usize,
    /// In the order of use.
    ahead: VecDeque<PendingRead>,
    /// Counts the reads.
    begun: u64,
    free: Vec<MmapMut>,
    /// Buffers that exist.
    slots: usize,
    readings: Readings,
    stop: bool,
}

/// A piece that is being read, or was.
struct PendingRead {
    number: u64,
    index: usize,
    result: Option<io::Result<MmapMut>>,
}

/// Readings at a time.
const THREADS: usize = 2;

impl Reader {
    /// A reader of the model's files, by where each begins; it reads nothing until [`follow`](Self::follow) says what.
    ///
    /// # Errors
    /// [`EngineError::ReadAhead`] for a file that cannot be opened, and a system that refuses a thread.
    pub fn start<'a>(
        files: impl IntoIterator<Item = (u64, &'a Path)>,
    ) -> Result<Reader, EngineError> {
        let source = ModelFiles::open(files)?;
        let path = source.path();
        let mut reader = Reader {
            shared: Arc::new(Shared {
                source,
                state: Mutex::default(),
                work: Condvar::new(),
                done: Condvar::new(),
            }),
            threads: Vec::new(),
        };
        let shared = reader.shared.clone();
        threads::start(&mut reader.threads, THREADS, "weights", &path, move || {
            shared.read();
        })?;
        Ok(reader)
    }

    /// Before it reads for the first time, compares the ways of reading by some pieces of `plan`.
    pub fn compare(&self, plan: &ResidencyPlan) {
        let ranges: Vec<_> = plan.streamed.iter().map(WeightPiece::range).collect();
        self.shared.source.compare(&ranges, plan.slot_bytes);
    }

    /// From now on, streams what `plan` says. Before it streams for the first time, it compares the ways of reading.
    pub fn follow(&self, plan: Arc<ResidencyPlan>) {
        if !plan.streamed.is_empty() {
            self.compare(&plan);
        }
        let mut state = self.shared.lock();
        // Where computing is now, found in the new order.
        let current = state.ahead.front().map_or(state.next, |front| front.index);
        let current = state.plan.streamed.get(current).map(|p| p.offset);
        let at = |offset| plan.streamed.iter().position(|p| p.offset >= offset);
        state.next = current.and_then(at).unwrap_or(0);
        state.plan = plan;
        while state.pass_over() {}
        state.trim();
        drop(state);
        self.shared.work.notify_all();
        self.shared.done.notify_all();
    }

    pub fn plan(&self) -> Arc<ResidencyPlan> {
        self.shared.lock().plan.clone()
    }

    pub fn readings(&self) -> Readings {
        self.shared.lock().readings
    }

    /// Drops the piece's pages from the page cache, as far as no process has them mapped.
    pub fn drop_pages(&self, piece: &WeightPiece) -> io::Result<()> {
        self.shared.source.drop_pages(&piece.range())
    }

    /// As [`ModelFiles::copy`].
    pub fn copy(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.shared.source.copy(offset, out)
    }

    /// Piece `index` of `plan.streamed`, waiting until it is read. `None` if the reader follows another plan by now.
    ///
    /// # Errors
    /// The error of the read. Asking for the piece again tries again.
    pub fn load(
        &self,
        plan: &Arc<ResidencyPlan>,
        index: usize,
    ) -> io::Result<Option<BufferedPiece<'_>>> {
        let begun = Instant::now();
        let mut state = self.shared.lock();
        loop {
            if !Arc::ptr_eq(&state.plan, plan) {
                return Ok(None);
            }
            if !state.ahead.iter().any(|reading| reading.index == index) {
                while state.pass_over() {}
                state.next = index;
            }
            while state.ahead.front().is_some_and(|f| f.index != index) {
                state.pass_over();
            }
            let read = state
                .ahead
                .front_mut()
                .and_then(|front| front.result.take());
            if let Some(result) = read {
                state.ahead.pop_front();
                state.readings.waited += begun.elapsed();
                let piece = &plan.streamed[index];
                let slot = result.inspect_err(|_| state.slots -= 1)?;
                return Ok(Some(BufferedPiece {
                    shared: &self.shared,
                    slot: Some(slot),
                    skip: (piece.offset % PAGE as u64) as usize,
                    bytes: piece.bytes,
                }));
            }
            self.shared.work.notify_all();
            state = wait(&self.shared.done, state);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        threads::join(&mut self.threads);
    }
}

impl BufferedPiece<'_> {
    pub fn bytes(&self) -> &[u8] {
        match &self.slot {
            Some(slot) => &slot[self.skip..][..self.bytes],
            None => &[],
        }
    }
}

impl Drop for BufferedPiece<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.shared.lock().give_back(Ok(slot));
            self.shared.work.notify_one();
        }
    }
}

impl State {
    /// Drops the oldest read, whether it is done or not; returns whether there was one.
    fn pass_over(&mut self) -> bool {
        let Some(reading) = self.ahead.pop_front() else {
            return false;
        };
        if let Some(slot) = reading.result {
            self.give_back(slot);
        }
        true
    }

    /// Takes back the buffer of a read; after an error, the buffer was dropped.
    fn give_back(&mut self, slot: io::Result<MmapMut>) {
        match slot {
            Ok(slot) => self.free.push(slot),
            Err(_) => self.slots -= 1,
        }
        self.trim();
    }

    /// Buffers that are not needed any more go back to the system.
    fn trim(&mut self) {
        while self.slots > self.plan.slots && self.free.pop().is_some() {
            self.slots -= 1;
        }
    }

    /// The next read that can start: number, piece index and buffer.
    fn claim(&mut self) -> Option<(u64, usize, io::Result<MmapMut>)> {
        let pieces = self.plan.streamed.len();
        if self.stop || self.ahead.len() >= pieces {
            return None;
        }
        let slot = match self.free.pop() {
            Some(slot) => Ok(slot),
            None if self.slots < self.plan.slots => {
                self.slots += 1;
                slot(self.plan.slot_bytes)
            }
            None => return None,
        };
        let index = self.next.min(pieces - 1);
        self.next = (index + 1) % pieces;
        self.begun += 1;
        self.ahead.push_back(PendingRead {
            number: self.begun,
            index,
            result: None,
        });
        Some((self.begun, index, slot))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread: reads piece after piece, until it is told to stop.
    fn read(&self) {
        let mut state = self.lock();
        while !state.stop {
            let Some((number, index, slot)) = state.claim() else {
                state = wait(&self.work, state);
                continue;
            };
            let plan = state.plan.clone();
            drop(state);
            let (mut slot, mut bytes) = (slot, 0);
            if let Ok(buffer) = &mut slot {
                let range = plan.streamed[index].range();
                match threads::caught(|| self.source.read(&range, buffer)) {
                    Ok(read) => bytes = read as u64,
                    Err(error) => slot = Err(error),
                }
            }
            state = self.lock();
            state.readings.bytes += bytes;
            match state.ahead.iter_mut().find(|r| r.number == number) {
                Some(reading) => reading.result = Some(slot),
                // Passed over.
                None => state.give_back(slot),
            }
            self.done.notify_all();
        }
    }
}

fn wait<'a>(condition: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    condition
        .wait(state)
        .unwrap_or_else(PoisonError::into_inner)
}
