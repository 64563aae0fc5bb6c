//! Prefixes that stay on the ring after their request: whose they are, which serves a new text best, and which goes first.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::ring::SessionId;

/// Sessions that no request runs.
#[derive(Debug, Default)]
pub struct Kept {
    sessions: BTreeMap<SessionId, Prefix>,
}

/// What such a session holds.
#[derive(Debug)]
pub struct Prefix {
    pub tokens: Vec<u32>,
    /// Only requests of the same key space may use it.
    pub keyspace: u64,
    pub kind: Kind,
    pub last_used: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A prompt, kept apart from what was answered.
    Prompt,
    /// Prompt and answer, and layers with windows cannot go back over the answer.
    LongAnswer,
    Other,
}

impl Kept {
    pub fn insert(&mut self, session: SessionId, prefix: Prefix) {
        self.sessions.insert(session, prefix);
    }

    pub fn remove(&mut self, session: SessionId) -> Option<Prefix> {
        self.sessions.remove(&session)
    }

    pub fn get_mut(&mut self, session: SessionId) -> Option<&mut Prefix> {
        self.sessions.get_mut(&session)
    }

    pub fn contains(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    pub fn clear(&mut self) {
        self.sessions.clear();
    }

    /// The sessions of a key space and what they hold.
    pub fn of(&self, keyspace: u64) -> impl Iterator<Item = (SessionId, &[u32])> {
        let own = self.sessions.iter();
        own.filter(move |(_, prefix)| prefix.keyspace == keyspace)
            .map(|(&session, prefix)| (session, prefix.tokens.as_slice()))
    }

    /// The least recently used; those of kind `first` before all others.
    pub fn oldest(&self, first: Kind) -> Option<SessionId> {
        let turn = |(session, prefix): &(&SessionId, &Prefix)| {
            (prefix.kind != first, prefix.last_used, **session)
        };
        self.sessions.iter().min_by_key(turn).map(|(&id, _)| id)
    }

    /// Those that were not used for longer than `limit`.
    pub fn idle(&self, now: Instant, limit: Duration) -> Vec<SessionId> {
        let idle = |prefix: &Prefix| now.saturating_duration_since(prefix.last_used) > limit;
        let sessions = self.sessions.iter();
        sessions
            .filter(|(_, prefix)| idle(prefix))
            .map(|(&session, _)| session)
            .collect()
    }
}

/// How many tokens two texts begin with alike.
pub fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    // Whole pieces at once: each new text is compared with all that is kept.
    const PIECE: usize = 64;
    let pieces = a.chunks(PIECE).zip(b.chunks(PIECE));
    let alike = PIECE * pieces.take_while(|(a, b)| a == b).count();
    // The last piece may be shorter.
    let alike = alike.min(a.len());
    let rest = a[alike..].iter().zip(&b[alike..]);
    alike + rest.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_alike_up_to_the_first_other_token() {
        let text: Vec<u32> = (0..200).collect();
        for length in [0, 1, 63, 64, 65, 128, 199, 200] {
            assert_eq!(common_prefix(&text, &text[..length]), length);
            assert_eq!(common_prefix(&text[..length], &text), length);
            let mut other = text.clone();
            other[length..].fill(200);
            assert_eq!(common_prefix(&text, &other), length);
        }
    }
}
