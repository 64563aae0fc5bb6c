//! What other ways of keeping experts would have found in memory, by a trace of what passes needed (`prima-node-agent serve
//! --routing-trace`).
//!
//! Only counts: how long reading takes is for runs to tell.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

/// The experts that one pass needed in a layer, each once.
type Needed = Vec<u32>;

/// What passes needed, by layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    pub layers: BTreeMap<usize, Vec<Needed>>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "line {line} of the trace is {text:?}: expected the number of a layer and those of its experts"
)]
pub struct TraceError {
    line: usize,
    text: String,
}

/// A way of keeping experts where a layer has room for some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// What was used longest ago makes room. A pass that needs more than there is room for displaces nothing.
    Lru,
    /// The same, but four fifths of the room are for experts that were used again since they came: prima's way.
    ProtectedLru,
    /// Those that the whole trace uses most, from their first use on, which only whoever knows what comes can tell.
    MostUsed,
    /// Those that are used next, by the same knowledge: no way finds more.
    Belady,
}

pub const POLICIES: [Policy; 4] = [
    Policy::Lru,
    Policy::ProtectedLru,
    Policy::MostUsed,
    Policy::Belady,
];

/// Needed experts that were in memory, and that were not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub hits: usize,
    pub misses: usize,
}

impl Counts {
    /// NaN of none.
    pub fn rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses) as f64
    }
}

impl Trace {
    /// # Errors
    /// The first line that is none of a trace.
    pub fn parse(text: &str) -> Result<Trace, TraceError> {
        let mut trace = Trace::default();
        for (index, line) in text.lines().enumerate() {
            let numbers = line.split(' ').map(str::parse);
            let numbers: Result<Needed, _> = numbers.collect();
            let Ok([layer, experts @ ..]) = numbers.as_deref() else {
                return Err(TraceError {
                    line: index + 1,
                    text: line.to_owned(),
                });
            };
            let passes = trace.layers.entry(*layer as usize).or_default();
            passes.push(experts.to_vec());
        }
        Ok(trace)
    }

    /// How many experts a layer has, as far as the trace shows it.
    pub fn experts(&self) -> usize {
        let all = self.layers.values().flatten().flatten();
        all.max().map_or(0, |last| *last as usize + 1)
    }

    /// Of the experts that passes need, the share that one of the `before` passes before needed, too.
    pub fn repeated(&self, before: usize) -> f64 {
        let mut counts = Counts::default();
        for passes in self.layers.values() {
            for (now, needed) in passes.iter().enumerate().skip(before) {
                let known: HashSet<u32> = passes[now - before..now].concat().into_iter().collect();
                let again = needed
                    .iter()
                    .filter(|expert| known.contains(expert))
                    .count();
                counts.hits += again;
                counts.misses += needed.len() - again;
            }
        }
        counts.rate()
    }

    /// What is found where all layers together have room for `room` experts, each for as many, or one more. Passes before `counted_from` only fill
    /// memory.
    pub fn replay(&self, policy: Policy, room: usize, counted_from: usize) -> Counts {
        let mut counts = Counts::default();
        let share = |layers: usize| room * layers / self.layers.len();
        for (layer, passes) in self.layers.values().enumerate() {
            let mut cache = Cache::new(policy, share(layer + 1) - share(layer), passes);
            for (now, needed) in passes.iter().enumerate() {
                let hits = cache.pass(now, needed);
                if now >= counted_from {
                    counts.hits += hits;
                    counts.misses += needed.len() - hits;
                }
            }
        }
        counts
    }
}

/// What a layer holds.
struct Cache {
    policy: Policy,
    capacity: usize,
    held: HashMap<u32, Held>,
    /// Passes that need each expert, from now on.
    uses: HashMap<u32, VecDeque<usize>>,
    /// Those that [`Policy::MostUsed`] keeps.
    chosen: HashSet<u32>,
}

#[derive(Clone, Copy)]
struct Held {
    /// The pass that used it last.
    used: usize,
    again: bool,
}

impl Cache {
    fn new(policy: Policy, capacity: usize, passes: &[Needed]) -> Cache {
        let mut uses: HashMap<u32, VecDeque<usize>> = HashMap::new();
        for (pass, needed) in passes.iter().enumerate() {
            for expert in needed {
                uses.entry(*expert).or_default().push_back(pass);
            }
        }
        let mut most: Vec<_> = uses
            .iter()
            .map(|(expert, uses)| (uses.len(), *expert))
            .collect();
        most.sort_unstable_by(|a, b| b.cmp(a));
        let chosen = most.into_iter().take(capacity);
        Cache {
            policy,
            capacity,
            held: HashMap::new(),
            chosen: chosen.map(|(_, expert)| expert).collect(),
            uses,
        }
    }

    /// How many of the `needed` were there; afterwards the cache is what the policy makes of it.
    fn pass(&mut self, now: usize, needed: &[u32]) -> usize {
        let (there, missing): (Vec<u32>, Vec<u32>) = needed
            .iter()
            .partition(|expert| self.held.contains_key(expert));
        for expert in needed {
            self.uses.get_mut(expert).and_then(VecDeque::pop_front);
        }
        match self.policy {
            Policy::MostUsed => {
                let chosen = missing
                    .into_iter()
                    .filter(|expert| self.chosen.contains(expert));
                self.held
                    .extend(chosen.map(|expert| (expert, Held::at(now))));
            }
            Policy::Belady => {
                for expert in missing {
                    self.held.insert(expert, Held::at(now));
                }
                let next_use = |expert: &u32| self.uses[expert].front().copied();
                let held = self.held.keys();
                let mut next: Vec<_> = held
                    .map(|expert| (next_use(expert).unwrap_or(usize::MAX), *expert))
                    .collect();
                next.sort_unstable();
                for (_, expert) in next.split_off(self.capacity.min(next.len())) {
                    self.held.remove(&expert);
                }
            }
            Policy::Lru | Policy::ProtectedLru => {
                let passes_through = needed.len() > self.capacity;
                if !passes_through {
                    for expert in &there {
                        self.held.insert(
                            *expert,
                            Held {
                                used: now,
                                again: true,
                            },
                        );
                    }
                }
                for expert in missing {
                    if self.held.len() >= self.capacity {
                        if passes_through {
                            break;
                        }
                        self.give_up_oldest(now);
                    }
                    self.held.insert(expert, Held::at(now));
                }
            }
        }
        there.len()
    }

    fn give_up_oldest(&mut self, now: usize) {
        let protects = self.policy == Policy::ProtectedLru;
        let protected = self.held.values().filter(|held| held.again).count();
        // Beyond its four fifths, the protected part gives up its own oldest.
        let too_many = 5 * protected > 4 * self.capacity;
        let ages = self.held.iter().filter(|(_, held)| held.used < now);
        let oldest = ages
            .map(|(expert, held)| (protects && held.again != too_many, held.used, *expert))
            .min();
        if let Some((.., expert)) = oldest {
            self.held.remove(&expert);
        }
    }
}

impl Held {
    fn at(now: usize) -> Held {
        Held {
            used: now,
            again: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// One layer, one expert a pass.
    fn one_by_one(experts: &[u32]) -> Trace {
        let passes = experts.iter().map(|expert| vec![*expert]);
        Trace {
            layers: BTreeMap::from([(3, passes.collect())]),
        }
    }

    fn hits(trace: &Trace, policy: Policy, capacity: usize) -> usize {
        trace.replay(policy, capacity, 0).hits
    }

    #[test]
    fn a_trace_is_read_and_others_are_refused() {
        let trace = Trace::parse("0 5 7\n1 2\n0 1\n").unwrap();
        assert_eq!(trace.layers[&0], [vec![5, 7], vec![1]]);
        assert_eq!(trace.layers[&1], [vec![2]]);
        assert_eq!(trace.experts(), 8);
        for (text, line) in [("0 1\n0 x", 2), ("", 0), ("0  1", 1), ("-1 2", 1)] {
            let found = Trace::parse(text).err().map_or(0, |error| error.line);
            assert_eq!(found, line, "{text:?}");
        }
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let trace = one_by_one(&[1, 2, 1, 3, 1, 2]);
        // 3 displaces 2, and 2 then 3.
        assert_eq!(hits(&trace, Policy::Lru, 2), 2);
        // Nothing found again: the cycle is one longer than memory.
        let cycle = one_by_one(&[1, 2, 3, 1, 2, 3, 1, 2, 3]);
        assert_eq!(hits(&cycle, Policy::Lru, 2), 0);
        // 1 and 2 stay, and 3 never does.
        assert_eq!(hits(&cycle, Policy::Belady, 2), 4);
        assert_eq!(hits(&cycle, Policy::Lru, 3), 6);
    }

    #[test]
    fn what_is_used_again_outlasts_what_passes_by() {
        // 1 comes back at once; then six others pass by, once each.
        let trace = one_by_one(&[1, 1, 2, 3, 4, 5, 6, 7, 1]);
        assert_eq!(hits(&trace, Policy::Lru, 5), 1);
        assert_eq!(hits(&trace, Policy::ProtectedLru, 5), 2);
        // 1 is the one, from its first use on.
        assert_eq!(hits(&trace, Policy::MostUsed, 1), 2);
    }

    #[test]
    fn a_pass_of_many_displaces_nothing() {
        let trace = Trace {
            layers: BTreeMap::from([(0, vec![vec![1, 2], vec![3, 4, 5], vec![1, 2]])]),
        };
        assert_eq!(
            trace.replay(Policy::Lru, 2, 0),
            Counts { hits: 2, misses: 5 }
        );
        assert_eq!(
            trace.replay(Policy::Lru, 2, 2),
            Counts { hits: 2, misses: 0 }
        );
    }

    #[test]
    fn nobody_finds_more_than_who_knows_what_comes() {
        let mut state = 1_u64;
        let mut any = |below: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            ((state >> 33) % below) as u32
        };
        for capacity in [1, 3, 5, 8] {
            let passes = (0..200).map(|_| {
                let chosen: BTreeSet<u32> = (0..3).map(|_| any(12)).collect();
                chosen.into_iter().collect()
            });
            let trace = Trace {
                layers: BTreeMap::from([(0, passes.collect())]),
            };
            let best = hits(&trace, Policy::Belady, capacity);
            for policy in POLICIES {
                assert!(
                    hits(&trace, policy, capacity) <= best,
                    "{policy:?}, {capacity}"
                );
            }
        }
    }

    #[test]
    fn repetition_is_of_the_passes_before() {
        let trace = one_by_one(&[1, 2, 1, 1, 3]);
        // After the first: 2, 1, 1, 3, of which the second 1 follows a 1.
        assert_eq!(trace.repeated(1), 0.25);
        // After the first two: 1, 1, 3.
        assert_eq!(trace.repeated(2), 2.0 / 3.0);
    }
}
