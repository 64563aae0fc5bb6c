//! How much of the disk fetched models take, and room for more of them.
//!
//! Decides what goes when a model does not fit: what was not used for longest, and nothing that is in use. Refuses what would not fit either
//! if no other model were in use; what would is worth waiting for. And decides when a download that keeps room gives it to those who wait.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use prima_weights::{CacheError, Collected, KeptRoom, LocalFile, Room};
use tokio::task::spawn_blocking;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep};

use super::super::metrics::Established;
use super::{Store, Weights, WeightsError, blocking};

/// Longer than an agent takes to start, or a plan to replace another: by then the files that they need are in use.
const COLLECT_INTERVAL: Duration = Duration::from_secs(600);

/// Whoever waits for room tries again after some two minutes at most (`member.rs`); until it knows again that there is none, it asks a GPU, and reads
/// a header.
const WAITED_FOR: Duration = Duration::from_secs(300);
/// In which a download has to bring all that it lacks, if others wait for its room: seconds of a week.
const ALL_WITHIN: u64 = 7 * 24 * 60 * 60;
/// A turn has twice the time of the one before as often as this: then it has a week.
const LONGER_TURNS: u32 = 10;

/// How slow a download may be while others wait for the room that is kept for it. Where nobody waits, it may be as slow as it is: lines differ, and
/// servers have their clients queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slowest {
    /// So often it is looked at.
    pub within: Duration,
    /// However little is lacking.
    pub bytes_per_second: u64,
}

impl Default for Slowest {
    /// Three machines behind one line of 2 Mbit/s have more each. What is slower takes longer than 18 hours for 4 GiB.
    fn default() -> Self {
        Self {
            within: Duration::from_secs(600),
            bytes_per_second: 64 << 10,
        }
    }
}

impl Slowest {
    /// For one that gave way so often in a row. Two that are slow would else take turns for ever, if neither can have all in one.
    pub(super) fn after(self, gave_way: u32) -> Self {
        let times = 1_u32 << gave_way.min(LONGER_TURNS);
        let within = self.within.saturating_mul(times);
        Self { within, ..self }
    }

    /// What comes each time at least, if so much is lacking at the beginning.
    pub(super) fn bytes(&self, lacking_bytes: u64) -> u64 {
        let per_second = self.bytes_per_second.max(lacking_bytes / ALL_WITHIN);
        (per_second as f64 * self.within.as_secs_f64()) as u64
    }
}

/// Whether a model's files come fast enough, all together: of many, each may come between two looks.
pub(super) struct Looks {
    /// So often it is looked at.
    pub within: Duration,
    least_bytes: u64,
    ticks: Interval,
    /// Bytes that came of the files before.
    before: u64,
    /// What had come at the look before, if a file came then.
    seen: Option<u64>,
}

impl Looks {
    /// For so many bytes that are lacking.
    pub(super) fn new(slowest: Slowest, lacking_bytes: u64) -> Self {
        let mut ticks = interval(slowest.within);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            within: slowest.within,
            least_bytes: slowest.bytes(lacking_bytes),
            ticks,
            before: 0,
            seen: None,
        }
    }

    /// Until the next look.
    pub(super) async fn next(&mut self) {
        self.ticks.tick().await;
    }

    /// How much came since the look before, if that is too little. `came`: of the file that comes now; `None` if none does.
    pub(super) fn too_few(&mut self, came: Option<u64>) -> Option<u64> {
        let now = came.map(|came| self.before.saturating_add(came));
        let seen = std::mem::replace(&mut self.seen, now);
        let bytes = now?.saturating_sub(seen?);
        (bytes < self.least_bytes).then_some(bytes)
    }

    /// No more comes of this file, of which so much came.
    pub(super) fn ended(&mut self, came: u64) {
        self.before = self.before.saturating_add(came);
    }
}

/// What stays free of a file system of so many bytes: with less a kubelet begins to remove images, and then evicts pods.
fn kept_free(total: u64) -> u64 {
    total / 5
}

/// The same for the time in which a model replaces another one: more than the 15 % with which a kubelet begins to evict by default.
fn kept_free_meanwhile(total: u64) -> u64 {
    total / 6
}

impl Weights {
    /// Keeps the cache within its budget for ever, also when others fill the disk. Removes nothing when a plan goes or the agent starts:
    /// the next plan, and the members of earlier plans, use what is on the disk.
    pub async fn keep_to_budget(&self, established: Established) {
        loop {
            sleep(COLLECT_INTERVAL).await;
            // Before that it is not known which files plans need.
            if established.missing().is_empty() {
                self.collect().await;
            }
        }
    }

    /// Removes the least recently used files, until the cache is within its budget. What members use stays.
    async fn collect(&self) {
        let store = self.0.clone();
        let collecting = spawn_blocking(move || {
            let budget = store.budget(kept_free)?;
            Ok::<_, WeightsError>(store.cache.collect(budget)?)
        });
        match collecting.await.map_err(WeightsError::Panicked) {
            Ok(Ok(collected)) => tell_of(&collected),
            Ok(Err(error)) | Err(error) => {
                let problem = prima_crds::error_chain(&error);
                tracing::warn!(problem, "cannot look after the cache of model files");
            }
        }
    }

    /// Removes the least recently used files, so that the `wanted` bytes are within the budget: those of files `to_fetch`, of which each takes
    /// so much more of the disk. Where that is not enough, what `replaces` a model may take more than others, unless the budget was given.
    /// Nobody else gets the room until it is dropped.
    pub(super) async fn make_room(
        &self,
        wanted: u64,
        to_fetch: Vec<(LocalFile, u64)>,
        replaces: bool,
    ) -> Result<KeptRoom, WeightsError> {
        let store = self.0.clone();
        let room = blocking(move || {
            let room = store.cache.make_room(store.budget(kept_free)?, &to_fetch)?;
            match has_room_later(&room) && replaces {
                true => store
                    .cache
                    .make_room(store.budget(kept_free_meanwhile)?, &to_fetch),
                false => Ok(room),
            }
        });
        let room = room.await??;
        let later = has_room_later(&room);
        match room {
            Room::Made { collected, kept } => {
                tell_of(&collected);
                Ok(kept)
            }
            Room::Short { lacking_bytes, .. } => {
                let room = wanted.saturating_sub(lacking_bytes);
                if !later {
                    return Err(WeightsError::NoRoom { wanted, room });
                }
                let waits = self.0.room_wanted.lock();
                *waits.unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                Err(WeightsError::NoRoomYet { wanted, room })
            }
        }
    }

    /// Whether somebody waits for room.
    pub(super) fn room_is_wanted(&self) -> bool {
        let wanted = self.0.room_wanted.lock();
        let last = *wanted.unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|last| last.elapsed() < WAITED_FOR)
    }
}

/// Whether other models' files are all that is in the way.
fn has_room_later(room: &Room) -> bool {
    matches!(room, Room::Short { lacking_bytes, others_bytes } if lacking_bytes <= others_bytes)
}

impl Store {
    /// So much of the file system stays free, unless the budget was given.
    fn budget(&self, kept_free: fn(u64) -> u64) -> Result<u64, CacheError> {
        match self.budget_bytes {
            // There may be less on the disk.
            Some(budget) => Ok(budget.min(self.cache.budget_bytes(|_| 0)?)),
            None => self.cache.budget_bytes(kept_free),
        }
    }
}

fn tell_of(collected: &Collected) {
    if !collected.removed.is_empty() {
        tracing::info!(
            files = collected.removed.len(),
            freed_bytes = collected.freed_bytes,
            "removed model files that were not used for longest"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_download_has_to_be_faster() {
        let slowest = Slowest::default();
        assert_eq!(slowest.bytes(4 << 30), 600 * (64 << 10));
        // 500 GB in a week.
        assert_eq!(slowest.bytes(500_000_000_000), 600 * 826_719);
    }

    #[test]
    fn who_gave_way_has_a_longer_turn_next() {
        for (gave_way, times) in [(0, 1), (1, 2), (3, 8), (10, 1024), (u32::MAX, 1024)] {
            let slowest = Slowest::default().after(gave_way);
            assert_eq!(slowest.within, Duration::from_secs(600 * times));
            assert_eq!(slowest.bytes(4 << 30), 600 * times * (64 << 10));
        }
    }

    #[tokio::test]
    async fn all_files_of_a_model_have_to_come_fast_enough_together() {
        let slowest = Slowest {
            within: Duration::from_secs(3600),
            bytes_per_second: 1,
        };
        let mut looks = Looks::new(slowest, 9);
        assert_eq!(looks.too_few(None), None);
        assert_eq!(looks.too_few(Some(5)), None);
        assert_eq!(looks.too_few(Some(5 + 3600)), None);
        // Of a file after that one.
        looks.ended(4000);
        looks.ended(100);
        assert_eq!(looks.too_few(Some(7)), Some(502));
        assert_eq!(looks.too_few(Some(7 + 3600)), None);
        // Nobody can tell how fast it was while none came.
        assert_eq!(looks.too_few(None), None);
        assert_eq!(looks.too_few(Some(4000)), None);
        assert_eq!(looks.too_few(Some(4001)), Some(1));
    }
}
