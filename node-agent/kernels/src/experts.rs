//! Mixtures of experts: which experts a row of activations goes to, with which weights, and the sum of what they make of it.
//! Decides the rule for ties, and the order of the sum. The products are those of `matmul_rows`.

use super::numerics::exp;
use super::per_level;
use super::shared_slice::SharedSlice;
use super::thread_pool::ThreadPool;

/// How the router's logits become scores, and scores become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Scores are the softmax over all experts.
    Softmax,
    /// Scores are the sigmoid of each logit.
    Sigmoid,
    /// Scores are the logits; weights are the softmax over those that were chosen.
    SoftmaxOfChosen,
}

/// Experts in groups of equal size (two or more), by their numbers. A row chooses `used` of `count` groups by the sum of the two best scores
/// of each (with their bias), and its experts among those of these groups. Of equal groups, the first counts as better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    pub count: usize,
    pub used: usize,
}

/// How a layer's router chooses.
#[derive(Clone, Copy, Debug)]
pub struct Routing<'a> {
    /// Experts to choose from; one logit for each.
    pub experts: usize,
    /// How many a row goes to: from 1 to `experts`.
    pub used: usize,
    /// `None`: a row chooses among all.
    pub groups: Option<ExpertGroups>,
    pub gating: Gating,
    /// Added to the scores of all experts when they are chosen, and not to their weights (DeepSeek-V3, 2.1.2).
    pub selection_bias: Option<&'a [f32]>,
    /// Whether the weights of a row are divided by their sum.
    pub normalized: bool,
    /// What weights are multiplied by at last.
    pub scale: f32,
}

/// An expert that a row goes to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertChoice {
    pub expert: u32,
    pub weight: f32,
}

/// The least sum of weights that they are divided by: the smallest positive normal number in half precision, as in llama.cpp.
const LEAST_SUM: f32 = 6.103_515_6e-5;

/// Rows in a piece of work.
const PIECE_ROWS: usize = 16;

/// Chooses for each row of `logits` (rows of `routing.experts`) the experts with the highest scores, the best first, into `choices` (rows
/// of `routing.used`). Of experts with equal scores, the one with the lower number comes first. The bits are the same at every level.
///
/// # Panics
/// When lengths do not fit, or more experts are used than there are, in the groups that are used.
pub fn route(
    pool: &ThreadPool,
    routing: &Routing<'_>,
    logits: &[f32],
    choices: &mut [ExpertChoice],
) {
    let &Routing { experts, used, .. } = routing;
    assert!(1 <= used && used <= experts, "{used} of {experts} experts");
    if let Some(groups) = routing.groups {
        let ExpertGroups { count, used: few } = groups;
        assert!(
            1 <= few && few <= count && experts.is_multiple_of(count) && 2 * count <= experts,
            "{few} of {count} groups of {experts} experts"
        );
        assert!(used <= experts / count * few, "{used} in {few} groups");
    }
    let rows = logits.len() / experts;
    assert_eq!(logits.len(), rows * experts, "whole rows of logits");
    assert_eq!(choices.len(), rows * used, "places for the choices");
    assert!(
        routing
            .selection_bias
            .is_none_or(|bias| bias.len() == experts),
        "a bias for each expert"
    );
    let choices = SharedSlice::new(choices);
    pool.run(rows.div_ceil(PIECE_ROWS), &|piece| {
        let (first, last) = (piece * PIECE_ROWS, ((piece + 1) * PIECE_ROWS).min(rows));
        // SAFETY: pieces are disjoint ranges of rows.
        let choices = unsafe { choices.part(first * used..last * used) };
        let logits = &logits[first * experts..last * experts];
        let mut chooser = Chooser::default();
        for (logits, choices) in logits
            .chunks_exact(experts)
            .zip(choices.chunks_exact_mut(used))
        {
            chooser.choose(routing, logits, choices);
        }
    });
}

/// Room for one row.
#[derive(Default)]
struct Chooser {
    scores: Vec<f32>,
    /// What experts are chosen by.
    keys: Vec<f32>,
    /// Sums of groups' keys, with the number of the group.
    groups: Vec<(f32, u32)>,
    order: Vec<u32>,
}

impl Chooser {
    fn choose(&mut self, routing: &Routing<'_>, logits: &[f32], choices: &mut [ExpertChoice]) {
        self.scores.clear();
        self.scores.extend_from_slice(logits);
        match routing.gating {
            Gating::Softmax => softmax(&mut self.scores),
            Gating::Sigmoid => self.scores.iter_mut().for_each(|x| *x = sigmoid(*x)),
            Gating::SoftmaxOfChosen => {}
        }
        self.keys.clear();
        self.keys.extend_from_slice(&self.scores);
        if let Some(bias) = routing.selection_bias {
            let keys = self.keys.iter_mut().zip(bias);
            keys.for_each(|(key, bias)| *key += bias);
        }
        self.order.clear();
        match routing.groups {
            None => self.order.extend(0..routing.experts as u32),
            Some(groups) => self.choose_groups(groups),
        }
        let keys = &self.keys;
        // A total order, whatever the numbers are.
        let better = |a: &u32, b: &u32| {
            let by_key = keys[*b as usize].total_cmp(&keys[*a as usize]);
            by_key.then(a.cmp(b))
        };
        let (best, last, _) = self.order.select_nth_unstable_by(choices.len() - 1, better);
        best.sort_unstable_by(better);
        let chosen = best.iter().chain([&*last]);
        for (choice, &expert) in choices.iter_mut().zip(chosen) {
            *choice = ExpertChoice {
                expert,
                weight: self.scores[expert as usize],
            };
        }
        weigh(routing, choices);
    }
}

impl Chooser {
    /// Puts the experts of the best groups in order.
    fn choose_groups(&mut self, groups: ExpertGroups) {
        let size = self.keys.len() / groups.count;
        self.groups.clear();
        let sums = self.keys.chunks_exact(size).map(|keys| {
            let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for &key in keys {
                if key.total_cmp(&best).is_gt() {
                    (best, second) = (key, best);
                } else if key.total_cmp(&second).is_gt() {
                    second = key;
                }
            }
            best + second
        });
        self.groups.extend(sums.zip(0..));
        self.groups
            .sort_unstable_by(|(a, first), (b, second)| b.total_cmp(a).then(first.cmp(second)));
        for &(_, group) in &self.groups[..groups.used] {
            let first = group * size as u32;
            self.order.extend(first..first + size as u32);
        }
    }
}

/// From the scores of what was chosen to weights.
fn weigh(routing: &Routing<'_>, choices: &mut [ExpertChoice]) {
    if routing.gating == Gating::SoftmaxOfChosen {
        // The first is the largest, but for a selection bias.
        let largest = choices.iter().map(|choice| choice.weight);
        let largest = largest.fold(f32::NEG_INFINITY, f32::max);
        for choice in &mut *choices {
            choice.weight = exp(choice.weight - largest);
        }
        let sum = sum(choices);
        choices.iter_mut().for_each(|choice| choice.weight /= sum);
    }
    if routing.normalized {
        let sum = sum(choices).max(LEAST_SUM);
        choices.iter_mut().for_each(|choice| choice.weight /= sum);
    }
    if routing.scale != 1.0 {
        let scale = routing.scale;
        choices.iter_mut().for_each(|choice| choice.weight *= scale);
    }
}

fn sum(choices: &[ExpertChoice]) -> f32 {
    choices.iter().map(|choice| choice.weight).sum()
}

fn softmax(numbers: &mut [f32]) {
    let largest = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0_f64;
    for number in &mut *numbers {
        *number = exp(*number - largest);
        sum += f64::from(*number);
    }
    let inverse = (1.0 / sum) as f32;
    numbers.iter_mut().for_each(|number| *number *= inverse);
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp((-x).min(88.0)))
}

/// Multiplies each row of `x` (rows of `cols`) by the sigmoid of its number in `logits`.
///
/// # Panics
/// When there are more rows than logits, or fewer.
pub fn scale_rows(pool: &ThreadPool, x: &mut [f32], cols: usize, logits: &[f32]) {
    assert_eq!(x.len(), logits.len() * cols, "a logit for each row");
    let x = SharedSlice::new(x);
    pool.run(logits.len().div_ceil(PIECE_ROWS), &|piece| {
        let first = piece * PIECE_ROWS;
        let last = (first + PIECE_ROWS).min(logits.len());
        for (row, logit) in (first..last).zip(&logits[first..last]) {
            let factor = sigmoid(*logit);
            // SAFETY: every row is in one piece.
            let row = unsafe { x.part(row * cols..(row + 1) * cols) };
            row.iter_mut().for_each(|number| *number *= factor);
        }
    });
}

/// The rows of `x` (rows of `cols`) that `rows` names, one after the other, into `out`.
///
/// # Panics
/// When `x` has no such row, or `out` another length.
pub fn gather(pool: &ThreadPool, x: &[f32], cols: usize, rows: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), rows.len() * cols, "places for the rows");
    let out = SharedSlice::new(out);
    pool.run(rows.len().div_ceil(PIECE_ROWS), &|piece| {
        let first = piece * PIECE_ROWS;
        let last = (first + PIECE_ROWS).min(rows.len());
        for (to, &from) in (first..last).zip(&rows[first..last]) {
            // SAFETY: every row of `out` is in one piece.
            let to = unsafe { out.part(to * cols..(to + 1) * cols) };
            to.copy_from_slice(&x[from as usize * cols..][..cols]);
        }
    });
}

/// For each row of `out` (rows of `cols`), the weighted sum of what its experts made of it. The row's `used` choices say the weights; row
/// `places[i]` of `parts` (rows of `cols`) is what the expert of choice `i` made. Summed in the order of the choices.
///
/// # Panics
/// When lengths do not fit, or `parts` has no such row.
pub fn weighted_sum(
    pool: &ThreadPool,
    parts: &[f32],
    cols: usize,
    choices: &[ExpertChoice],
    places: &[u32],
    used: usize,
    out: &mut [f32],
) {
    let rows = out.len() / cols;
    assert_eq!(out.len(), rows * cols, "whole rows of {cols}");
    assert_eq!(choices.len(), rows * used, "{used} choices for each row");
    assert_eq!(places.len(), choices.len(), "a place for each choice");
    let out = SharedSlice::new(out);
    // Of a single row, threads take columns.
    let (piece_rows, piece_cols) = match rows {
        1 => (1, 1024),
        _ => (PIECE_ROWS, cols),
    };
    let across = cols.div_ceil(piece_cols);
    pool.run(rows.div_ceil(piece_rows) * across, &|piece| {
        let columns =
            piece % across * piece_cols..(piece % across * piece_cols + piece_cols).min(cols);
        let first = piece / across * piece_rows;
        for row in first..(first + piece_rows).min(rows) {
            // SAFETY: every place of `out` is in one piece.
            let out = unsafe { out.part(row * cols + columns.start..row * cols + columns.end) };
            let own = row * used..(row + 1) * used;
            for (number, (choice, &place)) in
                choices[own.clone()].iter().zip(&places[own]).enumerate()
            {
                let part = &parts[place as usize * cols..][columns.clone()];
                match number {
                    0 => set_scaled(pool.level(), out, part, choice.weight),
                    _ => add_scaled(pool.level(), out, part, choice.weight),
                }
            }
        }
    });
}

per_level! {
    fn set_scaled(level, out: &mut [f32], x: &[f32], factor: f32) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * factor;
        }
    }
}

per_level! {
    fn add_scaled(level, out: &mut [f32], x: &[f32], factor: f32) {
        for (out, x) in out.iter_mut().zip(x) {
            *out += x * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa_level::IsaLevel;
    use super::*;

    const PLAIN: Routing<'static> = Routing {
        experts: 8,
        used: 3,
        groups: None,
        gating: Gating::Softmax,
        selection_bias: None,
        normalized: false,
        scale: 1.0,
    };

    fn pools() -> Vec<ThreadPool> {
        let levels = IsaLevel::available().into_iter();
        levels
            .flat_map(|level| [1, 3].map(|threads| ThreadPool::new(threads, level).unwrap()))
            .collect()
    }

    fn routed(routing: &Routing<'_>, logits: &[f32]) -> Vec<ExpertChoice> {
        let rows = logits.len() / routing.experts;
        let mut found: Option<Vec<ExpertChoice>> = None;
        for pool in pools() {
            let mut choices = vec![ExpertChoice::default(); rows * routing.used];
            route(&pool, routing, logits, &mut choices);
            assert_eq!(*found.get_or_insert_with(|| choices.clone()), choices);
        }
        found.unwrap()
    }

    fn experts(choices: &[ExpertChoice]) -> Vec<u32> {
        choices.iter().map(|choice| choice.expert).collect()
    }

    fn near(choices: &[ExpertChoice], expected: &[f64]) {
        assert_eq!(choices.len(), expected.len());
        for (choice, expected) in choices.iter().zip(expected) {
            let difference = (f64::from(choice.weight) - expected).abs();
            assert!(difference < 1e-6, "{choice:?} for {expected}");
        }
    }

    const LOGITS: [f32; 8] = [0.5, -1.0, 2.0, 0.25, 2.5, -3.0, 1.0, 0.0];

    #[test]
    fn weights_are_the_formulas() {
        let e = |x: f32| f64::from(x).exp();
        let all: f64 = LOGITS.iter().map(|x| e(*x)).sum();
        let some = e(2.5) + e(2.0) + e(1.0);
        let best = [2.5, 2.0, 1.0];
        let of = |gating, normalized, scale| {
            let choices = routed(
                &Routing {
                    gating,
                    normalized,
                    scale,
                    ..PLAIN
                },
                &LOGITS,
            );
            assert_eq!(experts(&choices), [4, 2, 6]);
            choices
        };
        near(&of(Gating::Softmax, false, 1.0), &best.map(|x| e(x) / all));
        near(
            &of(Gating::Softmax, true, 2.5),
            &best.map(|x| 2.5 * e(x) / some),
        );
        near(
            &of(Gating::SoftmaxOfChosen, false, 1.0),
            &best.map(|x| e(x) / some),
        );
        let sigmoid = |x: f32| 1.0 / (1.0 + e(-x));
        near(&of(Gating::Sigmoid, false, 1.0), &best.map(sigmoid));
        let sum: f64 = best.map(sigmoid).iter().sum();
        near(
            &of(Gating::Sigmoid, true, 1.0),
            &best.map(|x| sigmoid(x) / sum),
        );
    }

    #[test]
    fn of_equal_scores_the_lower_expert_is_chosen() {
        let equal = routed(&PLAIN, &[1.5; 8]);
        assert_eq!(experts(&equal), [0, 1, 2]);
        near(&equal, &[0.125; 3]);
        let two = routed(&PLAIN, &[0.0, 7.0, 3.0, 7.0, 3.0, 3.0, 0.0, 7.5]);
        assert_eq!(experts(&two), [7, 1, 3]);
        // Beyond a softmax's range, all scores are zero.
        let far = routed(&PLAIN, &[-1e3, -1e3, -1e3, -1e3, 0.0, -500.0, -1e3, -1e3]);
        assert_eq!(experts(&far), [4, 0, 1]);
    }

    #[test]
    fn a_selection_bias_chooses_and_does_not_weigh() {
        let bias = [0.0, 2.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0];
        let routing = Routing {
            gating: Gating::Sigmoid,
            selection_bias: Some(&bias),
            ..PLAIN
        };
        let choices = routed(&routing, &LOGITS);
        assert_eq!(experts(&choices), [5, 1, 4]);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        near(&choices, &[-3.0, -1.0, 2.5].map(sigmoid));
    }

    /// Four groups of two: by sums, 4 and 5 together are behind 0 and 1, though the best expert is 4.
    #[test]
    fn groups_are_chosen_by_their_two_best_and_experts_within_them() {
        let logits = [2.0, 1.5, 1.0, 0.5, 3.0, -9.0, 0.5, 1.0];
        let routing = Routing {
            groups: Some(ExpertGroups { count: 4, used: 2 }),
            gating: Gating::SoftmaxOfChosen,
            ..PLAIN
        };
        // Of equal groups, the first.
        assert_eq!(experts(&routed(&routing, &logits)), [0, 1, 2]);
        let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 20.0, 0.0, 0.0];
        let biased = Routing {
            selection_bias: Some(&bias),
            ..routing
        };
        assert_eq!(experts(&routed(&biased, &logits)), [5, 4, 0]);
        let halves = Routing {
            groups: Some(ExpertGroups { count: 2, used: 1 }),
            ..routing
        };
        assert_eq!(experts(&routed(&halves, &logits)), [4, 7, 6]);
        let all = Routing {
            groups: Some(ExpertGroups { count: 2, used: 2 }),
            ..routing
        };
        assert_eq!(experts(&routed(&all, &logits)), [4, 0, 1]);
    }

    #[test]
    fn logits_that_are_no_numbers_choose_experts_that_exist() {
        let mut rows = vec![f32::NAN; 8 * 40];
        rows[8..16].copy_from_slice(&[f32::INFINITY; 8]);
        rows[16..24].copy_from_slice(&[f32::NEG_INFINITY; 8]);
        for gating in [Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfChosen] {
            let pool = ThreadPool::new(2, IsaLevel::SCALAR).unwrap();
            let mut choices = vec![ExpertChoice::default(); 40 * 3];
            for groups in [None, Some(ExpertGroups { count: 4, used: 2 })] {
                let routing = Routing {
                    gating,
                    groups,
                    ..PLAIN
                };
                route(&pool, &routing, &rows, &mut choices);
                for row in choices.chunks(3) {
                    let mut found = experts(row);
                    found.sort_unstable();
                    found.dedup();
                    assert!(found.len() == 3 && found[2] < 8, "{row:?}");
                }
            }
        }
    }

    #[test]
    fn sums_are_weighted_and_ordered_by_choice() {
        for (rows, cols) in [(1, 2500), (1, 7), (37, 96)] {
            let parts: Vec<f32> = (0..rows * 2 * cols).map(|i| (i as f32).sin()).collect();
            let choices: Vec<ExpertChoice> = (0..rows * 2)
                .map(|i| ExpertChoice {
                    expert: 0,
                    weight: 0.1 + i as f32,
                })
                .collect();
            // The last part is the first choice's.
            let places: Vec<u32> = (0..rows as u32 * 2).rev().collect();
            for pool in pools() {
                let mut out = vec![f32::NAN; rows * cols];
                weighted_sum(&pool, &parts, cols, &choices, &places, 2, &mut out);
                for (at, out) in out.iter().enumerate() {
                    let (row, col) = (at / cols, at % cols);
                    let part = |i: usize| parts[places[i] as usize * cols + col];
                    let (one, two) = (2 * row, 2 * row + 1);
                    let sum = part(one) * choices[one].weight + part(two) * choices[two].weight;
                    assert_eq!(*out, sum, "{rows} x {cols} at {at}");
                }
            }
        }
    }

    #[test]
    fn rows_are_gathered_and_scaled_each_by_itself() {
        let x: Vec<f32> = (0..40 * 5).map(|i| i as f32).collect();
        let rows: Vec<u32> = (0..55).map(|i| i * 7 % 40).collect();
        let logits: Vec<f32> = (0..55).map(|i| i as f32 / 4.0 - 7.0).collect();
        for pool in pools() {
            let mut out = vec![0.0; 55 * 5];
            gather(&pool, &x, 5, &rows, &mut out);
            for (out, row) in out.chunks(5).zip(&rows) {
                assert_eq!(out, &x[*row as usize * 5..][..5]);
            }
            scale_rows(&pool, &mut out, 5, &logits);
            for ((out, row), logit) in out.chunks(5).zip(&rows).zip(&logits) {
                for (col, out) in out.iter().enumerate() {
                    let exact =
                        f64::from(x[*row as usize * 5 + col]) / (1.0 + (-f64::from(*logit)).exp());
                    assert!((f64::from(*out) - exact).abs() < 1e-6 * exact + 1e-9);
                }
            }
        }
    }
}
