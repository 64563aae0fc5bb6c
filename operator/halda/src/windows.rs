//! Which layers a member holds, of all rounds, when only their numbers were decided.

use crate::latency::LayerShare;

/// Layers `first..last`, of which the last `gpu_layers` run on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub first: usize,
    pub last: usize,
    pub gpu_layers: usize,
}

/// The windows of members with `shares`, in ring order: one row per member, one window per round. Each share is spread evenly
/// over the rounds (earlier rounds take the rest), and layers are counted through the ring round after round.
pub fn windows(shares: &[LayerShare], rounds: usize) -> Vec<Vec<Window>> {
    let mut windows = vec![Vec::with_capacity(rounds); shares.len()];
    let mut next = 0;
    for round in 0..rounds {
        for (member, share) in windows.iter_mut().zip(shares) {
            let last = next + part(share.layers(), rounds, round);
            member.push(Window {
                first: next,
                last,
                gpu_layers: part(share.gpu_layers, rounds, round),
            });
            next = last;
        }
    }
    windows
}

/// Part `i` of `total`, split into `parts` numbers that differ by at most one, the larger ones first.
fn part(total: usize, parts: usize, i: usize) -> usize {
    total / parts + usize::from(i < total % parts)
}
