//! Which member runs which layers when `--split` says so, instead of the planner. Pure.

use prima_crds::v1alpha1::ring_plan::PlannedWindow;
use prima_halda::latency::LayerShare;

use crate::plan;

/// Why the layers cannot be split as asked.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    #[error(
        "--split {split}: expected numbers that sum to the model's {expected} layers, found a sum of {found}"
    )]
    Sum {
        split: String,
        expected: usize,
        found: usize,
    },
    #[error("--split {split}: expected {expected} numbers, one for each member, found {found}")]
    Count {
        split: String,
        expected: usize,
        found: usize,
    },
    #[error(
        "--rounds {rounds}: no member has more than {most} layers, so a whole round would be empty; use at most {most} rounds"
    )]
    EmptyRound { rounds: usize, most: usize },
}

/// Layers of each member in all rounds together, as `--split` says.
pub fn shares(
    layers: usize,
    members: Option<usize>,
    split: &[u16],
) -> Result<Vec<usize>, SplitError> {
    let shares: Vec<usize> = split.iter().copied().map(usize::from).collect();
    let written = || {
        let numbers: Vec<String> = split.iter().map(u16::to_string).collect();
        numbers.join(",")
    };
    if let Some(expected) = members
        && expected != shares.len()
    {
        return Err(SplitError::Count {
            split: written(),
            expected,
            found: shares.len(),
        });
    }
    let found = shares.iter().sum();
    if found != layers {
        return Err(SplitError::Sum {
            split: written(),
            expected: layers,
            found,
        });
    }
    Ok(shares)
}

/// The windows of members with these shares, as the planner would lay them. Windows may be empty, whole rounds may not.
pub fn windows(shares: &[usize], rounds: usize) -> Result<Vec<Vec<PlannedWindow>>, SplitError> {
    let most = shares.iter().copied().max().unwrap_or(0);
    if rounds > most {
        return Err(SplitError::EmptyRound { rounds, most });
    }
    let on_cpu = |&cpu_layers: &usize| LayerShare {
        cpu_layers,
        gpu_layers: 0,
    };
    let shares: Vec<LayerShare> = shares.iter().map(on_cpu).collect();
    let windows = prima_halda::windows::windows(&shares, rounds);
    Ok(windows.iter().map(|member| plan::windows(member)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `total` in `parts` numbers that differ by at most one, the larger ones first.
    fn even(total: usize, parts: usize) -> impl Iterator<Item = usize> {
        (0..parts).map(move |part| total / parts + usize::from(part < total % parts))
    }

    fn ranges(shares: &[usize], rounds: usize) -> Vec<Vec<(i32, i32)>> {
        windows(shares, rounds)
            .unwrap()
            .iter()
            .map(|member| member.iter().map(|w| (w.first, w.last)).collect())
            .collect()
    }

    #[test]
    fn counts_layers_through_the_ring_round_after_round() {
        assert_eq!(ranges(&[10, 12, 8], 1), [[(0, 10)], [(10, 22)], [(22, 30)]]);
        assert_eq!(
            ranges(&[3, 0, 2], 2),
            [[(0, 2), (3, 4)], [(2, 2), (4, 4)], [(2, 3), (4, 5)]]
        );
    }

    #[test]
    fn every_layer_is_run_once_whatever_the_split() {
        for layers in 1..40usize {
            for members in 1..=layers.min(7) {
                for rounds in 1..=layers.div_ceil(members) {
                    let shares: Vec<usize> = even(layers, members).collect();
                    let rows = ranges(&shares, rounds);
                    let mut next = 0;
                    for round in 0..rounds {
                        let before = next;
                        for member in &rows {
                            assert_eq!(member[round].0, next);
                            next = member[round].1;
                        }
                        assert!(next > before, "round {round} of {shares:?} is empty");
                    }
                    assert_eq!(next as usize, layers);
                }
            }
        }
    }

    #[test]
    fn refuses_what_does_not_add_up() {
        assert_eq!(
            shares(30, None, &[10, 12, 9]).unwrap_err().to_string(),
            "--split 10,12,9: expected numbers that sum to the model's 30 layers, found a sum of 31"
        );
        assert_eq!(
            shares(30, Some(2), &[10, 12, 8]).unwrap_err().to_string(),
            "--split 10,12,8: expected 2 numbers, one for each member, found 3"
        );
        assert_eq!(
            windows(&[2, 1], 3),
            Err(SplitError::EmptyRound { rounds: 3, most: 2 })
        );
    }
}
