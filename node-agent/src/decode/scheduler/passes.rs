//! What goes round: chunks of prompts in turn, tokens with their drafts, and what their rows bring when they come home.

use std::collections::VecDeque;
use std::time::Instant;

use super::{
    Action, Flight, Phase, Request, RequestId, Sampled, Scheduler, Sequence, SequenceId, State,
};
use crate::generation::Readiness;
use crate::ring::{MAX_FRAME_ROWS, SessionId};

impl Scheduler {
    /// Keeps prompts flowing: one chunk more than there are members keeps them all busy, and a token waits for no more than these. Clients
    /// take turns, and the prompts of each.
    pub(super) fn send_chunks(&mut self, now: Instant) {
        while self.chunks_in_flight() <= self.limits.members.len()
            && let Some(id) = self.next_to_prefill()
        {
            self.chunks += 1;
            self.turns.insert(self.client(id), self.chunks);
            if self.send(id, true, now) {
                self.prefilling.push_back(id);
            }
        }
    }

    /// Takes the prompt whose client had its last turn longest ago.
    fn next_to_prefill(&mut self) -> Option<SequenceId> {
        let last_turn = |&place: &usize| {
            let client = self.client(self.prefilling[place]);
            self.turns.get(&client)
        };
        let next = (0..self.prefilling.len()).min_by_key(last_turn)?;
        self.prefilling.remove(next)
    }

    fn chunks_in_flight(&self) -> usize {
        let flights = self.flights.values().flatten();
        flights.filter(|flight| flight.chunk).count()
    }

    /// Sends what comes next of a sequence's text. `true`: there is more.
    fn send(&mut self, id: SequenceId, chunk: bool, now: Instant) -> bool {
        let Some(&mut Sequence {
            ref text,
            state: State::Running { session, sent },
            ..
        }) = self.sequence(id)
        else {
            return false;
        };
        let end = text.len().min(sent + MAX_FRAME_ROWS);
        let (mut tokens, last) = (text[sent..end].to_vec(), end == text.len());
        if !self.make_room(id, session, sent, tokens.len(), now) {
            return false;
        }
        let mut wanted = usize::from(last);
        if !chunk && self.limits.speculate {
            let draft = self.draft(id, session, sent);
            tokens.extend(draft);
            wanted += draft.len();
        }
        if let Some(sequence) = self.sequence(id) {
            sequence.state = State::Running { session, sent: end };
        }
        let expected = self.expected(tokens.len(), chunk);
        let flight = Flight {
            awaited: self.awaited(expected, now),
            chunk,
            brings: last.then_some(id),
            pass_rows: (!chunk && self.chunks_in_flight() == 0).then_some(tokens.len()),
        };
        self.send_tokens(session, sent, tokens, wanted, flight);
        !last
    }

    /// What to send along with the last token of a sequence, whose others are on the ring. Nobody makes room for it.
    fn draft(&mut self, id: SequenceId, session: SessionId, sent: usize) -> &[u32] {
        let passes = self.running.len() as f64 / self.limits.members.len() as f64;
        let (context, longest) = (self.limits.context_length, self.limits.longest_draft);
        let Some(request) = self.requests.get_mut(&id.0) else {
            return &[];
        };
        let sequence = &mut request.sequences[id.1];
        // The last token that is asked for needs no row.
        let end = (request.prompt.len().saturating_add(request.max_tokens)).min(context + 1);
        let mut limit = end.saturating_sub(sequence.text.len() + 1).min(longest);
        while limit > 0 && !self.ledger.fits(session, sent, 1 + limit) {
            limit /= 2;
        }
        let (text, cost) = (&sequence.text, &self.cost);
        sequence
            .speculation
            .draft(text, limit, cost, passes.max(1.0))
    }

    pub(super) fn send_tokens(
        &mut self,
        session: SessionId,
        first_position: usize,
        tokens: Vec<u32>,
        wanted: usize,
        flight: Flight,
    ) {
        self.ledger.extend(session, first_position, tokens.len());
        self.flights.entry(session).or_default().push_back(flight);
        self.actions.push(Action::Send {
            session,
            first_position,
            tokens,
            wanted,
        });
    }

    pub(super) fn home(&mut self, session: SessionId, now: Instant) {
        let flights = self.flights.get_mut(&session);
        let Some(flight) = flights.and_then(VecDeque::pop_front) else {
            return;
        };
        self.came_home(now);
        if let Phase::WarmingUp { session: warm } = self.phase
            && warm == session
        {
            tracing::info!("a token went round the ring; it is ready");
            self.phase = Phase::Ready;
            self.readiness = Readiness::Ready;
            return self.release(session, now);
        }
        if let Some(rows) = flight.pass_rows
            && self.chunks_in_flight() == 0
        {
            let took = now.saturating_duration_since(flight.awaited.begun);
            self.cost.add(rows, took);
        }
        let Some((request, choice)) = flight.brings else {
            return;
        };
        // The first row after the prompt serves all choices.
        let following = self.requests.get(&request).is_some_and(|request| {
            let mut sequences = request.sequences.iter();
            sequences.any(|one| matches!(one.state, State::Following))
        });
        let choices = match following {
            true => self.choices(request),
            false => choice..choice + 1,
        };
        let sequence = self.sequence((request, choice));
        let draft = sequence.map(|one| one.speculation.drafted().to_vec());
        self.actions.push(Action::Sample {
            request,
            choices,
            draft: draft.unwrap_or_default(),
        });
    }

    pub(super) fn sampled(&mut self, id: RequestId, sampled: Vec<Sampled>, now: Instant) {
        // Forks first: they must see the prompt only.
        for next in &sampled {
            let Some(request) = self.requests.get_mut(&id) else {
                return;
            };
            let first = match request.sequences[0].state {
                State::Running { session, .. } => Some(session),
                _ => None,
            };
            let sequence = &mut request.sequences[next.choice];
            let follows = matches!(sequence.state, State::Following);
            if follows {
                sequence.text = request.prompt.to_vec();
            }
            sequence.text.extend(&next.tokens);
            let right = next.tokens.len().saturating_sub(usize::from(!next.ended));
            if let State::Running { sent, .. } = &mut sequence.state {
                *sent += right;
                sequence.speculation.verified(right);
            }
            if follows && !next.ended {
                self.follow((id, next.choice), first);
            }
        }
        for Sampled { choice, ended, .. } in sampled {
            let state = self.sequence((id, choice)).map(|one| &one.state);
            match (ended, state) {
                (false, Some(State::Running { .. })) => {
                    self.send((id, choice), false, now);
                }
                (true, Some(_)) => self.stop((id, choice), now),
                _ => {}
            }
        }
        let ended = |request: &Request| {
            let mut sequences = request.sequences.iter();
            sequences.all(|one| matches!(one.state, State::Ended))
        };
        if self.requests.get(&id).is_some_and(ended) {
            self.requests.remove(&id);
        }
    }

    /// Gives a choice a session of its own that begins with the prompt, which `first` holds; or lets it wait for one.
    fn follow(&mut self, id: SequenceId, first: Option<SessionId>) {
        let first = first.filter(|_| self.sessions_left() > 0);
        let Some(parent) = first else {
            if let Some(sequence) = self.sequence(id) {
                sequence.state = State::Waiting;
            }
            self.waiting.insert(id);
            return;
        };
        let session = self.new_session();
        let sent = self.ledger.length(parent);
        self.fork(parent, session);
        self.running.insert(session, id);
        if let Some(sequence) = self.sequence(id) {
            sequence.state = State::Running { session, sent };
        }
    }
}
