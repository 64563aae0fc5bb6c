//! One mixed-integer program per number of rounds: which devices take part, with how many layers on CPU and GPU, who is
//! rank 0, and in which order they stand where the links differ. Solved by HiGHS to a proven bound.
//!
//! It states the same latency as [`crate::latency`], with these variables. The letters are those of the paper and of `latency`.
//!
//! | letter | variable | of |
//! | --- | --- | --- |
//! | u, r | `takes_part`, `is_rank0` | each device |
//! | x, n, g | `cpu_layers`, `gpu_layers`, `uses_gpu` | each device |
//! | h, d | `gpu_head`, `gpu_draft`: rank 0's output head, and its draft model, are on its GPU | each device |
//! | s, v | `streams`, `streamed`: chunks of a prompt are on its GPU through so many of the layers on the CPU | each device |
//! | o, B, A | `overflow`, `buffer`, `ahead` (read ahead in a round) | each device |
//! | z, e | `stall` of a round, `chunk_stall` | each device |
//! | y | `read_again` (macOS with Metal) | each device |
//! | C, P | `cycle`, the time of a round; `slowest`, the slowest stage of a prompt | the ring |
//!
//! How many layers a device has is decided here, and not which. So where layers differ in their KV caches, each counts as the mean, and a
//! reserve is kept beside ([`Program::kv_windows`]).
//!
//! Bytes are in units of 64 MiB and seconds in milliseconds here, so that numbers are of one order.
//!
//! A ring of one member has no hops; such rings are enumerated elsewhere (`search`), so here at least two take part.

mod formulation;

use highs::{Col, HighsModelStatus, Sense};

use crate::input::PlanningInput;
use crate::latency::LayerShare;
pub use formulation::TIE_SECONDS;
use formulation::{Columns, formulate};

/// What is to be solved.
pub struct Program<'a> {
    pub input: &'a PlanningInput,
    pub rounds: usize,
    /// Of a member's windows, for how many there is a reserve of memory, in case their layers' KV caches are the largest. With one for each round,
    /// all plans fit; with fewer, less memory is left unused.
    pub kv_windows: usize,
    /// Only solutions that take fewer seconds are of interest.
    pub below_seconds: f64,
    /// Continuous variables only: a bound in a fraction of the time.
    pub relaxed: bool,
    /// Whether the order is part of the program, because links differ; else each device's hop costs what its cheapest link does.
    pub ordered: bool,
    /// How much worse than the optimum the solution may be, as a share of it.
    pub relative_gap: f64,
    pub time_limit_seconds: f64,
}

pub struct Solution {
    /// Devices that take part; rank 0 first, then in ring order where the order was part of the program.
    pub ring: Vec<usize>,
    pub shares: Vec<LayerShare>,
    /// No solution of this program takes fewer seconds.
    pub bound_seconds: f64,
}

pub enum SolverOutcome {
    Solved(Solution),
    /// Of a relaxed program: the bound alone.
    Bound(f64),
    /// It is proven that no solution is below `below_seconds`, or that there is none.
    Nothing,
    /// The time was over before there was a solution, or the solver failed: nothing is proven.
    Unknown,
}

const MILLISECONDS: f64 = 1e3;
const UNIT_BYTES: f64 = (64 << 20) as f64;

pub fn solve(program: &Program<'_>) -> SolverOutcome {
    let mut cuts: Vec<Vec<usize>> = Vec::new();
    loop {
        let (problem, columns) = formulate(program, &cuts);
        let Ok(mut model) = problem.try_optimise(Sense::Minimise) else {
            return SolverOutcome::Unknown;
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
            // These look for a good answer, for as long as all else takes. There is one, and only better ones are of interest.
            model.set_option("mip_heuristic_run_feasibility_jump", false);
            model.set_option("mip_heuristic_run_rens", false);
        }
        let Ok(solved) = model.try_solve() else {
            return SolverOutcome::Unknown;
        };
        let usable = match solved.status() {
            HighsModelStatus::Optimal => true,
            HighsModelStatus::ReachedTimeLimit if !program.relaxed => {
                solved.primal_solution_status() == highs::HighsSolutionStatus::Feasible
            }
            _ => false,
        };
        if !usable {
            return match solved.status() {
                // No program is unbounded: what has a cost below 0 is at most 1.
                HighsModelStatus::Infeasible
                | HighsModelStatus::UnboundedOrInfeasible
                | HighsModelStatus::ObjectiveBound => SolverOutcome::Nothing,
                _ => SolverOutcome::Unknown,
            };
        }
        if program.relaxed {
            return SolverOutcome::Bound(solved.objective_value() / MILLISECONDS);
        }
        let bound = solved
            .double_info_value(c"mip_dual_bound")
            .unwrap_or(f64::NEG_INFINITY);
        let values = solved.get_solution();
        let read = Answer {
            values: values.columns(),
            columns: &columns,
        };
        match read.ring() {
            Ok(ring) => {
                return SolverOutcome::Solved(Solution {
                    ring,
                    shares: read.shares(),
                    bound_seconds: bound / MILLISECONDS,
                });
            }
            Err(cycle) => cuts.push(cycle),
        }
    }
}

struct Answer<'a> {
    values: &'a [f64],
    columns: &'a Columns,
}

impl Answer<'_> {
    fn is_set(&self, col: Col) -> bool {
        self.values[col.index()] > 0.5
    }

    fn count(&self, col: Col) -> usize {
        self.values[col.index()].round().max(0.0) as usize
    }

    fn shares(&self) -> Vec<LayerShare> {
        self.columns
            .cpu_layers
            .iter()
            .zip(&self.columns.gpu_layers)
            .map(|(&x, &n)| LayerShare {
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
