//! The feed-forward part made of experts, on the processor.
//!
//! Decides: the rows of a batch are gathered by expert, so that the weights of each expert are read once. Which experts come first (those
//! that are in memory) changes no bit: each row of each expert is a product of its own, and rows are summed in the order of their choices.

use std::ops::Range;

use prima_model::{FeedForward, Gating};

use super::activate::activate;
use super::compute::{Buffer, ExpertScratch};
use crate::error::EngineError;
use crate::kernels::{self, ExpertChoice, ExpertGroups, Routing, RowsProduct, ThreadPool};
use crate::layer::{Experts, Projection};
use crate::residency::{Residency, ResidentExpert};

/// The experts of one layer, in one pass.
pub struct ExpertStep<'a> {
    pub pool: &'a ThreadPool,
    pub residency: &'a Residency,
    pub spec: &'a FeedForward,
    pub experts: &'a Experts,
}

/// Which rows each expert gets.
#[derive(Debug, Default, PartialEq)]
struct Groups {
    /// Experts that have rows, by number, and their rows in the order of `rows`.
    experts: Vec<(u32, Range<usize>)>,
    /// The row of activations of each.
    rows: Vec<u32>,
    /// For each choice, its place in `rows`.
    places: Vec<u32>,
}

impl Groups {
    /// `choices` has `used` choices for each row, among `count` experts.
    fn of(choices: &[ExpertChoice], used: usize, count: usize) -> Groups {
        let mut next = vec![0_u32; count + 1];
        for choice in choices {
            next[choice.expert as usize + 1] += 1;
        }
        for expert in 0..count {
            next[expert + 1] += next[expert];
        }
        let ranges = (0..count).map(|expert| next[expert] as usize..next[expert + 1] as usize);
        let experts = (0..).zip(ranges).filter(|(_, range)| !range.is_empty());
        let experts = experts.collect();
        let mut rows = vec![0; choices.len()];
        let places = choices.iter().enumerate().map(|(index, choice)| {
            let place = &mut next[choice.expert as usize];
            rows[*place as usize] = (index / used) as u32;
            *place += 1;
            *place - 1
        });
        let places = places.collect();
        Groups {
            experts,
            rows,
            places,
        }
    }
}

impl ExpertStep<'_> {
    /// out = the sum of what the chosen experts make of `x` (`rows` rows, as wide as those of `out`). `inner` is room for two
    /// projections.
    pub fn run(
        &self,
        scratch: &mut ExpertScratch,
        inner: &mut [&mut Buffer; 2],
        x: &[f32],
        rows: usize,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let Some(spec) = self.spec.experts.as_ref().filter(|_| rows > 0) else {
            return Ok(());
        };
        let cols = x.len() / rows;
        let logits = scratch.logits.take(rows * spec.count);
        let router = &self.experts.router;
        self.residency
            .matmul(self.pool, x, rows, [(&router.weight, &mut *logits)])?;
        if let Some(bias) = &router.bias {
            kernels::add_bias(self.pool, logits, bias);
        }
        let routing = Routing {
            experts: spec.count,
            used: spec.used,
            groups: spec.groups.map(|groups| ExpertGroups {
                count: groups.count,
                used: groups.used,
            }),
            gating: match spec.gating {
                Gating::Softmax => kernels::Gating::Softmax,
                Gating::Sigmoid => kernels::Gating::Sigmoid,
                Gating::SoftmaxOfChosen => kernels::Gating::SoftmaxOfChosen,
            },
            selection_bias: self.experts.selection_bias.as_deref(),
            normalized: spec.normalized,
            scale: spec.scale,
        };
        scratch
            .choices
            .resize(rows * spec.used, ExpertChoice::default());
        kernels::route(self.pool, &routing, logits, &mut scratch.choices);
        let groups = Groups::of(&scratch.choices, spec.used, spec.count);

        let (x, x_rows) = match rows {
            1 => (x, 1),
            _ => {
                let gathered = scratch.gathered.take(groups.rows.len() * cols);
                kernels::gather(self.pool, x, cols, &groups.rows, gathered);
                (&*gathered, groups.rows.len())
            }
        };
        let made = scratch.made.take(groups.rows.len() * cols);
        let needed: Vec<u32> = groups.experts.iter().map(|(expert, _)| *expert).collect();
        self.residency.each_expert(self.experts, &needed, |ready| {
            let ranges: Vec<Range<usize>> = ready
                .iter()
                .map(|expert| groups.experts[expert.index].1.clone())
                .collect();
            self.multiply(ready, &ranges, (x, x_rows), inner, made);
        })?;
        let (choices, places) = (&scratch.choices, &groups.places);
        kernels::weighted_sum(self.pool, made, cols, choices, places, spec.used, out);
        Ok(())
    }

    /// Writes what the `ready` experts make of their rows to `made`. `ranges` are these rows there, and in `x`, unless it has only one: then
    /// it is everybody's.
    fn multiply(
        &self,
        ready: &[ResidentExpert<'_>],
        ranges: &[Range<usize>],
        (x, x_rows): (&[f32], usize),
        [gate, up]: &mut [&mut Buffer; 2],
        made: &mut [f32],
    ) {
        let Some(first) = ready.first() else {
            return;
        };
        let width = first.gate.rows();
        let hidden = first.down.rows();
        // Their rows, one after the other.
        let mut end = 0;
        let inner: Vec<Range<usize>> = ranges
            .iter()
            .map(|range| {
                let first = end;
                end += range.len();
                first..end
            })
            .collect();
        let (gate, up) = (gate.take(end * width), up.take(end * width));
        let gates = slices(gate, width, &inner);
        let ups = slices(up, width, &inner);
        let mut products = Vec::with_capacity(2 * ready.len());
        for (((expert, range), gate), up) in ready.iter().zip(ranges).zip(gates).zip(ups) {
            for (matrix, out) in [(expert.gate, gate), (expert.up, up)] {
                let rows = match x_rows {
                    1 => 0..1,
                    _ => range.clone(),
                };
                products.push(RowsProduct { matrix, rows, out });
            }
        }
        kernels::matmul_rows(self.pool, x, x_rows, &mut products);
        self.add_biases(&self.experts.gate, ready, slices(gate, width, &inner));
        self.add_biases(&self.experts.up, ready, slices(up, width, &inner));
        activate(self.pool, self.spec.activation, gate, up);

        let mut products: Vec<RowsProduct<'_>> = ready
            .iter()
            .zip(&inner)
            .zip(slices(made, hidden, ranges))
            .map(|((expert, rows), out)| RowsProduct {
                matrix: expert.down,
                rows: rows.clone(),
                out,
            })
            .collect();
        kernels::matmul_rows(self.pool, gate, end, &mut products);
        self.add_biases(&self.experts.down, ready, slices(made, hidden, ranges));
    }

    /// Adds to each expert's rows its part of the bias, if there is one.
    fn add_biases(
        &self,
        projection: &Projection,
        ready: &[ResidentExpert<'_>],
        rows: Vec<&mut [f32]>,
    ) {
        let Some(bias) = &projection.bias else {
            return;
        };
        let count = self.spec.experts.as_ref().map_or(1, |spec| spec.count);
        let width = bias.len() / count;
        for (expert, rows) in ready.iter().zip(rows) {
            let own = &bias[expert.number as usize * width..][..width];
            kernels::add_bias(self.pool, rows, own);
        }
    }
}

/// Of `buffer`, rows of `width`, the rows of each range. Ranges are in order and do not overlap.
fn slices<'a>(
    mut buffer: &'a mut [f32],
    width: usize,
    ranges: &[Range<usize>],
) -> Vec<&'a mut [f32]> {
    let mut first = 0;
    let slices = ranges.iter().map(|range| {
        let (_, rest) = std::mem::take(&mut buffer).split_at_mut((range.start - first) * width);
        let (own, rest) = rest.split_at_mut(range.len() * width);
        (buffer, first) = (rest, range.end);
        own
    });
    slices.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_grouped_by_expert_and_found_again() {
        let choice = |expert| ExpertChoice {
            expert,
            weight: 1.0,
        };
        // Three rows, two choices each.
        let choices = [4, 1, 0, 4, 4, 0].map(choice);
        let groups = Groups::of(&choices, 2, 6);
        assert_eq!(groups.experts, [(0, 0..2), (1, 2..3), (4, 3..6)]);
        assert_eq!(groups.rows, [1, 2, 0, 0, 1, 2]);
        assert_eq!(groups.places, [3, 2, 0, 4, 5, 1]);
        for (index, place) in groups.places.iter().enumerate() {
            assert_eq!(groups.rows[*place as usize], index as u32 / 2);
        }
    }

    #[test]
    fn slices_are_where_their_ranges_are() {
        let mut numbers: Vec<f32> = (0..20).map(|number| number as f32).collect();
        let found = slices(&mut numbers, 2, &[1..2, 2..2, 4..7]);
        assert_eq!(found[0], [2.0, 3.0]);
        assert!(found[1].is_empty());
        assert_eq!(found[2], [8.0, 9.0, 10.0, 11.0, 12.0, 13.0]);
    }
}
