//! How Models stand for room on the machines, as the last decision about each says: by that, one of higher priority has others end, and is
//! planned before them. Kept in memory only: an operator that has just started decides about all Models again.
//!
//! Nobody ends for a Model before a pass of its has succeeded as a whole, from its API keys to its status: one that fails could not use the
//! room. Nobody waits for long for what is not decided, be it that a file is looked at, a ring searched for, or that passes fail.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::ResourceExt;
use prima_crds::v1alpha1::ring_plan::RingPlan;

use super::decide::plan_depends_on;
use crate::cluster::world::Machine;

/// How one Model stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It claims no room: it has its ring, or there is none for other reasons than room.
    NoClaim,
    /// What it needs is not known yet.
    Undecided,
    /// It has no ring for lack of room, and nobody's end would help. This is what there was.
    Waits(SeenRoom),
    /// Room is being made for its ring.
    Displaces {
        /// Uids of the Models whose rings are to end for it.
        models: Vec<String>,
        /// Where its ring will be.
        machines: Vec<String>,
    },
}

impl Standing {
    /// Whether somebody is to end for it who was not `before`.
    fn displaces_more_than(&self, before: Option<&Self>) -> bool {
        match (self, before) {
            (Self::Displaces { models, .. }, Some(Self::Displaces { models: before, .. })) => {
                models.iter().any(|uid| !before.contains(uid))
            }
            (Self::Displaces { .. }, _) => true,
            _ => false,
        }
    }
}

/// What there was to be planned with when a decision was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenRoom {
    machines: u64,
    /// Their uids.
    plans: BTreeSet<String>,
}

impl SeenRoom {
    pub fn new<'a>(machines: &[Machine], plans: impl Iterator<Item = &'a Arc<RingPlan>>) -> Self {
        let mut hasher = DefaultHasher::new();
        for machine in machines {
            let profile = machine.profile.as_deref();
            let profile = profile.map(|profile| plan_depends_on(profile, 0));
            (&machine.name, &machine.labels, profile).hash(&mut hasher);
            (machine.is_alive(), machine.cordoned, machine.leaving).hash(&mut hasher);
        }
        Self {
            machines: hasher.finish(),
            plans: plans.filter_map(|plan| plan.uid()).collect(),
        }
    }

    /// Whether there may be more room than there was `before`.
    pub fn may_be_more_than(&self, before: &Self) -> bool {
        self.machines != before.machines || !before.plans.is_subset(&self.plans)
    }
}

/// How long others wait for a Model that is not decided about.
const UNDECIDED_FOR: Duration = Duration::from_secs(60);

/// By the Model's uid. Times are those of the monotonic clock.
#[derive(Default)]
pub struct Standings(Mutex<BTreeMap<String, Noted>>);

struct Noted {
    standing: Standing,
    /// Since when no pass has both succeeded and decided something.
    undecided_since: Option<Instant>,
}

impl Standings {
    /// Notes what a pass has decided that may still fail. Nobody more is to end because of it yet. To be called under the lock of decisions.
    pub fn decided(&self, uid: &str, standing: Standing, now: Instant) {
        let mut all = self.lock();
        let before = all.get(uid);
        let standing = match standing.displaces_more_than(before.map(|noted| &noted.standing)) {
            true => Standing::Undecided,
            false => standing,
        };
        let since = before.and_then(|noted| noted.undecided_since);
        let noted = Noted {
            undecided_since: match standing {
                Standing::Undecided => since.or(Some(now)),
                _ => since,
            },
            standing,
        };
        all.insert(uid.to_owned(), noted);
    }

    /// Notes that all of that pass has succeeded.
    pub fn passed(&self, uid: &str, standing: Standing, now: Instant) {
        if standing == Standing::Undecided {
            return self.decided(uid, standing, now);
        }
        let noted = Noted {
            standing,
            undecided_since: None,
        };
        self.lock().insert(uid.to_owned(), noted);
    }

    /// Notes that a pass has failed: what it decided counts for nothing.
    pub fn failed(&self, uid: &str, now: Instant) {
        self.decided(uid, Standing::Undecided, now);
    }

    /// How the Model stands for others. `None`: nothing was decided about it yet.
    pub fn of(&self, uid: &str, now: Instant) -> Option<Standing> {
        let all = self.lock();
        let noted = all.get(uid)?;
        let long = |since: Instant| now.duration_since(since) >= UNDECIDED_FOR;
        Some(match &noted.standing {
            Standing::Undecided if noted.undecided_since.is_some_and(long) => Standing::NoClaim,
            standing => standing.clone(),
        })
    }

    /// Forgets Models that are not there any more.
    pub fn retain(&self, there: &HashSet<String>) {
        self.lock().retain(|uid, _| there.contains(uid));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Noted>> {
        // Every entry is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model_controller::test_world::{machine, profile, ring};

    #[test]
    fn room_is_more_when_a_plan_goes_or_a_machine_changes() {
        let plans = ["a", "b"].map(|uid| {
            let mut plan = RingPlan::clone(&ring(&[(0, 8)], 0, 0));
            plan.metadata.uid = Some(uid.to_owned());
            Arc::new(plan)
        });
        let machines = [machine("desk"), machine("pi4")];
        let all = SeenRoom::new(&machines, plans.iter());
        let fewer = SeenRoom::new(&machines, plans[..1].iter());
        assert!(!all.may_be_more_than(&all));
        assert!(fewer.may_be_more_than(&all));
        // Another plan only takes room.
        assert!(!all.may_be_more_than(&fewer));
        let more_after = |change: fn(&mut Machine)| {
            let mut changed = machines.clone();
            change(&mut changed[0]);
            SeenRoom::new(&changed, plans.iter()).may_be_more_than(&all)
        };
        assert!(more_after(|machine| machine.cordoned = true));
        assert!(more_after(
            |machine| profile(machine).spec.disk_allowed = Some(false)
        ));
        assert!(more_after(|machine| {
            let memory = &mut profile(machine).status.as_mut().unwrap().memory;
            memory.available_bytes -= memory.total_bytes / 10;
        }));
        // An agent writes much that no plan depends on.
        assert!(!more_after(|machine| {
            let profile = profile(machine);
            profile.metadata.resource_version = Some("2".to_owned());
            let status = profile.status.as_mut().unwrap();
            status.memory.available_bytes += 1;
            let ready = json!({"type": "Ready", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
            status.conditions = vec![serde_json::from_value(ready).unwrap()];
            status.agent.as_mut().unwrap().local_models.clear();
        }));
    }

    fn displaces(models: &[&str]) -> Standing {
        Standing::Displaces {
            models: models.iter().map(|uid| (*uid).to_owned()).collect(),
            machines: vec!["desk".to_owned()],
        }
    }

    #[test]
    fn nobody_ends_before_a_pass_has_succeeded() {
        let (standings, now) = (Standings::default(), Instant::now());
        let is = |standing: Standing| assert_eq!(standings.of("m", now), Some(standing));
        assert_eq!(standings.of("m", now), None);
        standings.decided("m", displaces(&["a"]), now);
        is(Standing::Undecided);
        standings.failed("m", now);
        is(Standing::Undecided);
        standings.decided("m", displaces(&["a"]), now);
        is(Standing::Undecided);
        standings.passed("m", displaces(&["a"]), now);
        is(displaces(&["a"]));
        // The next pass changes nothing if it comes to the same, and may only have more end when it has succeeded, too.
        standings.decided("m", displaces(&["a"]), now);
        is(displaces(&["a"]));
        standings.decided("m", displaces(&["a", "b"]), now);
        is(Standing::Undecided);
        standings.passed("m", displaces(&["a", "b"]), now);
        standings.decided("m", displaces(&["b"]), now);
        is(displaces(&["b"]));
        standings.failed("m", now);
        is(Standing::Undecided);
        // What ends nobody counts at once.
        standings.decided("m", Standing::NoClaim, now);
        is(Standing::NoClaim);
    }

    #[test]
    fn nobody_waits_for_long_for_what_is_not_decided() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let standings = Standings::default();
        // A file that is looked at, then a search.
        standings.decided("m", Standing::Undecided, start);
        standings.passed("m", Standing::Undecided, start);
        standings.decided("m", Standing::Undecided, at(50));
        assert_eq!(standings.of("m", at(59)), Some(Standing::Undecided));
        assert_eq!(standings.of("m", at(60)), Some(Standing::NoClaim));
        // Once it was decided about, it may take a minute again.
        standings.passed("m", Standing::NoClaim, at(70));
        standings.decided("m", Standing::Undecided, at(100));
        assert_eq!(standings.of("m", at(159)), Some(Standing::Undecided));
        // Passes that decide something and then fail are none of that.
        standings.decided("m", Standing::NoClaim, at(110));
        standings.failed("m", at(110));
        assert_eq!(standings.of("m", at(159)), Some(Standing::Undecided));
        standings.failed("m", at(160));
        assert_eq!(standings.of("m", at(160)), Some(Standing::NoClaim));
        // Room that is made for it is not taken by others, however long that takes.
        standings.passed("m", displaces(&["a"]), at(170));
        assert_eq!(standings.of("m", at(900)), Some(displaces(&["a"])));
    }

    #[test]
    fn standings_are_kept_while_their_models_are_there() {
        let (standings, now) = (Standings::default(), Instant::now());
        standings.passed("a", Standing::NoClaim, now);
        standings.retain(&["a".to_owned()].into());
        assert_eq!(standings.of("a", now), Some(Standing::NoClaim));
        standings.retain(&["b".to_owned()].into());
        assert_eq!(standings.of("a", now), None);
    }
}
