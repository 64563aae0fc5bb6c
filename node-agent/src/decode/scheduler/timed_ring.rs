//! How long an answer takes by the scheduler's decisions, on machines whose times are given: what a machine gets while it computes waits, and
//! goes together if it is of several sequences; a draft model guesses beside them. Time is counted, so it is the same wherever this runs.

mod drafts;
mod prompts;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlanSpec};

use super::{Action, Event, Options, Read, RequestId, Sampled, Scheduler, common_prefix};
use crate::ring::SessionId;

/// Times in microseconds.
#[derive(Clone, Debug)]
struct Setting {
    /// What each machine computes of a pass of one row.
    stages: Vec<u64>,
    /// From each machine to the next.
    link: u64,
    /// A token of the draft model.
    guess: u64,
    /// Percent of these that are right; none: there is no draft model.
    right: u64,
    /// Percent of the text's tokens that are not those of a period before.
    new: u64,
    /// One more row of a pass, in percent of a pass of one.
    row: u64,
    /// The output head for a row, in percent of what rank 0 computes of a pass.
    head: u64,
    /// Tokens of the answer.
    answer: usize,
    /// Tokens of another prompt.
    other: usize,
}

const USUAL: Setting = Setting {
    stages: Vec::new(),
    link: 0,
    guess: 0,
    right: 0,
    new: 100,
    row: 13,
    head: 10,
    answer: 300,
    other: 0,
};
/// The request that is answered, and that of the other prompt, of which only the first token is asked for.
const ANSWERED: RequestId = 1;
const OTHER: RequestId = 2;
/// Tokens after which a text repeats.
const PERIOD: usize = 50;
const PROMPT: usize = 2 * PERIOD;

/// Microseconds of an answer.
struct Took {
    until_first_token: u64,
    from_first_token: u64,
}

/// What is sent before it is known.
#[derive(Clone, Copy, PartialEq)]
enum Drafts {
    Nothing,
    OneAfterTheOther,
    Ahead,
}

struct TimedRing {
    setting: Setting,
    scheduler: Scheduler,
    started: Instant,
    now: u64,
    /// What happens next, by its time, and in the order in which it was made.
    coming: BTreeMap<(u64, usize), Happens>,
    made: usize,
    machines: Vec<Machine>,
    /// What the draft model has computed.
    computed: Vec<u32>,
    /// Prompt and answer so far.
    text: Vec<u32>,
    /// When the other prompt's first token came.
    other_came: Option<u64>,
}

#[derive(Default)]
struct Machine {
    waiting: VecDeque<Frame>,
    busy: bool,
}

enum Happens {
    Arrives(Frame),
    /// A machine is done with them.
    Leaves(Vec<Frame>),
    Guessed(Event),
}

struct Frame {
    session: SessionId,
    first_position: usize,
    rows: usize,
    wanted: usize,
    /// The machine where it is; as many as there are: home.
    place: usize,
    began: u64,
    arrived: u64,
    waited: u64,
    refuted: bool,
}

impl Setting {
    /// What the model says.
    fn said(&self, position: usize) -> u32 {
        let repeats = hash(position as u64 ^ 0x5555) % 100 >= self.new;
        let position = if repeats { position % PERIOD } else { position };
        hash(position as u64) as u32
    }

    /// What all machines compute of a pass of one row, what the slowest does, all links, and a guess.
    fn times(&self) -> [f64; 4] {
        let all: u64 = self.stages.iter().sum();
        let slowest = self.stages.iter().max().unwrap();
        let links = self.link * self.stages.len() as u64;
        [all, *slowest, links, self.guess].map(|time| time as f64)
    }
}

fn hash(number: u64) -> u64 {
    let mixed = (number ^ 0x94d0_49bb_1331_11eb).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32
}

impl TimedRing {
    /// One that is ready.
    fn new(setting: &Setting, drafts: Drafts) -> Self {
        let members = setting.stages.len();
        let addresses: Vec<String> = (0..members).map(|n| format!("h{n}:1")).collect();
        let ends: Vec<i32> = (1..=members as i32).collect();
        let model = PlannedModel::new("m", "m.gguf", 1, members as i32);
        let context = (PROMPT + setting.answer + setting.other) as i32;
        let plan = RingPlanSpec {
            max_concurrent_requests: 2,
            ..RingPlanSpec::cut(model, context, &addresses, &ends)
        };
        let options = Options {
            grace: Duration::from_secs(60),
            outlast: Duration::ZERO,
            speculate: drafts != Drafts::Nothing,
            run_ahead: drafts == Drafts::Ahead,
            draft_model: setting.right > 0,
        };
        let mut ring = Self {
            setting: setting.clone(),
            scheduler: Scheduler::new(&plan, None, 1, options),
            started: Instant::now(),
            now: 0,
            coming: BTreeMap::new(),
            made: 0,
            machines: (0..members).map(|_| Machine::default()).collect(),
            computed: Vec::new(),
            text: (0..PROMPT).map(|nth| setting.said(nth)).collect(),
            other_came: None,
        };
        ring.tell(Event::Tick, None);
        ring.tell(Event::Whole { nonce: 1 }, None);
        while ring.step() {}
        ring
    }

    fn submit(&mut self, request: RequestId, prompt: Vec<u32>, max_tokens: usize) {
        let submitted = Event::Submitted {
            request,
            prompt: prompt.into(),
            choices: 1,
            max_tokens,
            read: Read::Continuation,
            keyspace: request,
            client: request,
        };
        self.tell(submitted, None);
    }

    fn answer(setting: &Setting, drafts: Drafts) -> Took {
        let mut ring = Self::new(setting, drafts);
        let begun = ring.now;
        ring.submit(ANSWERED, ring.text.clone(), setting.answer);
        ring.runs_until(PROMPT + 1);
        let first = ring.now;
        ring.runs_until(ring.end());
        Took {
            until_first_token: first - begun,
            from_first_token: ring.now - first,
        }
    }

    /// Tokens of prompt and answer.
    fn end(&self) -> usize {
        PROMPT + self.setting.answer
    }

    fn runs_until(&mut self, tokens: usize) {
        while self.text.len() < tokens {
            assert!(self.step(), "nothing is under way");
        }
    }

    fn after(&mut self, time: u64, what: Happens) {
        self.made += 1;
        self.coming.insert((self.now + time, self.made), what);
    }

    fn step(&mut self) -> bool {
        let Some(((time, _), what)) = self.coming.pop_first() else {
            return false;
        };
        self.now = time;
        match what {
            Happens::Arrives(frame) => self.arrives(frame),
            Happens::Leaves(batch) => {
                let machine = batch[0].place % self.machines.len();
                self.machines[machine].busy = false;
                batch.into_iter().for_each(|frame| self.goes_on(frame));
                self.work(machine);
            }
            Happens::Guessed(event) => self.tell(event, None),
        }
        true
    }

    fn arrives(&mut self, mut frame: Frame) {
        let home = self.machines.len();
        let machine = frame.place % home;
        let waiting = self.machines[machine].waiting.iter_mut();
        let coming = self.coming.values_mut().filter_map(|what| match what {
            Happens::Arrives(frame) => Some(frame),
            _ => None,
        });
        // A member knows of what waits there, rank 0 also of what comes home.
        let known = waiting.chain(coming.filter(|other| other.place == home && machine == 0));
        for other in known.filter(|other| other.session == frame.session) {
            other.refuted |= frame.place < home && other.first_position >= frame.first_position;
        }
        frame.arrived = self.now;
        self.machines[machine].waiting.push_back(frame);
        self.work(machine);
    }

    fn work(&mut self, machine: usize) {
        while !self.machines[machine].busy
            && let Some(first) = self.machines[machine].waiting.front()
        {
            if first.refuted {
                if let Some(mut frame) = self.machines[machine].waiting.pop_front() {
                    frame.waited += self.now - frame.arrived;
                    self.goes_on(frame);
                }
                continue;
            }
            let mut batch = self.take_batch(machine);
            let home = batch[0].place == self.machines.len();
            let share = |frame: &Frame| match home {
                true => frame.wanted as u64,
                false => frame.rows as u64,
            };
            let all: u64 = batch.iter().map(share).sum();
            let takes = match home {
                true => self.setting.stages[0] * self.setting.head * all / 100,
                false => self.stage(machine, all as usize),
            };
            for frame in &mut batch {
                // The time for others' rows is waiting, too.
                let own = takes * share(frame) / all.max(1);
                frame.waited += self.now - frame.arrived + takes - own;
            }
            self.machines[machine].busy = true;
            self.after(takes, Happens::Leaves(batch));
        }
    }

    /// As a member's queue does: what came home, else what has waited longest, and others' frames that can go with it.
    fn take_batch(&mut self, machine: usize) -> Vec<Frame> {
        let home = self.machines.len();
        let waiting = std::mem::take(&mut self.machines[machine].waiting);
        let mut seen = BTreeSet::new();
        let mut first_of_sessions = waiting.iter().filter(|frame| seen.insert(frame.session));
        let place = match first_of_sessions.any(|frame| frame.place == home) {
            true => home,
            false => waiting[0].place,
        };
        let mut seen = BTreeSet::new();
        let fits = |frame: &Frame| seen.insert(frame.session) && frame.place == place;
        let (batch, rest) = waiting.into_iter().partition::<Vec<Frame>, _>(fits);
        self.machines[machine].waiting = rest.into();
        batch
    }

    fn stage(&self, machine: usize, rows: usize) -> u64 {
        let percent = 100 + self.setting.row * (rows as u64 - 1);
        self.setting.stages[machine] * percent / 100
    }

    fn goes_on(&mut self, mut frame: Frame) {
        let members = self.machines.len();
        if frame.place < members {
            frame.place += 1;
            return self.after(self.setting.link, Happens::Arrives(frame));
        }
        let slowest = (0..members).map(|machine| self.stage(machine, frame.rows));
        let home = Event::Home {
            session: frame.session,
            trip: Duration::from_micros(self.now - frame.began - frame.waited),
            slowest: Duration::from_micros(slowest.max().unwrap()),
        };
        self.tell(home, Some(&frame));
    }

    fn tell(&mut self, event: Event, frame: Option<&Frame>) {
        let time = self.started + Duration::from_micros(self.now);
        let mut actions = VecDeque::from(self.scheduler.handle(event, time));
        while let Some(action) = actions.pop_front() {
            let answer = match action {
                Action::Release { session } => Event::Released { session },
                Action::Sample { request: OTHER, .. } => {
                    self.other_came = Some(self.now);
                    Event::Cancelled { request: OTHER }
                }
                Action::Sample { request, draft, .. } => {
                    let frame = frame.filter(|frame| !frame.refuted).unwrap();
                    let tokens = self.sample(frame.wanted, &draft);
                    if self.text.len() == self.end() {
                        return;
                    }
                    let next = Sampled {
                        choice: 0,
                        tokens,
                        forced: Vec::new(),
                        ended: false,
                    };
                    Event::Sampled {
                        request,
                        choices: vec![next],
                    }
                }
                Action::Send {
                    session,
                    first_position,
                    tokens,
                    wanted,
                    ..
                } => {
                    let frame = Frame {
                        session,
                        first_position,
                        rows: tokens.len(),
                        wanted,
                        place: 0,
                        began: self.now,
                        arrived: self.now,
                        waited: 0,
                        refuted: false,
                    };
                    self.after(0, Happens::Arrives(frame));
                    continue;
                }
                Action::Guess { text, count, .. } => {
                    self.guess(text, count);
                    continue;
                }
                _ => continue,
            };
            actions.extend(self.scheduler.handle(answer, time));
        }
    }

    fn sample(&mut self, rows: usize, draft: &[u32]) -> Vec<u32> {
        let before = self.text.len();
        for nth in 0..rows {
            let token = self.setting.said(self.text.len());
            self.text.push(token);
            if draft.get(nth) != Some(&token) || self.text.len() == self.end() {
                break;
            }
        }
        self.text[before..].to_vec()
    }

    fn guess(&mut self, mut text: Vec<u32>, count: usize) {
        let taken_in = text.len();
        let said = |position| self.setting.said(position);
        let mut right = (0..taken_in).all(|position| text[position] == said(position));
        for position in taken_in..taken_in + count {
            right &= hash(!(position as u64)) % 100 < self.setting.right;
            text.push(said(position) ^ u32::from(!right));
        }
        let tokens = text.split_off(taken_in);
        let computed = &tokens[..count.saturating_sub(1)];
        let computed = [text.as_slice(), computed].concat();
        let newly = computed.len() - common_prefix(&computed, &self.computed);
        self.computed = computed;
        let took = self.setting.guess * newly as u64;
        let guessed = Event::Guessed {
            request: ANSWERED,
            choice: 0,
            taken_in,
            tokens,
            took: Duration::from_micros(took),
        };
        self.after(took, Happens::Guessed(guessed));
    }
}
