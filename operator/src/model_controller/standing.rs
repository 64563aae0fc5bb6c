//! How Models stand for room on the machines, as the last decision about each says: by that, one of higher priority has others end, and is
//! planned before them. Noted under the lock of decisions, and kept in memory only. An operator that has just started decides about all Models
//! again; until it has, those of lower priority wait.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::ResourceExt;
use prima_crds::v1alpha1::ring_plan::RingPlan;

use crate::cluster::world::Machine;

/// How one Model stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has its ring, or there is none for other reasons than room.
    Content,
    /// How much it needs is not known yet.
    Undecided,
    /// It has no ring, for lack of room.
    Waits {
        seen: SeenRoom,
        /// Uids of the Models whose rings are to end for it.
        displaces: Vec<String>,
    },
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
            let profile = machine.profile.as_ref();
            let version = profile.and_then(|profile| profile.resource_version());
            let is_alive = machine.is_alive();
            (&machine.name, version, &machine.labels).hash(&mut hasher);
            (is_alive, machine.cordoned, machine.leaving).hash(&mut hasher);
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

/// By the Model's uid.
#[derive(Default)]
pub struct Standings(Mutex<BTreeMap<String, Standing>>);

impl Standings {
    pub fn note(&self, uid: String, standing: Standing) {
        self.lock().insert(uid, standing);
    }

    /// `None`: nothing was decided about it yet.
    pub fn of(&self, uid: &str) -> Option<Standing> {
        self.lock().get(uid).cloned()
    }

    /// Forgets Models that are not there any more.
    pub fn retain(&self, there: &HashSet<String>) {
        self.lock().retain(|uid, _| there.contains(uid));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Standing>> {
        // Every entry is replaced as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
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
        let changes: [fn(&mut Machine); 2] = [
            |machine| machine.cordoned = true,
            |machine| profile(machine).metadata.resource_version = Some("2".to_owned()),
        ];
        for change in changes {
            let mut changed = machines.clone();
            change(&mut changed[0]);
            let changed = SeenRoom::new(&changed, plans.iter());
            assert!(changed.may_be_more_than(&all));
        }
    }

    #[test]
    fn standings_are_kept_while_their_models_are_there() {
        let standings = Standings::default();
        standings.note("a".to_owned(), Standing::Undecided);
        standings.note("a".to_owned(), Standing::Content);
        assert_eq!(standings.of("a"), Some(Standing::Content));
        assert_eq!(standings.of("b"), None);
        standings.retain(&["b".to_owned()].into());
        assert_eq!(standings.of("a"), None);
    }
}
