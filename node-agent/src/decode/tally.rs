//! What the ring has cost so far, per member: sums for /metrics and the chat page; and how far tokens come back to the same experts, for the
//! next plan. Pure.

use std::time::Duration;

use prima_crds::v1alpha1::ring_plan::RingPlanSpec;

use crate::generation::MemberTotals;
use crate::ring::RoundCost;

#[derive(Debug)]
pub struct Tally {
    pub members: Vec<MemberTotals>,
    /// How often tokens needed an expert that was not in memory, and how often they would have, had they chosen all alike.
    missed: f64,
    missed_if_alike: f64,
    /// Members began with nothing, and everything was missed. That does not count.
    began: bool,
}

/// So many of the latter say something; and so many begin.
const ENOUGH_MISSES: f64 = 20_000.0;
/// After so many, older ones count for half: what people ask changes.
const MANY_MISSES: f64 = 200_000.0;

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
            missed: 0.0,
            missed_if_alike: 0.0,
            began: false,
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
        // The rows of a prompt need nearly all experts.
        if cost.rows == 1 {
            for timing in &cost.members {
                let needed = timing.expert_hits.saturating_add(timing.expert_misses) as f64;
                self.missed += timing.expert_misses as f64;
                self.missed_if_alike += needed * timing.missing_experts_ppm as f64 / 1e6;
            }
            if !self.began && self.missed_if_alike >= ENOUGH_MISSES {
                (self.missed, self.missed_if_alike, self.began) = (0.0, 0.0, true);
            }
            if self.missed_if_alike > MANY_MISSES {
                self.missed /= 2.0;
                self.missed_if_alike /= 2.0;
            }
        }
    }

    /// Of the experts that tokens would lack if they chose all alike, those that they do lack, in percent. Less than 100 where they come back to
    /// those that they used lately. `None` until enough tokens have told.
    pub fn expert_miss_percent(&self) -> Option<i32> {
        let percent = 100.0 * self.missed / self.missed_if_alike;
        let known = self.began && self.missed_if_alike >= ENOUGH_MISSES;
        known.then(|| percent.round().clamp(1.0, 100.0) as i32)
    }

    /// Bytes of KV cache on all members, as of their last frames, or none where all is released.
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
            missing_experts_ppm: 0,
        };
        tally.add(&RoundCost {
            elapsed: Duration::from_secs(7),
            rows: 1,
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
            rows: 1,
            members: vec![timing(9)],
        });
        assert_eq!(tally.members[0].frames, 1);
        tally.all_released();
        assert_eq!(tally.kv_bytes(), 0);
    }

    #[test]
    fn tokens_that_come_back_to_experts_lack_fewer() {
        let mut tally = Tally::new(&plan(4, 2, 1, &[2]));
        let member = |rank, expert_hits, expert_misses, missing_experts_ppm| HopTiming {
            rank,
            expert_hits,
            expert_misses,
            missing_experts_ppm,
            ..HopTiming::default()
        };
        let mut pass = |rows, members: [HopTiming; 2]| {
            tally.add(&RoundCost {
                elapsed: Duration::ZERO,
                rows,
                members: members.to_vec(),
            });
            tally.expert_miss_percent()
        };
        // Half and a quarter of the experts are missing, of which 20,000 each are needed: alike, 15,000 would be missed.
        let some = [
            member(0, 14_000, 6_000, 500_000),
            member(1, 17_000, 3_000, 250_000),
        ];
        let all = [member(0, 0, 20_000, 500_000), member(1, 0, 20_000, 250_000)];
        // At first, everything is missed.
        assert_eq!([pass(1, all), pass(1, all)], [None; 2]);
        assert_eq!([pass(1, some), pass(1, some)], [None, Some(60)]);
        // A prompt says nothing.
        assert_eq!(pass(128, all), Some(60));
        // It is never told to be worse than alike; and after long, what was before hardly counts.
        assert!((0..50).all(|_| pass(1, all).is_some_and(|percent| percent <= 100)));
        assert_eq!(pass(1, all), Some(100));
        for _ in 0..200 {
            pass(1, some);
        }
        assert_eq!(pass(1, some), Some(60));
    }
}
