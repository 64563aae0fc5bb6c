//! One mixed-integer program per number of rounds: which devices take part, with how many layers on CPU and GPU, who is
//! rank 0, and in which order they stand where the links differ. Solved by HiGHS to a proven bound.
//!
//! It states the same latency as [`crate::latency`], with these variables per device: u takes part, r is rank 0, x and n
//! layers on CPU and GPU, g has GPU layers, o overflow, B read-ahead buffer, A bytes read ahead in a round, z stall of a
//! round, e stall of a chunk, y everything is read again (macOS with Metal); and C the time of a round, P the slowest stage of a prompt.
//! Bytes are in units of 64 MiB and seconds in milliseconds here, so that numbers are of one order.
//!
//! A ring of one member has no hops; such rings are enumerated elsewhere (`search`), so here at least two take part.

use std::ops::{RangeBounds, RangeInclusive};

use highs::{Col, HighsModelStatus, RowProblem, Sense};

use crate::input::{Device, MemoryRule, PlanningInput};
use crate::latency::{Share, chunks};

/// What is to be solved.
pub struct Program<'a> {
    pub input: &'a PlanningInput,
    pub rounds: usize,
    /// Only solutions that take fewer seconds are of interest.
    pub below_seconds: f64,
    /// Continuous variables only: a bound in a fraction of the time.
    pub relaxed: bool,
    /// Whether the order is part of the program, as links differ; else each hop costs a device its cheapest link.
    pub ordered: bool,
    /// Of the optimum, by how much the solution may be worse.
    pub relative_gap: f64,
    pub time_limit_seconds: f64,
}

pub struct Solution {
    /// Devices that take part; rank 0 first, then in ring order where the order was part of the program.
    pub ring: Vec<usize>,
    pub shares: Vec<Share>,
    /// No solution of this program takes fewer seconds.
    pub bound_seconds: f64,
}

pub enum Outcome {
    Solved(Solution),
    /// Of a relaxed program: the bound alone.
    Bound(f64),
    /// Nothing is below `below_seconds`, or possible at all.
    Nothing,
    /// The time was over before there was a solution.
    TimeOut,
}

const MILLISECONDS: f64 = 1e3;
const UNIT_BYTES: f64 = (64 << 20) as f64;

struct Columns {
    takes_part: Vec<Col>,
    is_rank0: Vec<Col>,
    cpu_layers: Vec<Col>,
    gpu_layers: Vec<Option<Col>>,
    /// `[from][to]`, where the order is part of the program.
    follows: Vec<Vec<Option<Col>>>,
}

pub fn solve(program: &Program<'_>) -> Outcome {
    let mut cuts: Vec<Vec<usize>> = Vec::new();
    loop {
        let (problem, columns) = build(program, &cuts);
        let Ok(mut model) = problem.try_optimise(Sense::Minimise) else {
            return Outcome::Nothing;
        };
        model.make_quiet();
        model.set_option("threads", 1);
        model.set_option("random_seed", 1);
        model.set_option("mip_rel_gap", program.relative_gap);
        model.set_option("mip_abs_gap", 1e-6);
        model.set_option("mip_feasibility_tolerance", 1e-7);
        model.set_option("time_limit", program.time_limit_seconds);
        if program.below_seconds.is_finite() && !program.relaxed {
            model.set_option("objective_bound", program.below_seconds * MILLISECONDS);
        }
        let Ok(solved) = model.try_solve() else {
            return Outcome::Nothing;
        };
        let usable = match solved.status() {
            HighsModelStatus::Optimal => true,
            HighsModelStatus::ReachedTimeLimit => {
                solved.primal_solution_status() == highs::HighsSolutionStatus::Feasible
            }
            _ => false,
        };
        if !usable {
            return match solved.status() {
                HighsModelStatus::ReachedTimeLimit => Outcome::TimeOut,
                _ => Outcome::Nothing,
            };
        }
        if program.relaxed {
            return Outcome::Bound(solved.objective_value() / MILLISECONDS);
        }
        let bound = solved
            .double_info_value(c"mip_dual_bound")
            .unwrap_or(f64::NEG_INFINITY);
        let values = solved.get_solution();
        let read = Reading {
            values: values.columns(),
            columns: &columns,
        };
        match read.ring() {
            Ok(ring) => {
                return Outcome::Solved(Solution {
                    ring,
                    shares: read.shares(),
                    bound_seconds: bound / MILLISECONDS,
                });
            }
            Err(cycle) => cuts.push(cycle),
        }
    }
}

/// `cuts`: devices that formed a ring of their own beside rank 0's in an earlier answer, and must not.
fn build(program: &Program<'_>, cuts: &[Vec<usize>]) -> (RowProblem, Columns) {
    let input = program.input;
    let model = &input.model;
    let workload = &input.workload;
    let (k, layers) = (program.rounds as f64, model.layers as f64);
    let chunk = workload.chunk_tokens as f64;
    let answer = workload.answer_tokens as f64;
    let chunks = chunks(input);
    let devices = input.devices.len();
    let mut rows = RowProblem::default();
    let whole = |rows: &mut RowProblem, cost, range| whole(program, rows, cost, range);
    let ms = MILLISECONDS;
    let units = 1.0 / UNIT_BYTES;

    // Time of a round: its rows below make it the sum of all members' work, stalls and hops.
    let cycle = rows.add_column(answer * k, 0.0..);
    let slowest = rows.add_column((chunks - 1.0).max(0.0), 0.0..);
    let mut columns = Columns {
        takes_part: Vec::new(),
        is_rank0: Vec::new(),
        cpu_layers: Vec::new(),
        gpu_layers: Vec::new(),
        follows: vec![vec![None; devices]; devices],
    };
    let mut cycle_terms = vec![(cycle, -1.0)];
    let mut stage_terms = Vec::new();
    let mut round_terms = Vec::new();
    let mut round_fillers = Vec::new();
    for (index, device) in input.devices.iter().enumerate() {
        let Device {
            name: _,
            required,
            memory_bytes,
            memory_rule,
            disk_bytes_per_second,
            overlap,
            cpu,
            head_seconds,
            gpu,
        } = device;
        // Of two plans that are equally fast, the one with fewer members.
        let least = f64::from(u8::from(*required));
        let u = whole(&mut rows, TIE_SECONDS * ms, least..=1.0);
        let may_lead = input.rank0.is_none_or(|rank0| rank0 == index);
        let r = whole(
            &mut rows,
            *head_seconds * ms,
            0.0..=f64::from(u8::from(may_lead)),
        );
        let x = whole(&mut rows, 0.0, 0.0..=layers);
        let n = gpu.as_ref().map(|_| whole(&mut rows, 0.0, 0.0..=layers));
        let g = gpu.as_ref().map(|_| whole(&mut rows, 0.0, 0.0..=1.0));
        row(&mut rows, ..=0.0, [(r, 1.0), (u, -1.0)]);
        let all_layers: Vec<(Col, f64)> =
            [(x, 1.0)].into_iter().chain(n.map(|n| (n, 1.0))).collect();
        row(
            &mut rows,
            ..=0.0,
            all_layers.iter().copied().chain([(u, -layers)]),
        );
        // Whoever is there computes something; rank 0 may be there for the output head alone.
        let own_layer = if *required { 0.0 } else { 1.0 };
        row(
            &mut rows,
            0.0..,
            all_layers
                .iter()
                .copied()
                .chain([(u, -1.0), (r, own_layer)]),
        );
        if let (Some(n), Some(g)) = (n, g) {
            row(&mut rows, ..=0.0, [(n, 1.0), (g, -layers)]);
        }

        // Work for a token, in ms; a k-th of it in each round.
        let mut busy = vec![(x, cpu.decode_seconds * ms), (r, *head_seconds * ms)];
        let mut stage = vec![(x, chunk * cpu.prefill_seconds * ms)];
        let mut in_memory = vec![(x, 1.0)];
        if let (Some(gpu), Some(n), Some(g)) = (gpu, n, g) {
            busy.push((n, gpu.layer.decode_seconds * ms));
            busy.push((g, k * gpu.copy_seconds * ms));
            stage.push((n, chunk * gpu.layer.prefill_seconds * ms));
            stage.push((g, k * gpu.copy_seconds * ms));
            match gpu.memory_bytes {
                None => in_memory.push((n, 1.0)),
                Some(available) => {
                    let layer = (model.layer_bytes + model.layer_kv_bytes) * units;
                    row(
                        &mut rows,
                        ..=0.0,
                        [(n, layer), (g, (model.buffer_bytes - available) * units)],
                    );
                }
            }
        }
        let terms = |of: &[(Col, f64)], factor: f64| -> Vec<(Col, f64)> {
            of.iter()
                .map(|&(col, value)| (col, value * factor))
                .collect()
        };

        // Memory: what cannot be read from disk fits; of the weights, o does not.
        let kv = terms(&in_memory, model.layer_kv_bytes * units);
        let weights = terms(&in_memory, model.layer_bytes * units);
        let room = (model.buffer_bytes - memory_bytes) * units;
        let need: Vec<(Col, f64)> = kv
            .iter()
            .chain(&weights)
            .copied()
            .chain([(r, model.head_bytes * units), (u, room)])
            .collect();
        match (disk_bytes_per_second, memory_rule) {
            (None, _) => {
                row(&mut rows, ..=0.0, need);
            }
            (Some(disk), MemoryRule::Overflow) => {
                let disk = disk * units / ms;
                let o = rows.add_column(0.0, 0.0..);
                let buffer = rows.add_column(0.0, 0.0..);
                let ahead = rows.add_column(0.0, 0.0..);
                let z = rows.add_column(0.0, 0.0..);
                row(&mut rows, ..=0.0, need.iter().copied().chain([(o, -1.0)]));
                row(
                    &mut rows,
                    ..=0.0,
                    kv.iter().copied().chain([(buffer, 1.0), (u, room)]),
                );
                row(&mut rows, ..=0.0, [(ahead, 1.0), (buffer, -1.0)]);
                // Ahead at most what the disk gives while the others work.
                let own = terms(&busy, disk / k);
                row(
                    &mut rows,
                    ..=0.0,
                    own.into_iter()
                        .chain([(ahead, 1.0), (cycle, -disk), (z, disk)]),
                );
                // What was not read ahead is waited for, but for what passes behind own work.
                let rest = [(ahead, 1.0), (o, -1.0 / k), (buffer, -1.0 / k)];
                let gained = terms(&busy, overlap.hidden * disk / k);
                row(
                    &mut rows,
                    0.0..,
                    rest.into_iter().chain([(z, disk)]).chain(gained),
                );
                let slowed = terms(&rest, overlap.slowdown);
                row(&mut rows, 0.0.., slowed.into_iter().chain([(z, disk)]));
                cycle_terms.push((z, 1.0));
                let chunk_stall = rows.add_column(0.0, 0.0..);
                let gained = terms(&stage, overlap.hidden);
                row(
                    &mut rows,
                    0.0..,
                    gained
                        .into_iter()
                        .chain([(chunk_stall, 1.0), (o, -1.0 / disk)]),
                );
                row(
                    &mut rows,
                    0.0..,
                    [(chunk_stall, 1.0), (o, -overlap.slowdown / disk)],
                );
                stage.push((chunk_stall, 1.0));
            }
            (Some(disk), MemoryRule::AllOrNothing) => {
                let disk = disk * units / ms;
                let y = whole(&mut rows, 0.0, 0.0..=1.0);
                let o = rows.add_column(0.0, 0.0..);
                // With everything on one device, this is what memory lacks at most.
                let most = (layers * (model.layer_bytes + model.layer_kv_bytes)
                    + model.head_bytes
                    + model.buffer_bytes)
                    * units;
                row(&mut rows, ..=0.0, need.iter().copied().chain([(y, -most)]));
                row(&mut rows, ..=0.0, kv.iter().copied().chain([(u, room)]));
                row(
                    &mut rows,
                    ..=most,
                    weights.iter().copied().chain([
                        (r, model.head_bytes * units),
                        (o, -1.0),
                        (y, most),
                    ]),
                );
                cycle_terms.push((o, 1.0 / (k * disk)));
                stage.push((o, 1.0 / disk));
            }
        }
        cycle_terms.extend(terms(&busy, 1.0 / k));

        let cheapest = |seconds: fn(&crate::input::Hop) -> f64| {
            let others = (0..devices).filter(|&other| other != index);
            others
                .map(|other| seconds(&input.hops[index][other]))
                .fold(f64::INFINITY, f64::min)
        };
        if !program.ordered {
            cycle_terms.push((u, cheapest(|hop| hop.decode_seconds) * ms));
            stage.push((u, k * cheapest(|hop| hop.chunk_seconds) * ms));
        }
        if k * devices as f64 > layers {
            let fills_rounds = whole(&mut rows, 0.0, 0.0..=1.0);
            row(
                &mut rows,
                0.0..,
                all_layers.iter().copied().chain([(fills_rounds, -k)]),
            );
            round_fillers.push((fills_rounds, 1.0));
        }
        stage_terms.push(stage);
        round_terms.extend(all_layers);
        columns.takes_part.push(u);
        columns.is_rank0.push(r);
        columns.cpu_layers.push(x);
        columns.gpu_layers.push(n);
    }
    // No round may be empty: somebody has a layer for each.
    if !round_fillers.is_empty() {
        row(&mut rows, 1.0.., round_fillers);
    }
    if program.ordered {
        order(
            program,
            &mut rows,
            &mut columns,
            &mut cycle_terms,
            &mut stage_terms,
            cuts,
        );
    }
    row(&mut rows, layers..=layers, round_terms);
    row(
        &mut rows,
        1.0..=1.0,
        columns.is_rank0.iter().map(|&r| (r, 1.0)),
    );
    row(
        &mut rows,
        2.0..,
        columns.takes_part.iter().map(|&u| (u, 1.0)),
    );
    row(&mut rows, 0.0..=0.0, cycle_terms);
    // The first chunk takes all stages, every further one the slowest.
    let first = rows.add_column(1.0, 0.0..);
    for stage in &stage_terms {
        row(
            &mut rows,
            ..=0.0,
            stage.iter().copied().chain([(slowest, -1.0)]),
        );
    }
    row(
        &mut rows,
        0.0..=0.0,
        merged(stage_terms.into_iter().flatten())
            .into_iter()
            .chain([(first, -1.0)]),
    );
    (rows, columns)
}

/// Who follows whom: every device that takes part has one successor and one predecessor.
fn order(
    program: &Program<'_>,
    rows: &mut RowProblem,
    columns: &mut Columns,
    cycle_terms: &mut Vec<(Col, f64)>,
    stage_terms: &mut [Vec<(Col, f64)>],
    cuts: &[Vec<usize>],
) {
    let input = program.input;
    let devices = input.devices.len();
    let k = program.rounds as f64;
    for (from, stage) in stage_terms.iter_mut().enumerate() {
        for to in (0..devices).filter(|&to| to != from) {
            let hop = input.hops[from][to];
            let follows = whole(program, rows, 0.0, 0.0..=1.0);
            cycle_terms.push((follows, hop.decode_seconds * MILLISECONDS));
            stage.push((follows, k * hop.chunk_seconds * MILLISECONDS));
            columns.follows[from][to] = Some(follows);
        }
    }
    for device in 0..devices {
        let u = columns.takes_part[device];
        let out = columns.follows[device]
            .iter()
            .flatten()
            .map(|&col| (col, 1.0));
        row(rows, 0.0..=0.0, out.chain([(u, -1.0)]));
        let into = columns
            .follows
            .iter()
            .filter_map(|from| from[device])
            .map(|col| (col, 1.0));
        row(rows, 0.0..=0.0, into.chain([(u, -1.0)]));
    }
    for cut in cuts {
        let within = cut.iter().flat_map(|&from| {
            cut.iter().filter_map({
                let columns = &*columns;
                move |&to| columns.follows[from][to].map(|col| (col, 1.0))
            })
        });
        row(rows, ..=cut.len() as f64 - 1.0, within.collect::<Vec<_>>());
    }
}

/// A column for a whole number, or any number where the program is relaxed.
fn whole(
    program: &Program<'_>,
    rows: &mut RowProblem,
    cost: f64,
    range: RangeInclusive<f64>,
) -> Col {
    match program.relaxed {
        true => rows.add_column(cost, range),
        false => rows.add_integer_column(cost, range),
    }
}

fn row(
    rows: &mut RowProblem,
    bounds: impl RangeBounds<f64>,
    terms: impl IntoIterator<Item = (Col, f64)>,
) {
    rows.add_row(bounds, merged(terms));
}

/// HiGHS refuses a row that names a column twice.
fn merged(terms: impl IntoIterator<Item = (Col, f64)>) -> Vec<(Col, f64)> {
    let mut sums: Vec<(Col, f64)> = terms.into_iter().collect();
    sums.sort_by_key(|(col, _)| col.index());
    sums.dedup_by(|next, kept| {
        let same = next.0.index() == kept.0.index();
        if same {
            kept.1 += next.1;
        }
        same
    });
    sums
}

/// What a member costs beside its time: less than any difference that could be measured.
pub const TIE_SECONDS: f64 = 1e-6;

struct Reading<'a> {
    values: &'a [f64],
    columns: &'a Columns,
}

impl Reading<'_> {
    fn is_set(&self, col: Col) -> bool {
        self.values[col.index()] > 0.5
    }

    fn count(&self, col: Col) -> usize {
        self.values[col.index()].round().max(0.0) as usize
    }

    fn shares(&self) -> Vec<Share> {
        self.columns
            .cpu_layers
            .iter()
            .zip(&self.columns.gpu_layers)
            .map(|(&x, &n)| Share {
                cpu_layers: self.count(x),
                gpu_layers: n.map_or(0, |n| self.count(n)),
            })
            .collect()
    }

    /// The ring from rank 0 on, or the devices of a ring beside it.
    fn ring(&self) -> Result<Vec<usize>, Vec<usize>> {
        let devices = self.columns.takes_part.len();
        let takes_part = |device: usize| self.is_set(self.columns.takes_part[device]);
        let rank0 = (0..devices)
            .find(|&device| self.is_set(self.columns.is_rank0[device]))
            .unwrap_or(0);
        let successor = |from: usize| {
            (0..devices)
                .find(|&to| self.columns.follows[from][to].is_some_and(|col| self.is_set(col)))
        };
        let walk = |start: usize| {
            let mut ring = vec![start];
            let mut at = start;
            while let Some(next) = successor(at).filter(|&next| next != start) {
                ring.push(next);
                at = next;
            }
            ring
        };
        let ring = walk(rank0);
        let rest: Vec<usize> = (0..devices)
            .filter(|device| takes_part(*device) && !ring.contains(device))
            .collect();
        match rest.first() {
            None => Ok(ring),
            // Without an order in the program, devices stand as they were given.
            Some(_)
                if self
                    .columns
                    .follows
                    .iter()
                    .flatten()
                    .flatten()
                    .next()
                    .is_none() =>
            {
                Ok(ring.into_iter().chain(rest).collect())
            }
            Some(&other) => Err(walk(other)),
        }
    }
}
