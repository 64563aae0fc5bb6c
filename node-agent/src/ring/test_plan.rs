//! Plans for unit tests of the ring.

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlanSpec};

/// A valid plan that cuts `layers` at `cuts` (any order; missing cuts leave empty windows at the end).
pub fn plan(layers: usize, members: usize, rounds: usize, cuts: &[usize]) -> RingPlanSpec {
    let windows = members * rounds;
    let cuts = cuts.iter().take(windows - 1);
    let mut ends: Vec<i32> = cuts.map(|&cut| cut.min(layers) as i32).collect();
    ends.sort_unstable();
    ends.resize(windows, layers as i32);
    let addresses: Vec<_> = (0..members)
        .map(|rank| format!("127.0.0.1:{}", 7000 + rank))
        .collect();
    let model = PlannedModel::new("test", "test.gguf", 1, layers as i32);
    let plan = RingPlanSpec {
        generation: 7,
        max_concurrent_requests: 4,
        ..RingPlanSpec::cut(model, 256, &addresses, &ends)
    };
    plan.validate().unwrap();
    plan
}
