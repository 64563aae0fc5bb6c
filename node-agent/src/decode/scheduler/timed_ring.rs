//! How long an answer takes by the scheduler's decisions, on machines whose times are given: each computes one frame at a time, what it gets
//! meanwhile waits, and a draft model guesses beside them. Time is counted, so it is the same wherever this runs.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlanSpec};

use super::{Action, Event, Options, Read, Sampled, Scheduler, common_prefix};
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
};
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
}

#[derive(Default)]
struct Machine {
    waiting: VecDeque<Frame>,
    busy: bool,
}

enum Happens {
    Arrives(Frame),
    /// A machine is done with it.
    Leaves(Frame),
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
}

fn hash(number: u64) -> u64 {
    let mixed = (number ^ 0x94d0_49bb_1331_11eb).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32
}

impl TimedRing {
    fn answer(setting: &Setting, drafts: Drafts) -> Took {
        let members = setting.stages.len();
        let addresses: Vec<String> = (0..members).map(|n| format!("h{n}:1")).collect();
        let ends: Vec<i32> = (1..=members as i32).collect();
        let model = PlannedModel::new("m", "m.gguf", 1, members as i32);
        let context = (PROMPT + setting.answer) as i32;
        let plan = RingPlanSpec::cut(model, context, &addresses, &ends);
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
        };
        ring.tell(Event::Tick, None);
        ring.tell(Event::Whole { nonce: 1 }, None);
        while ring.step() {}
        let begun = ring.now;
        let submitted = Event::Submitted {
            request: 1,
            prompt: ring.text.clone().into(),
            choices: 1,
            max_tokens: setting.answer,
            read: Read::Continuation,
            keyspace: 0,
            client: 0,
        };
        ring.tell(submitted, None);
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
            Happens::Leaves(frame) => {
                let machine = frame.place % self.machines.len();
                self.machines[machine].busy = false;
                self.goes_on(frame);
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
            && let Some(mut frame) = self.machines[machine].waiting.pop_front()
        {
            frame.waited += self.now - frame.arrived;
            if frame.refuted {
                self.goes_on(frame);
                continue;
            }
            self.machines[machine].busy = true;
            let takes = match frame.place == self.machines.len() {
                true => self.setting.stages[0] * self.setting.head * frame.wanted as u64 / 100,
                false => self.stage(machine, frame.rows),
            };
            self.after(takes, Happens::Leaves(frame));
        }
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
            request: 1,
            choice: 0,
            taken_in,
            tokens,
            took: Duration::from_micros(took),
        };
        self.after(took, Happens::Guessed(guessed));
    }
}

/// How many times as fast an answer is for running ahead.
fn gain(setting: &Setting) -> f64 {
    let [without, with] = [Drafts::OneAfterTheOther, Drafts::Ahead].map(|drafts| {
        let took = TimedRing::answer(setting, drafts);
        took.until_first_token + took.from_first_token
    });
    without as f64 / with as f64
}

#[test]
fn running_ahead_gains_and_hardly_ever_costs() {
    let rings: [&[u64]; 4] = [
        &[50_000; 2],
        &[25_000; 4],
        &[17_000, 17_000, 50_000, 17_000],
        &[2000; 4],
    ];
    let mut gains = Vec::new();
    for stages in rings {
        for link in [500, 25_000] {
            for guess in [2000, 10_000] {
                for right in [40, 60, 80, 95] {
                    let setting = Setting {
                        stages: stages.to_vec(),
                        link,
                        guess,
                        right,
                        ..USUAL
                    };
                    let gain = gain(&setting);
                    assert!(gain > 0.93, "{gain} with {setting:?}");
                    gains.push(gain);
                }
            }
        }
    }
    let mean = gains.iter().sum::<f64>() / gains.len() as f64;
    assert!(mean > 1.15, "{mean}");
}

#[test]
fn running_ahead_hides_the_draft_model_and_long_links() {
    let setting = Setting {
        stages: vec![25_000; 4],
        link: 25_000,
        guess: 10_000,
        right: 95,
        ..USUAL
    };
    let far = gain(&setting);
    assert!(far > 1.7, "{far}");
    // One machine has nothing that could overlap.
    let alone = Setting {
        stages: vec![100_000],
        link: 0,
        ..setting
    };
    assert_eq!(gain(&alone), 1.0);
}

#[test]
fn a_text_that_repeats_runs_ahead_of_long_drafts() {
    for (stages, link) in [
        (&[50_000; 2][..], 500),
        (&[25_000; 4], 500),
        (&[2000; 4], 25_000),
    ] {
        for (new, least) in [(0, 1.1), (5, 1.0), (20, 0.97)] {
            let setting = Setting {
                stages: stages.to_vec(),
                link,
                new,
                ..USUAL
            };
            let gain = gain(&setting);
            assert!(gain >= least, "{gain} with {setting:?}");
        }
    }
}

/// Few passes overlap here, so narrow frames would bring fewer tokens in a trip than one long draft.
#[test]
fn right_drafts_of_a_text_run_ahead_without_loss() {
    for (stages, link) in [
        (&[40_000][..], 25_000),
        (&[25_000], 25_000),
        (&[40_000], 50_000),
        (&[30_000], 100_000),
        (&[40_000; 2], 25_000),
    ] {
        for row in [1, 3] {
            let setting = Setting {
                stages: stages.to_vec(),
                link,
                new: 0,
                row,
                ..USUAL
            };
            let gain = gain(&setting);
            assert!(gain >= 1.0, "{gain} with {setting:?}");
        }
    }
}

/// How many times as fast tokens come as without drafts, by a formula and by the scheduler.
#[derive(Debug)]
struct Gains {
    expected: f64,
    found: f64,
}

impl Setting {
    /// What a pass of so many rows takes, of what one of a single row does.
    fn pass(&self, rows: usize) -> f64 {
        1.0 + self.row as f64 / 100.0 * (rows as f64 - 1.0)
    }

    /// What all machines compute of a pass of one row, what the slowest does, all links, and a guess.
    fn times(&self) -> [f64; 4] {
        let all: u64 = self.stages.iter().sum();
        let slowest = self.stages.iter().max().unwrap();
        let links = self.link * self.stages.len() as u64;
        [all, *slowest, links, self.guess].map(|time| time as f64)
    }

    /// One draft after the other, of the best length: a pass brings the tokens up to the first wrong one.
    fn in_turn(&self) -> f64 {
        let ([all, _, links, guess], right) = (self.times(), self.right as f64 / 100.0);
        let gains = (0..32).map(|draft| {
            let tokens = (1.0 - right.powi(draft + 1)) / (1.0 - right);
            let draft = draft as usize;
            let takes = all * self.pass(draft + 1) + links + draft as f64 * guess;
            (all + links) * tokens / takes
        });
        gains.fold(0.0, f64::max)
    }

    /// Frames of the best number of rows that follow one another as fast as the slowest machine, or the draft model, takes them. The first wrong
    /// token costs a whole trip, and nothing that was sent behind it takes any time.
    fn ahead(&self) -> f64 {
        let ([all, slowest, links, guess], right) = (self.times(), self.right as f64 / 100.0);
        let gains = (1..32).map(|rows| {
            let interval = (slowest * self.pass(rows)).max(rows as f64 * guess);
            let frames = 1.0 / (1.0 - right.powi(rows as i32));
            let takes = all * self.pass(rows) + links + (frames - 1.0) * interval;
            (all + links) / (1.0 - right) / takes
        });
        gains.fold(0.0, f64::max)
    }

    fn gains(&self) -> [Gains; 2] {
        let took = |drafts| TimedRing::answer(self, drafts).from_first_token as f64;
        let without = took(Drafts::Nothing);
        [
            Gains {
                expected: self.in_turn(),
                found: without / took(Drafts::OneAfterTheOther),
            },
            Gains {
                expected: self.ahead(),
                found: without / took(Drafts::Ahead),
            },
        ]
    }
}

/// Ahead, theory breaks off every pass under way that a wrong token refutes. Members finish theirs, so it is 0.81 of theory where half of the
/// guesses are wrong, and 0.84 to 0.85 in the other rings; one draft after the other is 0.97 to 0.98.
#[test]
fn gains_over_plain_decoding_are_what_theory_says() {
    for (stages, link, right, row) in [
        (&[50_000; 2][..], 2500, 80, 13),
        (&[25_000; 4], 1250, 50, 13),
        (&[25_000; 4], 1250, 80, 13),
        (&[17_000, 17_000, 50_000, 17_000], 1250, 80, 13),
        (&[12_500; 8], 625, 80, 13),
        (&[25_000; 4], 1250, 80, 3),
        (&[25_000; 4], 12_500, 80, 13),
        (&[25_000; 4], 5000, 80, 13),
    ] {
        let setting = Setting {
            stages: stages.to_vec(),
            link,
            guess: 100,
            right,
            row,
            head: 0,
            answer: 3000,
            ..USUAL
        };
        for (form, gains) in ["in turn", "ahead"].into_iter().zip(setting.gains()) {
            let share = gains.found / gains.expected;
            println!("{stages:?}, {link}, {right}, {row}, {form}: {gains:?}, {share:.3}");
            assert!(
                (0.8..1.2).contains(&share),
                "{form}: {gains:?}, {setting:?}"
            );
        }
    }
}

#[test]
fn a_draft_model_pays_over_links_of_five_milliseconds() {
    let setting = Setting {
        stages: vec![25_000; 4],
        link: 5000,
        guess: 1000,
        right: 80,
        answer: 3000,
        ..USUAL
    };
    let [in_turn, ahead] = setting.gains();
    println!("{in_turn:?} {ahead:?}");
    assert!(in_turn.found > 1.8, "{in_turn:?}");
    assert!(ahead.found > 2.5, "{ahead:?}");
}
