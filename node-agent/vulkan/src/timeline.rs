//! When a GPU computes and copies, and when the processor fills memory that is copied from: how much of that goes on side by side. Noted only
//! where somebody asks.
//!
//! Decides: how the GPU's clock lies to the processor's. What is handed to a queue begins when all that was handed to it before has ended.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ash::vk;

use crate::device::Device;
use crate::error::VulkanError;
use crate::raw_device::RawDevice;

/// Moments for which a timeline has room: beginnings and ends of some thousand parts and pieces.
const MOMENTS: u32 = 1 << 15;
/// How often the two clocks are compared: the closest time counts.
const COMPARISONS: u32 = 8;

/// What went on since a timeline was started: times from then on.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// The GPU computed parts of passes.
    pub computed: Vec<Range<Duration>>,
    /// It copied pieces of memory to itself, beside passes.
    pub copied: Vec<Range<Duration>>,
    /// The processor filled such pieces.
    pub filled: Vec<Range<Duration>>,
    /// How many of these it filled while parts of a pass were handed over that it had not waited for. However fast the GPU is, it did not wait until
    /// that had computed them.
    pub filled_ahead: usize,
    /// The GPU's times may all be too early or too late by so much.
    pub uncertainty: Duration,
    /// Whether it has a queue of its own for what is copied beside passes. Else that waits for kernels.
    pub copies_on_own_queue: bool,
}

impl Timeline {
    /// For how long the GPU copied while it computed.
    pub fn copied_while_computing(&self) -> Duration {
        together(&self.copied, &self.computed)
    }

    /// For how long the processor filled memory while the GPU computed: the least of what comes out where the clocks lie to each other as was
    /// measured, and at both ends of what is possible.
    pub fn filled_while_computing(&self) -> Duration {
        let off = self.uncertainty;
        let shifts: [fn(Duration, Duration) -> Duration; 3] = [
            Duration::saturating_sub,
            |time, _| time,
            Duration::saturating_add,
        ];
        let at = shifts.map(|shift| {
            let computed = self.computed.iter();
            let computed = computed.map(|span| shift(span.start, off)..shift(span.end, off));
            together(&self.filled, &computed.collect::<Vec<_>>())
        });
        at.into_iter().min().unwrap_or_default()
    }
}

/// For how long something of both went on. Within each, one thing follows the other.
fn together(these: &[Range<Duration>], those: &[Range<Duration>]) -> Duration {
    let pairs = these.iter().flat_map(|a| those.iter().map(move |b| (a, b)));
    let both = pairs.map(|(a, b)| a.end.min(b.end).saturating_sub(a.start.max(b.start)));
    both.sum()
}

impl Device {
    /// From now on notes when it computes and copies, instead of what was noted before.
    ///
    /// # Errors
    /// [`VulkanError::Driver`], also where it has no clock; [`VulkanError::Hung`] and [`VulkanError::Lost`], after which it cannot be used.
    pub fn start_timeline(&self) -> Result<(), VulkanError> {
        self.raw().check()?;
        self.raw().timelines.start(self)
    }

    /// Ends the timeline that was started: what has run of it, nothing if there is none.
    ///
    /// # Errors
    /// [`VulkanError::Driver`], [`VulkanError::Hung`], [`VulkanError::Lost`].
    pub fn end_timeline(&self) -> Result<Timeline, VulkanError> {
        let raw = self.raw();
        raw.check()?;
        let running = raw.timelines.lock().running.take();
        match running {
            Some(running) => running.told(self),
            None => Ok(Timeline::default()),
        }
    }
}

/// Of a device.
#[derive(Default)]
pub(crate) struct Timelines(Mutex<State>);

#[derive(Default)]
struct State {
    running: Option<Arc<Running>>,
    /// Of all timelines: commands may refer to them for as long as there is the device.
    queries: Vec<vk::QueryPool>,
}

impl Timelines {
    /// The one that notes, if there is one.
    pub fn running(&self) -> Option<Arc<Running>> {
        self.lock().running.clone()
    }

    fn start(&self, device: &Device) -> Result<(), VulkanError> {
        let raw = device.raw();
        let failed = |result| device.failed("tell when it computes", result);
        let begun = Instant::now();
        let info = vk::QueryPoolCreateInfo::default()
            .query_type(vk::QueryType::TIMESTAMP)
            .query_count(MOMENTS);
        if raw.found.timestamp_bits == 0 {
            return Err(failed(vk::Result::ERROR_FEATURE_NOT_PRESENT));
        }
        // SAFETY: `info` is whole; the pool is destroyed with the device.
        let queries = unsafe { raw.raw.create_query_pool(&info, None) }.map_err(failed)?;
        self.lock().queries.push(queries);
        let clock = Clock::read(raw, queries, begun, device.patience()).map_err(failed)?;
        self.lock().running = Some(Arc::new(Running {
            queries,
            begun,
            clock,
            noted: Mutex::new(Noted {
                taken: COMPARISONS,
                ..Noted::default()
            }),
        }));
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Safety
    /// Nothing of the device runs any more.
    pub unsafe fn destroy(&self, raw: &ash::Device) {
        for pool in self.lock().queries.drain(..) {
            // SAFETY: as the caller promises.
            unsafe { raw.destroy_query_pool(pool, None) };
        }
    }
}

/// A timeline that notes.
pub(crate) struct Running {
    queries: vk::QueryPool,
    begun: Instant,
    clock: Clock,
    noted: Mutex<Noted>,
}

/// Spans of the GPU by the first of their two queries.
#[derive(Default)]
struct Noted {
    /// How many queries are in use.
    taken: u32,
    /// Parts of a pass that were handed over and not waited for.
    not_waited_for: usize,
    filled_ahead: usize,
    computed: Vec<u32>,
    copied: Vec<u32>,
    filled: Vec<Range<Duration>>,
}

/// What commands do.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    Compute,
    Copy,
}

impl Running {
    /// Has the GPU note when it begins with `commands`, which are being recorded. What that is known by at [`ends`](Self::ends); `None` where
    /// there is no more room.
    pub fn begins(&self, raw: &ash::Device, commands: vk::CommandBuffer) -> Option<u32> {
        let first = {
            let mut noted = self.noted();
            let first = noted.taken;
            noted.taken = Some(first + 2).filter(|taken| *taken <= MOMENTS)?;
            first
        };
        self.note(raw, commands, first);
        Some(first)
    }

    /// Has it note when all of them have run.
    pub fn ends(&self, raw: &ash::Device, commands: vk::CommandBuffer, first: u32, work: Work) {
        self.note(raw, commands, first + 1);
        let mut noted = self.noted();
        match work {
            Work::Compute => noted.computed.push(first),
            Work::Copy => noted.copied.push(first),
        }
    }

    fn note(&self, raw: &ash::Device, commands: vk::CommandBuffer, query: u32) {
        let ended = vk::PipelineStageFlags::BOTTOM_OF_PIPE;
        // SAFETY: the commands are being recorded, for a queue that has timestamps; the query was reset, and is written once.
        unsafe { raw.cmd_write_timestamp(commands, ended, self.queries, query) };
    }

    /// Notes that the processor has filled a piece since then.
    pub fn filled(&self, since: Instant) {
        let span = since.duration_since(self.begun)..self.begun.elapsed();
        let mut noted = self.noted();
        noted.filled.push(span);
        noted.filled_ahead += usize::from(noted.not_waited_for > 0);
    }

    /// Notes that so many parts of the pass were handed over and not waited for.
    pub fn handed_over(&self, not_waited_for: usize) {
        self.noted().not_waited_for = not_waited_for;
    }

    fn told(&self, device: &Device) -> Result<Timeline, VulkanError> {
        let noted = self.noted();
        // When, and whether it is known yet.
        let mut moments = vec![[0_u64; 2]; noted.taken as usize];
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WITH_AVAILABILITY;
        let RawDevice { raw, found, .. } = device.raw();
        // SAFETY: the pool has all these queries, and there is room for two numbers of each.
        let read = unsafe { raw.get_query_pool_results(self.queries, 0, &mut moments, flags) };
        if let Err(result) = read
            && result != vk::Result::NOT_READY
        {
            return Err(device.failed("tell when it computed", result));
        }
        let at = |query: u32| {
            let [ticks, is_known] = moments[query as usize];
            (is_known != 0).then(|| self.clock.time(ticks))
        };
        let spans = |firsts: &[u32]| -> Vec<Range<Duration>> {
            let span = |&first: &u32| Some(at(first)?..at(first + 1)?);
            firsts.iter().filter_map(span).collect()
        };
        Ok(Timeline {
            computed: spans(&noted.computed),
            copied: spans(&noted.copied),
            filled: noted.filled.clone(),
            filled_ahead: noted.filled_ahead,
            uncertainty: self.clock.uncertainty,
            copies_on_own_queue: found.upload_queue != (found.queue_family, 0),
        })
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The GPU's.
struct Clock {
    /// Nanoseconds of a tick.
    period: f64,
    /// The bits of a time that count.
    bits: u64,
    /// What it showed so long after the timeline had begun, give or take.
    ticks: u64,
    shown: Duration,
    uncertainty: Duration,
}

impl Clock {
    /// Makes all queries ready, and reads the clock with the first. `TIMEOUT` if that takes longer than `patience`.
    fn read(
        device: &RawDevice,
        queries: vk::QueryPool,
        begun: Instant,
        patience: Duration,
    ) -> Result<Clock, vk::Result> {
        let raw = &device.raw;
        let info =
            vk::CommandPoolCreateInfo::default().queue_family_index(device.found.queue_family);
        // SAFETY: the family is the device's.
        let pool = unsafe { raw.create_command_pool(&info, None) }?;
        let (ticks, shown) = Self::compare(device, pool, queries, patience)?;
        // SAFETY: all of it has run. After a failure it may still, so it then stays, as the device does that is given up.
        unsafe { raw.destroy_command_pool(pool, None) };
        let uncertainty = (shown.end - shown.start) / 2;
        Ok(Clock {
            period: f64::from(device.found.limits.timestamp_period),
            bits: u64::MAX >> (64 - device.found.timestamp_bits.min(64)),
            ticks,
            shown: shown.start.duration_since(begun) + uncertainty,
            uncertainty,
        })
    }

    /// What the clock showed, and since and until when it may have shown that.
    fn compare(
        device: &RawDevice,
        pool: vk::CommandPool,
        queries: vk::QueryPool,
        patience: Duration,
    ) -> Result<(u64, Range<Instant>), vk::Result> {
        let raw = &device.raw;
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(COMPARISONS);
        let begin = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        let ended = vk::PipelineStageFlags::BOTTOM_OF_PIPE;
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT;
        // SAFETY: the pool is the device's; the fence is destroyed below, or stays as the pool does.
        let (commands, fence) = unsafe {
            let commands = raw.allocate_command_buffers(&info)?;
            let fence = raw.create_fence(&vk::FenceCreateInfo::default(), None)?;
            (commands, fence)
        };
        let mut closest: Option<(u64, Range<Instant>)> = None;
        for (commands, query) in commands.into_iter().zip(0..) {
            // SAFETY: they are recorded and run once, each with a query of its own; the first makes all of them ready.
            unsafe {
                raw.begin_command_buffer(commands, &begin)?;
                if query == 0 {
                    raw.cmd_reset_query_pool(commands, queries, 0, MOMENTS);
                }
                raw.cmd_write_timestamp(commands, ended, queries, query);
                raw.end_command_buffer(commands)?;
                raw.reset_fences(&[fence])?;
            }
            let before = Instant::now();
            // SAFETY: the fence was reset, and all is waited for before it is destroyed.
            unsafe { device.submit(device.queue, &[commands], fence) }?;
            device.wait(fence, patience)?;
            let shown = before..Instant::now();
            let mut ticks = [0_u64];
            // SAFETY: there is room for the number of one query.
            unsafe { raw.get_query_pool_results(queries, query, &mut ticks, flags) }?;
            let width = |shown: &Range<Instant>| shown.end - shown.start;
            if closest
                .as_ref()
                .is_none_or(|(_, before)| width(&shown) < width(before))
            {
                closest = Some((ticks[0], shown));
            }
        }
        // SAFETY: nobody waits for it any more.
        unsafe { raw.destroy_fence(fence, None) };
        closest.ok_or(vk::Result::ERROR_UNKNOWN)
    }

    /// When it showed this, since the timeline began.
    fn time(&self, ticks: u64) -> Duration {
        let later = ticks.wrapping_sub(self.ticks) & self.bits;
        self.shown + Duration::from_nanos((later as f64 * self.period) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(spans: &[(u64, u64)]) -> Vec<Range<Duration>> {
        let span = |&(start, end)| Duration::from_micros(start)..Duration::from_micros(end);
        spans.iter().map(span).collect()
    }

    #[test]
    fn what_goes_on_side_by_side_is_added_up() {
        let timeline = Timeline {
            computed: spans(&[(10, 20), (30, 60)]),
            copied: spans(&[(0, 12), (15, 16), (40, 90)]),
            filled: spans(&[(12, 35)]),
            filled_ahead: 1,
            uncertainty: Duration::from_micros(6),
            copies_on_own_queue: true,
        };
        let micros = Duration::from_micros;
        assert_eq!(timeline.copied_while_computing(), micros(2 + 1 + 20));
        // 8 and 5 as it was measured, 2 and 11 with the GPU earlier, 10 and 0 with it later.
        assert_eq!(timeline.filled_while_computing(), micros(10));
        let none = Timeline::default();
        assert_eq!(none.filled_while_computing(), Duration::ZERO);
    }

    #[test]
    fn a_clock_of_few_bits_begins_again() {
        let clock = Clock {
            period: 2.0,
            bits: 0xff,
            ticks: 250,
            shown: Duration::from_nanos(1000),
            uncertainty: Duration::ZERO,
        };
        assert_eq!(clock.time(250), Duration::from_nanos(1000));
        assert_eq!(clock.time(4), Duration::from_nanos(1020));
    }
}
