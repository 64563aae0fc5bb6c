//! What the KV caches of all sessions take on every member, known at rank 0 without asking. Pure counting.
//!
//! All members apply the same orders in the same order, and their caches share blocks of positions between forks until one of them
//! writes. So the blocks here are the blocks there: each layer of each member holds `used` of them, or fewer (layers with a window).
//! A layer on a GPU has the same blocks; one that candle computes has not: its forks copy all at their first row, and what is cut off keeps
//! its memory.
//! Sessions are busy (a request runs them) or kept (their prefix may serve a later one); kept ones give way.

use std::collections::{BTreeMap, BTreeSet};

use prima_crds::v1alpha1::ring_plan::KV_BLOCK_POSITIONS;
use prima_engine::kernels::BLOCK_POSITIONS;

use crate::ring::SessionId;

/// Plans count the same blocks.
const _: () = assert!(KV_BLOCK_POSITIONS == BLOCK_POSITIONS);

/// The blocks of every session.
#[derive(Debug)]
pub struct KvLedger {
    /// Blocks that all sessions may hold together.
    planned: usize,
    windows: Option<WindowedKv>,
    sessions: BTreeMap<SessionId, Held>,
    blocks: Vec<Block>,
    /// Numbers of blocks that nobody holds.
    free: Vec<usize>,
    used: usize,
    busy: usize,
}

/// Layers that see only the last positions keep fewer blocks, and need memory of their own kind.
#[derive(Clone, Copy, Debug)]
pub struct WindowedKv {
    /// Positions that a row sees.
    pub window: usize,
    /// Positions that such a layer keeps of a long session.
    pub kept: usize,
    /// Positions that all sessions together may hold in such a layer.
    pub planned: usize,
}

#[derive(Debug)]
struct Held {
    blocks: Vec<usize>,
    length: usize,
    /// The most positions that it ever had. A window is given back behind it.
    longest: usize,
    /// Blocks at its beginning that layers with a window have given back.
    given_back: usize,
    busy: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    holders: u32,
    busy_holders: u32,
}

impl KvLedger {
    /// `positions`: what the plan pays for, in layers that see everything.
    pub fn new(positions: usize, windows: Option<WindowedKv>) -> Self {
        Self {
            planned: blocks_of(positions),
            windows,
            sessions: BTreeMap::new(),
            blocks: Vec::new(),
            free: Vec::new(),
            used: 0,
            busy: 0,
        }
    }

    /// Begins an empty busy session.
    pub fn begin(&mut self, session: SessionId) {
        let empty = Held {
            blocks: Vec::new(),
            length: 0,
            longest: 0,
            given_back: 0,
            busy: true,
        };
        self.sessions.insert(session, empty);
    }

    /// Begins a busy session with what `parent` holds.
    pub fn fork(&mut self, parent: SessionId, child: SessionId) {
        let Some(held) = self.sessions.get(&parent) else {
            return;
        };
        let fork = Held {
            blocks: held.blocks.clone(),
            busy: true,
            ..*held
        };
        for &block in &fork.blocks {
            self.take(block, true);
        }
        self.sessions.insert(child, fork);
    }

    /// Keeps the first `first` positions and adds `rows`. A block that is begun and shared is copied first.
    pub fn extend(&mut self, session: SessionId, first: usize, rows: usize) {
        self.truncate(session, first);
        let Some(mut held) = self.sessions.remove(&session) else {
            return;
        };
        let begun = !held.length.is_multiple_of(BLOCK_POSITIONS);
        if rows > 0
            && begun
            && let Some(last) = held.blocks.last_mut()
            && self.blocks[*last].holders > 1
        {
            self.give_back(*last, held.busy);
            *last = self.unused();
            self.take(*last, held.busy);
        }
        if let Some(windows) = self.windows {
            held.given_back = held.given_back.max(windows.given_back(held.length));
        }
        held.length += rows;
        held.longest = held.longest.max(held.length);
        while held.blocks.len() < blocks_of(held.length) {
            let block = self.unused();
            self.take(block, held.busy);
            held.blocks.push(block);
        }
        self.sessions.insert(session, held);
    }

    /// Keeps the first `positions` positions.
    pub fn truncate(&mut self, session: SessionId, positions: usize) {
        let Some(mut held) = self.sessions.remove(&session) else {
            return;
        };
        held.length = held.length.min(positions);
        for block in held.blocks.split_off(blocks_of(held.length)) {
            self.give_back(block, held.busy);
        }
        self.sessions.insert(session, held);
    }

    /// Ends a session.
    pub fn release(&mut self, session: SessionId) {
        if let Some(held) = self.sessions.remove(&session) {
            for block in held.blocks {
                self.give_back(block, held.busy);
            }
        }
    }

    /// From now on a request runs this session, or none does.
    pub fn set_busy(&mut self, session: SessionId, busy: bool) {
        let Some(held) = self.sessions.get_mut(&session) else {
            return;
        };
        if held.busy == busy {
            return;
        }
        held.busy = busy;
        for &block in &held.blocks {
            let holders = &mut self.blocks[block].busy_holders;
            if busy {
                self.busy += usize::from(*holders == 0);
                *holders += 1;
            } else {
                *holders -= 1;
                self.busy -= usize::from(*holders == 0);
            }
        }
    }

    /// Positions of a session.
    pub fn length(&self, session: SessionId) -> usize {
        self.sessions.get(&session).map_or(0, |held| held.length)
    }

    /// The fewest positions that a session can be cut to: layers with a window have given back what lies before.
    pub fn shortest(&self, session: SessionId) -> usize {
        match (self.windows, self.sessions.get(&session)) {
            (Some(WindowedKv { window, .. }), Some(held)) if held.longest >= 2 * window => {
                held.longest - window
            }
            _ => 0,
        }
    }

    /// Positions that a row sees in layers with windows, if there are any.
    pub fn window(&self) -> Option<usize> {
        self.windows.map(|windows| windows.window)
    }

    /// Whether a busy session can have `rows` positions after its first `first` now.
    pub fn fits(&self, session: SessionId, first: usize, rows: usize) -> bool {
        self.missing(session, first, rows) == 0 && self.windows_fit(session, first, rows)
    }

    /// Blocks that are missing for `rows` positions of a session after its first `first`.
    pub fn missing(&self, session: SessionId, first: usize, rows: usize) -> usize {
        let Some(held) = self.sessions.get(&session) else {
            return 0;
        };
        let shared = |block: &&usize| self.blocks[**block].holders > 1;
        let (kept, dropped) = held
            .blocks
            .split_at(blocks_of(first).min(held.blocks.len()));
        let begun = !first.is_multiple_of(BLOCK_POSITIONS);
        let copied = usize::from(rows > 0 && begun && kept.last().as_ref().is_some_and(shared));
        let freed = dropped.iter().filter(|block| !shared(block)).count();
        let needed = blocks_of(first + rows) - kept.len() + copied;
        (self.used + needed).saturating_sub(self.planned + freed)
    }

    /// Whether layers with windows have room for `rows` positions of a session after its first `first`, as if sessions shared nothing.
    fn windows_fit(&self, session: SessionId, first: usize, rows: usize) -> bool {
        let Some(windows) = self.windows else {
            return true;
        };
        let held = self.sessions.iter().map(|(&id, held)| {
            let (end, given_back) = match id == session {
                true => (first + rows, held.given_back.max(windows.given_back(first))),
                false => (held.length, held.given_back),
            };
            blocks_of(end).saturating_sub(given_back)
        });
        held.sum::<usize>() <= blocks_of(windows.planned)
    }

    /// Whether these sessions, each grown to what is `expected` of it, leave room for one more of `positions` that shares the first
    /// `shared` positions of `source`. All others would give way.
    pub fn has_room(
        &self,
        expected: impl Iterator<Item = (SessionId, usize)>,
        positions: usize,
        source: Option<(SessionId, usize)>,
    ) -> bool {
        let (mut grown, mut in_windows) = (0, 0);
        let mut busy: BTreeSet<usize> = BTreeSet::new();
        for (session, positions) in expected {
            let held = self.sessions.get(&session);
            let length = held.map_or(0, |held| held.length);
            busy.extend(held.into_iter().flat_map(|held| &held.blocks));
            grown += blocks_of(positions.max(length)) - blocks_of(length);
            in_windows += self
                .windows
                .map_or(0, |windows| windows.expected(positions));
        }
        let shared = source.and_then(|(source, shared)| {
            let whole = shared / BLOCK_POSITIONS;
            let blocks = &self.sessions.get(&source)?.blocks;
            let there = |block: &&usize| busy.contains(*block);
            Some(blocks.iter().take(whole).filter(there).count())
        });
        let needed = blocks_of(positions) - shared.unwrap_or(0).min(blocks_of(positions));
        let windows_fit = match self.windows {
            Some(windows) => in_windows + windows.expected(positions) <= blocks_of(windows.planned),
            None => true,
        };
        busy.len() + grown + needed <= self.planned && windows_fit
    }

    /// Blocks at the end of a session that only it holds.
    pub fn own_blocks(&self, session: SessionId) -> usize {
        let blocks = self.sessions.get(&session).map(|held| &held.blocks);
        let own = |block: &&usize| self.blocks[**block].holders == 1;
        blocks.map_or(0, |blocks| blocks.iter().rev().take_while(own).count())
    }

    /// Positions that are left of a session without its last `blocks` blocks.
    pub fn length_without(&self, session: SessionId, blocks: usize) -> usize {
        let held = self
            .sessions
            .get(&session)
            .map_or(0, |held| held.blocks.len());
        held.saturating_sub(blocks) * BLOCK_POSITIONS
    }

    /// Positions that the plan pays for, those in use, and those of them that only kept sessions hold; whole blocks.
    pub fn positions(&self) -> (usize, usize, usize) {
        let of = |blocks| blocks * BLOCK_POSITIONS;
        (of(self.planned), of(self.used), of(self.used - self.busy))
    }

    /// Forgets all sessions.
    pub fn clear(&mut self) {
        *self = Self::new(self.planned * BLOCK_POSITIONS, self.windows);
    }

    fn take(&mut self, block: usize, busy: bool) {
        let block = &mut self.blocks[block];
        self.used += usize::from(block.holders == 0);
        block.holders += 1;
        if busy {
            self.busy += usize::from(block.busy_holders == 0);
            block.busy_holders += 1;
        }
    }

    fn give_back(&mut self, number: usize, busy: bool) {
        let block = &mut self.blocks[number];
        if busy {
            block.busy_holders -= 1;
            self.busy -= usize::from(block.busy_holders == 0);
        }
        block.holders -= 1;
        if block.holders == 0 {
            self.used -= 1;
            self.free.push(number);
        }
    }

    fn unused(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.blocks.push(Block::default());
            self.blocks.len() - 1
        })
    }
}

impl WindowedKv {
    /// Blocks that are expected of a session of so many positions.
    fn expected(self, positions: usize) -> usize {
        blocks_of(positions.min(self.kept))
    }

    /// Blocks that a session has given back when the row at `position` comes: as the engine does, all before twice the window.
    fn given_back(self, position: usize) -> usize {
        (position + 1).saturating_sub(2 * self.window) / BLOCK_POSITIONS
    }
}

/// Blocks that `positions` positions take.
fn blocks_of(positions: usize) -> usize {
    positions.div_ceil(BLOCK_POSITIONS)
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::model_profile::AttentionWindow;
    use prima_crds::v1alpha1::ring_plan::{CHUNK_POSITIONS, MOST_CHUNK_POSITIONS};

    use super::*;

    #[test]
    fn rows_that_replace_others_need_no_more_room() {
        let mut ledger = KvLedger::new(2 * BLOCK_POSITIONS, None);
        ledger.begin(1);
        ledger.extend(1, 0, 2 * BLOCK_POSITIONS);
        assert!(!ledger.fits(1, 2 * BLOCK_POSITIONS, 1));
        assert!(ledger.fits(1, BLOCK_POSITIONS, BLOCK_POSITIONS));
        assert_eq!(ledger.missing(1, BLOCK_POSITIONS, 2 * BLOCK_POSITIONS), 1);
        ledger.extend(1, BLOCK_POSITIONS, 1);
        assert_eq!(ledger.length(1), BLOCK_POSITIONS + 1);
    }

    fn with_windows() -> KvLedger {
        let windows = WindowedKv {
            window: BLOCK_POSITIONS,
            kept: 2 * BLOCK_POSITIONS + 128,
            planned: 4 * BLOCK_POSITIONS,
        };
        KvLedger::new(100 * BLOCK_POSITIONS, Some(windows))
    }

    #[test]
    fn layers_with_windows_hold_whole_blocks() {
        let mut ledger = with_windows();
        for session in 1..=5 {
            ledger.begin(session);
            assert_eq!(ledger.fits(session, 0, 1), session < 5);
            ledger.extend(session, 0, 1);
        }
    }

    #[test]
    fn what_is_behind_the_window_makes_room() {
        let mut ledger = with_windows();
        ledger.begin(1);
        for first in 0..10 * BLOCK_POSITIONS {
            assert!(ledger.fits(1, first, 1), "{first}");
            ledger.extend(1, first, 1);
        }
        // Of ten blocks, the last two are left, or three where one is begun.
        ledger.begin(2);
        assert!(ledger.fits(2, 0, BLOCK_POSITIONS));
        assert!(!ledger.fits(2, 0, 2 * BLOCK_POSITIONS + 1));
    }

    /// A first chunk ends anywhere in a block where a prefix was reused, and those behind it then begin there.
    #[test]
    fn all_that_have_room_fit_wherever_their_chunks_begin() {
        // Windows, planned sequences, and how many have room with chunks of either size: all of them where two windows are whole blocks, as those of
        // models are.
        for (positions, planned, sessions) in [
            (16, 4, [3, 3]),
            (64, 4, [4, 4]),
            (70, 4, [3, 3]),
            (128, 4, [4, 4]),
            (512, 4, [4, 4]),
            (16, 16, [14, 15]),
            (70, 16, [13, 14]),
            (128, 16, [16, 16]),
            (512, 16, [16, 16]),
        ] {
            let window = AttentionWindow { positions };
            for (chunk, sessions) in [CHUNK_POSITIONS, MOST_CHUNK_POSITIONS]
                .into_iter()
                .zip(sessions)
            {
                fit_wherever_they_begin(window, planned, chunk, sessions);
            }
        }
    }

    fn fit_wherever_they_begin(
        window: AttentionWindow,
        planned: usize,
        chunk: usize,
        sessions: SessionId,
    ) {
        let kept = window.kept(chunk);
        let context = 20 * kept;
        let windows = WindowedKv {
            window: window.positions,
            kept,
            planned: window.planned(context, planned, chunk),
        };
        let ledger = || KvLedger::new(20 * context, Some(windows));
        let others = |count: SessionId| (1..=count).map(move |session| (session, context));
        let beside = (0..).find(|&count| !ledger().has_room(others(count), context, None));
        assert_eq!(beside, Some(sessions), "{windows:?}");
        for first_chunk in 1..=chunk {
            let mut ledger = ledger();
            (1..=sessions).for_each(|session| ledger.begin(session));
            let (mut first, mut rows) = (0, first_chunk);
            while first + rows <= 2 * kept {
                for session in 1..=sessions {
                    assert!(ledger.fits(session, first, rows), "{first} of {windows:?}");
                    ledger.extend(session, first, rows);
                }
                (first, rows) = (first + rows, chunk);
            }
        }
    }
}
