//! Decides what goes round the ring next: which request begins, which prompt sends its next chunk, what is kept of a conversation, who
//! waits when memory runs short, and what becomes of requests when something is lost. Pure: events and the time in, actions out. It
//! computes nothing, samples nothing and knows no channel.
//!
//! A *sequence* is one choice of a request. Whatever of its text has not gone round is sent, in chunks, and the last row of it brings the
//! next token. So a prompt, a token and an answer that was set aside are one case.
//!
//! With a token a draft of the next ones may go, guessed from the text so far. The rows that come home are sampled one after the other, for
//! as long as the draft says the same; so the text is that of single tokens, and several come for one trip round the ring. What was guessed
//! wrong is overwritten by the next frame. Where members have nothing else to do, further drafts follow before the first is known.
//!
//! What a sequence has computed stays on the ring as a kept session until room is needed. A new sequence takes over the longest prefix
//! that any session of the same key space holds, up to its last token but one: a row must be computed to have logits.

mod admission;
mod chunk_cost;
mod kept;
mod next_turns;
mod ngrams;
mod pass_cost;
mod passes;
mod ring_state;
mod run_ahead;
mod sessions;
#[cfg(test)]
mod simulated_ring;
mod speculation;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod timed_ring;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::model_profile::AttentionWindow;
use prima_crds::v1alpha1::ring_plan::{CHUNK_POSITIONS, RingPlanSpec, Speed};

use super::kv_ledger::{KvLedger, WindowedKv};
use crate::generation::{GenerationError, KvUse, Readiness};
use crate::ring::{Output, SessionId, session_capacity};
use chunk_cost::ChunkCost;
pub use kept::common_prefix;
use kept::{Kept, Kind};
use next_turns::NextTurns;
use pass_cost::PassCost;
pub use ring_state::KEPT_FOR;
use run_ahead::PassTimes;
use speculation::{ShortMatches, Speculation};

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
        read: Read,
        /// Requests share prefixes within it only.
        keyspace: u64,
        /// Clients take turns.
        client: ClientId,
    },
    /// The client has gone, or the request cannot go on. What it computed is kept.
    Cancelled { request: RequestId },
    /// The oldest frame in flight of this session came home. It was on its way for `trip`, without waiting for others, and the slowest machine
    /// computed for `slowest`.
    Home {
        session: SessionId,
        trip: Duration,
        slowest: Duration,
    },
    /// What [`Action::Sample`] asked for.
    Sampled {
        request: RequestId,
        choices: Vec<Sampled>,
    },
    /// No token can be drawn from the logits that [`Action::Sample`] named. It may come of what the ring holds of the request, or what that began
    /// with, so none of that is kept.
    NothingFollows { request: RequestId, reason: String },
    /// A member did not compute a frame of this session.
    Refused {
        session: SessionId,
        rank: usize,
        reason: String,
    },
    /// No member holds this session any more.
    Released { session: SessionId },
    /// A draft model's answer to [`Action::Guess`]: how much of the text it knew, what it guessed, and how long that took.
    Guessed {
        request: RequestId,
        choice: usize,
        taken_in: usize,
        tokens: Vec<u32>,
        took: Duration,
    },
    /// Nobody answers [`Action::Guess`] any more.
    NoMoreGuesses,
    /// A probe came home.
    Whole { nonce: u64 },
    /// The ring is broken at this rank; all sessions are gone. Said by the neighbour of this other rank, which does not reach it; if by none, the
    /// member itself ends.
    Lost {
        rank: usize,
        missed_by: Option<usize>,
        cause: String,
    },
    /// A member is at a long pass and gets on.
    Busy,
    /// Time has passed.
    Tick,
}

/// What is read of a text that goes round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// How it goes on, from then on token by token.
    Continuation,
    /// The state behind its last token.
    LastState,
    /// The scores that the classifier makes of it.
    LastScores,
    /// The state behind each. So all are computed, whatever of them the ring has already.
    AllStates,
}

/// How a choice goes on.
#[derive(Debug)]
pub struct Sampled {
    pub choice: usize,
    /// The next tokens. All but the last are the draft's, and that one may be; if the choice has ended, all are, and the token that ended it is
    /// none of them.
    pub tokens: Vec<u32>,
    /// The only tokens that a grammar lets follow, in part. They go along as a draft.
    pub forced: Vec<u32>,
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
    /// Send these tokens round, in place of what the session holds from `first_position` on. The last `wanted` are asked for,
    /// as `output`.
    Send {
        /// Whose they are. The first token of all is nobody's.
        request: Option<RequestId>,
        session: SessionId,
        first_position: usize,
        tokens: Vec<u32>,
        wanted: usize,
        output: Output,
    },
    /// The request is being computed, but for the first `cached` tokens of its prompt, which the ring had. If all states are read, it may be
    /// said again: they come from the first on.
    Begun {
        request: RequestId,
        cached: usize,
    },
    /// The first row that just came home decides the next token of these choices; as long as that is the next of `draft`, the next row
    /// decides the one after. The draft may go on behind these rows. [`Event::Sampled`] answers.
    Sample {
        request: RequestId,
        choices: Range<usize>,
        draft: Vec<u32>,
    },
    /// The rows that just came home are the next states of the request. With the `last` of them it is over.
    Pool {
        request: RequestId,
        last: bool,
    },
    /// Have the draft model take in this text of a choice and guess `count` tokens. [`Event::Guessed`] answers.
    Guess {
        request: RequestId,
        choice: usize,
        /// Requests share texts within it only.
        keyspace: u64,
        text: Vec<u32>,
        count: usize,
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
    /// The rank at which a ring fails that is not ready.
    fails_at: Option<usize>,
    /// Since it was whole last: who is not reached, and by which of its neighbours.
    missed: BTreeSet<(usize, usize)>,
    /// Until when requests wait for a member that was lost, and what they fail with then.
    lost: Option<(Instant, GenerationError)>,
    last_session: SessionId,
    last_nonce: u64,
    requests: BTreeMap<RequestId, Request>,
    /// Sequences without a session that want one. The oldest request is first, also when it was set aside.
    waiting: BTreeSet<SequenceId>,
    /// How many waited and ran when nobody could begin. While that is so, no room has come free, so only whose turn it is is looked at again.
    nobody_fits: Option<(usize, usize)>,
    /// Sequences with more to send than one token, in turn.
    prefilling: VecDeque<SequenceId>,
    running: BTreeMap<SessionId, SequenceId>,
    kept: Kept,
    next_turns: NextTurns,
    /// Sessions that are being released.
    releasing: BTreeMap<SessionId, Awaited>,
    /// Frames of each session that have not come home, oldest first.
    flights: BTreeMap<SessionId, VecDeque<Flight>>,
    /// Frames and releases that have come home so far.
    returned: u64,
    /// When something last came home, or a member said that it gets on.
    progress: Option<Instant>,
    /// Since when ticks have come without a pause, and the last of them.
    ticks: Option<(Instant, Instant)>,
    /// All that is waited for takes longer than it may, and nothing comes home.
    late: bool,
    /// Of frames that carry single tokens and drafts, until they are home.
    cost: PassCost,
    /// Of those that met no others. Frames of several sequences share passes and take as long as these, however few rows they have: as if rows took
    /// nothing.
    cost_alone: PassCost,
    /// Of chunks, without what they waited for others.
    chunk_cost: ChunkCost,
    pass_times: PassTimes,
    /// What new sequences begin with.
    short_matches: ShortMatches,
    /// What the draft model is at.
    asked: Option<DraftJob>,
    /// What it takes for a token, in seconds.
    guess_seconds: f64,
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
    /// The most of a prompt that go round together.
    chunk_positions: usize,
    /// Sequences at a time.
    at_once: usize,
    /// Sessions that members hold.
    sessions: usize,
    /// What the plan expects.
    planned: Option<Speed>,
    /// What goes round first.
    warm_up: u32,
    options: Options,
    /// The most tokens of a draft: layers with a window must be able to go back by as much.
    longest_draft: usize,
    /// Chunks are not smaller than usual, whoever waits: their weights come from a disk, or go to a GPU, for each of that size.
    whole_chunks: bool,
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
}

struct Request {
    prompt: Arc<[u32]>,
    keyspace: u64,
    client: ClientId,
    max_tokens: usize,
    read: Read,
    begun: bool,
    /// How many others began when it was its turn, but it did not fit.
    passed: usize,
    /// How many times the ring broke with it.
    breaks: usize,
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
    /// Nothing else was on the ring when it left.
    alone: bool,
    rows: usize,
    /// Its time is that of a pass of so many rows: it is a chunk (of the usual size at most: a GPU may compute larger ones, and the processor these),
    /// or a token and its draft that left when no chunk was on the ring, and nothing of its session.
    tells_cost: bool,
}

/// One job of the draft model.
struct DraftJob {
    id: SequenceId,
    /// What it takes in, and how many tokens it guesses.
    text: Vec<u32>,
    count: usize,
    /// Whether the sequence waits for it, with its last token.
    waits: bool,
    since: Instant,
}

/// Something on the ring that must come home.
struct Awaited {
    begun: Instant,
    /// How long it takes on a ring that does what is expected of it.
    expected: Duration,
    /// How long it may take, behind what was on the ring before it. If nothing else comes home either, nor may take longer, it is late soon after that
    /// (`ring_state`), and counts as lost later ([`Options::grace`]).
    may_take: Duration,
    /// It also counts as lost if so much came home that was sent later: frames hardly overtake one another.
    overtaken_at: u64,
}

/// Requests that may wait, per sequence that the ring computes at once.
const WAITING_PER_SEQUENCE: usize = 4;
/// Tokens of all prompts in hand together: no more wait behind these. Each takes 8 bytes.
const PROMPT_TOKENS: usize = 8 << 20;

/// What the caller chooses.
#[derive(Clone, Copy)]
pub struct Options {
    /// How much longer than expected something may take to come home.
    pub grace: Duration,
    /// For how long requests wait for a member that was lost, to go on then. Zero where nobody starts it again: they fail.
    pub outlast: Duration,
    /// Whether drafts are sent,
    pub speculate: bool,
    /// and further ones before the first is known.
    pub run_ahead: bool,
    /// Whether a draft model guesses, too.
    pub draft_model: bool,
}

impl Scheduler {
    /// `window`: of the model's layers that see the last positions only. `warm_up`: a token of the vocabulary.
    pub fn new(
        plan: &RingPlanSpec,
        window: Option<AttentionWindow>,
        warm_up: u32,
        options: Options,
    ) -> Self {
        let windows = window.map(|window| WindowedKv {
            window: window.positions,
            kept: window.kept(plan.chunk_positions as usize),
            planned: plan.windowed_kv_positions(window),
        });
        Self {
            limits: Limits {
                members: plan.members.iter().map(|one| one.name.clone()).collect(),
                context_length: plan.context_length as usize,
                chunk_positions: plan.chunk_positions as usize,
                at_once: plan.max_concurrent_requests as usize,
                sessions: session_capacity(plan),
                planned: plan.predicted,
                warm_up,
                options: Options {
                    run_ahead: options.speculate && options.run_ahead,
                    draft_model: options.speculate && options.draft_model,
                    ..options
                },
                longest_draft: window.map_or(usize::MAX, |window| window.positions - 1),
                whole_chunks: plan.members.iter().any(|one| {
                    let usual = CHUNK_POSITIONS as i32;
                    one.gpu_from_rows.is_some_and(|rows| rows <= usual)
                        || one.read_bytes_per_token.unwrap_or(0) > 0
                }),
            },
            phase: Phase::Probing {
                first_nonce: 1,
                asked: None,
            },
            readiness: Readiness::Loading("waiting for the ring's members".into()),
            fails_at: None,
            missed: BTreeSet::new(),
            lost: None,
            last_session: 0,
            last_nonce: 0,
            requests: BTreeMap::new(),
            waiting: BTreeSet::new(),
            nobody_fits: None,
            prefilling: VecDeque::new(),
            running: BTreeMap::new(),
            kept: Kept::default(),
            next_turns: NextTurns::default(),
            releasing: BTreeMap::new(),
            flights: BTreeMap::new(),
            returned: 0,
            progress: None,
            ticks: None,
            late: false,
            cost: PassCost::default(),
            cost_alone: PassCost::default(),
            chunk_cost: ChunkCost::default(),
            pass_times: PassTimes::default(),
            short_matches: ShortMatches::default(),
            asked: None,
            guess_seconds: 0.0,
            chunks: 0,
            turns: BTreeMap::new(),
            ledger: KvLedger::new(plan.kv_positions(), windows),
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
                read,
                keyspace,
                client,
            } => {
                let submitted = Request {
                    sequences: Vec::new(),
                    prompt,
                    keyspace,
                    client,
                    max_tokens,
                    read,
                    begun: false,
                    passed: 0,
                    breaks: 0,
                };
                self.submit(request, submitted, choices);
            }
            Event::Cancelled { request } => self.cancel(request, now),
            Event::Home {
                session,
                trip,
                slowest,
            } => self.home(session, trip, slowest, now),
            Event::Sampled { request, choices } => self.sampled(request, choices, now),
            Event::NothingFollows { request, reason } => {
                self.nothing_follows(request, reason, now);
            }
            Event::Refused {
                session,
                rank,
                reason,
            } => self.refused(session, rank, reason, now),
            Event::Released { session } => {
                self.releasing.remove(&session);
                self.came_home(now);
            }
            Event::Guessed {
                request,
                choice,
                taken_in,
                tokens,
                took,
            } => self.guessed((request, choice), taken_in, tokens, took, now),
            Event::NoMoreGuesses => self.no_more_guesses(now),
            Event::Whole { nonce } => self.whole(nonce, now),
            Event::Lost {
                rank,
                missed_by,
                cause,
            } => self.lost(rank, missed_by, cause, now),
            Event::Busy => self.gets_on(now),
            Event::Tick => self.tick(now),
        }
        // What was sampled comes first: it may change all else.
        if !matches!(self.actions.last(), Some(Action::Sample { .. })) {
            self.begin_what_fits(now);
            self.send_chunks(now);
            self.feed_draft_model(now);
        }
        std::mem::take(&mut self.actions)
    }

    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// The member at which a ring fails that is not ready, where that is known.
    pub fn fails_at(&self) -> Option<&str> {
        self.name_of(self.fails_at?)
    }

    /// Its neighbour that does not reach it, if its other one does, as far as is known: then both may be there, and the way between them is not.
    pub fn missed_by(&self) -> Option<&str> {
        let fails_at = self.fails_at?;
        let mut missed = self.missed.iter().filter(|(rank, _)| *rank == fails_at);
        match (missed.next(), missed.next()) {
            (Some((_, by)), None) => self.name_of(*by),
            _ => None,
        }
    }

    fn name_of(&self, rank: usize) -> Option<&str> {
        let member = self.limits.members.get(rank)?;
        Some(member)
    }

    /// Whether the ring stands still, as far as it can be told from what does not come home. It may go on yet.
    pub fn is_late(&self) -> bool {
        self.late
    }

    /// Requests that have begun, and those that have not.
    pub fn requests(&self) -> (usize, usize) {
        let begun = self.requests.values().filter(|one| one.begun).count();
        (begun, self.requests.len() - begun)
    }

    /// Whether to refuse a prompt of so many tokens for now. It is refused when the queue is full and the client has its equal share of it, or
    /// when the prompts that wait take enough memory.
    pub fn turns_away(&self, client: ClientId, prompt_tokens: usize) -> bool {
        let waiting = self.requests.values().filter(|one| !one.begun);
        let waiting: Vec<ClientId> = waiting.map(|one| one.client).collect();
        if waiting.is_empty() {
            // One may always wait: its prompt fits into the context.
            return false;
        }
        let prompts = self.requests.values().map(|one| one.prompt.len());
        let limit = WAITING_PER_SEQUENCE * self.limits.at_once;
        let clients: BTreeSet<ClientId> = waiting.iter().copied().chain([client]).collect();
        let own = waiting.iter().filter(|other| **other == client).count();
        prompts.sum::<usize>() + prompt_tokens > PROMPT_TOKENS
            || (waiting.len() >= limit && own >= limit / clients.len())
    }

    /// Whether no member holds anything of any session.
    pub fn holds_nothing(&self) -> bool {
        self.running.is_empty() && self.kept.len() == 0 && self.releasing.is_empty()
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

    fn submit(&mut self, id: RequestId, mut request: Request, choices: usize) {
        let sequence = |choice| {
            let (text, state) = match choice {
                0 => (request.prompt.to_vec(), State::Waiting),
                _ => (Vec::new(), State::Following),
            };
            Sequence {
                text,
                state,
                speculation: Speculation::new(&self.short_matches),
            }
        };
        request.sequences = (0..choices).map(sequence).collect();
        self.next_turns.submitted(&request.prompt, request.keyspace);
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

    /// Ends a sequence and keeps what it computed, if a later text may begin with it. Whoever asks for vectors asks for many, whose texts would
    /// leave no conversation on the ring.
    fn stop(&mut self, id: SequenceId, now: Instant) {
        let held = self.leave(id);
        let Some(request) = self.requests.get_mut(&id.0) else {
            return;
        };
        let (keyspace, read, prompt) = (request.keyspace, request.read, request.prompt.len());
        let sequence = &mut request.sequences[id.1];
        sequence.state = State::Ended;
        sequence.speculation = Speculation::default();
        let mut text = std::mem::take(&mut sequence.text);
        if let Some((session, sent)) = held {
            match read {
                Read::Continuation => {
                    text.truncate(sent);
                    let kind = match self.ledger.shortest(session) < prompt {
                        true => Kind::Other,
                        false => Kind::LongAnswer,
                    };
                    self.keep(session, text, keyspace, kind, now);
                }
                Read::LastState | Read::LastScores | Read::AllStates => {
                    self.release(session, now);
                }
            }
        }
    }

    /// Takes a sequence off the ring. Its session, if it has one, is nobody's then; it holds so many tokens of the text.
    fn leave(&mut self, id: SequenceId) -> Option<(SessionId, usize)> {
        self.waiting.remove(&id);
        self.prefilling.retain(|other| *other != id);
        let State::Running { session, sent } = self.sequence(id)?.state else {
            return None;
        };
        if let Some(Sequence {
            text, speculation, ..
        }) = self.sequence(id)
        {
            speculation.withdraw(text.len());
        }
        if let Some(asked) = self.asked.as_mut().filter(|asked| asked.id == id) {
            asked.waits = false;
        }
        self.running.remove(&session);
        self.ignore_flights(session);
        Some((session, sent))
    }

    /// What is on the ring of a session is nobody's.
    fn ignore_flights(&mut self, session: SessionId) {
        for flight in self.flights.get_mut(&session).into_iter().flatten() {
            flight.brings = None;
            flight.tells_cost = false;
        }
    }
}
