//! What the ring has cost so far, per member: sums for /metrics and the chat page. Pure.

use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::RingPlanSpec;

use crate::generation::MemberTotals;
use crate::ring::RoundCost;

#[derive(Debug)]
pub struct Tally {
    pub members: Vec<MemberTotals>,
}

impl Tally {
    pub fn new(plan: &RingPlanSpec) -> Self {
        let members = plan.members.iter().map(|member| MemberTotals {
            name: member.name.clone(),
            address: member.address.clone(),
            windows: member
                .windows
                .iter()
                .map(|window| (window.layers().start, window.layers().end))
                .collect(),
            planned_read_bytes: member.read_bytes_per_token.map(|bytes| bytes as u64),
            planned_kv_bytes: member.kv_bytes.map(|bytes| bytes as u64),
            ..MemberTotals::default()
        });
        Self {
            members: members.collect(),
        }
    }

    /// Adds what one frame cost. The time that no member spent computing or waiting was spent between them; it is
    /// shared equally among the hops, because clocks of different machines cannot be compared.
    pub fn add(&mut self, cost: &RoundCost) {
        let spent: u64 = cost
            .members
            .iter()
            .map(|timing| timing.compute_ns.saturating_add(timing.wait_ns))
            .fold(0, u64::saturating_add);
        let between = cost.elapsed.saturating_sub(Duration::from_nanos(spent));
        let hops = self.members.len();
        for timing in &cost.members {
            let Some(member) = self.members.get_mut(timing.rank as usize) else {
                continue;
            };
            member.frames += 1;
            member.timing.add(timing);
            if hops > 1 {
                member.network_seconds += between.as_secs_f64() / hops as f64;
            }
        }
    }

    /// Bytes of KV cache on all members, as of their last frames.
    pub fn kv_bytes(&self) -> u64 {
        let held = self.members.iter().map(|member| member.timing.kv_bytes);
        held.fold(0, u64::saturating_add)
    }

    /// No session is left anywhere.
    pub fn all_released(&mut self) {
        for member in &mut self.members {
            member.timing.kv_bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::HopTiming;
    use crate::ring::test_plan::plan;

    #[test]
    fn time_that_no_member_claims_is_the_networks() {
        let mut tally = Tally::new(&plan(4, 2, 1, &[2]));
        let timing = |rank| HopTiming {
            rank,
            compute_ns: 2_000_000_000,
            wait_ns: 1_000_000_000,
            disk_ns: 500_000_000,
            read_bytes: 4096,
            kv_bytes: 64,
            resident_bytes: 3,
            streamed_bytes: 2,
            memory_pressure_ppm: 40_000,
            expert_hits: 0,
            expert_misses: 0,
            gpu_copied_bytes: 0,
        };
        tally.add(&RoundCost {
            elapsed: Duration::from_secs(7),
            members: vec![timing(0), timing(1)],
        });
        for member in &tally.members {
            assert_eq!(
                (
                    member.frames,
                    member.network_seconds,
                    member.timing.read_bytes
                ),
                (1, 0.5, 4096)
            );
        }
        assert_eq!(tally.kv_bytes(), 128);
        tally.add(&RoundCost {
            elapsed: Duration::ZERO,
            members: vec![timing(9)],
        });
        assert_eq!(tally.members[0].frames, 1);
        tally.all_released();
        assert_eq!(tally.kv_bytes(), 0);
    }
}
