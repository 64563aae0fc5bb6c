//! The clients of a scheduler on a simulated ring: what they ask, what they are answered, and what an empty ring would have answered.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::model_profile::AttentionWindow;
use prima_crds::v1alpha1::ring_plan::{DRAFTED_ROWS, PlannedModel, RingPlanSpec, Speed};
use prima_engine::kernels::BLOCK_POSITIONS;

use super::super::ring_state::PROBE_INTERVAL;
use super::super::simulated_ring::{self, Next, SimulatedRing, Text};
use super::super::{Action, Event, Options, Read, RequestId, Sampled, Scheduler};
use crate::generation::{GenerationError, Readiness};
use crate::ring::SessionId;

/// The token that ends an answer.
pub const END: u32 = 0;
pub const VOCABULARY: u64 = 40;
/// In runs, a token is followed by the next number, until that is so far above a multiple of this.
pub const RUN: u32 = 7;
pub const FORCED: u32 = 3;
pub const DEADLINE: Duration = Duration::from_secs(10);

/// A scheduler on a simulated ring, with the clients' side of every request.
pub struct World {
    pub scheduler: Scheduler,
    pub ring: SimulatedRing,
    pub now: Instant,
    pub clients: BTreeMap<RequestId, Client>,
    pub finished: BTreeMap<RequestId, Client>,
    pub failed: BTreeMap<RequestId, GenerationError>,
    pub nonce: Option<u64>,
    pub windows: Option<usize>,
    pub drafted: usize,
    /// Rows of drafts on the ring at once.
    pub most_drafted: usize,
    pub accepted: usize,
    /// Milliseconds of a pass, of which each member computes one, and of each of its rows.
    pub trip: u64,
    pub row: u64,
    /// Rows of each frame that was sent.
    pub sent: Vec<usize>,
    /// Of answers to what is asked from now on.
    pub form: Form,
    /// No token can be drawn from any row.
    pub nothing_follows: bool,
    /// What the draft model was asked, in order.
    pub asked: VecDeque<Action>,
    /// How long nothing may be heard of the slowest member. No time passes where it is nothing.
    pub silence: Duration,
    pub random: Random,
}

/// What a form leaves no choice of.
#[derive(Clone, Copy, PartialEq)]
pub enum Form {
    /// Nothing.
    Free,
    /// The tokens after some.
    Runs,
    /// All tokens.
    Circle,
}

#[derive(Clone)]
pub struct Client {
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    /// Positions that prompt and answer may have together.
    pub context: usize,
    /// Tokens of each choice so far, and whether it has ended.
    pub choices: Vec<(Vec<u32>, bool)>,
    pub read: Read,
    pub form: Form,
    pub states: Vec<u64>,
    pub cached: Option<usize>,
}

/// What a ring is made of.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub members: usize,
    pub context: usize,
    pub contexts: usize,
    pub at_once: usize,
    pub window: Option<usize>,
    pub windowed_sequences: i32,
    pub chunk_positions: i32,
    pub speculate: bool,
    pub draft_model: bool,
    /// What the plan expects of a token and of a chunk.
    pub planned_seconds: i64,
    /// How long requests wait for a lost member.
    pub outlast_seconds: u64,
    /// Passes that the slowest member could compute during one trip.
    pub overlap: u64,
}

pub const SMALL: Shape = Shape {
    members: 2,
    context: 640,
    contexts: 1,
    at_once: 4,
    window: None,
    windowed_sequences: 4,
    chunk_positions: 128,
    speculate: true,
    draft_model: false,
    planned_seconds: 0,
    outlast_seconds: 0,
    overlap: 1,
};

impl World {
    /// A ring that is ready.
    pub fn new(shape: Shape) -> Self {
        let addresses: Vec<String> = (0..shape.members).map(|n| format!("h{n}:1")).collect();
        let ends: Vec<i32> = (1..=shape.members as i32).collect();
        let layers = shape.members as i32;
        let model = PlannedModel::new("m", "m.gguf", 1, layers);
        let plan = RingPlanSpec {
            max_concurrent_requests: shape.at_once as i32,
            kv_contexts: shape.contexts as i32,
            windowed_sequences: shape.windowed_sequences,
            chunk_positions: shape.chunk_positions,
            predicted: Some(Speed {
                token_microseconds: shape.planned_seconds * 1_000_000,
                first_token_microseconds: shape.planned_seconds * 1_000_000,
            }),
            ..RingPlanSpec::cut(model, shape.context as i32, &addresses, &ends)
        };
        plan.validate().unwrap();
        let window = shape.window.map(|positions| AttentionWindow { positions });
        let mut world = Self {
            scheduler: Scheduler::new(
                &plan,
                window,
                1,
                Options {
                    grace: DEADLINE,
                    outlast: Duration::from_secs(shape.outlast_seconds),
                    speculate: shape.speculate,
                    run_ahead: true,
                    draft_model: shape.draft_model,
                },
            ),
            ring: SimulatedRing::new(&plan, window),
            now: Instant::now(),
            clients: BTreeMap::new(),
            finished: BTreeMap::new(),
            failed: BTreeMap::new(),
            nonce: None,
            windows: window.map(|window| plan.windowed_kv_positions(window)),
            drafted: 0,
            most_drafted: 0,
            accepted: 0,
            trip: shape.overlap,
            row: 0,
            sent: Vec::new(),
            form: Form::Free,
            nothing_follows: false,
            asked: VecDeque::new(),
            silence: Duration::ZERO,
            random: Random(0),
        };
        world.tell(Event::Tick, &[]);
        world.becomes_ready();
        world
    }

    pub fn becomes_ready(&mut self) {
        for _ in 0..10 {
            self.now += PROBE_INTERVAL;
            self.tell(Event::Tick, &[]);
            if let Some(nonce) = self.nonce.take() {
                self.tell(Event::Whole { nonce }, &[]);
            }
            self.run();
            if *self.scheduler.readiness() == Readiness::Ready {
                return;
            }
        }
        panic!("{:?}", self.scheduler.readiness());
    }

    /// Handles an event and all that follows from it at once. `rows`: what came home.
    pub fn tell(&mut self, event: Event, rows: &[u64]) {
        let mut actions = VecDeque::from(self.scheduler.handle(event, self.now));
        while let Some(action) = actions.pop_front() {
            self.ring.apply(&action);
            match action {
                Action::Probe { nonce } => self.nonce = Some(nonce),
                // Memory is taken when a session grows. A branch is counted here as if it shared nothing, though it does until then.
                Action::Send { tokens, .. } => {
                    self.sent.push(tokens.len());
                    if let Some(planned) = self.windows {
                        let planned = planned.next_multiple_of(BLOCK_POSITIONS);
                        let held = self.ring.windowed_positions();
                        assert!(held <= planned, "{held} of {planned} positions in windows");
                    }
                }
                Action::Begun { request, cached } => {
                    if let Some(client) = self.clients.get_mut(&request) {
                        let before = client.cached.replace(cached);
                        assert!(before.is_none() || client.read == Read::AllStates);
                        client.states.clear();
                    }
                }
                Action::Sample { request, .. } if self.nothing_follows => {
                    let reason = "logits that are no numbers".to_owned();
                    let event = Event::NothingFollows { request, reason };
                    actions.extend(self.scheduler.handle(event, self.now));
                }
                Action::Sample {
                    request,
                    choices,
                    draft,
                } => {
                    assert!((1..=1 + draft.len()).contains(&rows.len()));
                    let client = self.clients.get_mut(&request).unwrap();
                    let sampled = choices.map(|choice| client.take(choice, rows, &draft));
                    let choices: Vec<Sampled> = sampled.collect();
                    self.drafted += draft.len();
                    self.accepted += choices[0].tokens.len().saturating_sub(1);
                    if client.choices.iter().all(|(_, ended)| *ended) {
                        let client = self.clients.remove(&request).unwrap();
                        self.finished.insert(request, client);
                    }
                    let event = Event::Sampled { request, choices };
                    actions.extend(self.scheduler.handle(event, self.now));
                }
                Action::Pool { request, last } => {
                    let client = self.clients.get_mut(&request).unwrap();
                    client.states.extend(rows);
                    if last {
                        let client = self.clients.remove(&request).unwrap();
                        self.finished.insert(request, client);
                    }
                }
                Action::Guess { .. } => self.asked.push_back(action),
                Action::Fail { request, error } => {
                    assert!(self.clients.remove(&request).is_some());
                    self.failed.insert(request, error);
                }
                _ => {}
            }
        }
        if *self.scheduler.readiness() != Readiness::Ready {
            // Until the next probe, members hold what is forgotten here.
            return;
        }
        let requests = self.scheduler.requests.values();
        let sequences = requests.flat_map(|one| &one.sequences);
        let drafted: usize = sequences.map(|one| one.speculation.drafted().len()).sum();
        assert!(drafted <= DRAFTED_ROWS, "{drafted} rows of drafts");
        self.most_drafted = self.most_drafted.max(drafted);
        let kv = self.scheduler.kv();
        assert_eq!(kv.used_positions, self.ring.used_positions());
        assert!(kv.used_positions <= kv.planned_positions, "{kv:?}");
    }

    pub fn submit(
        &mut self,
        id: RequestId,
        prompt: &[u32],
        choices: usize,
        max_tokens: usize,
        keyspace: u64,
    ) {
        self.submit_to_read(
            id,
            prompt,
            Read::Continuation,
            (choices, max_tokens),
            keyspace,
            keyspace,
        );
    }

    /// For its vector.
    pub fn embed(&mut self, id: RequestId, prompt: &[u32], read: Read) {
        self.submit_to_read(id, prompt, read, (1, 0), 0, 0);
    }

    pub fn submit_to_read(
        &mut self,
        id: RequestId,
        prompt: &[u32],
        read: Read,
        (choices, max_tokens): (usize, usize),
        keyspace: u64,
        client: u64,
    ) {
        let answered = Client {
            prompt: prompt.to_vec(),
            max_tokens,
            context: self.ring_context(),
            choices: vec![(Vec::new(), read != Read::Continuation); choices],
            read,
            form: self.form,
            states: Vec::new(),
            cached: None,
        };
        self.clients.insert(id, answered);
        let submitted = Event::Submitted {
            request: id,
            prompt: prompt.into(),
            choices,
            max_tokens,
            read,
            keyspace,
            client,
        };
        self.tell(submitted, &[]);
    }

    pub fn ticks_after(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.tell(Event::Tick, &[]);
    }

    pub fn cancel(&mut self, request: RequestId) {
        if self.clients.remove(&request).is_some() {
            self.tell(Event::Cancelled { request }, &[]);
        }
    }

    /// The draft model answers what it was asked first: what rows say that do not follow from the whole text.
    pub fn guesses(&mut self) -> bool {
        let Some(Action::Guess {
            request,
            choice,
            mut text,
            count,
            ..
        }) = self.asked.pop_front()
        else {
            return false;
        };
        if let Some(client) = self.clients.get(&request) {
            let shared = text.len().min(client.prompt.len());
            assert_eq!(text[..shared], client.prompt[..shared], "another text");
        }
        let after = text.len();
        for _ in 0..count {
            text.push(draw(simulated_ring::usual(&text), choice));
        }
        let guessed = Event::Guessed {
            request,
            choice,
            taken_in: after,
            tokens: text.split_off(after),
            took: Duration::ZERO,
        };
        self.tell(guessed, &[]);
        true
    }

    /// One frame, release or guess comes home; `false`: nothing is under way.
    pub fn step(&mut self, chosen: usize) -> bool {
        if chosen.is_multiple_of(3) && self.guesses() {
            return true;
        }
        if self.ring.is_idle() {
            return self.guesses();
        }
        self.members_compute();
        match self.ring.next(chosen) {
            Some(Next::Frame(session)) => self.comes_home(session),
            Some(Next::Release(session)) => {
                self.ring.released();
                self.tell(Event::Released { session }, &[]);
            }
            None => {}
        }
        true
    }

    /// For as long as they like, but they say in time that they get on.
    fn members_compute(&mut self) {
        let longest = self.silence.as_millis() as usize;
        let mut computes = longest > 0;
        while computes {
            self.now += Duration::from_millis(self.random.below(longest) as u64);
            self.tell(Event::Tick, &[]);
            computes = self.random.below(4) == 0;
            if computes {
                self.tell(Event::Busy, &[]);
            }
        }
    }

    /// The oldest frame of a session does.
    pub fn comes_home(&mut self, session: SessionId) {
        let trip = self.trip + self.row * self.ring.rows_of_oldest(session) as u64;
        let rows = self.ring.home(session);
        let home = Event::Home {
            session,
            trip: Duration::from_millis(trip),
            slowest: Duration::from_millis(1),
        };
        self.tell(home, &rows);
    }

    /// Until nothing is on the ring but for what a guess will send.
    pub fn until_somebody_waits_for_a_guess(&mut self) {
        while !self.ring.flying().is_empty() {
            self.step(1);
            let taking_in = |one: &Action| matches!(one, Action::Guess { count: 0, .. });
            if self.asked.front().is_some_and(taking_in) {
                self.guesses();
            }
        }
        let asked = self.scheduler.asked.as_ref();
        assert!(asked.is_some_and(|asked| asked.waits));
    }

    pub fn run_some(&mut self, steps: usize) {
        for step in 0..steps {
            self.step(step);
        }
    }

    /// Until nothing is under way.
    pub fn run(&mut self) {
        let mut steps = 0;
        while self.step(steps) {
            steps += 1;
            assert!(steps < 200_000, "it never ends");
        }
    }

    /// Everything that was asked is answered as an empty ring would have answered, and nothing but kept sessions is left.
    pub fn is_quiet(&self) {
        assert_eq!(self.clients.len(), 0, "nobody waits");
        assert_eq!(self.scheduler.requests(), (0, 0));
        assert_eq!(self.scheduler.kv().sessions, self.ring.sessions());
        let kv = self.scheduler.kv();
        assert_eq!(kv.used_positions, kv.kept_positions);
        // Of what was drafted, nothing is kept.
        for keyspace in 0..10 {
            for (session, text) in self.scheduler.kept.of(keyspace) {
                assert_eq!(self.scheduler.ledger.length(session), text.len());
            }
        }
        for client in self.finished.values() {
            if client.read != Read::Continuation {
                assert_eq!(client.states, client.expected_states());
                continue;
            }
            for (choice, (answer, ended)) in client.choices.iter().enumerate() {
                assert!(ended);
                assert_eq!(*answer, client.expected(choice));
            }
        }
    }

    pub fn ring_context(&self) -> usize {
        self.scheduler.limits.context_length
    }

    pub fn ask(&mut self, id: RequestId, prompt: &[u32], max_tokens: usize) -> Client {
        self.submit(id, prompt, 1, max_tokens, 0);
        self.run();
        self.is_quiet();
        self.finished[&id].clone()
    }
}

/// The token that choice `choice` takes from a row.
pub fn draw(row: u64, choice: usize) -> u32 {
    ((row >> 17).wrapping_add(choice as u64 * 7) % VOCABULARY) as u32
}

impl Client {
    /// As rank 0 does: what follows from the rows, as long as it is the draft's.
    pub fn take(&mut self, choice: usize, rows: &[u64], draft: &[u32]) -> Sampled {
        let mut tokens = Vec::new();
        for (nth, &row) in rows.iter().enumerate() {
            let Some(token) = self.sample(choice, row) else {
                let ended = true;
                return Sampled {
                    choice,
                    tokens,
                    forced: Vec::new(),
                    ended,
                };
            };
            tokens.push(token);
            if draft.get(nth) != Some(&token) {
                break;
            }
        }
        let ended = false;
        Sampled {
            choice,
            forced: self.forced_after(tokens.last()),
            tokens,
            ended,
        }
    }

    /// As the sampler does: the next token, or `None` at the end.
    pub fn sample(&mut self, choice: usize, row: u64) -> Option<u32> {
        let last = self.choices[choice].0.last().or(self.prompt.last());
        let token = self.next(last, row, choice);
        let (answer, ended) = &mut self.choices[choice];
        assert!(!*ended, "an ended choice goes on");
        if token == END {
            *ended = true;
            return None;
        }
        answer.push(token);
        // The last token needs no position.
        *ended = answer.len() >= self.max_tokens || self.prompt.len() + answer.len() > self.context;
        (!*ended).then_some(token)
    }

    /// What comes after `last`, whatever the model says.
    fn forced_after(&self, last: Option<&u32>) -> Vec<u32> {
        let Some(&last) = last else {
            return Vec::new();
        };
        match self.form {
            Form::Free => Vec::new(),
            Form::Runs => (last + 1..=last / RUN * RUN + FORCED).collect(),
            Form::Circle => (last..last + 40).map(|token| token % 39 + 1).collect(),
        }
    }

    fn next(&self, last: Option<&u32>, row: u64, choice: usize) -> u32 {
        let forced = self.forced_after(last).first().copied();
        forced.unwrap_or_else(|| draw(row, choice))
    }

    pub fn expected(&self, choice: usize) -> Vec<u32> {
        let mut text = Text::of(&self.prompt);
        loop {
            let tokens = text.tokens();
            let token = self.next(tokens.last(), text.row(tokens.len()), choice);
            if token == END {
                break;
            }
            text.extend(&[token]);
            let length = text.tokens().len();
            if length - self.prompt.len() >= self.max_tokens || length > self.context {
                break;
            }
        }
        text.tokens()[self.prompt.len()..].to_vec()
    }

    pub fn expected_states(&self) -> Vec<u64> {
        let text = Text::of(&self.prompt);
        let mut states = (1..=self.prompt.len()).map(|end| text.row(end));
        match self.read {
            Read::AllStates => states.collect(),
            Read::LastState | Read::LastScores => states.next_back().into_iter().collect(),
            Read::Continuation => Vec::new(),
        }
    }

    /// The prompt of the next turn: all of this one and something new.
    pub fn next_turn(&self, new: &[u32]) -> Vec<u32> {
        [&self.prompt, &self.choices[0].0, new].concat()
    }
}

pub fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..count).map(|_| random.below(39) as u32 + 1).collect()
}

pub struct Random(pub u64);

impl Random {
    /// splitmix64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Prompts of 30 tokens whose answers are at least 200 long.
pub fn long_prompts() -> impl Iterator<Item = Vec<u32>> {
    prompts_with_long_answers(30)
}

/// Prompts of so many tokens whose answers are at least 200 long.
pub fn prompts_with_long_answers(count: usize) -> impl Iterator<Item = Vec<u32>> {
    let long = |prompt: &Vec<u32>| {
        let client = Client {
            prompt: prompt.clone(),
            max_tokens: 200,
            context: SMALL.context,
            choices: Vec::new(),
            read: Read::Continuation,
            form: Form::Free,
            states: Vec::new(),
            cached: None,
        };
        client.expected(0).len() == 200
    };
    (0..).map(move |seed| tokens(seed, count)).filter(long)
}
