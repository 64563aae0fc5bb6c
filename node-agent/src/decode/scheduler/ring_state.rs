//! Whether the ring is whole, when something on it is late or counts as lost, and what becomes of requests then.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::{Action, Awaited, Flight, Phase, RequestId, Scheduler, SequenceId, State};
use crate::generation::{GenerationError, Readiness};
use crate::ring::{Output, SILENT_FOR, STOOD_STILL, SessionId};

pub(super) const PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// From a warm-up that failed to the next: what was lacking may come back, a disk or memory.
const FAILED_PAUSE: Duration = Duration::from_secs(5);
/// Frames may take so many times as long as the plan says, or as others took lately, when their machines have other work to do.
const PATIENCE: u32 = 4;
/// A request goes on after so many breaks of the ring, and no more: it may be what breaks it.
const BREAKS: usize = 3;
/// More frames than can overtake one that waits for its window.
const OVERTAKING: u64 = 32;
/// For whoever looks at a machine's memory: a conversation is not kept for longer.
pub const KEPT_FOR: Duration = Duration::from_secs(3600);

impl Scheduler {
    fn probe(&mut self, now: Instant) {
        if let Phase::Probing { asked, .. } = &mut self.phase {
            *asked = Some(now);
            self.last_nonce += 1;
            let nonce = self.last_nonce;
            self.actions.push(Action::Probe { nonce });
        }
    }

    pub(super) fn whole(&mut self, nonce: u64, now: Instant) {
        if !matches!(self.phase, Phase::Probing { first_nonce, .. } if first_nonce <= nonce) {
            return;
        }
        self.missed.clear();
        let session = self.new_session();
        self.ledger.begin(session);
        self.actions.push(Action::Create { session });
        self.phase = Phase::WarmingUp { session };
        // Why it failed before stands until it does not.
        if !matches!(self.readiness, Readiness::Failed(_)) {
            self.readiness = Readiness::Loading("the first token goes round the ring".into());
            self.fails_at = None;
        }
        let token = vec![self.limits.warm_up];
        // Nobody's token, but its logits are wanted: the output head must work, too.
        let expected = self.expected(1, false);
        let flight = Flight {
            awaited: self.awaited(expected, now),
            chunk: false,
            brings: None,
            alone: false,
            rows: 1,
            tells_cost: false,
        };
        self.send_tokens(session, 0, token, (1, Output::Logits), flight);
    }

    pub(super) fn refused(
        &mut self,
        session: SessionId,
        rank: usize,
        reason: String,
        now: Instant,
    ) {
        if matches!(self.phase, Phase::WarmingUp { session: warm } if warm == session) {
            let failed = Readiness::Failed(reason);
            if self.readiness != failed {
                tracing::error!(why = ?failed, "the ring cannot compute the model; trying again");
            }
            self.release(session, now);
            self.readiness = failed;
            self.fails_at = Some(rank);
            self.phase = Phase::Probing {
                first_nonce: self.last_nonce + 1,
                asked: Some(now + FAILED_PAUSE),
            };
        } else if let Some(&(request, _)) = self.running.get(&session) {
            self.fail(request, GenerationError::Refused { reason }, now);
        } else if self.kept.contains(session) {
            self.forget(session, now);
        }
    }

    pub(super) fn lost(
        &mut self,
        rank: usize,
        missed_by: Option<usize>,
        cause: String,
        now: Instant,
    ) {
        let member = match self.limits.members.get(rank) {
            Some(member) => member.clone(),
            None => format!("of rank {rank}"),
        };
        // A ring that is broken says so again and again; requests wait from the first time on. A member that ends says why before its streams break.
        let (until, cause) = match self.lost.take() {
            Some((
                until,
                GenerationError::MemberLost {
                    member: of,
                    cause: first,
                },
            )) if of == member => (until, first),
            Some((until, _)) => (until, cause),
            None => (now + self.limits.options.outlast, cause),
        };
        let reason = format!("waiting for member {member}: {cause}");
        let error = GenerationError::MemberLost { member, cause };
        self.lost = Some((until, error.clone()));
        self.break_off(reason, &error, now);
        match until > now {
            true => self.begin_again_later(&error, now),
            false => self.fail_all(&error),
        }
        self.fails_at = Some(rank);
        let members = self.limits.members.len();
        let missed_by = missed_by.filter(|by| rank.max(*by) < members);
        self.missed.extend(missed_by.map(|by| (rank, by)));
    }

    /// The ring is broken: nothing that was under way can be finished.
    fn break_off(&mut self, reason: String, error: &GenerationError, now: Instant) {
        self.kept.clear();
        self.releasing.clear();
        self.flights.clear();
        self.ledger.clear();
        self.readiness = Readiness::Loading(reason);
        self.fails_at = None;
        // What was asked before may have passed members before they lost something.
        let first_nonce = self.last_nonce + 1;
        let asked = match self.phase {
            Phase::Probing { asked, .. } => asked,
            _ => {
                let (running, waiting) = self.requests();
                tracing::warn!(%error, running, waiting, "the ring is broken");
                Some(now)
            }
        };
        self.phase = Phase::Probing { first_nonce, asked };
    }

    /// What ran waits for the ring to be whole again, with all its tokens. What went through too many breaks fails.
    fn begin_again_later(&mut self, error: &GenerationError, now: Instant) {
        let running: BTreeSet<SequenceId> = self.running.values().copied().collect();
        let requests: BTreeSet<RequestId> = running.iter().map(|id| id.0).collect();
        for id in running {
            self.leave(id);
            if let Some(sequence) = self.sequence(id) {
                sequence.state = State::Waiting;
                self.waiting.insert(id);
            }
        }
        for id in requests {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            request.breaks += 1;
            if request.breaks > BREAKS {
                self.fail(id, error.clone(), now);
            }
        }
    }

    fn fail_all(&mut self, error: &GenerationError) {
        for request in std::mem::take(&mut self.requests).into_keys() {
            let error = error.clone();
            self.actions.push(Action::Fail { request, error });
        }
        self.waiting.clear();
        self.prefilling.clear();
        self.running.clear();
    }

    pub(super) fn tick(&mut self, now: Instant) {
        if let Phase::Probing { asked, .. } = self.phase
            && asked.is_none_or(|asked| now.saturating_duration_since(asked) >= PROBE_INTERVAL)
        {
            self.probe(now);
        }
        if let Some((_, error)) = self.lost.take_if(|(until, _)| *until <= now) {
            self.fail_all(&error);
        }
        for session in self.kept.idle(now, KEPT_FOR) {
            self.forget(session, now);
        }
        let requests = &self.requests;
        self.turns
            .retain(|client, _| requests.values().any(|one| one.client == *client));
        self.give_up_late_guess(now);
        self.give_up_lost(now);
        self.look_for_late(now);
    }

    pub(super) fn came_home(&mut self, now: Instant) {
        self.returned += 1;
        self.gets_on(now);
    }

    pub(super) fn gets_on(&mut self, now: Instant) {
        self.progress = Some(now);
        self.late = false;
    }

    /// Something that leaves now and is expected to take so long, once what is on the ring before it has come home.
    pub(super) fn awaited(&self, expected: Duration, now: Instant) -> Awaited {
        let flights = self.flights.values().flatten();
        let before = flights.map(|flight| &flight.awaited);
        let before = before.chain(self.releasing.values());
        let (count, time) = before.fold((0, expected), |(count, time), one| {
            (count + 1, time + one.expected)
        });
        Awaited {
            begun: now,
            expected,
            may_take: PATIENCE * time,
            overtaken_at: self.returned + count + OVERTAKING,
        }
    }

    /// How long a frame of so many tokens takes: what the plan says, or what such passes took lately if that is longer.
    pub(super) fn expected(&self, rows: usize, chunk: bool) -> Duration {
        let planned = self.limits.planned.map_or(0, |speed| match chunk {
            true => speed.first_token_microseconds,
            false => speed.token_microseconds,
        });
        let planned = Duration::from_micros(planned.try_into().unwrap_or(0));
        planned.max(self.cost.of(rows))
    }

    /// Notes whether something is late. Signs of life do not tell: they pass a member whose disk or GPU hangs, and go the other way than frames.
    fn look_for_late(&mut self, now: Instant) {
        // If rank 0 stood still itself, what has come home since has yet to be taken in.
        let ticks = self
            .ticks
            .filter(|(_, last)| now.saturating_duration_since(*last) <= STOOD_STILL);
        let (since, _) = ticks.unwrap_or((now, now));
        self.ticks = Some((since, now));
        let quiet_since = self.progress.map_or(since, |progress| progress.max(since));
        let late = |one: &Awaited| {
            let waits = now.saturating_duration_since(quiet_since.max(one.begun));
            waits > one.may_take + SILENT_FOR
        };
        let fronts = self.flights.values().filter_map(VecDeque::front);
        let mut oldest = fronts
            .map(|flight| &flight.awaited)
            .chain(self.releasing.values())
            .peekable();
        // Each waits for what a member is at: a token that left just before a chunk comes home behind it.
        self.late = oldest.peek().is_some() && oldest.all(late);
    }

    /// Ends what waits for something that got lost: a request if only its frame did, else all of them.
    fn give_up_lost(&mut self, now: Instant) {
        let since = |begun: Instant| now.saturating_duration_since(begun);
        let limit = |one: &Awaited| self.limits.options.grace + one.may_take;
        let silent = |one: &Awaited| {
            self.progress
                .is_none_or(|progress| since(progress.max(one.begun)) > limit(one))
        };
        let lost = |one: &Awaited| {
            since(one.begun) > limit(one) && (silent(one) || self.returned >= one.overtaken_at)
        };
        let flights = self.flights.iter();
        let mut oldest =
            flights.filter_map(|(&session, flights)| Some((session, &flights.front()?.awaited)));
        if let Some((session, one)) = oldest.find(|(_, one)| lost(one)) {
            let error = GenerationError::Deadline {
                seconds: limit(one).as_secs(),
            };
            match self.running.get(&session) {
                Some(&(request, _)) if !silent(one) => self.fail(request, error, now),
                _ => {
                    self.break_off("nothing comes home any more".into(), &error, now);
                    self.fail_all(&error);
                }
            }
        } else if let Some(one) = self.releasing.values().find(|one| lost(one)) {
            let error = GenerationError::Deadline {
                seconds: limit(one).as_secs(),
            };
            self.break_off("a session got lost on the ring".into(), &error, now);
            self.fail_all(&error);
        }
    }
}
