//! A ring without machines: what every member would hold, and a hash for a model. The next token follows from all tokens that the
//! session holds, so whatever is wrong in a cache soon gives a wrong token. Orders that a member would refuse are panics.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use prima_crds::v1alpha1::model_profile::AttentionWindow;
use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use prima_engine::kernels::BLOCK_POSITIONS;

use super::Action;
use crate::ring::{SessionId, session_capacity};

pub struct SimulatedRing {
    context_length: usize,
    /// The most rows of a frame.
    chunk_positions: usize,
    window: Option<AttentionWindow>,
    capacity: usize,
    youngest: SessionId,
    sessions: BTreeMap<SessionId, Session>,
    /// Sessions that are released, but not yet in every round, and what had come home when they were.
    releasing: VecDeque<(SessionId, usize)>,
    /// What the frames of each session bring home that has any, in order.
    answers: BTreeMap<SessionId, VecDeque<Answer>>,
    /// Each block has a clone of it, so it knows how many there are.
    counted: Rc<()>,
    /// Frames that were sent before the first of their rows was known to be right, and frames that were refuted on their way.
    pub ran_ahead: usize,
    pub refuted: usize,
    /// Frames and releases.
    came_home: usize,
}

/// What comes home next.
pub enum Next {
    /// The oldest frame of this session.
    Frame(SessionId),
    Release(SessionId),
}

/// What so many others came home before, comes home before any other.
const OVERTAKEN: usize = 24;

struct Answer {
    /// What had come home when it left.
    left_after: usize,
    first_position: usize,
    sent: usize,
    /// Those that were wanted; none if the frame was refuted: no member needs to compute it.
    rows: Vec<u64>,
}

#[derive(Clone)]
struct Session {
    text: Text,
    /// Shared with forks until one of them writes.
    blocks: Vec<Rc<Block>>,
    /// The first position that layers with a window still hold.
    first: usize,
}

#[derive(Clone)]
struct Block {
    _counted: Rc<()>,
}

/// Tokens, and what the model says after each of them: it follows from all before, which would take long to go through again for each.
#[derive(Clone, Default)]
pub struct Text {
    tokens: Vec<u32>,
    /// Of all tokens up to each.
    hashes: Vec<u64>,
}

impl Text {
    pub fn of(tokens: &[u32]) -> Self {
        let mut text = Self::default();
        text.extend(tokens);
        text
    }

    pub fn extend(&mut self, tokens: &[u32]) {
        let mut hash = self.hashes.last().copied().unwrap_or(NOTHING);
        for &token in tokens {
            hash = hash_with(hash, token);
            self.tokens.push(token);
            self.hashes.push(hash);
        }
    }

    fn truncate(&mut self, count: usize) {
        self.tokens.truncate(count);
        self.hashes.truncate(count);
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// What the model says after the first `end` tokens, which are not none: mostly what it always says after the last two, so that texts
    /// repeat and can be guessed, and sometimes what follows from all of them.
    pub fn row(&self, end: usize) -> u64 {
        let whole = self.hashes[end - 1];
        match whole % 6 {
            0 => whole,
            _ => usual(&self.tokens[..end]),
        }
    }
}

impl SimulatedRing {
    pub fn new(plan: &RingPlanSpec, window: Option<AttentionWindow>) -> Self {
        Self {
            context_length: plan.context_length as usize,
            chunk_positions: plan.chunk_positions as usize,
            window,
            capacity: session_capacity(plan),
            youngest: 0,
            sessions: BTreeMap::new(),
            releasing: VecDeque::new(),
            answers: BTreeMap::new(),
            counted: Rc::default(),
            ran_ahead: 0,
            refuted: 0,
            came_home: 0,
        }
    }

    /// Does what a member does with it. Actions that are none of a ring's are ignored.
    pub fn apply(&mut self, action: &Action) {
        match action {
            Action::Probe { .. } => self.clear(),
            Action::Create { session } => {
                let empty = Session {
                    text: Text::default(),
                    blocks: Vec::new(),
                    first: 0,
                };
                self.insert(*session, empty);
            }
            Action::Fork { parent, child } => {
                let fork = self.sessions[parent].clone();
                self.insert(*child, fork);
            }
            Action::Truncate { session, positions } => self.truncate(*session, *positions),
            Action::Release { session } => {
                assert!(self.sessions.remove(session).is_some(), "released twice");
                self.answers.remove(session);
                self.releasing.push_back((*session, self.came_home));
            }
            Action::Send {
                session,
                first_position,
                tokens,
                wanted,
                ..
            } => self.compute(*session, *first_position, tokens, *wanted),
            Action::Begun { .. }
            | Action::Sample { .. }
            | Action::Pool { .. }
            | Action::Guess { .. }
            | Action::Fail { .. } => {}
        }
        let held = self.sessions.len() + self.releasing.len();
        assert!(held <= self.capacity, "{held} sessions");
    }

    fn insert(&mut self, id: SessionId, session: Session) {
        assert!(id > self.youngest, "ids grow");
        self.youngest = id;
        self.sessions.insert(id, session);
    }

    fn truncate(&mut self, id: SessionId, positions: usize) {
        let session = self.sessions.get_mut(&id).unwrap();
        assert!(positions <= session.text.tokens.len());
        session.text.truncate(positions);
        session.blocks.truncate(positions.div_ceil(BLOCK_POSITIONS));
        let answers = self.answers.get_mut(&id).into_iter().flatten();
        for refuted in answers.filter(|answer| answer.first_position >= positions) {
            self.refuted += usize::from(!refuted.rows.is_empty());
            refuted.rows.clear();
        }
        if let Some(window) = self.window {
            let seen_from = (positions + 1).saturating_sub(window.positions);
            assert!(seen_from >= session.first, "its window is gone");
        }
    }

    fn compute(&mut self, id: SessionId, first_position: usize, tokens: &[u32], wanted: usize) {
        if first_position < self.sessions[&id].text.tokens.len() {
            self.truncate(id, first_position);
        }
        let session = self.sessions.get_mut(&id).unwrap();
        assert_eq!(session.text.tokens.len(), first_position, "no gap");
        assert!((1..=self.chunk_positions).contains(&tokens.len()));
        assert!(first_position + tokens.len() <= self.context_length);
        if let Some(window) = self.window {
            let kept_from = (first_position + 1).saturating_sub(2 * window.positions);
            session.first = session
                .first
                .max(kept_from / BLOCK_POSITIONS * BLOCK_POSITIONS);
        }
        if !first_position.is_multiple_of(BLOCK_POSITIONS) {
            let last = session.blocks.last_mut().unwrap();
            // Copies it if somebody else holds it.
            Rc::make_mut(last);
        }
        session.text.extend(tokens);
        let end = first_position + tokens.len();
        let block = || {
            Rc::new(Block {
                _counted: self.counted.clone(),
            })
        };
        let blocks = end.div_ceil(BLOCK_POSITIONS);
        session.blocks.resize_with(blocks, block);
        let rows = (end + 1 - wanted..=end).map(|end| session.text.row(end));
        let answer = Answer {
            left_after: self.came_home,
            first_position,
            sent: tokens.len(),
            rows: rows.collect(),
        };
        let answers = self.answers.entry(id).or_default();
        let before = answers.back().is_some_and(|last| !last.rows.is_empty());
        self.ran_ahead += usize::from(before && wanted == tokens.len());
        answers.push_back(answer);
    }

    /// The member that is lost takes all sessions with it.
    pub fn clear(&mut self) {
        self.sessions.clear();
        self.releasing.clear();
        self.answers.clear();
    }

    /// Sessions with frames under way.
    pub fn flying(&self) -> Vec<SessionId> {
        self.answers.keys().copied().collect()
    }

    /// Rows of the oldest frame of a session.
    pub fn rows_of_oldest(&self, session: SessionId) -> usize {
        self.answers[&session][0].sent
    }

    /// Lets the oldest frame of a session come home.
    pub fn home(&mut self, session: SessionId) -> Vec<u64> {
        let answers = self.answers.get_mut(&session).unwrap();
        self.came_home += 1;
        let rows = answers.pop_front().unwrap().rows;
        if answers.is_empty() {
            self.answers.remove(&session);
        }
        rows
    }

    /// Lets the oldest release come home.
    pub fn released(&mut self) {
        self.came_home += 1;
        self.releasing.pop_front();
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.releasing.is_empty() && self.answers.is_empty()
    }

    /// What comes home next, by a number that says which of all: members take frames in almost any order, but none waits for long.
    pub fn next(&self, chosen: usize) -> Option<Next> {
        let frames = self.answers.iter();
        let frames =
            frames.filter_map(|(&id, own)| Some((own.front()?.left_after, Next::Frame(id))));
        let releases = self.releasing.iter();
        let releases = releases.map(|&(id, left_after)| (left_after, Next::Release(id)));
        let all = frames.chain(releases);
        let (left_after, oldest) = all.min_by_key(|(left_after, _)| *left_after)?;
        if self.came_home - left_after >= OVERTAKEN {
            return Some(oldest);
        }
        let flying = self.flying();
        match self.releasing.front() {
            Some(&(session, _)) if flying.is_empty() || chosen.is_multiple_of(5) => {
                Some(Next::Release(session))
            }
            _ => Some(Next::Frame(flying[chosen % flying.len()])),
        }
    }

    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Positions in layers that see everything, in whole blocks; shared ones once.
    pub fn used_positions(&self) -> usize {
        (Rc::strong_count(&self.counted) - 1) * BLOCK_POSITIONS
    }

    /// Positions in a layer with a window, in whole blocks, of all sessions, as if they shared none.
    pub fn windowed_positions(&self) -> usize {
        let sessions = self.sessions.values();
        let positions = sessions.map(|one| {
            let end = one.text.tokens.len();
            let end = end.next_multiple_of(BLOCK_POSITIONS);
            end - one.first
        });
        positions.sum()
    }
}

/// What the model mostly says after these tokens.
pub fn usual(tokens: &[u32]) -> u64 {
    let last = &tokens[tokens.len().saturating_sub(2)..];
    last.iter()
        .fold(NOTHING, |hash, &token| hash_with(hash, token))
}

/// The hash of no tokens.
const NOTHING: u64 = 0xcbf2_9ce4_8422_2325;

/// The hash of some tokens, and of one more.
fn hash_with(hash: u64, token: u32) -> u64 {
    (hash ^ u64::from(token))
        .wrapping_mul(0x0100_0000_01b3)
        .rotate_left(23)
}
