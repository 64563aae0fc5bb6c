//! Which layers this member runs in a round, and where a frame goes from here. Pure: a plan and a rank in, numbers out.
//!
//! A frame's round says which window its receiver runs. Rank 0 has one more stage than there are rounds: a frame that
//! comes home with `round == rounds` has passed all layers and goes to the output head.

use prima_crds::v1alpha1::ring_plan::{PlannedWindow, RingPlanSpec};

/// One member's view of the plan.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub rank: usize,
    pub members: usize,
    pub rounds: usize,
    /// One per round; may be empty.
    pub windows: Vec<PlannedWindow>,
}

impl Schedule {
    /// `plan` must be validated and have a member of this rank; else the schedule is `None`.
    pub fn new(plan: &RingPlanSpec, rank: usize) -> Option<Self> {
        let member = plan.members.get(rank)?;
        Some(Self {
            rank,
            members: plan.members.len(),
            rounds: plan.rounds as usize,
            windows: member.windows.clone(),
        })
    }

    /// Stages that a frame may arrive for: one per round, on rank 0 one more for the output head.
    pub fn stages(&self) -> usize {
        self.rounds + usize::from(self.rank == 0)
    }

    /// The round of a frame after this member's window of `round`. Only the last member, which sends to rank 0, begins
    /// a new round.
    pub fn next_round(&self, round: usize) -> usize {
        round + usize::from(self.successor() == 0)
    }

    /// Whether a frame has passed all layers after this member's window of `round`.
    pub fn is_last_hop(&self, round: usize) -> bool {
        self.next_round(round) == self.rounds
    }

    /// The member that frames go to.
    pub fn successor(&self) -> usize {
        self.behind(self.rank)
    }

    /// The member that the one of this rank hands on to.
    pub fn behind(&self, rank: usize) -> usize {
        rank.saturating_add(1) % self.members
    }

    /// The member that frames come from.
    pub fn predecessor(&self) -> usize {
        (self.rank + self.members - 1) % self.members
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ring::test_plan::plan;

    proptest! {
        /// A frame that starts at rank 0 meets every layer once, in order, and comes home to the output head.
        #[test]
        fn every_layer_once_in_order(members in 1usize..6, rounds in 1usize..5, cuts in prop::collection::vec(0usize..=24, 0..30)) {
            let plan = plan(24, members, rounds, &cuts);
            let schedules: Vec<_> = (0..members).map(|rank| Schedule::new(&plan, rank).unwrap()).collect();
            let (mut rank, mut round, mut layers, mut hops) = (0, 0, Vec::new(), 0);
            while !(rank == 0 && round == rounds) {
                prop_assert!(round < schedules[rank].stages());
                layers.extend(schedules[rank].windows[round].layers());
                let last = schedules[rank].is_last_hop(round);
                (rank, round) = (schedules[rank].successor(), schedules[rank].next_round(round));
                prop_assert_eq!(last, rank == 0 && round == rounds);
                hops += 1;
            }
            prop_assert_eq!(hops, members * rounds);
            prop_assert_eq!(layers, (0..24).collect::<Vec<_>>());
            prop_assert!(round < schedules[0].stages());
        }
    }

    #[test]
    fn neighbours_close_the_ring() {
        let plan = plan(6, 3, 1, &[2, 4]);
        let last = Schedule::new(&plan, 2).unwrap();
        assert_eq!((last.predecessor(), last.successor()), (1, 0));
        let first = Schedule::new(&plan, 0).unwrap();
        assert_eq!((first.predecessor(), first.successor()), (2, 1));
        assert!(Schedule::new(&plan, 3).is_none());
    }
}
