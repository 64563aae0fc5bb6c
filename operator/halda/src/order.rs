//! The order of a ring: the cheapest cycle through given devices, where links differ. Exact for rings of usual size.

use crate::input::PlanningInput;

/// Rings up to this size are ordered exactly: 12 members are 24 thousand states.
pub const EXACT: usize = 12;
/// What a hop counts for where there is no way: the fewer of these, the better, whatever else an order costs.
const NO_WAY_SECONDS: f64 = 1e9;

/// `ring` in the order in which the hops of an answer's tokens and of a prompt's chunks, in `rounds` rounds, cost least together. Its first
/// device stays first. Held and Karp's dynamic program; beyond [`EXACT`] members, 2-opt from the order given.
pub fn cheapest(input: &PlanningInput, ring: &[usize], rounds: usize) -> Vec<usize> {
    let cost = |from: usize, to: usize| {
        let hop = input.hops[from][to];
        let answer = input.workload.answer_tokens as f64;
        match hop.is_way() {
            true => rounds as f64 * (answer * hop.decode_seconds + hop.chunk_seconds),
            false => NO_WAY_SECONDS,
        }
    };
    match ring.len() {
        0..=2 => ring.to_vec(),
        3..=EXACT => held_karp(ring, cost),
        _ => two_opt(ring, cost),
    }
}

fn held_karp(ring: &[usize], cost: impl Fn(usize, usize) -> f64) -> Vec<usize> {
    let rest = &ring[1..];
    let count = rest.len();
    // best[set][last]: cheapest way from the first through `set`, ending at `last`, and who came before.
    let mut best = vec![vec![(f64::INFINITY, usize::MAX); count]; 1 << count];
    for (last, &device) in rest.iter().enumerate() {
        best[1 << last][last] = (cost(ring[0], device), usize::MAX);
    }
    for set in 1..1_usize << count {
        for last in (0..count).filter(|last| set & (1 << last) != 0) {
            let (so_far, _) = best[set][last];
            for next in (0..count).filter(|next| set & (1 << next) == 0) {
                let total = so_far + cost(rest[last], rest[next]);
                let slot = &mut best[set | 1 << next][next];
                if total < slot.0 {
                    *slot = (total, last);
                }
            }
        }
    }
    let mut set = (1 << count) - 1;
    let home = |last: usize| best[set][last].0 + cost(rest[last], ring[0]);
    let mut last = (0..count)
        .min_by(|&a, &b| home(a).total_cmp(&home(b)))
        .unwrap_or(0);
    let mut backwards = Vec::with_capacity(count);
    while last != usize::MAX {
        backwards.push(rest[last]);
        let before = best[set][last].1;
        set &= !(1 << last);
        last = before;
    }
    backwards.push(ring[0]);
    backwards.reverse();
    backwards
}

fn two_opt(ring: &[usize], cost: impl Fn(usize, usize) -> f64) -> Vec<usize> {
    let total = |ring: &[usize]| -> f64 {
        let next = ring.iter().skip(1).chain(ring.first());
        ring.iter().zip(next).map(|(&a, &b)| cost(a, b)).sum()
    };
    let mut ring = ring.to_vec();
    let mut best = total(&ring);
    let mut improved = true;
    while improved {
        improved = false;
        for i in 1..ring.len() - 1 {
            for j in i + 1..ring.len() {
                ring[i..=j].reverse();
                let now = total(&ring);
                if now < best - 1e-12 {
                    best = now;
                    improved = true;
                } else {
                    ring[i..=j].reverse();
                }
            }
        }
    }
    ring
}
