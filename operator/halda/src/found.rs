//! An assignment and what it takes: what every search compares.

use crate::input::PlanningInput;
use crate::latency::{Assignment, Latency, LayerShare, Violation, predict, request_seconds};
use crate::milp::TIE_SECONDS;

/// The best assignment that was found.
#[derive(Clone, Debug)]
pub struct Found {
    pub assignment: Assignment,
    pub latency: Latency,
    /// Seconds of a request.
    pub seconds: f64,
    /// No assignment takes fewer seconds, of those with a number of rounds that was tried. Where layers differ in their KV caches: of those
    /// that also have the reserve for them ([`crate::milp`]).
    pub bound_seconds: f64,
}

/// What `shares` in `ring` take; `None` when they are impossible.
pub fn evaluate(
    input: &PlanningInput,
    rounds: usize,
    ring: Vec<usize>,
    shares: Vec<LayerShare>,
) -> Option<Found> {
    let idle = |&index: &usize| shares[index].layers() == 0;
    if input.fewest > 1 && (ring.len() < input.fewest || ring.iter().any(idle)) {
        return None;
    }
    let assignment = Assignment {
        rounds,
        ring,
        shares,
    };
    let latency: Result<Latency, Violation> = predict(input, &assignment);
    let latency = latency.ok()?;
    let ties = TIE_SECONDS * assignment.ring.len() as f64;
    Some(Found {
        seconds: request_seconds(input, &latency) + ties,
        bound_seconds: f64::NEG_INFINITY,
        assignment,
        latency,
    })
}
