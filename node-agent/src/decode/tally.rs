//! What the ring has cost so far, per member: sums for /metrics and the chat page. Pure.

use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::RingPlanSpec;

use crate::generation::MemberStatus;
use crate::ring::RoundCost;

#[derive(Debug)]
pub struct Tally {
    pub members: Vec<MemberStatus>,
    /// Last known bytes of KV cache per member.
    kv_bytes: Vec<u64>,
}

impl Tally {
    pub fn new(plan: &RingPlanSpec) -> Self {
        let members = plan.members.iter().map(|member| MemberStatus {
            name: member.name.clone(),
            address: member.address.clone(),
            windows: member
                .windows
                .iter()
                .map(|window| (window.layers().start, window.layers().end))
                .collect(),
            planned_read_bytes: member.read_bytes_per_token.map(|bytes| bytes as u64),
            ..MemberStatus::default()
        });
        Self {
            members: members.collect(),
            kv_bytes: vec![0; plan.members.len()],
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
            let (Some(member), Some(kv_bytes)) = (
                self.members.get_mut(timing.rank),
                self.kv_bytes.get_mut(timing.rank),
            ) else {
                continue;
            };
            member.frames += 1;
            member.compute_seconds += Duration::from_nanos(timing.compute_ns).as_secs_f64();
            member.disk_seconds += Duration::from_nanos(timing.disk_ns).as_secs_f64();
            if hops > 1 {
                member.network_seconds += between.as_secs_f64() / hops as f64;
            }
            member.read_bytes += timing.read_bytes;
            member.resident_bytes = timing.resident_bytes;
            member.streamed_bytes = timing.streamed_bytes;
            member.memory_pressure = timing.memory_pressure_ppm as f64 / 1e6;
            *kv_bytes = timing.kv_bytes;
        }
    }

    /// Bytes of KV cache on all members, as of their last frames.
    pub fn kv_bytes(&self) -> u64 {
        self.kv_bytes
            .iter()
            .fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// No session is left anywhere.
    pub fn all_released(&mut self) {
        self.kv_bytes.fill(0);
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
        };
        tally.add(&RoundCost {
            elapsed: Duration::from_secs(7),
            members: vec![timing(0), timing(1)],
        });
        for member in &tally.members {
            assert_eq!(
                (
                    member.frames,
                    member.compute_seconds,
                    member.network_seconds,
                    member.disk_seconds
                ),
                (1, 2.0, 0.5, 0.5)
            );
            assert_eq!((member.read_bytes, member.resident_bytes), (4096, 3));
            assert_eq!(member.memory_pressure, 0.04);
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
