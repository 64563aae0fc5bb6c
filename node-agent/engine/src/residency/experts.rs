//! Experts of which memory does not hold all: which stay, and how the others are read when a token needs them.
//!
//! The unit is one expert: its gate, up and down, each a range of the file, read by several threads at once. Those that stay lie in the page
//! cache, in this process's map, as other weights do: the system counts that memory as available, and may take it at once. Each
//! layer has so many experts there, and gives up the one that was used longest ago: one list for all layers would be flushed by their
//! cyclic order. Those that were used again since they came have four fifths of the room: most that come are used once. A pass that needs more
//! experts of a layer than it holds, as the chunks of a prompt do, reads the missing ones through a few buffers and displaces nothing.
//! Experts that are there are computed with while the others are read. While all fit, nothing is given up.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use prima_model::TensorRows;

use super::expert_reader::{ExpertReader, Job, Memory, PartRead};
use super::plan::PAGE;
use crate::error::EngineError;
use crate::mapped_weights::MappedModel;

/// The experts of one layer in the file: gate, up and down of each.
#[derive(Clone, Debug)]
pub struct LayerExperts {
    /// The layer's number in the model.
    pub layer: usize,
    pub count: usize,
    /// Where the first expert's begins, and how many bytes each has.
    pub parts: [(u64, usize); 3],
}

/// An expert that passes through memory.
pub struct PassingExpert {
    buffers: [MmapMut; 3],
}

/// Experts by layer, under a budget.
pub struct ExpertCache {
    layers: Vec<LayerExperts>,
    /// A layer's place in `layers`, by where its first part begins.
    by_offset: HashMap<u64, usize>,
    /// Bytes of the buffers that experts pass through which do not stay.
    transit: [usize; 3],
    state: Mutex<State>,
    /// Held by the pass that reads: the memory that experts pass through is for one.
    turn: Mutex<()>,
    reader: ExpertReader,
}

/// Sums since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertReadings {
    /// How often an expert that a pass needed was held in memory, and how often it was not.
    pub hits: u64,
    pub misses: u64,
    pub bytes: u64,
    /// How long computing waited.
    pub waited: Duration,
}

/// Memory that experts take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertMemory {
    /// Of experts that may stay.
    pub resident_bytes: u64,
    /// Of all experts, those that may not, in millionths.
    pub missing_ppm: u64,
    /// For experts that pass through.
    pub buffer_bytes: u64,
    /// Of the latter, what this process has now.
    pub own_bytes: u64,
}

#[derive(Default)]
struct State {
    /// `None`: all may stay.
    held: Option<Vec<Held>>,
    /// Free ones of the buffers that experts pass through.
    free: Vec<PassingExpert>,
    /// How many of them exist.
    passing: usize,
    /// Counts uses.
    now: u64,
    readings: ExpertReadings,
}

/// What a layer has in memory.
#[derive(Default)]
struct Held {
    capacity: usize,
    experts: HashMap<u32, Uses>,
}

#[derive(Default)]
struct Uses {
    /// When it was used last.
    last: u64,
    /// Whether it was used again since it came.
    again: bool,
}

/// An expert that a pass needs and that is not there.
struct Missing {
    /// Its place among those that are needed.
    index: usize,
    expert: u32,
    /// Whether it stays afterwards, and which one leaves for it.
    stays: bool,
    leaves: Option<u32>,
    parts_left: usize,
    failed: bool,
}

/// The part of a layer's room that is for experts which were used again since they came. (A segmented LRU: Karedla, Love, Wherry 1994.)
const PROTECTED: f64 = 0.8;
/// By which the ways of reading are compared.
const EXPERTS_TO_COMPARE: usize = 8;
/// Memory for experts that pass through, and the fewest and the most of them.
const TRANSIT_BYTES: usize = 96 << 20;
const TRANSIT: Range<usize> = 2..8;

impl LayerExperts {
    pub fn of(layer: usize, experts: &prima_model::Experts) -> LayerExperts {
        let part = |rows: &TensorRows| {
            let bytes = rows.bytes.end - rows.bytes.start;
            (rows.bytes.start, bytes as usize / experts.count)
        };
        LayerExperts {
            layer,
            count: experts.count,
            parts: experts.matrices().map(part),
        }
    }

    fn range(&self, expert: u32, part: usize) -> Range<u64> {
        let (first, bytes) = self.parts[part];
        let start = first + u64::from(expert) * bytes as u64;
        start..start + bytes as u64
    }

    /// Of gate, up and down.
    fn ranges(&self, expert: u32) -> impl Iterator<Item = Range<u64>> {
        (0..self.parts.len()).map(move |part| self.range(expert, part))
    }

    /// The most memory that one takes: parts begin and end inside of pages.
    fn memory_bytes(&self) -> usize {
        let page = rustix::param::page_size();
        let bytes = self
            .parts
            .iter()
            .map(|(_, bytes)| bytes.next_multiple_of(page) + page);
        bytes.sum()
    }

    fn bytes(&self) -> u64 {
        let one: usize = self.parts.iter().map(|(_, bytes)| bytes).sum();
        (self.count * one) as u64
    }
}

impl PassingExpert {
    /// The bytes of `expert` of `layer`: gate, up and down.
    pub fn parts(&self, layer: &LayerExperts, expert: u32) -> [&[u8]; 3] {
        [0, 1, 2].map(|part| {
            let range = layer.range(expert, part);
            let skip = (range.start % PAGE as u64) as usize;
            &self.buffers[part][skip..][..(range.end - range.start) as usize]
        })
    }
}

/// Of a part of so many bytes, which may begin and end inside of a page.
fn buffer_bytes(part: usize) -> usize {
    part.next_multiple_of(PAGE) + PAGE
}

impl ExpertCache {
    /// A cache of the experts of `layers`, which are in `map`; at first, all may stay.
    ///
    /// # Errors
    /// [`EngineError::ReadAhead`] when a file cannot be opened again or the system refuses a thread.
    pub fn start(map: MappedModel, layers: Vec<LayerExperts>) -> Result<ExpertCache, EngineError> {
        let largest = |part: usize| {
            let bytes = layers.iter().map(|layer| buffer_bytes(layer.parts[part].1));
            bytes.max().unwrap_or(0)
        };
        let places = layers.iter().enumerate();
        Ok(ExpertCache {
            by_offset: places
                .map(|(place, layer)| (layer.parts[0].0, place))
                .collect(),
            transit: [0, 1, 2].map(largest),
            layers,
            state: Mutex::default(),
            turn: Mutex::default(),
            reader: ExpertReader::start(map)?,
        })
    }

    /// Of all experts.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(LayerExperts::bytes).sum()
    }

    /// What experts that pass through need.
    pub fn buffer_bytes(&self) -> u64 {
        (self.most_passing() * self.transit.iter().sum::<usize>()) as u64
    }

    pub fn readings(&self) -> ExpertReadings {
        self.lock().readings
    }

    pub fn memory(&self) -> ExpertMemory {
        let state = self.lock();
        let Some(held) = &state.held else {
            return ExpertMemory {
                resident_bytes: self.bytes(),
                ..ExpertMemory::default()
            };
        };
        let layers = held.iter().zip(&self.layers);
        let resident = layers.map(|(held, layer)| held.capacity * layer.memory_bytes());
        let passing = state.passing * self.transit.iter().sum::<usize>();
        let stay: usize = held.iter().map(|held| held.capacity).sum();
        let all: usize = self.layers.iter().map(|layer| layer.count).sum();
        ExpertMemory {
            missing_ppm: ((all - stay) * 1_000_000 / all.max(1)) as u64,
            resident_bytes: (resident.sum::<usize>() as u64).min(self.bytes()),
            buffer_bytes: self.buffer_bytes(),
            own_bytes: passing as u64,
        }
    }

    /// Whether all may stay.
    pub fn holds_all(&self) -> bool {
        self.lock().held.is_none()
    }

    /// From now on, all may stay.
    pub fn hold_all(&self) {
        let mut state = self.lock();
        state.held = None;
        state.passing -= state.free.len();
        state.free.clear();
    }

    /// From now on, experts that stay take `bytes` of memory. Those that no longer stay are released before this returns, as far as no pass computes
    /// with them.
    pub fn hold(&self, bytes: u64) {
        let capacities = capacities(&self.layers, bytes);
        if self.holds_all() {
            // What is there need not be read: an earlier process used it, or it has just been fetched. Which of it was used most is not known. (A
            // large page that two experts share stays until the system takes it.)
            let layers = self.layers.iter().zip(capacities);
            let held = layers.map(|(layer, capacity)| Held {
                capacity,
                experts: self.keep_cached(layer, capacity),
            });
            let held: Vec<Held> = held.collect();
            self.compare_ways_of_reading(&held);
            self.lock().held = Some(held);
            return;
        }
        // Under the lock, so that no pass reads one again before it is released.
        let mut state = self.lock();
        let held = state.held.iter_mut().flatten();
        for ((held, layer), capacity) in held.zip(&self.layers).zip(capacities) {
            held.capacity = capacity;
            while held.experts.len() > held.capacity
                && let Some(expert) = held.give_up_oldest(u64::MAX)
            {
                self.release(layer, expert);
            }
        }
    }

    /// Forgets experts that the system has taken from the page cache, so that they are read as any other that is missing; and gives up the memory of
    /// those that are not held, which the system has read around other weights. Returns false while a pass reads.
    pub fn tidy(&self) -> bool {
        let Ok(_turn) = self.turn.try_lock() else {
            return false;
        };
        for (held, layer) in self.lock().held.iter_mut().flatten().zip(&self.layers) {
            held.experts.retain(|&expert, _| {
                let mut ranges = layer.ranges(expert);
                !ranges.any(|range| self.reader.is_cached(range) == Some(false))
            });
            self.release_all_but(&held.experts, layer);
        }
        true
    }

    /// Of a layer's experts that the page cache has, as many as there is room for. The memory of all others is given up.
    fn keep_cached(&self, layer: &LayerExperts, room: usize) -> HashMap<u32, Uses> {
        let is_cached = |expert: &u32| {
            let mut ranges = layer.ranges(*expert);
            ranges.all(|range| self.reader.is_cached(range) == Some(true))
        };
        let kept: HashMap<u32, Uses> = (0..layer.count as u32)
            .filter(is_cached)
            .take(room)
            .map(|expert| (expert, Uses::default()))
            .collect();
        self.release_all_but(&kept, layer);
        for range in kept.keys().flat_map(|expert| layer.ranges(*expert)) {
            self.reader.keep_cached(range);
        }
        kept
    }

    /// Gives up the memory of experts that are not among these.
    fn release_all_but(&self, held: &HashMap<u32, Uses>, layer: &LayerExperts) {
        let count = layer.count as u32;
        for part in 0..layer.parts.len() {
            // Runs of experts, with the pages that they share.
            let mut first = 0;
            let ends = (0..count).filter(|expert| held.contains_key(expert));
            for end in ends.chain([count]) {
                if first < end {
                    let last = layer.range(end - 1, part).end;
                    self.reader.release(layer.range(first, part).start..last);
                }
                first = end + 1;
            }
        }
    }

    /// Gives up the memory of an expert.
    fn release(&self, layer: &LayerExperts, expert: u32) {
        for range in layer.ranges(expert) {
            self.reader.release(range);
        }
    }

    /// By experts that are not held: what is in memory can be read neither way.
    fn compare_ways_of_reading(&self, held: &[Held]) {
        // Of different layers, as far as there are some.
        let experts = (0..EXPERTS_TO_COMPARE).flat_map(|expert| {
            let layers = self.layers.iter().zip(held);
            layers.filter_map(move |(layer, held)| {
                let mut others = (0..layer.count as u32)
                    .rev()
                    .filter(|other| !held.experts.contains_key(other));
                let other = others.nth(expert)?;
                Some(layer.range(other, 0))
            })
        });
        let ranges: Vec<Range<u64>> = experts.take(EXPERTS_TO_COMPARE).collect();
        self.reader.compare(&ranges, self.transit[0]);
    }

    /// The number of the layer whose first part begins at `offset`.
    pub fn layer_at(&self, offset: u64) -> Option<usize> {
        let place = self.by_offset.get(&offset)?;
        Some(self.layers[*place].layer)
    }

    /// Calls `work` with the experts that `needed` names (in order, of the layer whose first part begins at `offset`), several at a time, by
    /// their place in `needed`, until it had each once; without a buffer, they are in the map. Returns false, and does nothing, if all may stay.
    ///
    /// # Errors
    /// What could not be read, by where it begins, and why.
    pub fn each(
        &self,
        offset: u64,
        needed: &[u32],
        mut work: impl FnMut(&LayerExperts, &[(usize, Option<&PassingExpert>)]),
    ) -> Result<bool, (u64, io::Error)> {
        let Some(&place) = self.by_offset.get(&offset) else {
            return Ok(false);
        };
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((ready, missing)) = self.lock().sort_out(place, needed) else {
            return Ok(false);
        };
        let (reply, replies) = mpsc::channel();
        let mut pass = Pass {
            cache: self,
            place,
            layer: &self.layers[place],
            missing,
            reading: HashMap::new(),
            reply,
            replies,
            error: None,
        };
        pass.begin_reads();
        if !ready.is_empty() {
            let experts: Vec<_> = ready.into_iter().map(|index| (index, None)).collect();
            work(pass.layer, &experts);
        }
        while !pass.reading.is_empty() {
            let read = pass.wait();
            if !read.is_empty() {
                let experts: Vec<_> = read
                    .iter()
                    .map(|(missing, passing)| (missing.index, passing.as_ref()))
                    .collect();
                work(pass.layer, &experts);
            }
            pass.put_back(read);
            pass.begin_reads();
        }
        match pass.error {
            None => Ok(true),
            Some(error) => Err(error),
        }
    }

    fn most_passing(&self) -> usize {
        let one: usize = self.transit.iter().sum();
        (TRANSIT_BYTES / one.max(1)).clamp(TRANSIT.start, TRANSIT.end)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many experts of each layer stay in `bytes`: the same share of each layer. Some layers have one more, until the room is used up. So a little
/// more room is of use also where a layer has few.
fn capacities(layers: &[LayerExperts], bytes: u64) -> Vec<usize> {
    let count: usize = layers.iter().map(|layer| layer.count).sum();
    let share_out = |experts: usize| {
        let (mut seen, mut given) = (0, 0);
        let capacities = layers.iter().map(|layer| {
            seen += layer.count;
            let before = given;
            given = experts * seen / count;
            given - before
        });
        capacities.collect::<Vec<usize>>()
    };
    let fits = |capacities: &Vec<usize>| {
        let each = capacities.iter().zip(layers);
        each.map(|(capacity, layer)| (capacity * layer.memory_bytes()) as u64)
            .sum::<u64>()
            <= bytes
    };
    let smallest = layers.iter().map(LayerExperts::memory_bytes).min();
    let most = bytes as usize / smallest.unwrap_or(1).max(1);
    let few = (0..=most.min(count)).rev().map(share_out).find(fits);
    few.unwrap_or_default()
}

/// Experts that are there, by their place among those needed; and those that are not.
type SortedOut = (Vec<usize>, VecDeque<Missing>);

impl State {
    /// Of the experts that are `needed` in a layer, which are there; `None`: all may be. For what is missing others have made room, as far as it
    /// stays.
    fn sort_out(&mut self, place: usize, needed: &[u32]) -> Option<SortedOut> {
        let held = self.held.as_mut()?.get_mut(place)?;
        self.now += 1;
        let now = self.now;
        let passes_through = needed.len() > held.capacity;
        let (mut ready, mut absent) = (Vec::new(), Vec::new());
        for (index, &expert) in needed.iter().enumerate() {
            match held.experts.get_mut(&expert) {
                Some(own) => {
                    if !passes_through {
                        *own = Uses {
                            last: now,
                            again: true,
                        };
                    }
                    ready.push(index);
                }
                None => absent.push((index, expert)),
            }
        }
        self.readings.hits += ready.len() as u64;
        self.readings.misses += absent.len() as u64;
        let mut room = held.capacity.saturating_sub(held.experts.len());
        let missing = absent.into_iter().map(|(index, expert)| {
            let stays = room > 0 || !passes_through;
            let leaves = match room {
                0 if stays => held.give_up_oldest(now),
                _ => None,
            };
            room = room.saturating_sub(1);
            Missing {
                index,
                expert,
                stays,
                leaves,
                parts_left: 3,
                failed: false,
            }
        });
        let missing = missing.collect();
        Some((ready, missing))
    }
}

impl Held {
    /// The expert that was used longest ago, before `now`, is no longer held: of those that were not used again since they came, unless others
    /// have more than their part.
    fn give_up_oldest(&mut self, now: u64) -> Option<u32> {
        let protected = self.experts.values().filter(|own| own.again).count();
        let too_many = protected as f64 > PROTECTED * self.capacity as f64;
        let ages = self.experts.iter().filter(|(_, own)| own.last < now);
        let oldest = ages.map(|(&expert, own)| (own.again != too_many, own.last, expert));
        let (.., oldest) = oldest.min()?;
        self.experts.remove(&oldest).map(|_| oldest)
    }
}

/// What one pass through a layer reads.
struct Pass<'a> {
    cache: &'a ExpertCache,
    place: usize,
    layer: &'a LayerExperts,
    /// Not begun. Those that stay come first.
    missing: VecDeque<Missing>,
    reading: HashMap<usize, (Missing, [Option<MmapMut>; 3])>,
    reply: Sender<PartRead>,
    replies: Receiver<PartRead>,
    /// The first; after it, nothing more is begun.
    error: Option<(u64, io::Error)>,
}

impl Pass<'_> {
    /// Begins as many reads as there is memory for.
    fn begin_reads(&mut self) {
        while let Some(next) = self.missing.front() {
            let mut buffers = [None, None, None];
            if !next.stays {
                let mut state = self.cache.lock();
                match state.free.pop() {
                    Some(passing) => buffers = passing.buffers.map(Some),
                    None if state.passing < self.cache.most_passing() => state.passing += 1,
                    None => return,
                }
            }
            let Some(missing) = self.missing.pop_front() else {
                return;
            };
            let jobs = buffers.into_iter().enumerate().map(|(part, buffer)| Job {
                index: missing.index,
                part,
                range: self.layer.range(missing.expert, part),
                memory: match missing.stays {
                    true => Memory::Kept {
                        leaves: missing.leaves.map(|expert| self.layer.range(expert, part)),
                    },
                    false => Memory::Passing {
                        buffer,
                        bytes: self.cache.transit[part],
                    },
                },
                reply: self.reply.clone(),
            });
            self.cache.reader.begin(jobs);
            let index = missing.index;
            self.reading.insert(index, (missing, [None, None, None]));
        }
    }

    /// Waits for an expert; returns all that were read by then, in the order of `needed`.
    fn wait(&mut self) -> Vec<(Missing, Option<PassingExpert>)> {
        let begun = Instant::now();
        let mut read = Vec::new();
        let mut bytes = 0;
        while !self.reading.is_empty() {
            let next = match read.is_empty() {
                // Every read is answered, whatever becomes of it.
                true => self.replies.recv().ok(),
                false => self.replies.try_recv().ok(),
            };
            let Some(PartRead {
                index,
                part,
                result,
            }) = next
            else {
                break;
            };
            let Some((missing, buffers)) = self.reading.get_mut(&index) else {
                continue;
            };
            match result {
                Ok((buffer, count)) => {
                    bytes += count as u64;
                    buffers[part] = buffer;
                }
                Err(error) => {
                    missing.failed = true;
                    let at = self.layer.range(missing.expert, part).start;
                    self.error.get_or_insert((at, error));
                    self.missing.clear();
                }
            }
            missing.parts_left -= 1;
            if missing.parts_left > 0 {
                continue;
            }
            if let Some((missing, buffers)) = self.reading.remove(&index) {
                let passing = match buffers {
                    [Some(gate), Some(up), Some(down)] => Some(PassingExpert {
                        buffers: [gate, up, down],
                    }),
                    _ => None,
                };
                match missing.failed {
                    false => read.push((missing, passing)),
                    true if missing.stays => self.cache.release(self.layer, missing.expert),
                    true => self.cache.lock().passing -= 1,
                }
            }
        }
        let readings = &mut self.cache.lock().readings;
        readings.bytes += bytes;
        readings.waited += begun.elapsed();
        read.sort_unstable_by_key(|(missing, _)| missing.index);
        read
    }

    /// What stays is held from now on; the memory of the others is free.
    fn put_back(&mut self, read: Vec<(Missing, Option<PassingExpert>)>) {
        let mut state = self.cache.lock();
        let now = state.now;
        for (missing, passing) in read {
            match (&mut state.held, missing.stays) {
                (Some(held), true) => {
                    let held = &mut held[self.place];
                    let is_held = held.experts.contains_key(&missing.expert);
                    match is_held || held.experts.len() < held.capacity {
                        true => {
                            let own = Uses {
                                last: now,
                                again: false,
                            };
                            held.experts.insert(missing.expert, own);
                        }
                        // There is less room than when it was read.
                        false => self.cache.release(self.layer, missing.expert),
                    }
                }
                (None, true) => {}
                (Some(_), false) => state.free.extend(passing),
                (None, false) => state.passing -= 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(held: &mut Held, expert: u32, now: u64) {
        match held.experts.get_mut(&expert) {
            Some(own) => (own.last, own.again) = (now, true),
            None => {
                if held.experts.len() == held.capacity {
                    held.give_up_oldest(now);
                }
                let own = Uses {
                    last: now,
                    again: false,
                };
                held.experts.insert(expert, own);
            }
        }
    }

    fn after(capacity: usize, uses: &[u32]) -> Vec<u32> {
        let mut held = Held {
            capacity,
            ..Held::default()
        };
        for (expert, now) in uses.iter().zip(1..) {
            used(&mut held, *expert, now);
        }
        let mut experts: Vec<u32> = held.experts.into_keys().collect();
        experts.sort_unstable();
        experts
    }

    #[test]
    fn room_is_shared_out_to_the_last_expert() {
        let layer = |layer| LayerExperts {
            layer,
            count: 8,
            // Every third layer has larger ones.
            parts: [4000, 4000, if layer % 3 == 0 { 9000 } else { 4000 }].map(|bytes| (0, bytes)),
        };
        let layers: Vec<LayerExperts> = (0..6).map(layer).collect();
        let memory = |capacities: &[usize]| {
            let each = capacities.iter().zip(&layers);
            let each = each.map(|(capacity, layer)| capacity * layer.memory_bytes());
            each.sum::<usize>()
        };
        let (all, largest) = (memory(&[8; 6]), layers[0].memory_bytes());
        for room in (0..all).step_by(1000) {
            let capacities = capacities(&layers, room as u64);
            let taken = memory(&capacities);
            assert!(
                taken <= room && room < taken + 2 * largest,
                "{capacities:?}"
            );
            let (least, most) = (capacities.iter().min(), capacities.iter().max());
            assert!(
                most <= least.map(|least| least + 1).as_ref(),
                "{capacities:?}"
            );
        }
    }

    #[test]
    fn experts_that_were_used_again_outlast_those_used_once() {
        // 1 came back; then others pass by, once each.
        assert_eq!(after(5, &[1, 1, 2, 3, 4, 5, 6, 7, 8]), [1, 5, 6, 7, 8]);
        // All came back, which is more than their part: the oldest of them goes, and then what was used once.
        let all = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5];
        assert_eq!(after(5, &[&all[..], &[6]].concat()), [2, 3, 4, 5, 6]);
        assert_eq!(after(5, &[&all[..], &[6, 7]].concat()), [2, 3, 4, 5, 7]);
        // Without a second use, the oldest goes.
        assert_eq!(after(3, &[1, 2, 3, 4, 5]), [3, 4, 5]);
    }
}
