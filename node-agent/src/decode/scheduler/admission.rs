//! Who begins: whose turn it is, whether there is room, and what of a text the ring has already.

use std::collections::BTreeMap;
use std::time::Instant;

use super::kept::common_prefix;
use super::{Action, ClientId, Phase, Read, Request, Scheduler, SequenceId, State};
use crate::ring::{MAX_FRAME_ROWS, SessionId};

/// A prefix that is on the ring.
struct Source {
    session: SessionId,
    /// Positions that the session holds.
    length: usize,
    /// The first of them that the new text shares.
    shared: usize,
    kept: bool,
}

impl Source {
    /// Whether a new text takes the session over; else it branches off.
    fn is_taken_over(&self) -> bool {
        self.kept && self.length - self.shared < SHORT_TAIL
    }
}

/// How a sequence can begin.
struct Fit {
    source: Option<Source>,
    /// Those that give way for it.
    give_way: Vec<SequenceId>,
}

/// So many others may begin before a request, or a part of it, whose turn it is, but that does not fit yet.
pub(super) const PASSED_BY: usize = 16;
/// Of those that its own client sent later, so many are looked at.
const BEHIND: usize = 4;
/// Tokens of an answer that room is made for when it begins, if its share of the context has as many; most are shorter, and clients seldom
/// tell.
const EXPECTED_ANSWER: usize = 256;
/// A kept prefix that ends this soon after what a new text shares is cut and taken over; a longer one stays, and the new text branches off.
const SHORT_TAIL: usize = MAX_FRAME_ROWS;

/// Choices of a request that wait for its first one to compute the prompt.
fn following(request: &Request) -> usize {
    let sequences = request.sequences.iter();
    sequences
        .filter(|one| matches!(one.state, State::Following))
        .count()
}

impl Scheduler {
    /// Starts what waits while there is room, in turn. If a client has at least two sequences more on the ring than another, it makes room for
    /// that one, where that is enough. What does not fit in its turn is passed by other clients' requests, and by the next few of its own client,
    /// but only so often: then the room stays free for it.
    pub(super) fn begin_what_fits(&mut self, now: Instant) {
        // What made room for others does not take it again at once.
        let mut gave_way: Vec<SequenceId> = Vec::new();
        while let Phase::Ready = self.phase {
            let mut turns = self.turns_to_begin(&gave_way);
            let Some(&first) = turns.first() else {
                break;
            };
            let counts = (self.waiting.len(), self.running.len());
            let passed = self.requests.get(&first.0).map_or(0, |one| one.passed);
            match passed < PASSED_BY && self.nobody_fits != Some(counts) {
                true => turns.extend(self.behind(first, &gave_way)),
                false => turns.truncate(1),
            }
            let mut turns = turns.into_iter();
            let Some((id, fit)) = turns.find_map(|id| Some((id, self.fit(id)?))) else {
                self.nobody_fits = Some(counts);
                break;
            };
            if !fit.give_way.is_empty() {
                for &other in &fit.give_way {
                    self.set_aside(other, now);
                }
                gave_way.extend(fit.give_way);
                continue;
            }
            let needs_session = !fit.source.as_ref().is_some_and(Source::is_taken_over);
            if needs_session && self.sessions_left() == 0 {
                break;
            }
            if id != first
                && let Some(request) = self.requests.get_mut(&first.0)
            {
                request.passed += 1;
            }
            self.begin(id, fit.source, now);
        }
    }

    /// How a sequence can begin now, if it can.
    fn fit(&self, id: SequenceId) -> Option<Fit> {
        let request = self.requests.get(&id.0)?;
        // The first choice begins for those that follow it, too.
        let following = if id.1 == 0 { following(request) } else { 0 };
        let wanted = 1 + following;
        let mut others = self.beyond_their_share(request.client, wanted);
        if self.places(others.len()) < wanted {
            return None;
        }
        let source = self.best_source(request, &request.sequences[id.1].text);
        let fits = |without: &[SequenceId]| {
            self.places(without.len()) >= wanted && self.has_room(id, source.as_ref(), without)
        };
        let fewest = (0..=others.len()).find(|&count| fits(&others[..count]))?;
        others.truncate(fewest);
        Some(Fit {
            source,
            give_way: others,
        })
    }

    /// Places for sequences, if so many of those that run give way.
    fn places(&self, without: usize) -> usize {
        // Choices whose first one computes their prompt begin next.
        let leads = |one: &&Request| matches!(one.sequences[0].state, State::Running { .. });
        let promised: usize = self.requests.values().filter(leads).map(following).sum();
        let taken = self.running.len() - without + promised;
        self.limits.at_once.saturating_sub(taken)
    }

    pub(super) fn client(&self, (request, _): SequenceId) -> ClientId {
        self.requests.get(&request).map_or(0, |one| one.client)
    }

    /// How many sequences each client has on the ring.
    fn shares(&self) -> BTreeMap<ClientId, usize> {
        let mut shares = BTreeMap::new();
        for id in self.running.values() {
            *shares.entry(self.client(*id)).or_default() += 1;
        }
        shares
    }

    /// The oldest that waits of each client, but for these; first those of clients with the fewest sequences on the ring.
    fn turns_to_begin(&self, but_for: &[SequenceId]) -> Vec<SequenceId> {
        let mut oldest = BTreeMap::new();
        for &id in &self.waiting {
            if !but_for.contains(&id) {
                oldest.entry(self.client(id)).or_insert(id);
            }
        }
        let shares = self.shares();
        let share = |client: &ClientId| shares.get(client).copied();
        let mut turns: Vec<_> = oldest.iter().map(|(one, &id)| (share(one), id)).collect();
        turns.sort_unstable();
        turns.into_iter().map(|(_, id)| id).collect()
    }

    /// The next few requests that wait behind this one, of the same client, but for these.
    fn behind(&self, first: SequenceId, but_for: &[SequenceId]) -> Vec<SequenceId> {
        let client = self.client(first);
        let behind = self.waiting.iter().copied().filter(|id| {
            let own = id.0 != first.0 && self.client(*id) == client;
            own && !but_for.contains(id)
        });
        behind.take(BEHIND).collect()
    }

    /// The youngest sequence of the client that has the most on the ring. It is never the oldest of all that run, unless it is alone.
    pub(super) fn youngest_of_most(&self) -> Option<SequenceId> {
        let shares = self.shares();
        let by_share = |id: &&SequenceId| (shares.get(&self.client(**id)), **id);
        self.running.values().max_by_key(by_share).copied()
    }

    /// The sequences that may give way, in this order, so that `client` can have `wanted` more and still no more than their owners.
    fn beyond_their_share(&self, client: ClientId, wanted: usize) -> Vec<SequenceId> {
        let mut shares = self.shares();
        let enough = shares.get(&client).copied().unwrap_or(0) + wanted;
        let mut running: Vec<SequenceId> = self.running.values().copied().collect();
        running.sort_unstable();
        let mut beyond = Vec::new();
        while let Some(most) = shares.values().copied().max().filter(|&most| most > enough)
            && let Some(place) = running
                .iter()
                .rposition(|id| shares[&self.client(*id)] == most)
        {
            let youngest = running.remove(place);
            if let Some(share) = shares.get_mut(&self.client(youngest)) {
                *share -= 1;
            }
            beyond.push(youngest);
        }
        beyond
    }

    /// The session that holds the most of the beginning of `text`.
    fn best_source(&self, request: &Request, text: &[u32]) -> Option<Source> {
        if request.read == Read::AllStates {
            return None;
        }
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

    /// Whether a sequence has room beside those that run, each at its expected length. Those in `without` do not count.
    fn has_room(&self, id: SequenceId, source: Option<&Source>, without: &[SequenceId]) -> bool {
        if self.running.len() == without.len() {
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
        let running = running.filter(|(_, id)| !without.contains(id));
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
                let session = if source.is_taken_over() {
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
                // At once: its first frame may have to wait for others' chunks.
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
        request.passed = 0;
        let sequence = &mut request.sequences[id.1];
        sequence.state = State::Running {
            session,
            sent: shared,
        };
        if !request.begun || request.read == Read::AllStates {
            request.begun = true;
            self.actions.push(Action::Begun {
                request: id.0,
                cached: shared,
            });
        }
    }
}
