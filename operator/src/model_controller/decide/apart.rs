//! Machines that are there, and do not reach each other: a firewall, a Wi-Fi that keeps its clients apart, a switch that lost a way. Rank 0 of a ring
//! says which two of its members these are. They are remembered here for a while, so that the next ring goes round them. Of those that never reached
//! each other, the missing link says it (`candidates`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::{RingMember, RingPlan};

use crate::cluster::world::{AgentState, Machine};
use crate::plan::RING_PORT;

/// The reason of Models that have no ring, or one that does not answer, because of such machines.
pub const MACHINES_APART: &str = "MachinesApart";

/// Two machines that do not reach each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Apart {
    /// In the order of their names.
    pub pair: [String; 2],
    /// Who says so, and what becomes of what they send.
    pub why: String,
    /// Whether rings are planned in which they are no neighbours.
    pub planned: bool,
    /// Whether rank 0 of a ring misses one of them. Otherwise their link was never measured, and no ring was planned that needs it.
    pub told_by_ring: bool,
}

impl Apart {
    /// Two that others reach, and whose link nobody ever measured.
    pub fn never_measured(pair: [String; 2]) -> Self {
        Self {
            pair,
            why: format!("the link between them could not be measured, at port {RING_PORT}"),
            planned: true,
            told_by_ring: false,
        }
    }

    /// For people: which machines, and what to look at.
    pub fn told(&self) -> String {
        let [one, other] = &self.pair;
        let meanwhile = match self.planned {
            true => "; rings are planned in which they are no neighbours",
            false => "",
        };
        format!(
            "{one} and {other} do not reach each other, though both are heard of ({}): look at the cables or the Wi-Fi between them, at the firewalls of both, \
            and whether the Wi-Fi keeps its clients apart{meanwhile}",
            self.why
        )
    }

    /// Whether these two are neighbours in a ring of these members, the last of which hands on to the first.
    pub fn are_neighbours(&self, members: &[RingMember]) -> bool {
        are_neighbours(&self.pair, members)
    }
}

/// Longer than agents ever pause until they try again to measure a link: ten minutes.
const TRIED: Duration = Duration::from_secs(900);

/// Whether the agents of both have been known for so long that their link would be measured if there were a way. Plans do not wait for that.
pub fn have_tried(pair: &[String; 2], machines: &[Machine]) -> bool {
    pair.iter().all(|name| {
        let machine = machines.iter().find(|machine| machine.name == *name);
        let agent = machine.map(|machine| machine.agent);
        matches!(agent, Some(AgentState::Alive { known_for }) if known_for > TRIED)
    })
}

/// Whether these two are neighbours in a ring of these members.
pub fn are_neighbours(pair: &[String; 2], members: &[RingMember]) -> bool {
    let next = members.iter().cycle().skip(1);
    let mut hops = members.iter().zip(next);
    hops.any(|(one, next)| {
        one.name != next.name && pair.contains(&one.name) && pair.contains(&next.name)
    })
}

/// Those that are known.
#[derive(Clone, Default)]
pub struct Pairs(BTreeMap<[String; 2], Pair>);

#[derive(Clone)]
struct Pair {
    why: String,
    planned: bool,
    /// When it was said last, and for how long that counts.
    said: Instant,
    lasts: Duration,
    /// Where their agents were. Those that came in their place may reach each other.
    hosts: [Option<String>; 2],
}

/// How long plans keep a pair apart before it is tried again.
const FIRST: Duration = Duration::from_secs(600);
/// Each time that it fails again within a day, it is twice as long. Each try takes memory for a second ring.
const LONGEST: Duration = Duration::from_secs(86_400);

impl Pair {
    fn counts(&self, now: Instant) -> bool {
        now.duration_since(self.said) < self.lasts
    }
}

impl Pairs {
    /// A ring of this plan has failed for a while between these two. `planned`: for so long that another is planned.
    pub fn note(
        &mut self,
        mut pair: [String; 2],
        why: String,
        planned: bool,
        plan: &RingPlan,
        now: Instant,
    ) {
        pair.sort();
        let before = self.0.get(&pair);
        let counted = before.filter(|before| before.counts(now));
        let lasts = match (before, counted) {
            (_, Some(before)) => before.lasts,
            // It was tried again.
            (Some(before), None) => (2 * before.lasts).min(LONGEST),
            (None, None) => FIRST,
        };
        let planned = planned || counted.is_some_and(|before| before.planned);
        let hosts = pair.each_ref().map(|name| {
            let mut members = plan.spec.members.iter();
            let member = members.find(|member| member.name == *name)?;
            Some(member.host()?.to_owned())
        });
        let noted = Pair {
            why,
            planned,
            said: now,
            lasts,
            hosts,
        };
        self.0.insert(pair, noted);
    }

    /// Something went round a ring of these members, so those of them that are neighbours reach each other.
    pub fn forget_neighbours(&mut self, members: &[RingMember]) {
        self.0.retain(|pair, _| !are_neighbours(pair, members));
    }

    /// So that all of them are tried again.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// Forgets what says nothing of the machines that there are now. One that has gone was off, and of the way to it nothing is known.
    pub fn keep(&mut self, machines: &[Machine], now: Instant) {
        self.0.retain(|names, pair| {
            let mut hosts = names.iter().zip(&pair.hosts);
            let same = hosts.all(|(name, host)| {
                let machine = machines.iter().find(|machine| machine.name == *name);
                let address = machine.and_then(Machine::address);
                let there = machine.is_none_or(Machine::is_alive);
                there && (address.is_none() || address == host.as_deref())
            });
            same && now.duration_since(pair.said) < pair.lasts + LONGEST
        });
    }

    /// Those that count now.
    pub fn now(&self, now: Instant) -> Vec<Apart> {
        let counting = self.0.iter().filter(|(_, pair)| pair.counts(now));
        counting
            .map(|(names, pair)| Apart {
                pair: names.clone(),
                why: pair.why.clone(),
                planned: pair.planned,
                told_by_ring: true,
            })
            .collect()
    }
}
