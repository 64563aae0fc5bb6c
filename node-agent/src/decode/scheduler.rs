//! Decides what goes round the ring next: which request begins, which prompt sends its next chunk, what is kept of a conversation, who
//! waits when memory runs short, and what becomes of requests when something is lost. Pure: events and the time in, actions out. It
//! computes nothing, samples nothing and knows no channel.
//!
//! A *sequence* is one choice of a request. Whatever of its text has not gone round is sent, in chunks, and the last row of it brings the
//! next token. So a prompt, a token and an answer that was set aside are one case.
//!
//! With a token a draft of the next ones may go, guessed from the text so far. The rows that come home are sampled one after the other, for
//! as long as the draft says the same; so the text is that of single tokens, and several come for one trip round the ring. What was guessed
//! wrong is overwritten by the next frame.
//!
//! What a sequence has computed stays on the ring as a kept session until room is needed. A new sequence takes over the longest prefix
//! that any session of the same key space holds, up to its last token but one: a row must be computed to have logits.

mod kept;
mod ngrams;
mod pass_cost;
#[cfg(test)]
mod simulated_ring;
mod speculation;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::model_profile::AttentionWindow;
use prima_crds::v1alpha1::ring_plan::{RingPlanSpec, Speed};

use super::kv_ledger::{KvLedger, Windows};
use crate::generation::{GenerationError, KvUse, Readiness};
use crate::ring::{MAX_FRAME_ROWS, SessionId, session_capacity};
use kept::{Kept, Prefix, common_prefix};
use pass_cost::PassCost;
use speculation::Speculation;

pub type RequestId = u64;
pub type ClientId = u64;
/// A request, and which of its choices.
type SequenceId = (RequestId, usize);

#[derive(Debug)]
pub enum Event {
    Submitted {
        request: RequestId,
        prompt: Arc<[u32]>,
        choices: usize,
        max_tokens: usize,
        /// Requests share prefixes within it only.
        keyspace: u64,
        /// Clients take turns.
        client: ClientId,
    },
    /// The client has gone, or the request cannot go on. What it computed is kept.
    Cancelled { request: RequestId },
    /// The oldest frame in flight of this session came home.
    Home { session: SessionId },
    /// What [`Action::Sample`] asked for.
    Sampled {
        request: RequestId,
        choices: Vec<Sampled>,
    },
    /// A member did not compute a frame of this session.
    Refused { session: SessionId, reason: String },
    /// No member holds this session any more.
    Released { session: SessionId },
    /// A probe came home.
    Whole { nonce: u64 },
    /// The ring is broken at this rank; all sessions are gone.
    Lost { rank: usize, cause: String },
    /// A member is at a long pass and gets on.
    Busy,
    /// Time has passed.
    Tick,
}

/// How a choice goes on.
#[derive(Debug)]
pub struct Sampled {
    pub choice: usize,
    /// The next tokens. All but the last are the draft's; if the choice has ended, all are, and the token that ended it is none of them.
    pub tokens: Vec<u32>,
    pub ended: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Ask whether the ring is whole. All sessions end.
    Probe {
        nonce: u64,
    },
    Create {
        session: SessionId,
    },
    Fork {
        parent: SessionId,
        child: SessionId,
    },
    Truncate {
        session: SessionId,
        positions: usize,
    },
    Release {
        session: SessionId,
    },
    /// Send these tokens round, in place of what the session holds from `first_position` on. The logits of the last `wanted` are asked for.
    Send {
        session: SessionId,
        first_position: usize,
        tokens: Vec<u32>,
        wanted: usize,
    },
    /// The request is being computed, but for the first `cached` tokens of its prompt, which the ring had.
    Begun {
        request: RequestId,
        cached: usize,
    },
    /// The first row that just came home decides the next token of these choices; as long as that is the next of `draft`, the next row
    /// decides the one after. [`Event::Sampled`] answers.
    Sample {
        request: RequestId,
        choices: Range<usize>,
        draft: Vec<u32>,
    },
    /// The request is over.
    Fail {
        request: RequestId,
        error: GenerationError,
    },
}

pub struct Scheduler {
    limits: Limits,
    phase: Phase,
    readiness: Readiness,
    last_session: SessionId,
    last_nonce: u64,
    requests: BTreeMap<RequestId, Request>,
    /// Sequences without a session that want one. The oldest request is first, also when it was set aside.
    waiting: BTreeSet<SequenceId>,
    /// Sequences with more to send than one token, in turn.
    prefilling: VecDeque<SequenceId>,
    running: BTreeMap<SessionId, SequenceId>,
    kept: Kept,
    /// Sessions that are being released.
    releasing: BTreeMap<SessionId, Awaited>,
    /// Frames of each session that have not come home, oldest first.
    flights: BTreeMap<SessionId, VecDeque<Flight>>,
    /// Frames and releases that have come home so far.
    homecomings: u64,
    /// When something last came home, or a member said that it gets on.
    progress: Option<Instant>,
    /// Of passes that carry single tokens and drafts.
    cost: PassCost,
    /// Chunks of prompts so far, and when each client last had its turn, in these.
    chunks: u64,
    turns: BTreeMap<ClientId, u64>,
    ledger: KvLedger,
    actions: Vec<Action>,
}

/// What the plan allows.
struct Limits {
    members: Vec<String>,
    context_length: usize,
    /// Sequences at a time.
    at_once: usize,
    /// Sessions that members hold.
    sessions: usize,
    /// How much longer than expected something may take to come home.
    grace: Duration,
    /// What the plan expects.
    planned: Option<Speed>,
    /// What goes round first.
    warm_up: u32,
    /// Whether drafts are sent.
    speculate: bool,
    /// The most tokens of a draft: layers with a window must be able to go back by as much.
    longest_draft: usize,
}

enum Phase {
    /// Asking whether the ring is whole. Any answer counts from this one on; on slow links several are under way.
    Probing {
        first_nonce: u64,
        asked: Option<Instant>,
    },
    /// The ring is whole; one token goes round.
    WarmingUp {
        session: SessionId,
    },
    Ready,
    /// The warm-up failed: the model cannot be computed.
    Failed,
}

struct Request {
    prompt: Arc<[u32]>,
    keyspace: u64,
    client: ClientId,
    max_tokens: usize,
    begun: bool,
    sequences: Vec<Sequence>,
}

struct Sequence {
    /// Prompt and answer so far.
    text: Vec<u32>,
    state: State,
    speculation: Speculation,
}

enum State {
    /// Waits for a session.
    Waiting,
    /// Waits for the first choice to compute the prompt.
    Following,
    /// The first `sent` tokens of its text are on the ring, or on their way. A draft may follow them there.
    Running {
        session: SessionId,
        sent: usize,
    },
    Ended,
}

struct Flight {
    awaited: Awaited,
    /// Part of a text, not a token that was just sampled.
    chunk: bool,
    /// Whose next token it brings.
    brings: Option<SequenceId>,
    /// Of one token and its draft, if no chunk was on the ring when it left: its time is then that of a pass of so many rows.
    pass_rows: Option<usize>,
}

/// Something on the ring that must come home.
struct Awaited {
    begun: Instant,
    /// How long it takes on a ring that does what is expected of it.
    expected: Duration,
    /// It counts as lost after this long if nothing else comes home either,
    limit: Duration,
    /// or so much that was sent later: frames hardly overtake one another.
    overtaken_at: u64,
}

/// A prefix that is on the ring.
struct Source {
    session: SessionId,
    /// Positions that the session holds.
    length: usize,
    /// The first of them that the new text shares.
    shared: usize,
    kept: bool,
}

const PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// Tokens of an answer that room is made for when it begins, if its share of the context has as many; most are shorter, and clients seldom
/// tell.
const EXPECTED_ANSWER: usize = 256;
/// A kept prefix that ends this soon after what a new text shares is cut and taken over; a longer one stays, and the new text branches off.
const SHORT_TAIL: usize = MAX_FRAME_ROWS;
/// Frames may take so many times as long as the plan says, or as others took lately, when their machines have other work to do.
const PATIENCE: u32 = 4;
/// More frames than can overtake one that waits for its window.
const OVERTAKING: u64 = 32;
/// For whoever looks at a machine's memory: a conversation is not kept for longer.
const KEPT_FOR: Duration = Duration::from_secs(3600);

impl Scheduler {
    /// `window`: of the model's layers that see the last positions only. `warm_up`: a token of the vocabulary. `grace`: how much longer
    /// than expected something may take to come home. `speculate`: whether drafts are sent.
    pub fn new(
        plan: &RingPlanSpec,
        window: Option<AttentionWindow>,
        warm_up: u32,
        grace: Duration,
        speculate: bool,
    ) -> Self {
        let context_length = plan.context_length as usize;
        let contexts = plan.kv_contexts as usize;
        let windows = window.map(|window| Windows {
            window: window.positions,
            kept: window.kept(),
            planned: contexts * window.planned(context_length),
        });
        Self {
            limits: Limits {
                members: plan.members.iter().map(|one| one.name.clone()).collect(),
                context_length,
                at_once: plan.max_concurrent_requests as usize,
                sessions: session_capacity(plan),
                grace,
                planned: plan.predicted,
                warm_up,
                speculate,
                longest_draft: window.map_or(usize::MAX, |window| window.positions - 1),
            },
            phase: Phase::Probing {
                first_nonce: 1,
                asked: None,
            },
            readiness: Readiness::Loading("waiting for the ring's members".into()),
            last_session: 0,
            last_nonce: 0,
            requests: BTreeMap::new(),
            waiting: BTreeSet::new(),
            prefilling: VecDeque::new(),
            running: BTreeMap::new(),
            kept: Kept::default(),
            releasing: BTreeMap::new(),
            flights: BTreeMap::new(),
            homecomings: 0,
            progress: None,
            cost: PassCost::default(),
            chunks: 0,
            turns: BTreeMap::new(),
            ledger: KvLedger::new(contexts * context_length, windows),
            actions: Vec::new(),
        }
    }

    /// What has to be done now, in this order.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Submitted {
                request,
                prompt,
                choices,
                max_tokens,
                keyspace,
                client,
            } => {
                let submitted = Request {
                    sequences: Vec::new(),
                    prompt,
                    keyspace,
                    client,
                    max_tokens,
                    begun: false,
                };
                self.submit(request, submitted, choices);
            }
            Event::Cancelled { request } => self.cancel(request, now),
            Event::Home { session } => self.home(session, now),
            Event::Sampled { request, choices } => self.sampled(request, choices, now),
            Event::Refused { session, reason } => self.refused(session, reason, now),
            Event::Released { session } => {
                self.releasing.remove(&session);
                self.came_home(now);
            }
            Event::Whole { nonce } => self.whole(nonce, now),
            Event::Lost { rank, cause } => self.lost(rank, cause, now),
            Event::Busy => self.progress = Some(now),
            Event::Tick => self.tick(now),
        }
        self.begin_what_fits(now);
        self.send_chunks(now);
        std::mem::take(&mut self.actions)
    }

    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// Requests that have begun, and those that have not.
    pub fn requests(&self) -> (usize, usize) {
        let begun = self.requests.values().filter(|one| one.begun).count();
        (begun, self.requests.len() - begun)
    }

    /// Whether a client has as many requests waiting as each would have, if all that have any shared `limit`.
    pub fn waits_its_share(&self, client: ClientId, limit: usize) -> bool {
        let waiting = self.requests.values().filter(|one| !one.begun);
        let waiting: Vec<ClientId> = waiting.map(|one| one.client).collect();
        let clients: BTreeSet<ClientId> = waiting.iter().copied().chain([client]).collect();
        let own = waiting.iter().filter(|other| **other == client).count();
        own >= limit / clients.len()
    }

    /// KV cache, in positions, and the sessions that hold it.
    pub fn kv(&self) -> KvUse {
        let (planned, used, kept) = self.ledger.positions();
        KvUse {
            planned_positions: planned,
            used_positions: used,
            kept_positions: kept,
            sessions: self.running.len() + self.kept.len(),
        }
    }

    // ---- requests ----

    fn submit(&mut self, id: RequestId, mut request: Request, choices: usize) {
        let sequence = |choice| {
            let (text, state) = match choice {
                0 => (request.prompt.to_vec(), State::Waiting),
                _ => (Vec::new(), State::Following),
            };
            Sequence {
                text,
                state,
                speculation: Speculation::default(),
            }
        };
        request.sequences = (0..choices).map(sequence).collect();
        self.requests.insert(id, request);
        self.waiting.insert((id, 0));
    }

    fn cancel(&mut self, id: RequestId, now: Instant) {
        for choice in self.choices(id) {
            self.stop((id, choice), now);
        }
        self.requests.remove(&id);
    }

    fn fail(&mut self, id: RequestId, error: GenerationError, now: Instant) {
        for choice in self.choices(id) {
            if let Some((session, _)) = self.leave((id, choice)) {
                self.release(session, now);
            }
        }
        if self.requests.remove(&id).is_some() {
            self.actions.push(Action::Fail { request: id, error });
        }
    }

    fn choices(&self, id: RequestId) -> Range<usize> {
        0..self.requests.get(&id).map_or(0, |one| one.sequences.len())
    }

    fn sequence(&mut self, (request, choice): SequenceId) -> Option<&mut Sequence> {
        self.requests.get_mut(&request)?.sequences.get_mut(choice)
    }

    /// Ends a sequence and keeps what it computed.
    fn stop(&mut self, id: SequenceId, now: Instant) {
        let held = self.leave(id);
        let Some(request) = self.requests.get_mut(&id.0) else {
            return;
        };
        let keyspace = request.keyspace;
        let sequence = &mut request.sequences[id.1];
        sequence.state = State::Ended;
        sequence.speculation = Speculation::default();
        let mut text = std::mem::take(&mut sequence.text);
        if let Some((session, sent)) = held {
            text.truncate(sent);
            self.keep(session, text, keyspace, now);
        }
    }

    /// Gives a sequence's place to an older one. What it computed is kept for as long as nobody needs the room.
    fn set_aside(&mut self, id: SequenceId, now: Instant) {
        let held = self.leave(id);
        let Some(request) = self.requests.get_mut(&id.0) else {
            return;
        };
        let keyspace = request.keyspace;
        let sequence = &mut request.sequences[id.1];
        sequence.state = State::Waiting;
        let text = held.map(|(session, sent)| (session, sequence.text[..sent].to_vec()));
        self.waiting.insert(id);
        if let Some((session, text)) = text {
            self.keep(session, text, keyspace, now);
        }
    }

    /// Takes a sequence off the ring. Its session, if it has one, is nobody's then; it holds so many tokens of the text.
    fn leave(&mut self, id: SequenceId) -> Option<(SessionId, usize)> {
        self.waiting.remove(&id);
        self.prefilling.retain(|other| *other != id);
        let State::Running { session, sent } = self.sequence(id)?.state else {
            return None;
        };
        if let Some(sequence) = self.sequence(id) {
            sequence.speculation.withdraw();
        }
        self.running.remove(&session);
        for flight in self.flights.get_mut(&session).into_iter().flatten() {
            flight.brings = None;
        }
        Some((session, sent))
    }

    // ---- sessions ----

    fn new_session(&mut self) -> SessionId {
        self.last_session += 1;
        self.last_session
    }

    fn sessions_left(&self) -> usize {
        let held = self.running.len() + self.kept.len() + self.releasing.len();
        self.limits.sessions.saturating_sub(held)
    }

    /// Leaves a session on the ring with `text`, all that is known of what it holds.
    fn keep(&mut self, session: SessionId, text: Vec<u32>, keyspace: u64, now: Instant) {
        if self.ledger.length(session) > text.len() {
            self.truncate(session, text.len());
        }
        self.ledger.set_busy(session, false);
        let within = |held: &[u32]| held.len() >= text.len() && held[..text.len()] == text[..];
        let covering = self.kept.of(keyspace).find(|(other, held)| {
            within(held) && self.ledger.shortest(*other) <= text.len().saturating_sub(1)
        });
        if let Some((other, _)) = covering {
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
            last_used: now,
        };
        self.kept.insert(session, prefix);
        // As many again may be on their way out.
        while self.kept.len() > self.limits.sessions / 2
            && let Some(oldest) = self.kept.oldest()
        {
            self.forget(oldest, now);
        }
    }

    fn forget(&mut self, session: SessionId, now: Instant) {
        self.kept.remove(session);
        self.release(session, now);
    }

    fn release(&mut self, session: SessionId, now: Instant) {
        self.ledger.release(session);
        self.flights.remove(&session);
        let awaited = self.awaited(Duration::ZERO, now);
        self.releasing.insert(session, awaited);
        self.actions.push(Action::Release { session });
    }

    /// Gives back kept positions: some `blocks` of them, or a whole session where that is all there is. `false`: nothing is kept.
    fn give_up_kept(&mut self, blocks: usize, now: Instant) -> bool {
        let Some(oldest) = self.kept.oldest() else {
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

    fn truncate(&mut self, session: SessionId, positions: usize) {
        self.ledger.truncate(session, positions);
        self.actions.push(Action::Truncate { session, positions });
    }

    // ---- beginning ----

    /// Starts what waits while there is room: of the client that has the fewest sequences on the ring, the oldest. A client that has many
    /// more makes room for it.
    fn begin_what_fits(&mut self, now: Instant) {
        while let Phase::Ready = self.phase
            && let Some(id) = self.next_to_begin()
            && let Some(request) = self.requests.get(&id.0)
        {
            let following = |sequence: &&Sequence| matches!(sequence.state, State::Following);
            let wanted = match request.begun {
                true => 1,
                false => request.sequences.len(),
            };
            let begun = self.requests.values().filter(|other| other.begun);
            let promised = begun.flat_map(|other| &other.sequences).filter(following);
            let free = self.running.len() + promised.count() + wanted <= self.limits.at_once;
            let source = self.best_source(request, &request.sequences[id.1].text);
            if !free || !self.has_room(id, source.as_ref()) {
                match self.beyond_its_share(request.client, wanted) {
                    Some(other) => self.set_aside(other, now),
                    None => break,
                }
                continue;
            }
            let adopts =
                |source: &Source| source.kept && source.length - source.shared < SHORT_TAIL;
            if self.sessions_left() == 0 && !source.as_ref().is_some_and(adopts) {
                break;
            }
            self.begin(id, source, now);
        }
    }

    fn next_to_begin(&self) -> Option<SequenceId> {
        let waiting = self.waiting.iter();
        let of_client = |id: &&SequenceId| (self.sequences_of(self.client(**id)), **id);
        waiting.min_by_key(of_client).copied()
    }

    fn client(&self, (request, _): SequenceId) -> ClientId {
        self.requests.get(&request).map_or(0, |one| one.client)
    }

    /// Sequences of a client on the ring.
    fn sequences_of(&self, client: ClientId) -> usize {
        let running = self.running.values();
        running.filter(|id| self.client(**id) == client).count()
    }

    /// The youngest sequence of the client that has the most on the ring. It is never the oldest of all that run, unless it is alone.
    fn youngest_of_most(&self) -> Option<SequenceId> {
        let by_share = |id: &&SequenceId| (self.sequences_of(self.client(**id)), **id);
        self.running.values().max_by_key(by_share).copied()
    }

    /// A sequence that gives way, so that `client` can have `wanted` more and still no more than its owner.
    fn beyond_its_share(&self, client: ClientId, wanted: usize) -> Option<SequenceId> {
        let youngest = self.youngest_of_most()?;
        let most = self.sequences_of(self.client(youngest));
        (most > self.sequences_of(client) + wanted).then_some(youngest)
    }

    /// The session that holds the most of the beginning of `text`.
    fn best_source(&self, request: &Request, text: &[u32]) -> Option<Source> {
        let source = |session, held: &[u32], kept| Source {
            session,
            length: held.len(),
            shared: common_prefix(held, &text[..text.len() - 1]),
            kept,
        };
        let kept = self.kept.of(request.keyspace);
        let kept = kept.map(|(session, held)| source(session, held, true));
        let running = self.running.iter().filter_map(|(&session, &id)| {
            let other = self.requests.get(&id.0)?;
            let State::Running { sent, .. } = other.sequences[id.1].state else {
                return None;
            };
            (other.keyspace == request.keyspace)
                .then(|| source(session, &other.sequences[id.1].text[..sent], false))
        });
        let usable =
            |one: &Source| one.shared > 0 && one.shared >= self.ledger.shortest(one.session);
        running
            .chain(kept)
            .filter(usable)
            .max_by_key(|one| (one.shared, one.kept))
    }

    /// Whether a sequence has room beside those that run, each with the answer that is expected of it.
    fn has_room(&self, id: SequenceId, source: Option<&Source>) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let share = self.limits.context_length / self.limits.at_once;
        let expected_answer = EXPECTED_ANSWER.min(share);
        let expected = |id: &SequenceId| {
            let request = self.requests.get(&id.0)?;
            let answer = request.max_tokens.min(expected_answer);
            let text = request.sequences[id.1].text.len();
            let length = text.max(request.prompt.len() + answer);
            Some(length.min(self.limits.context_length))
        };
        let running = self.running.iter();
        let running = running.filter_map(|(&session, id)| Some((session, expected(id)?)));
        let shared = source.map(|source| (source.session, source.shared));
        let positions = expected(&id).unwrap_or(0);
        self.ledger.has_room(running, positions, shared)
    }

    fn begin(&mut self, id: SequenceId, source: Option<Source>, now: Instant) {
        let shared = source.as_ref().map_or(0, |source| source.shared);
        let session = match source {
            None => {
                let session = self.new_session();
                self.ledger.begin(session);
                self.actions.push(Action::Create { session });
                session
            }
            Some(source) => {
                let short = source.length - source.shared < SHORT_TAIL || self.sessions_left() == 0;
                let session = if source.kept && short {
                    self.kept.remove(source.session);
                    self.ledger.set_busy(source.session, true);
                    source.session
                } else {
                    if let Some(prefix) = self.kept.get_mut(source.session) {
                        prefix.last_used = now;
                    }
                    let child = self.new_session();
                    self.fork(source.session, child);
                    child
                };
                if source.shared < self.ledger.length(session) {
                    self.truncate(session, source.shared);
                }
                session
            }
        };
        self.waiting.remove(&id);
        self.running.insert(session, id);
        self.prefilling.push_back(id);
        let Some(request) = self.requests.get_mut(&id.0) else {
            return;
        };
        request.sequences[id.1].state = State::Running {
            session,
            sent: shared,
        };
        if !request.begun {
            request.begun = true;
            self.actions.push(Action::Begun {
                request: id.0,
                cached: shared,
            });
        }
    }

    fn fork(&mut self, parent: SessionId, child: SessionId) {
        self.ledger.fork(parent, child);
        self.actions.push(Action::Fork { parent, child });
    }

    // ---- sending ----

    /// Keeps prompts flowing: one chunk more than there are members keeps them all busy, and a token waits for no more than these. Clients
    /// take turns, and the prompts of each.
    fn send_chunks(&mut self, now: Instant) {
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

    fn send_tokens(
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

    /// Makes room for `rows` positions after the first `first`: kept prefixes go first, then the youngest sequences are set aside. `false`:
    /// `id` itself was the youngest. The oldest is never set aside, so it always gets on.
    fn make_room(
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

    // ---- what comes home ----

    fn home(&mut self, session: SessionId, now: Instant) {
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

    fn sampled(&mut self, id: RequestId, sampled: Vec<Sampled>, now: Instant) {
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

    // ---- the ring's state ----

    fn probe(&mut self, now: Instant) {
        if let Phase::Probing { asked, .. } = &mut self.phase {
            *asked = Some(now);
            self.last_nonce += 1;
            let nonce = self.last_nonce;
            self.actions.push(Action::Probe { nonce });
        }
    }

    fn whole(&mut self, nonce: u64, now: Instant) {
        if !matches!(self.phase, Phase::Probing { first_nonce, .. } if first_nonce <= nonce) {
            return;
        }
        let session = self.new_session();
        self.ledger.begin(session);
        self.actions.push(Action::Create { session });
        self.phase = Phase::WarmingUp { session };
        self.readiness = Readiness::Loading("the first token goes round the ring".into());
        let token = vec![self.limits.warm_up];
        // Nobody's token, but its logits are wanted: the output head must work, too.
        let expected = self.expected(1, false);
        let flight = Flight {
            awaited: self.awaited(expected, now),
            chunk: false,
            brings: None,
            pass_rows: None,
        };
        self.send_tokens(session, 0, token, 1, flight);
    }

    fn refused(&mut self, session: SessionId, reason: String, now: Instant) {
        if matches!(self.phase, Phase::WarmingUp { session: warm } if warm == session) {
            tracing::error!(reason, "the ring cannot compute the model");
            self.phase = Phase::Failed;
            self.readiness = Readiness::Failed(reason);
        } else if let Some(&(request, _)) = self.running.get(&session) {
            self.fail(request, GenerationError::Refused { reason }, now);
        } else if self.kept.contains(session) {
            self.forget(session, now);
        }
    }

    fn lost(&mut self, rank: usize, cause: String, now: Instant) {
        let member = match self.limits.members.get(rank) {
            Some(member) => member.clone(),
            None => format!("of rank {rank}"),
        };
        self.break_off(
            format!("waiting for member {member}: {cause}"),
            GenerationError::MemberLost { member, cause },
            now,
        );
    }

    /// The ring is broken: nothing that was under way can be finished.
    fn break_off(&mut self, reason: String, error: GenerationError, now: Instant) {
        let (running, waiting) = self.requests();
        for request in std::mem::take(&mut self.requests).into_keys() {
            let error = error.clone();
            self.actions.push(Action::Fail { request, error });
        }
        self.waiting.clear();
        self.prefilling.clear();
        self.running.clear();
        self.kept.clear();
        self.releasing.clear();
        self.flights.clear();
        self.ledger.clear();
        self.readiness = Readiness::Loading(reason);
        // What was asked before may have passed members before they lost something.
        let first_nonce = self.last_nonce + 1;
        let asked = match self.phase {
            Phase::Probing { asked, .. } => asked,
            _ => {
                tracing::warn!(%error, running, waiting, "the ring is broken");
                Some(now)
            }
        };
        self.phase = Phase::Probing { first_nonce, asked };
    }

    fn tick(&mut self, now: Instant) {
        if let Phase::Probing { asked, .. } = self.phase
            && asked.is_none_or(|asked| now.saturating_duration_since(asked) >= PROBE_INTERVAL)
        {
            self.probe(now);
        }
        for session in self.kept.idle(now, KEPT_FOR) {
            self.forget(session, now);
        }
        let requests = &self.requests;
        self.turns
            .retain(|client, _| requests.values().any(|one| one.client == *client));
        self.give_up_lost(now);
    }

    // ---- what does not come home ----

    fn came_home(&mut self, now: Instant) {
        self.homecomings += 1;
        self.progress = Some(now);
    }

    /// Something that leaves now and is expected to take so long, once what is on the ring before it has come home.
    fn awaited(&self, expected: Duration, now: Instant) -> Awaited {
        let flights = self.flights.values().flatten();
        let before = flights.map(|flight| &flight.awaited);
        let before = before.chain(self.releasing.values());
        let (count, time) = before.fold((0, expected), |(count, time), one| {
            (count + 1, time + one.expected)
        });
        Awaited {
            begun: now,
            expected,
            limit: self.limits.grace + PATIENCE * time,
            overtaken_at: self.homecomings + count + OVERTAKING,
        }
    }

    /// How long a frame of so many tokens takes: what the plan says, or what such passes took lately if that is longer.
    fn expected(&self, rows: usize, chunk: bool) -> Duration {
        let planned = self.limits.planned.map_or(0, |speed| match chunk {
            true => speed.first_token_microseconds,
            false => speed.token_microseconds,
        });
        let planned = Duration::from_micros(planned.try_into().unwrap_or(0));
        planned.max(self.cost.of(rows))
    }

    /// Ends what waits for something that got lost: a request if only its frame did, else all of them.
    fn give_up_lost(&mut self, now: Instant) {
        let since = |begun: Instant| now.saturating_duration_since(begun);
        let silent = |one: &Awaited| {
            self.progress
                .is_none_or(|progress| since(progress.max(one.begun)) > one.limit)
        };
        let lost = |one: &Awaited| {
            since(one.begun) > one.limit && (silent(one) || self.homecomings >= one.overtaken_at)
        };
        let flights = self.flights.iter();
        let mut oldest =
            flights.filter_map(|(&session, flights)| Some((session, &flights.front()?.awaited)));
        if let Some((session, one)) = oldest.find(|(_, one)| lost(one)) {
            let error = GenerationError::Deadline {
                seconds: one.limit.as_secs(),
            };
            match self.running.get(&session) {
                Some(&(request, _)) if !silent(one) => self.fail(request, error, now),
                _ => self.break_off("nothing comes home any more".into(), error, now),
            }
        } else if let Some(one) = self.releasing.values().find(|one| lost(one)) {
            let error = GenerationError::Deadline {
                seconds: one.limit.as_secs(),
            };
            self.break_off("a session got lost on the ring".into(), error, now);
        }
    }
}
