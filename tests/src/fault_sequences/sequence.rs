//! What a sequence of faults is, how it follows from a seed, and how it is written so that it can be given back.

use std::fmt::{self, Display, Formatter};
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

/// Faults in the order in which they begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence(pub Vec<Fault>);

pub const MACHINES: usize = 3;

impl Kind {
    /// With the names by which they are written.
    pub const ALL: [(Kind, &'static str); 16] = [
        (Kind::KillMember, "kill-member"),
        (Kind::StopMember, "stop-member"),
        (Kind::KillAgent, "kill-agent"),
        (Kind::StopAgent, "stop-agent"),
        (Kind::KillOperator, "kill-operator"),
        (Kind::StopOperator, "stop-operator"),
        (Kind::Cut, "cut"),
        (Kind::Isolate, "isolate"),
        (Kind::Burst, "burst"),
        (Kind::Lose, "lose"),
        (Kind::Slow, "slow"),
        (Kind::Truncate, "truncate"),
        (Kind::Unreadable, "unreadable"),
        (Kind::FullDisk, "full-disk"),
        (Kind::AgentClock, "agent-clock"),
        (Kind::OperatorClock, "operator-clock"),
    ];

    pub fn name(self) -> &'static str {
        let (_, name) = Kind::ALL[self as usize];
        name
    }

    /// How long at most a Model may say that it answers after this has broken its ring. Of operators: how long nobody may look.
    ///
    /// Added up in seconds, at worst. What counts begins with the first request that gets no answer: 0.5 before the fault. Whoever looks is rank 0's
    /// agent, within 0.5, and the operator, within 1. Then the operator acts: 0.2 until changes that come together have come, 1 for a search that
    /// is under way, 0.3 to write; 1.5 in all.
    pub(super) fn unseen(self) -> Duration {
        let seconds = match self {
            // A process that ends closes its connections.
            Kind::KillMember | Kind::Truncate | Kind::Unreadable => 5,
            // These break no ring: what else is broken is seen as ever.
            Kind::FullDisk | Kind::AgentClock => 5,
            Kind::OperatorClock => 5,
            // Rank 0 misses signs of life after 2.75 (2.5, and 0.25 until it looks): 0.5 + 2.75 + 0.5 + 1.5 = 5.25. That rank 0 itself does not answer,
            // its agent knows after 3.5 (0.5, and 3 for an answer): 0.5 + 3.5 + 1.5 = 5.5; and if that is cut off, too, the operator after 4 (1, and
            // twice 1.5 for an answer): 0.5 + 4 + 1.5 = 6. The rest is for a busy machine.
            Kind::StopMember | Kind::Cut | Kind::Isolate => 8,
            // With the agent its members die, so the operator finds twice that nobody listens: 0.5 + 2 + 1.5 = 4. One that stands still writes nothing of
            // what else is broken, but the operator asks itself: 0.5 + 2.75 + 1 + 1.5 = 5.75, or 6 where rank 0 does not answer, as above.
            Kind::KillAgent | Kind::StopAgent => 8,
            // The ring goes on, only slower, and nothing tells of that: a client may give up after 5, and ask again after 0.1. If signs of life fail
            // to come then, it takes 5.25 more, as above: 10.35.
            Kind::Burst | Kind::Lose | Kind::Slow => 12,
            // Until the other operator leads: its Lease takes 10 s.
            Kind::KillOperator | Kind::StopOperator => 20,
        };
        Duration::from_secs(seconds)
    }

    pub fn is_of_operators(self) -> bool {
        matches!(
            self,
            Kind::KillOperator | Kind::StopOperator | Kind::OperatorClock
        )
    }
}

impl Sequence {
    /// Two to five faults, the last of which begins within 8 s, and is lifted within 20.
    pub fn from_seed(seed: u64) -> Sequence {
        let mut random = StdRng::seed_from_u64(seed);
        let mut tenths =
            |from: u64, to: u64| Duration::from_millis(100 * random.random_range(from..=to));
        let count = tenths(2, 5).as_millis() / 100;
        let mut faults: Vec<Fault> = (0..count)
            .map(|_| {
                let (kind, _) =
                    Kind::ALL[tenths(0, Kind::ALL.len() as u64 - 1).as_millis() as usize / 100];
                let victims = if kind.is_of_operators() {
                    2
                } else {
                    MACHINES as u64
                };
                Fault {
                    kind,
                    victim: tenths(0, victims - 1).as_millis() as usize / 100,
                    at: tenths(5, 80),
                    lasts: match kind {
                        Kind::KillMember => Duration::ZERO,
                        _ => tenths(5, 120),
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
                .filter(|&victim| victim < MACHINES)
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
        let mut kinds: Vec<Kind> = Vec::new();
        for seed in 0..200 {
            let sequence = Sequence::from_seed(seed);
            assert_eq!(sequence, Sequence::from_seed(seed));
            assert_ne!(sequence, Sequence::from_seed(seed + 1));
            let faults = &sequence.0;
            assert!((2..=5).contains(&faults.len()), "{sequence}");
            assert!(faults.is_sorted_by_key(|fault| fault.at), "{sequence}");
            let in_time = |fault: &Fault| fault.at + fault.lasts <= Duration::from_secs(20);
            assert!(faults.iter().all(in_time), "{sequence}");
            kinds.extend(faults.iter().map(|fault| fault.kind));
        }
        kinds.sort();
        kinds.dedup();
        assert_eq!(kinds, Kind::ALL.map(|(kind, _)| kind));
    }

    #[test]
    fn what_is_printed_can_be_given_back() {
        for seed in 0..200 {
            let sequence = Sequence::from_seed(seed);
            assert_eq!(sequence.to_string().parse(), Ok(sequence));
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
