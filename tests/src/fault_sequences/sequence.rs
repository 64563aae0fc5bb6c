//! What a sequence of faults is, how it follows from a seed, and how it is written so that it can be given back.

use std::fmt::{self, Display, Formatter};
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The processes of its members die.
    KillMember,
    /// They stand still, and their connections stay.
    StopMember,
    /// The agent dies, and its members with it; another one comes at the end.
    KillAgent,
    StopAgent,
    /// The same for an operator.
    KillOperator,
    StopOperator,
    /// No packet passes between the machine and the next one.
    Cut,
    /// None passes from one of these two to the other. In which direction follows from when it begins.
    CutOneWay,
    /// None passes between the machine and anybody.
    Isolate,
    /// Its link is gone for 300 ms of every second.
    Burst,
    /// Its link loses every fifth packet.
    Lose,
    /// Its link has 200 kbit/s; packets queue up, so they are late, too.
    Slow,
    /// The model's file is cut off, and copied again at the end.
    Truncate,
    /// The disk with the model's file cannot be read (EIO), and its members' processes have to read it anew.
    Unreadable,
    /// The disk of the agent's folder is full.
    FullDisk,
    /// The clock of its agent goes wrong, and right again at the end.
    AgentClock,
    /// The same for an operator.
    OperatorClock,
    /// The machine loses its power, and starts again at the end.
    KillNode,
    /// Its agent's pod is deleted, and another one made. Nobody lifts it.
    DeleteAgent,
    /// The same for an operator.
    DeleteOperator,
    /// The API server dies, and is started again at once.
    RestartApiServer,
}

/// One of them, which is lifted when it has lasted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    /// Whom it hits, by the part that it has when the fault begins: a place in the ring, then the machines outside of it. Of operators, 0 is the
    /// one that leads.
    pub victim: usize,
    /// After the sequence's begin.
    pub at: Duration,
    pub lasts: Duration,
}

impl Fault {
    /// Of the two ways between the victim and the next machine, there and back, those that are cut.
    pub(super) fn cut_ways(&self) -> Range<usize> {
        let first = (self.at.as_millis() / 100 % 2) as usize;
        match self.kind {
            Kind::CutOneWay => first..first + 1,
            _ => 0..2,
        }
    }
}

/// Faults in the order in which they begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence(pub Vec<Fault>);

pub const MACHINES: usize = 3;

/// What sequences are made of, and how long what follows them may take, by a clock that stands while programs wait for a processor.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub kinds: &'static [Kind],
    /// Operators run on the machines of which rings are made.
    operators_on_machines: bool,
    /// How many faults there are: at least, and at most.
    faults: (u64, u64),
    /// When they begin, in tenths of seconds.
    begin: (u64, u64),
    /// The same, how long they last.
    lasts: (u64, u64),
    /// From the moment in which the last fault is lifted until the Model is ready and answers, and until all programs are there again.
    pub(super) heals_within: Duration,
    /// From a Model's end until nothing of it is left.
    pub(super) ends_within: Duration,
}

/// Of machines that are networks and processes: two to five faults, the last of which begins within 8 s, and is lifted within 20.
pub const ON_NETWORKS: Setting = Setting {
    kinds: &[
        Kind::KillMember,
        Kind::StopMember,
        Kind::KillAgent,
        Kind::StopAgent,
        Kind::KillOperator,
        Kind::StopOperator,
        Kind::Cut,
        Kind::CutOneWay,
        Kind::Isolate,
        Kind::Burst,
        Kind::Lose,
        Kind::Slow,
        Kind::Truncate,
        Kind::Unreadable,
        Kind::FullDisk,
        Kind::AgentClock,
        Kind::OperatorClock,
    ],
    operators_on_machines: false,
    faults: (2, 5),
    begin: (5, 80),
    lasts: (5, 120),
    // An agent whose member has failed more than once waits for some time before it starts it again.
    heals_within: Duration::from_secs(60),
    ends_within: Duration::from_secs(60),
};

/// Of a cluster's nodes, which take longer for everything: one to three faults, the last of which begins within 20 s, and is lifted within 50.
pub const ON_NODES: Setting = Setting {
    kinds: &[
        Kind::KillMember,
        Kind::StopMember,
        Kind::Cut,
        Kind::CutOneWay,
        Kind::Isolate,
        Kind::Burst,
        Kind::Lose,
        Kind::Slow,
        Kind::Truncate,
        Kind::KillNode,
        Kind::DeleteAgent,
        Kind::DeleteOperator,
        Kind::RestartApiServer,
    ],
    operators_on_machines: true,
    faults: (1, 3),
    begin: (5, 200),
    lasts: (10, 300),
    // A machine is given up 40 s after its agent was last heard of, and one that starts again measures nothing anew.
    heals_within: Duration::from_secs(180),
    // Garbage is collected, of kinds that a cluster has had for a while.
    ends_within: Duration::from_secs(120),
};

impl Kind {
    /// With the names by which they are written.
    const ALL: [(Kind, &'static str); 21] = [
        (Kind::KillMember, "kill-member"),
        (Kind::StopMember, "stop-member"),
        (Kind::KillAgent, "kill-agent"),
        (Kind::StopAgent, "stop-agent"),
        (Kind::KillOperator, "kill-operator"),
        (Kind::StopOperator, "stop-operator"),
        (Kind::Cut, "cut"),
        (Kind::CutOneWay, "cut-one-way"),
        (Kind::Isolate, "isolate"),
        (Kind::Burst, "burst"),
        (Kind::Lose, "lose"),
        (Kind::Slow, "slow"),
        (Kind::Truncate, "truncate"),
        (Kind::Unreadable, "unreadable"),
        (Kind::FullDisk, "full-disk"),
        (Kind::AgentClock, "agent-clock"),
        (Kind::OperatorClock, "operator-clock"),
        (Kind::KillNode, "kill-node"),
        (Kind::DeleteAgent, "delete-agent"),
        (Kind::DeleteOperator, "delete-operator"),
        (Kind::RestartApiServer, "restart-api-server"),
    ];

    pub fn name(self) -> &'static str {
        let (_, name) = Kind::ALL[self as usize];
        name
    }

    /// How long at most a Model may say that it answers after this has broken its ring, by the clock of a [`Setting`]. Of what [`hides`](Self::hides):
    /// for how much longer. `alone`: no other fault of the sequence takes an operator away.
    ///
    /// Added up in seconds, at worst. What counts begins with the last that anybody heard: 0.1 before the fault, since tokens come that often. Whoever looks
    /// is rank 0's agent, within 0.5, and the operator, within 0.6 (0.5, and 0.1 until it looks). Then the operator acts: 0.2 until changes that come
    /// together have come, 0.4 more if others follow, 1 for a search that a look at this Model waits for just then, 0.3 to write; 1.9 in all.
    pub(super) fn unseen(self, alone: bool) -> Duration {
        let seconds = match self {
            // A process that ends closes its connections.
            Kind::KillMember | Kind::Truncate | Kind::Unreadable => 5,
            // These break no ring: what else is broken is seen as ever.
            Kind::FullDisk | Kind::AgentClock => 5,
            Kind::OperatorClock => 5,
            // Rank 0 misses signs of life after 2.75 (2.5, and 0.25 until it looks): 0.1 + 2.75 + 0.6 + 1.9 = 5.35, and 4.35 where no search is under way.
            // That rank 0 itself does not answer, the operator knows after 2.6 (0.6, 0.5 until it asks again, and 1.5): 0.1 + 2.6 + 1.9 = 4.6. The rest
            // is for a busy machine. Where frames get lost and signs do not, it is late after 2.5, 0.25 until rank 0 looks, and some passes.
            Kind::StopMember | Kind::Cut | Kind::CutOneWay | Kind::Isolate | Kind::KillNode => 8,
            // It says that it ends, and goes on for a while.
            Kind::DeleteAgent => 8,
            // With the agent its members die, so the operator finds twice that nobody listens: 0.1 + 0.6 + 1.3 + 1.9 = 3.9. One that stands still writes
            // nothing of what else is broken, but the operator asks itself: 5.35, as above.
            Kind::KillAgent | Kind::StopAgent => 8,
            // Who is silent on such a link is known after 5.35, as above, and 1 later where packets queue up for so long. Clients' packets get lost, too,
            // so it may take one or two more clients until somebody hears of a ring that goes on: 0.7 each.
            Kind::Burst | Kind::Lose | Kind::Slow => 8,
            // The other operator asks rings, too, and says what it sees 0.5 to 1.25 after that. If both are gone, somebody has to lead first: a Lease
            // takes 10 s.
            Kind::KillOperator | Kind::StopOperator => {
                if alone {
                    2
                } else {
                    20
                }
            }
            // The next one leads within seconds. A ring that an operator has not reached yet it does not judge: then an agent's Lease tells, after
            // 40 s.
            Kind::DeleteOperator => {
                if alone {
                    5
                } else {
                    35
                }
            }
            // Until it is ready, and those who were cut off have come back to it.
            Kind::RestartApiServer => 30,
        };
        Duration::from_secs(seconds)
    }

    /// Whether it breaks no ring, but keeps others from saying that one is broken.
    pub(super) fn hides(self) -> bool {
        self.is_of_operators() || self == Kind::RestartApiServer
    }

    pub fn is_of_operators(self) -> bool {
        matches!(
            self,
            Kind::KillOperator | Kind::StopOperator | Kind::OperatorClock | Kind::DeleteOperator
        )
    }

    /// Whether it may take away or cut off whatever runs on a machine.
    fn is_of_machines(self) -> bool {
        let is_cut = matches!(self, Kind::Cut | Kind::CutOneWay | Kind::Isolate);
        is_cut || matches!(self, Kind::Burst | Kind::Lose | Kind::Slow | Kind::KillNode)
    }

    /// How many may be hit by it.
    fn victims(self) -> usize {
        match self {
            Kind::RestartApiServer => 1,
            _ if self.is_of_operators() => 2,
            _ => MACHINES,
        }
    }

    /// Whether it is over when it has happened: others see to the rest.
    fn is_a_moment(self) -> bool {
        matches!(
            self,
            Kind::KillMember | Kind::DeleteAgent | Kind::DeleteOperator | Kind::RestartApiServer
        )
    }

    fn lasts_at_most(self) -> Duration {
        match self {
            // A ring may go on over such a link, too slowly for clients, for as long as it is so.
            Kind::Burst | Kind::Lose | Kind::Slow => Duration::from_secs(12),
            _ => Duration::MAX,
        }
    }
}

impl Sequence {
    /// The one that follows from a seed.
    pub fn from_seed(setting: &Setting, seed: u64) -> Sequence {
        let mut random = StdRng::seed_from_u64(seed);
        let mut draw = |(from, to): (u64, u64)| random.random_range(from..=to);
        let tenths = |drawn: u64| Duration::from_millis(100 * drawn);
        let mut faults: Vec<Fault> = (0..draw(setting.faults))
            .map(|_| {
                let kind = setting.kinds[draw((0, setting.kinds.len() as u64 - 1)) as usize];
                Fault {
                    kind,
                    victim: draw((0, kind.victims() as u64 - 1)) as usize,
                    at: tenths(draw(setting.begin)),
                    lasts: match kind.is_a_moment() {
                        true => Duration::ZERO,
                        false => tenths(draw(setting.lasts)).min(kind.lasts_at_most()),
                    },
                }
            })
            .collect();
        faults.sort_by_key(|fault| fault.at);
        Sequence(faults)
    }

    /// One that fails, too, if possible without some of the faults: each is left out in turn, and stays out if it is not needed.
    pub fn shrink(self, mut fails: impl FnMut(&Sequence) -> bool) -> Sequence {
        let mut shortest = self;
        let mut next = 0;
        while shortest.0.len() > 1 && next < shortest.0.len() {
            let mut shorter = shortest.clone();
            shorter.0.remove(next);
            match fails(&shorter) {
                true => shortest = shorter,
                false => next += 1,
            }
        }
        shortest
    }

    /// The first kind that does not belong there.
    pub fn foreign_to(&self, setting: &Setting) -> Option<Kind> {
        let mut kinds = self.0.iter().map(|fault| fault.kind);
        kinds.find(|kind| !setting.kinds.contains(kind))
    }

    /// How long it may go unseen that a ring is broken by these faults.
    pub(super) fn unseen(&self, setting: &Setting) -> Duration {
        let kinds = || self.0.iter().map(|fault| fault.kind);
        let takes_an_operator = |kind: &Kind| match kind.is_of_operators() {
            true => *kind != Kind::OperatorClock,
            false => setting.operators_on_machines && kind.is_of_machines(),
        };
        let alone = kinds().filter(takes_an_operator).count() < 2;
        let longest = |hide: bool| {
            let kinds = kinds().filter(|kind| kind.hides() == hide);
            kinds
                .map(|kind| kind.unseen(alone))
                .max()
                .unwrap_or_default()
        };
        longest(false) + longest(true)
    }

    /// Whether this kind occurs.
    pub fn has(&self, kind: Kind) -> bool {
        self.0.iter().any(|fault| fault.kind == kind)
    }
}

/// `cut:0@1200+8000`: from 1.2 s on, for 8 s.
impl Display for Fault {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (at, lasts) = (self.at.as_millis(), self.lasts.as_millis());
        write!(f, "{}:{}@{at}+{lasts}", self.kind.name(), self.victim)
    }
}

impl Display for Sequence {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let faults: Vec<String> = self.0.iter().map(Fault::to_string).collect();
        f.write_str(&faults.join(" "))
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let wrong =
            || format!("{text:?}: expected KIND:VICTIM@BEGIN+DURATION, both in milliseconds");
        let (kind, rest) = text.split_once(':').ok_or_else(wrong)?;
        let (victim, rest) = rest.split_once('@').ok_or_else(wrong)?;
        let (at, lasts) = rest.split_once('+').ok_or_else(wrong)?;
        let mut kinds = Kind::ALL.iter();
        let known = kinds.find(|(_, name)| *name == kind);
        let (kind, _) = known.ok_or_else(|| format!("there is no fault {kind:?}"))?;
        let milliseconds = |text: &str| text.parse().map(Duration::from_millis);
        Ok(Fault {
            kind: *kind,
            victim: victim
                .parse()
                .ok()
                .filter(|&victim| victim < kind.victims())
                .ok_or_else(wrong)?,
            at: milliseconds(at).map_err(|_| wrong())?,
            lasts: milliseconds(lasts).map_err(|_| wrong())?,
        })
    }
}

impl FromStr for Sequence {
    type Err = String;

    fn from_str(text: &str) -> Result<Sequence, String> {
        text.split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()
            .map(Sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_sequence_and_another_seed_another() {
        for (setting, counts, seconds) in [(&ON_NETWORKS, 2..=5, 20), (&ON_NODES, 1..=3, 50)] {
            let mut kinds: Vec<Kind> = Vec::new();
            for seed in 0..200 {
                let sequence = Sequence::from_seed(setting, seed);
                assert_eq!(sequence, Sequence::from_seed(setting, seed));
                assert_ne!(sequence, Sequence::from_seed(setting, seed + 1));
                let faults = &sequence.0;
                assert!(counts.contains(&faults.len()), "{sequence}");
                assert!(faults.is_sorted_by_key(|fault| fault.at), "{sequence}");
                let limit = Duration::from_secs(seconds);
                let in_time = |fault: &Fault| fault.at + fault.lasts <= limit;
                assert!(faults.iter().all(in_time), "{sequence}");
                kinds.extend(faults.iter().map(|fault| fault.kind));
            }
            kinds.sort();
            kinds.dedup();
            assert_eq!(kinds, setting.kinds);
        }
    }

    #[test]
    fn a_cut_in_one_way_goes_either_way() {
        let ways = |text: &str| text.parse::<Fault>().unwrap().cut_ways();
        assert_eq!(ways("cut:0@300+8000"), 0..2);
        assert_eq!(ways("cut-one-way:0@200+8000"), 0..1);
        assert_eq!(ways("cut-one-way:0@300+8000"), 1..2);
    }

    #[test]
    fn each_kind_has_its_own_name() {
        for (index, (kind, name)) in Kind::ALL.iter().enumerate() {
            assert_eq!((*kind as usize, kind.name()), (index, *name));
        }
    }

    #[test]
    fn a_fault_of_nodes_is_foreign_to_networks() {
        let sequence: Sequence = "cut:0@0+1 kill-node:1@0+1".parse().unwrap();
        assert_eq!(sequence.foreign_to(&ON_NETWORKS), Some(Kind::KillNode));
        assert_eq!(sequence.foreign_to(&ON_NODES), None);
    }

    #[test]
    fn what_is_printed_can_be_given_back() {
        for setting in [&ON_NETWORKS, &ON_NODES] {
            for seed in 0..200 {
                let sequence = Sequence::from_seed(setting, seed);
                assert_eq!(sequence.to_string().parse(), Ok(sequence));
            }
        }
        let read = |text: &str| text.parse::<Sequence>();
        assert_eq!(
            read("cut:2@1200+8000").unwrap().to_string(),
            "cut:2@1200+8000"
        );
        for wrong in [
            "cut",
            "cut:0",
            "cut:3@0+0",
            "restart-api-server:1@0+0",
            "cut:0@0",
            "cut:0@-1+0",
            "tea:0@0+0",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_failing_sequence_is_shrunk_to_what_it_takes() {
        let text = "slow:0@0+1 cut:1@100+1 lose:2@200+1 kill-agent:0@300+1";
        let whole: Sequence = text.parse().unwrap();
        let mut tried = 0;
        let shortest = whole.clone().shrink(|sequence| {
            tried += 1;
            sequence.has(Kind::Cut) && sequence.has(Kind::KillAgent)
        });
        assert_eq!(shortest.to_string(), "cut:1@100+1 kill-agent:0@300+1");
        assert_eq!(tried, 4);
        assert_eq!(whole.clone().shrink(|_| false), whole);
        assert_eq!(whole.shrink(|_| true).0.len(), 1);
    }
}
