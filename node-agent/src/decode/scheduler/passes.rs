//! What goes round: chunks of prompts in turn, tokens with their drafts, and what their rows bring when they come home.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::{CHUNK_POSITIONS, DRAFTED_ROWS};

use super::kept::common_prefix;
use super::speculation::Prices;
use super::{
    Action, DraftJob, Flight, Phase, Read, Request, RequestId, Sampled, Scheduler, Sequence,
    SequenceId, State,
};
use crate::generation::Readiness;
use crate::ring::{MAX_FRAME_ROWS, Output, SessionId};

/// What a frame carries of a text.
enum Part<'a> {
    /// As much as fits.
    Chunk,
    /// Its last token, and a draft of what follows.
    Token(&'a [u32]),
}

/// Beside tokens, the rows of a chunk take so many times what a pass without any rows does. So a token waits for passes that take five times as
/// long as its own, and prompts are computed at four fifths of their best speed or more.
const ROWS_BESIDE_TOKENS: f64 = 4.0;
/// Smaller chunks would be many frames.
const FEWEST_ROWS: usize = 16;
/// A draft model that has more than so many tokens to take in is not waited for.
const FAR_BEHIND: usize = 8;
/// Long before anybody takes the ring for dead.
const LATE_GUESS: Duration = Duration::from_secs(2);

impl Scheduler {
    /// Keeps prompts flowing: one chunk more than there are members keeps them all busy, and a token waits for no more than these. Clients
    /// take turns, and the prompts of each.
    pub(super) fn send_chunks(&mut self, now: Instant) {
        while self.chunks_in_flight() <= self.limits.members.len()
            && let Some(id) = self.next_to_prefill()
        {
            self.chunks += 1;
            self.turns.insert(self.client(id), self.chunks);
            if self.send(id, Part::Chunk, now) {
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

    /// The most rows of the next chunk of this sequence. Chunks are smaller while others' tokens go round, which wait for them at every member: of the
    /// usual size at most.
    fn chunk_rows(&self, id: SequenceId) -> usize {
        let decodes = |(session, other): (&SessionId, &SequenceId)| {
            // After the last chunk of a prompt, too, there is no token before it is home.
            let mut flights = self.flights.get(session).into_iter().flatten();
            let prefills = *other == id
                || self.prefilling.contains(other)
                || flights.any(|flight| flight.chunk);
            !prefills && self.read(*other) == Read::Continuation
        };
        if !self.running.iter().any(decodes) {
            return self.limits.chunk_positions;
        }
        let rows = match self.limits.whole_chunks {
            true => None,
            false => self.chunk_cost.rows_for(ROWS_BESIDE_TOKENS),
        };
        rows.map_or(CHUNK_POSITIONS, |rows| {
            rows.clamp(FEWEST_ROWS, CHUNK_POSITIONS)
        })
    }

    pub(super) fn chunks_in_flight(&self) -> usize {
        let flights = self.flights.values().flatten();
        flights.filter(|flight| flight.chunk).count()
    }

    /// Sends a sequence's last token, along with what is `forced` to follow, or with a draft if one is worth it; or waits for a draft model's.
    fn send_token(&mut self, id: SequenceId, forced: Vec<u32>, now: Instant) {
        if !self.limits.options.speculate {
            self.send(id, Part::Token(&[]), now);
            return;
        }
        let (limit, prices) = (self.draft_limit(id), self.prices());
        let Some(Sequence {
            text, speculation, ..
        }) = self.sequence(id)
        else {
            return;
        };
        let draft = match forced.is_empty() {
            true => speculation.look_up(text, limit, prices),
            false => speculation.force(text.len(), forced, limit),
        };
        if !draft.is_empty() || !self.asks_model(id, limit, prices, now) {
            self.send(id, Part::Token(&draft), now);
            self.run_ahead(id, now);
        }
    }

    /// Whether the draft model guesses what goes along with a sequence's last token. Nobody waits for it while it does something else, or is
    /// far behind.
    fn asks_model(&mut self, id: SequenceId, limit: usize, prices: Prices, now: Instant) -> bool {
        let free = self.draft_model_pays() && self.asked.is_none();
        let limit = self.guesses_to_wait_for(id).unwrap_or(limit).min(limit);
        let Some(sequence) = self.sequence(id).filter(|_| free) else {
            return false;
        };
        let length = sequence.text.len();
        if length.saturating_sub(sequence.speculation.taken_in) > FAR_BEHIND {
            return false;
        }
        let count = sequence.speculation.worth_of_model(length, limit, prices);
        if count > 0 {
            let text = sequence.text.clone();
            self.ask_model(id, text, count, true, now);
        }
        count > 0
    }

    /// With more sequences than members, passes are shared, and guesses only take time from them.
    pub(super) fn draft_model_pays(&self) -> bool {
        self.limits.options.draft_model && self.running.len() <= self.limits.members.len()
    }

    /// Has the draft model take in a piece of a text that it is far behind of, or guess ahead, if it has nothing else to do.
    pub(super) fn feed_draft_model(&mut self, now: Instant) {
        if self.asked.is_some() || !self.draft_model_pays() {
            return;
        }
        let mut running: Vec<SequenceId> = self.running.values().copied().collect();
        running.sort_unstable();
        running.retain(|id| self.read(*id) == Read::Continuation);
        for id in running {
            let Some(sequence) = self.sequence(id) else {
                continue;
            };
            let (length, taken_in) = (sequence.text.len(), sequence.speculation.taken_in);
            if length.saturating_sub(taken_in) > FAR_BEHIND {
                let text = sequence.text[..length.min(taken_in + MAX_FRAME_ROWS)].to_vec();
                return self.ask_model(id, text, 0, false, now);
            }
        }
        self.guess_ahead(now);
    }

    /// Has the draft model take in a text, and guess the `count` tokens that follow it. `waits`: the sequence's last token waits for that.
    pub(super) fn ask_model(
        &mut self,
        id: SequenceId,
        text: Vec<u32>,
        count: usize,
        waits: bool,
        now: Instant,
    ) {
        let Some(keyspace) = self.requests.get(&id.0).map(|one| one.keyspace) else {
            return;
        };
        self.asked = Some(DraftJob {
            id,
            text: text.clone(),
            count,
            waits,
            since: now,
        });
        self.actions.push(Action::Guess {
            request: id.0,
            choice: id.1,
            keyspace,
            text,
            count,
        });
    }

    pub(super) fn guessed(
        &mut self,
        id: SequenceId,
        taken_in: usize,
        mut tokens: Vec<u32>,
        took: Duration,
        now: Instant,
    ) {
        let Some(DraftJob {
            text, count, waits, ..
        }) = self.asked.take()
        else {
            return;
        };
        let limit = self.draft_limit(id);
        let Some(sequence) = self.sequence(id) else {
            return;
        };
        let speculation = &mut sequence.speculation;
        // The last token that it guessed is not computed.
        let computed = taken_in + tokens.len().saturating_sub(1);
        let newly = computed.saturating_sub(speculation.taken_in).max(1);
        let said = [text.as_slice(), &tokens].concat();
        if waits {
            tokens.truncate(limit);
            speculation.take_guess(&tokens);
            self.send(id, Part::Token(&tokens), now);
        } else if count > 0 {
            self.guessed_ahead(id, &text, &tokens, now);
        }
        if let Some(sequence) = self.sequence(id) {
            let held = common_prefix(&said[..computed], &sequence.on_ring());
            sequence.speculation.taken_in = held;
        }
        if said.len() > text.len() {
            let seconds = took.as_secs_f64() / newly as f64;
            self.guess_seconds = match self.guess_seconds {
                0.0 => seconds,
                before => before + (seconds - before) / 4.0,
            };
        }
    }

    /// The draft model is gone; whoever waits for it goes on without.
    pub(super) fn no_more_guesses(&mut self, now: Instant) {
        self.limits.options.draft_model = false;
        self.wait_no_longer(now);
        self.asked = None;
    }

    /// Sends the last token of the sequence that waits for the draft model, if any.
    fn wait_no_longer(&mut self, now: Instant) {
        if let Some(asked) = self.asked.as_mut().filter(|asked| asked.waits) {
            asked.waits = false;
            let id = asked.id;
            self.send(id, Part::Token(&[]), now);
        }
    }

    /// A guess that takes this long is not waited for.
    pub(super) fn give_up_late_guess(&mut self, now: Instant) {
        let late = |asked: &DraftJob| now.saturating_duration_since(asked.since) > LATE_GUESS;
        if self.asked.as_ref().is_some_and(late) {
            self.wait_no_longer(now);
        }
    }

    /// Sends what comes next of a sequence's text. `true`: there is more.
    fn send(&mut self, id: SequenceId, part: Part<'_>, now: Instant) -> bool {
        let most = match part {
            Part::Chunk => self.chunk_rows(id),
            Part::Token(_) => MAX_FRAME_ROWS,
        };
        let Some(&mut Sequence {
            ref text,
            state: State::Running { session, sent },
            ..
        }) = self.sequence(id)
        else {
            return false;
        };
        let end = text.len().min(sent + most);
        let (mut tokens, last) = (text[sent..end].to_vec(), end == text.len());
        if !self.make_room(id, session, sent, tokens.len(), now) {
            return false;
        }
        let (chunk, draft) = match part {
            Part::Chunk => (true, &[][..]),
            Part::Token(draft) => (false, draft),
        };
        tokens.extend(draft);
        if let Some(sequence) = self.sequence(id) {
            sequence.state = State::Running { session, sent: end };
        }
        let read = self.read(id);
        let expected = self.expected(tokens.len(), chunk);
        let flying =
            |session: &SessionId| self.flights.get(session).is_some_and(|own| !own.is_empty());
        let flight = Flight {
            awaited: self.awaited(expected, now),
            chunk,
            brings: (last || read == Read::AllStates).then_some(id),
            alone: !self.flights.keys().any(flying),
            rows: tokens.len(),
            tells_cost: match chunk {
                true => tokens.len() <= CHUNK_POSITIONS,
                false => self.chunks_in_flight() == 0 && !flying(&session),
            },
        };
        let wanted = match read {
            Read::AllStates => tokens.len(),
            Read::Continuation | Read::LastState | Read::LastScores => {
                usize::from(last) + draft.len()
            }
        };
        let output = match read {
            Read::Continuation => Output::Logits,
            Read::LastState | Read::AllStates => Output::States,
            Read::LastScores => Output::Scores,
        };
        self.send_tokens(session, sent, tokens, (wanted, output), flight);
        !last
    }

    /// How many tokens of a draft can follow what is on the ring of a sequence, or go along with its last token. Nobody makes room for them.
    pub(super) fn draft_limit(&self, id: SequenceId) -> usize {
        let Some(request) = self.requests.get(&id.0) else {
            return 0;
        };
        let sequence = &request.sequences[id.1];
        let State::Running { session, sent } = sequence.state else {
            return 0;
        };
        // The last token that is asked for needs no row.
        let end = request.prompt.len().saturating_add(request.max_tokens);
        let end = end.min(self.limits.context_length + 1);
        let (text, ahead) = (sequence.text.len(), sequence.speculation.drafted().len());
        let sequences = self.requests.values().flat_map(|one| &one.sequences);
        let drafted: usize = sequences.map(|one| one.speculation.drafted().len()).sum();
        let mut limit = end
            .saturating_sub(text + ahead + 1)
            .min(self.limits.longest_draft.saturating_sub(ahead))
            .min(DRAFTED_ROWS.saturating_sub(drafted));
        let fits = |limit| {
            let rows = text - sent + limit;
            self.ledger.fits(session, sent + ahead, rows)
        };
        while limit > 0 && !fits(limit) {
            limit /= 2;
        }
        limit
    }

    pub(super) fn prices(&self) -> Prices {
        let sequences = self.running.len() as f64 / self.limits.members.len() as f64;
        Prices {
            row: self.cost_alone.of_a_row(),
            guess: self.cost_alone.in_passes(self.guess_seconds),
            sequences: sequences.max(1.0),
        }
    }

    pub(super) fn send_tokens(
        &mut self,
        session: SessionId,
        first_position: usize,
        tokens: Vec<u32>,
        (wanted, output): (usize, Output),
        flight: Flight,
    ) {
        self.ledger.extend(session, first_position, tokens.len());
        self.flights.entry(session).or_default().push_back(flight);
        self.actions.push(Action::Send {
            request: self.running.get(&session).map(|(request, _)| *request),
            session,
            first_position,
            tokens,
            wanted,
            output,
        });
    }

    pub(super) fn home(
        &mut self,
        session: SessionId,
        trip: Duration,
        slowest: Duration,
        now: Instant,
    ) {
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
            self.fails_at = None;
            self.lost = None;
            return self.release(session, now);
        }
        if flight.tells_cost && flight.chunk {
            self.chunk_cost.add(flight.rows, trip);
        } else if flight.tells_cost && self.chunks_in_flight() == 0 {
            let took = now.saturating_duration_since(flight.awaited.begun);
            self.cost.add(flight.rows, took);
            let mut flights = self.flights.iter();
            let shared = flights.any(|(&other, own)| other != session && !own.is_empty());
            if flight.alone && !shared {
                self.cost_alone.add(flight.rows, took);
            }
        }
        let Some((request, choice)) = flight.brings else {
            return;
        };
        if self.read((request, choice)) != Read::Continuation {
            return self.states((request, choice), session, now);
        }
        if !flight.chunk {
            self.pass_times.add(slowest);
            if flight.alone {
                self.pass_times.add_trip(trip);
            }
        }
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
        let draft = sequence.map(|one| one.speculation.drafted().collect());
        self.actions.push(Action::Sample {
            request,
            choices,
            draft: draft.unwrap_or_default(),
        });
    }

    /// States of a sequence came home from its session.
    fn states(&mut self, id: SequenceId, session: SessionId, now: Instant) {
        let whole = self.sequence(id).is_some_and(|sequence| {
            let State::Running { sent, .. } = sequence.state else {
                return false;
            };
            sent == sequence.text.len()
        });
        let under_way = self.flights.get(&session);
        let last = whole && under_way.is_none_or(VecDeque::is_empty);
        self.actions.push(Action::Pool {
            request: id.0,
            last,
        });
        if last {
            self.stop(id, now);
            self.requests.remove(&id.0);
        }
    }

    /// What is read of a sequence's text.
    fn read(&self, (request, _): SequenceId) -> Read {
        let request = self.requests.get(&request);
        request.map_or(Read::Continuation, |one| one.read)
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
            let of_all = &mut self.short_matches;
            let right = sequence.speculation.verified(&next.tokens, of_all);
            if let State::Running { session, sent } = &mut sequence.state {
                *sent += right;
                let session = *session;
                if right < next.tokens.len() {
                    let position = sequence.text.len() - 1;
                    sequence.speculation.refuted(position, of_all);
                    self.ignore_flights(session);
                }
            }
            if follows && !next.ended {
                self.follow((id, next.choice), first);
            }
        }
        for Sampled {
            choice,
            tokens,
            ended,
            forced,
        } in sampled
        {
            if !ended {
                self.keep_prompt((id, choice), tokens.len(), now);
            }
            let sequence = self.sequence((id, choice));
            let length = sequence.as_ref().map_or(0, |one| one.text.len());
            match (ended, sequence.map(|one| &one.state)) {
                // It came with the draft.
                (false, Some(State::Running { sent, .. })) if *sent == length => {
                    self.run_ahead((id, choice), now);
                }
                (false, Some(State::Running { .. })) => self.send_token((id, choice), forced, now),
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
