//! How long an answer takes by the scheduler's decisions, on machines whose times are given: each computes one frame at a time, what it gets
//! meanwhile waits, and a draft model guesses beside them. Time is counted, so it is the same wherever this runs.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlanSpec};

use super::{Action, Event, Read, Sampled, Scheduler, common_prefix};
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
}

/// One more row of a pass, in percent of a pass of one.
const ROW: u64 = 13;
/// The output head for a row, in percent of what rank 0 computes of a pass.
const HEAD: u64 = 10;
/// Tokens after which a text repeats.
const PERIOD: usize = 50;
const PROMPT: usize = 2 * PERIOD;
const ANSWER: usize = 300;

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
    /// Microseconds of an answer.
    fn answer(setting: &Setting, run_ahead: bool) -> u64 {
        let members = setting.stages.len();
        let addresses: Vec<String> = (0..members).map(|n| format!("h{n}:1")).collect();
        let ends: Vec<i32> = (1..=members as i32).collect();
        let model = PlannedModel::new("m", "m.gguf", 1, members as i32);
        let plan = RingPlanSpec::cut(model, 1024, &addresses, &ends);
        let grace = Duration::from_secs(60);
        let mut ring = Self {
            setting: setting.clone(),
            scheduler: Scheduler::new(&plan, None, 1, grace, true, run_ahead, setting.right > 0),
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
            max_tokens: ANSWER,
            read: Read::Continuation,
            keyspace: 0,
            client: 0,
        };
        ring.tell(submitted, None);
        while ring.text.len() < PROMPT + ANSWER {
            assert!(ring.step(), "nothing is under way");
        }
        ring.now - begun
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
                true => self.setting.stages[0] * HEAD * frame.wanted as u64 / 100,
                false => self.stage(machine, frame.rows),
            };
            self.after(takes, Happens::Leaves(frame));
        }
    }

    fn stage(&self, machine: usize, rows: usize) -> u64 {
        self.setting.stages[machine] * (100 + ROW * (rows as u64 - 1)) / 100
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
                    if self.text.len() == PROMPT + ANSWER {
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
            if draft.get(nth) != Some(&token) || self.text.len() == PROMPT + ANSWER {
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
    let [without, with] = [false, true].map(|ahead| TimedRing::answer(setting, ahead));
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
                        new: 100,
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
        new: 100,
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
                guess: 0,
                right: 0,
                new,
            };
            let gain = gain(&setting);
            assert!(gain >= least, "{gain} with {setting:?}");
        }
    }
}
