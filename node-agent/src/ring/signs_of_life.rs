//! That members are there: each says so twice a second, whatever it computes, and rank 0 knows of whom it has heard nothing for a while.
//!
//! A connection gives a silent neighbour up only after some seconds more (`connection`), since what pauses may go on, and answers wait for it.
//! Until then rank 0 says that its ring does not answer, so that whoever has the choice asks elsewhere.
//!
//! A sign goes from a member to its predecessor, and on to rank 0, past what is computed (`hop`). Rank 0's own goes round the whole ring, and so
//! tells of the last member's way to rank 0, which no other sign goes.

use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tonic::Status;

use super::frame::{HopEvent, MemberEvent};
use super::hop::Reply;
use super::proto;
use super::wire;

/// How often a member says that it is there.
const INTERVAL: Duration = Duration::from_millis(500);
/// Of whom nothing was heard for longer is silent: at least four signs did not come. A packet that is lost is sent again after 0.2, 0.6 and 1.4 s at the
/// latest, which is sooner.
pub const SILENT_FOR: Duration = Duration::from_millis(2500);
/// Rank 0 looks four times a second. If it did not for so long, it stood still itself, and has yet to take in what it was told meanwhile.
pub const STOOD_STILL: Duration = Duration::from_secs(1);
/// It then listens for so long at least: what it was told waits in its own system.
const LISTENS_FOR: Duration = Duration::from_millis(750);

/// A member's signs of life, and those that its successor hands to it, on their way to rank 0.
pub struct SignsOfLife {
    rank: usize,
    /// Rank 0 only: where signs end.
    home: Option<mpsc::UnboundedSender<Reply>>,
    /// Events for the predecessor. Its stream ends when the hop lets go of it, whatever is remembered here.
    predecessor: Mutex<Option<Predecessor>>,
}

type Predecessor = mpsc::WeakSender<Result<proto::HopEvent, Status>>;

impl SignsOfLife {
    /// `home`: given on rank 0 only.
    pub fn new(rank: usize, home: Option<mpsc::UnboundedSender<Reply>>) -> Self {
        Self {
            rank,
            home,
            predecessor: Mutex::default(),
        }
    }

    /// The predecessor is connected, and hears of this member at once.
    pub fn connected(&self, events: &mpsc::Sender<Result<proto::HopEvent, Status>>) {
        *self.predecessor() = Some(events.downgrade());
        self.send(self.rank);
    }

    /// Tells the predecessor that this member is there, for ever.
    pub async fn tell(&self) -> Infallible {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.send(self.rank);
        }
    }

    /// Takes a sign of the member of this rank from the successor.
    pub fn hand_on(&self, rank: usize) {
        match &self.home {
            Some(home) => {
                // Fails only when decode has ended, and the process with it.
                let _ = home.send(Reply::Event(sign(rank)));
            }
            None => self.send(rank),
        }
    }

    /// To the predecessor, if it is there. One that reads nothing finds room for events that say more.
    fn send(&self, rank: usize) {
        let predecessor = self.predecessor();
        let events = predecessor.as_ref().and_then(mpsc::WeakSender::upgrade);
        if let Some(events) = events
            && events.capacity() > events.max_capacity() / 2
        {
            // Fails if the stream has just ended.
            let _ = events.try_send(Ok(wire::event_to_proto(sign(rank))));
        }
    }

    fn predecessor(&self) -> MutexGuard<'_, Option<Predecessor>> {
        // It is replaced as a whole.
        self.predecessor
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn sign(rank: usize) -> HopEvent {
    HopEvent {
        rank,
        event: MemberEvent::Alive,
    }
}

/// When rank 0 has heard of each member last. Pure.
pub struct Heard {
    /// By rank, since the ring broke last. One of an earlier version is never heard of, and so never silent.
    last: Vec<Option<Instant>>,
    /// When it was asked last who is silent.
    looked: Instant,
}

impl Heard {
    pub fn new(members: usize, now: Instant) -> Self {
        Self {
            last: vec![None; members],
            looked: now,
        }
    }

    /// A sign came of the member of this rank; of rank 0 itself, round the ring.
    pub fn note(&mut self, rank: usize, now: Instant) {
        if let Some(last) = self.last.get_mut(rank) {
            *last = Some(now);
        }
    }

    /// A pass is home that began then: all members had a part in it.
    pub fn came_home(&mut self, begun: Instant) {
        for last in self.last.iter_mut().flatten() {
            *last = begun.max(*last);
        }
    }

    /// The ring is broken. Who comes back may be of an earlier version.
    pub fn forget(&mut self) {
        self.last.fill(None);
    }

    /// The rank of the first member that is silent: those behind it cannot be heard either. If only the own sign does not come round, that is the
    /// last member, which does not reach rank 0.
    pub fn silent(&mut self, now: Instant) -> Option<usize> {
        if now.saturating_duration_since(self.looked) > STOOD_STILL
            && let Some(least) = now.checked_sub(SILENT_FOR - LISTENS_FOR)
        {
            for last in self.last.iter_mut().flatten() {
                *last = least.max(*last);
            }
        }
        self.looked = now;
        let is_silent = |last: &Option<Instant>| {
            last.is_some_and(|last| now.saturating_duration_since(last) > SILENT_FOR)
        };
        let (own, others) = self.last.split_first()?;
        match others.iter().position(is_silent) {
            Some(before) => Some(before + 1),
            None => is_silent(own).then_some(others.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use tokio::sync::mpsc::error::TryRecvError;

    use super::*;

    /// Looks at these quarters of a second after `start`, as rank 0 does: who is silent at the last of them.
    fn look(heard: &mut Heard, start: Instant, quarters: RangeInclusive<u32>) -> Option<usize> {
        quarters.fold(None, |_, quarter| {
            heard.silent(start + quarter * Duration::from_millis(250))
        })
    }

    #[test]
    fn who_is_not_heard_of_any_more_is_silent() {
        let start = Instant::now();
        let at = |quarter: u32| start + quarter * Duration::from_millis(250);
        let mut heard = Heard::new(4, start);
        for rank in 0..4 {
            heard.note(rank, start);
        }
        assert_eq!(look(&mut heard, start, 1..=10), None);
        // Longer than 2.5 s.
        for rank in [1, 2] {
            heard.note(rank, at(10));
        }
        assert_eq!(look(&mut heard, start, 11..=11), Some(3));
        // Who is nearest to rank 0 keeps the others from being heard.
        assert_eq!(look(&mut heard, start, 12..=21), Some(1));
        for rank in 1..4 {
            heard.note(rank, at(21));
        }
        // All are there, but the last one does not reach rank 0.
        assert_eq!(look(&mut heard, start, 22..=22), Some(3));
        heard.note(0, at(22));
        assert_eq!(look(&mut heard, start, 23..=23), None);
        // Nobody else is heard of, whatever is told.
        heard.note(4, at(23));
        assert_eq!(look(&mut heard, start, 24..=24), None);
    }

    #[test]
    fn who_was_never_heard_of_is_not_silent() {
        let start = Instant::now();
        let mut heard = Heard::new(3, start);
        assert_eq!(look(&mut heard, start, 1..=40), None);
        heard.note(1, start + Duration::from_secs(10));
        assert_eq!(look(&mut heard, start, 41..=50), None);
        assert_eq!(look(&mut heard, start, 51..=51), Some(1));
        // Nor who has come back, until it is heard of again.
        heard.forget();
        assert_eq!(look(&mut heard, start, 52..=90), None);
        let mut alone = Heard::new(1, start);
        assert_eq!(look(&mut alone, start, 1..=40), None);
    }

    #[test]
    fn what_comes_home_was_at_all_members_after_it_began() {
        let start = Instant::now();
        let at = |quarter: u32| start + quarter * Duration::from_millis(250);
        let mut heard = Heard::new(3, start);
        heard.note(1, start);
        assert_eq!(look(&mut heard, start, 1..=10), None);
        // It began after 2 s; the other one long ago.
        heard.came_home(at(8));
        heard.came_home(start);
        assert_eq!(look(&mut heard, start, 11..=18), None);
        assert_eq!(look(&mut heard, start, 19..=19), Some(1));
        heard.came_home(at(9));
        assert_eq!(look(&mut heard, start, 19..=19), None);
        // The other one is of an earlier version, and was never heard of.
        heard.note(1, at(40));
        assert_eq!(look(&mut heard, start, 20..=40), None);
    }

    #[test]
    fn who_stood_still_itself_listens_first() {
        let start = Instant::now();
        let mut heard = Heard::new(2, start);
        heard.note(1, start);
        assert_eq!(look(&mut heard, start, 1..=4), None);
        // For 9 s, nothing was looked at.
        assert_eq!(look(&mut heard, start, 40..=43), None);
        assert_eq!(look(&mut heard, start, 44..=44), Some(1));
    }

    #[test]
    fn a_short_stop_of_its_own_hides_nobody() {
        let start = Instant::now();
        let mut heard = Heard::new(2, start);
        heard.note(1, start);
        assert_eq!(look(&mut heard, start, 1..=2), None);
        // Nothing was looked at for 1.25 s, by far not for as long as the other one is silent.
        assert_eq!(look(&mut heard, start, 7..=10), None);
        assert_eq!(look(&mut heard, start, 11..=11), Some(1));
    }

    #[test]
    fn signs_leave_room_for_other_events_and_end_with_the_stream() {
        let signs = SignsOfLife::new(1, None);
        // Nobody is there.
        signs.hand_on(2);
        let (events, mut received) = mpsc::channel(4);
        signs.connected(&events);
        for _ in 0..9 {
            signs.hand_on(2);
        }
        assert_eq!(events.capacity(), 2);
        let mut ranks = Vec::new();
        while let Ok(event) = received.try_recv() {
            ranks.push(event.unwrap().rank);
        }
        assert_eq!(ranks, [1, 2]);
        drop(events);
        signs.hand_on(2);
        assert_eq!(received.try_recv().err(), Some(TryRecvError::Disconnected));
    }

    #[test]
    fn rank_0_hands_nothing_on() {
        let (home, mut replies) = mpsc::unbounded_channel();
        let signs = SignsOfLife::new(0, Some(home));
        let (events, mut received) = mpsc::channel(4);
        signs.connected(&events);
        signs.hand_on(2);
        let reply = replies.try_recv().unwrap();
        assert!(matches!(reply, Reply::Event(event) if event == sign(2)));
        let own = received.try_recv().unwrap().unwrap();
        assert_eq!(wire::event_from_proto(own), Some(sign(0)));
        assert!(received.try_recv().is_err());
    }
}
