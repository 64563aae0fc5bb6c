//! What lies on the ring: sessions begin, branch off, stay as kept ones, and give way when others need the room.

use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::DRAFTED_ROWS;

use super::kept::{Kind, Prefix};
use super::{Action, Read, RequestId, Scheduler, SequenceId, State};
use crate::generation::GenerationError;
use crate::ring::SessionId;

impl Scheduler {
    pub(super) fn new_session(&mut self) -> SessionId {
        self.last_session += 1;
        self.last_session
    }

    pub(super) fn sessions_left(&self) -> usize {
        let held = self.running.len() + self.kept.len() + self.releasing.len();
        self.limits.sessions.saturating_sub(held)
    }

    /// Leaves a session on the ring with `text`, all that is known of what it holds.
    pub(super) fn keep(
        &mut self,
        session: SessionId,
        text: Vec<u32>,
        keyspace: u64,
        kind: Kind,
        now: Instant,
    ) {
        if self.ledger.length(session) > text.len() {
            self.truncate(session, text.len());
        }
        self.ledger.set_busy(session, false);
        if let Some(other) = self.covering(&text, keyspace) {
            if let Some(prefix) = self.kept.get_mut(other) {
                prefix.last_used = now;
            }
            return self.release(session, now);
        }
        let shortest = self.ledger.shortest(session);
        let of_less = self.kept.of(keyspace).filter(|(_, held)| {
            let reached = held.len().saturating_sub(1) >= shortest;
            reached && held.len() <= text.len() && text[..held.len()] == **held
        });
        let covered: Vec<SessionId> = of_less.map(|(other, _)| other).collect();
        for other in covered {
            self.forget(other, now);
        }
        let prefix = Prefix {
            tokens: text,
            keyspace,
            kind,
            last_used: now,
        };
        self.kept.insert(session, prefix);
        // The other half is for those that run and those on their way out.
        while self.kept.len() > self.limits.sessions / 2
            && let Some(oldest) = self.kept.oldest(self.next_turns.pass_over())
        {
            self.forget(oldest, now);
        }
    }

    /// A kept session that serves whatever begins with `text`.
    fn covering(&self, text: &[u32], keyspace: u64) -> Option<SessionId> {
        let mut kept = self.kept.of(keyspace);
        let covering = kept.find(|(session, held)| {
            let shortest = self.ledger.shortest(*session);
            held.starts_with(text) && shortest <= text.len().saturating_sub(1)
        });
        covering.map(|(session, _)| session)
    }

    /// Keeps the prompt of a sequence apart when its answer, of which `new` tokens have just come, begins to get so long that layers with windows
    /// soon cannot go back. A next turn often goes on from the prompt: templates leave out what was thought, and people ask again. Where turns
    /// do not, it is the first to give way.
    pub(super) fn keep_prompt(&mut self, id: SequenceId, new: usize, now: Instant) {
        let (Some(window), Some(request)) = (self.ledger.window(), self.requests.get(&id.0)) else {
            return;
        };
        let sequence = &request.sequences[id.1];
        let State::Running { session, .. } = sequence.state else {
            return;
        };
        // With half a window left, the end of the prompt may change, too. And what is drafted counts as soon as it is on the ring.
        let soon = (window / 2).min(window.saturating_sub(DRAFTED_ROWS)).max(1);
        let answer = sequence.text.len() - request.prompt.len();
        let begins = answer >= soon && answer - new < soon;
        if !begins {
            return;
        }
        let (prompt, keyspace) = (request.prompt.to_vec(), request.keyspace);
        self.next_turns
            .answered(&sequence.text, prompt.len(), keyspace);
        if self.sessions_left() > 0 && self.covering(&prompt, keyspace).is_none() {
            let child = self.new_session();
            self.fork(session, child);
            self.keep(child, prompt, keyspace, Kind::Prompt, now);
        }
    }

    pub(super) fn forget(&mut self, session: SessionId, now: Instant) {
        self.kept.remove(session);
        self.release(session, now);
    }

    pub(super) fn release(&mut self, session: SessionId, now: Instant) {
        self.ledger.release(session);
        // Members are at its frames before.
        let own = self.flights.remove(&session).into_iter().flatten();
        let expected: Duration = own.map(|flight| flight.awaited.expected).sum();
        let awaited = self.awaited(expected, now);
        self.releasing.insert(session, awaited);
        self.actions.push(Action::Release { session });
    }

    /// Fails a request whose logits cannot be used. What it took over may be why, so all goes that begins as it does and may hold the same.
    pub(super) fn nothing_follows(&mut self, id: RequestId, reason: String, now: Instant) {
        if let Some(request) = self.requests.get(&id) {
            let kept = self.kept.of(request.keyspace);
            let alike = kept.filter(|(_, held)| held.first() == request.prompt.first());
            let alike: Vec<SessionId> = alike.map(|(session, _)| session).collect();
            for session in alike {
                self.forget(session, now);
            }
        }
        self.fail(id, GenerationError::Logits { reason }, now);
    }

    /// Gives back kept positions: some `blocks` of them, or a whole session where that is all there is. `false`: nothing is kept.
    fn give_up_kept(&mut self, blocks: usize, now: Instant) -> bool {
        let Some(oldest) = self.kept.oldest(self.next_turns.pass_over()) else {
            return false;
        };
        let own = self.ledger.own_blocks(oldest).min(blocks);
        let left = self.ledger.length_without(oldest, own);
        if own == 0 || left == 0 || left < self.ledger.shortest(oldest) {
            self.forget(oldest, now);
            return true;
        }
        if let Some(prefix) = self.kept.get_mut(oldest) {
            prefix.tokens.truncate(left);
        }
        self.truncate(oldest, left);
        true
    }

    pub(super) fn truncate(&mut self, session: SessionId, positions: usize) {
        self.ledger.truncate(session, positions);
        self.actions.push(Action::Truncate { session, positions });
    }

    pub(super) fn fork(&mut self, parent: SessionId, child: SessionId) {
        self.ledger.fork(parent, child);
        self.actions.push(Action::Fork { parent, child });
    }

    /// Takes a sequence's place for another. What it computed is kept for as long as nobody needs the room, if it can go on from there.
    pub(super) fn set_aside(&mut self, id: SequenceId, now: Instant) {
        let held = self.leave(id);
        let Some(request) = self.requests.get_mut(&id.0) else {
            return;
        };
        let (keyspace, read) = (request.keyspace, request.read);
        let sequence = &mut request.sequences[id.1];
        sequence.state = State::Waiting;
        let text = held.map(|(session, sent)| (session, sequence.text[..sent].to_vec()));
        self.waiting.insert(id);
        match text {
            Some((session, _)) if read == Read::AllStates => self.release(session, now),
            Some((session, text)) => self.keep(session, text, keyspace, Kind::Other, now),
            None => {}
        }
    }

    /// Makes room for `rows` positions after the first `first`: kept prefixes go first, then the youngest sequences of whoever has most are
    /// set aside. `false`: `id` itself was, or cannot go on. The oldest is never set aside, so it always gets on.
    pub(super) fn make_room(
        &mut self,
        id: SequenceId,
        session: SessionId,
        first: usize,
        rows: usize,
        now: Instant,
    ) -> bool {
        while !self.ledger.fits(session, first, rows) {
            if self.give_up_kept(self.ledger.missing(session, first, rows), now) {
                continue;
            }
            match self.youngest_of_most() {
                Some(youngest) if self.running.len() > 1 => {
                    self.set_aside(youngest, now);
                    if youngest == id {
                        return false;
                    }
                }
                _ => {
                    // A plan always pays for one context.
                    let reason = "the plan has no memory for it".to_owned();
                    self.fail(id.0, GenerationError::Refused { reason }, now);
                    return false;
                }
            }
        }
        true
    }
}
