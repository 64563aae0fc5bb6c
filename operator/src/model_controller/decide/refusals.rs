//! Machines that cannot do what plans ask of them, and pairs of them that do not reach each other. A machine's own agent tells, or rank 0, which
//! finds a ring broken there; their word is remembered for a while.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::{MemberState, MemberStatus, RingPlan};

use super::apart::{Apart, Pairs, are_neighbours};
use crate::cluster::world::Machine;
use crate::model_controller::conditions::member_status;

#[derive(Clone, Default)]
pub struct Refusals {
    refused: BTreeMap<String, Refusal>,
    apart: Pairs,
    /// Members of a plan's generation that fail.
    failing: BTreeMap<(i64, String), Failing>,
    /// The generation of a ring that fails at some member, and since when.
    broken: Option<(i64, Instant)>,
}

/// A member that has failed, and not got on since: neither has its process loaded, nor were weights fetched.
#[derive(Clone, Copy)]
struct Failing {
    /// As if tries that took long had taken no time: two failures with one between them are not many.
    since: Instant,
    /// What it had then of its part of the file.
    fetched_bytes: Option<i64>,
    /// Since when its process has been starting, if it is.
    loading_since: Option<Instant>,
}

#[derive(Clone)]
struct Refusal {
    why: String,
    /// When it was said last.
    at: Instant,
    /// Where the agent was that said it. A pod that came in its place may be of another version.
    host: Option<String>,
    /// Rank 0, if it was said by that. When one of the two falls silent, its machine was off, and nothing more is known of the other.
    by_rank0: Option<String>,
}

/// A machine that fails for longer than this, again and again, while no client is answered, counts as one that refused. A process that took longer
/// than this to fail was a large model that was loaded.
const FAILS_FOR: Duration = Duration::from_secs(120);
/// A machine at which the ring has failed for longer than this counts as one that refused; or, if only one neighbour does not reach it and both are
/// heard of, the two count as apart. A pause of the network is most often shorter, and a member that has died is soon started again. Where others
/// would have to fetch what a machine has, it has [`FAILS_FOR`]; but what a person can do is said before.
const BROKEN_FOR: Duration = Duration::from_secs(25);
/// How long a machine that refused a plan is not asked again.
const REFUSED_FOR: Duration = Duration::from_secs(600);

impl Refusals {
    /// Takes in what the running plan's members say. Returns machines that refused a plan recently, could not follow it for a long time, or broke
    /// its ring for a while, and why. [`Self::apart`] knows the pairs then.
    pub fn note(
        &mut self,
        current: Option<&Arc<RingPlan>>,
        machines: &[Machine],
        now: Instant,
    ) -> BTreeMap<String, String> {
        let is_off = |name: &str| {
            let machine = machines.iter().find(|machine| machine.name == name);
            machine.is_some_and(|machine| !machine.is_alive())
        };
        let mut failing = BTreeMap::new();
        let mut broken = None;
        if let Some(plan) = current {
            let generation = plan.spec.generation;
            for member in plan.status.iter().flat_map(|status| &status.members) {
                let name = &member.name;
                let key = (generation, name.clone());
                let before = self.failing.get(&key).copied();
                let still = still_fails(before, member, now);
                failing.extend(still.map(|still| (key, still)));
                // While it is tried again, it may yet go well.
                let fails_too_long = has_failed(member)
                    && still.is_some_and(|still| now.duration_since(still.since) > FAILS_FOR);
                if member.state == MemberState::Refused || fails_too_long {
                    self.refuse(plan, name, member.message.clone(), None, now);
                } else if member.state >= MemberState::Loaded {
                    self.refused.remove(name);
                }
            }
            if is_ready(plan) {
                self.apart.forget_neighbours(&plan.spec.members);
            }
            // Its own agent may find nothing wrong with it.
            if let Some(fault) = fault(plan).filter(|fault| !is_off(&fault.rank0.name)) {
                let since = match self.broken {
                    Some((known, since)) if known == generation => since,
                    _ => now,
                };
                let lasted = now.duration_since(since);
                let fetched = plan.spec.model.source.is_some();
                let limit = if fetched { FAILS_FOR } else { BROKEN_FOR };
                let Fault {
                    rank0,
                    at,
                    missed_by,
                } = fault;
                // One that is off, or cut off from all, is heard of no more.
                let heard_since = |name: &String| {
                    let machine = machines.iter().find(|machine| machine.name == *name);
                    let heard = machine.and_then(|machine| machine.heard);
                    heard.is_some_and(|heard| heard > since)
                };
                let pair = missed_by.map(|by| [at, by].map(str::to_owned));
                // A ring knows it of neighbours only, whatever is said.
                let pair = pair.filter(|pair| are_neighbours(pair, &plan.spec.members));
                match pair.filter(|pair| pair.iter().all(heard_since)) {
                    Some(pair) if lasted > BROKEN_FOR => {
                        let why = format!("{} says: {}", rank0.name, rank0.message);
                        self.apart.note(pair, why, lasted > limit, plan, now);
                    }
                    None if lasted > limit => {
                        let why = format!(
                            "the ring fails there, says {}: {}",
                            rank0.name, rank0.message
                        );
                        self.refuse(plan, at, why, Some(rank0.name.clone()), now);
                    }
                    _ => {}
                }
                broken = Some((generation, since));
            }
        }
        self.failing = failing;
        self.broken = broken;
        self.apart.keep(machines, now);
        self.refused.retain(|name, refusal| {
            let machine = machines.iter().find(|machine| machine.name == *name);
            let host = machine.and_then(Machine::address);
            let same_agent = host.is_none() || host == refusal.host.as_deref();
            let was_off = refusal
                .by_rank0
                .as_ref()
                .is_some_and(|rank0| is_off(rank0) || is_off(name));
            same_agent && !was_off && now.duration_since(refusal.at) < REFUSED_FOR
        });
        let refused = self.refused.iter();
        refused
            .map(|(name, refusal)| (name.clone(), refusal.why.clone()))
            .collect()
    }

    /// Machines that do not reach each other.
    pub fn apart(&self, now: Instant) -> Vec<Apart> {
        self.apart.now(now)
    }

    /// So that machines that did not reach each other are tried as neighbours again.
    pub fn forget_apart(&mut self) {
        self.apart.forget();
    }

    /// Whether time alone decides what comes next.
    pub fn wait(&self, now: Instant) -> bool {
        self.broken
            .is_some_and(|(_, since)| now.duration_since(since) <= FAILS_FOR)
    }

    fn refuse(
        &mut self,
        plan: &RingPlan,
        name: &str,
        why: String,
        by_rank0: Option<String>,
        at: Instant,
    ) {
        let mut planned = plan.spec.members.iter();
        let planned = planned.find(|planned| planned.name == *name);
        let host = planned.and_then(|planned| Some(planned.host()?.to_owned()));
        self.refused.insert(
            name.to_owned(),
            Refusal {
                why,
                at,
                host,
                by_rank0,
            },
        );
    }
}

/// What is remembered of a member that failed `before`, by what it says now. Each new try passes through the same states again: they say nothing.
fn still_fails(before: Option<Failing>, member: &MemberStatus, now: Instant) -> Option<Failing> {
    let before = before.filter(|before| member.fetched_bytes <= before.fetched_bytes);
    match member.state {
        MemberState::Loaded | MemberState::Ready => None,
        MemberState::Loading => before.map(|before| Failing {
            loading_since: before.loading_since.or(Some(now)),
            ..before
        }),
        MemberState::Failed if has_failed(member) => {
            let before = before.map(|before| before.after_a_try(now));
            Some(before.unwrap_or(Failing {
                since: now,
                fetched_bytes: member.fetched_bytes,
                loading_since: None,
            }))
        }
        MemberState::Refused | MemberState::Failed | MemberState::Fetching => {
            before.map(|before| before.after_a_try(now))
        }
    }
}

impl Failing {
    /// Its process is not starting any more.
    fn after_a_try(self, now: Instant) -> Self {
        let loading = self.loading_since.map(|since| now.duration_since(since));
        let long = loading.filter(|loading| *loading > FAILS_FOR);
        Self {
            since: self.since + long.unwrap_or_default(),
            loading_since: None,
            ..self
        }
    }
}

/// Whether a try has failed. An agent that itself starts or ends says that its members have failed, too, but not when it tries again.
fn has_failed(member: &MemberStatus) -> bool {
    member.state == MemberState::Failed && member.retry_after_seconds.is_some()
}

/// Where a ring is broken.
struct Fault<'a> {
    /// What rank 0 says.
    rank0: &'a MemberStatus,
    /// The member at which it is, and the neighbour that does not reach it, where that is known.
    at: &'a str,
    missed_by: Option<&'a str>,
}

/// As rank 0 says it. While that member's own agent is about to start it, it is waited for.
fn fault(plan: &RingPlan) -> Option<Fault<'_>> {
    let rank0 = said_by_rank0(plan)?;
    let at = rank0.fails_at.as_deref()?;
    let mut states = plan.status.iter().flat_map(|status| &status.members);
    let state = states.find(|one| one.name == at)?.state;
    (state >= MemberState::Loaded).then_some(Fault {
        rank0,
        at,
        missed_by: rank0.missed_by.as_deref(),
    })
}

/// Whether a token went round its ring lately.
fn is_ready(plan: &RingPlan) -> bool {
    said_by_rank0(plan).is_some_and(|rank0| rank0.state == MemberState::Ready)
}

fn said_by_rank0(plan: &RingPlan) -> Option<&MemberStatus> {
    member_status(plan, plan.spec.members.first()?)
}
