//! The search around the program of `milp`: rings of one member, numbers of rounds, and the order of the ring. Decides which programs need
//! not be solved, because their bound is hardly better than the best known answer, and how good that answer is proven to be.
//!
//! Every answer is weighed by [`crate::latency`], which knows the layers of each member. Where their KV caches do not fit in truth, the program is
//! solved once more, with memory for the largest that so many windows can have. Where the order is not part of
//! the program, the hops of a ring may cost more than it counts. A bounded first token that comes too late by that has it solved once more, too.

use crate::found::{Found, evaluate};
use crate::greedy::first_answer;
use crate::input::{Device, PlanningInput};
use crate::latency::{LayerShare, chunks};
use crate::milp::{self, Program, Solution, SolverOutcome};
use crate::order;

/// How long the search may take and how exact it must be.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    pub relative_gap: f64,
    /// For each program; there is one for each number of rounds that is worth it.
    pub time_limit_seconds: f64,
    /// `Some`: of numbers of rounds, only 1, 2, 3, 4, 6, 8, 12 and so on are tried, and this one. With the next of these, a request takes little
    /// longer than with the best. `None`: all are tried.
    pub few_rounds_and: Option<usize>,
}

impl Default for Effort {
    fn default() -> Self {
        Self {
            relative_gap: 1e-3,
            time_limit_seconds: 2.0,
            few_rounds_and: None,
        }
    }
}

/// Rings with more rounds than this are not tried: each window would be tiny, and hops would cost more than they hide.
const MOST_ROUNDS: usize = 64;
/// Links that differ by less are one kind of link.
const SAME_LINK: f64 = 0.02;

/// `None`: nothing is possible.
pub fn search(input: &PlanningInput, effort: Effort) -> Option<Found> {
    let answers = [alone(input), first_answer(input)];
    let mut best = answers
        .into_iter()
        .flatten()
        .min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    if input.devices.len() == 1 {
        return best.map(|found| Found {
            bound_seconds: found.seconds,
            ..found
        });
    }

    // Every number of rounds has a bound; the hopeless are never solved.
    let differ = links_differ(input);
    let ordered = differ && input.devices.len() <= order::EXACT;
    let is_tried = |rounds: &usize| match effort.few_rounds_and {
        Some(one) => *rounds == one || matches!(rounds >> rounds.trailing_zeros(), 1 | 3),
        None => true,
    };
    let rounds: Vec<usize> = match input.rounds {
        Some(rounds) => vec![rounds],
        None => (1..=input.model.layers.min(MOST_ROUNDS))
            .filter(is_tried)
            .collect(),
    };
    let program = |rounds, below_seconds, relaxed| Program {
        input,
        rounds,
        kv_windows: 1,
        below_seconds,
        relaxed,
        ordered,
        relative_gap: effort.relative_gap,
        time_limit_seconds: effort.time_limit_seconds,
    };
    let mut bounds: Vec<(f64, usize)> = rounds
        .into_iter()
        .filter_map(
            |rounds| match milp::solve(&program(rounds, f64::INFINITY, true)) {
                SolverOutcome::Bound(seconds) => Some((seconds, rounds)),
                SolverOutcome::Solved(_) | SolverOutcome::Unknown => Some((0.0, rounds)),
                SolverOutcome::Nothing => None,
            },
        )
        .collect();
    // Powers of two first: one of them is nearly as good as the best, and with a good answer the others are soon hopeless.
    bounds.sort_by(|a, b| {
        let later = |rounds: usize| !rounds.is_power_of_two();
        later(a.1).cmp(&later(b.1)).then(a.0.total_cmp(&b.0))
    });
    let mut bound = f64::INFINITY;
    for (lower, rounds) in bounds {
        let known = best.as_ref().map_or(f64::INFINITY, |best| best.seconds);
        // What is not better by the gap is not looked for.
        let below = known * (1.0 - effort.relative_gap);
        if lower >= below {
            bound = bound.min(lower);
            continue;
        }
        let in_order = |ring: &[usize]| match differ && !ordered {
            true => order::cheapest(input, ring, rounds),
            false => ring.to_vec(),
        };
        let weighed = |solution: &Solution| {
            let ring = in_order(&solution.ring);
            evaluate(input, rounds, ring, solution.shares.clone())
        };
        match milp::solve(&program(rounds, below, false)) {
            SolverOutcome::Solved(solution) => {
                // Nothing above `below` was looked at.
                bound = bound.min(solution.bound_seconds.max(lower).min(below));
                let mut found = weighed(&solution);
                // With a reserve for more windows, up to the worst case, which is seldom needed and takes most.
                let mut kv_windows = 1;
                while found.is_none() && kv_windows < rounds && !input.model.kv_of_layers.is_empty()
                {
                    kv_windows = (2 * kv_windows).min(rounds);
                    let more = Program {
                        kv_windows,
                        ..program(rounds, below, false)
                    };
                    if let SolverOutcome::Solved(solution) = milp::solve(&more) {
                        found = weighed(&solution);
                    }
                }
                // Its hops may have been what brought the first token too late.
                if let Some(most) = input.first_token_seconds
                    && found.is_none()
                    && !ordered
                {
                    // Where there is no way, it never comes.
                    let later = beyond_cheapest_hops(input, &in_order(&solution.ring), rounds);
                    let later = later.min(most);
                    let sooner = PlanningInput {
                        first_token_seconds: Some(most - later),
                        ..input.clone()
                    };
                    let sooner = Program {
                        input: &sooner,
                        kv_windows,
                        ..program(rounds, below, false)
                    };
                    if let SolverOutcome::Solved(solution) = milp::solve(&sooner) {
                        found = weighed(&solution);
                    }
                }
                if let Some(found) = found
                    && found.seconds < known
                {
                    best = Some(found);
                }
            }
            SolverOutcome::Nothing => bound = bound.min(below),
            SolverOutcome::Unknown | SolverOutcome::Bound(_) => bound = bound.min(lower),
        }
    }
    best.map(|found| Found {
        // Rings of one member were all tried, so the bound is that of the others or what was found.
        bound_seconds: bound.min(found.seconds),
        ..found
    })
}

/// The best ring of one member.
fn alone(input: &PlanningInput) -> Option<Found> {
    let layers = input.model.layers;
    // For one member, a second round costs copies and gains nothing: no other member works while it reads.
    let rounds = input.rounds.unwrap_or(1);
    let may_be_alone = |index: &usize| {
        let others_required =
            |(other, device): (usize, &Device)| other != *index && device.required;
        input.rank0.is_none_or(|only| only == *index)
            && !input.devices.iter().enumerate().any(others_required)
    };
    (0..input.devices.len())
        .filter(may_be_alone)
        .flat_map(|index| {
            let most = match input.devices[index].gpu {
                Some(_) => layers,
                None => 0,
            };
            (0..=most).filter_map(move |gpu_layers| {
                let mut shares = vec![LayerShare::default(); input.devices.len()];
                shares[index] = LayerShare {
                    cpu_layers: layers - gpu_layers,
                    gpu_layers,
                };
                evaluate(input, rounds, vec![index], shares)
            })
        })
        .min_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// By how much this ring's first token comes later than with hops that all cost what their machine's cheapest link does: at most so many seconds.
fn beyond_cheapest_hops(input: &PlanningInput, ring: &[usize], rounds: usize) -> f64 {
    let next = ring.iter().cycle().skip(1);
    let beyond = ring.iter().zip(next).map(|(&from, &to)| {
        let links = input.hops[from].iter().enumerate();
        let others = links.filter(|(other, _)| *other != from);
        let seconds = others.map(|(_, hop)| hop.chunk_seconds);
        let cheapest = seconds.fold(f64::INFINITY, f64::min);
        rounds as f64 * (input.hops[from][to].chunk_seconds - cheapest)
    });
    let beyond: Vec<f64> = beyond.collect();
    // The first chunk meets all of them, each further one the slowest member's.
    let slowest = beyond.iter().copied().fold(0.0, f64::max);
    beyond.iter().sum::<f64>() + (chunks(input) - 1.0) * slowest
}

fn links_differ(input: &PlanningInput) -> bool {
    let mut range = (f64::INFINITY, 0.0_f64);
    for (from, hops) in input.hops.iter().enumerate() {
        for (to, hop) in hops.iter().enumerate() {
            if from != to {
                range.0 = range.0.min(hop.decode_seconds);
                range.1 = range.1.max(hop.decode_seconds);
            }
        }
    }
    range.1 > range.0 * (1.0 + SAME_LINK)
}
