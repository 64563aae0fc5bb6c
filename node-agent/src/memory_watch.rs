//! Keeps a member's weights within the memory that the machine can spare, for as long as the member runs.
//!
//! Decides the budget: the memory available now (page cache counts as available, and so does what the weights themselves take), less a
//! reserve for the machine's owner. It gives memory back at once and takes it again slowly. While memory is short, weights are read from
//! disk again; nothing else changes.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use prima_crds::v1alpha1::node_profile::{Os, usual_reserve_bytes};
use prima_engine::{Residency, ResidencyStatus};

use crate::available_memory::{self, MemoryError, MemoryNow};
use crate::process_stat;

/// Watches until it is dropped.
pub struct MemoryWatch {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
    pressure: Pressure,
}

/// How much available memory has fallen since the watch began, as a share of all memory: the paper's memory pressure. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Pressure(Arc<AtomicU64>);

/// What the owner and other members leave to the weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryLimits {
    /// Stays free; by default the usual share of what is available at the start.
    pub reserve_bytes: Option<u64>,
    /// Weights and their buffers take at most this, however much is available; a draft model, too.
    pub cap_bytes: Option<u64>,
    /// Of this member's part, what is left to its draft model.
    pub draft_bytes: u64,
    /// Members that share this machine's memory evenly, including this one.
    pub members: u64,
}

/// How often the watch looks: another program that needs memory waits at most this long for it.
const INTERVAL: Duration = Duration::from_millis(250);
/// How many looks in a row must find room before weights take some of it.
const LOOKS_BEFORE_GROWTH: u32 = 20;
/// Fraction (1/n) of all weights that comes back at a time.
const GROWTH: u64 = 16;
/// Fraction (1/n) of the available memory by which the reserve grows, up to a quarter of it.
const OVERPROMISED: u64 = 64;
/// Page faults that had to read, between two looks. More of them mean that the system has taken away weights that were to stay.
const FAULTS: u64 = 32;
/// How many looks in a row must find programs waiting for memory: a program that starts or loads something also waits
/// for a moment.
const STALLED_LOOKS: u32 = 3;
/// If programs wait for memory for more than this share of the time, there is less of it than the kernel says.
const STALLED_PERCENT: u64 = 10;

impl MemoryWatch {
    /// Where the system does not tell how much memory is available, all weights stay in the page cache, which the system
    /// manages.
    ///
    /// # Errors
    /// A system that refuses a thread.
    pub fn start(residency: Residency, limits: MemoryLimits) -> io::Result<MemoryWatch> {
        let (stop, stopped) = mpsc::channel();
        let pressure = Pressure::default();
        let told = pressure.clone();
        let thread = thread::Builder::new()
            .name("memory".into())
            .spawn(move || {
                if let Err(error) = watch(&residency, limits, &told, &stopped) {
                    let error = prima_crds::error_chain(&error);
                    tracing::warn!(
                        error,
                        "weights are left to the page cache, however short memory is"
                    );
                }
            })?;
        Ok(MemoryWatch {
            stop: Some(stop),
            thread: Some(thread),
            pressure,
        })
    }

    pub fn pressure(&self) -> &Pressure {
        &self.pressure
    }
}

impl Pressure {
    /// In millionths.
    pub fn ppm(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn tell(&self, before: MemoryNow, now: MemoryNow) {
        let fall = u128::from(before.available.saturating_sub(now.available));
        let ppm = fall * 1_000_000 / u128::from(before.total.max(1));
        self.0.store(ppm as u64, Ordering::Relaxed);
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic in it has been printed.
            let _ = thread.join();
        }
    }
}

/// Runs until it is told to stop.
fn watch(
    residency: &Residency,
    limits: MemoryLimits,
    pressure: &Pressure,
    stopped: &mpsc::Receiver<()>,
) -> Result<(), MemoryError> {
    let memory = || available_memory::read(Path::new("/"), Os::Linux);
    let at_first = memory()?;
    let mut governor = Governor::new(limits, at_first.available);
    let mut before = Counters::read();
    loop {
        let now = memory()?;
        pressure.tell(at_first, now);
        let look = before.look(Counters::read(), now.available);
        let status = residency.status();
        if look.taken {
            residency.were_taken();
        }
        if let Some(bytes) = governor.budget(&look, &status) {
            tracing::debug!(bytes, ?look, ?status, "another budget for weights");
            residency.set_budget(bytes);
        }
        let pause = match residency.warm(INTERVAL) {
            true => Duration::ZERO,
            false => INTERVAL,
        };
        // Reads up to here were on purpose and do not count.
        before = Counters::read();
        match stopped.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// Counters that only grow.
#[derive(Clone, Copy)]
struct Counters {
    /// How long some program waited for memory, in microseconds.
    stalled: u64,
    /// Page faults of this process that had to read.
    major_faults: u64,
}

/// What a look at the machine found.
#[derive(Clone, Copy, Debug)]
struct Look {
    available: u64,
    /// Programs wait for memory.
    stalled: bool,
    /// Weights that were to stay had to be read again.
    taken: bool,
}

/// Decides the budget. Pure.
struct Governor {
    /// Grows when it turns out that less memory is available than the kernel says.
    reserve: u64,
    cap: u64,
    draft: u64,
    members: u64,
    /// Looks in a row that found room (`roomy`) or programs waiting (`stalled`).
    roomy: u32,
    stalled: u32,
}

impl Governor {
    fn new(limits: MemoryLimits, available: u64) -> Governor {
        Governor {
            reserve: limits
                .reserve_bytes
                .unwrap_or_else(|| usual_reserve_bytes(available, false)),
            cap: limits.cap_bytes.unwrap_or(u64::MAX),
            draft: limits.draft_bytes,
            members: limits.members.max(1),
            roomy: 0,
            stalled: 0,
        }
    }

    /// The new budget for weights and their buffers, if it should change.
    fn budget(&mut self, look: &Look, now: &ResidencyStatus) -> Option<u64> {
        let used = now.resident_bytes + now.buffer_bytes;
        let weights = now.resident_bytes + now.streamed_bytes;
        // What is this process's own is in use, so the kernel does not count it as available.
        let promised = look.available + now.own_bytes;
        if now.streamed_bytes > 0 && look.taken {
            self.reserve +=
                (promised / OVERPROMISED).min(promised / 4 - (promised / 4).min(self.reserve));
        }
        let part = (promised.saturating_sub(self.reserve) / self.members).min(self.cap);
        let mut room = part.saturating_sub(self.draft);
        self.stalled = match look.stalled {
            true => self.stalled + 1,
            false => 0,
        };
        if self.stalled >= STALLED_LOOKS {
            // Not less and less for ever: a program may wait because of its own limit, which nothing here can lift.
            room = room.min((used - used / GROWTH).max(room / 4 * 3));
        }
        if room < used {
            self.roomy = 0;
            return Some(room);
        }
        let step = weights / GROWTH;
        if now.streamed_bytes == 0 || (room < used + step && room < weights) {
            self.roomy = 0;
            return None;
        }
        self.roomy += 1;
        if self.roomy < LOOKS_BEFORE_GROWTH {
            return None;
        }
        self.roomy = 0;
        Some(room.min(used + step))
    }
}

impl Counters {
    /// 0 where the kernel does not count.
    fn read() -> Counters {
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        Counters {
            stalled: total_of_some(&text("/proc/pressure/memory")).unwrap_or(0),
            major_faults: major_faults_of(&text("/proc/self/stat")).unwrap_or(0),
        }
    }

    fn look(self, now: Counters, available: u64) -> Look {
        let stalled = now.stalled.saturating_sub(self.stalled);
        Look {
            available,
            stalled: stalled * 100 > INTERVAL.as_micros() as u64 * STALLED_PERCENT,
            taken: now.major_faults.saturating_sub(self.major_faults) > FAULTS,
        }
    }
}

/// The total of the line `some` of /proc/pressure/memory (<https://docs.kernel.org/accounting/psi.html>).
fn total_of_some(pressure: &str) -> Option<u64> {
    let some = pressure
        .lines()
        .find_map(|line| line.strip_prefix("some "))?;
    some.rsplit_once("total=")?.1.trim().parse().ok()
}

/// majflt, field 12 of /proc/PID/stat.
fn major_faults_of(stat: &str) -> Option<u64> {
    process_stat::field(stat, 12)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    fn status(resident: u64, streamed: u64, buffers: u64) -> ResidencyStatus {
        ResidencyStatus {
            resident_bytes: resident * MB,
            streamed_bytes: streamed * MB,
            buffer_bytes: buffers * MB,
            own_bytes: buffers * MB,
            ..ResidencyStatus::default()
        }
    }

    fn governor(available: u64) -> Governor {
        let limits = MemoryLimits {
            members: 1,
            ..MemoryLimits::default()
        };
        Governor::new(limits, available * MB)
    }

    fn look(available: u64, stalled: bool, taken: bool) -> Look {
        Look {
            available: available * MB,
            stalled,
            taken,
        }
    }

    #[test]
    fn what_the_system_takes_it_gets() {
        let mut governor = governor(6400);
        let now = status(6000, 2000, 48);
        let budget = governor
            .budget(&look(6400 - 48, false, true), &now)
            .unwrap();
        assert_eq!(budget, (6400 - 320 - 100) * MB);
        for _ in 0..100 {
            let (all, buffers) = (8000, 48);
            let now = status(budget / MB - buffers, all - budget / MB, buffers);
            governor.budget(&look(6400 - buffers, false, true), &now);
        }
        assert_eq!(governor.reserve, 1600 * MB);
        let stat = "7 (a) b 1) S 1 7 7 0 -1 4194560 100 0 55 0 33 9 0 0 20 0 1 0 100 1 1";
        assert_eq!(major_faults_of(stat), Some(55));
    }

    #[test]
    fn pressure_is_the_fall_of_what_is_available() {
        let now = |available| MemoryNow {
            total: 8000 * MB,
            available: available * MB,
            swappable: 0,
        };
        let pressure = Pressure::default();
        pressure.tell(now(6000), now(5600));
        assert_eq!(pressure.ppm(), 50_000);
        pressure.tell(now(6000), now(7000));
        assert_eq!(pressure.ppm(), 0);
    }

    #[test]
    fn weights_that_fit_are_left_alone() {
        let mut governor = governor(2000);
        assert_eq!(
            governor.budget(&look(2000, false, false), &status(1800, 0, 0)),
            None
        );
    }

    #[test]
    fn what_is_available_less_the_reserve_is_given_at_once() {
        let mut governor = governor(2000);
        let budget = governor.budget(&look(2000, false, false), &status(4000, 0, 0));
        assert_eq!(budget, Some(1900 * MB));
        // The buffers are not counted as available.
        let budget = governor.budget(&look(1500, false, false), &status(1868, 2132, 32));
        assert_eq!(budget, Some(1432 * MB));
    }

    #[test]
    fn memory_comes_back_slowly() {
        let mut governor = governor(2000);
        let now = status(1368, 2632, 32);
        for _ in 1..LOOKS_BEFORE_GROWTH {
            assert_eq!(governor.budget(&look(3000, false, false), &now), None);
        }
        assert_eq!(
            governor.budget(&look(3000, false, false), &now),
            Some(1650 * MB)
        );
        // A look in between that finds no room restarts the count.
        assert_eq!(governor.budget(&look(3000, false, false), &now), None);
        assert_eq!(governor.budget(&look(1500, false, false), &now), None);
        for _ in 1..LOOKS_BEFORE_GROWTH {
            assert_eq!(governor.budget(&look(3000, false, false), &now), None);
        }
        assert!(governor.budget(&look(3000, false, false), &now).is_some());
    }

    #[test]
    fn programs_that_wait_for_memory_are_made_room_for() {
        let mut governor = governor(3000);
        for _ in 1..STALLED_LOOKS {
            let budget = governor.budget(&look(2000, true, false), &status(1600, 0, 0));
            assert_eq!(budget, None);
        }
        let budget = governor.budget(&look(2000, true, false), &status(1600, 0, 0));
        assert_eq!(budget, Some(1500 * MB));
        // Three quarters of what there is remain.
        let budget = governor.budget(&look(2000, true, false), &status(1350, 250, 0));
        assert_eq!(budget, None);
        assert_eq!(
            total_of_some("some avg10=0.00 avg60=0.00 avg300=0.00 total=42\nfull total=7\n"),
            Some(42)
        );
        assert_eq!(total_of_some(""), None);
    }

    #[test]
    fn owner_and_other_members_have_their_part() {
        let limits = MemoryLimits {
            reserve_bytes: Some(500 * MB),
            members: 3,
            ..MemoryLimits::default()
        };
        let mut governor = Governor::new(limits, 2000 * MB);
        let budget = governor.budget(&look(2000, false, false), &status(4000, 0, 0));
        assert_eq!(budget, Some(500 * MB));
    }

    #[test]
    fn a_draft_model_has_its_place_in_one_members_part() {
        let limits = MemoryLimits {
            reserve_bytes: Some(500 * MB),
            draft_bytes: 200 * MB,
            members: 3,
            ..MemoryLimits::default()
        };
        let budget = |limits| {
            let mut governor = Governor::new(limits, 2000 * MB);
            governor.budget(&look(2000, false, false), &status(4000, 0, 0))
        };
        assert_eq!(budget(limits), Some(300 * MB));
        let capped = MemoryLimits {
            cap_bytes: Some(250 * MB),
            ..limits
        };
        assert_eq!(budget(capped), Some(50 * MB));
    }

    #[test]
    fn no_more_is_taken_than_the_owner_allows() {
        let limits = MemoryLimits {
            cap_bytes: Some(300 * MB),
            members: 1,
            ..MemoryLimits::default()
        };
        let mut governor = Governor::new(limits, 2000 * MB);
        let budget = governor.budget(&look(2000, false, false), &status(400, 0, 0));
        assert_eq!(budget, Some(300 * MB));
        let fits = status(268, 132, 32);
        for _ in 0..2 * LOOKS_BEFORE_GROWTH {
            assert_eq!(governor.budget(&look(2000, false, false), &fits), None);
        }
    }
}
